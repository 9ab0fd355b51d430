"""The decode loop: the ids, log-probabilities and caches of a loop that waits for every id, whatever runs ahead."""

import functools
import gc
import weakref
from contextlib import suppress

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import trim_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_zip.codec import Codebook, compress
from mlx_zip.engine.sampling.canonical import CanonicalDecoding
from mlx_zip.errors import CodecError, ModelError
from mlx_zip.models.model_folder import ModelArgs
from mlx_zip.models.row_source import RowSource
from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.models.two_part_step import INPUT_ROWS_TOGETHER, TwoPartStep
from mlx_zip.models.zip_model import Model
from support import tiny
from support.early_reads import steps_without_row
from support.slow_cases import slow_but
from support.steps import decode_steps

STEPS = 45  # the codebook of 64 entries is full after 38


def prompt_of(model, length=50):
    return compress(model.config.codec_params, tiny.base_ids(length))[0]


def decode(model, cache=None, prompt=None, max_steps=STEPS, **options):
    options = {"sampler": make_sampler(0), "prefill_step_size": 2048, "ahead": True, **options}
    cache = model.make_cache() if cache is None else cache
    prompt = prompt_of(model) if prompt is None else prompt
    return decode_steps(model, prompt, cache, max_steps=max_steps, **options)


def waiting(model, **options):
    """mlx-lm's own loop over the same model: it learns each id before it builds the next step."""
    return generate_step(mx.array(prompt_of(model).astype(np.int32)), model, max_tokens=STEPS, **options)


def assert_equal(steps, expected):
    steps, expected = list(steps), list(expected)
    assert [token for token, _ in steps] == [token for token, _ in expected]
    for (_, logprobs), (_, wanted) in zip(steps, expected, strict=True):
        np.testing.assert_allclose(np.array(logprobs), np.array(wanted), atol=1e-5)


@pytest.fixture
def columns(monkeypatch):
    """How many ids per sequence each run of the decoder's body had."""
    seen, run = [], Model.run_layers
    monkeypatch.setattr(Model, "run_layers", lambda self, h, *args: seen.append(h.shape[1]) or run(self, h, *args))
    return seen


@pytest.fixture
def counted(monkeypatch):
    """How often a body ran ahead, and how often again with the right rows."""
    seen = {"ahead": 0, "waited": 0, "again": 0}
    run, hidden = TwoPartStep.run_body, Model.run_body

    def counting_ahead(self, *args):
        h = run(self, *args)
        seen["waited" if h is None else "ahead"] += 1
        return h

    def counting_hidden(self, kv, state, ids, *more):
        seen["again"] += isinstance(ids, int)
        return hidden(self, kv, state, ids, *more)

    monkeypatch.setattr(TwoPartStep, "run_body", counting_ahead)
    monkeypatch.setattr(Model, "run_body", counting_hidden)
    return seen


# ---- the same as a loop that waits


ENCODERS = [("transformer", 0.0), ("transformer", 1.0), ("res_latent_attn", 0.0), ("averaging", 1.0)]  # temperature


@pytest.mark.parametrize("mode", slow_but(["compressed", "base_token_end"], "compressed"))
@pytest.mark.parametrize(("encoder", "temp"), slow_but(ENCODERS, ENCODERS[1], ENCODERS[2]))
def test_ids_are_those_of_a_loop_that_waits(encoder, mode, temp, counted):
    model = tiny.tiny_model("llama", encoder, position_mode=mode)
    mx.random.seed(3)
    expected = list(waiting(model, sampler=make_sampler(temp)))
    counted.update(ahead=0, waited=0, again=0)
    mx.random.seed(3)
    cache = model.make_cache()
    assert_equal(decode(model, cache, sampler=make_sampler(temp)), expected)
    assert max(token for token, _ in expected) >= tiny.VOCAB
    assert counted["ahead"] == STEPS
    assert counted["again"] - 1 == cache[-1].second_bodies  # the prompt's last id is one of them
    assert cache[-1].second_bodies == steps_without_row(model, [prompt_of(model)], [[token] for token, _ in expected])
    assert counted["waited"] == 0


@functools.cache
def waited(family):
    """What the loop that waits gives for a family, once for both ways to decode it."""
    return list(waiting(tiny.tiny_model(family)))


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("family", slow_but(sorted(tiny.FAMILIES), "gemma2", "llama"))
def test_every_family_decodes(family, ahead, counted):
    expected = waited(family)
    counted.update(ahead=0)
    assert_equal(decode(tiny.tiny_model(family), ahead=ahead), expected)
    assert (counted["ahead"] > 0) == ahead


