"""Drafts on PyTorch: rows of one batch emit with proposed ids what they emit without them."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
import pytest

from support import tiny
from support.generating import ENDLESS
from support.serving import Watch, ask, at_once
from support.slow_cases import slow_but

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

from mlx_zip.cuda.batch import Batch  # noqa: E402
from mlx_zip.cuda.engine import CudaEngine, make_session_store, open_cuda_engine  # noqa: E402
from mlx_zip.cuda.model import open_model  # noqa: E402
from mlx_zip.cuda.sequence import SequenceReader  # noqa: E402
from mlx_zip.engine import Submission  # noqa: E402
from mlx_zip.engine.options import RunOptions, ServeOptions  # noqa: E402
from mlx_zip.engine.pass_costs import PassCosts  # noqa: E402
from mlx_zip.engine.sessions.store import SessionOptions  # noqa: E402
from mlx_zip.errors import GenerationError  # noqa: E402
from support.torch_folders import save, save_weights  # noqa: E402

SIZES = {"initial_vocab_size": tiny.VOCAB, "max_codebook_size": 24, "max_subtokens": 4, "disabled_ids": [0, 1, 2]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "llama": ("llama", {}),
    "base positions": ("llama", {"position_mode": "base_token_end"}),
    "longrope": ("phi3", {}),
    "longrope base positions": ("phi3", {"position_mode": "base_token_end"}),
    "tied": ("qwen3", {"tie_encoders": True}),
    "canonical": ("qwen2", {"canonical": True}),
    "windows": ("mistral", {}),
    "lru": ("llama", {"compression": {**SIZES, "policy": "lru"}}),
    "use-count": ("llama", {"compression": {**SIZES, "policy": "use-count"}, "position_mode": "base_token_end"}),
}
WAYS = {"cpu": False, "references": True}  # a CPU's own decoder; a card's way, by the references of kernels
PROMPTS = [tiny.base_ids(length, seed) for seed, length in enumerate((9, 30, 22, 14, 40, 5, 18, 27))]
ASKED: list[dict[str, Any]] = [
    {"max_tokens": 24},
    {"sampling": {"temp": 0.8, "seed": 3}, "top_logprobs": 2, "max_tokens": 24},
    {"sampling": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {3: 2.0}}, "max_tokens": 11},
    {"sampling": {"temp": 1.1, "top_k": 9, "min_p": 0.02, "top_p": 0.9, "seed": 4}, "max_tokens": 17},
    {"max_tokens": 22, "top_logprobs": 3},
    {"sampling": {"temp": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.05, "seed": 5}, "max_tokens": 24},
    {"max_tokens": 3},
    {"max_tokens": 40},
]


class Oracle:
    """Proposes the ids of answers that are known, with every `wrong`-th of them replaced; in place of `Lookup`.

    answers: base ids by prompt.
    """

    answers: ClassVar[dict[tuple[int, ...], list[int]]]
    wrong = 0

    def __init__(self, base_ids: Any = ()) -> None:
        self._answer, self._at = self.answers.get(tuple(base_ids), []), 0

    def append(self, base_ids: Any) -> None:
        self._at += len(base_ids)

    def match_length(self) -> int:
        return self.propose(0)[1]

    def propose(self, most: int) -> tuple[np.ndarray, int]:
        found = self._answer[self._at : self._at + most]
        if self.wrong:
            found = [(one + 1) % tiny.VOCAB if (self._at + i) % self.wrong == 0 else one for i, one in enumerate(found)]
        return np.array(found, np.uint32), 9 if self._at < len(self._answer) else 0


@pytest.fixture
def oracle(monkeypatch):
    class Own(Oracle):
        answers: ClassVar = {}

    monkeypatch.setattr("mlx_zip.engine.draft_sources.Lookup", Own)
    return Own


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Returns a function that returns the model of a case in one of the ways."""

    @cache
    def folder(case: str) -> Any:
        (family, changes), path = CASES[case], tmp_path_factory.mktemp("m") / "m"
        if family != "plain":
            return save(tiny.tiny_model(family, "res_latent_attn", **changes), path)
        from support.generating import plain_model

        config = {key: value for key, value in tiny.tiny_config().items() if key != "zip2zip"}
        return save_weights(plain_model(), path, {**config, "model_type": "llama", "vocab_size": 40})

    return cache(lambda case, way="cpu": open_model(folder(case), "cpu", "float32", kernels=WAYS[way]))


