"""The MLX engine: each request gets what `stream_generate` gives, alone and in company."""

import functools
import random
import time
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip.codec import compress_next
from mlx_zip.engine import Emitted, Failed, Finished, Progress, Started, Submission
from mlx_zip.engine.mlx.group import Group, Reading
from mlx_zip.engine.sessions.store import SessionOptions
from mlx_zip.models.longrope_refill import LongRopeRefill
from support import tiny
from support.generating import plain_model
from support.serving import SAME, WAIT_S, Broken, alone, ask, at_once, both, logprobs_of, prompts, same, tiny_engine
from support.slow_cases import slow_but

FAMILIES = ["llama", "phi3", "gemma2", "plain"]


@functools.cache
def twin(family="llama"):
    """The model that an engine has, for this thread."""
    return plain_model() if family == "plain" else tiny.tiny_model(family).eval()


@functools.cache
def _known(family, prompt, max_tokens, options):
    return alone(twin(family), list(prompt), max_tokens=max_tokens, **dict(options))


def known(prompt, max_tokens=40, family="llama", **options):
    """What `stream_generate` yields with the twin of an engine's model, generated once for all tests."""
    return _known(family, tuple(prompt), max_tokens, tuple(options.items()))


def canonical(model):
    model.row_source.config = replace(model.config, canonical=True)


# ---- the ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ahead", [False, True])
def test_one_request_gets_the_ids_of_stream_generate(family, ahead):
    prompt = tiny.base_ids(50)
    with tiny_engine(family, run={"ahead": ahead}) as engine:
        _, watch = ask(engine, prompt, max_tokens=20)
        same(watch.wait(), known(prompt, 20, family))
        assert isinstance(watch.events[0], Started)
        assert isinstance(watch.end, Finished)


@pytest.mark.parametrize("family", slow_but(FAMILIES, "llama"))
@pytest.mark.parametrize("ahead", [False, True])
def test_requests_in_company_get_the_ids_that_they_get_alone(family, ahead):
    with tiny_engine(family, run={"ahead": ahead}) as engine:
        watches = [ask(engine, prompt, max_tokens=12 + 4 * i)[1] for i, prompt in enumerate(prompts(5))]
        for i, (watch, prompt) in enumerate(zip(watches, prompts(5), strict=True)):
            same(watch.wait(), known(prompt, 12 + 4 * i, family))


def read_together(monkeypatch):
    """Returns a list that gets the sizes of the batches whose prompts are read in one call."""
    sizes, real = [], Reading._read_together

    def noted(self, readings):
        sizes.append(len(readings))
        return real(self, readings)

    monkeypatch.setattr(Reading, "_read_together", noted)
    return sizes


@pytest.mark.parametrize("family", slow_but(FAMILIES, "phi3"))
@pytest.mark.parametrize("ahead", [False, True])
def test_short_prompts_that_come_together_are_read_in_one_call(family, ahead, monkeypatch):
    sizes, some = read_together(monkeypatch), [tiny.base_ids(40 + i, seed=i) for i in range(5)]
    with tiny_engine(family, run={"ahead": ahead}) as engine:
        watches = at_once(engine, lambda: [ask(engine, prompt, max_tokens=12)[1] for prompt in some])
        for watch, prompt in zip(watches, some, strict=True):
            same(watch.wait(), known(prompt, 12, family))
            told = next(event for event in watch.events if isinstance(event, Progress))
            assert told == Progress(watch.end.counts.prompt_ids, watch.end.counts.prompt_ids)
    assert sizes == [5]


def test_a_prompt_whose_first_id_cannot_be_chosen_fails_alone_among_those_read_with_it(monkeypatch):
    sizes, some = read_together(monkeypatch), [tiny.base_ids(20, seed=i) for i in range(3)]
    with tiny_engine() as engine:
        watches = at_once(
            engine,
            lambda: [
                ask(engine, prompt, max_tokens=9, constraint=Broken("mask", after=0) if i == 1 else None)[1]
                for i, prompt in enumerate(some)
            ],
        )
        assert isinstance(watches[1].wait().end, Failed)
        for i in (0, 2):
            same(watches[i].wait(), alone(twin(), some[i], max_tokens=9))
    assert sizes == [3]


