"""Packs with tuned rows: the rows are used for their entries, by their model alone, and nowhere else."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache, trim_prompt_cache

from mlx_zip import DataError, ModelError, RowStore, ZipState
from mlx_zip.engine.mlx.generate import batch_generate, generate, stream_generate
from mlx_zip.engine.mlx.scoring import compress_row, score_rows
from mlx_zip.models.rows.row_tables import RowTable
from mlx_zip.packs.pack import Pack, load_pack, merge_packs, save_pack
from mlx_zip.packs.tuned import PlainCodec, TunedRows
from support.generating import ENDLESS
from support.starting import OTHER, START, TEXT, assert_close, compressed
from support.tiny import PAD, SLOTS, VOCAB, last_logits, tiny_model

MODEL = tiny_model()
WIDTH = 64


def tuned(model=MODEL, entries=START, seed=0, scale=0.3, dtype=np.float32, plain=None):
    """Entries with random rows for a model."""
    rng = np.random.default_rng(seed)
    output = rng.normal(0, scale, (len(entries), WIDTH)).astype(dtype)
    read = output if model.sides_are_one else rng.normal(0, scale, output.shape).astype(dtype)
    return Pack(entries, rows=TunedRows(read, output, model.fingerprint, plain))


def encoded(model, entries):
    """Entries with the rows that the model's encoder makes."""
    rows = [[*run, *[PAD] * (model.config.merge_size - len(run))] for run in entries]
    lengths = np.array([len(run) for run in entries])
    sides = [np.array(side) for side in model.encode_rows(np.array(rows, np.uint32), lengths)]
    return Pack(entries, rows=TunedRows(sides[0], sides[1], model.fingerprint))


TUNED = tuned()
IDS = compressed(START)


# ---- the model


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("mode", ["compressed", "base_token_end"])
def test_tuned_rows_that_are_the_encoders_change_nothing(family, mode):
    model = tiny_model(family, position_mode=mode, tie_encoders=family == "gemma")
    if model.sides_are_one:
        one = encoded(model, START).rows.output
        start = Pack(START, rows=TunedRows(one, one, model.fingerprint))
    else:
        start = encoded(model, START)
    want = model(mx.array([IDS]), cache=model.make_cache(pack=START), causal=True)
    assert_close(model(mx.array([IDS]), cache=model.make_cache(pack=start), causal=True), want)


@pytest.mark.parametrize("sides", [1, 2])
def test_tuned_rows_of_the_output_side_alone_leave_the_input_side_missing(sides):
    state = MODEL.make_cache(pack=TUNED)[-1]
    state.put_tuned_rows(0, *map(mx.array, (TUNED.rows.output, TUNED.rows.input)[:sides]))
    missing = {"input": state.missing_installed_inputs(), "output": state.missing_outputs()[0]}
    assert {name: len(slots) for name, slots in missing.items()} == {
        "input": len(START) if sides == 1 else 0,
        "output": 0,
    }


def test_logits_of_entries_are_those_of_their_tuned_rows_and_inputs_read_them():
    cache = MODEL.make_cache(pack=TUNED)
    logits = np.array(MODEL(mx.array([[VOCAB + 3]]), cache=cache)[0, -1])
    h = mx.array(TUNED.rows.input[3])[None, None]
    from mlx_lm.models.cache import KVCache

    from mlx_zip.models.decoder import Positions

    h = MODEL.run_layers(h, [KVCache() for _ in MODEL.layers], Positions(start=0))[0, 0]
    assert_close(logits[VOCAB : VOCAB + len(START)], np.array(mx.array(TUNED.rows.output) @ h))
    assert np.isinf(logits[VOCAB + len(START) : VOCAB + SLOTS]).all()


