"""Hierarchical BPE, second stage: recorded cases, GPT-2's facts, and the C library against its plain-Python twin."""

import json
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_zip.codec._native import ffi, lib
from mlx_zip.errors import CodecError, DataError
from mlx_zip.vocab.hbpe import patch_merges as hbpe
from mlx_zip.vocab.hbpe.patch_merges import FIRST_MERGE, MARK, MAX_PATCH, PatchMerges, learn_merges, tokens_too_long
from mlx_zip.vocab.hbpe.patch_text import read_text_encoder, read_token_bytes
from support import hbpe_twin as twin
from support.places import GOLDEN, SHARED
from support.slow_cases import slow_but

CASES = json.loads((GOLDEN / "hbpe.json").read_text())
GPT2 = CASES["gpt2"]
MERGE_LIST = SHARED / "golden" / "gpt2_vocab.bpe"
needs_gpt2 = pytest.mark.skipif(not MERGE_LIST.is_file(), reason="needs the larger shared data (golden/gpt2_vocab.bpe)")
MERGES = {4: 5095, 6: 1149, 8: 466, 10: 240, 12: 143, 16: 79}  # V' by S for GPT-2's tokens


# Small alphabets, so that pairs recur, tie and overlap.
TOKENS = st.lists(st.lists(st.sampled_from(b"abc"), max_size=14).map(bytes), max_size=12)
SIZES = st.integers(2, 9)
MODES = st.sampled_from(hbpe.MODES)


def digest(value):
    return sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()


def by_twin(tokens, size):
    steps = twin.learn(tokens, size)
    return [list(pair) for pair, _, _ in steps], [count for _, count, _ in steps], [left for _, _, left in steps]


def by_c(tokens, size):
    learned = learn_merges(tokens, size)
    return [list(pair) for pair in learned.merges.pairs], learned.counts.tolist(), learned.left.tolist()


def trace(pairs, counts, left):
    steps = zip(pairs, counts, left, strict=True)
    return [{"pair": p, "symbol": FIRST_MERGE + k, "count": c, "left_pool": n} for k, (p, c, n) in enumerate(steps)]


# ---- recorded cases


@pytest.fixture(params=CASES["cases"], ids=lambda case: f"{case['name'][:40]}, S={case['S']}")
def case(request):
    tokens = [bytes.fromhex(token) for token in request.param["tokens_hex"]]
    return tokens, request.param["S"], request.param["expected"]


@pytest.mark.parametrize("learned_by", [by_c, by_twin])
def test_the_recorded_merges_are_learned(case, learned_by):
    tokens, size, expected = case
    pairs, counts, left = learned_by(tokens, size)
    assert pairs == expected["merges"]
    assert len(pairs) == expected["n_merges"]
    steps = trace(pairs, counts, left)
    head = expected.get("trace", expected.get("trace_head"))
    assert steps[: len(head)] == head
    assert digest(steps) == expected.get("trace_sha256", digest(steps))
    assert len(steps) == len(head) or "trace_sha256" in expected


@pytest.mark.parametrize("mode", hbpe.MODES)
def test_tokens_are_encoded_as_recorded(case, mode):
    tokens, size, expected = case
    merges = PatchMerges(size, tuple(map(tuple, expected["merges"])))
    by_twin = [twin.encode(merges.pairs, token, size if mode == "stop" else None) for token in tokens]
    for patches in ([patch.tolist() for patch in merges.encode_all(tokens, mode)], by_twin):
        assert digest(patches) == expected.get(f"{mode}_sha256", digest(expected.get(mode)))


@pytest.mark.parametrize("mode", hbpe.MODES)
def test_other_tokens_are_encoded_as_recorded_and_need_not_fit(case, mode):
    _, size, expected = case
    merges = PatchMerges(size, tuple(map(tuple, expected["merges"])))
    for other in expected["other_tokens"]:
        token = bytes.fromhex(other["hex"])
        assert merges.encode(token, mode) == other[mode]
        assert twin.encode(merges.pairs, token, size if mode == "stop" else None) == other[mode]
        assert (len(other["stop"]) <= size) == other["fits"]


# ---- GPT-2