@pytest.mark.slow
@both
def test_requests_that_arrive_at_any_time_get_the_ids_that_they_get_alone(kind):
    rng, watches = random.Random(1), []
    with tiny_engine(kind=kind, max_running=4) as engine:
        for i, prompt in enumerate(prompts(16)):
            watches.append(ask(engine, prompt, max_tokens=10 + 3 * i)[1])
            time.sleep(rng.random() * 0.02)
        for i, (watch, prompt) in enumerate(zip(watches, prompts(16), strict=True)):
            SAME[kind](watch.wait(), alone(twin(), prompt, max_tokens=10 + 3 * i))


OPTIONS = [
    {"temp": 0.8, "seed": 3},
    {"temp": 1.3, "top_p": 0.9, "seed": 4},
    {"temp": 1.0, "top_k": 9, "min_p": 0.05, "min_tokens_to_keep": 2, "seed": 2**63 + 5},
    {"temp": 0.9, "xtc_probability": 0.6, "xtc_threshold": 0.05, "seed": 6},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
    {"logit_bias": {5: 4.0, 7: -8.0}, "presence_penalty": 0.5, "temp": 0.7, "seed": 8},
]


@pytest.mark.parametrize("family", slow_but(["llama", "plain"], "plain"))
def test_sampling_gives_the_same_alone_in_company_and_in_stream_generate(family):
    expected = [
        alone(twin(family), prompt, max_tokens=15, **options)
        for prompt, options in zip(prompts(6), OPTIONS, strict=True)
    ]
    with tiny_engine(family) as engine:
        for prompt, options, wanted in zip(prompts(6), OPTIONS, expected, strict=True):
            same(ask(engine, prompt, max_tokens=15, sampling=options)[1].wait(), wanted)
        pairs = list(zip(prompts(6), OPTIONS, strict=True))
        watches = [ask(engine, prompt, max_tokens=15, sampling=options)[1] for prompt, options in pairs]
        for watch, wanted in zip(watches, expected, strict=True):
            same(watch.wait(), wanted)


@both
def test_a_request_without_a_seed_gets_random_numbers_of_its_own(kind):
    with tiny_engine(kind=kind) as engine:
        watches = [ask(engine, tiny.base_ids(9), max_tokens=20, sampling={"temp": 1.5})[1] for _ in range(3)]
        answers = {tuple(watch.wait().ids) for watch in watches}
    assert len(answers) == 3


def test_canonical_decoding_goes_on_when_rows_move():
    model = tiny.tiny_model().eval()
    canonical(model)
    with tiny_engine(change=canonical) as engine:
        watches = [ask(engine, prompt, max_tokens=10 + 6 * i)[1] for i, prompt in enumerate(prompts(6))]
        for i, (watch, prompt) in enumerate(zip(watches, prompts(6), strict=True)):
            same(watch.wait(), alone(model, prompt, max_tokens=10 + 6 * i))


BESIDE_THE_BORDER = [tiny.base_ids(n, n) for n in (20, 28, 40, 5)]


@functools.cache
def beyond_the_border(mode):
    """What `stream_generate` yields where LongRoPE's factors switch during an answer."""
    model = tiny.tiny_model("phi3", position_mode=mode).eval()
    return [alone(model, prompt, max_tokens=60) for prompt in BESIDE_THE_BORDER]