def test_a_call_may_be_cut_anywhere_trimmed_and_copied():
    whole = last_logits(MODEL, IDS, MODEL.make_cache(pack=TUNED))
    for cut in (1, len(IDS) // 2, len(IDS) - 1):
        cache = MODEL.make_cache(pack=TUNED)
        last_logits(MODEL, IDS[:cut], cache)
        twin = copy.deepcopy(cache)
        last_logits(MODEL, [5, 6, 7], cache)
        trim_prompt_cache(cache, 3)
        assert_close(last_logits(MODEL, IDS[cut:], cache), whole)
        assert_close(last_logits(MODEL, IDS[cut:], twin), whole)
    assert not np.allclose(whole[:VOCAB], last_logits(MODEL, IDS, MODEL.make_cache(pack=START))[:VOCAB])


def test_rows_of_a_batch_are_each_sequences_own():
    starts = [TUNED, START, tuned(seed=1), tuned(entries=OTHER), None]
    rows = [compressed(start, 40, seed=9) for start in (START, START, START, OTHER, None)]
    width = max(map(len, rows))
    padding = [width - len(row) for row in rows]
    cache = MODEL.make_cache(left_padding=padding, pack=starts)
    batch = mx.array([[PAD] * pad + row for pad, row in zip(padding, rows, strict=True)])
    together = [MODEL(part, cache=cache)[:, -1] for part in (batch[:, :4], batch[:, 4:])][-1]
    for row, start, got in zip(rows, starts, together, strict=True):
        assert_close(got, last_logits(MODEL, row, MODEL.make_cache(pack=start)), atol=3e-5)


def test_tuned_rows_never_enter_the_row_store_and_encoded_ones_never_take_their_place():
    model, store = tiny_model(), RowStore()
    model.eval()
    model.row_source.store = store
    expected = last_logits(MODEL, IDS, MODEL.make_cache(pack=START))
    tuned_logits = last_logits(MODEL, IDS, MODEL.make_cache(pack=TUNED))
    for start, want in ((TUNED, tuned_logits), (START, expected), (TUNED, tuned_logits), (START, expected)):
        assert_close(last_logits(model, IDS, model.make_cache(pack=start)), want)
    store.store_all_rows()
    fresh = RowStore()
    model.row_source.store = fresh
    last_logits(model, IDS, model.make_cache(pack=TUNED))
    assert 0 < fresh.encoded < store.encoded  # the pack's were never asked for


def test_rows_are_cast_to_the_type_of_encoded_ones():
    model = tiny_model()
    model.set_dtype(mx.bfloat16)
    cache = model.make_cache(pack=tuned(model, dtype=np.float16))
    logits = model(mx.array([IDS]), cache=cache)
    assert (logits.dtype, cache[-1].outputs.rows.dtype) == (mx.bfloat16, mx.bfloat16)


@pytest.mark.parametrize("change", ["another", "body", "cast", "quantized", "in place"])
def test_rows_of_another_model_are_one_clear_error(change):
    model = tiny_model(seed=1 if change == "another" else 0)
    cache = None if change == "another" else model.make_cache(pack=TUNED)
    if change == "body":
        layer = model.layers[1].mlp.down_proj
        layer.weight = layer.weight + 0.01
    elif change == "cast":
        model.set_dtype(mx.float16)
    elif change == "quantized":
        nn.quantize(model, group_size=64, bits=4, class_predicate=lambda path, m: path.endswith("up_proj"))
    elif change == "in place":
        layer = model.layers[0].mlp.up_proj
        layer.weight *= 2
        model.weights_changed()
    with pytest.raises(ModelError, match="tuned for another model"):
        model.make_cache(pack=TUNED)
    if cache is not None:
        with pytest.raises(ModelError, match="tuned for another model"):
            model(mx.array([[5]]), cache=cache)
        assert cache[-1].offset == 0


@pytest.mark.parametrize(("family", "wanted"), [("llama", "two arrays"), ("gemma", "one array")])
def test_rows_are_one_array_where_the_models_sides_are_one_and_nowhere_else(family, wanted):
    model = tiny_model(family, tie_encoders=family == "gemma")
    good = tuned(model)
    rows = good.rows.output
    other = TunedRows(rows, rows.copy() if good.rows.sides_are_one else rows, model.fingerprint)
    with pytest.raises(ModelError, match=f"must be {wanted} for this model"):
        model.make_cache(pack=Pack(START, rows=other))
    model.make_cache(pack=good)


def test_rows_of_a_model_whose_sides_are_one_are_held_once():
    model = tiny_model("gemma", tie_encoders=True)
    cache = model.make_cache(pack=tuned(model))
    model(mx.array([[5, VOCAB + 3]]), cache=cache)
    assert cache[-1].outputs.rows is not None
    assert cache[-1].inputs.rows is None


def test_scores_are_those_of_the_model_with_the_rows():
    row = compress_row(MODEL, np.array([1], np.uint32), np.array(TEXT, np.uint32), pack=TUNED)
    plain = compress_row(MODEL, np.array([1], np.uint32), np.array(TEXT, np.uint32), pack=Pack(START))
    assert row.ids.tolist() == plain.ids.tolist()
    found, other = score_rows(MODEL, [row, plain], batch_size=2)
    logits = MODEL(mx.array([row.ids.tolist()]), cache=MODEL.make_cache(pack=TUNED), causal=True)[0]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    want = np.array(logprobs)[np.arange(len(row.ids) - 1), row.ids[1:]]
    np.testing.assert_allclose(found.logprobs, want, atol=1e-4)
    assert not np.allclose(found.logprobs, other.logprobs)


@pytest.mark.parametrize("ahead", [False, True])
def test_generation_reads_tuned_rows_also_ahead_of_the_host(ahead, monkeypatch):
    monkeypatch.setattr(sys.modules["mlx_zip.engine.mlx.generate"], "_ahead_option", lambda model: ahead)
    cache, feed, expected = MODEL.make_cache(pack=TUNED), IDS, []
    for _ in range(20):
        expected.append(int(np.argmax(last_logits(MODEL, feed, cache))))
        feed = expected[-1:]
    made = [r.token for r in stream_generate(MODEL, ENDLESS, TEXT, max_tokens=80, pack=TUNED)]
    assert made[: len(expected)] == expected[: len(made)]
    assert max(expected) >= VOCAB


# ---- a model that was given a pack


def test_a_model_with_a_pack_begins_with_it_unless_another_start_is_named():
    model = tiny_model()
    model.use_pack(TUNED)
    expected = last_logits(MODEL, IDS, MODEL.make_cache(pack=TUNED))
    assert_close(last_logits(model, IDS, model.make_cache()), expected)
    untuned = last_logits(MODEL, IDS, MODEL.make_cache(pack=START))
    assert_close(last_logits(model, IDS, model.make_cache(pack=START)), untuned)
    texts = batch_generate(model, ENDLESS, [TEXT, [5, 6]], max_tokens=12)
    assert texts == [generate(MODEL, ENDLESS, prompt, max_tokens=12, pack=TUNED) for prompt in (TEXT, [5, 6])]
    with pytest.raises(ModelError, match="another model"):
        tiny_model(seed=1).use_pack(TUNED)


# ---- saved states


def saved(cache, path):
    save_prompt_cache(str(path), cache)
    return load_prompt_cache(str(path))


def test_a_saved_cache_goes_on_with_the_pack_that_it_was_begun_with(tmp_path):
    cache = MODEL.make_cache(pack=TUNED)
    last_logits(MODEL, IDS[:10], cache)
    back = saved(cache, tmp_path / "cache.safetensors")
    expected = [r.token for r in stream_generate(MODEL, ENDLESS, [5, 6], max_tokens=9, prompt_cache=cache)]
    got = stream_generate(MODEL, ENDLESS, [5, 6], max_tokens=9, prompt_cache=back, pack=TUNED)
    assert [r.token for r in got] == expected


def test_a_saved_cache_finds_its_rows_in_the_models_own_pack(tmp_path):
    model = tiny_model()
    model.use_pack(TUNED)
    cache = model.make_cache()
    last_logits(model, IDS[:10], cache)
    back = saved(cache, tmp_path / "cache.safetensors")
    assert_close(last_logits(model, IDS[10:], back), last_logits(model, IDS[10:], cache))


def test_a_saved_cache_without_its_pack_or_with_another_is_refused_and_unchanged(tmp_path):
    cache = MODEL.make_cache(pack=TUNED)
    last_logits(MODEL, IDS[:10], cache)
    back = saved(cache, tmp_path / "cache.safetensors")
    with pytest.raises(ModelError, match=f"pack of tuned rows .{TUNED.tuned_fingerprint[:12]}. that is not loaded"):
        MODEL(mx.array([[5]]), cache=back)
    for other in (START, tuned(seed=1), tuned(entries=OTHER), ()):
        with pytest.raises(ModelError, match="begun with another pack"):
            stream_generate(MODEL, ENDLESS, [5], prompt_cache=back, pack=other)
    assert {entry.offset for entry in back} == {10}
    stream_generate(MODEL, ENDLESS, [5], prompt_cache=back, pack=TUNED)


@pytest.mark.parametrize("start", [START, None])
def test_a_cache_without_tuned_rows_refuses_another_pack_too_and_takes_its_own(start, tmp_path):
    cache = MODEL.make_cache(pack=start)
    last_logits(MODEL, compressed(start)[:10], cache)
    assert (cache[-1].state[0], len(cache[-1].state)) == (1, 7)  # what older versions read
    back = saved(cache, tmp_path / "cache.safetensors")
    for other in (TUNED, OTHER):
        with pytest.raises(ModelError, match="begun with another pack"):
            stream_generate(MODEL, ENDLESS, [5], prompt_cache=back, pack=other)
    assert list(stream_generate(MODEL, ENDLESS, [5], max_tokens=3, prompt_cache=back, pack=start or ()))


def test_a_batchs_saved_state_keeps_which_sequence_has_which_rows():
    starts = [TUNED, None, START]
    cache = MODEL.make_cache(left_padding=[0, 1, 2], pack=starts)
    MODEL(mx.array([[5, 6, 7]] * 3), cache=cache)
    back = ZipState.from_state(cache[-1].state)
    assert back.tuned == [TUNED.tuned_fingerprint, None, None]
    assert back.state[-1] == json.dumps(back.tuned)
    back.bind_start_packs([TUNED, None, START])
    assert back.tuned[0] is TUNED


@pytest.mark.parametrize("marks", ["no json", "[" * 100_000, "[1]", '["ab", "cd"]', "{}"])
def test_damaged_fingerprints_of_packs_are_an_error(marks):
    cache = MODEL.make_cache(pack=TUNED)
    with pytest.raises(
        ModelError, match=r"fingerprints of its packs cannot be read|is not a list of 1 fingerprints of packs"
    ):
        ZipState.from_state([*cache[-1].state[:-1], marks])


# ---- files


def pack_of(start, **changes):
    return replace(Pack(start.entries, "ab" * 32, {"x": 1}, start.rows), **changes)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rows_are_read_back_as_they_were_written(dtype, tmp_path):
    plain = PlainCodec(VOCAB, (0, 1, PAD), PAD, "base_token_end")
    for start in (tuned(dtype=dtype), tuned(tiny_model("gemma", tie_encoders=True), dtype=dtype, plain=plain)):
        pack = pack_of(start)
        save_pack(tmp_path / "a.npz", pack)
        back = load_pack(tmp_path / "a.npz")
        assert (back.fingerprint, back.entries, back.about) == (pack.fingerprint, pack.entries, {"x": 1})
        np.testing.assert_array_equal(back.rows.input, start.rows.input)
        np.testing.assert_array_equal(back.rows.output, start.rows.output)
        assert (back.rows.sides_are_one, back.rows.plain) == (start.rows.sides_are_one, start.rows.plain)
        assert back.tuned_fingerprint == start.tuned_fingerprint


def test_a_packs_fingerprint_depends_on_its_rows():
    prints = {pack_of(tuned()).fingerprint, pack_of(tuned(seed=1)).fingerprint, pack_of(tuned(), rows=None).fingerprint}
    assert len(prints) == 3
    assert pack_of(tuned(), rows=None).fingerprint == Pack(START, "ab" * 32).fingerprint


@pytest.mark.parametrize("damage", ["a row", "fewer", "no model", "type", "nan"])
def test_damaged_rows_are_an_error(damage, tmp_path):
    path = tmp_path / "a.npz"
    save_pack(path, pack_of(TUNED))
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    about = json.loads(arrays["about"].tobytes())
    if damage == "a row":
        arrays["output_rows"][3, 2] += 1
    elif damage == "fewer":
        arrays["output_rows"], arrays["input_rows"] = arrays["output_rows"][1:], arrays["input_rows"][1:]
    elif damage == "no model":
        del about["rows"]["model"]
    elif damage == "type":
        arrays["output_rows"] = arrays["output_rows"].astype(np.int32)
    else:
        arrays["output_rows"][0, 0] = np.nan
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=r"a\.npz"):
        load_pack(path)


