"""Rows that outlive their request: the same results with any store, nothing encoded twice, bounded memory."""

import copy

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_zip import RowStore, compress
from mlx_zip.models.rows.encoders import encode_entries
from mlx_zip.models.rows.row_store import ROW_OVERHEAD
from support.stored_rows import WIDTH, Encoder, entries, kind, true_rows
from support.tiny import ENCODERS, VOCAB, base_ids, last_logits, tiny_model

PRINTS = {"input": "1" * 64, "output": "2" * 64}


def zip_model(store=None, family="llama", encoder="transformer", fingerprint=PRINTS, **changes):
    """A model as `load` gives it: in evaluation mode, with a fingerprint and a store."""
    model = tiny_model(family, encoder, fingerprint=fingerprint, **changes)
    model.eval()
    model.row_source.store = store
    return model


def compressed(model, length=90, seed=0):
    return [int(i) for i in compress(model.config.codec_params, base_ids(length, seed))[0]]


def run(model, ids, cuts=()):
    """Last logits after each part of ids."""
    cache = model.make_cache()
    return np.stack([last_logits(model, part.tolist(), cache) for part in np.split(np.array(ids), list(cuts))])


# ---- results


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("cuts", [(), (1, 2, 3, 20, 40)])
def test_results_are_the_same_cold_warm_and_from_disk(encoder, cuts, tmp_path):
    plain = zip_model(encoder=encoder)
    ids = compressed(plain)
    assert max(ids) >= VOCAB
    expected = run(plain, ids, cuts)
    for state in ("cold", "warm", "disk"):
        if state != "warm":
            store = RowStore(tmp_path)
        before = store.encoded
        found = run(zip_model(store, encoder=encoder), ids, cuts)
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
        store.flush()
        assert (store.encoded == before) == (state != "cold")
    assert store.from_disk > 0


def test_rows_from_a_store_are_within_1e_5_of_rows_encoded_in_any_batch():
    model = zip_model(RowStore())
    expected = run(zip_model(), compressed(model))
    one_by_one = compressed(model)
    run(model, one_by_one, range(1, len(one_by_one)))  # every row comes from a pass of its own
    np.testing.assert_allclose(run(model, one_by_one), expected, atol=1e-5, rtol=0)


def test_a_row_encoded_alone_is_found_in_a_batch_and_the_other_way_round():
    store = RowStore()
    model = zip_model(store)
    ids = compressed(model)
    run(model, ids)  # in one pass
    before = store.encoded
    run(model, ids, range(1, len(ids)))  # one by one
    assert store.encoded == before
    store = RowStore()
    model.row_source.store = store
    run(model, ids, range(1, len(ids)))
    before = store.encoded
    run(model, ids)
    assert store.encoded == before


def test_the_second_run_of_a_prompt_encodes_nothing():
    store = RowStore()
    model = zip_model(store)
    ids = compressed(model)
    run(model, ids)
    before = store.encoded
    run(model, ids)
    assert before > 0
    assert (store.encoded, store.from_memory) == (before, before)


def test_a_prompt_is_encoded_in_one_pass_per_side_and_call(monkeypatch):
    calls = []

    def counted(encoder, matrix, ids, lengths):
        calls.append(len(ids))
        return encode_entries(encoder, matrix, ids, lengths)

    monkeypatch.setattr("mlx_zip.models.row_source.encode_entries", counted)
    model = zip_model(RowStore())
    run(model, compressed(model))
    assert len(calls) == 2


def test_only_entries_that_exist_are_encoded_and_input_rows_only_when_read():
    store = RowStore()
    model = zip_model(store)
    cache = model.make_cache()
    model(mx.array([[5, 6, 7, 8]]), cache=cache)
    assert store.encoded == 3  # output rows of three entries
    model(mx.array([[VOCAB + 1]]), cache=cache)
    assert store.encoded == 5  # its input row, and the output row of the entry that it installs


