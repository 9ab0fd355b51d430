"""Anthropic's Messages over a real socket, raw and with Anthropic's own client."""

import pytest
from pydantic import BaseModel

from mlx_zip.errors import EngineError
from mlx_zip.server.answers.turn import Done, Text
from mlx_zip.server.options import Options
from support.answers import ANSWERS, COUNTS
from support.clients import anthropic_client
from support.fake_engine import FakeEngine, Script
from support.http_server import events, post, replay, serving, until

TEXT = "Once upon a time there was a boat."
USER = {"role": "user", "content": "Hi"}
ASKED = {"model": "stories", "max_tokens": 50, "messages": [USER]}
ADD = {"name": "add", "input_schema": {"type": "object"}}


def ask(served, path="/v1/messages", **fields):
    return served.ask("POST", path, ASKED | fields)


def test_anthropics_client_reads_stream_and_whole_alike(served):
    whole = anthropic_client(served).messages.create(**ASKED)
    with anthropic_client(served).messages.stream(**ASKED) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert whole.content[0].text == streamed.content[0].text == "".join(pieces) == TEXT
    assert len(pieces) > 1
    assert (whole.stop_reason, whole.role, whole.model) == ("end_turn", "assistant", "stories")
    assert streamed.usage == whole.usage
    assert whole.usage.cache_read_input_tokens == 3
    assert whole.usage.output_tokens > whole.mlx_zip["steps"] > 0
    assert whole._request_id.startswith("req_")


def test_the_first_event_knows_the_prompts_tokens(served):
    first, *_, last, _ = events(ask(served, stream=True).body)
    assert first["type"] == "message_start"
    told = {name: first["message"]["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")}
    assert last["usage"].items() >= told.items()
    assert told["input_tokens"] > 0


def test_each_event_is_named_on_the_wire(served):
    body = ask(served, stream=True).body.decode()
    names = [line[7:] for line in body.split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in events(body.encode())]
    assert names[-1] == "message_stop"


def test_a_long_prompt_is_bridged_by_pings():
    with serving(FakeEngine(Script(progress=4))) as served:
        found = events(ask(served, messages=[{"role": "user", "content": "story " * 100}], stream=True).body)
    assert [event["type"] for event in found].count("ping") == 5


def test_anthropics_client_collects_reasoning_and_calls_of_tools(served):
    served.core.answers = replay(ANSWERS["reasoning, text and two calls"])
    asked = ASKED | {"tools": [ADD], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = anthropic_client(served).messages.create(**asked)
    with anthropic_client(served).messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (message.content[0].thinking, message.content[1].text) == ("Add.", "I add.")
        assert (message.content[2].id, message.content[2].input) == ("call_1", {"a": 1, "b": [2]})
        assert message.content[3].input == {}
        assert message.stop_reason == "tool_use"


def test_anthropics_client_sends_back_what_it_received(served):
    served.core.answers = replay(ANSWERS["reasoning, text and two calls"])
    first = anthropic_client(served).messages.create(**ASKED, tools=[ADD])
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
        for block in first.content
        if block.type == "tool_use"
    ]
    history = [USER, first.to_param(), {"role": "user", "content": results}]
    anthropic_client(served).messages.create(**ASKED | {"messages": history}, tools=[ADD])
    messages = served.core.answers.turns[-1].messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert (messages[1]["reasoning_content"], len(messages[1]["tool_calls"])) == ("Add.", 2)


class Sum(BaseModel):
    total: int


def test_anthropics_client_parses_structured_output(served):
    served.core.answers = replay([Text('{"total": 4}'), Done("stop", COUNTS)])
    for api in (anthropic_client(served).messages, anthropic_client(served).beta.messages):
        parsed = api.parse(**ASKED, output_format=Sum)
        assert parsed.parsed_output == Sum(total=4)
        assert served.core.answers.turns[-1].schema["required"] == ["total"]
        api.create(**ASKED | {"messages": [USER, {"role": "assistant", "content": parsed.content}, USER]})
        assert served.core.answers.turns[-1].messages[1]["content"] == '{"total": 4}'


def test_a_stop_sequence_is_named(served):
    whole = anthropic_client(served).messages.create(**ASKED, stop_sequences=["there", "nowhere"])
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "there")
    assert whole.content[0].text == "Once upon a time "
    with anthropic_client(served).messages.stream(**ASKED, stop_sequences=["there"]) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "there")
    assert streamed.content[0].text == "Once upon a time "


def test_an_answer_ends_at_its_limit(served):
    whole = anthropic_client(served).messages.create(**ASKED | {"max_tokens": 3})
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 3)


