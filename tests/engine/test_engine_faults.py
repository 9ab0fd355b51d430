"""What goes wrong in one request harms no other, and what ends the engine is told to everybody."""

import random
import re
import time

import pytest

from mlx_zip.engine import Failed, Finished, Submission, events
from mlx_zip.engine.sessions.store import SessionOptions
from mlx_zip.errors import (
    EngineBusyError,
    EngineError,
    GenerationError,
    PromptTooLongError,
)
from support import tiny
from support.serving import NEEDS_TORCH, SAME, Broken, Watch, alone, ask, both, prompts, same, tiny_engine

LONG = 400


@pytest.fixture(scope="module")
def expected():
    return [alone(tiny.tiny_model().eval(), prompt, max_tokens=15) for prompt in prompts(3)]


# ---- one request's own faults


@both
@pytest.mark.parametrize("method", ["mask", "push"])
def test_a_constraint_that_raises_fails_its_request_only(kind, method, expected):
    with tiny_engine(kind=kind) as engine:
        good = [ask(engine, prompt, max_tokens=15)[1] for prompt in prompts(3)]
        bad = ask(engine, tiny.base_ids(9, 7), constraint=Broken(method))[1].wait()
        assert isinstance(bad.end, Failed)
        assert isinstance(bad.end.error, EngineError)
        assert "broken" in str(bad.end.error)
        for watch, wanted in zip(good, expected, strict=True):
            SAME[kind](watch.wait(), wanted)
        assert engine.alive
        assert engine.figures().failed == 1


@both
@pytest.mark.parametrize("error", [ValueError, GenerationError])
def test_the_error_of_a_failed_request_keeps_no_memory_alive(kind, error):
    with tiny_engine(kind=kind) as engine:
        watch = ask(engine, tiny.base_ids(9), constraint=Broken("mask", error=error))[1].wait()
    waiting = [watch.end.error]
    while waiting:
        one = waiting.pop()
        assert one.__traceback__ is None
        waiting += [other for other in (one.__cause__, one.__context__) if other is not None]


@both
def test_a_receiver_that_raises_is_left_alone_and_harms_nobody(kind, expected):
    with tiny_engine(kind=kind) as engine:
        bad = Watch(raise_at=4)
        engine.submit(Submission(tiny.base_ids(9, 7), max_tokens=LONG), bad)
        for prompt, wanted in zip(prompts(3), expected, strict=True):
            SAME[kind](ask(engine, prompt, max_tokens=15)[1].wait(), wanted)
        assert len(bad.events) == 5
        assert engine.alive
        while engine.figures().running:  # the figures of a round are those at its end
            time.sleep(0.001)


def test_a_prompt_that_cannot_be_read_fails_its_request_only(expected):
    def change(model):
        call = type(model).__call__

        class Fails(type(model)):
            def __call__(self, ids, cache=None, **options):
                if ids.shape[1] == 77:
                    raise RuntimeError("out of memory")
                return call(self, ids, cache=cache, **options)

        model.__class__ = Fails

    with tiny_engine(change=change, run={"prefill_step_size": 77}) as engine:
        good = [ask(engine, prompt, max_tokens=15)[1] for prompt in prompts(3)]
        book = tiny.tiny_model().make_cache()[-1].books[0]
        some = next(n for n in range(78, 500) if len(book.compress(tiny.base_ids(n))) > 100)
        bad = ask(engine, tiny.base_ids(some))[1].wait()
        assert "out of memory" in str(bad.end.error)
        for watch, wanted in zip(good, expected, strict=True):
            same(watch.wait(), wanted)


def test_a_step_that_fails_ends_the_requests_in_it_and_the_engine_goes_on(expected):
    broken = []

    def change(model):
        call = type(model).__call__

        class Fails(type(model)):
            def __call__(self, ids, cache=None, **options):
                if len(ids) == 3 and not broken:
                    broken.append(True)
                    raise RuntimeError("out of memory")
                return call(self, ids, cache=cache, **options)

        model.__class__ = Fails

    with tiny_engine(change=change, sessions=SessionOptions()) as engine:
        bad = [ask(engine, prompt, max_tokens=LONG)[1] for prompt in prompts(3)]
        assert all("out of memory" in str(watch.wait().end.error) for watch in bad)
        assert engine.sessions() == []
        for prompt, wanted in zip(prompts(3), expected, strict=True):
            same(ask(engine, prompt, max_tokens=15)[1].wait(), wanted)


