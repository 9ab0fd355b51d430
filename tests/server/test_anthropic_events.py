"""Answers in Anthropic's dialect: the events of a stream, and the message that they add up to."""

import json

import pytest
from pydantic import TypeAdapter

from mlx_zip.server.anthropic.bodies import MessagesBody
from mlx_zip.server.anthropic.messages import SIGNATURE, MessageBuilder
from mlx_zip.server.errors import RequestError
from mlx_zip.server.fields import parse_body
from support.answers import ANSWERS, BEGINNINGS
from support.http_server import events

BODY = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def described():
    """The type of every event, as Anthropic's client describes it."""
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


def builder(body=BODY):
    return MessageBuilder(parse_body(MessagesBody, body), "stories", lambda prefix: f"{prefix}_1")


def streamed(deltas, body=BODY):
    """Returns the events of an answer as they would be read from the wire."""
    answer = builder(body)
    return json.loads(json.dumps([event for delta in deltas for event in answer.add(delta)]))


def whole(deltas, body=BODY):
    """Returns the message of an answer that is not streamed."""
    answer = builder(body)
    for delta in deltas:
        answer.add(delta)
    return json.loads(json.dumps(answer.message))


def added_up(events):
    """Returns the message that a client collects from the events of a stream."""
    message, calls = {}, {}
    for event in events:
        match event:
            case {"type": "message_start"}:
                message = event["message"]
            case {"type": "content_block_start"}:
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": piece}}:
                calls[event["index"]] = calls.get(event["index"], "") + piece
                message["content"][event["index"]]["input"] = json.loads(calls[event["index"]])
            case {"type": "content_block_delta", "delta": delta}:
                name = delta["type"].removesuffix("_delta")
                message["content"][event["index"]][name] += delta[name]
            case {"type": "message_delta"}:
                message |= event["delta"] | {"mlx_zip": event["mlx_zip"]}
                message["usage"] |= event["usage"]
    return message


@pytest.mark.parametrize("kind", ANSWERS)
def test_every_event_is_one_that_anthropics_types_describe(kind, described):
    for event in streamed(ANSWERS[kind]):
        if event["type"] != "ping":
            assert described.validate_python(event).type == event["type"]


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_streamed_message_adds_up_to_the_whole_one(kind):
    from anthropic.types import Message

    message = whole(ANSWERS[kind])
    assert added_up(streamed(ANSWERS[kind])) == message
    Message.model_validate(message)


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_block_stops_before_the_next_one_starts(kind):
    steps = [event["type"] for event in streamed(ANSWERS[kind]) if event["type"].startswith("content_block_s")]
    assert steps == ["content_block_start", "content_block_stop"] * (len(steps) // 2)


def test_the_events_of_a_text_come_in_anthropics_order():
    assert [event["type"] for event in streamed(ANSWERS["text"])] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("text", "end_turn"),
        ("cut at the limit", "max_tokens"),
        ("ended by a stop string", "stop_sequence"),
        ("one call", "tool_use"),
    ],
)
def test_the_stop_reason_says_why_the_answer_ended(kind, reason):
    message = whole(ANSWERS[kind])
    assert message["stop_reason"] == reason
    assert message["stop_sequence"] == ("\n\n" if reason == "stop_sequence" else None)


def test_cached_tokens_are_told_at_the_beginning_and_are_not_among_the_input_tokens():
    events = streamed(ANSWERS["reasoning and text"])
    told = {"input_tokens": 10, "cache_read_input_tokens": 40, "cache_creation_input_tokens": 0}
    for usage in (events[0]["message"]["usage"], events[-2]["usage"]):
        assert usage.items() >= told.items()
    assert events[-2]["usage"]["output_tokens"] == 9
    assert events[-2]["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


def test_reasoning_that_is_to_be_omitted_leaves_a_signed_block_without_text():
    body = BODY | {"thinking": {"type": "adaptive", "display": "omitted"}}
    message = whole(ANSWERS["reasoning and text"], body)
    assert message["content"][0] == {"type": "thinking", "thinking": "", "signature": SIGNATURE}
    assert added_up(streamed(ANSWERS["reasoning and text"], body)) == message


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_an_answer_that_fails_ends_with_an_error_event(kind):
    answer = builder()
    for delta in BEGINNINGS[kind]:
        answer.add(delta)
    (told,) = events(answer.failure_frame(RequestError(500, "the engine has stopped")))
    assert told == {"type": "error", "error": {"type": "api_error", "message": "the engine has stopped"}}