def test_where_input_rows_are_output_rows_no_body_runs_again(counted):
    model = tiny.tiny_model("gemma", tie_encoders=True)
    assert model.sides_are_one
    expected = list(waiting(model))
    counted.update(ahead=0, again=0)
    assert_equal(decode(model), expected)
    assert max(token for token, _ in expected) >= tiny.VOCAB
    assert counted["again"] == 1  # the prompt's last id


@pytest.mark.parametrize("ahead", slow_but([True, False], True))
def test_rows_from_a_store_change_nothing(ahead):
    model, expected = tiny.tiny_model(), waited("llama")
    model.eval()
    model.row_source.store = RowStore()
    assert_equal(decode(model, ahead=ahead), expected)
    encoded = model.row_source.store.encoded
    assert_equal(decode(model, ahead=ahead), expected)
    assert model.row_source.store.encoded == encoded > 0


def with_border(mode):
    """A model whose LongRoPE factors change during the answer."""
    model = tiny.tiny_model("phi3", position_mode=mode)
    model.traits = type(model.traits)(**{**vars(model.traits), "long_context": 70})
    return model


@functools.cache
def waited_with_border(mode):
    return list(waiting(with_border(mode)))


@pytest.mark.parametrize("mode", slow_but(["compressed", "base_token_end"], "compressed"))
def test_where_longrope_changes_its_factors_the_loop_waits(mode, counted):
    model, expected = with_border(mode), waited_with_border(mode)
    counted.update(ahead=0, waited=0, again=0)
    assert_equal(decode(model), expected)
    assert counted["waited"] > 0
    assert counted["ahead"] > counted["waited"]


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("mode", slow_but(["compressed", "base_token_end"], "base_token_end"))
def test_at_longropes_switch_the_context_is_read_again_in_chunks_and_progress_is_told(mode, ahead, columns):
    model, told, cache = with_border(mode), [], None
    expected, n = waited_with_border(mode), len(prompt_of(model))
    columns.clear()
    cache = model.make_cache()
    assert_equal(decode(model, cache, prefill_step_size=8, ahead=ahead, progress=lambda *at: told.append(at)), expected)
    assert cache[-1].long_rope
    assert max(columns) == 8
    again = told[told.index((n, n)) + 1 :]
    held = again[0][1]
    assert again == [*((min(done, held - 1), held) for done in range(8, held + 7, 8)), (held, held)]
    assert held > n


def test_a_prompt_beyond_longropes_border_is_read_once(columns):
    model = tiny.tiny_model("phi3")
    n = len(prompt_of(model))
    assert n > model.traits.long_context
    expected = list(waiting(model))
    columns.clear()
    steps = list(decode(model, prefill_step_size=8, max_steps=3))
    assert_equal(steps, expected[:3])
    assert sum(columns) == n + 3


def test_processors_see_the_ids_and_the_codebook_as_they_do_in_mlx_lms_loop():
    def chain(cache, seen):
        return [lambda tokens, logits: seen.append(tokens.tolist()) or logits, CanonicalDecoding(cache[-1].books[0])]

    model, read, wanted = tiny.tiny_model(), [], []
    caches = [model.make_cache(), model.make_cache()]
    expected = list(waiting(model, prompt_cache=caches[0], logits_processors=chain(caches[0], wanted)))
    assert_equal(decode(model, caches[1], processors=chain(caches[1], read)), expected)
    assert read == wanted[: len(read)]
    assert len(read) == STEPS + 1


def test_kv_caches_are_quantized_on_the_way():
    model = tiny.tiny_model(hidden=128)
    kv = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 45}
    assert_equal(decode(model, **kv), waiting(model, **kv))


@pytest.mark.parametrize("chunk", slow_but([1, 7, 30, 31], 7, 31))
def test_the_prompt_may_be_read_in_chunks_and_progress_is_told(chunk):
    model, told = tiny.tiny_model(), []
    n = len(prompt_of(model))
    assert_equal(decode(model, prefill_step_size=chunk, progress=lambda *at: told.append(at)), waited("llama"))
    assert told == [(0, n), *((min(done, n - 1), n) for done in range(chunk, n - 1 + chunk, chunk)), (n, n)]


