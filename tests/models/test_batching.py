"""Sequences that join a batch and leave it between steps: each gets the ids and logits that it gets alone."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from mlx_zip.codec import compress_next
from mlx_zip.engine.sampling.canonical import CanonicalDecoding
from mlx_zip.errors import ModelError
from mlx_zip.models.batching import extract_cache, filter_cache, merge_caches
from mlx_zip.models.rows import row_tables as rows
from mlx_zip.models.rows import sequence_rows as state_rows
from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.models.rows.sequence_rows import SequenceRows
from mlx_zip.models.two_part_step import TwoPartStep
from support import tiny
from support.slow_cases import slow_but

PACKS = [None, [[5, 6], [7, 8, 9], [5, 6, 7]], [[7, 8, 9], [10, 11]], ()]
STEPS = 14


def turning(policy):
    sizes = {"initial_vocab_size": tiny.VOCAB, "max_codebook_size": 6, "max_subtokens": tiny.MERGE}
    return {"compression": {**sizes, "disabled_ids": [0, 1, tiny.PAD], "policy": policy}}


KINDS = {
    "llama": ("llama", {}),
    "llama, positions of base tokens": ("llama", {"position_mode": "base_token_end"}),
    "qwen2": ("qwen2", {}),
    "phi3": ("phi3", {}),
    "gemma, rows tied": ("gemma", {"tie_encoders": True}),
    "lru": ("llama", turning("lru")),
    "use-count, rows tied": ("gemma2", {"tie_encoders": True, **turning("use-count")}),
}
FORMS = [*((kind, False) for kind in KINDS), ("llama", True), ("qwen2", True)]  # whether decoding is canonical


def model_of(kind, store=False):
    family, changes = KINDS[kind]
    model = tiny.tiny_model(family, **changes).eval()
    model.traits = type(model.traits)(**{**vars(model.traits), "long_context": None})
    if store:
        model.row_source.store = RowStore()
    return model


class Row:
    """One sequence, alone or in a batch: its prompt, the id that it reads next, and what it has emitted."""

    def __init__(self, model, number, canonical):
        self.number, self.cache = number, model.make_cache(pack=PACKS[number % len(PACKS)])
        self.prompt = compress_next(self.cache[-1].books[0], tiny.base_ids(7 + 9 * (number % 5), number))
        self.canonical = CanonicalDecoding(self.cache[-1].books[0]) if canonical else None
        self.ids, self.logits = [], []

    def prefill(self, model):
        self.choose(model(mx.array(self.prompt.astype(np.int32))[None], cache=self.cache)[:, -1])
        return self

    def choose(self, logits):
        """Takes logits [1, W] and chooses the next id from them."""
        self.logits.append(np.array(logits[0]))
        if self.canonical is not None:
            logits = self.canonical(None, logits)
        self.ids.append(mx.argmax(logits[0]).item())

    def alone(self, model, steps):
        for _ in range(steps):
            self.choose(model(mx.array([[self.ids[-1]]]), cache=self.cache)[:, -1])
        return self


class Batch:
    """A batch whose sequences come and go."""

    def __init__(self, model, ahead=False):
        self.model, self.ahead, self.cache, self.rows = model, ahead, None, []

    def join(self, row):
        self.rows.append(row)
        self.cache = merge_caches(self.model, [row.cache] if self.cache is None else [self.cache, row.cache])

    def leave(self, index):
        row = self.rows.pop(index)
        row.cache = extract_cache(self.cache, index)
        if self.rows:
            filter_cache(self.cache, [i for i in range(len(self.rows) + 1) if i != index])
        else:
            self.cache = None
        return row

    def step(self):
        ids = mx.array([row.ids[-1] for row in self.rows])
        if self.ahead:
            ahead = TwoPartStep(self.model, self.cache)
            logits = ahead.compute_logits(ahead.run_body(ids), ids)[:, -1]
        else:
            logits = self.model(ids[:, None], cache=self.cache)[:, -1]
        for index, row in enumerate(self.rows):
            row.choose(logits[index : index + 1])


def check(row, expected):
    """That a sequence emitted what it emits alone."""
    n = len(row.ids)
    assert row.ids == expected.ids[:n]
    np.testing.assert_allclose(np.stack(row.logits), np.stack(expected.logits[:n]), atol=2e-4)


@pytest.fixture
def small_steps(monkeypatch):
    """Tables that grow in small steps, so that places are often given up; returns how many were kept each time."""
    kept, keep_places = [], SequenceRows._keep_places

    def counted(self, used):
        kept.append(len(used))
        return keep_places(self, used)

    monkeypatch.setattr(rows, "CAPACITY_STEP", 8)
    monkeypatch.setattr(state_rows, "CAPACITY_STEP", 8)
    monkeypatch.setattr(SequenceRows, "_keep_places", counted)
    return kept


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("kind", "canonical"), slow_but(FORMS, ("llama", False)))
def test_joins_and_leaves_in_any_order_change_no_sequence(kind, canonical, ahead, small_steps):
    rng = np.random.default_rng(len(kind) + canonical)
    model, single = model_of(kind, store=canonical), model_of(kind)
    batch, done, made = Batch(model, ahead), [], 0
    while made < 6 or batch.rows:  # every pack and every length
        if made < 6 and (not batch.rows or rng.random() < 0.4):
            batch.join(Row(model, made, canonical).prefill(model))
            made += 1
        elif len(batch.rows) and rng.random() < 0.25:
            done.append(batch.leave(int(rng.integers(len(batch.rows)))))
        for _ in range(int(rng.integers(4)) if batch.rows else 0):
            batch.step()
    for row in done:
        check(row, Row(single, row.number, canonical).prefill(single).alone(single, len(row.ids) - 1))
    assert small_steps  # places were given up


@pytest.mark.parametrize("kind", ["llama, positions of base tokens", "lru"])
def test_a_sequence_that_left_goes_on_alone_and_in_another_batch(kind):
    model = model_of(kind)
    batch = Batch(model)
    for number in range(4):
        batch.join(Row(model, number, False).prefill(model))
    for _ in range(5):
        batch.step()
    left = [batch.leave(2), batch.leave(0)]
    kept = copy.deepcopy(left[0].cache)
    left[0].alone(model, 4)
    other = Batch(model)
    for row in left:
        other.join(row)
    for _ in range(5):
        batch.step()
        other.step()
    assert kept[-1].offset == kept[0].offset < left[0].cache[0].offset + 4
    for row in [*batch.rows, *left]:
        check(row, Row(model, row.number, False).prefill(model).alone(model, len(row.ids) - 1))


def test_padding_that_all_sequences_have_is_forgotten():
    model = model_of("llama")
    batch = Batch(model)
    for number in (4, 0, 1):  # the first has the longest prompt
        batch.join(Row(model, number, False).prefill(model))
    state, kv = batch.cache[-1], batch.cache[0]
    lengths = [len(row.prompt) for row in batch.rows]
    assert state.left_padding == kv.left_padding.tolist() == [max(lengths) - n for n in lengths]
    batch.leave(0)
    assert state.left_padding == kv.left_padding.tolist() == [max(lengths[1:]) - n for n in lengths[1:]]
    assert state.offset == kv._idx == kv.keys.shape[2] == max(lengths[1:])


def test_a_batch_can_be_reordered_and_a_batch_can_join_a_batch():
    model = model_of("llama")
    rows = [Row(model, number, False).prefill(model) for number in range(4)]
    batch, other = Batch(model), Batch(model)
    for to, row in zip([batch, batch, other, other], rows, strict=True):
        to.join(row)
    batch.step()
    filter_cache(batch.cache, [1, 0])
    batch.rows.reverse()
    batch.cache = merge_caches(model, [batch.cache, other.cache])
    batch.rows += other.rows
    for _ in range(STEPS):
        batch.step()
    for row in rows:
        check(row, Row(model, row.number, False).prefill(model).alone(model, len(row.ids) - 1))


def test_each_sequence_keeps_its_answers():
    model = model_of("llama")
    caches = [Row(model, number, False).prefill(model).cache for number in range(3)]
    for number, cache in enumerate(caches):
        cache[-1].answers["text"] = (number,)
    batch = merge_caches(model, caches)
    filter_cache(batch, [2, 0])
    assert [extract_cache(batch, i)[-1].answers["text"] for i in range(2)] == [(2,), (0,)]


def test_a_batch_of_empty_caches_reads_its_prompts_together():
    model = model_of("llama")
    batch = merge_caches(model, [model.make_cache(), model.make_cache()])
    filter_cache(batch, [1, 0])
    ids = mx.array([[5, 6, 7], [8, 9, 8]])
    together = np.array(model(ids, cache=batch)[:, -1])
    for row, one in zip(together, ids, strict=True):
        np.testing.assert_allclose(row, np.array(model(one[None], cache=model.make_cache())[0, -1]), atol=2e-4)


def test_plain_caches_join_and_leave():
    model = model_of("llama")
    from mlx_lm.models import llama

    config = {**tiny.tiny_config(), "model_type": "llama"}
    plain = llama.Model(llama.ModelArgs.from_dict(config))
    caches, prompts = [make_prompt_cache(plain) for _ in range(3)], [[5, 6, 7], [8], [9, 5]]
    for cache, prompt in zip(caches, prompts, strict=True):
        plain(mx.array([prompt]), cache=cache)
    batch = merge_caches(plain, caches[:1])
    batch = merge_caches(plain, [batch, caches[1]])
    batch = merge_caches(plain, [batch, caches[2]])
    filter_cache(batch, [2, 1])
    alone = extract_cache(batch, 0)
    expected = np.array(plain(mx.array([[9, 5, 7]]))[0, -1])
    np.testing.assert_allclose(np.array(plain(mx.array([[7], [6]]), cache=batch)[0, -1]), expected, atol=2e-4)
    np.testing.assert_allclose(np.array(plain(mx.array([[7]]), cache=alone)[0, -1]), expected, atol=2e-4)
    with pytest.raises(ModelError, match="not one that"):
        merge_caches(model, [batch])


def test_caches_that_do_not_fit_are_refused_and_nothing_changes():
    model, other = model_of("llama"), model_of("lru")
    caches = [Row(model, number, False).prefill(model).cache for number in range(3)]
    quantized = [*(QuantizedKVCache() for _ in model.layers), model.make_cache()[-1]]
    batch = merge_caches(model, caches[:2])
    caches[2][-1].long_rope = True
    with pytest.raises(ModelError, match="LongRoPE"):
        merge_caches(model, [batch, caches[2]])
    with pytest.raises(ModelError, match="codec parameters"):
        merge_caches(model, [batch, other.make_cache()])
    with pytest.raises(ModelError, match="QuantizedKVCache"):
        merge_caches(model, [batch, quantized])
    with pytest.raises(ModelError, match="no caches"):
        merge_caches(model, [])
    for wrong in ([], [2], [-1], [0, 0]):
        with pytest.raises(ModelError, match="indices"):
            filter_cache(batch, wrong)
    with pytest.raises(ModelError, match="not read"):
        filter_cache(model.make_cache(left_padding=[1, 2]), [0])
    with pytest.raises(ModelError, match="no cache of a batch"):
        extract_cache(caches[2], 0)
    assert batch[-1].offset == batch[0]._idx
    assert len(batch[-1].books) == batch[0].keys.shape[0] == 2
