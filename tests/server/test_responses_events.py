"""Answers in OpenAI's Responses: the events of a stream, and the response that they add up to."""

import json
from itertools import count

import pytest
from pydantic import TypeAdapter

from mlx_zip.server.fields import parse_body
from mlx_zip.server.openai.responses import ResponseBuilder
from mlx_zip.server.openai.responses_bodies import ResponseBody
from support.answers import ANSWERS, BEGINNINGS

BODY = {
    "model": "m",
    "input": "Hi",
    "instructions": "Be brief.",
    "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
    "metadata": {"a": "b"},
    "include": ["message.output_text.logprobs"],
    "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low", "summary": "auto"},
}


@pytest.fixture(scope="module")
def described():
    """The type of every event, as OpenAI's client describes it."""
    from openai.types.responses import ResponseStreamEvent

    return TypeAdapter(ResponseStreamEvent)


def builder(body=BODY):
    numbers = count()
    return ResponseBuilder(parse_body(ResponseBody, body), "stories", lambda prefix: f"{prefix}_{next(numbers)}")


def streamed(deltas, body=BODY):
    """Returns the events of an answer as they would be read from the wire."""
    answer = builder(body)
    events = answer.begin() + [event for delta in deltas for event in answer.add(delta)]
    return json.loads(json.dumps(events))


def whole(deltas, body=BODY):
    """Returns the response of an answer that is not streamed."""
    answer = builder(body)
    for delta in deltas:
        answer.add(delta)
    return json.loads(json.dumps(answer.response))


def added_up(events):
    """Returns the output that a client collects from the pieces of a stream."""
    items = {}
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                items[event["output_index"]] = event["item"]
            case "response.content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            case "response.output_text.delta":
                part = items[event["output_index"]]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part["logprobs"] += event["logprobs"]
            case "response.reasoning_summary_part.added":
                items[event["output_index"]]["summary"].append(event["part"])
            case "response.reasoning_summary_text.delta":
                items[event["output_index"]]["summary"][event["summary_index"]]["text"] += event["delta"]
            case "response.function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "response.output_item.done":
                items[event["output_index"]]["status"] = event["item"]["status"]
    return [items[i] for i in range(len(items))]


@pytest.mark.parametrize("kind", ANSWERS)
def test_every_event_is_one_that_openais_types_describe(kind, described):
    for event in streamed(ANSWERS[kind]):
        assert described.validate_python(event).type == event["type"]


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_streamed_answer_adds_up_to_the_whole_one(kind):
    from openai.types.responses import Response

    events, response = streamed(ANSWERS[kind]), whole(ANSWERS[kind])
    assert added_up(events) == response["output"]
    last = events[-1]["response"]
    assert last | {"completed_at": 0, "created_at": 0} == response | {"completed_at": 0, "created_at": 0}
    Response.model_validate(response)


@pytest.mark.parametrize("kind", ANSWERS)
def test_events_are_numbered_and_items_are_closed_before_the_next_begins(kind):
    events = streamed(ANSWERS[kind])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    steps = [event["type"].rsplit(".", 1)[1] for event in events if "output_item" in event["type"]]
    assert steps == ["added", "done"] * (len(steps) // 2)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


def test_the_events_of_a_text_come_in_openais_order():
    assert [event["type"].removeprefix("response.") for event in streamed(ANSWERS["text"])] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


def test_the_events_of_reasoning_and_of_a_call_come_in_openais_order():
    kinds = [event["type"].removeprefix("response.") for event in streamed(ANSWERS["reasoning and text"])]
    assert kinds[2:9] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    kinds = [event["type"].removeprefix("response.") for event in streamed(ANSWERS["one call"])]
    assert kinds[2:-1] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]


def test_a_response_tells_the_request_and_the_usage():
    response = whole(ANSWERS["reasoning and text"])
    assert response["instructions"] == "Be brief."
    assert response["tools"][0] == BODY["tools"][0] | {"description": "", "strict": False}
    assert response["text"]["format"] == BODY["text"]["format"]
    assert response["metadata"] == {"a": "b"}
    assert response["usage"]["input_tokens"] == 50
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 40
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    assert response["usage"]["total_tokens"] == 59
    assert response["mlx_zip"]["hypertokens"] == 2


def test_an_answer_at_its_limit_is_incomplete():
    response = whole(ANSWERS["cut at the limit"])
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert response["completed_at"] is None


def test_an_answer_without_text_has_an_empty_message():
    response = whole(ANSWERS["nothing"])
    assert [part["text"] for part in response["output"][0]["content"]] == [""]
    assert "response.output_text.delta" not in [event["type"] for event in streamed(ANSWERS["nothing"])]


def test_log_probabilities_are_left_out_unless_asked_for():
    deltas = ANSWERS["text with log-probabilities"]
    asked, not_asked = whole(deltas), whole(deltas, BODY | {"include": []})
    entry = {"token": "Hé", "bytes": [72, 195, 169], "logprob": -0.5}
    likely = [entry, {"token": "Ho", "bytes": [72, 111], "logprob": -1.25}]
    assert asked["output"][0]["content"][0]["logprobs"] == [{**entry, "top_logprobs": likely}]
    assert not_asked["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_an_answer_that_fails_ends_with_what_was_written_and_the_error(kind, described):
    answer = builder()
    events = answer.begin() + [event for delta in BEGINNINGS[kind] for event in answer.add(delta)]
    events = json.loads(json.dumps(events + answer.fail("the engine has stopped")))
    for event in events:
        described.validate_python(event)
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine has stopped"}
    assert last["response"]["status"] == answer.response["status"] == "failed"
    assert added_up(events) == answer.response["output"]
