"""Tiny models that begin with a pack."""

from __future__ import annotations

import numpy as np

from mlx_zip import compress
from mlx_zip.codec import CodecParams
from mlx_zip.engine.mlx.generate import stream_generate
from support.generating import ENDLESS
from support.tiny import MERGE, PAD, SLOTS, VOCAB, base_ids, tiny_model


def entries_of(text, n, seed=0):
    """n different runs of 2 to MERGE ids of a text, without disabled ids."""
    rng, found = np.random.default_rng(seed), {}
    while len(found) < n:
        at, length = rng.integers(len(text) - MERGE), rng.integers(2, MERGE + 1)
        run = tuple(text[at : at + length])
        if not {0, 1, PAD} & set(run):
            found[run] = None
    return tuple(found)


TEXT = base_ids(70)

START = entries_of(TEXT, 10)

OTHER = entries_of(base_ids(70, seed=3), 7, seed=3)

MODEL = tiny_model()


def codec(start):
    return CodecParams(VOCAB, SLOTS, MERGE, (0, 1, PAD), PAD, start)


def compressed(start, length=70, seed=0):
    return [int(i) for i in compress(codec(start), base_ids(length, seed))[0]]


def assert_close(got, want, atol=2e-5):
    got, want = np.array(got), np.array(want)
    assert (np.isfinite(got) == np.isfinite(want)).all()
    np.testing.assert_allclose(got[np.isfinite(want)], want[np.isfinite(want)], atol=atol)


def run(model=MODEL, prompt=TEXT, **options):
    return list(stream_generate(model, ENDLESS, prompt, **{"max_tokens": 40, **options}))
