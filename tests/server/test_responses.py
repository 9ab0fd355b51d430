"""OpenAI's Responses over a real socket, raw and with OpenAI's own client."""

import json

import pytest
from pydantic import BaseModel

from mlx_zip.errors import EngineError
from mlx_zip.server.answers.turn import Done, Text
from mlx_zip.server.options import Options
from support.answers import ANSWERS, COUNTS
from support.clients import openai_client
from support.fake_engine import FakeEngine, Script, tokenizer
from support.http_server import events, post, replay, serving, until

TEXT = "Once upon a time there was a boat."
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}


def ask(served, **fields):
    return served.ask("POST", "/v1/responses", {"model": "stories", "input": "Hi"} | fields)


def test_openais_client_reads_stream_and_whole_alike(served):
    whole = openai_client(served).responses.create(model="stories", input="Hi")
    with openai_client(served).responses.stream(model="stories", input="Hi") as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        streamed = stream.get_final_response()
    assert whole.output_text == streamed.output_text == "".join(pieces) == TEXT
    assert (whole.status, whole.model, whole.object) == ("completed", "stories", "response")
    assert streamed.usage == whole.usage
    assert whole.usage.input_tokens_details.cached_tokens == 3
    assert whole.usage.output_tokens > whole.mlx_zip["steps"] > 0


def test_each_event_is_named_on_the_wire(served):
    body = ask(served, stream=True).body.decode()
    names = [line[7:] for line in body.split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in events(body.encode())]
    assert names[0] == "response.created"
    assert names[-1] == "response.completed"


def test_openais_client_collects_calls_of_tools(served):
    served.core.answers = replay(ANSWERS["reasoning, text and two calls"])
    asked = {"model": "stories", "input": "Hi", "tools": [ADD]}
    whole = openai_client(served).responses.create(**asked)
    with openai_client(served).responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
        assert response.output[0].summary[0].text == "Add."
        assert (response.output[2].call_id, json.loads(response.output[2].arguments)) == ("call_1", {"a": 1, "b": [2]})
        assert response.usage.output_tokens_details.reasoning_tokens == 2


def test_openais_client_sends_back_what_it_received(served):
    served.core.answers = replay(ANSWERS["reasoning, text and two calls"])
    first = openai_client(served).responses.create(model="stories", input="Hi", tools=[ADD], store=False)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in first.output
        if item.type == "function_call"
    ]
    history = [{"role": "user", "content": "Hi"}, *first.output, *results]
    openai_client(served).responses.create(model="stories", input=history, tools=[ADD])
    roles = [message["role"] for message in served.core.answers.turns[-1].messages]
    assert roles == ["user", "assistant", "tool", "tool"]
    assert served.core.answers.turns[-1].messages[1]["reasoning_content"] == "Add."


class Sum(BaseModel):
    total: int


def test_openais_client_parses_structured_output(served):
    served.core.answers = replay([Text('{"total": 4}'), Done("stop", COUNTS)])
    parsed = openai_client(served).responses.parse(model="stories", input="2 + 2", text_format=Sum)
    assert parsed.output_parsed == Sum(total=4)
    assert served.core.answers.turns[-1].schema["properties"].keys() == {"total"}
    with openai_client(served).responses.stream(model="stories", input="2 + 2", text_format=Sum) as stream:
        assert stream.get_final_response().output_parsed == Sum(total=4)