@pytest.fixture(scope="module")
def gpt2():
    assert sha256(MERGE_LIST.read_bytes()).hexdigest() == GPT2["vocab_bpe_sha256"]
    return read_token_bytes(MERGE_LIST)


@needs_gpt2
def test_gpt2s_tokens_are_as_long_as_recorded(gpt2):
    lengths = np.array([len(token) for token in gpt2])
    assert len(gpt2) == GPT2["tokens"]
    assert (lengths.max(), lengths.argmax()) == (GPT2["longest_bytes"], GPT2["longest_id"])
    assert (lengths < 15).sum() == GPT2["under_15_bytes"]
    sizes, counts = np.unique(lengths, return_counts=True)
    assert list(map(list, zip(sizes.tolist(), counts.tolist(), strict=True))) == GPT2["length_histogram"]


@needs_gpt2
@pytest.mark.parametrize("size", MERGES)
def test_gpt2_needs_as_many_merges_as_recorded(gpt2, size):
    assert len(learn_merges(gpt2, size).merges.pairs) == MERGES[size]


@needs_gpt2
@pytest.mark.parametrize("row", GPT2["rows"], ids=lambda row: f"S={row['S']}")
def test_gpt2s_merges_are_those_recorded(gpt2, row):
    assert len(tokens_too_long(gpt2, row["S"])) == row["pool"]
    learned = learn_merges(gpt2, row["S"])
    pairs = [list(pair) for pair in learned.merges.pairs]
    assert len(pairs) == row["n_merges"]
    assert pairs[: len(row["merges_head"])] == row["merges_head"]
    assert digest(pairs) == row["merges_sha256"]
    assert learned.counts[: len(row["first_counts"])].tolist() == row["first_counts"]
    if row["all_tokens_stop_sha256"]:
        patches = learned.merges.encode_all(gpt2)
        assert digest([patch.tolist() for patch in patches]) == row["all_tokens_stop_sha256"]


@needs_gpt2
@pytest.mark.parametrize("size", slow_but([10, 12, 16], 16))
def test_gpt2s_merges_are_the_twins(gpt2, size):
    assert by_c(gpt2, size) == by_twin(gpt2, size)


@needs_gpt2
def test_a_text_takes_as_many_symbols_as_recorded(gpt2):
    ids = read_text_encoder(MERGE_LIST)(GPT2["text"])
    assert (len(ids), len(GPT2["text"].encode())) == (GPT2["text_tokens"], GPT2["text_bytes"])
    for row in GPT2["rows"]:
        merges = learn_merges(gpt2, row["S"]).merges
        for mode in hbpe.MODES:
            patches = merges.encode_all([gpt2[i] for i in ids], mode)
            assert sum(map(len, patches)) == row[f"text_symbols_{mode}"]


# ---- properties


@given(TOKENS, SIZES)
def test_learning_agrees_with_the_twin(tokens, size):
    assert by_c(tokens, size) == by_twin(tokens, size)


@pytest.mark.slow
@given(TOKENS, TOKENS, SIZES, MODES)
def test_encoding_agrees_with_the_twin(tokens, others, size, mode):
    merges = learn_merges(tokens, size).merges
    expected = [twin.encode(merges.pairs, t, size if mode == "stop" else None) for t in tokens + others]
    assert [patch.tolist() for patch in merges.encode_all(tokens + others, mode)] == expected


@given(TOKENS, SIZES, MODES)
def test_every_token_learned_from_fits_and_comes_back(tokens, size, mode):
    merges = learn_merges(tokens, size).merges
    for token, patch in zip(tokens, merges.encode_all(tokens, mode), strict=True):
        assert len(patch) <= size
        assert merges.decode(patch.tolist()) == token


@given(TOKENS, TOKENS, SIZES, MODES)
def test_any_token_comes_back(tokens, others, size, mode):
    merges = learn_merges(tokens, size).merges
    for token in others:
        patch = merges.encode(token, mode)
        assert patch.index(MARK) == len(patch) - 1
        assert merges.decode(patch) == token
        assert merges.decode([*patch, MARK, 0, 255]) == token


