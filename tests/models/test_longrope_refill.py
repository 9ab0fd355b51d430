"""LongRoPE's switch in chunks: what the chunks fill equals what one call with all ids fills."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import QuantizedKVCache, trim_prompt_cache

from mlx_zip.codec import compress
from mlx_zip.models.call_inputs import kv_length
from mlx_zip.models.longrope_refill import LongRopeRefill
from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.models.rows.zip_state import ZipState
from mlx_zip.models.zip_model import Model
from mlx_zip.packs.pack import Pack
from mlx_zip.packs.tuned import TunedRows
from support import tiny
from support.steps import read_again

BORDER, CHUNK = 30, 7
MODES = ["compressed", "base_token_end"]


def model_of(mode="compressed", policy="freeze", **changes):
    size = tiny.SLOTS if policy == "freeze" else 6
    sizes = {"initial_vocab_size": tiny.VOCAB, "max_codebook_size": size, "max_subtokens": tiny.MERGE}
    codec = {"compression": {**sizes, "disabled_ids": [0, 1, tiny.PAD], "policy": policy}}
    model = tiny.tiny_model("phi3", position_mode=mode, **codec, **changes).eval()
    model.traits = type(model.traits)(**{**vars(model.traits), "long_context": BORDER})
    return model


def ids_of(model, length=90, seed=0):
    """Ids with hypertokens; the first of them end below the border in both modes."""
    return compress(model.config.codec_params, tiny.base_ids(length, seed))[0].astype(np.int32)


def last(model, ids, cache):
    """The last position's logits [W]."""
    return tiny.last_logits(model, ids.tolist(), cache)


def below(model, ids):
    """How many ids end below the border."""
    count = 0
    while not model.call_needs_long_factors(model.make_cache()[-1], ids[None, : count + 1]):
        count += 1
    return count


@pytest.fixture
def columns(monkeypatch):
    """The number of ids of each run of the decoder's body."""
    seen, run = [], Model.run_layers

    def counted(self, h, *args):
        seen.append(h.shape[1])
        return run(self, h, *args)

    monkeypatch.setattr(Model, "run_layers", counted)
    return seen