def test_log_probabilities_come_with_the_text(served):
    include = ["message.output_text.logprobs"]
    whole = openai_client(served).responses.create(model="stories", input="Hi", include=include, top_logprobs=20)
    entries = whole.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == TEXT
    assert len(entries[0].top_logprobs) == 20
    streamed = events(ask(served, include=include, top_logprobs=2, stream=True).body)
    told = [entry for event in streamed if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert "".join(entry["token"] for entry in told) == TEXT


def test_an_answer_at_its_limit_is_incomplete(served):
    whole = openai_client(served).responses.create(model="stories", input="Hi", max_output_tokens=3)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 3


def test_a_response_can_follow_a_stored_one(served):
    responses = openai_client(served).responses
    first = responses.create(model="stories", input="Hi")
    second = responses.create(model="stories", input="And then?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    items = responses.input_items.list(second.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items[1].content[0].text == TEXT
    prompts = [list(submission.base_ids) for submission in served.core.engine.told.submissions]
    assert len(prompts[1]) > len(prompts[0])
    served.core.answers = replay(ANSWERS["text"])
    responses.create(model="stories", input="Go on", previous_response_id=second.id)
    assert [message["content"] for message in served.core.answers.turns[-1].messages] == [
        "Hi",
        TEXT,
        "And then?",
        TEXT,
        "Go on",
    ]


def test_a_prompt_that_follows_begins_with_the_ids_of_the_prompt_and_the_answer_before(served):
    engine, history = served.core.engine, [{"role": "user", "content": "Hi"}]
    first = openai_client(served).responses.create(model="stories", input=history)
    openai_client(served).responses.create(model="stories", input="And then?", previous_response_id=first.id)
    again = [*history, *first.output, {"role": "user", "content": "And then?"}]
    openai_client(served).responses.create(model="stories", input=again)
    before = [*engine.told.submissions[0].base_ids, *engine.told.notes[0][1]]
    for submission in engine.told.submissions[1:]:
        assert list(submission.base_ids[: len(before)]) == before


def test_a_streamed_response_is_stored_too(served):
    with openai_client(served).responses.stream(model="stories", input="Hi") as stream:
        final = stream.get_final_response()
    assert openai_client(served).responses.retrieve(final.id).output_text == TEXT


def test_a_stored_response_can_be_read_and_deleted(served):
    from openai import NotFoundError

    responses = openai_client(served).responses
    first = responses.create(model="stories", input="Hi")
    assert responses.retrieve(first.id).output_text == TEXT
    responses.delete(first.id)
    for call in (responses.retrieve, responses.delete, responses.input_items.list):
        with pytest.raises(NotFoundError):
            call(first.id)


def test_a_response_that_is_not_to_be_stored_is_not(served):
    from openai import NotFoundError

    first = openai_client(served).responses.create(model="stories", input="Hi", store=False)
    assert first.store is False
    with pytest.raises(NotFoundError) as refused:
        openai_client(served).responses.create(model="stories", input="Hi", previous_response_id=first.id)
    assert refused.value.body["param"] == "previous_response_id"
    assert refused.value.code == "previous_response_not_found"


def test_items_of_stored_responses_can_be_referred_to(served):
    first = openai_client(served).responses.create(model="stories", input="Hi")
    items = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": first.output[0].id}]
    served.core.answers = replay(ANSWERS["text"])
    openai_client(served).responses.create(model="stories", input=[*items, {"role": "user", "content": "Go on"}])
    assert [message["content"] for message in served.core.answers.turns[-1].messages] == ["Hi", TEXT, "Go on"]
    answer = ask(served, input=[{"type": "item_reference", "id": "msg_0"}])
    assert (answer.status, answer.json["error"]["param"]) == (404, "input.0.id")


def test_input_items_come_in_pages(served):
    items = [{"role": "user", "content": str(i)} for i in range(5)]
    first = openai_client(served).responses.create(model="stories", input=items)
    listed = openai_client(served).responses.input_items.list(first.id, limit=2)
    assert [item.content[0].text for item in listed.data] == ["4", "3"]
    assert [item.content[0].text for item in listed] == ["4", "3", "2", "1", "0"]
    for query in ("limit=0", "limit=x", "order=up", "after=nothing"):
        assert served.ask("GET", f"/v1/responses/{first.id}/input_items?{query}").status in (400, 404)


def test_a_failure_in_the_middle_ends_the_stream_with_its_reason():
    with serving(FakeEngine(Script(fails=EngineError("the cache is full")))) as served:
        assert ask(served).status == 500
        assert ask(served).json["error"]["message"] == "the cache is full"
        last = events(ask(served, stream=True).body)[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["error"] == {"code": "server_error", "message": "the cache is full"}
        assert last["response"]["output"][0]["content"][0]["text"] == TEXT
        assert served.ask("GET", f"/v1/responses/{last['response']['id']}").status == 404


def test_a_client_that_goes_away_ends_its_answer():
    with serving(FakeEngine(Script(text=TEXT * 100, delay_s=0.05))) as served:
        for stream in (True, False):
            connection = served.raw(post("/v1/responses", {"model": "stories", "input": "Hi", "stream": stream}))
            assert until(lambda: served.core.engine.figures().running == 1)
            connection.close()
            assert until(lambda: served.core.engine.figures().running == 0)
        assert served.core.engine.figures().cancelled == 2


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "gpt-5"}, 404, "model"),
        ({"model": 5}, 400, "model"),
        ({"input": None}, 400, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, 400, "input.0.role"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, 400, "input.0.call_id"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, 400, "tool_choice"),
        ({"previous_response_id": "resp_0"}, 404, "previous_response_id"),
        ({"previous_response_id": 5}, 400, "previous_response_id"),
        ({"background": True}, 400, "background"),
        ({"unknown": 1}, 400, "unknown"),
        ({"input": "word " * 3000}, 400, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_body_is_refused_in_openais_shape(served, fields, status, param, stream):
    answer = ask(served, stream=stream, **fields)
    assert answer.status == status
    error = answer.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert ask(served).status == 200


def test_huge_nesting_is_refused(served):
    for body in (b'{"input": ' + b"[" * 100_000, b'{"metadata": ' + b'{"a":' * 100_000, b"[" * 10**6):
        assert served.ask("POST", "/v1/responses", body).status == 400
    deep = {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[" * 100_000}]}
    assert ask(served, **deep).json["error"]["param"] == "input.0.arguments"


def test_a_busy_engine_is_told_with_a_time_to_wait():
    from openai import RateLimitError

    with serving(FakeEngine(most=0)) as served, pytest.raises(RateLimitError) as refused:
        openai_client(served).responses.create(model="stories", input="Hi")
    assert int(refused.value.response.headers["retry-after"]) >= 1


# ---- responses that are being written


SLOW = Script(text=TEXT + " It was red." * 300, delay_s=0.02)


class Following:
    """A stream that is read event by event."""

    def __init__(self, served, **fields):
        asked = {"model": "stories", "input": "Hi", "stream": True, "max_output_tokens": 1000} | fields
        self.connection = served.raw(post("/v1/responses", asked, "Connection: close"))
        self.file = self.connection.makefile("rb")
        self.name = self.until("response.created")["response"]["id"]
        self.until("response.output_text.delta")

    def until(self, kind):
        """The next event of a type."""
        for line in self.file:
            if line.startswith(b"data: ") and (event := json.loads(line[6:]))["type"] == kind:
                return event
        raise AssertionError(f"no {kind}")


def test_a_response_can_be_read_while_it_is_written():
    with serving(FakeEngine(SLOW)) as served:
        stream = Following(served)
        found = served.ask("GET", f"/v1/responses/{stream.name}").json
        items = served.ask("GET", f"/v1/responses/{stream.name}/input_items").json
        stream.connection.close()
    assert found["status"] == "in_progress"
    assert TEXT.startswith(found["output"][0]["content"][0]["text"][:10])
    assert found["output"][0]["content"][0]["text"]
    assert len(items["data"]) == 1


def test_a_response_can_be_cancelled_by_its_id():
    engine = FakeEngine(SLOW)
    with serving(engine) as served:
        stream = Following(served)
        cancelled = openai_client(served).responses.cancel(stream.name)
        last = stream.until("response.incomplete")
        assert b"data: " not in stream.file.read()
        stored = openai_client(served).responses.retrieve(stream.name)
        again = openai_client(served).responses.cancel(stream.name)
        follower = openai_client(served).responses.create(
            model="stories", input="Go on", previous_response_id=stream.name, max_output_tokens=5
        )
        assert engine.told.tickets[0].cancelled.is_set()
    assert cancelled.status == stored.status == again.status == last["response"]["status"] == "cancelled"
    assert stored.output[0].status == "incomplete"
    assert stored.output_text == cancelled.output_text != ""
    assert follower.previous_response_id == stream.name


def test_a_response_that_is_deleted_while_it_is_written_ends_and_is_not_stored():
    engine = FakeEngine(SLOW)
    with serving(engine) as served:
        stream = Following(served)
        gone = served.ask("DELETE", f"/v1/responses/{stream.name}")
        stream.until("response.incomplete")
        assert served.ask("GET", f"/v1/responses/{stream.name}").status == 404
        assert engine.told.tickets[0].cancelled.is_set()
    assert gone.json["deleted"]


def test_what_has_ended_is_not_cancelled_and_what_is_unknown_is_not_found(served):
    name = ask(served).json["id"]
    assert served.ask("POST", f"/v1/responses/{name}/cancel").json["status"] == "completed"
    assert served.ask("POST", "/v1/responses/resp_0/cancel").status == 404
    not_stored = ask(served, store=False).json["id"]
    assert served.ask("POST", f"/v1/responses/{not_stored}/cancel").status == 404


def test_a_stored_response_is_followed_after_a_restart(tmp_path):
    options = Options(responses_folder=tmp_path / "responses")
    with serving(FakeEngine(), options) as served:
        name = ask(served).json["id"]
    with serving(engine := FakeEngine(), options) as served:
        assert openai_client(served).responses.retrieve(name).output_text == TEXT
        assert ask(served, input="Go on", previous_response_id=name).status == 200
        openai_client(served).responses.delete(name)
        assert served.ask("GET", f"/v1/responses/{name}").status == 404
    assert TEXT in tokenizer().decode(engine.told.submissions[0].base_ids)


def test_the_tokens_of_a_prompt_are_counted_without_an_answer():
    engine = FakeEngine()
    with serving(engine) as served:
        counted = openai_client(served).responses.input_tokens.count(model="stories", input="Hi")
        assert engine.told.submissions == []
        answered = openai_client(served).responses.create(model="stories", input="Hi")
    assert counted.input_tokens == answered.usage.input_tokens > 0
