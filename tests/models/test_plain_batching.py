"""Plain models' caches of every kind join a batch and leave it: each sequence gets the ids that mlx-lm gives it."""

import functools
import random

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_zip.errors import ModelError
from mlx_zip.models.batching import can_batch, extract_cache, filter_cache, merge_caches
from support import tiny
from support.plain_families import FAMILIES, STATES, WINDOWS, plain_family
from support.slow_cases import slow_but

STEPS, LENGTHS = 26, (3, 9, 30, 1, 17, 12)


@functools.cache
def family(name):
    return plain_family(name)


@functools.cache
def expected(name, number, steps=STEPS):
    """What mlx-lm emits for prompt `number`."""
    steps = generate_step(mx.array(prompt(number)), family(name), max_tokens=steps, sampler=greedy)
    return [int(token) for token, _ in steps]


def greedy(logprobs):
    return mx.argmax(logprobs, axis=-1)


def prompt(number):
    return tiny.base_ids(LENGTHS[number % len(LENGTHS)], number)


class Row:
    """One sequence. cache: while it is alone."""

    def __init__(self, name, number):
        self.number, self.cache = number, make_prompt_cache(family(name))
        logits = family(name)(mx.array([prompt(number)]), cache=self.cache)
        self.ids = [int(mx.argmax(logits[0, -1]))]

    def step(self, name):
        self.ids.append(int(mx.argmax(family(name)(mx.array([[self.ids[-1]]]), cache=self.cache)[0, -1])))


class Batch:
    """Sequences with one cache."""

    def __init__(self, name):
        self.model, self.rows, self.cache = family(name), [], None

    def join(self, rows):
        for row in rows:
            self.cache = merge_caches(self.model, [row.cache] if self.cache is None else [self.cache, row.cache])
            self.rows.append(row)

    def leave(self, places):
        for place in places:
            self.rows[place].cache = extract_cache(self.cache, place)
        stay = [place for place in range(len(self.rows)) if place not in places]
        self.rows = [self.rows[place] for place in stay]
        if stay:
            filter_cache(self.cache, stay)
        else:
            self.cache = None

    def step(self):
        if self.rows:
            logits = self.model(mx.array([[row.ids[-1]] for row in self.rows]), cache=self.cache)[:, -1]
            for row, chosen in zip(self.rows, mx.argmax(logits, axis=-1).tolist(), strict=True):
                row.ids.append(chosen)


@pytest.mark.parametrize("seed", slow_but((1, 2), 2))
@pytest.mark.parametrize("name", slow_but(FAMILIES, "llama", "llama with windows"))
def test_joins_and_leaves_in_any_order_change_no_sequence(name, seed):
    rng, batch, alone = random.Random(seed), Batch(name), []
    waiting, done = [Row(name, number) for number in range(6)], []
    while waiting or alone or batch.rows:
        if waiting and rng.random() < 0.3:
            batch.join([waiting.pop()])
        if alone and rng.random() < 0.2:
            batch.join([alone.pop()])
        if len(batch.rows) > 1 and rng.random() < 0.2:
            place = rng.randrange(len(batch.rows))
            alone.append(batch.rows[place])
            batch.leave([place])
        batch.step()
        for row in alone:
            row.step(name)
        ended = [place for place, row in enumerate(batch.rows) if len(row.ids) >= STEPS]
        done += [batch.rows[place] for place in ended]
        batch.leave(ended) if ended else None
        done += [row for row in alone if len(row.ids) >= STEPS]
        alone = [row for row in alone if len(row.ids) < STEPS]
    assert len(done) == 6
    for row in done:
        assert row.ids[:STEPS] == expected(name, row.number)


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_are_merged_reordered_and_taken_apart(name):
    model, rows = family(name), [Row(name, number) for number in range(4)]
    one = merge_caches(model, [rows[0].cache, rows[1].cache])
    one = merge_caches(model, [one, merge_caches(model, [rows[2].cache, rows[3].cache])])
    filter_cache(one, [3, 0, 2])
    order = [rows[3], rows[0], rows[2]]
    for _ in range(12):
        logits = model(mx.array([[row.ids[-1]] for row in order]), cache=one)[:, -1]
        for row, chosen in zip(order, mx.argmax(logits, axis=-1).tolist(), strict=True):
            row.ids.append(chosen)
    for place, row in enumerate(order):
        assert row.ids == expected(name, row.number, 14)[:13]
        row.cache = extract_cache(one, place)
        assert [type(entry) for entry in row.cache] == [type(entry) for entry in make_prompt_cache(model)]
        row.step(name)
        assert row.ids == expected(name, row.number, 14)


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
def test_a_cache_that_joins_is_not_changed_and_an_interrupt_changes_nothing(name, monkeypatch):
    model, rows = family(name), [Row(name, number) for number in range(3)]
    batch = merge_caches(model, [row.cache for row in rows[:2]])
    last = batch[-1].caches[-1] if isinstance(batch[-1], CacheList) else batch[-1]

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(last), "extend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            merge_caches(model, [batch, rows[2].cache])
    for row in rows[2:]:
        row.step(name)
        assert row.ids == expected(name, row.number)[:2]
    logits = model(mx.array([[row.ids[-1]] for row in rows[:2]]), cache=batch)[:, -1]
    assert mx.argmax(logits, axis=-1).tolist() == [expected(name, row.number)[1] for row in rows[:2]]


def test_what_batches_is_what_mlx_lm_can_batch():
    assert all(can_batch(make_prompt_cache(family(name))) for name in FAMILIES)
    assert not can_batch([KVCache(), QuantizedKVCache()])
    assert not can_batch([ChunkedKVCache(8)])
    assert not can_batch([CacheList(ArraysCache(2), QuantizedKVCache())])
    assert can_batch([RotatingKVCache(8)])
    assert not can_batch([RotatingKVCache(8, keep=4)])


@pytest.mark.parametrize("name", [*WINDOWS, *STATES])
def test_what_does_not_fit_is_refused(name):
    model, row = family(name), Row(name, 0)
    with pytest.raises(ModelError, match="this model's have 4"):
        merge_caches(model, [row.cache[:2]])
    with pytest.raises(ModelError, match="QuantizedKVCache do not batch"):
        merge_caches(model, [[*row.cache[:3], QuantizedKVCache()]])
    batch = merge_caches(model, [row.cache, Row(name, 1).cache])
    with pytest.raises(ModelError, match="batch of 2"):
        filter_cache(batch, [2])
    if name != "mamba2":  # its caches hold any number of sequences
        with pytest.raises(ModelError, match="no cache of a batch"):
            extract_cache(row.cache, 0)
