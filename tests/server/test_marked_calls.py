"""Forced calls whose arguments stand between marks: what the grammar allows is read back, and is valid."""

import json
import random

import pytest

from mlx_zip.errors import GenerationError
from mlx_zip.server.answers.constraint import MARKED, make_grammar_constraint
from mlx_zip.server.answers.splitter import Splitter
from mlx_zip.server.answers.turn import Tool, ToolCall, Turn
from support.sampling_answers import sampled, text_of
from support.schemas import follows, random_schema
from support.tool_templates import wrapped

TOKENIZER = wrapped(MARKED)


def value_of(rng):
    """A schema of one type that this format can hold."""
    texts = [
        {"type": "string", "enum": rng.sample(["red", "blå", 'a"b', "two words", "-1"], 3)},
        {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 9)},
    ]
    others = [
        {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 200)},
        {"type": "boolean"},
        {"type": "array", "items": random_schema(rng, 0), "minItems": 0, "maxItems": 2},
    ]
    return rng.choice(texts + others)


def parameters(rng):
    names = rng.sample(["a", "name", "city", "日本", "x-y"], rng.randint(0, 4))
    required = [name for name in names if rng.random() < 0.6]
    schema = {"type": "object", "properties": {name: value_of(rng) for name in names}, "required": required}
    return {**schema, "additionalProperties": False}


def answered(tokenizer, turn, seed):
    ids = sampled(tokenizer, make_grammar_constraint(tokenizer, turn), random.Random(seed), expand=seed % 2 == 0)
    assert ids is not None
    splitter, text = Splitter(tokenizer, turn), text_of(tokenizer, ids)
    return text, [*splitter.feed(text), *splitter.finish()]


def test_forced_calls_are_read_back_and_follow_their_schemas():
    several = 0
    for seed in range(12):
        rng = random.Random(seed)
        tools = [Tool(f"tool-{n}", "", parameters(rng), strict=seed % 2 == 0) for n in range(2)]
        turn = Turn(tools=tools, tool_choice=rng.choice(["required", "tool-1"]))
        text, calls = answered(TOKENIZER, turn, seed)
        schemas = {tool.name: tool.parameters for tool in tools}
        assert calls, text
        several += len(calls) > 1
        for call in calls:
            assert isinstance(call, ToolCall), text
            assert turn.tool_choice in ("required", call.name)
            assert follows(json.loads(call.arguments), schemas[call.name]), text
    assert several


def test_with_strict_tools_text_may_come_instead_of_a_call():
    tokenizer = TOKENIZER
    tool = Tool("add", "", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, strict=True)
    constraint = make_grammar_constraint(tokenizer, Turn(tools=[tool]))
    ids = tokenizer.encode("Only text.", add_special_tokens=False)
    assert constraint.accepts([*ids, tokenizer.eos_token_id])
    assert not constraint.accepts(tokenizer.encode(f"Well. {tokenizer.tool_call_start}sub", add_special_tokens=False))


def test_one_call_only_where_parallel_calls_are_off():
    tool = Tool("now", "", {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]})
    turn = Turn(tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert {len(answered(TOKENIZER, turn, seed)[1]) for seed in range(6)} == {1}


def test_a_text_is_never_read_as_no_value():
    tool = Tool("say", "", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, strict=True)
    tokenizer, turn = TOKENIZER, Turn(tools=[tool], tool_choice="required")
    form = "<tool_call>\n<function=say>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"

    def accepted(text):
        ids = tokenizer.encode(form.format(text), add_special_tokens=False)
        return make_grammar_constraint(tokenizer, turn).accepts([*ids, tokenizer.eos_token_id])

    assert all(map(accepted, ("nulls", "two\nlines <b>and</b> more", "")))
    assert not any(map(accepted, ("null", "NULL", " a", "a</parameter>b", "</tool_call>")))


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"type": "array"}, "no object"),
        ({"type": "object", "properties": {"a": {}}}, "'a' needs exactly one type"),
        ({"type": "object", "properties": {"a": {"type": ["string", "null"]}}}, "exactly one type"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "^a$"}}}, "pattern of 'a'"),
        ({"type": "object", "properties": {"a": {"type": "string", "maxLength": 10**6}}}, "lengths"),
        ({"type": "object", "properties": {"a b": {"type": "string"}}}, "'a b' cannot be written"),
        ({"type": "object", "properties": {"a": {"type": "string", "enum": ["null", " "]}}}, "no text"),
        ({"type": "object", "properties": {}, "required": ["b"]}, "'b' is required"),
        ({"type": "object", "properties": {}, "minProperties": 1}, "minProperties"),
    ],
)
def test_parameters_that_cannot_be_forced_are_refused_by_name(parameters, reason):
    turn = Turn(tools=[Tool("t", "", parameters, strict=True)], tool_choice="required")
    with pytest.raises(GenerationError, match=reason):
        make_grammar_constraint(TOKENIZER, turn)