# ---- cancelling


@both
def test_a_waiting_request_can_be_cancelled(kind):
    with tiny_engine(kind=kind, max_running=1) as engine:
        first, running = ask(engine, tiny.base_ids(9), max_tokens=LONG)
        ticket, watch = ask(engine, tiny.base_ids(9))
        engine.cancel(ticket)
        assert watch.wait().events == [watch.end]
        assert watch.end.reason == "cancelled"
        engine.cancel(first)
        assert running.wait().end.reason == "cancelled"
        assert running.end.counts.base_tokens == len(running.base_ids)


@both
def test_a_request_can_be_cancelled_while_its_prompt_is_read_and_what_was_read_is_kept(kind):
    with tiny_engine(kind=kind, run={"prefill_step_size": 4}, sessions=SessionOptions()) as engine:
        ticket, watch = ask(engine, tiny.base_ids(400))
        while len(watch.events) < 3:
            time.sleep(0.001)
        engine.cancel(ticket)
        assert watch.wait().end.reason == "cancelled"
        assert watch.emitted == []
        (session,) = engine.sessions()
        assert 0 < session.base_tokens < 400


@both
def test_cancelling_an_ended_request_does_nothing(kind):
    with tiny_engine(kind=kind) as engine:
        ticket, watch = ask(engine, tiny.base_ids(9), max_tokens=3)
        watch.wait()
        engine.cancel(ticket)
        assert ask(engine, tiny.base_ids(9), max_tokens=3)[1].wait().end.reason == "length"
        assert engine.figures().cancelled == 0


@both
def test_leaving_the_loop_over_events_cancels_the_request(kind):
    with tiny_engine(kind=kind) as engine:
        stream = events(engine, Submission(tiny.base_ids(9), max_tokens=-1))
        next(stream)
        stream.close()
        while engine.figures().cancelled == 0:
            time.sleep(0.001)


# ---- what is refused


@pytest.fixture(scope="module", params=["mlx", pytest.param("cuda", marks=NEEDS_TORCH)])
def asked_for_the_impossible(request):
    """One engine for all refusals, which leave nothing behind."""
    with tiny_engine(kind=request.param) as engine:
        yield engine


@pytest.mark.parametrize(
    ("prompt", "fields", "words"),
    [
        ([], {}, "empty"),
        ([3, tiny.VOCAB], {}, "is not a base id"),
        ([3, -1], {}, "outside"),
        ([3, "x"], {}, "integers"),
        ([3.5], {}, "integers"),
        ([3], {"max_tokens": 0}, "max_tokens"),
        ([3], {"max_tokens": True}, "max_tokens"),
        ([3], {"top_logprobs": -1}, "top_logprobs"),
        ([3], {"top_logprobs": 10**9}, "top_logprobs"),
        ([3], {"sampling": {"temp": -1}}, "temp"),
        ([3], {"sampling": {"tempo": 1}}, "did you mean temp"),
        ([3], {"sampling": {"top_k": 10**6}}, "top_k"),
        ([3], {"sampling": {"logit_bias": {tiny.VOCAB: 1.0}}}, "logit_bias"),
        ([3], {"pack": "no/such/pack.npz"}, "no such pack"),
        ([3], {"pack": 5}, "pack must be"),
    ],
)
def test_what_cannot_be_met_is_refused_before_anything_runs(asked_for_the_impossible, prompt, fields, words):
    engine = asked_for_the_impossible
    before = engine.figures().requests
    with pytest.raises(GenerationError, match=words):
        ask(engine, prompt, **fields)
    assert engine.figures().requests == before
    assert ask(engine, [3, 4, 5], max_tokens=2)[1].wait().end.reason == "length"
    engine.sessions()  # answered between two rounds: the request is counted by then
    assert engine.figures().requests == before + 1


@both
def test_a_plain_model_takes_no_pack(kind):
    with tiny_engine("plain", kind=kind) as engine, pytest.raises(GenerationError, match="no hypertokens"):
        ask(engine, [3], pack="some.npz")


