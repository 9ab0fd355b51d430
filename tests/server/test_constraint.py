"""Answers that follow a schema or call tools: every answer that ends by itself is valid."""

import json
import random

import pytest

from mlx_zip.errors import GenerationError
from mlx_zip.server.answers.constraint import make_grammar_constraint
from mlx_zip.server.answers.splitter import Splitter
from mlx_zip.server.answers.turn import Reasoning, Text, Tool, ToolCall, Turn
from support.sampling_answers import sampled, text_of
from support.schemas import follows, random_object, random_schema
from support.slow_cases import slow_but
from support.tool_templates import KINDS, with_tools

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD, NOW = Tool("add", "Adds.", PARAMETERS, strict=True), Tool("now")
TOKENIZERS = {(kind, marks): with_tools(kind, marks) for kind in KINDS for marks in ("text", "plain", "special")}
TAGS = TOKENIZERS["tags", "text"]
CLOSED = TAGS.encode("</think>\n\n", add_special_tokens=False)


def asked(**fields):
    return Turn(messages=[{"role": "user", "content": "hi"}], **fields)


def answer(tokenizer, turn, seed=0, expand=False, prompt_ids=CLOSED):
    """(text, deltas) of a random answer to a turn."""
    rng = random.Random(seed)
    ids = sampled(tokenizer, make_grammar_constraint(tokenizer, turn, prompt_ids), rng, expand)
    assert ids is not None
    splitter, text = Splitter(tokenizer, turn, prompt_ids), text_of(tokenizer, ids)
    return text, [*splitter.feed(text), *splitter.finish()]


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_answers_by_a_schema_are_valid(part, expand):
    for seed in range(part * 25, part * 25 + 25):
        schema = random_schema(random.Random(seed))
        text, _ = answer(TAGS, asked(schema=schema), seed, expand)
        assert follows(json.loads(text), schema), (schema, text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("marks", slow_but(["text", "plain", "special"], "text", "special"))
def test_forced_calls_are_valid(kind, marks):
    for seed in range(8):
        rng = random.Random(seed)
        tools = [Tool(f"tool-{n}", "", random_object(rng), strict=seed % 2 == 0) for n in range(3)]
        turn = asked(tools=tools, tool_choice=rng.choice(["required", "tool-1"]))
        _, deltas = answer(TOKENIZERS[kind, marks], turn, seed, expand=seed % 3 == 0)
        schemas = {tool.name: tool.parameters for tool in tools}
        assert deltas
        for call in deltas:
            assert isinstance(call, ToolCall)
            assert turn.tool_choice in ("required", call.name)
            assert follows(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("marks", ["text", "plain", "special"])
def test_with_strict_tools_text_goes_on_until_a_call_which_is_valid(kind, marks):
    tokenizer, turn = TOKENIZERS[kind, marks], asked(tools=[ADD, NOW])
    constraint = make_grammar_constraint(tokenizer, turn, CLOSED)
    form = {"tags": '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>'}
    form |= {"list": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 7}}]', "headers": '[TOOL_CALLS]add[ARGS]{"a": 7}'}
    form |= {
        kind: f'{{"name": "add", "{key}": {{"a": 7}}}}'
        for kind, key in (("llama", "parameters"), ("plain", "arguments"))
    }
    before = "" if kind in ("llama", "plain") else "Well. "
    good, bad = (tokenizer.encode(before + form[kind].replace("7", n), add_special_tokens=False) for n in ("7", "-7"))
    eos = tokenizer.eos_token_id
    assert constraint.accepts([*good, eos])
    assert not constraint.accepts(bad)
    assert constraint.accepts([*tokenizer.encode("Only text.", add_special_tokens=False), eos])
    assert not constraint.accepts([*good[:-2], eos])


def test_tools_without_strict_and_a_free_choice_ask_for_nothing():
    assert make_grammar_constraint(TAGS, asked(tools=[NOW])) is None
    assert make_grammar_constraint(TAGS, asked(tools=[ADD], tool_choice="none")) is None
    assert make_grammar_constraint(TAGS, asked()) is None


def test_a_schema_and_tools_allow_either():
    turn = asked(tools=[ADD], schema={"type": "boolean"})
    kinds = {type(answer(TAGS, turn, seed)[1][0]) for seed in range(20)}
    assert kinds == {Text, ToolCall}


def test_one_call_only_where_parallel_calls_are_off():
    turn = asked(tools=[ADD], tool_choice="required", parallel_tool_calls=False)
    assert {len(answer(TAGS, turn, seed)[1]) for seed in range(10)} == {1}
    assert max(len(answer(TAGS, asked(tools=[ADD], tool_choice="required"), s)[1]) for s in range(10)) > 1


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_beside_a_schema_there_are_as_many_calls_as_parallel_calls_allow(strict, several):
    tools, schema = [Tool("t", "", strict=strict)], {"type": "boolean"}
    constraint = make_grammar_constraint(TAGS, asked(tools=tools, schema=schema, parallel_tool_calls=several), CLOSED)
    call = '<tool_call>\n{"name": "t", "arguments": {}}\n</tool_call>'
    for text, fits in ((call, True), (f"{call}\n{call}", several)):
        ids = [*TAGS.encode(text, add_special_tokens=False), TAGS.eos_token_id]
        assert constraint.accepts(ids) == fits


