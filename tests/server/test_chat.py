"""OpenAI's chat completions over a real socket, raw and with OpenAI's own client."""

from __future__ import annotations

import json

import pytest

from mlx_zip.errors import EngineError
from mlx_zip.server.answers.turn import Done, Text, Waiting
from mlx_zip.server.options import Options
from support.answers import COUNTS
from support.clients import openai_client
from support.fake_engine import FakeEngine, Script, tokenizer
from support.http_server import events, post, replay, serving
from support.tool_templates import with_tools

TEXT = "Once upon a time there was a boat."


USER = [{"role": "user", "content": "Tell me a story."}]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
FIELD = {"chat/completions": "max_tokens", "responses": "max_output_tokens"}
LIMITS = {  # options of the server -> limits of a chat, of a chat with tools and of a response without their own
    (): (512, -1, -1),
    (("max_tokens", 9), ("max_tokens_with_tools", 9)): (9, 9, 9),
}


@pytest.mark.parametrize("options", LIMITS)
def test_an_answer_without_a_limit_of_its_own_may_use_the_context_if_it_is_an_agents(options):
    engine = FakeEngine(vocab=with_tools())
    with serving(engine, Options(**dict(options))) as served:
        for path, fields in (
            ("chat/completions", {"messages": USER}),
            ("chat/completions", {"messages": USER, "tools": [TOOL]}),
            ("responses", {"input": "Tell me a story."}),
        ):
            assert served.ask("POST", f"/v1/{path}", fields).status == 200
            assert served.ask("POST", f"/v1/{path}", fields | {FIELD[path]: 7}).status == 200
    limits = [one.max_tokens for one in engine.told.submissions]
    assert limits == [one for limit in LIMITS[options] for one in (limit, 7)]


def test_a_chat_is_answered_with_usage_in_base_tokens(served):
    answer = served.chat().json
    base = len(tokenizer().encode(TEXT, add_special_tokens=False)) + 1
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == base
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + base
    assert answer["mlx_zip"]["steps"] < base


def test_a_stream_is_written_as_openai_writes_it(served):
    answer = served.chat(stream=True, stream_options={"include_usage": True})
    *chunks, usage, end = events(answer.body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert end == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"][0]["delta"].keys() == {"content"} for chunk in chunks[1:-1])
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == TEXT
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 0
    assert len({(one["id"], one["created"], one["model"], one["object"]) for one in [*chunks, usage]}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)


def test_a_stream_without_include_usage_tells_none(served):
    *chunks, _ = events(served.chat(stream=True).body)
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, None])
def test_stream_options_may_leave_out_the_usage(served, options):
    *chunks, end = events(served.chat(stream=True, stream_options=options).body)
    assert end == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)


def test_characters_that_several_ids_spell_are_streamed_whole():
    text = "The 🐸 said “naïve” and 日本語 👩‍🔬."
    ids = [[i] for i in tokenizer().encode(text, add_special_tokens=False)]
    with serving(FakeEngine(Script(ids=[*ids, [tokenizer().eos_token_id]]))) as served:
        chunks = events(served.chat(stream=True).body)[:-1]
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert len(ids) > len(text.split())
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer().decode([i for one in ids for i in one])


def test_a_long_prompt_is_reported_in_comments():
    with serving(FakeEngine(Script(progress=4))) as served:
        body = served.chat("story " * 100, stream=True).body.decode()
    assert body.count(": reading the prompt ") == 5


def test_openais_client_reads_stream_and_whole_alike(served):
    asked = {"model": "stories", "messages": USER}
    whole = openai_client(served).chat.completions.create(**asked)
    with openai_client(served).chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.content == whole.choices[0].message.content == TEXT


