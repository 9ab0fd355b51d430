"""Codebook packs: what is learned, and what a file of one must be."""

import copy
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_zip import Codebook, CodecParams, compress
from mlx_zip.errors import CodecError, DataError
from mlx_zip.packs.entries import read_entries, write_entries
from mlx_zip.packs.learner import learn_pack
from mlx_zip.packs.pack import Pack, load_pack, merge_packs, save_pack

PARAMS = CodecParams(500, 64, 4, disabled_ids=(0, 7))
ENTRIES = ((5, 6), (7, 8, 9, 10), (6, 5, 5))


def sentences(n, seed=0):
    """Texts made of six words of 2 to 4 ids, and noise between."""
    rng = np.random.default_rng(seed)
    words = [(10, 11, 12, 13), (20, 21), (30, 31, 32), (40, 41), (14, 15, 16, 17), (22, 23, 24)]
    return [
        [x for _ in range(12) for x in (*words[int(rng.zipf(1.5)) % 6], int(rng.integers(100, 500)))] for _ in range(n)
    ]


# ---- learning


def test_the_words_of_a_text_are_its_pack():
    found = learn_pack(PARAMS, sentences(40), 6)
    assert {(10, 11, 12, 13), (20, 21), (30, 31, 32), (14, 15, 16, 17), (22, 23, 24)} <= set(found.entries)
    assert found.base_ids == sum(map(len, sentences(40)))
    assert found.ids < 0.9 * found.ids_without


def test_what_is_learned_is_told_as_the_runtime_does_it():
    texts = sentences(30)
    found = learn_pack(PARAMS, texts, 12, window=20)
    params = replace(PARAMS, start=found.entries)
    emitted = [compress(params, text[at : at + 20])[0] for text in texts for at in range(0, len(text), 20)]
    assert sum(map(len, emitted)) == found.ids
    ids = np.concatenate(emitted)
    assert list(found.uses) == [int((ids == 500 + slot).sum()) for slot in range(len(found.entries))]
    assert min(found.uses) > 0


def test_a_pack_helps_with_text_that_it_was_not_learned_from():
    pack = learn_pack(PARAMS, sentences(40), 12).entries
    texts = sentences(20, seed=1)
    without, with_pack = (
        sum(len(compress(replace(PARAMS, start=start), text)[0]) for text in texts) for start in (None, pack)
    )
    assert with_pack < 0.9 * without


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 9), max_size=60), min_size=1, max_size=4), st.integers(1, 12), st.data())
def test_any_text_gives_a_lawful_pack_and_the_same_again(texts, size, data):
    params = CodecParams(10, 16, data.draw(st.integers(2, 5)), disabled_ids=data.draw(st.sets(st.integers(0, 9))))
    window = data.draw(st.integers(2, 40))
    if not any(texts):
        with pytest.raises(DataError, match="empty"):
            learn_pack(params, texts, size, window=window)
        return
    found = learn_pack(params, texts, size, window=window)
    assert len(found.entries) <= size
    assert found.ids <= found.ids_without
    Codebook(replace(params, start=found.entries))  # lawful: lengths, no disabled id, none twice
    assert learn_pack(params, texts, size, window=window) == found


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 5), max_size=60), min_size=1, max_size=4), st.floats(1e-4, 0.2), st.data())
def test_no_entry_of_a_pack_costs_more_than_it_saves(texts, head_cost, data):
    params, window = CodecParams(6, 16, data.draw(st.integers(2, 4))), 20
    if not any(texts):
        return
    found = learn_pack(params, texts, 12, window=window, head_cost=head_cost)
    assert len(found.entries) <= len(learn_pack(params, texts, 12, window=window).entries)
    price = lambda entries: steps(params, texts, entries, window) * (1 + head_cost * len(entries))
    whole = price(found.entries)
    assert whole == found.cost(head_cost)
    assert all(price(found.entries[:i] + found.entries[i + 1 :]) > whole for i in range(len(found.entries)))


def steps(params, texts, entries, window):
    """Ids of texts that begin with these entries, window by window, by the codec alone."""
    params = replace(params, start=entries or None)
    return sum(len(compress(params, text[at : at + window])[0]) for text in texts for at in range(0, len(text), window))