def test_the_grammar_begins_after_the_reasoning():
    begun = TAGS.encode("<think>\n", add_special_tokens=False)
    for prompt_ids, before in ((begun, "I think"), ((), "<think>hm")):
        constraint = make_grammar_constraint(TAGS, asked(schema={"type": "boolean"}), prompt_ids)
        ids = [TAGS.encode(text, add_special_tokens=False) for text in (f"{before} so.</think>\n\n", "true")]
        assert not constraint.accepts([*ids[0], TAGS.eos_token_id])
        constraint.push(ids[0])
        assert constraint.accepts([*ids[1], TAGS.eos_token_id])
        assert not constraint.accepts(TAGS.encode("then", add_special_tokens=False))


def test_without_the_reasoning_the_answer_follows_at_once():
    turn = asked(schema={"type": "boolean"})
    text, deltas = answer(TAGS, turn, prompt_ids=CLOSED)
    assert text in ("true", "false")
    assert not any(isinstance(delta, Reasoning) for delta in deltas)


def test_a_prefill_begins_the_answer_that_the_schema_asks_for():
    turn = asked(schema=PARAMETERS, prefill='{"a": ')
    constraint = make_grammar_constraint(TAGS, turn, TAGS.encode('</think>\n\n{"a":', add_special_tokens=False))
    assert constraint.accepts(TAGS.encode(" 12}", add_special_tokens=False))
    with pytest.raises(GenerationError, match="beginning of the answer"):
        make_grammar_constraint(TAGS, asked(schema=PARAMETERS, prefill="Sure"), CLOSED)


def test_what_cannot_be_forced_is_refused():
    with pytest.raises(GenerationError, match="'sub', which is not among the tools"):
        make_grammar_constraint(TAGS, asked(tools=[ADD], tool_choice="sub"))
    with pytest.raises(GenerationError, match="must be an object"):
        make_grammar_constraint(TAGS, asked(tools=[Tool("t", "", {"type": "string"})], tool_choice="t"))
    for template, reason in (("{{ messages }}", "has no tools"), ("{{ tools }}<arg_key>", "<arg_key> cannot be read")):
        tokenizer = with_tools()
        tokenizer._tokenizer.chat_template = template
        with pytest.raises(GenerationError, match=reason):
            make_grammar_constraint(tokenizer, asked(tools=[ADD], tool_choice="required"))


def allowed(parameters, arguments, **fields):
    """Whether a forced call of a tool with these parameters may have these arguments, given as JSON."""
    constraint = make_grammar_constraint(
        TAGS, asked(tools=[Tool("t", "", parameters, **fields)], tool_choice="t"), CLOSED
    )
    call = f'<tool_call>\n{{"name": "t", "arguments": {arguments}}}\n</tool_call>'
    return constraint.accepts([*TAGS.encode(call, add_special_tokens=False), TAGS.eos_token_id])


INNER = {"type": "object", "properties": {"a": {"type": "integer"}}}
OBJECTS = {
    "an object": (INNER, '{"a": 1}', '{"b": 1}'),
    "an object within": ({"properties": {"in": INNER}}, '{"in": {"a": 1}}', '{"in": {"b": 1}}'),
    "a list's objects": (
        {"properties": {"in": {"type": "array", "items": INNER}}},
        '{"in": [{}]}',
        '{"in": [{"b": 1}]}',
    ),
    "alternatives": ({"properties": {"in": {"anyOf": [INNER, {"type": "null"}]}}}, '{"in": null}', '{"in": {"b": 1}}'),
    "a named schema": (
        {"properties": {"in": {"$ref": "#/$defs/x"}}, "$defs": {"x": INNER}},
        '{"in": {}}',
        '{"in": {"b": 1}}',
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_of_forced_calls_have_only_the_properties_that_are_listed(name):
    parameters, good, bad = OBJECTS[name]
    assert allowed(parameters, good)
    assert not allowed(parameters, bad)
    assert allowed(parameters, bad, strict=True)  # a strict schema means what it says


NONE = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    "more", [{}, {"required": []}, {"title": "Now", "$schema": "http://json-schema.org/draft-07/schema"}]
)
def test_a_forced_call_of_a_tool_that_lists_no_arguments_has_none(more):
    assert allowed(NONE | more, "{}")
    assert not allowed(NONE | more, '{"b": 1}')
    assert allowed(NONE | more, '{"b": 1}', strict=True)


@pytest.mark.parametrize(
    "more", [{"additionalProperties": True}, {"anyOf": [INNER | {"additionalProperties": True}]}, {"minProperties": 1}]
)
def test_a_tool_that_lists_no_arguments_and_speaks_of_others_has_them(more):
    assert allowed(NONE | more, '{"b": 1}')


@pytest.mark.parametrize(
    "parameters",
    [
        INNER | {"additionalProperties": True},
        INNER | {"additionalProperties": {"type": "integer"}},
        INNER | {"patternProperties": {"^b$": {"type": "integer"}}},
        INNER | {"anyOf": [{"properties": {"b": {"type": "integer"}}}]},
        {"allOf": [INNER, {"type": "object", "properties": {"b": {"type": "integer"}}}]},
        {"type": "object"},
    ],
)
def test_objects_stay_open_where_the_schema_says_so(parameters):
    assert allowed({"properties": {"in": parameters}}, '{"in": {"a": 1, "b": 1}}')


def test_keywords_that_are_not_known_are_ignored_for_tools_that_are_not_strict():
    parameters = {**PARAMETERS, "not": {"required": ["b"]}}
    assert make_grammar_constraint(TAGS, asked(tools=[Tool("t", "", parameters)], tool_choice="t"))
    with pytest.raises(GenerationError, match=r'Unimplemented keys: \["not"\]'):
        make_grammar_constraint(TAGS, asked(tools=[Tool("t", "", parameters, strict=True)], tool_choice="t"))
