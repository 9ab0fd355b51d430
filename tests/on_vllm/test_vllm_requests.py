"""What vLLM cannot do is refused before a worker sees it, and what reaches a worker all the same harms nobody else."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("vllm")

from vllm import SamplingParams

from mlx_zip.codec import Codebook
from mlx_zip.engine.interface import Failed, Submission
from mlx_zip.errors import ConfigError, EngineError, GenerationError
from mlx_zip.named import resolve_model_name
from mlx_zip.packs.pack import Pack, load_pack, save_pack
from mlx_zip.vllm.packs import HYPERTOKENS, PACK
from support.http_server import until
from support.on_vllm import answer_all, open_on_vllm, record, worker_state
from support.serving import Broken

SOAK = int(os.environ.get("MLX_ZIP_VLLM_SOAK", "20"))  # 2,000 were once run (docs/guides/vllm.md)
PROMPT = "Once upon a time there was a little girl. The little girl had a dog."


@pytest.fixture(scope="module")
def engine():
    with open_on_vllm("stories") as made:
        yield made


@pytest.fixture(scope="module")
def prompt(engine):
    return engine.tokenizer.encode(PROMPT)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a grammar": ({"constraint": Broken("mask")}, "a grammar or JSON schema"),
    "a penalty": ({"sampling": {"repetition_penalty": 1.2}}, "penalties and logit_bias"),
    "a bias": ({"sampling": {"logit_bias": {5: 1.0}}}, "penalties and logit_bias"),
    "a temperature that vLLM does not take": ({"sampling": {"temp": 2.5}}, "vLLM refuses the request: .*temperature"),
    "XTC": ({"sampling": {"xtc_probability": 0.5}}, "XTC"),
    "min_tokens_to_keep": ({"sampling": {"min_p": 0.1, "min_tokens_to_keep": 2}}, "min_tokens_to_keep"),
    "too many log-probabilities": ({"top_logprobs": 21}, "more than 20 top_logprobs"),
    "a hypertoken in the prompt": ({"base_ids": [5, 2048]}, "prompt id 2048 at index 1 is not a base id"),
    "no prompt": ({"base_ids": []}, "the prompt is empty"),
    "a pack of another tokenizer": ({"pack": Pack(((5, 6),), tokenizer="0" * 64)}, "tokenizer"),
    "a pack with an id that there is not": ({"pack": Pack(((5, 4096),))}, "4096"),
    "a prompt beyond the context": ({"base_ids": list(range(3, 2000)) * 2}, "the model's context has 512 positions"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_met_is_refused_before_it_is_submitted(engine, prompt, what):
    fields, message = REFUSED[what]
    with pytest.raises(GenerationError, match=message):
        engine.submit(Submission(**{"base_ids": prompt, **fields}), print)
    assert not engine.figures().waiting


def test_a_tuned_pack_must_be_in_a_file_that_workers_can_read(engine, prompt, tmp_path):
    path = resolve_model_name("stories") / "pack.npz"
    tuned = load_pack(path)
    with pytest.raises(GenerationError, match="must be given as a file"):
        engine.submit(Submission(prompt, pack=Pack(tuned.entries, rows=tuned.rows)), print)
    named, own = answer_all(engine, [Submission(prompt, 12, pack=path), Submission(prompt, 12)])
    assert named.ids == own.ids


def test_scores_of_prompts_and_files_of_sessions_are_refused(engine, prompt, tmp_path):
    with pytest.raises(GenerationError, match="vLLM does not tell how likely the ids of a prompt are"):
        list(engine.score_prompt_ids(prompt))
    with pytest.raises(EngineError, match="cannot be written to a file"):
        engine.save_session("any", tmp_path / "s.safetensors")
    with pytest.raises(EngineError, match="vLLM cannot go on"):
        engine.load_session(tmp_path / "s.safetensors")


def raw_answers(engine: Any, asked: dict[str, tuple[list[int], dict[str, Any]]]) -> dict[str, list[int]]:
    """Returns the ids that vLLM gives to requests of other clients, all at once. asked: by name, ids and extra_args."""

    def run() -> dict[str, list[int]]:
        llm, found = engine._llm, dict[str, list[int]]()
        for name, (ids, extra) in asked.items():
            params = SamplingParams(temperature=0, max_tokens=8, detokenize=False, extra_args=extra or None)
            params.stop_token_ids = sorted(engine.tokenizer.eos_token_ids)
            llm.add_request(name, {"prompt_token_ids": ids}, params)
        for _ in range(20):
            found |= {one.request_id: list(one.outputs[0].token_ids) for one in llm.step()}
        assert not llm.has_unfinished_requests()
        return found

    return engine._inbox.ask(run)


def test_a_worker_survives_ids_and_packs_that_it_cannot_read(engine, prompt):
    expected = answer_all(engine, [Submission(prompt, 12)])[0].ids
    end = sorted(engine.tokenizer.eos_token_ids)
    found = raw_answers(
        engine,
        {
            "good": (prompt, {HYPERTOKENS: True}),
            "an id that its codebook does not have": ([*prompt[:4], 5000], {HYPERTOKENS: True}),
            "the same without hypertokens": ([5000], {}),
            "a pack that is no list": (prompt, {HYPERTOKENS: True, PACK: 7}),
            "a pack of nonsense": (prompt, {HYPERTOKENS: True, PACK: [[1], "x"]}),
            "a pack file that is not there": (prompt, {HYPERTOKENS: True, PACK: ["/nowhere.npz", "0"]}),
        },
    )
    good = found.pop("good")
    assert len(good) == 8
    assert all(len(ids) == 1 and ids[0] in end for ids in found.values())
    assert answer_all(engine, [Submission(prompt, 12)])[0].ids == expected


def test_what_was_computed_before_an_id_that_cannot_be_read_is_right(engine):
    long = engine.tokenizer.encode(" ".join([PROMPT] * 8))
    begun = Codebook(worker_state(engine)._packs.own.params)
    ids = begun.compress(long).tolist()[:70]
    assert max(ids) >= engine.info.vocab_size
    asked = {"bad": ([*ids[:64], 5999, *ids[64:]], {HYPERTOKENS: True}), "good": (ids, {HYPERTOKENS: True})}
    raw_answers(engine, {"bad": asked["bad"]})
    after = raw_answers(engine, {"good": asked["good"]})["good"]  # finds two blocks of the other's in the prefix cache
    engine.purge_sessions()
    assert raw_answers(engine, {"good": asked["good"]})["good"] == after


def test_a_pack_file_that_has_changed_since_is_an_error(engine, prompt, tmp_path, monkeypatch):
    file, whole = tmp_path / "pack.npz", load_pack(resolve_model_name("stories") / "pack.npz")
    assert whole.rows is not None
    save_pack(file, replace(whole, entries=whole.entries[:9], rows=whole.rows.select(range(9))))
    monkeypatch.setattr("mlx_zip.vllm.packs.resolve_pack", lambda asked: Pack(((5, 6),)))
    watch = answer_all(engine, [Submission(prompt, 12, pack=file)])[0]
    assert "could not read the request's ids or its pack" in str(watch.end.error)


def test_a_limit_that_no_context_has_room_for_harms_nobody(engine, prompt):
    any_id = frozenset(range(engine.info.vocab_size))
    watch = answer_all(engine, [Submission(prompt, (1 << 31) - 1, eos_ids=any_id)])[0]
    assert (watch.end.reason, len(watch.ids)) == ("stop", 1)
    assert engine.alive
    engine.check(Submission(prompt, sampling={"repetition_penalty": 1.0, "presence_penalty": 0, "logit_bias": {}}))


def test_clients_that_cannot_expand_hypertokens_get_base_ids_only(engine, prompt):
    ids = raw_answers(engine, {"a client of vLLM": (prompt, {HYPERTOKENS: "no"})})["a client of vLLM"]
    assert len(ids) == 8
    assert max(ids) < engine.info.vocab_size


def test_a_chat_goes_on_with_the_ids_that_it_had(engine, prompt):
    first = answer_all(engine, [Submission(prompt, 20)])[0]
    longer = [*prompt, *first.base_ids, *engine.tokenizer.encode(" They")]
    second = answer_all(engine, [Submission(longer, 12)])[0]
    assert second.events[0].cached_tokens >= len(prompt) + len(first.base_ids) - 4
    assert engine.sessions()[0].base_tokens >= len(longer)


def test_nothing_is_lost_or_left_behind_by_many_requests(engine):
    rng = random.Random(1)
    texts = [" ".join(rng.choice(PROMPT.split()) for _ in range(rng.randint(3, 20))) for _ in range(6)]
    asked = [Submission(engine.tokenizer.encode(text), 12, keep=False) for text in texts]
    expected = [answer_all(engine, [one])[0].ids for one in asked]
    numbers = [rng.randrange(len(asked)) for _ in range(SOAK)]
    cancelled = set(rng.sample(range(SOAK), SOAK // 10))
    refused, failed = 0, engine.figures().failed
    for _ in range(SOAK // 20):
        with pytest.raises(GenerationError):
            engine.submit(Submission([7, 999_999]), print)
        refused += 1
    watches = answer_all(engine, [asked[number] for number in numbers], cancelled=cancelled)
    for index, (watch, number) in enumerate(zip(watches, numbers, strict=True)):
        assert not isinstance(watch.end, Failed)
        assert watch.ids == expected[number][: len(watch.ids)]
        assert index in cancelled or watch.ids == expected[number]
    assert refused == SOAK // 20
    answer_all(engine, asked[:1])  # vLLM tells a worker of ended requests with the next step only
    state = worker_state(engine)
    assert len(state.requests) <= 1
    held = sum(sum(place > 0 for place in request.places) for request in state.requests.values())
    assert state.rows.users == held + len(state._held)
    assert until(lambda: not engine.figures().running)
    assert (engine.figures().waiting, engine.figures().failed) == (0, failed)
    record("none lost, none wrong, nothing left", requests=SOAK, cancelled=len(cancelled), malformed=refused)


def test_packed_weights_of_a_plain_model_are_refused():
    with pytest.raises(ConfigError, match=r"packed weights of .*; unpack them: python -m mlx_lm convert"):
        open_on_vllm("stories-base")
