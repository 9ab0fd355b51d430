"""Formats of calls: found by the chat template or by mlx-lm's wrapper, and messages as templates take them."""

import json

import pytest

from mlx_zip.errors import GenerationError
from mlx_zip.server.answers.constraint import make_grammar_constraint
from mlx_zip.server.answers.splitter import Splitter
from mlx_zip.server.answers.tool_formats import messages_for_template, openai_tools, tool_format
from mlx_zip.server.answers.turn import Tool, ToolCall, Turn
from mlx_zip.server.fields import parse_body
from mlx_zip.server.openai.chat import Message
from mlx_zip.text.prompts import Chat
from support.tool_templates import KINDS, template, with_tools, wrapped

TOOLS = [Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}}, strict=True)]
WRITTEN = {
    "json_tools": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm47": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "pythonic": "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "gemma4": "<|tool_call>call:add{a:1}<tool_call|>",
    "minimax_m2": (
        '<minimax:tool_call><invoke name="add"><parameter name="a">1</parameter></invoke></minimax:tool_call>'
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_format_is_found_by_its_template(kind):
    assert tool_format(with_tools(kind)).kind == kind


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_read_by_the_parsers_of_mlx_lm(name):
    splitter = Splitter(wrapped(name), Turn(tools=TOOLS))
    deltas = [d for c in f"Yes. {WRITTEN[name]}" for d in splitter.feed(c)] + splitter.finish()
    assert "".join(d.text for d in deltas if not isinstance(d, ToolCall)) == "Yes."
    assert [(d.name, json.loads(d.arguments)) for d in deltas if isinstance(d, ToolCall)] == [("add", {"a": 1})]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_parser_of_mlx_lm_cannot_read_stays_text(name):
    form = tool_format(wrapped(name))
    text = f"{form.start} nothing of the kind {form.end}"
    splitter = Splitter(wrapped(name), Turn(tools=TOOLS))
    assert "".join(d.text for d in [*splitter.feed(text), *splitter.finish()]) == text


@pytest.mark.parametrize("name", ["pythonic", "kimi_k2", "gemma4", "glm47", "minimax_m2", "minicpm5"])
def test_other_formats_are_not_forced(name):
    with pytest.raises(GenerationError, match=f"format {name}, which cannot be forced"):
        make_grammar_constraint(wrapped(name), Turn(tools=TOOLS, tool_choice="required"))


def test_tools_reach_the_template_in_openais_shape():
    text = Chat([{"role": "user", "content": "hi"}], options={"tools": openai_tools(TOOLS)}).text(with_tools())
    function = {"name": "add", "description": "Adds.", "parameters": TOOLS[0].parameters}
    assert json.dumps({"type": "function", "function": function}) in text
    assert openai_tools([Tool("now")])[0]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_messages_have_content_and_arguments_are_maps():
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    given = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [parse_body(Message, given).as_template_message("messages.1")]
    tokenizer = with_tools()
    text = Chat([{"role": "user", "content": "hi"}, *messages_for_template(tokenizer, messages)]).text(tokenizer)
    assert f"<|im_start|>assistant\n{WRITTEN['json_tools']}<|im_end|>\n" in text


def test_mistrals_templates_get_ids_of_nine_letters_and_digits():
    call = {"id": "call_0123456789abcdef", "type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "2"},
        {"role": "tool", "tool_call_id": "abc123DEF", "content": "2"},
    ]
    said, result, other = messages_for_template(with_tools("list"), messages)
    assert said["tool_calls"][0]["id"] == result["tool_call_id"]
    assert len(result["tool_call_id"]) == 9
    assert result["tool_call_id"].isalnum()
    assert other["tool_call_id"] == "abc123DEF"
    assert messages[0]["tool_calls"][0]["id"] == call["id"]
    assert messages_for_template(with_tools("tags"), messages)[1]["tool_call_id"] == call["id"]


def test_a_template_without_tools_refuses_them():
    tokenizer = with_tools()
    tokenizer._tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(GenerationError, match="has no tools"):
        Splitter(tokenizer, Turn(tools=TOOLS))
    assert Splitter(tokenizer, Turn(tools=TOOLS, tool_choice="none")).feed("hi")


def test_several_templates_are_looked_at_by_name():
    tokenizer = with_tools()
    tokenizer._tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": template("tags")}
    assert tool_format(tokenizer).kind == "tags"