def test_two_sequences_of_a_batch_share_what_they_both_install():
    store = RowStore()
    model = zip_model(store)
    cache = model.make_cache(left_padding=[0, 0])
    model(mx.array([[5, 6, 7], [5, 6, 9]]), cache=cache)
    assert store.encoded == 3  # (5, 6), (6, 7), (6, 9)
    together = model(mx.array([[VOCAB], [VOCAB + 1]]), cache=cache)[:, -1]
    plain = zip_model()
    for row, ids in enumerate(([5, 6, 7, VOCAB], [5, 6, 9, VOCAB + 1])):
        np.testing.assert_allclose(np.array(together[row]), run(plain, ids)[-1], atol=3e-5)


@pytest.mark.slow
def test_models_that_differ_share_a_store_and_get_their_own_rows(tmp_path):
    store = RowStore(tmp_path)
    ids = compressed(zip_model())
    for seed in (0, 1, 2):
        for other in (RowStore(), store):
            found = run(zip_model(other, seed=seed), ids)
        np.testing.assert_allclose(found, run(zip_model(seed=seed), ids), atol=1e-5, rtol=0)


def test_a_model_with_tied_sides_keeps_one_table_and_encodes_each_entry_once():
    model = zip_model(RowStore(), family="gemma", tie_encoders=True)
    ids = compressed(model)
    cache = model.make_cache()
    logits = last_logits(model, ids, cache)
    assert model.row_source.store.encoded == len(cache[-1].books[0])
    assert cache[-1].inputs.rows is None
    inputs, outputs = model.encode_rows(*cache[-1].books[0].padded_entries(0, len(cache[-1].books[0])))
    np.testing.assert_array_equal(np.array(inputs), np.array(outputs))
    by_steps = zip_model(family="gemma", tie_encoders=True)
    np.testing.assert_allclose(run(by_steps, ids, range(1, len(ids)))[-1], logits, atol=3e-5)


# ---- what a row depends on


@pytest.mark.parametrize("change", ["encoder", "matrix", "module", "type", "quantized"])
def test_changed_weights_are_seen_at_the_next_call(change, tmp_path):
    store = RowStore(tmp_path)
    model, twin = zip_model(store, hidden=64), zip_model(hidden=64)
    ids = compressed(model)
    run(model, ids)
    for each in (model, twin):
        alter(each, change)
    np.testing.assert_allclose(run(model, ids), run(twin, ids), atol=1e-5, rtol=0)


def alter(model, change):
    if change == "encoder":
        weight = model.output_encoder.layers[0].mlp.fc1.weight
        model.output_encoder.layers[0].mlp.fc1.weight = weight + 0.1
    elif change == "matrix":
        model.update({"model": {"embed_tokens": {"weight": model.model.embed_tokens.weight * 1.5}}})
    elif change == "module":
        model.lm_head = nn.Linear(64, 48, bias=False)
        model.lm_head.weight = mx.ones((48, 64)) * mx.arange(48)[:, None] / 48
    elif change == "type":
        model.set_dtype(mx.bfloat16)
        model.set_dtype(mx.float32)
    else:
        nn.quantize(model, group_size=32, bits=8, class_predicate=lambda path, module: path == "lm_head")


def test_a_fingerprint_that_another_tool_left_unchanged_does_not_give_its_rows(tmp_path):
    with RowStore(tmp_path) as store:
        model = zip_model(store)
        ids = compressed(model)
        run(model, ids)
    stale = zip_model(RowStore(tmp_path))  # the same fingerprint, other weights
    twin = zip_model()
    for each in (stale, twin):
        alter(each, "quantized")
    np.testing.assert_allclose(run(stale, ids), run(twin, ids), atol=1e-5, rtol=0)
    assert stale.row_source.store.from_disk == store_rows_of_input_side(twin, ids)


@pytest.mark.parametrize("how", ["exchanged", "in place"])
def test_a_changed_value_that_is_not_sampled_gives_other_rows_too(how):
    model, twin = zip_model(RowStore()), zip_model()
    ids = compressed(model)
    run(model, ids)
    for each in (model, twin):
        weight = np.array(each.lm_head.weight)
        weight[7, 5] += 4.0
        if how == "exchanged":
            each.lm_head.weight = mx.array(weight)
        else:
            each.lm_head.weight[7, 5] = float(weight[7, 5])
            each.weights_changed()
    np.testing.assert_allclose(run(model, ids), run(twin, ids), atol=1e-5, rtol=0)


