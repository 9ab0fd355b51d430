"""OpenAI's completions of plain text over a real socket."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mlx_zip.engine import Likely, PromptId
from mlx_zip.server.openai.completions import echoed_tokens
from mlx_zip.text.token_facts import TokenTexts
from support.clients import openai_client
from support.fake_engine import FakeEngine, Script, tokenizer
from support.http_server import events, serving

TEXT = "Once upon a time there was a boat."


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
    client = openai_client(served)
    assert client.completions.create(model="stories", prompt="A story").choices[0].text == TEXT
    chunks = client.completions.create(model="stories", prompt="A story", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": "yes"}, "echo"),
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


PROMPT = "a boat, a boat and a boat"


def test_an_echoed_prompt_stands_before_its_answer(served):
    answer = ask(served, [PROMPT, "x"], echo=True, n=2).json
    assert [choice["text"] for choice in answer["choices"]] == [PROMPT + TEXT] * 2 + ["x" + TEXT] * 2
    assert all(choice["logprobs"] is None for choice in answer["choices"])


@pytest.mark.parametrize("as_ids", [False, True])
def test_log_probabilities_of_an_echoed_prompt_are_those_of_base_tokens(served, as_ids):
    ids = tokenizer().encode(PROMPT)
    choice = ask(served, ids if as_ids else PROMPT, echo=True, logprobs=2, max_tokens=1).json["choices"][0]
    found = choice["logprobs"]
    count = len(ids)
    bos = "<s>"  # is no part of a prompt that was given as text
    assert choice["text"] == ("" if not as_ids else bos) + "".join(found["tokens"][1:])
    begin = len(bos) if as_ids else 0
    offsets = [begin + len("".join(found["tokens"][1:i])) for i in range(1, len(found["tokens"]))]
    assert (found["tokens"][0], found["text_offset"]) == (bos, [0, *offsets])
    # the fake engine reads the first id alone, then two at a time
    assert found["token_logprobs"][:count] == [None, *[0.0, -0.5] * ((count - 1) // 2), *[-0.5] * ((count - 1) % 2)]
    assert found["top_logprobs"][0] is None
    for at in range(1, count):
        token, likely = found["tokens"][at], found["top_logprobs"][at]
        assert max(likely, key=likely.get) == token
        assert len(likely) == (1 if found["token_logprobs"][at] == 0.0 else 2)
    assert len(found["tokens"]) == count + 1


def test_an_echo_alone_writes_nothing(served):
    answer = ask(served, [PROMPT, "x y"], echo=True, logprobs=0, max_tokens=0, n=2).json
    assert [choice["text"] for choice in answer["choices"]] == [PROMPT, PROMPT, "x y", "x y"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    counts = [len(tokenizer().encode(text)) for text in (PROMPT, "x y")]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"][::2]] == counts
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (sum(counts), 0)
    assert served.core.engine.told.submissions == []


def test_an_echo_ends_with_the_log_probability_of_the_eos(served):
    with_echo, without = (ask(served, PROMPT, logprobs=1, echo=one).json["choices"][0] for one in (True, False))
    count = len(tokenizer().encode(PROMPT))
    found = with_echo["logprobs"]
    assert found["tokens"][count:] == [*without["logprobs"]["tokens"], ""]
    assert found["token_logprobs"][-1] == -0.5
    assert found["text_offset"][-1] == len(PROMPT + TEXT)


@pytest.mark.parametrize("most", [0, 3, 100])
def test_a_stream_echoes_what_the_whole_answer_echoes(served, most):
    fields = {"echo": True, "logprobs": 2, "max_tokens": most}
    whole = ask(served, PROMPT, **fields).json["choices"][0]
    *chunks, end = events(ask(served, PROMPT, **fields, stream=True).body)
    assert end == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert {name: [one for part in parts for one in part[name]] for name in whole["logprobs"]} == whole["logprobs"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == ("stop" if most == 100 else "length")


def test_an_echoed_prompt_that_is_too_long_is_refused_as_any(served):
    answer = ask(served, "a boat " * 3000, echo=True, logprobs=0)
    assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")


def test_an_echo_of_too_many_log_probabilities_is_refused(served, monkeypatch):
    monkeypatch.setattr("mlx_zip.server.openai.completions.MOST_ECHOED", 40)
    fields = {"echo": True, "logprobs": 1, "max_tokens": 0}
    assert ask(served, [[1] * 10, [1] * 10], **fields).status == 200
    refused = ask(served, [[1] * 10, [1] * 11], **fields)
    assert (refused.status, refused.json["error"]["param"]) == (400, "prompt")
    assert "more than 40 log-probabilities" in refused.json["error"]["message"]


def test_what_is_too_much_to_echo_is_not_scored(served, monkeypatch):
    def score(*_):
        raise AssertionError("a prompt was scored")

    monkeypatch.setattr("mlx_zip.server.openai.completions.MOST_ECHOED", 40)
    monkeypatch.setattr(served.core.engine, "score_prompt_ids", score)
    refused = ask(served, [[1] * 10, [1] * 11], echo=True, logprobs=1, max_tokens=0)
    assert (refused.status, refused.json["error"]["param"]) == (400, "prompt")


def test_long_echoes_are_made_beside_the_event_loop(served, monkeypatch):
    threads = []

    def slow(*args):
        threads.append(threading.current_thread().name)
        return echoed_tokens(*args)

    monkeypatch.setattr("mlx_zip.server.openai.completions.echoed_tokens", slow)
    assert ask(served, PROMPT, echo=True, logprobs=1, max_tokens=0).status == 200
    assert [name.rpartition("_")[0] for name in threads] == ["mlx_zip-server"]


@pytest.mark.parametrize("text", ["a 😀 boat", "😀😀 and a 🚤🚤 boat", "🚤"])
def test_offsets_count_characters_also_where_tokens_split_them(served, text):
    found = ask(served, text, echo=True, logprobs=0, max_tokens=0).json["choices"][0]["logprobs"]
    tokens, offsets = found["tokens"], found["text_offset"]
    assert any("\ufffd" in token for token in tokens)
    assert offsets == sorted(offsets)
    for token, at in zip(tokens[1:], offsets[1:], strict=True):
        if "\ufffd" not in token:
            assert text[at:].startswith(token)


def test_offsets_of_an_answer_count_characters_also_where_tokens_split_them():
    text = "a 😀 boat and 😀"
    with serving(FakeEngine(Script(text))) as served:
        found = ask(served, logprobs=0).json["choices"][0]["logprobs"]
    assert any("\ufffd" in token for token in found["tokens"])
    for token, at in zip(found["tokens"], found["text_offset"], strict=True):
        assert "\ufffd" in token or text[at:].startswith(token)


def likely_at(*likely: tuple[Sequence[int], float], own: Sequence[int]) -> dict[str, float]:
    read = PromptId(tuple(own), -2.0, tuple(Likely(tuple(ids), value) for ids, value in likely))
    *_, last = echoed_tokens([read], TokenTexts(tokenizer()))
    assert last.likely is not None
    return {text: value for text, value in last.likely.items() if value == max(last.likely.values())}


def test_a_token_is_the_likeliest_by_its_text_only_if_its_id_is():
    a, b = tokenizer().encode(" boat a", add_special_tokens=False)[-2:]
    text = TokenTexts(tokenizer())[(b,)][0]
    data = "".join(f"\\x{byte:02x}" for byte in text.encode())
    assert likely_at(([b], -0.1), ([a, b], -2.0), own=[a, b]) == {f"bytes:{data}": -0.1}
    assert likely_at(([b], -0.1), own=[a, b]) == {f"bytes:{data}": -0.1}
    assert likely_at(([a, b], -0.1), ([a], -1.0), ([b], -2.0), own=[a, b]) == {text: -0.1}


def test_of_parts_of_characters_with_equal_texts_the_likeliest_stays():
    parts = tokenizer().encode("😀", add_special_tokens=False)[-4:]
    assert len({TokenTexts(tokenizer())[(i,)][0] for i in parts}) == 1
    at = [(i,) for i in parts]
    assert likely_at((at[0], -0.1), (at[1], -1.0), (at[2], -3.0), own=at[0]) == {"\ufffd": -0.1}
    assert likely_at((at[1], -0.5), (at[2], -3.0), own=[5]) == {"\ufffd": -0.5}


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
