"""The codec compared with the published package, on random sequences, wherever that package is lawful."""

import random

import pytest

from mlx_zip import Codebook, CodecParams, compress

upstream = pytest.importorskip("zip2zip_compression", reason="zip2zip-compression is not installed")


def codecs(count):
    """Seeded pairs of equal codecs; the pad id and the disabled ids are base ids, so no id has two meanings."""
    for seed in range(count):
        rng = random.Random(seed)
        vocab, slots, merge = rng.randint(2, 9), rng.choice([0, 1, 3, 9, 40, 300]), rng.randint(1, 7)
        pad, disabled = rng.randrange(vocab), rng.sample(range(vocab), rng.randint(0, vocab // 3))
        ours = CodecParams(vocab, slots, merge, disabled, pad)
        yield rng, ours, upstream.LZWCompressor(vocab, slots, merge, pad, disabled)


def test_compressing_random_sequences_equals_the_package():
    for rng, params, theirs in codecs(400):
        ids = rng.choices(range(params.vocab_size), k=rng.randint(1, 300))
        emitted, _, codebook = theirs.encode(ids)
        got, entries = compress(params, ids)
        assert got.tolist() == emitted
        assert {code: list(run) for code, run in entries} == codebook.to_dict()


def test_following_random_masked_samples_equals_the_package():
    for rng, params, theirs in codecs(400):
        book, ids = Codebook(params), []
        for _ in range(rng.randint(1, 150)):
            ids.append(rng.randrange(params.vocab_size + len(book)))
            book.push(ids[-1])
        expanded, codebook = theirs.decode(ids)
        assert book.expand(ids).tolist() == expanded
        assert {code: list(run) for code, run in book.entries} == codebook.to_dict()