@pytest.mark.parametrize("mode", slow_but(["compressed", "base_token_end"], "compressed"))
@pytest.mark.parametrize("ahead", [False, True])
def test_rows_leave_a_batch_when_longrope_switches_and_come_together_again(mode, ahead):
    changes = {"position_mode": mode}
    expected = beyond_the_border(mode)
    with tiny_engine("phi3", model=changes, run={"ahead": ahead}) as engine:
        watches = [ask(engine, prompt, max_tokens=60)[1] for prompt in BESIDE_THE_BORDER]
        for watch, wanted in zip(watches, expected, strict=True):
            same(watch.wait(), wanted)


@pytest.fixture
def work(monkeypatch):
    """What engines do, in order: ("again", ids) for a context that is read again, ("step", requests) for a step."""
    seen, read, launch = [], LongRopeRefill.read_next, Group.launch_pass

    def noting_read(self, at_most):
        before = self.done
        h = read(self, at_most)
        seen.append(("again", self.done - before))
        return h

    def noting_launch(self):
        seen.append(("step", [len(request.checked.base_ids) for request in self.requests]))
        return launch(self)

    monkeypatch.setattr(LongRopeRefill, "read_next", noting_read)
    monkeypatch.setattr(Group, "launch_pass", noting_launch)
    return seen


def far(border):
    """A change of a model's original context."""

    def change(model):
        model.traits = type(model.traits)(**{**vars(model.traits), "long_context": border})

    return change


@functools.cache
def read_again_alone(mode, border):
    """(prompts, of which the first one's answer crosses LongRoPE's border; what `stream_generate` yields)."""
    model = tiny.tiny_model("phi3", position_mode=mode).eval()
    far(border)(model)
    some = [tiny.base_ids(85 if mode == "base_token_end" else 190, 3), [5, 6], [7, 8, 9]]
    return some, [alone(model, one, max_tokens=n) for one, n in zip(some, (60, 80, 80), strict=True)]


@pytest.mark.parametrize("mode", slow_but(["compressed", "base_token_end"], "compressed"))
@pytest.mark.parametrize("ahead", [False, True])
def test_a_context_is_read_again_in_chunks_between_the_steps_of_others(mode, ahead, work):
    changes, chunk, border = {"position_mode": mode}, 8, 90
    some, expected = read_again_alone(mode, border)
    work.clear()
    options = {"run": {"ahead": ahead, "prefill_step_size": chunk}, "model": changes, "change": far(border)}
    with tiny_engine("phi3", **options) as engine:
        watches = at_once(
            engine, lambda: [ask(engine, one, max_tokens=n)[1] for one, n in zip(some, (60, 80, 80), strict=True)]
        )
        for watch, wanted in zip(watches, expected, strict=True):
            same(watch.wait(), wanted)
    at = [place for place, (what, _) in enumerate(work) if what == "again"]
    read = [work[place][1] for place in at]
    assert len(read) > 5
    assert max(read) == chunk
    for before, after in pairwise(at):  # both others take a step between two chunks
        stepped = [one for _, requests in work[before + 1 : after] for one in requests]
        assert sorted(stepped) == [2, 3]
    told = [event for event in watches[0].events if isinstance(event, Progress)]
    total = sum(read) + 1
    assert told[-len(read) - 1 :] == [
        *(Progress(sum(read[: n + 1]), total) for n in range(len(read))),
        Progress(total, total),
    ]


def test_a_prompt_that_goes_on_beyond_longropes_border_is_read_after_its_session_in_chunks(work):
    model, ids = tiny.tiny_model("phi3").eval(), tiny.base_ids(200, 4)
    far(60)(model)
    run = {"prefill_step_size": 8}
    with tiny_engine("phi3", change=far(60), sessions=SessionOptions(), run=run) as engine:
        ask(engine, ids[:60], max_tokens=3)[1].wait()
        first = len(work)
        watch = ask(engine, ids, max_tokens=9)[1].wait()
        assert watch.events[0].cached_tokens > 40
        same(watch, alone(model, ids, max_tokens=9))
        again = [count for what, count in work[first:] if what == "again"]
        assert len(again) > 3
        reads = [event for event in watch.events if isinstance(event, Progress)]
        assert reads[-1] == Progress(reads[0].total, watch.events[0].prompt_ids + sum(again))
        below = ask(engine, ids[:50], max_tokens=9)[1].wait()  # a copy of the session, trimmed
        assert below.events[0].cached_tokens > 30
        same(below, alone(model, ids[:50], max_tokens=9))