# ---- merging


def test_rows_follow_their_entries_when_packs_are_merged():
    a, b = tuned(entries=START), tuned(entries=(START[4], *OTHER), seed=1)
    merged = merge_packs([pack_of(a), pack_of(b)], size=12)
    assert len(merged.entries) == len(merged.rows.output) == 12
    for slot, entry in enumerate(merged.entries):
        found = [one for one in (a, b) if entry in one.entries]
        if len(found) == 2:
            found = [b]  # slot 0 of b comes before slot 4 of a
        at = found[0].entries.index(entry)
        np.testing.assert_array_equal(merged.rows.output[slot], found[0].rows.output[at])
        np.testing.assert_array_equal(merged.rows.input[slot], found[0].rows.input[at])


def test_packs_of_different_models_or_without_rows_are_merged_without_rows_or_not_at_all():
    other = tuned(tiny_model(seed=1), OTHER)
    for packs in (
        [pack_of(TUNED), pack_of(other)],
        [pack_of(TUNED), Pack(OTHER, "ab" * 32)],
        [Pack(OTHER, "ab" * 32), pack_of(TUNED)],
    ):
        with pytest.raises(DataError, match="not all tuned for the same model"):
            merge_packs(packs)
        merged = merge_packs(packs, drop_rows=True)
        assert merged.rows is None
        assert merged.entries == merge_packs([replace(p, rows=None) for p in packs]).entries


def test_entries_and_rows_must_be_as_many():
    with pytest.raises(DataError, match="10 tuned rows for 7 entries"):
        Pack(OTHER, rows=TUNED.rows)


def test_rows_of_entries_that_grow_after_the_packs_are_the_encoders():
    cache = MODEL.make_cache(pack=TUNED)
    last_logits(MODEL, IDS, cache)
    plain = MODEL.make_cache(pack=START)
    last_logits(MODEL, IDS, plain)
    tables: list[RowTable] = [cache[-1].outputs, plain[-1].outputs]
    n = len(cache[-1].books[0])
    assert n > len(START)
    got, want = (np.array(table.rows)[0, len(START) : n] for table in tables)
    assert_close(got, want)


def test_rows_that_are_none_or_of_another_width_are_refused():
    none = np.zeros((0, WIDTH), np.float32)
    with pytest.raises(DataError, match=r"\[P, D\]"):
        TunedRows(none, none, MODEL.fingerprint)
    rows = np.zeros((len(START), WIDTH - 1), np.float32)
    with pytest.raises(ModelError, match="rows have 63 values, the model's have 64"):
        MODEL.make_cache(pack=Pack(START, rows=TunedRows(rows, rows.copy(), MODEL.fingerprint)))