# ---- what is left behind


def test_when_an_id_is_yielded_the_cache_holds_it_and_nothing_more():
    model = tiny.tiny_model()
    cache, prompt = model.make_cache(), prompt_of(model).tolist()
    for n, (token, _) in enumerate(decode(model, cache), start=1):
        prompt.append(token)
        assert cache[-1].books[0].ids.tolist() == prompt
        assert {entry.offset for entry in cache} == {len(prompt)}
        if n == 20:
            break
    twin = model.make_cache()
    model(mx.array([prompt]), cache=twin)
    np.testing.assert_allclose(tiny.last_logits(model, [5], cache), tiny.last_logits(model, [5], twin), atol=1e-4)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("where", ["run_layers", "joint_head"])
def test_an_interrupt_leaves_the_cache_at_the_last_id_that_was_yielded(where, ahead, monkeypatch):
    model = tiny.tiny_model()
    cache, found = model.make_cache(), []
    steps = decode(model, cache, ahead=ahead)
    found += [next(steps)[0] for _ in range(5)]
    monkeypatch.setattr(Model, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert cache[-1].books[0].ids.tolist() == [*prompt_of(model).tolist(), *found]
    assert {entry.offset for entry in cache} == {len(prompt_of(model)) + 5}


@pytest.mark.parametrize("ahead", [True, False])
def test_an_interrupt_in_the_first_step_leaves_the_prompt_in_the_cache(ahead):
    model = tiny.tiny_model()
    cache, calls = model.make_cache(), iter([False, True])

    def sampler(logprobs):
        if next(calls):
            raise KeyboardInterrupt
        return mx.argmax(logprobs, axis=-1)

    with pytest.raises(KeyboardInterrupt):
        next(decode(model, cache, ahead=ahead, sampler=sampler))
    assert cache[-1].books[0].ids.tolist() == prompt_of(model).tolist()
    assert {entry.offset for entry in cache} == {len(prompt_of(model))}


SWITCHES = [(mode, ahead) for mode in ("compressed", "base_token_end") for ahead in (True, False)]


@pytest.mark.parametrize(("mode", "ahead"), slow_but(SWITCHES, ("compressed", True), ("base_token_end", False)))
def test_at_longropes_switch_too_the_cache_holds_what_was_yielded_and_nothing_more(mode, ahead):
    model = tiny.tiny_model("phi3", position_mode=mode)
    model.traits = type(model.traits)(**{**vars(model.traits), "long_context": 70})
    cache, held = model.make_cache(), prompt_of(model).tolist()
    for token, _ in decode(model, cache, prefill_step_size=8, ahead=ahead):
        held.append(token)
        assert cache[-1].books[0].ids.tolist() == held
    assert cache[-1].long_rope


@pytest.mark.parametrize("call", range(3))
def test_a_callback_that_raises_stops_the_reading_of_the_prompt_where_it_is(call):
    model, told = tiny.tiny_model(), []

    def progress(*at):
        told.append(at)
        if len(told) > call:
            raise ValueError("stop")

    cache, n = model.make_cache(), len(prompt_of(model))
    with pytest.raises(ValueError, match="stop"):
        next(decode(model, cache, prefill_step_size=8, progress=progress))
    assert [entry.offset for entry in cache] == [8 * call] * len(cache)
    assert told[-1] == (8 * call, n)


def test_no_id_follows_the_end_of_the_context():
    model = tiny.tiny_model()
    model.args.config["max_position_embeddings"] = len(prompt_of(model)) + 6
    assert len(list(decode(model, max_steps=None))) == 6


@pytest.mark.parametrize("left", [True, False])
def test_when_a_loop_has_ended_or_was_left_nothing_keeps_its_cache_alive(left):
    model = tiny.tiny_model()
    cache = model.make_cache()
    entry = weakref.ref(cache[0])
    gc.collect()
    gc.disable()
    try:
        steps = decode(model, cache, max_steps=5)
        for _ in range(2 if left else 5):
            next(steps)
        steps.close()
        del cache, steps
        assert entry() is None
    finally:
        gc.enable()


def test_when_a_step_has_failed_nothing_keeps_its_cache_alive(monkeypatch):
    model, run_layers, calls = tiny.tiny_model(), Model.run_layers, []

    def runs_out_of_memory(self, *args):
        calls.append(None)
        if len(calls) > 4:
            raise RuntimeError("out of memory")
        return run_layers(self, *args)

    cache = model.make_cache()
    entry = weakref.ref(cache[0])
    monkeypatch.setattr(Model, "run_layers", runs_out_of_memory)
    gc.collect()
    gc.disable()
    try:
        with suppress(RuntimeError):
            list(decode(model, cache, max_steps=20))
        assert len(calls) == 5
        del cache
        assert entry() is None
    finally:
        gc.enable()


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("where", ["sampler", "processor", "second block", "id"])
def test_whatever_raises_the_cache_is_even_and_holds_what_was_yielded(where, ahead, monkeypatch):
    model = tiny.tiny_model()
    cache, found, calls = model.make_cache(), [], iter([False] * 6 + [True] * 9)

    def sampler(logprobs):
        if where == "sampler" and next(calls):
            raise KeyboardInterrupt
        return mx.argmax(logprobs, axis=-1)

    def processor(tokens, logits):
        if where == "processor" and next(calls):
            raise KeyboardInterrupt
        return logits

    steps = decode(model, cache, ahead=ahead, sampler=sampler, processors=[processor])
    found += [next(steps)[0] for _ in range(5)]
    if where == "second block":
        model.model.layers[1] = interrupted
    if where == "id":
        monkeypatch.setattr(TwoPartStep if ahead else Model, "compute_logits" if ahead else "joint_head", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert cache[-1].books[0].ids.tolist() == [*prompt_of(model).tolist(), *found]
    assert {entry.offset for entry in cache} == {len(prompt_of(model)) + 5}


@pytest.mark.parametrize("ahead", [True, False])
def test_an_interrupt_while_longrope_changes_its_factors_leaves_the_kv_caches_as_they_were(ahead, monkeypatch):
    model = tiny.tiny_model("phi3")
    model.traits = type(model.traits)(**{**vars(model.traits), "long_context": len(prompt_of(model)) + 2})
    cache, left = model.make_cache(), iter([5, 6, 7, 8])
    steps = decode(model, cache, sampler=lambda logprobs: mx.array([next(left)]), ahead=ahead)
    assert [next(steps)[0] for _ in range(2)] == [5, 6]
    block, model.model.layers[1] = model.model.layers[1], interrupted
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    model.model.layers[1] = block
    ids = [*prompt_of(model).tolist(), 5, 6]
    assert cache[-1].books[0].ids.tolist() == ids
    assert {entry.offset for entry in cache} == {len(ids)}
    for one in (7, 8):
        ids.append(one)
        expected = tiny.last_logits(model, ids, model.make_cache())
        np.testing.assert_allclose(tiny.last_logits(model, [one], cache), expected, atol=1e-4)
    assert cache[-1].long_rope


@pytest.mark.parametrize("ids", [[7], [7, 8, 9]])
def test_an_interrupt_after_the_codebook_has_read_the_ids_leaves_the_cache_of_a_call_even(ids, monkeypatch):
    model = tiny.tiny_model()
    cache = model.make_cache()
    model(mx.array([[3, 4, 5]]), cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr("mlx_zip.models.rows.zip_state.Advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(mx.array([ids]), cache=cache)
    assert cache[-1].books[0].ids.tolist() == [3, 4, 5]
    assert {entry.offset for entry in cache} == {3}
    expected = tiny.last_logits(model, [3, 4, 5, *ids], model.make_cache())
    np.testing.assert_allclose(tiny.last_logits(model, ids, cache), expected, atol=1e-5)


def test_outside_of_its_steps_a_loop_leaves_nothing_for_the_device_to_begin_with(monkeypatch):
    model = tiny.tiny_model()
    cache, seen, run = model.make_cache(), [], Model.run_layers
    default = cache[-1].submit
    monkeypatch.setattr(Model, "run_layers", lambda self, *args: seen.append(cache[-1].submit) or run(self, *args))
    first, second = (decode(model, cache, prompt=np.array([5], np.uint32), ahead=False) for _ in range(2))
    next(first), next(second)
    assert mx.async_eval in seen
    assert cache[-1].submit is default
    first.close(), second.close()
    assert cache[-1].submit is default


@pytest.mark.parametrize("mode", ["compressed", "base_token_end"])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_an_id_that_installs_itself_is_read_with_its_own_row(family, mode):
    model = tiny.tiny_model(family, position_mode=mode, tie_encoders=family == "gemma")
    assert model.sides_are_one == (family == "gemma")
    prompt, found = [*prompt_of(model).tolist(), 10], []
    book = Codebook(model.config.codec_params)
    book.push([*prompt, 11])
    for ahead in (True, False):
        forced = iter([11, tiny.VOCAB + len(book), 5, 6, 7])
        sampler = lambda logprobs, forced=forced: mx.array([next(forced)])
        steps = decode(model, prompt=np.array(prompt, np.uint32), sampler=sampler, ahead=ahead, max_steps=4)
        found.append(list(steps))
    assert_equal(*found)


def test_after_a_trim_below_longropes_border_the_short_factors_are_back():
    model = tiny.tiny_model("phi3", position_mode="base_token_end")
    model.traits = type(model.traits)(**{**vars(model.traits), "long_context": 40})
    ids, caches = tiny.base_ids(50), [model.make_cache(), model.make_cache()]
    for cache in caches:
        for one in ids:
            model(mx.array([[one]]), cache=cache)
        trim_prompt_cache(cache, 12)
    assert caches[0][-1].long_rope
    h = TwoPartStep(model, caches[0]).run_body(mx.array([[5]]))
    assert h is None
    expected = tiny.last_logits(model, [5], caches[1])
    np.testing.assert_allclose(tiny.last_logits(model, [5], caches[0]), expected, atol=1e-5)
    assert not caches[0][-1].long_rope


@pytest.mark.parametrize("dtype", slow_but([mx.uint8, mx.int32, mx.uint32, mx.int64, mx.uint64], mx.uint8))
def test_a_sampler_may_give_ids_of_any_integer_type(dtype):
    model = tiny.tiny_model()
    sampler = lambda logprobs: mx.argmax(logprobs, axis=-1).astype(dtype)
    assert_equal(decode(model, sampler=sampler), decode(model, sampler=sampler, ahead=False))


@pytest.mark.parametrize("dtype", [mx.uint8, mx.int16, mx.uint32, mx.uint64])
def test_an_id_of_a_narrow_type_is_read_where_the_vocabulary_is_wider_than_the_type(dtype):
    config = tiny.tiny_config()
    config["vocab_size"] = 300
    config["zip2zip"]["compression"]["initial_vocab_size"] = 300
    model = Model(ModelArgs.from_dict(config))
    found = []
    for ahead in (True, False):
        forced = iter([80, 127, 44, 45, 3])
        sampler = lambda logprobs, forced=forced: mx.array([next(forced)]).astype(dtype)
        found.append(list(decode(model, prompt=np.array([5], np.uint32), sampler=sampler, ahead=ahead, max_steps=4)))
    assert_equal(*found)


@pytest.mark.parametrize("wrong", [tiny.VOCAB + tiny.SLOTS - 1, tiny.VOCAB + tiny.SLOTS, -1, -(10**9), 10**6])
def test_an_id_that_does_not_exist_is_an_error_and_changes_nothing(wrong):
    model = tiny.tiny_model()
    cache, left = model.make_cache(), iter([5, 6, wrong, 5])
    steps = decode(model, cache, sampler=lambda logprobs: mx.array([next(left)]))
    assert [next(steps)[0] for _ in range(2)] == [5, 6]
    assert len(cache[-1].books[0]) < tiny.SLOTS
    with pytest.raises((CodecError, ModelError)):
        next(steps)
    assert {entry.offset for entry in cache} == {len(prompt_of(model)) + 2}


@pytest.mark.parametrize("ahead", [True, False])
def test_a_row_that_exists_is_not_encoded_again(ahead, monkeypatch):
    """Output rows: one per installed entry. Input rows: if bodies run ahead, all but the last few, which are encoded
    with those that follow; else one per hypertoken read.
    """
    model, encoded = tiny.tiny_model(), []
    encode = RowSource.encode_rows_of_side
    monkeypatch.setattr(
        RowSource, "encode_rows_of_side", lambda self, *args: encoded.append(len(args[-1])) or encode(self, *args)
    )
    cache = model.make_cache()
    list(decode(model, cache, ahead=ahead))
    book = cache[-1].books[0]
    missing = int((~cache[-1].encoded_inputs[: len(book)]).sum())
    read = len(book) - missing if ahead else len({i for i in book.ids.tolist() if i >= tiny.VOCAB})
    assert not ahead or missing < INPUT_ROWS_TOGETHER
    assert sum(encoded) == len(book) + read
