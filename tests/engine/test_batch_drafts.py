"""Drafts of several rows of a batch: each row's answer is what it is alone and without a draft."""

import random
from collections import Counter
from typing import ClassVar

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip.engine import Submission
from mlx_zip.engine.sessions.store import SessionOptions
from mlx_zip.models.batching import restore_columns
from support import tiny
from support.serving import Watch, ask, at_once, tiny_engine
from support.slow_cases import slow_but

FAMILIES = ["llama", "phi3", "gemma2", "qwen3", "plain"]


class Oracles:
    """Propose the answers that are known by their prompts, each with every so-many-th id replaced; for `Lookup`.

    answers: by prompt, (base ids, `wrong`), where `wrong` 0 replaces none. A prompt that is not there gets no draft.
    """

    answers: ClassVar[dict[tuple[int, ...], tuple[list[int], int]]] = {}

    def __init__(self, base_ids=()):
        self._answer, self._wrong = self.answers.get(tuple(base_ids), ([], 0))
        self._at = 0

    def append(self, base_ids):
        self._at += len(base_ids)

    def match_length(self):
        return self.propose(0)[1]

    def propose(self, most):
        found = list(self._answer[self._at : self._at + most])
        for i in range(len(found)) if self._wrong else ():
            found[i] = (found[i] + 1) % tiny.VOCAB if (self._at + i) % self._wrong == 0 else found[i]
        return np.array(found, np.uint32), 9 if self._at < len(self._answer) else 0


@pytest.fixture
def oracles(monkeypatch):
    class Own(Oracles):
        answers: ClassVar = {}

    monkeypatch.setattr("mlx_zip.engine.draft_sources.Lookup", Own)
    return Own


def prompts_of(lengths):
    return [tiny.base_ids(length, seed) for seed, length in enumerate(lengths)]


SAMPLINGS = [
    {},
    {"temp": 0.9, "seed": 7},
    {"repetition_penalty": 1.3, "logit_bias": {3: 1.5}},
    {"temp": 1.1, "top_k": 12, "min_p": 0.01, "top_p": 0.95, "seed": 11},
    {},
    {"presence_penalty": 0.4},
]


TIE = 1e-5  # of two log-probabilities whose order is a matter of rounding


def options_of(row, max_tokens=30):
    limit = max_tokens - 5 * (row % 3)
    return {"sampling": SAMPLINGS[row % len(SAMPLINGS)], "max_tokens": limit, "keep": False, "top_logprobs": 2}


_ALONE: dict[tuple, Watch] = {}  # what a request gets alone is computed once for all tests


def answers_alone(family, prompts, model=None):
    keys = [(family, repr(model), row, *prompt) for row, prompt in enumerate(prompts)]
    if any(key not in _ALONE for key in keys):
        with tiny_engine(family, model=model) as engine:
            for row, (key, prompt) in enumerate(zip(keys, prompts, strict=True)):
                if key not in _ALONE:
                    _ALONE[key] = ask(engine, prompt, **options_of(row))[1].wait()
    return [_ALONE[key] for key in keys]


def steps_before_a_tie(watch):
    """Returns how many steps an answer takes before its two best ids are equally likely but for rounding."""
    close = (i for i, one in enumerate(watch.emitted) if one.likely[0].logprob - one.likely[1].logprob < TIE)
    return next(close, len(watch.emitted))


def assert_same(watches, expected):
    """Compares the answers of rows with those that requests get alone; after a tie a row may go on in two ways."""
    for watch, one in zip(watches, expected, strict=True):
        end = steps_before_a_tie(one)
        assert watch.wait().ids[:end] == one.ids[:end]
        assert [event.base_ids for event in watch.emitted[:end]] == [event.base_ids for event in one.emitted[:end]]
        assert [event.logprob for event in watch.emitted[:end]] == pytest.approx(
            [event.logprob for event in one.emitted[:end]], abs=5e-5
        )
        assert end < len(one.ids) or watch.end.reason == one.end.reason
        assert watch.end.counts.accepted == sum(event.from_draft for event in watch.emitted)
    compared, steps = sum(map(steps_before_a_tie, expected)), sum(len(one.ids) for one in expected)
    assert compared > steps / 3


MODES = [(family, mode) for family in FAMILIES[:-1] for mode in ("compressed", "base_token_end")]


@pytest.mark.parametrize(
    ("family", "mode"),
    slow_but([*MODES, ("plain", None)], ("llama", "compressed"), ("llama", "base_token_end"), ("plain", None)),
)
@pytest.mark.parametrize("rows", slow_but([2, 6, 8], 6))
def test_rows_get_what_they_get_alone_and_without_a_draft(family, mode, rows, oracles):
    model = mode and {"position_mode": mode}
    prompts = prompts_of([9, 3, 22, 9, 17, 30, 5, 12][:rows])
    expected = answers_alone(family, prompts, model=model)
    wrongs = [0, 3, 7, None, 2, 5, 0, 4]  # None: nothing is proposed
    for prompt, one, wrong in zip(prompts, expected, wrongs, strict=False):
        if wrong is not None:
            oracles.answers[tuple(prompt)] = one.base_ids, wrong
    with tiny_engine(family, run={"draft": "lookup"}, model=model) as engine:
        watches = at_once(engine, lambda: [ask(engine, p, **options_of(row))[1] for row, p in enumerate(prompts)])
        assert_same(watches, expected)
    accepted = sum(watch.end.counts.accepted for watch in watches)
    assert accepted > sum(watch.end.counts.steps for watch in watches) / 8
    assert accepted < sum(watch.end.counts.proposed for watch in watches)