def store_rows_of_input_side(model, ids):
    """Input rows do not depend on the head, so these are found."""
    return len({i for i in ids if i >= VOCAB})


@pytest.mark.parametrize("fingerprint", [None, {}, {"input": 3, "output": ""}, "x"])
def test_a_model_without_a_fingerprint_has_no_rows_on_disk(fingerprint, tmp_path):
    with RowStore(tmp_path) as store:
        model = zip_model(store, fingerprint=fingerprint)
        run(model, compressed(model))
        run(model, compressed(model))
        assert store.from_memory == store.encoded > 0
    assert list(tmp_path.iterdir()) == []


def test_a_model_in_training_mode_uses_no_store():
    store = RowStore()
    model = zip_model(store)
    model.train()
    run(model, compressed(model))
    assert (store.encoded, store.nbytes) == (0, 0)


def test_a_copy_of_a_model_shares_its_store():
    model, plain = zip_model(RowStore()), zip_model()
    ids = compressed(model)
    run(model, ids)
    twin = copy.deepcopy(model)
    assert twin.row_source.store is model.row_source.store
    alter(twin, "encoder")
    alter(plain, "encoder")
    np.testing.assert_allclose(run(twin, ids), run(plain, ids), atol=1e-5, rtol=0)


def test_a_shallow_copy_of_a_model_makes_rows_of_its_own_matrices():
    model, plain = zip_model(RowStore()), zip_model()
    ids = compressed(model)
    before = run(model, ids)
    twin = copy.copy(model)
    twin.lm_head = plain.lm_head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
    np.testing.assert_allclose(run(twin, ids), run(plain, ids), atol=1e-5, rtol=0)
    np.testing.assert_array_equal(run(model, ids), before)


# ---- the store itself


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 16])
def test_a_row_comes_back_byte_for_byte_from_memory_and_from_disk(dtype, width, tmp_path):
    encoder, which = Encoder(width, dtype), kind(1, width, dtype)
    ids, lengths = entries(100)
    with RowStore(tmp_path) as store:
        fresh = store.find_or_encode_rows(which, ids, lengths, encoder)
        store.store_all_rows()
        held = store.find_or_encode_rows(which, ids, lengths, encoder)
    read = RowStore(tmp_path).find_or_encode_rows(which, ids, lengths, encoder)
    assert encoder.calls == [100]
    assert fresh.dtype == held.dtype == read.dtype == dtype
    for rows in (held, read):
        assert mx.array_equal(fresh, rows)
    for i, (entry, length) in enumerate(zip(ids, lengths, strict=True)):  # as a step of generation asks
        row = store.find_or_encode_row(which, entry[:length].tobytes(), lambda: pytest.fail("it is in memory"))
        assert row.dtype == dtype
        assert mx.array_equal(fresh[i : i + 1], row)
    for name, words in ((which, np.array([1, 2], np.uint32)), (kind(2, width, dtype), ids[0, : lengths[0]])):
        made, encoded = mx.ones((1, width), dtype), store.encoded
        assert mx.array_equal(store.find_or_encode_row(name, words.tobytes(), lambda made=made: made), made)
        assert store.encoded == encoded + 1


def test_rows_come_in_the_order_asked_for_whatever_the_store_has(tmp_path):
    encoder = Encoder()
    ids, lengths = entries(200)
    store = RowStore(tmp_path)
    store.find_or_encode_rows(kind(), ids[50:90], lengths[50:90], encoder)
    store.close()
    store = RowStore(tmp_path)
    store.find_or_encode_rows(kind(), ids[10:60], lengths[10:60], encoder)
    store.store_all_rows()
    order = np.random.default_rng(3).permutation(np.concatenate([np.arange(200), np.arange(0, 200, 3)]))
    rows = store.find_or_encode_rows(kind(), ids[order], lengths[order], encoder)
    np.testing.assert_array_equal(np.array(rows), true_rows(ids[order], lengths[order]))
    assert encoder.calls == [40, 40, 120]


