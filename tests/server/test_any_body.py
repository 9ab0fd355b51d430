"""Bodies with anything anywhere: each is a turn, or is refused with an error that names a place in it."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_zip.server.answers.turn import Turn
from mlx_zip.server.anthropic import bodies as anthropic_bodies
from mlx_zip.server.fields import BodyError, parse_body
from mlx_zip.server.openai import responses_bodies

RESPONSE = {
    "model": "m",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ],
    "tools": [{"type": "function", "name": "add", "parameters": {}}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "temperature": 0.5,
}
MESSAGE = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "A"}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "tool_use", "id": "t", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "3"}]}],
        },
    ],
    "tools": [{"name": "add", "input_schema": {}}],
    "tool_choice": {"type": "tool", "name": "add"},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["x"],
}
WORDS = st.sampled_from(["", "type", "text", "str", "none", "input_text", "user", "assistant", "tool_use", "list[x]"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def changed(draw, body):
    """A body in which one value has been replaced, removed or added."""
    body = copy.deepcopy(body)
    at = body
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = draw(st.sampled_from(keys)) if keys else None
        if key is None or not isinstance(at[key], dict | list) or draw(st.integers(0, 3)) == 0:
            break
        at = at[key]
    if key is None or draw(st.integers(0, 4)) == 0:
        value = draw(VALUES)
        at.update({draw(WORDS): value}) if isinstance(at, dict) else at.append(value)
    elif draw(st.integers(0, 4)) == 0:
        del at[key]
    else:
        at[key] = draw(VALUES)
    return body


def response_turn(body):
    parsed = parse_body(responses_bodies.ResponseBody, body)
    return responses_bodies.make_response_turn(
        parsed, [item for item in parsed.items if item["type"] != "item_reference"]
    )


def message_turn(body):
    return anthropic_bodies.make_messages_turn(parse_body(anthropic_bodies.MessagesBody, body))


@pytest.mark.slow
@pytest.mark.parametrize(("turn_of", "body"), [(response_turn, RESPONSE), (message_turn, MESSAGE)])
def test_a_body_of_any_shape_is_a_turn_or_an_error_that_names_its_place(turn_of, body):
    assert isinstance(turn_of(body), Turn)

    @settings(max_examples=300)
    @given(changed(body) | VALUES)
    def check(given_body):
        try:
            assert isinstance(turn_of(given_body), Turn)
        except BodyError as refused:
            place = given_body
            for step in (refused.param or "").split(".")[:-1]:
                place = place[int(step) if isinstance(place, list) else step]

    check()
