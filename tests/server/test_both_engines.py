"""The bundled model says the same over HTTP with PyTorch in float32 as with MLX, and does the same with requests."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mlx_zip.server.options import Options
from support import http_server
from support.serving import MISSING

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
SLOW_S = 240  # for an answer on a machine that does something else too
START = "Once upon a time"


def opened(kind):
    if kind == "mlx":
        from mlx_zip.engine.mlx.mlx_engine import open_engine

        return open_engine("stories", max_running=3)
    from mlx_zip.cuda.engine import open_cuda_engine

    return open_cuda_engine("stories", device="cpu", dtype="float32", max_running=3)


@pytest.fixture(scope="module")
def both():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_server, "WAIT_S", SLOW_S)
        with (
            http_server.serving(opened("mlx"), Options()) as mlx,
            http_server.serving(opened("cuda"), Options()) as cuda,
        ):
            yield mlx, cuda


def completed(served, prompt=START, **fields):
    """The choice and the usage of a completion."""
    body = {"model": "stories", "prompt": prompt, "max_tokens": 20, "temperature": 0, **fields}
    answer = served.ask("POST", "/v1/completions", body)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0], answer.json["usage"]


def test_greedy_answers_are_identical_alone_and_in_company(both):
    prompts = [START, "One day, a dog named Max", "The sun was"]
    expected = [completed(both[0], prompt)[0] for prompt in prompts]
    assert completed(both[1], prompts[0])[0] == expected[0]
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda prompt: completed(both[1], prompt)[0], prompts)) == expected


def test_a_stream_and_a_chat_are_identical(both):
    fields = {"max_tokens": 12, "temperature": 0}
    texts = [served.chat(**fields).json["choices"][0]["message"]["content"] for served in both]
    assert texts[0] == texts[1]
    parts = http_server.events(both[1].chat(**fields, stream=True).body)
    deltas = [part["choices"][0]["delta"].get("content") or "" for part in parts[:-1] if part["choices"]]
    assert "".join(deltas) == texts[0]


def test_limits_and_stop_strings_cut_inside_a_hypertoken_at_the_same_place(both):
    cases: list[dict[str, Any]] = [
        {"max_tokens": 2},
        {"max_tokens": 3},
        {"stop": "there w"},
        {"stop": ["little g", "named"]},
    ]
    for fields in cases:
        assert completed(both[1], **fields)[0] == completed(both[0], **fields)[0]


def test_log_probabilities_are_equal_but_for_rounding(both):
    mlx, cuda = (completed(served, max_tokens=8, logprobs=3)[0]["logprobs"] for served in both)
    assert cuda["tokens"] == mlx["tokens"]
    assert cuda["token_logprobs"] == pytest.approx(mlx["token_logprobs"], abs=1e-3)
    for ours, theirs in zip(cuda["top_logprobs"], mlx["top_logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_penalties_and_biases_give_the_same_greedy_answers(both):
    fields = {"max_tokens": 12, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {"300": 2.0}}
    assert completed(both[1], **fields)[0] == completed(both[0], **fields)[0]


def test_an_answer_by_a_schema_is_valid_and_the_same(both):
    schema = {"type": "object", "properties": {"a": {"enum": ["dog", "cat"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answers = [
        served.chat(max_tokens=40, temperature=0, response_format=form).json["choices"][0]["message"]["content"]
        for served in both
    ]
    assert json.loads(answers[1])["a"] in ("dog", "cat")
    assert answers[1] == answers[0]


def test_the_second_turn_reads_only_what_is_new(both):
    prompt = "Tom had a red ball. He liked"
    first, used = completed(both[1], prompt, max_tokens=10)
    _, again = completed(both[1], prompt + first["text"] + " Then", max_tokens=4)
    assert again["prompt_tokens_details"]["cached_tokens"] >= used["prompt_tokens"]


def test_a_refused_request_and_one_that_leaves_harm_nobody(both):
    served = both[1]
    bad = {"model": "stories", "prompt": START, "temperature": -1}
    assert served.ask("POST", "/v1/completions", bad).status == 400
    body = {"model": "stories", "prompt": START, "max_tokens": 500, "stream": True}
    served.raw(http_server.post("/v1/completions", body)).close()
    assert http_server.until(lambda: not served.core.engine.figures().running)
    assert completed(served, max_tokens=5)[0] == completed(both[0], max_tokens=5)[0]


def test_without_hypertokens_both_engines_say_the_same(both):
    texts = []
    for served in both:
        with served.core.engine.without_hypertokens("plain") as engine:
            assert engine.info.codebook_size == 0
            ids = engine.tokenizer.encode(START)
            from mlx_zip.engine import Emitted, Submission, events

            got = [event for event in events(engine, Submission(ids, max_tokens=6)) if isinstance(event, Emitted)]
            texts.append([one.id for one in got])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 6