@given(TOKENS, SIZES, st.randoms())
def test_neither_order_nor_repetition_of_tokens_matters(tokens, size, random):
    shuffled = tokens * 2
    random.shuffle(shuffled)
    assert by_c(shuffled, size) == by_c(tokens, size)


@given(st.lists(st.binary(max_size=40), max_size=20), SIZES)
def test_any_bytes_are_learned_as_by_the_twin(tokens, size):
    assert by_c(tokens, size) == by_twin(tokens, size)


# ---- what is refused


def test_a_token_of_exactly_the_size_with_its_mark_teaches_nothing():
    assert by_c([b"abc"], 4) == ([], [], [])
    assert by_c([b"abcd"], 4) == ([[97, 98]], [1], [1])


@pytest.mark.parametrize("size", [1, 0, -1, MAX_PATCH + 1, 2.5, True, "8"])
def test_a_size_outside_its_range_is_refused(size):
    with pytest.raises(CodecError, match="patch size"):
        learn_merges([b"abc"], size)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(97, MARK)], "merge 0"),
        ([(97, 98), (257, 258)], "merge 1"),
        ([(97, -1)], "merge 0"),
        ([(97, 98), (98, 99), (97, 98)], "merge 2 .* twice"),
        ([(97, 97), *((k, k) for k in range(257, 273))], "merge 15 .* more than 65535 bytes"),
    ],
)
def test_merges_that_cannot_stand_where_they_do_are_refused(pairs, message):
    with pytest.raises(CodecError, match=message):
        PatchMerges(4, tuple(pairs))


@pytest.mark.parametrize("pairs", [[(97, MARK)], [(97, 98), (257, 258)], [(97, 98), (98, 99), (97, 98)]])
def test_the_c_library_refuses_them_too(pairs):
    merges = np.array(pairs, np.uint16)
    out, lengths, bad = ffi.new("uint16_t[]", 2), ffi.new("uint32_t[]", 1), ffi.new("size_t *")
    status = lib.mlxzip_patches_encode(
        ffi.from_buffer("mlxzip_merge[]", merges), len(pairs), 4, b"a", [0, 1], 1, out, lengths, bad
    )
    assert (status, bad[0]) == (lib.MLXZIP_E_MERGE, len(pairs) - 1)


@pytest.mark.parametrize("offsets", [[1, 2], [0, 3, 2], [0, 70000]])
def test_the_c_library_refuses_offsets_that_do_not_rise_or_rise_too_far(offsets):
    data, n = bytes(70000), len(offsets) - 1
    out, counts, n_out = ffi.new("mlxzip_merge[]", 9), ffi.new("uint32_t[]", 9), ffi.new("size_t *")
    assert lib.mlxzip_patches_learn(data, offsets, n, 4, out, counts, counts, 9, n_out) == lib.MLXZIP_E_ARG
    symbols, lengths = ffi.new("uint16_t[]", 70002), ffi.new("uint32_t[]", n)
    assert lib.mlxzip_patches_encode(out, 0, 4, data, offsets, n, symbols, lengths, n_out) == lib.MLXZIP_E_ARG


def test_more_merges_than_there_is_room_for_are_an_error_of_their_own():
    out, counts, n_out = ffi.new("mlxzip_merge[]", 1), ffi.new("uint32_t[]", 1), ffi.new("size_t *")
    status = lib.mlxzip_patches_learn(b"abcd", [0, 4], 1, 2, out, counts, counts, 1, n_out)
    assert status == lib.MLXZIP_E_SPACE


def test_a_vocabulary_that_needs_too_many_merges_is_refused():
    tokens = [bytes([a, b]) for a in range(256) for b in range(256)]  # one merge each at S = 2
    with pytest.raises(DataError, match="more than 65279 merges"):
        learn_merges(tokens, 2)


def test_a_token_that_is_too_long_is_refused():
    with pytest.raises(DataError, match="has 65536 bytes"):
        learn_merges([b"a", bytes(65536)], 8)


def test_an_unknown_mode_or_symbol_is_refused():
    merges = learn_merges([b"abcd"], 4).merges
    with pytest.raises(CodecError, match="'greedy'"):
        merges.encode(b"abcd", "greedy")
    with pytest.raises(CodecError, match="258"):
        merges.decode([97, 258])
