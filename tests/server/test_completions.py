"""OpenAI's completions of plain text over a real socket."""

from __future__ import annotations

from dataclasses import replace

import openai
import pytest

from support.fake_engine import FakeEngine, Script, tokenizer
from support.http_server import events, serving

TEXT = "Once upon a time there was a boat."


@pytest.fixture
def served():
    with serving(FakeEngine()) as server:
        yield server


def ask(served, prompt="A story:", **fields):
    return served.ask("POST", "/v1/completions", {"model": "stories", "prompt": prompt, **fields})


def test_a_text_is_continued(served):
    answer = ask(served).json
    assert (answer["object"], answer["choices"][0]["text"]) == ("text_completion", TEXT)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(tokenizer().encode(TEXT, add_special_tokens=False)) + 1


@pytest.mark.parametrize("prompt", ["A story", ["A story"], [1, 2, 3], [[1, 2, 3]]])
def test_a_prompt_is_text_or_base_ids(served, prompt):
    assert ask(served, prompt).json["choices"][0]["text"] == TEXT
    ids = list(served.core.engine.told.submissions[0].base_ids)
    assert ids == ([1, 2, 3] if "story" not in str(prompt) else tokenizer().encode("A story"))


def test_each_prompt_has_its_own_choices(served):
    answer = ask(served, ["one", "two words"], n=2).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    lengths = [len(one.base_ids) for one in served.core.engine.told.submissions]
    assert answer["usage"]["prompt_tokens"] == sum(lengths) // 2


def test_log_probabilities_have_offsets_into_the_text(served):
    found = ask(served, logprobs=3).json["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == TEXT
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(len(found["tokens"]))]
    assert all(len(likely) <= 3 for likely in found["top_logprobs"])


def test_a_stream_says_what_the_whole_answer_says(served):
    whole = ask(served, logprobs=2).json["choices"][0]
    *chunks, usage, end = events(ask(served, logprobs=2, stream=True, stream_options={"include_usage": True}).body)
    assert end == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert {name: [one for part in parts for one in part[name]] for name in whole["logprobs"]} == whole["logprobs"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"]["completion_tokens"] > 0


def test_openais_client_reads_completions(served):
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    assert client.completions.create(model="stories", prompt="A story").choices[0].text == TEXT
    chunks = client.completions.create(model="stories", prompt="A story", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt.1"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(served, fields, param):
    answer = ask(served, **fields)
    assert answer.status == 400
    assert answer.json["error"]["param"] == param


def test_an_answer_is_not_noted_for_plain_prompts():
    engine = FakeEngine(Script())
    with serving(engine) as served:
        ask(served)
    assert engine.told.notes == []


def test_more_answers_than_the_engine_ever_takes_are_refused_and_not_put_off():
    engine = FakeEngine()
    engine.info = replace(engine.info, max_requests=8)
    with serving(engine) as served:
        asked = {"prompt": ["One", "Two", "Three"], "n": 3}
        answer = served.ask("POST", "/v1/completions", asked)
        assert answer.status == 400
        assert "asks for 9 answers, and this server takes at most 8" in answer.json["error"]["message"]
        assert served.ask("POST", "/v1/completions", asked | {"n": 2}).status == 200
        assert len(engine.told.tickets) == 6
