"""`ZipState` in mlx-lm's prompt cache: save, load, trim, copy, quantized KV, mlx-lm's own generation loop."""

import copy
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache, trim_prompt_cache

from mlx_zip import CodecError, ModelError, ZipState, compress
from mlx_zip.models.rows.zip_state import find_zip_state
from support.command_line import WITHOUT_TORCH
from support.tiny import FAMILIES, VOCAB, base_ids, last_logits, tiny_model


@pytest.fixture(params=["compressed", "base_token_end"])
def mode(request):
    return request.param


def compressed(model, length, seed=0):
    ids, _ = compress(model.config.codec_params, base_ids(length, seed))
    return [int(i) for i in ids]


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text"])
@pytest.mark.parametrize("forget", [1, 7, 30, 1000])
def test_a_trimmed_cache_goes_on_as_if_the_ids_had_never_been(family, mode, forget):
    model = tiny_model(family, position_mode=mode)
    ids = compressed(model, 100)
    cache = model.make_cache()
    model(mx.array([ids]), cache=cache)
    assert trim_prompt_cache(cache, forget) == min(forget, len(ids))
    kept = ids[: max(0, len(ids) - forget)]
    other = compressed(model, 30, seed=5)[:3]  # base ids, so that they are legal after any prefix
    other = [i for i in other if i < VOCAB]
    fresh = model.make_cache()
    if kept:
        model(mx.array([kept]), cache=fresh)
    np.testing.assert_allclose(last_logits(model, other, cache), last_logits(model, other, fresh), atol=2e-5)
    assert list(cache[-1].books[0].entries) == list(fresh[-1].books[0].entries)


def test_a_negative_trim_is_refused_and_changes_nothing():
    cache = tiny_model().make_cache()
    with pytest.raises(ModelError, match="trim -1"):
        cache[-1].trim(-1)
    assert cache[-1].offset == 0


def test_slots_filled_again_after_a_trim_get_new_rows():
    model = tiny_model()
    cache = model.make_cache()
    model(mx.array([[5, 6, 7, 8, VOCAB, VOCAB + 1]]), cache=cache)
    trim_prompt_cache(cache, 6)
    ids = [9, 10, 11, 12, VOCAB, VOCAB + 1]
    np.testing.assert_allclose(last_logits(model, ids, cache), last_logits(model, ids, model.make_cache()), atol=1e-6)


def test_a_saved_cache_goes_on_where_it_was(tmp_path, mode):
    model = tiny_model("phi3", position_mode=mode)
    ids = compressed(model, 100)
    cache = model.make_cache()
    model(mx.array([ids[:-3]]), cache=cache)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache, {"model": "tiny"})
    loaded, metadata = load_prompt_cache(str(tmp_path / "cache.safetensors"), return_metadata=True)
    assert metadata == {"model": "tiny"}
    np.testing.assert_array_equal(last_logits(model, ids[-3:], loaded), last_logits(model, ids[-3:], cache))


def test_an_empty_cache_and_a_batch_cache_survive_saving(tmp_path):
    model = tiny_model()
    for name, cache in (("empty", model.make_cache()), ("batch", model.make_cache(left_padding=[1, 0]))):
        if name == "batch":
            model(mx.array([[2, 5], [6, 7]]), cache=cache)
        path = str(tmp_path / f"{name}.safetensors")
        if name == "empty":
            cache = cache[-1:]  # mlx-lm cannot save KV caches that hold nothing
        save_prompt_cache(path, cache)
        loaded = load_prompt_cache(path)
        assert isinstance(loaded[-1], ZipState)
        assert [list(b.ids) for b in loaded[-1].books] == [list(b.ids) for b in cache[-1].books]
        assert loaded[-1].offset == cache[-1].offset


def test_a_damaged_saved_state_is_refused():
    model = tiny_model()
    cache = model.make_cache()
    model(mx.array([[5, 6, 5]]), cache=cache)
    version, params, ids, lengths, padding, offset, long = cache[-1].state
    with pytest.raises(CodecError):
        ZipState.from_state((version, params, mx.array([5, 6, VOCAB + 9], mx.uint32), lengths, padding, offset, long))
    with pytest.raises(ModelError, match="version"):
        ZipState.from_state((version + 1, params, ids, lengths, padding, offset, long))
    with pytest.raises(ModelError, match="log"):
        ZipState.from_state((version, params, ids, lengths, padding, offset + 1, long))
    for damaged in ("{", "[" * 100_000, "{}", params.replace("vocab_size", "size"), params.replace(str(VOCAB), '"x"')):
        with pytest.raises(ModelError, match="codec parameters"):
            ZipState.from_state((version, damaged, ids, lengths, padding, offset, long))