def test_a_request_that_is_cancelled_while_its_context_is_read_again_leaves_a_whole_session(monkeypatch):
    model, prompt, read, tickets = tiny.tiny_model("phi3").eval(), tiny.base_ids(20, 5), LongRopeRefill.read_next, []
    with tiny_engine("phi3", sessions=SessionOptions(), run={"prefill_step_size": 8}) as engine:

        def cancelling(self, at_most):
            engine.cancel(tickets[0])
            return read(self, at_most)

        with monkeypatch.context() as patch:
            patch.setattr(LongRopeRefill, "read_next", cancelling)
            _, watch = at_once(engine, lambda: _asked(engine, prompt, tickets))
            watch.wait()
        assert watch.end.reason == "cancelled"
        rest = [*watch.emitted[-1].base_ids, 5]
        again = ask(engine, [*prompt, *watch.base_ids, 5], max_tokens=20)[1].wait()
        assert again.events[0].cached_tokens == len(prompt) + len(watch.base_ids) - len(rest) + 1
        cache = model.make_cache()
        ids = [*compress_next(cache[-1].books[0], prompt).tolist(), *watch.ids[:-1]]
        model(mx.array([ids]), cache=cache)
        same(again, alone(model, rest, max_tokens=20, prompt_cache=cache))


def _asked(engine, prompt, tickets):
    """Submits a request and notes its ticket."""
    made = ask(engine, prompt, max_tokens=200)
    tickets.append(made[0])
    return made


def test_quantized_caches_take_turns():
    kv = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 20}
    changes = {"hidden": 128}
    model = tiny.tiny_model(**changes).eval()
    with tiny_engine(run=kv, model=changes) as engine:
        watches = [ask(engine, prompt, max_tokens=25)[1] for prompt in prompts(3)]
        for watch, prompt in zip(watches, prompts(3), strict=True):
            same(watch.wait(), alone(model, prompt, max_tokens=25, **kv))


@both
def test_a_long_prompt_is_read_in_chunks_and_nobody_waits_for_it(kind):
    changes, long = {"run": {"prefill_step_size": 16}}, tiny.base_ids(400)
    with tiny_engine(kind=kind, **changes) as engine:
        _, short = ask(engine, tiny.base_ids(9), max_tokens=30)
        _, watch = ask(engine, long, max_tokens=5)
        SAME[kind](watch.wait(), known(long, 5, prefill_step_size=16))
        short.wait()
        reads = [event.read for event in watch.events if isinstance(event, Progress)]
        assert len(reads) > 5
        assert reads[-1] == watch.events[0].prompt_ids
        first = next(time for event, time in zip(watch.events, watch.times, strict=True) if isinstance(event, Emitted))
        assert sum(time < first for time in short.times) > 8


@both
def test_two_prompts_are_read_in_turn(kind):
    with tiny_engine(kind=kind, run={"prefill_step_size": 16}) as engine:
        seen = []

        def submit(name):
            submission = Submission(tiny.base_ids(300, ord(name)), max_tokens=3)
            return engine.submit(submission, lambda event: seen.append((name, event)))

        at_once(engine, lambda: [submit(name) for name in "ab"])
        engine.close(drain_s=WAIT_S)
        turns = "".join(name for name, event in seen if isinstance(event, Progress))
    assert "abab" in turns


# ---- what is told with an id