@pytest.mark.parametrize("seed", range(3))
def test_a_pack_with_a_price_is_the_best_of_all_parts_of_the_one_without(seed):
    texts = sentences(6, seed)
    every = learn_pack(PARAMS, texts, 8, window=40).entries
    parts = [tuple(e for i, e in enumerate(every) if bits >> i & 1) for bits in range(1 << len(every))]
    ids = [steps(PARAMS, texts, part, 40) for part in parts]
    for head_cost in (0.001, 0.01, 0.03, 0.1, 0.3):
        found = learn_pack(PARAMS, texts, 8, window=40, head_cost=head_cost)
        least = min(n * (1 + head_cost * len(part)) for n, part in zip(ids, parts, strict=True))
        assert found.cost(head_cost) == pytest.approx(least, rel=1e-12), head_cost


def test_a_dearer_row_makes_a_smaller_pack():
    sizes = [len(learn_pack(PARAMS, sentences(20), 40, head_cost=cost).entries) for cost in (0, 0.01, 0.1, 5.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1] > sizes[3] == 0
    with pytest.raises(DataError, match="--head-cost"):
        learn_pack(PARAMS, sentences(2), 4, head_cost=-1.0)


def test_a_text_in_which_nothing_recurs_has_no_pack():
    found = learn_pack(PARAMS, [list(range(10, 40))], 5)
    assert found.entries == ()
    assert found.ids == found.ids_without == 30


@pytest.mark.parametrize("size", [0, -1, 65])
def test_a_pack_that_fits_no_codebook_is_refused(size):
    with pytest.raises(DataError, match="does not fit a codebook of 64"):
        learn_pack(PARAMS, sentences(2), size)


@pytest.mark.parametrize("texts", [[], [[]], [[], []]])
def test_an_empty_corpus_is_refused(texts):
    with pytest.raises(DataError, match="empty"):
        learn_pack(PARAMS, texts, 5)


def test_ids_that_are_none_are_refused():
    with pytest.raises(CodecError, match="id 500"):
        learn_pack(PARAMS, [[1, 2, 500]], 5)


# ---- files


def test_a_pack_reads_back_as_it_was_written(tmp_path):
    pack = Pack(ENTRIES, "ab" * 32, {"window": 256, "learned_from": ["a.txt"], "uses": [3, 2, 1]})
    save_pack(tmp_path / "p.npz", pack)
    back = load_pack(tmp_path / "p.npz")
    assert back == pack
    assert (back.fingerprint, back.about) == (pack.fingerprint, pack.about)
    assert read_entries(tmp_path / "p.npz") == ENTRIES  # wherever a starting codebook is taken


@pytest.mark.parametrize("suffix", ["json", "npy", "npz"])
def test_a_file_of_entries_alone_is_a_pack_of_an_unknown_tokenizer(suffix, tmp_path):
    write_entries(tmp_path / f"p.{suffix}", ENTRIES, merge_size=4)
    pack = load_pack(tmp_path / f"p.{suffix}")
    assert (pack.entries, pack.tokenizer, pack.about) == (ENTRIES, None, {})
    pack.check_tokenizer("cd" * 32, "p")


def test_a_pack_is_an_immutable_sequence_of_its_entries():
    pack, other = Pack(ENTRIES, "ab"), Pack(ENTRIES, "ab", {"x": 1}, name="p.npz")
    assert (tuple(pack), len(pack), pack[0], pack[1:]) == (ENTRIES, len(ENTRIES), ENTRIES[0], ENTRIES[1:])
    assert CodecParams(100, 8, 4, start=pack) == CodecParams(100, 8, 4, start=ENTRIES)
    assert pack == other
    assert pack not in (ENTRIES, Pack(ENTRIES))
    assert {pack: 1}[other] == 1
    assert copy.deepcopy(pack) is pack
    assert pickle.loads(pickle.dumps(pack)) == pack


def test_a_merged_pack_names_its_parts():
    a, b = Pack(((1, 2),), name="a.npz"), Pack(((3, 4),))
    merged = merge_packs([a, b])
    assert merged.by_name == {"a.npz": a, "pack 2": b}
    assert (a.by_name, b.by_name) == ({"a.npz": a}, {"pack 1": b})


def test_packs_that_differ_have_other_fingerprints():
    packs = [Pack(ENTRIES), Pack(ENTRIES[:2]), Pack(ENTRIES[::-1]), Pack(ENTRIES, "ab"), Pack(((5, 6, 7),)), Pack(())]
    assert len({pack.fingerprint for pack in packs}) == len(packs)


def test_a_pack_of_another_tokenizer_is_refused_by_name():
    Pack(ENTRIES, "ab" * 32).check_tokenizer("ab" * 32, "p.npz")
    with pytest.raises(DataError, match=r"p\.npz was learned with another.*\(abababababab, not cdcd"):
        Pack(ENTRIES, "ab" * 32).check_tokenizer("cd" * 32, "p.npz")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda about: {**about, "version": 2}, "version 2"),
        (lambda about: {**about, "tokenizer": 5}, "its tokenizer is 5"),
        (lambda about: {**about, "fingerprint": "00"}, "damaged"),
        (lambda about: {**about, "tokenizer": "ef" * 32}, "damaged"),
        (lambda about: [about], "not a JSON object"),
    ],
)
def test_a_damaged_pack_is_refused(change, told, tmp_path):
    path = tmp_path / "p.npz"
    save_pack(path, Pack(ENTRIES, "ab" * 32))
    with np.load(path) as arrays:
        kept = dict(arrays)
    about = change(json.loads(kept["about"].tobytes()))
    np.savez(path, **{**kept, "about": np.frombuffer(json.dumps(about).encode(), np.uint8)})
    with pytest.raises(DataError, match=told):
        load_pack(path)