def test_a_refused_state_leaves_the_former_state():
    model = tiny_model()
    cache = model.make_cache()
    model(mx.array([[5, 6, 5]]), cache=cache)
    with pytest.raises(CodecError):
        cache[-1].state = (*cache[-1].state[:2], mx.array([5, 6, VOCAB + 9], mx.uint32), *cache[-1].state[3:])
    assert cache[-1].books[0].ids.tolist() == [5, 6, 5]


@pytest.mark.parametrize("layer", [0, 1])
def test_an_interrupted_call_leaves_codebook_and_kv_as_they_were(layer):
    model = tiny_model()
    cache, twin = model.make_cache(), model.make_cache()
    for c in (cache, twin):
        model(mx.array([[5, 6, 5]]), cache=c)
    block = model.model.layers[layer]
    model.model.layers[layer] = interrupted
    with pytest.raises(KeyboardInterrupt):
        model(mx.array([[6, 7]]), cache=cache)
    model.model.layers[layer] = block
    np.testing.assert_array_equal(last_logits(model, [8, 9], cache), last_logits(model, [8, 9], twin))


def interrupted(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_and_its_original_go_separate_ways(duplicate):
    model = tiny_model()
    ids = compressed(model, 60)
    cache = model.make_cache()
    model(mx.array([ids]), cache=cache)
    twin = [*copy.deepcopy(cache[:-1]), duplicate(cache[-1])]
    straight = copy.deepcopy(cache)
    for token in (7, 8, 9):
        last_logits(model, [token], twin)
    np.testing.assert_array_equal(last_logits(model, [5], cache), last_logits(model, [5], straight))
    assert len(twin[-1].books[0].ids) == len(ids) + 3


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_generates_the_ids_that_greedy_steps_give(family):
    model = tiny_model(family)
    ids = compressed(model, 50)
    cache, token, steps = model.make_cache(), None, []
    feed = ids
    for _ in range(24):
        token = int(np.argmax(last_logits(model, feed, cache)))
        steps.append(token)
        feed = [token]
    made = [int(t) for t, _ in generate_step(mx.array(ids), model, max_tokens=24, prefill_step_size=7)]
    assert made == steps


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_mlx_lm_quantizes_the_kv_caches_and_leaves_the_state_alone(family):
    model = tiny_model(family, hidden=128, head_dim=32)
    ids = compressed(model, 50)
    cache = model.make_cache()
    made = [
        int(t)
        for t, _ in generate_step(
            mx.array(ids), model, max_tokens=12, prompt_cache=cache, kv_bits=8, kv_group_size=32, quantized_kv_start=0
        )
    ]
    assert type(cache[0]).__name__ == "QuantizedKVCache"
    assert find_zip_state(cache) is cache[-1]
    assert len(made) == 12
    assert trim_prompt_cache(cache, 5) == 5
    assert np.isfinite(last_logits(model, [5], cache)).any()


def test_the_state_counts_what_it_holds():
    model = tiny_model()
    state = model.make_cache()[-1]
    assert (state.empty(), state.size(), state.nbytes, state.is_trimmable()) == (True, 0, 0, True)
    cache = model.make_cache()
    model(mx.array([[5, 6, 7]]), cache=cache)
    assert cache[-1].size() == 3
    assert cache[-1].nbytes == 3 * 4 + cache[-1].outputs.rows.nbytes


def test_rows_are_encoded_only_when_needed():
    model = tiny_model()
    cache = model.make_cache()
    model(mx.array([[5, 6, 7, 8]]), cache=cache)
    assert cache[-1].encoded_outputs == [3]
    assert not cache[-1].encoded_inputs.any()
    model(mx.array([[VOCAB + 1]]), cache=cache)
    assert np.flatnonzero(cache[-1].encoded_inputs).tolist() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["mlx_zip", "mlx_lm.models.cache"])
def test_mlx_lm_knows_the_state_whichever_is_imported_first(first):
    home = "mlx_zip.models.rows.zip_state"
    code = f"{WITHOUT_TORCH}import {first}, mlx_zip, mlx_lm.models.cache as c; assert c.ZipState.__module__ == {home!r}"
    subprocess.run([sys.executable, "-c", code], check=True)