def test_logprobs_tell_a_hypertoken_as_one_entry(served):
    answer = openai_client(served).chat.completions.create(
        model="stories", messages=USER, logprobs=True, top_logprobs=6
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == TEXT
    assert b"".join(bytes(entry.bytes) for entry in entries) == TEXT.encode()
    assert len(entries) < len(tokenizer().encode(TEXT, add_special_tokens=False))
    assert all(len(entry.top_logprobs) == 6 for entry in entries)
    assert entries[0].top_logprobs[0].token == entries[0].token


def test_streamed_logprobs_are_those_of_the_whole_answer(served):
    asked = {"model": "stories", "messages": USER, "logprobs": True, "top_logprobs": 20}
    whole = openai_client(served).chat.completions.create(**asked).choices[0].logprobs.content
    chunks = openai_client(served).chat.completions.create(**asked, stream=True)
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == whole
    assert whole[0].top_logprobs[-1].logprob == -9999.0  # minus infinity is no JSON


def test_bytes_of_a_cut_character_are_exact():
    ids = [[i] for i in tokenizer().encode("\U0001f600", add_special_tokens=False)]
    assert len(ids) > 1
    with serving(FakeEngine(Script(ids=[*ids, [tokenizer().eos_token_id]]))) as served:
        entries = served.chat(logprobs=True).json["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == "\U0001f600".encode()


def test_a_stop_string_ends_the_text_and_the_engines_request():
    engine = FakeEngine(Script(text=TEXT + " It was red." * 200, delay_s=0.01))
    with serving(engine) as served:
        answer = served.chat(stop=["a boat"], logprobs=True, max_tokens=1000).json
    assert answer["choices"][0]["message"]["content"] == "Once upon a time there was "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert engine.told.tickets[0].cancelled.is_set()
    assert answer["usage"]["completion_tokens"] < 20
    assert "red" not in "".join(entry["token"] for entry in answer["choices"][0]["logprobs"]["content"])


def test_a_limit_ends_the_text_with_length(served):
    answer = served.chat(max_tokens=3).json
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_text_held_back_for_a_stop_string_comes_at_the_limit(served):
    whole = served.chat(max_tokens=5).json["choices"][0]["message"]["content"]
    assert served.chat(max_tokens=5, stop=whole[-2:] + "zzz").json["choices"][0]["message"]["content"] == whole


def test_n_answers_have_seeds_of_their_own():
    engine = FakeEngine()
    with serving(engine) as served:
        answer = served.chat(n=3, seed=7).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert all(choice["message"]["content"] == TEXT for choice in answer["choices"])
    assert sorted(one.sampling["seed"] for one in engine.told.submissions) == [7, 8, 9]
    assert answer["usage"]["prompt_tokens"] == len(engine.told.submissions[0].base_ids)


def test_n_streamed_answers_are_told_apart(served):
    texts = {0: "", 1: ""}
    for chunk in openai_client(served).chat.completions.create(model="stories", messages=USER, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: TEXT, 1: TEXT}


def test_sampling_options_reach_the_engine():
    engine = FakeEngine()
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1,
        "logit_bias": {"7": -9},
    }
    with serving(engine) as served:
        assert served.chat(**fields).status == 200
    sampling = engine.told.submissions[0].sampling
    assert sampling["temp"] == 0.5
    assert sampling["logit_bias"] == {7: -9.0}
    assert (sampling["presence_penalty"], sampling["presence_context_size"]) == (1.0, 256)


def test_an_answer_is_noted_and_used_for_the_next_turn():
    engine = FakeEngine()
    with serving(engine) as served:
        served.chat()
        ((key, base_ids),) = engine.told.notes
        assert key == TEXT
        assert engine.tokenizer.eos_token_id not in base_ids
        engine.told.notes[0] = (key, [*base_ids[:-1], 77, 77])
        turns = [*USER, {"role": "assistant", "content": TEXT}, {"role": "user", "content": "More."}]
        served.ask("POST", "/v1/chat/completions", {"messages": turns})
    assert [77, 77] in [list(engine.told.submissions[1].base_ids[i : i + 2]) for i in range(200)]


def test_a_failure_before_the_first_id_has_a_status_of_its_own():
    with serving(FakeEngine(Script(fails=EngineError("no memory is left")))) as served:
        answer = served.chat()
    assert answer.status == 500
    assert answer.json["error"]["message"] == "no memory is left"


def test_a_failure_in_a_stream_is_an_event():
    from openai import APIError

    with serving(FakeEngine(Script(fails=EngineError("no memory is left")))) as served:
        answer = served.chat(stream=True)
        *_, last = events(answer.body)
        assert last["error"]["message"] == "no memory is left"
        assert served.chat().status == 500  # and the server goes on
        with pytest.raises(APIError, match="no memory is left"):
            list(openai_client(served).chat.completions.create(model="stories", messages=USER, stream=True))


def test_too_many_requests_are_answered_with_a_time_to_wait():
    engine = FakeEngine(Script(delay_s=0.3), most=1)
    with serving(engine) as served:
        with served.raw(b"") as connection:
            connection.sendall(post("/v1/chat/completions", {"messages": USER}))
            while not engine.told.tickets:
                pass
            answer = served.chat()
        assert (answer.status, answer.headers["retry-after"]) == (429, "3")
        assert answer.json["error"]["code"] == "rate_limit_exceeded"


def test_a_prompt_that_is_too_long_is_refused(served):
    answer = served.chat("story " * 5000)
    assert answer.status == 400
    assert answer.json["error"]["code"] == "context_length_exceeded"


def test_what_is_sent_is_json_in_utf8(served):
    answer = served.chat()
    assert json.loads(answer.body.decode("utf-8"))


def test_a_chat_stream_says_that_it_waits_in_a_comment_only():
    with serving(FakeEngine()) as served:
        served.core.answers = replay([Waiting(0, 0), Waiting(0, 0, waits_for="b"), Text("Hi"), Done("stop", COUNTS)])
        body = served.chat(stream=True).body
    assert b": waiting for another model" in body
    assert sum(one["choices"][0]["delta"].get("role") == "assistant" for one in events(body)[:-1]) == 1
