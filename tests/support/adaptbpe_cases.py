"""Merge lists for the tests of AdaptBPE: the golden cases, random lists, and GPT-2's where the shared data are."""

import json
from functools import cache
from random import Random

import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlx_zip.vocab.adaptbpe.merge_list import MergeList, Schedule
from support.places import GOLDEN, GOLDEN_MODELS, SHARED

ADAPTBPE = json.loads((GOLDEN / "adaptbpe.json").read_text())
HEAD = json.loads((GOLDEN / "adaptbpe_gpt2_head.json").read_text())
FIXTURE = GOLDEN_MODELS / "llama_transformer_tied_lora" / "base" / "tokenizer.json"
TEXT = "<|user|>the cat sat on the mat, the cat<|end|><|bos|> it's 12345 café 日本 \n\n x"
GPT2 = SHARED / "golden" / "gpt2_vocab.bpe"
needs_gpt2 = pytest.mark.skipif(not GPT2.is_file(), reason="needs the larger shared data (golden/gpt2_vocab.bpe)")


def write_head(folder):
    """The first merges of GPT-2's list, in GPT-2's file format."""
    path = folder / "vocab.bpe"
    path.write_text("#version: 0.2\n" + "\n".join(HEAD["merges"]) + "\n")
    return path


def read_fixture():
    """The content of a byte-level tokenizer.json, for a test to change."""
    return json.loads(FIXTURE.read_text())


def write_tokenizer(folder, data, name="tokenizer.json"):
    """Writes a text as it is, or any other value as JSON; returns the path."""
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def library(data):
    return Tokenizer.from_str(json.dumps(data))


def library_ids(data, text):
    return library(data).encode(text, add_special_tokens=False).ids


def symbols(word):
    """The bytes of a golden word, whose characters are base symbols."""
    return word.encode("latin-1")


@cache
def golden_merges(name):
    (case,) = [case for case in ADAPTBPE["cases"] if case["name"] == name]
    return MergeList.from_byte_pairs([tuple(map(symbols, pair)) for pair in case["merges"]])


def keeping(n_merges, kept):
    """The schedule that applies all merges by rank, then splits the tokens of those not in `kept`."""
    return Schedule.final(n_merges, n_merges, sorted({*range(n_merges)} - {*kept}), [])


def corpus_of(case):
    return {symbols(word): count for word, count in case["corpus"]}


def random_list(random):
    """A valid merge list over a few letters, in which tokens recur, and words made of a few of its tokens, so that
    swaps can gain something.
    """
    tokens, pairs = [bytes([letter]) for letter in b"abc"[: random.randint(1, 3)]], []
    for _ in range(random.randint(0, 30)):
        left, right = random.choice(tokens), random.choice(tokens)
        if left + right not in tokens and len(left + right) < 12:
            tokens.append(left + right)
            pairs.append((left, right))
    used = random.choices(tokens, k=random.randint(1, 6))
    words = [b"".join(random.choices(used, k=random.randint(1, 6))) for _ in range(random.randint(1, 10))]
    return MergeList.from_byte_pairs(pairs), words


def random_corpus(random):
    """Returns (merges, corpus) of one golden case."""
    merges, words = random_list(random)
    return merges, {word: random.randint(1, 6) for word in words}


def random_swaps(random):
    """Draws (merges, n, virtual, promoted, words): any valid swaps, whether they gain anything or not."""
    merges, words = random_list(random)
    n = random.randint(0, len(merges))
    actual, left_out, virtual, promoted = list(range(n)), list(range(n, len(merges))), [], []
    while actual and left_out and random.random() < 0.95:
        virtual.append(actual.pop(random.randrange(len(actual))))
        promoted.append(left_out.pop(random.randrange(min(3, len(left_out)))))
        actual.append(promoted[-1])
    return merges, n, virtual, promoted, words


# Drawn by a seed: so that long lists and words are as likely as short ones, and merges do meet.
seeds = st.integers(0, 2**32 - 1).map(Random)
merge_lists = seeds.map(lambda random: random_list(random)[0])
lists_and_corpora = seeds.map(random_corpus)
lists_and_swaps = seeds.map(random_swaps)
words = seeds.map(lambda random: bytes(random.choices(b"abc"[: random.randint(1, 3)], k=random.randint(1, 30))))