@pytest.mark.parametrize("name", ["p.npz", "p.npy"])
@pytest.mark.parametrize("content", [b"", b"hello world", b"\0" * 100, b"[[1, 2]]", pickle.dumps([[1, 2]])])
def test_a_file_of_another_kind_is_refused_without_a_word_of_pickles(content, name, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"neither a \.npz nor a \.npy file") as caught:
        load_pack(tmp_path / name)
    assert "pickle" not in str(caught.value)


def test_a_pack_of_python_objects_is_refused(tmp_path):
    np.savez(tmp_path / "p.npz", entries=np.array([[1, [2]]], object), lengths=np.array([2]))
    with pytest.raises(DataError, match="it holds Python objects, not numbers"):
        load_pack(tmp_path / "p.npz")


@pytest.mark.parametrize("path", [None, 5, b"p.npz"])
def test_what_is_no_path_is_no_pack(path):
    with pytest.raises(DataError, match="a path must be text"):
        load_pack(path)


@pytest.mark.parametrize("cut", [0, 10, -1])
def test_a_pack_that_is_cut_off_is_refused(cut, tmp_path):
    path = tmp_path / "p.npz"
    save_pack(path, Pack(ENTRIES))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"p\.npz"):
        load_pack(path)


@pytest.mark.parametrize("name", ["p.json", "p", "p.npy"])
def test_a_pack_is_written_to_npz_files_only(name, tmp_path):
    with pytest.raises(DataError, match=r"a \.npz file"):
        save_pack(tmp_path / name, Pack(ENTRIES))
    assert not list(tmp_path.iterdir())


def test_merged_packs_take_turns_and_hold_nothing_twice():
    a, b = Pack(((1, 2), (3, 4), (5, 6)), "ab"), Pack(((3, 4), (7, 8)), "ab")
    merged = merge_packs([a, b])
    assert merged.entries == ((1, 2), (3, 4), (7, 8), (5, 6))
    assert merged.tokenizer == "ab"
    assert merged.about == {"merged": [a.fingerprint, b.fingerprint]}
    assert merge_packs([a, b], 2).entries == ((1, 2), (3, 4))
    assert merge_packs([a], 1) == Pack(a.entries[:1], "ab", {"merged": [a.fingerprint]})


def test_what_is_merged_with_a_pack_of_an_unknown_tokenizer_is_of_none():
    assert merge_packs([Pack(ENTRIES, "ab"), Pack(((1, 2),), None)]).tokenizer is None


def test_packs_of_two_tokenizers_are_not_merged():
    with pytest.raises(DataError, match="different tokenizers"):
        merge_packs([Pack(ENTRIES, "ab"), Pack(ENTRIES, "cd")])