@both
def test_expansions_and_counts_are_those_of_stream_generate(kind):
    prompt = tiny.base_ids(50)
    with tiny_engine(kind=kind) as engine:
        watch = ask(engine, prompt, max_tokens=41)[1].wait()
    expected = known(prompt, 41)
    SAME[kind](watch, expected)
    counts, last = watch.end.counts, expected[-1]
    assert (counts.prompt_tokens, counts.prompt_ids) == (last.prompt_tokens, last.prompt_ids)
    assert (counts.base_tokens, counts.steps, counts.hypertokens) == (41, last.steps, last.hypertokens)
    assert counts.hypertokens
    assert counts.entries > 0
    assert counts.codebook_size == tiny.SLOTS
    assert counts.kv_bytes_saved > 0
    assert 0 < counts.queued_s < counts.first_id_s < counts.total_s


@both
def test_learned_entries_are_the_ones_that_the_codebook_gets(kind):
    prompt = tiny.base_ids(20)
    with tiny_engine(kind=kind, model={"start": [[5, 6], [7, 8]]}) as engine:
        watch = ask(engine, prompt, max_tokens=60, show=True)[1].wait()
    learned = [entry for event in watch.emitted for entry in event.learned]
    assert learned
    held = tiny.tiny_model(start=[[5, 6], [7, 8]]).eval().make_cache()
    book = held[-1].books[0]
    book.push(compress_next(book, prompt))
    before = len(book)
    for one in watch.ids[:-1]:
        book.push(one)
    assert learned == [book.entry(slot) for slot in range(before, len(book))]


@pytest.mark.parametrize("company", [0, 2])
def test_log_probabilities_are_those_that_the_id_was_chosen_from(company):
    prompt, options = tiny.base_ids(30), {"temp": 0.8, "seed": 3, "logit_bias": {5: 2.0}}
    expected = alone(twin(), prompt, max_tokens=12, **options)
    with tiny_engine() as engine:
        others = [ask(engine, tiny.base_ids(9, i), max_tokens=14)[1] for i in range(company)]
        watch = ask(engine, prompt, max_tokens=12, sampling=options, top_logprobs=4)[1].wait()
        assert all(one.logprob is None for other in others for one in other.wait().emitted)
    same(watch, expected)
    for event, response in zip(watch.emitted, expected, strict=True):
        logprobs = logprobs_of(response)
        assert event.logprob == pytest.approx(logprobs[event.id], abs=1e-4)
        wanted = np.sort(logprobs)[::-1][:4]
        np.testing.assert_allclose([one.logprob for one in event.likely], wanted, atol=1e-4)
        assert all(isinstance(one.logprob, float) for one in event.likely)


@both
def test_impossible_ids_are_not_among_the_likely_ones(kind):
    bias = {i: -float("inf") for i in range(tiny.VOCAB) if i not in (5, 9)}
    with tiny_engine("plain", kind=kind) as engine:
        watch = ask(engine, [3, 4], max_tokens=4, sampling={"logit_bias": bias}, top_logprobs=6)[1].wait()
    assert all({one.base_ids for one in event.likely} == {(5,), (9,)} for event in watch.emitted)


@both
def test_log_probabilities_of_zero_likely_ids_are_the_chosen_id_s_alone(kind):
    with tiny_engine(kind=kind) as engine:
        watch = ask(engine, [3, 4], max_tokens=4, top_logprobs=0)[1].wait()
    assert all(event.logprob is not None and event.likely == () for event in watch.emitted)


# ---- limits


@both
def test_an_answer_ends_inside_a_hypertoken_at_its_limit(kind):
    prompt, whole = tiny.base_ids(50), known(tiny.base_ids(50))
    at = next(i for i, one in enumerate(whole) if len(one.base_ids) > 1)
    limit = sum(len(one.base_ids) for one in whole[:at]) + 1
    with tiny_engine(kind=kind) as engine:
        watch = ask(engine, prompt, max_tokens=limit)[1].wait()
    assert len(watch.base_ids) == limit
    assert watch.end.reason == "length"
    assert watch.emitted[-1].id == whole[at].token
    assert watch.emitted[-1].base_ids == whole[at].base_ids[:1]