def test_padding_after_an_entry_does_not_count():
    encoder, store = Encoder(), RowStore()
    one, other = np.array([[5, 6, 2]], np.uint32), np.array([[5, 6, 9]], np.uint32)
    store.find_or_encode_rows(kind(), one, np.array([2]), encoder)
    store.store_all_rows()
    store.find_or_encode_rows(kind(), other, np.array([2]), encoder)
    assert encoder.calls == [1]
    store.find_or_encode_rows(kind(), one, np.array([3]), encoder)
    assert encoder.calls == [1, 1]


def test_memory_stays_within_its_limit_and_the_least_recently_used_rows_are_evicted():
    row = 4 + 12 + 4 * WIDTH + ROW_OVERHEAD
    encoder, store = Encoder(), RowStore(memory_bytes=10 * row)
    ids, lengths = entries(15)
    for i in range(10):
        store.find_or_encode_rows(kind(), ids[i : i + 1], lengths[i : i + 1], encoder)
        store.store_all_rows()
    assert store.nbytes == 10 * row
    store.find_or_encode_rows(kind(), ids[:1], lengths[:1], encoder)  # used again, so the second is the oldest
    store.find_or_encode_rows(kind(), ids[10:15], lengths[10:15], encoder)
    store.store_all_rows()
    assert store.nbytes == 10 * row
    encoder.calls.clear()
    store.find_or_encode_rows(kind(), ids[[0, 6, 9, 14]], lengths[[0, 6, 9, 14]], encoder)
    assert encoder.calls == []
    store.find_or_encode_rows(kind(), ids[1:6], lengths[1:6], encoder)
    assert encoder.calls == [5]


def test_a_store_without_room_still_gives_rows():
    encoder, store = Encoder(), RowStore(memory_bytes=0)
    ids, lengths = entries(5)
    for _ in range(2):
        np.testing.assert_array_equal(
            np.array(store.find_or_encode_rows(kind(), ids, lengths, encoder)), true_rows(ids, lengths)
        )
        store.store_all_rows()
    assert (encoder.calls, store.nbytes) == ([5, 5], 0)


@pytest.mark.parametrize("submitted", [False, True])
def test_rows_that_cannot_be_computed_fail_once_and_are_encoded_anew(submitted, monkeypatch):
    def broken(rows):
        raise RuntimeError("no memory")

    encoder, store = Encoder(), RowStore()
    ids, lengths = entries(5)
    store.find_or_encode_rows(kind(), ids, lengths, encoder)
    settle = store.store_unsubmitted_rows
    if submitted:
        assert store.take_rows_to_submit()
        store.note_submitted_computed()
        settle = store.store_computed_rows
    with monkeypatch.context() as patch:
        patch.setattr("mlx_zip.models.rows.row_store.host_bytes", broken)
        with pytest.raises(RuntimeError):
            settle()
        settle()  # or each later call of any request would fail too
    np.testing.assert_array_equal(
        np.array(store.find_or_encode_rows(kind(), ids, lengths, encoder)), true_rows(ids, lengths)
    )
    store.store_all_rows()
    store.find_or_encode_rows(kind(), ids, lengths, encoder)
    assert encoder.calls == [5, 5]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_a_store_keeps_the_rows_of_all_submissions_and_those_never_submitted(end, tmp_path):
    encoder, store, (ids, lengths) = Encoder(), RowStore(tmp_path), entries(9)
    for at in range(0, 9, 3):
        store.find_or_encode_rows(kind(), ids[at : at + 3], lengths[at : at + 3], encoder)
        if at < 6:
            assert len(store.take_rows_to_submit()) == 1
    getattr(store, end)()
    RowStore(tmp_path).find_or_encode_rows(kind(), ids, lengths, encoder)
    assert encoder.calls == [3, 3, 3]
