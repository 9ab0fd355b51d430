"""Bodies of OpenAI's Responses: the turns that they ask for, and those that are refused."""

from dataclasses import replace

import pytest

from mlx_zip.server.answers.turn import Tool, Turn
from mlx_zip.server.fields import BodyError, parse_body
from mlx_zip.server.openai.responses_bodies import ResponseBody, make_response_turn

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
WEB = {"type": "web_search", "external_web_access": False}
USER = {"role": "user", "content": "Hi"}


def turn(**fields):
    body = parse_body(ResponseBody, {"model": "m", "input": "Hi"} | fields)
    return make_response_turn(body, body.items)


def test_text_is_a_message_of_the_user():
    assert turn() == Turn(messages=[USER], tools=[])


def test_instructions_and_messages_of_system_and_developer_become_one_system_message():
    items = [{"role": "developer", "content": "B"}, {"type": "message", "role": "system", "content": "C"}, USER]
    assert turn(input=items, instructions="A").messages == [{"role": "system", "content": "A\n\nB\n\nC"}, USER]


def test_what_the_model_did_in_one_go_is_one_message():
    items = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}],
        },
        CALL,
        CALL | {"call_id": "c2"},
        OUTPUT,
        OUTPUT | {"call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}} for name in ("c1", "c2")
    ]
    assert turn(input=items).messages == [
        USER,
        {"role": "assistant", "reasoning_content": "Hm.", "content": "I add.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
    ]


def test_two_messages_of_the_model_in_a_row_stay_two():
    items = [{"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B"}, USER]
    assert [message["content"] for message in turn(input=items).messages] == ["A", "B", "Hi"]


def test_an_output_may_answer_a_call_of_a_response_before():
    body = parse_body(ResponseBody, {"model": "m", "input": [OUTPUT]})
    assert make_response_turn(body, [USER | {"type": "message"}, CALL, *body.items], 2).messages[-1]["content"] == "3"


def test_options_reach_the_turn():
    got = turn(
        tools=[ADD | {"description": "Adds.", "strict": True}],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        max_output_tokens=5,
        temperature=1,
        top_p=0.5,
        top_logprobs=2,
        reasoning={"effort": "high", "summary": "auto"},
    )
    assert got == Turn(
        messages=[USER],
        tools=[Tool("add", "Adds.", {"type": "object"}, strict=True)],
        tool_choice="add",
        parallel_tool_calls=False,
        schema={"type": "object"},
        max_tokens=5,
        sampling={"temp": 1, "top_p": 0.5},
        logprobs=2,
        template_options={"enable_thinking": True, "reasoning_effort": "high"},
    )


def test_a_json_object_is_any_schema():
    assert turn(text={"format": {"type": "json_object"}}).schema == {}
    assert turn(text={"format": {"type": "text"}, "verbosity": "low"}).schema is None


def test_log_probabilities_without_likely_tokens_can_be_included():
    assert turn(include=["message.output_text.logprobs"]).logprobs == 0


def test_allowed_tools_are_those_that_the_model_is_told_of():
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sub"}]}
    got = turn(tools=[ADD, ADD | {"name": "sub"}], tool_choice=choice)
    assert ([tool.name for tool in got.tools], got.tool_choice) == (["sub"], "required")


@pytest.mark.parametrize(
    "field",
    [
        {"user": "me"},
        {"safety_identifier": "x"},
        {"prompt_cache_key": "x"},
        {"service_tier": "auto"},
        {"metadata": {"a": "b"}},
        {"truncation": "disabled"},
        {"background": False},
        {"include": ["reasoning.encrypted_content"]},
        {"stream_options": {"include_obfuscation": False}},
        {"conversation": None},
        {"context_management": [{"type": "compaction"}]},
        {"colour": None},
        {"temperature": None},
        {"store": False},
        {"tools": None, "tool_choice": None, "stream": None, "text": None, "reasoning": None, "metadata": None},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_field_without_effect_is_accepted(field):
    assert turn(**field) == turn()


def test_unknown_fields_of_what_was_said_are_passed_over():
    more = {"namespace": "n", "provider_specific_fields": {"a": 1}, "colour": None, "phase": "commentary"}
    parts = [{"type": "input_text", "text": "Hi", "cache_control": {}, "detail": "low"}]
    said = [USER | more | {"content": parts}, CALL | more, OUTPUT | more]
    assert turn(input=said) == turn(input=[USER, CALL, OUTPUT])


def test_tools_that_the_server_cannot_run_are_left_out_and_named():
    space = {"type": "namespace", "name": "agents", "description": "d", "tools": [ADD]}
    custom = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark"}}
    got = turn(tools=[space, ADD, WEB, custom, {"type": "image_generation", "output_format": "png"}])
    assert got.left_out == ("namespace agents", "web_search", "custom patch", "image_generation")
    assert replace(got, left_out=()) == turn(tools=[ADD])


def test_a_fault_is_placed_in_the_input_of_the_request_itself():
    body = parse_body(ResponseBody, {"model": "m", "input": [USER, OUTPUT]})
    with pytest.raises(BodyError) as refused:
        make_response_turn(body, [USER | {"type": "message"}, *body.items], 1)
    assert refused.value.param == "input.1.call_id"


DEEP = "[" * 100_000
BAD = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input.0"),
    ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input.0.content.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input.0.content.0.text"),
    ({"input": [{"type": "web_search_call", "id": "w"}]}, "input.0"),
    ({"input": [OUTPUT]}, "input.0.call_id"),
    ({"input": [USER, CALL | {"arguments": "{"}]}, "input.1.arguments"),
    ({"input": [USER, CALL | {"arguments": "[]"}]}, "input.1.arguments"),
    ({"input": [USER, CALL | {"arguments": DEEP}]}, "input.1.arguments"),
    ({"tools": [ADD, WEB], "tool_choice": "required"}, "tools.1.type"),
    ({"tools": [WEB | {"type": 5}]}, "tools.0.type"),
    ({"tools": [ADD, ADD]}, "tools"),
    ({"tools": [ADD | {"name": "a b"}]}, "tools.0.name"),
    ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "tools.0.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": float("nan")}, "top_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**30}, "max_output_tokens"),
    ({"max_output_tokens": 1.5}, "max_output_tokens"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"include": ["file_search_call.results"]}, "include.0"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"stop": ["x"]}, "stop"),
    ({"messages": [USER]}, "messages"),
    ({"store": "yes"}, "store"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[f"{param}-{i}" for i, (_, param) in enumerate(BAD)])
def test_a_body_that_cannot_be_met_is_refused_naming_the_field(fields, param):
    with pytest.raises(BodyError) as refused:
        turn(**fields)
    assert refused.value.param == param
    assert str(refused.value).startswith(f"{param}: ")
    assert len(str(refused.value)) < 400


def test_what_is_refused_is_called_by_its_name():
    for fields, name in [
        ({"tools": [ADD, WEB], "tool_choice": "required"}, "web_search"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": [{"role": "robot", "content": "x"}]}, "robot"),
    ]:
        with pytest.raises(BodyError, match=name):
            turn(**fields)


def test_a_body_that_is_no_object_is_refused():
    with pytest.raises(BodyError) as refused:
        parse_body(ResponseBody, [])
    assert refused.value.param is None