@pytest.mark.parametrize("policy", ["freeze", "lru", "use-count"])
@pytest.mark.parametrize("mode", MODES)
def test_chunks_give_what_a_fresh_call_with_all_ids_gives(mode, policy, columns):
    model = model_of(mode, policy)
    ids, cache = ids_of(model), model.make_cache()
    short = below(model, ids)
    assert short > CHUNK
    model(mx.array(ids[None, :short]), cache=cache)
    columns.clear()
    assert read_again(model, cache, ids[None, short : short + 1], CHUNK) == {"long": True}
    assert columns == [CHUNK] * (short // CHUNK) + [short % CHUNK] * bool(short % CHUNK)
    assert cache[-1].long_rope
    for n in range(short, short + 4):
        got = last(model, ids[n : n + 1], cache)
        np.testing.assert_allclose(got, last(model, ids[: n + 1], model.make_cache()), atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_after_a_trim_chunks_bring_the_short_factors_back(mode, columns):
    model = model_of(mode)
    ids, cache = ids_of(model), model.make_cache()
    kept = below(model, ids) - 2
    model(mx.array(ids[None]), cache=cache)
    assert cache[-1].long_rope
    trim_prompt_cache(cache, len(ids) - kept)
    columns.clear()
    assert read_again(model, cache, ids[None, kept : kept + 1], CHUNK) == {"long": False}
    assert max(columns) == CHUNK
    assert not cache[-1].long_rope
    got = last(model, ids[kept : kept + 1], cache)
    np.testing.assert_allclose(got, last(model, ids[: kept + 1], model.make_cache()), atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_a_left_padded_batch_is_read_again_in_chunks(mode):
    model = model_of(mode)
    rows = [ids_of(model, 90, 1)[:26], ids_of(model, 90, 2)[:17]]
    ids = np.full((2, 26), tiny.PAD, np.int32)
    ids[0], ids[1, 9:] = rows
    caches = [model.make_cache(left_padding=[0, 9]) for _ in range(2)]
    fresh = model.make_cache(left_padding=[0, 9])[-1]
    end = max(n for n in range(1, 27) if not model.call_needs_long_factors(fresh, ids[:, :n]))
    more = np.concatenate([ids[:, end:], np.full((2, 6), 5, np.int32)], axis=1)
    model(mx.array(ids[:, :end]), cache=caches[0])
    assert not caches[0][-1].long_rope
    read_again(model, caches[0], more, CHUNK)
    got = model(mx.array(more), cache=caches[0])
    whole = model(mx.array(np.concatenate([ids[:, :end], more], axis=1)), cache=caches[1])
    np.testing.assert_allclose(np.array(got[:, -1]), np.array(whole[:, -1]), atol=1e-4)
    assert caches[0][-1].long_rope


def test_quantized_caches_stay_quantized():
    config = tiny.tiny_config("phi3", hidden=64) | {"partial_rotary_factor": 0.5}  # heads of 32, half of them rotated
    model = tiny.random_model(config, 0, 0.3).eval()
    ids, found = ids_of(model), []
    short = below(model, ids)
    for chunk in (CHUNK, 100):
        cache = model.make_cache()
        model(mx.array(ids[None, :short]), cache=cache)
        maybe_quantize_kv_cache(cache, quantized_kv_start=0, kv_group_size=32, kv_bits=8)
        read_again(model, cache, ids[None, short:], chunk)
        assert [type(entry) for entry in cache[:-1]] == [QuantizedKVCache] * 2
        found.append(last(model, ids[short : short + 1], cache))
    np.testing.assert_allclose(*found, atol=1e-2)


def test_until_all_ids_are_read_the_cache_is_as_it_was():
    model = model_of()
    ids, cache = ids_of(model), model.make_cache()
    short = below(model, ids)
    model(mx.array(ids[None, :short]), cache=cache)
    before = [dict(vars(entry)) for entry in cache[:-1]]
    refill = LongRopeRefill(model, cache[:-1], cache[-1], True)
    refill.read_next(CHUNK)
    mx.eval([entry.state for entry in refill.filled])
    assert [vars(entry) for entry in cache[:-1]] == before
    assert not cache[-1].long_rope
    assert (refill.done, refill.ids_left) == (CHUNK, short - CHUNK)
    model.trim_cache(cache, short - 1)
    got = last(model, ids[short - 1 : short], cache)
    np.testing.assert_allclose(got, last(model, ids[:short], model.make_cache()), atol=1e-4)


def test_an_interrupt_between_two_layers_of_a_finished_refill_changes_neither():
    model = model_of()
    ids, cache = ids_of(model), model.make_cache()
    short = below(model, ids)
    model(mx.array(ids[None, :short]), cache=cache)
    before, refill = [dict(vars(entry)) for entry in cache[:-1]], LongRopeRefill(model, cache[:-1], cache[-1], True)
    refill.read_next(short)
    refill.filled[1] = None  # stands for what an interrupt does
    with pytest.raises(TypeError):
        refill.install_refilled_caches()
    assert [vars(entry) for entry in cache[:-1]] == before
    assert not cache[-1].long_rope


def test_rows_of_refills_that_are_given_up_do_not_pile_up():
    model = model_of()
    model.row_source.store, ids, cache = RowStore(), ids_of(model), model.make_cache()
    model(mx.array(ids[None, : below(model, ids)]), cache=cache)
    model.row_source.store_all_rows()
    for seed in range(1, 6):  # other ids each time, so that their rows are not there
        ids, cache = ids_of(model, seed=seed), model.make_cache()
        cache[-1].advance(ids[None, :20].astype(np.uint32))
        LongRopeRefill(model, cache[:-1], cache[-1], True).read_next(CHUNK)
    assert len(model.row_source.store._fresh) <= 2  # of the last one, on both sides
    assert model.row_source.store.take_rows_to_submit()


def loaded(cache):
    """The cache as it is after it was saved and loaded: without any rows."""
    return [*cache[:-1], ZipState.from_state(cache[-1].state)]


@pytest.mark.parametrize("tied", [False, True])
def test_a_loaded_cache_is_read_again_with_the_rows_that_it_had(tied):
    """Tuned rows, and where input rows are output rows, rows that no call has encoded since."""
    config = tiny.tiny_config("phi3", tie_encoders=tied) | {"tie_word_embeddings": tied}
    model = tiny.random_model(config, 0, 0.3).eval()
    model.traits = type(model.traits)(**{**vars(model.traits), "long_context": BORDER})
    assert model.sides_are_one == tied
    if not tied:
        rows = np.random.default_rng(0).normal(0, 0.3, (2, 2, 32)).astype(np.float32)
        start = ((5, 6), (7, 8, 9))
        found = Pack(start, rows=TunedRows(rows[0], rows[1], model.fingerprint))
        model.row_source.config, model.row_source.pack = replace(model.config, start=start), found
    ids, cache = ids_of(model), model.make_cache()
    short = below(model, ids)
    if not tied:
        ids[:2] = tiny.VOCAB, tiny.VOCAB + 1
        ids[2:] = np.arange(len(ids) - 2) % 30 + 4
    model(mx.array(ids[None, :short]), cache=cache)
    cache = loaded(cache)
    read_again(model, cache, ids[None, short : short + 1], CHUNK)
    got = last(model, ids[short : short + 1], cache)
    np.testing.assert_allclose(got, last(model, ids[: short + 1], model.make_cache()), atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_in_chunks_has_the_factors_of_its_end_from_the_start(mode, columns):
    model = model_of(mode)
    ids, cache = ids_of(model), model.make_cache()
    factors = read_again(model, cache, ids[None], CHUNK)
    for begin in range(0, len(ids), CHUNK):
        got = model(mx.array(ids[None, begin : begin + CHUNK]), cache=cache, **factors)[0, -1]
    assert sum(columns) == len(ids)
    np.testing.assert_allclose(np.array(got), last(model, ids, model.make_cache()), atol=1e-4)


def test_nothing_is_read_again_where_the_factors_stay(columns):
    model = model_of()
    ids, cache = ids_of(model), model.make_cache()
    model(mx.array(ids[None, :9]), cache=cache)
    columns.clear()
    assert read_again(model, cache, ids[None, 9:12], CHUNK) == {"long": False}
    assert columns == []
    assert read_again(tiny.tiny_model(), tiny.tiny_model().make_cache(), ids[None], CHUNK) == {}


@pytest.mark.parametrize("mode", MODES)
def test_what_comes_next_is_judged_as_the_call_itself_does(mode):
    model = model_of(mode)
    ids = ids_of(model, 200)
    for begin, end in [(0, 5), (0, 29), (0, 30), (0, 31), (9, 20), (9, 28), (17, 40), (25, 26), (40, 41)]:
        cache = model.make_cache()
        if begin:
            model(mx.array(ids[None, :begin]), cache=cache)
        expected = model.call_needs_long_factors(cache[-1], ids[None, begin:end])
        model(mx.array(ids[None, begin:end]), cache=cache)
        assert cache[-1].long_rope == expected
        assert {kv_length(entry) for entry in cache[:-1]} == {end}