def engine(model: Any, draft: str = "off", ahead: bool | None = None, tokenizer: Any = ENDLESS, **options: Any) -> Any:
    store = partial(make_session_store, options=SessionOptions())
    run = RunOptions(draft=draft, ahead=ahead)
    return CudaEngine(lambda: (model, tokenizer), "tiny", ServeOptions(**options, run=run), store)


def answer_all(made: Any, keep: bool = False, **changes: Any) -> list[Watch]:
    """The answers to all prompts, asked at once: the first ones run together, the others join when one leaves."""
    asked = [{"keep": keep, "show": True, **one, **changes} for one in ASKED]
    watches = at_once(made, lambda: [ask(made, prompt, **one)[1] for prompt, one in zip(PROMPTS, asked, strict=True)])
    return [watch.wait() for watch in watches]


def assert_equal_answers(drafted: Watch, alone: Watch) -> None:
    assert drafted.ids == alone.ids
    assert drafted.end.reason == alone.end.reason
    assert [one.base_ids for one in drafted.emitted] == [one.base_ids for one in alone.emitted]
    assert [one.learned for one in drafted.emitted] == [one.learned for one in alone.emitted]
    for one, other in zip(drafted.emitted, alone.emitted, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [likely.base_ids for likely in one.likely] == [likely.base_ids for likely in other.likely]
        assert [likely.logprob for likely in one.likely] == pytest.approx(
            [likely.logprob for likely in other.likely], abs=1e-4
        )
    assert sum(one.from_draft for one in drafted.emitted) == drafted.end.counts.accepted
    assert drafted.end.counts.accepted <= drafted.end.counts.proposed


def learn(oracle: Any, watches: list[Watch], prompts: Any = PROMPTS) -> None:
    oracle.answers.update({tuple(prompt): watch.base_ids for prompt, watch in zip(prompts, watches, strict=True)})


QUICK = [("plain", "cpu"), ("llama", "references"), ("longrope base positions", "cpu")]
MATRIX = slow_but([(case, way) for case in CASES for way in WAYS], *QUICK)


@pytest.mark.parametrize(("case", "way"), MATRIX)
def test_rows_that_join_and_leave_emit_what_they_emit_without_drafts(case, way, opened, oracle):
    model = opened(case, way)
    with engine(model, max_running=3) as made:
        alone = answer_all(made)
    learn(oracle, alone)
    for wrong, ahead in ((0, True), (4, False)):
        oracle.wrong = wrong
        with engine(model, "lookup", ahead, max_running=3) as made:
            drafted = answer_all(made)
        for one, other in zip(drafted, alone, strict=True):
            assert_equal_answers(one, other)
        accepted = sum(one.end.counts.accepted for one in drafted)
        steps = sum(one.end.counts.steps for one in drafted)
        assert accepted > (steps // 3 if case == "plain" and not wrong else steps // 20)


@pytest.mark.parametrize("way", slow_but(WAYS, "cpu"))
def test_eight_rows_have_drafts_of_different_lengths_in_one_step(way, opened, oracle, monkeypatch):
    model, found, real = opened("llama", way), [], Batch.update_codebooks

    def noted(self, ids, drafts=None):
        found.append({len(draft.ids) for draft in drafts.values()} if drafts and len(drafts) < len(self) else set())
        return real(self, ids, drafts)

    with engine(model) as made:
        alone = answer_all(made)
    learn(oracle, alone)
    oracle.wrong = 7
    monkeypatch.setattr(Batch, "update_codebooks", noted)
    with engine(model, "lookup") as made:
        for one, other in zip(answer_all(made), alone, strict=True):
            assert_equal_answers(one, other)
    assert max(map(len, found)) > 1


def test_a_draft_saves_passes_of_the_body(opened, oracle, monkeypatch):
    model, prompt, passes = opened("plain"), PROMPTS[1], []
    for name in ("step", "prefill"):
        real = getattr(model.decoder, name)
        monkeypatch.setattr(
            model.decoder, name, lambda *args, real=real, **options: passes.append(1) or real(*args, **options)
        )

    def answer(draft):
        with engine(model, draft) as made:
            passes.clear()
            return ask(made, prompt, max_tokens=40)[1].wait(), len(passes)

    alone, before = answer("off")
    learn(oracle, [alone], [prompt])
    drafted, after = answer("lookup")
    assert_equal_answers(drafted, alone)
    assert before - after == drafted.end.counts.accepted > 20


@pytest.mark.parametrize("case", slow_but(["longrope", "longrope base positions"], "longrope"))
def test_no_draft_is_read_across_the_position_where_longropes_factors_change(case, opened, oracle, monkeypatch):
    model, ends, real = opened(case), [], SequenceReader.read_last_ids_and_drafts
    border, by_base = model.decoder.rope.long_from, model.config.position_mode == "base_token_end"

    def noted(self, parts):
        for sequence, ids in parts.values():
            book = sequence.book.copy()
            book.push(ids)
            end = book.base_length if by_base else book.mark()
            ends.append((sequence.position_count, end))
        return real(self, parts)

    monkeypatch.setattr(SequenceReader, "read_last_ids_and_drafts", noted)
    for before in (3, 9, 20):
        prompt = tiny.base_ids(border - before, seed=before)
        with engine(model) as made:
            alone = ask(made, prompt, max_tokens=before + 20)[1].wait()
        learn(oracle, [alone], [prompt])
        with engine(model, "lookup") as made:
            assert_equal_answers(ask(made, prompt, max_tokens=before + 20)[1].wait(), alone)
    assert all(end <= border or begin > border for begin, end in ends)
    assert {begin > border for begin, _ in ends} == {False, True}


# ---- ends, sessions and constraints


def test_a_limit_a_stop_and_an_eos_inside_a_draft_end_the_answer_there(opened, oracle):
    model, prompt = opened("plain"), PROMPTS[0]
    with engine(model) as made:
        whole = ask(made, prompt, max_tokens=40)[1].wait()
    learn(oracle, [whole], [prompt])
    with engine(model, "lookup") as made:
        for limit in range(1, 12, 3):
            watch = ask(made, prompt, max_tokens=limit, keep=False)[1].wait()
            assert (watch.base_ids, watch.end.reason) == (whole.base_ids[:limit], "length")
        ended = ask(made, prompt, max_tokens=40, keep=False, eos_ids=frozenset([whole.base_ids[5]]))[1].wait()
    first = whole.base_ids.index(whole.base_ids[5]) + 1
    assert (ended.base_ids, ended.end.reason) == (whole.base_ids[:first], "stop")


@pytest.mark.parametrize("case", ["plain", "llama"])
def test_a_session_goes_on_from_an_answer_that_had_drafts(case, opened, oracle):
    model = opened(case)

    def answers(draft):
        with engine(model, draft) as made:
            first = ask(made, PROMPTS[1], max_tokens=23)[1].wait()
            again = [*PROMPTS[1], *first.base_ids, 4, 5]
            return [first, ask(made, again, max_tokens=20)[1].wait()], again

    alone, again = answers("off")
    learn(oracle, alone, [PROMPTS[1], again])
    drafted, _ = answers("lookup")
    for one, other in zip(drafted, alone, strict=True):
        assert_equal_answers(one, other)
    assert drafted[1].end.counts.cached_tokens == alone[1].end.counts.cached_tokens > len(PROMPTS[1])


@pytest.mark.parametrize("after", [4, 9])
def test_a_request_that_is_cancelled_inside_a_draft_is_kept_as_far_as_it_was_delivered(after, opened, oracle):
    model, prompts = opened("llama"), PROMPTS[:2]
    with engine(model) as made:
        alone = [ask(made, prompt, max_tokens=40)[1].wait() for prompt in prompts]
        told = [*prompts[0], *(one for event in alone[0].emitted[:after] for one in event.base_ids), 7, 8]
        expected = ask(made, told, max_tokens=9, keep=False)[1].wait()
    learn(oracle, alone, prompts)
    with engine(model, "lookup") as made:
        watches = [Watch(), Watch()]
        tickets = []

        def deliver(event):
            watches[0](event)
            if len(watches[0].emitted) == after:
                tickets[0].cancelled = True

        def submit():
            for prompt, to in zip(prompts, (deliver, watches[1]), strict=True):
                tickets.append(made.submit(Submission(prompt, max_tokens=40), to))

        at_once(made, submit)
        assert watches[0].wait().end.reason == "cancelled"
        assert_equal_answers(watches[1].wait(), alone[1])
        again = ask(made, told, max_tokens=9, keep=False)[1].wait()
    assert (len(watches[0].emitted), again.ids) == (after, expected.ids)
    assert again.end.counts.cached_tokens == len(told) - 2


class EvenThenOdd:
    """A constraint: even and odd base ids take turns."""

    def __init__(self) -> None:
        self.count = 0

    def mask(self):
        return np.arange(tiny.VOCAB) % 2 == self.count % 2

    def accepts(self, base_ids):
        return all(one % 2 == (self.count + i) % 2 for i, one in enumerate(base_ids))

    def push(self, base_ids):
        self.count += len(base_ids)


@pytest.mark.parametrize("case", ["plain", "llama"])
def test_constraints_hold_inside_drafts(case, opened, oracle):
    model = opened(case)

    def answers(draft):
        samplings = ({}, {"temp": 0.9, "seed": 2})
        with engine(model, draft) as made:
            asked = [{"constraint": EvenThenOdd(), "sampling": one, "top_logprobs": 2} for one in samplings]
            submit = zip(PROMPTS, asked, strict=False)
            watches = at_once(made, lambda: [ask(made, prompt, **one, max_tokens=30)[1] for prompt, one in submit])
            return [watch.wait() for watch in watches]

    alone = answers("off")
    learn(oracle, alone, PROMPTS[:2])
    drafted = answers("lookup")
    for one, other in zip(drafted, alone, strict=True):
        assert_equal_answers(one, other)
    assert sum(one.end.counts.accepted for one in drafted) > 10


# ---- when nothing is proposed


@pytest.fixture
def waits(monkeypatch):
    """Whether each body waited for the ids."""
    found, real = [], Batch.start_body

    def noted(self, wait=False):
        found.append(wait)
        return real(self, wait)

    monkeypatch.setattr(Batch, "start_body", noted)
    return found


def test_bodies_begin_before_their_ids_are_read_where_no_draft_is_expected(opened, oracle, waits):
    model, prompt = opened("plain"), PROMPTS[0]
    with engine(model) as made:
        alone = ask(made, prompt, max_tokens=20)[1].wait()
    assert not any(waits)
    waits.clear()
    learn(oracle, [Watch()], [prompt])
    with engine(model, "lookup", ahead=True) as made:
        assert_equal_answers(ask(made, prompt, max_tokens=20)[1].wait(), alone)
    assert not any(waits)
    oracle.answers[tuple(prompt)] = alone.base_ids[:12]
    with engine(model, "lookup", ahead=True) as made:
        assert_equal_answers(ask(made, prompt, max_tokens=20)[1].wait(), alone)
    assert {False, True} == set(waits)


@pytest.mark.parametrize("ahead", slow_but([False, True], True))
def test_auto_proposes_by_what_passes_cost_to_requests_alone_and_in_company(opened, oracle, monkeypatch, ahead):
    model, prompts = opened("plain"), PROMPTS[:2]
    with engine(model) as made:
        alone = [ask(made, prompt, max_tokens=60)[1].wait() for prompt in prompts]
    learn(oracle, alone, prompts)
    accepted, together, noted = [], [], []
    real = PassCosts.note_pass

    def note(self, ids, held, seconds, rows):
        noted.append((ids, rows))
        real(self, ids, held, seconds, rows)

    monkeypatch.setattr(PassCosts, "note_pass", note)
    for curve in ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}):
        monkeypatch.setattr(PassCosts, "ratios", lambda self, held, rows, curve=curve: curve)
        with engine(model, "auto", ahead) as made:
            one = ask(made, prompts[0], max_tokens=60, keep=False)[1].wait()
            assert_equal_answers(one, alone[0])
            accepted.append(one.end.counts.accepted)
            watches = at_once(made, lambda: [ask(made, prompt, max_tokens=60)[1] for prompt in prompts])
            for watch, other in zip(watches, alone, strict=True):
                assert_equal_answers(watch.wait(), other)
            together.append(min(watch.end.counts.accepted for watch in watches))
    assert accepted[0] > 30 < together[0]
    assert accepted[1] <= 7 >= together[1]  # a trial
    assert {(1, 1), (16, 1)} <= set(noted)
    assert {rows for _, rows in noted} == {1, 2}


def test_ways_to_draft_that_there_are_not_are_refused(tmp_path):
    with pytest.raises(GenerationError, match=r"draft \(--draft\) must be one of off, lookup, head, auto, got 'magic'"):
        open_cuda_engine(tmp_path, device="cpu", draft="magic")