@both
@pytest.mark.parametrize("family", ["llama", "plain"])
def test_the_error_of_a_prompt_beyond_the_context_says_how_many_tokens_it_has_and_how_many_fit(kind, family):
    prompt = tiny.base_ids(4000, 3)
    with tiny_engine(family, kind=kind) as engine:
        with pytest.raises(PromptTooLongError) as refused:
            ask(engine, prompt)
        found = re.search(r"prompt is too long: (\d+) tokens > (\d+) maximum", str(refused.value))
        tokens, most = map(int, found.groups())
        assert tokens == 4000
        assert (most == 511) == (family == "plain")
        assert f"maximum context length is {most + 1} tokens" in str(refused.value)
        assert ask(engine, prompt[:most], max_tokens=1)[1].wait().end.reason == "length"
        with pytest.raises(PromptTooLongError):
            ask(engine, prompt[: most + 1])


@both
def test_prompts_beyond_a_bound_are_refused(kind):
    with tiny_engine("plain", kind=kind, max_prompt_tokens=600) as engine:
        with pytest.raises(PromptTooLongError, match="context has 512"):
            ask(engine, [3] * 512)
        with pytest.raises(PromptTooLongError, match="at most 600"):
            ask(engine, [3] * 601)
    with tiny_engine(kind=kind) as engine:  # the same text in fewer ids
        assert ask(engine, [3, 4, 5] * 200, max_tokens=3)[1].wait().end.reason == "length"


@both
def test_too_many_waiting_requests_are_refused_with_a_hint(kind):
    with tiny_engine(kind=kind, max_running=1, max_waiting=2) as engine:
        assert engine.info.max_requests == 3
        asked = [ask(engine, tiny.base_ids(9), max_tokens=LONG) for _ in range(3)]
        with pytest.raises(EngineBusyError) as caught:
            ask(engine, tiny.base_ids(9))
        assert caught.value.retry_after_s >= 1
        assert engine.figures().waiting >= 1
        engine.cancel(asked[-1][0])
        asked[-1][1].wait()
        engine.sessions()  # answered between two rounds: it has ended by then
        asked.append(ask(engine, tiny.base_ids(9)))
        for ticket, watch in asked:
            engine.cancel(ticket)
            watch.wait()


def test_requests_wait_for_room_in_the_kv_caches_and_impossible_ones_are_refused():
    per_id = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, width of a head, float32
    with tiny_engine(max_kv_bytes=200 * per_id) as engine:
        with pytest.raises(GenerationError, match="KV cache"):
            ask(engine, tiny.base_ids(50), max_tokens=151)
        asked = [ask(engine, tiny.base_ids(50), max_tokens=100)[1] for _ in range(2)]
        assert asked[1].wait().events[0]
        starts = [watch.times[0] for watch in asked]
        assert starts[1] >= asked[0].wait().times[-1]
        assert [watch.end.reason for watch in asked] == ["length", "length"]


def test_a_request_without_a_limit_ends_where_the_kv_caches_have_no_more_room():
    per_id = 2 * 2 * 2 * 16 * 4
    with tiny_engine(max_kv_bytes=120 * per_id) as engine:
        watch = ask(engine, tiny.base_ids(50), max_tokens=-1)[1].wait()
        assert watch.end.reason == "length"
        assert 60 < len(watch.ids) < 100
        assert len(ask(engine, tiny.base_ids(50), max_tokens=20)[1].wait().base_ids) == 20


# ---- many requests


@pytest.mark.slow
def test_many_requests_leave_nothing_behind():
    rng, asked = random.Random(5), []
    with tiny_engine(max_running=6, max_waiting=400) as engine:
        for i in range(150):
            prompt, tokens = tiny.base_ids(rng.randrange(1, 40), i), rng.randrange(1, 25)
            watch = Watch(raise_at=rng.randrange(8) if rng.random() < 0.05 else None)
            ticket = engine.submit(Submission(prompt, max_tokens=tokens, sampling=_sampling(rng)), watch)
            asked.append((ticket, watch))
            if rng.random() < 0.1:
                engine.cancel(ticket)
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.005)
        for _, watch in asked:
            if watch._raise_at is None:
                assert isinstance(watch.wait().end, Finished)
        while engine.figures().requests < 150:
            time.sleep(0.001)
        engine.sessions()
        scheduler = engine._scheduler
        assert (engine._open, engine._noted) == ({}, {})
        assert [*scheduler.waiting, *scheduler.running] == []
        figures = engine.figures()
        assert (figures.running, figures.waiting, figures.failed) == (0, 0, 0)
        assert figures.cancelled >= sum(
            watch.end.reason == "cancelled" for _, watch in asked if watch._raise_at is None
        )


def _sampling(rng):
    return rng.choice([{}, {"temp": 1.0}, {"temp": 0.7, "seed": 3}, {"repetition_penalty": 1.2}])