@both
def test_an_eos_inside_an_expansion_ends_the_answer(kind):
    prompt, whole = tiny.base_ids(50), known(tiny.base_ids(50))
    flat = [one for response in whole for one in response.base_ids]
    at = next(i for i, one in enumerate(whole) if len(one.base_ids) > 1 and one.base_ids[0] not in flat[:i])
    eos = whole[at].base_ids[0]
    with tiny_engine(kind=kind) as engine:
        watch = ask(engine, prompt, eos_ids=frozenset({eos}))[1].wait()
    assert watch.end.reason == "stop"
    assert watch.base_ids == flat[: flat.index(eos) + 1]


@both
def test_the_context_ends_an_answer_without_a_limit(kind):
    prompt = tiny.base_ids(500)
    with tiny_engine("plain", kind=kind) as engine:
        watch = ask(engine, prompt, max_tokens=-1)[1].wait()
    assert watch.end.reason == "length"
    assert len(watch.base_ids) == 12


# ---- what requests share


@pytest.mark.slow
def test_memory_is_given_back():
    with tiny_engine() as engine:
        [watch.wait() for _, watch in [ask(engine, prompt) for prompt in prompts(8)]]
        engine.sessions()
        before = mx.get_active_memory()
        [watch.wait() for _, watch in [ask(engine, prompt) for prompt in prompts(24)]]
        engine.sessions()
        assert mx.get_active_memory() <= before + 20_000


def test_a_row_that_would_be_mostly_padding_stays_out_of_the_batch(monkeypatch):
    model, sizes = twin(), set()
    with tiny_engine() as engine:
        served = engine._scheduler.served
        served._weight_bytes = served.kv_bytes_per_id * 100
        some = [tiny.base_ids(400, 1), tiny.base_ids(8, 2), tiny.base_ids(10, 3)]
        work = engine._scheduler.run_round

        def counted():
            work()
            sizes.add(tuple(sorted(len(group.requests) for group in engine._scheduler.groups)))

        monkeypatch.setattr(engine._scheduler, "run_round", counted)
        watches = at_once(engine, lambda: [ask(engine, prompt, max_tokens=25)[1] for prompt in some])
        for watch, prompt in zip(watches, some, strict=True):
            same(watch.wait(), alone(model, prompt, max_tokens=25))
        assert (1, 2) in sizes
        assert (3,) not in sizes


def test_groups_that_an_end_lets_merge_are_merged_once_their_step_is_done():
    model, limits = twin(), (4, 25, 25)
    with tiny_engine(run={"ahead": True}) as engine:
        served = engine._scheduler.served
        served._weight_bytes = served.kv_bytes_per_id * 30  # 171, 151 and 128 ids: the last joins when the first ends
        some = [tiny.base_ids(length, seed) for seed, length in enumerate((430, 380, 300), start=1)]
        asked = list(zip(some, limits, strict=True))
        watches = at_once(engine, lambda: [ask(engine, prompt, max_tokens=n)[1] for prompt, n in asked])
        for watch, (prompt, n) in zip(watches, asked, strict=True):
            same(watch.wait(), alone(model, prompt, max_tokens=n))


@both
def test_the_first_of_two_prompts_answers_before_the_second_is_read(kind):
    with tiny_engine("plain", kind=kind, run={"prefill_step_size": 128}) as engine:
        watches = [ask(engine, tiny.base_ids(100, i), max_tokens=3)[1] for i in range(2)]
        first, second = (watch.wait() for watch in watches)

    def time_of(watch, kind):
        return next(time for event, time in zip(watch.events, watch.times, strict=True) if isinstance(event, kind))

    assert time_of(first, Emitted) < time_of(second, Progress)
