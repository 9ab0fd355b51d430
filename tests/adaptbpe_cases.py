"""Merge lists for the tests of AdaptBPE: the golden cases, small random ones, GPT-2's if it is there."""

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import strategies as st

from mlx_zip.vocab.adaptbpe.merges import MergeList

GOLDEN = json.loads((Path(__file__).parent / "golden" / "adaptbpe.json").read_text())
HEAD = json.loads((Path(__file__).parent / "golden" / "adaptbpe_gpt2_head.json").read_text())
SHARED = Path(__file__).resolve().parents[2] / "shared"
GPT2 = SHARED / "golden" / "gpt2_vocab.bpe"
needs_gpt2 = pytest.mark.skipif(not GPT2.is_file(), reason="GPT-2's merge list is not beside the checkout")


def symbols(word):
    """A golden word as bytes: its characters are base symbols."""
    return word.encode("latin-1")


@cache
def golden_merges(name):
    (case,) = [case for case in GOLDEN["cases"] if case["name"] == name]
    return MergeList.of_bytes([tuple(map(symbols, pair)) for pair in case["merges"]])


def corpus_of(case):
    return {symbols(word): count for word, count in case["corpus"]}


@st.composite
def merge_lists(draw, most=14):
    """Proper lists over three letters, in which tokens recur."""
    tokens, pairs = [b"a", b"b", b"c"], []
    for _ in range(draw(st.integers(0, most))):
        left, right = (tokens[draw(st.integers(0, len(tokens) - 1))] for _ in range(2))
        if left + right not in tokens and len(left + right) < 9:
            tokens.append(left + right)
            pairs.append((left, right))
    return MergeList.of_bytes(pairs)


words = st.text("abc", min_size=1, max_size=14).map(str.encode)
corpora = st.dictionaries(words, st.integers(1, 6), min_size=1, max_size=12)