def test_tokens_are_counted_as_the_answer_counts_them(served):
    counted = anthropic_client(served).messages.count_tokens(model="stories", messages=[USER])
    usage = anthropic_client(served).messages.create(**ASKED).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_prompt_that_follows_begins_with_the_ids_of_the_prompt_and_the_answer_before(served):
    first = anthropic_client(served).messages.create(**ASKED)
    anthropic_client(served).messages.create(**ASKED | {"messages": [USER, first.to_param(), USER]})
    told = served.core.engine.told
    before = [*told.submissions[0].base_ids, *told.notes[0][1]]
    assert list(told.submissions[1].base_ids[: len(before)]) == before


def test_a_stream_begins_while_the_prompt_waits_to_be_read(served):
    body = ask(served, stream=True).body.decode()
    assert body.startswith(": waiting\n\nevent: message_start\n")


def test_a_beginning_of_the_answer_is_part_of_the_prompt(served):
    anthropic_client(served).messages.create(**ASKED | {"messages": [USER, {"role": "assistant", "content": "Once"}]})
    prompt = served.core.engine.told.submissions[-1].base_ids
    assert served.core.engine.tokenizer.decode(list(prompt)).endswith("Once")


def test_beta_headers_and_queries_are_tolerated(served):
    whole = anthropic_client(served).beta.messages.create(**ASKED, betas=["interleaved-thinking-2025-05-14"])
    assert whole.content[0].text == TEXT
    assert served.ask("POST", "/v1/messages?beta=true", ASKED, {"anthropic-version": "2099-01-01"}).status == 200


def test_a_failure_in_the_middle_is_an_error_event():
    import anthropic

    with serving(FakeEngine(Script(fails=EngineError("the cache is full")))) as served:
        with pytest.raises(anthropic.InternalServerError, match="the cache is full"):
            anthropic_client(served).messages.create(**ASKED)
        *before, last = events(ask(served, stream=True).body)
        assert last["type"] == "error"
        assert last["error"] == {"type": "api_error", "message": "the cache is full"}
        texts = [event["delta"]["text"] for event in before if event["type"] == "content_block_delta"]
        assert "".join(texts) == TEXT
        with (
            pytest.raises(anthropic.APIStatusError, match="the cache is full"),
            anthropic_client(served).messages.stream(**ASKED) as stream,
        ):
            stream.get_final_message()


def test_a_client_that_goes_away_ends_its_answer():
    with serving(FakeEngine(Script(text=TEXT * 100, delay_s=0.05))) as served:
        for stream in (True, False):
            connection = served.raw(post("/v1/messages", ASKED | {"stream": stream}))
            assert until(lambda: served.core.engine.figures().running == 1)
            connection.close()
            assert until(lambda: served.core.engine.figures().running == 0)
        assert served.core.engine.figures().cancelled == 2


@pytest.mark.parametrize(
    ("fields", "status", "kind", "names"),
    [
        ({"model": "claude"}, 404, "not_found_error", "claude"),
        ({"model": 5}, 400, "invalid_request_error", "model"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_request_error", "robot"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "image"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0.tool_use_id",
        ),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"unknown": 1}, 400, "invalid_request_error", "unknown"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, 400, "invalid_request_error", "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_body_is_refused_in_anthropics_shape(served, fields, status, kind, names, stream):
    answer = ask(served, stream=stream, **fields)
    assert answer.status == status
    assert answer.json.keys() == {"type", "error", "request_id"}
    assert answer.json["type"] == "error"
    assert answer.json["error"]["type"] == kind
    assert names in answer.json["error"]["message"]
    assert answer.json["request_id"] == answer.headers["request-id"]
    assert ask(served).status == 200


def test_a_bad_body_cannot_be_counted(served):
    for fields in ({"max_tokens": 5}, {"messages": []}, {"model": None}):
        body = {"model": "stories", "messages": [USER]} | fields
        assert served.ask("POST", "/v1/messages/count_tokens", body).json["error"]["type"] == "invalid_request_error"


def test_huge_nesting_is_refused(served):
    for body in (b'{"messages": ' + b"[" * 100_000, b'{"system": ' + b'{"a":' * 100_000):
        assert served.ask("POST", "/v1/messages", body).json["error"]["type"] == "invalid_request_error"


def test_a_key_may_come_in_either_header():
    from anthropic import AuthenticationError

    with serving(FakeEngine(), Options(api_key="secret")) as served:
        assert anthropic_client(served, "secret").messages.create(**ASKED).content[0].text == TEXT
        bearer = anthropic_client(served, None, auth_token="secret")
        assert bearer.messages.create(**ASKED).content[0].text == TEXT
        with pytest.raises(AuthenticationError) as refused:
            anthropic_client(served, "wrong").messages.create(**ASKED)
        assert refused.value.body["error"]["type"] == "authentication_error"


def test_a_busy_engine_is_told_with_a_time_to_wait():
    from anthropic import RateLimitError

    with serving(FakeEngine(most=0)) as served, pytest.raises(RateLimitError) as refused:
        anthropic_client(served).messages.create(**ASKED)
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert refused.value.body["error"]["type"] == "rate_limit_error"
