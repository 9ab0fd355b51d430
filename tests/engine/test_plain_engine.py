"""Plain models in an engine: requests share batches whatever their caches are, and get mlx-lm's ids."""

import functools
import random
import time
from itertools import pairwise

import mlx.core as mx
import pytest
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlx_zip.engine import Progress
from mlx_zip.engine.mlx.mlx_engine import MlxEngine, ServeOptions
from mlx_zip.engine.options import RunOptions
from mlx_zip.engine.sessions.mlx_caches import open_session_store
from mlx_zip.errors import GenerationError
from support import tiny
from support.generating import ENDLESS
from support.plain_families import FAMILIES, STATES, WINDOWS, plain_family
from support.serving import ask, at_once
from support.slow_cases import slow_but

LENGTHS = (5, 40, 17, 1, 29, 12)


@functools.cache
def family(name):
    return plain_family(name)


def prompt(number):
    return tiny.base_ids(LENGTHS[number % len(LENGTHS)], number)


def mlx_lm(name, ids, max_tokens, cache=None):
    """What mlx-lm emits."""
    return _emitted(name, ids, max_tokens, cache) if cache else list(_emitted_once(name, tuple(ids), max_tokens))


@functools.cache
def _emitted_once(name, ids, max_tokens):
    return _emitted(name, list(ids), max_tokens, None)


def _emitted(name, ids, max_tokens, cache):
    options = {"max_tokens": max_tokens, "sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)}
    return [int(token) for token, _ in generate_step(mx.array(ids), family(name), prompt_cache=cache, **options)]


def engine_of(name, sessions=False, max_running=8, **run):
    def load():
        return plain_family(name), ENDLESS

    options = ServeOptions(max_running, run=RunOptions(**run))
    store = (
        (lambda served: open_session_store(served.model, served.tokenizer, None, run.get("max_kv_size")))
        if sessions
        else None
    )
    return MlxEngine(load, name, options, store)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", slow_but(FAMILIES, "llama"))
def test_requests_in_company_share_a_batch_and_get_mlx_lm_s_ids(name, ahead, monkeypatch):
    rng, sizes = random.Random(1), set()
    with engine_of(name, ahead=ahead) as engine:
        work, groups = engine._scheduler.run_round, lambda: engine._scheduler.groups
        monkeypatch.setattr(
            engine._scheduler, "run_round", lambda: (work(), sizes.update(len(group.requests) for group in groups()))
        )
        watches = []
        for number in range(7):
            watches.append(ask(engine, prompt(number), max_tokens=15 + 5 * (number % 4))[1])
            time.sleep(rng.random() * 0.01)
        for number, watch in enumerate(watches):
            assert watch.wait().ids == mlx_lm(name, prompt(number), 15 + 5 * (number % 4))
    assert max(sizes) > 2


@pytest.mark.parametrize("name", slow_but([*WINDOWS, *STATES], "llama with windows", "mamba2"))
def test_a_session_that_was_a_row_of_a_batch_goes_on(name):
    with engine_of(name, sessions=True) as engine:
        watches = at_once(engine, lambda: [ask(engine, prompt(n), max_tokens=15)[1] for n in range(3)])
        for number, watch in enumerate(watches):
            held = [*prompt(number), *watch.wait().ids]
            again = ask(engine, [*held, 5], max_tokens=10)[1].wait()
            assert again.events[0].cached_tokens == len(held) - 1
            assert again.ids == mlx_lm(name, [*held, 5], 10)


@pytest.mark.parametrize("name", slow_but([*WINDOWS, *STATES], "mamba2"))
def test_a_request_that_is_cancelled_in_a_batch_leaves_the_others(name):
    with engine_of(name, sessions=True, ahead=True) as engine:
        asked = at_once(engine, lambda: [ask(engine, prompt(n), max_tokens=60)[::1] for n in range(3)])
        while len(asked[1][1].events) < 12:
            time.sleep(0.001)
        engine.cancel(asked[1][0])
        assert asked[1][1].wait().ids == mlx_lm(name, prompt(1), 60)[: len(asked[1][1].ids)]
        for number in (0, 2):
            assert asked[number][1].wait().ids == mlx_lm(name, prompt(number), 60)


@pytest.mark.parametrize("name", slow_but(FAMILIES, "llama", "mamba2"))
def test_mlx_lm_s_own_batches_have_these_ids(name):
    ids = batch_generate(family(name), ENDLESS, [prompt(n) for n in range(4)], max_tokens=15, return_token_ids=True)
    assert ids.token_ids == [mlx_lm(name, prompt(n), 15) for n in range(4)]


@pytest.mark.parametrize("name", slow_but(["llama", "qwen2"], "llama"))
def test_bounded_caches_take_turns_and_give_mlx_lm_s_ids(name):
    def bounded():
        return [RotatingKVCache(16, keep=4) for _ in make_prompt_cache(family(name))]

    with engine_of(name, sessions=True, max_kv_size=16) as engine:
        watches = at_once(engine, lambda: [ask(engine, prompt(n), max_tokens=20)[1] for n in range(3)])
        for number, watch in enumerate(watches):
            expected = mlx_lm(name, prompt(number), 20, bounded())
            assert watch.wait().ids == expected
            assert expected != mlx_lm(name, prompt(number), 20)
        held = [*prompt(0), *watches[0].ids]
        again = ask(engine, [*held, 5], max_tokens=10)[1].wait()
        assert again.events[0].cached_tokens == len(held) - 1


@pytest.mark.parametrize(("name", "layers"), [("llama", 4), ("gemma3", 2), ("falcon_h1", 4), ("mamba2", 0)])
def test_bytes_per_id_are_those_of_caches_that_grow(name, layers):
    heads = 1 if name == "gemma3" else 2
    with engine_of(name) as engine:
        assert engine._scheduler.served.kv_bytes_per_id == layers * 2 * heads * 16 * 4


@pytest.mark.parametrize("name", ["gemma3", "mamba2"])
def test_caches_that_are_bounded_themselves_are_not_bounded_again(name):
    with pytest.raises(GenerationError, match="bounds its caches itself"):
        engine_of(name, max_kv_size=16)


def reads(watch):
    """The sizes of the pieces that a prompt was read in."""
    read = [0, *(event.read for event in watch.events if isinstance(event, Progress))]
    return [after - before for before, after in pairwise(read)]


def test_a_prompt_is_read_in_larger_pieces_while_nobody_waits():
    long = tiny.base_ids(100, 7)
    with engine_of("llama", prefill_step_size=8, alone_step_size=64) as engine:
        assert reads(ask(engine, long, max_tokens=2)[1].wait()) == [64, 36]
        _, other = ask(engine, [5, 6], max_tokens=300)
        watch = ask(engine, long, max_tokens=2)[1].wait()
        assert max(reads(watch)) == 8
        assert not hasattr(other.events[-1], "reason")  # the other one was still answered
    with engine_of("llama", prefill_step_size=8) as engine:
        assert max(reads(ask(engine, long, max_tokens=2)[1].wait())) == 8


def test_two_prompts_that_wait_for_each_other_are_read_in_small_pieces():
    with engine_of("llama", prefill_step_size=8, alone_step_size=64) as engine:
        watches = at_once(engine, lambda: [ask(engine, tiny.base_ids(60, n), max_tokens=1)[1] for n in (1, 2)])
        assert max(reads(watches[0].wait())) == 8