def test_rows_of_a_batch_take_their_drafts_in_common_passes(oracles):
    """Rows with right drafts take as many passes as one of them, and a row that waits for others loses no id."""
    prompts, calls = prompts_of([9, 14, 20, 11]), Counter()
    expected = answers_alone("llama", prompts)
    for prompt, one in zip(prompts, expected, strict=True):
        oracles.answers[tuple(prompt)] = one.base_ids, 0

    def count(model):
        kind, real = type(model), type(model).__call__

        def call(self, ids, *args, **options):
            calls[ids.shape[0]] += self is model
            return real(self, ids, *args, **options)

        undo.setattr(kind, "__call__", call)

    with pytest.MonkeyPatch.context() as undo, tiny_engine(run={"draft": "lookup"}, change=count) as engine:
        calls.clear()
        watches = at_once(engine, lambda: [ask(engine, p, **options_of(row))[1] for row, p in enumerate(prompts)])
        assert_same(watches, expected)
    steps = max(one.end.counts.steps for one in expected)
    assert sum(calls[rows] for rows in (2, 3, 4)) < steps / 2


POLICIES = [(family, policy) for family in FAMILIES[:-1] for policy in ("freeze", "lru")]


@pytest.mark.parametrize(
    ("family", "policy"), slow_but([*POLICIES, ("plain", None)], ("llama", "freeze"), ("plain", None))
)
def test_rows_that_join_and_leave_in_the_middle_of_a_draft(family, policy, oracles):
    model = policy and {"compression": {**tiny.tiny_config()["zip2zip"]["compression"], "policy": policy}}
    lengths = [random.Random(seed).randint(2, 40) for seed in range(8)]
    prompts = prompts_of(lengths)
    expected = answers_alone(family, prompts, model=model)
    for row, (prompt, one) in enumerate(zip(prompts, expected, strict=True)):
        if row % 4 != 3:
            oracles.answers[tuple(prompt)] = one.base_ids, row % 4 * 3
    with tiny_engine(family, run={"draft": "lookup"}, model=model, max_running=3) as engine:
        watches = [ask(engine, prompt, **options_of(row))[1] for row, prompt in enumerate(prompts)]
        assert_same(watches, expected)


def test_a_request_cancelled_in_the_middle_of_a_draft_leaves_the_others_their_answers(oracles):
    prompts = prompts_of([9, 14, 20])
    expected = answers_alone("llama", prompts)
    for prompt, one in zip(prompts, expected, strict=True):
        oracles.answers[tuple(prompt)] = one.base_ids, 0
    with tiny_engine(run={"draft": "lookup"}, sessions=SessionOptions()) as engine:
        tickets, watches = [], [Watch() for _ in prompts]

        class Cancelling(Watch):
            def __call__(self, event):
                super().__call__(event)
                if len(self.emitted) == 4:
                    tickets[1].cancelled = True

        watches[1] = Cancelling()

        def submit():
            for row, (prompt, watch) in enumerate(zip(prompts, watches, strict=True)):
                tickets.append(engine.submit(Submission(prompt, **options_of(row) | {"keep": True}), watch))

        at_once(engine, submit)
        assert_same([watches[0], watches[2]], [expected[0], expected[2]])
        cancelled = watches[1].wait()
        assert cancelled.end.reason == "cancelled"
        assert cancelled.ids == expected[1].ids[: len(cancelled.ids)]
        following = [*prompts[1], *cancelled.base_ids]
        kept, fresh = (ask(engine, following, keep=keep)[1].wait() for keep in (True, False))
        assert kept.end.counts.cached_tokens > 0
        assert kept.base_ids == fresh.base_ids


@pytest.mark.parametrize("family", ["llama", "plain"])
def test_sessions_of_rows_with_drafts_go_on_as_those_without(family, oracles):
    prompts = prompts_of([9, 14, 20, 11])
    turns = []
    for draft in ("off", "lookup"):
        with tiny_engine(family, run={"draft": draft}, sessions=SessionOptions()) as engine:

            def submit(base_ids, engine=engine):
                return [ask(engine, one, max_tokens=20)[1] for one in base_ids]

            first = [watch.wait() for watch in at_once(engine, lambda submit=submit: submit(prompts))]
            for prompt, watch, wrong in zip(prompts, first, (0, 3, 0, 5), strict=True):
                oracles.answers[tuple(prompt)] = watch.base_ids, wrong
            following = [[*prompt, *watch.base_ids, 5, 6] for prompt, watch in zip(prompts, first, strict=True)]
            second = [watch.wait() for watch in at_once(engine, lambda s=submit, f=following: s(f))]
            assert all(watch.end.counts.cached_tokens > len(prompts[0]) for watch in second)
            turns.append([watch.ids for watch in (*first, *second)])
    assert turns[0] == turns[1]


def test_long_padding_that_all_rows_have_is_given_up():
    model = tiny.tiny_model("llama").eval()
    cache = model.make_cache(left_padding=[0, 0])
    ids = np.array([tiny.base_ids(6, 0), tiny.base_ids(6, 1)], np.uint32)
    for turn in range(40):
        before, books = cache[-1].offset, [book.copy() for book in cache[-1].books]
        model(mx.array(ids[:, :4]), cache=cache, causal=True)
        model.trim_cache(cache, before)
        cache[-1].books[:] = books
        kept = [4, 1] if turn % 2 else [1, 4]
        for row, n in enumerate(kept):
            for one in ids[row, :n].tolist():
                cache[-1].push_to_sequence(row, one)
        restore_columns(cache, kept)
    assert [book.mark() for book in cache[-1].books] == [100, 100]
    assert cache[-1].offset < 100 + 64
    assert cache[0]._idx == cache[-1].offset
    assert cache[0].left_padding.tolist() == cache[-1].left_padding
