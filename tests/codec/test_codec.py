"""The codec's Python face: what it takes, what it gives back, what it refuses."""

import copy
import gc
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest

from mlx_zip import Codebook, CodecError, CodecParams, compress
from mlx_zip.codec.ids import ids_of, words_of

PARAMS = CodecParams(vocab_size=10, codebook_size=8, merge_size=3, disabled_ids=[8], pad_id=9)
IDS = [1, 2, 1, 2, 1, 2]


def started():
    book = Codebook(PARAMS)
    book.push(IDS)
    return book


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"vocab_size": (1 << 31) + 1}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"codebook_size": -1}, "codebook_size -1"),
        ({"codebook_size": (1 << 20) + 1}, "codebook_size"),
        ({"merge_size": 0}, "merge_size 0"),
        ({"merge_size": 17}, "merge_size 17"),
        ({"merge_size": 2.0}, "merge_size"),
        ({"pad_id": -1}, "pad_id -1"),
        ({"disabled_ids": [1 << 32]}, "disabled id"),
        ({"start": [(1,)]}, "start entry 0"),
        ({"start": [(1, 2), (1, 2, 3, 4)]}, "start entry 1"),
        ({"start": [(1, 8)]}, "start entry 0"),
        ({"start": [(1, 10)]}, "start entry 0"),
        ({"start": [(1, 2), (1, 2)]}, "start entry 1"),
        ({"start": [(1, 2), (2, 1)], "codebook_size": 1}, "2 start entries"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(change, culprit):
    fields = {"vocab_size": 10, "codebook_size": 8, "merge_size": 3, "disabled_ids": [8], "pad_id": 9}
    with pytest.raises(CodecError, match=culprit):
        CodecParams(**fields | change)


@pytest.mark.parametrize("sizes", [(1 << 31, 1 << 20, 16), (1, 0, 1)])
def test_the_largest_and_smallest_parameters_work(sizes):
    params = CodecParams(*sizes)
    ids = [params.vocab_size - 1] * 5
    emitted, _ = compress(params, ids)
    book = Codebook(params)
    book.push(emitted)
    assert book.expand(emitted).tolist() == ids


def test_equal_parameters_are_equal_however_they_were_written():
    same = CodecParams(10, 8, 3, (9, 8, 8), 9, start=[])
    assert same == PARAMS
    assert hash(same) == hash(PARAMS)
    assert same.fingerprint == PARAMS.fingerprint


@pytest.mark.parametrize(
    "other",
    [
        CodecParams(11, 8, 3, [8], 9),
        CodecParams(10, 7, 3, [8], 9),
        CodecParams(10, 8, 4, [8], 9),
        CodecParams(10, 8, 3, [7], 9),
        CodecParams(10, 8, 3, [8, 9]),
        CodecParams(10, 8, 3, [8], 9, start=[(1, 2)]),
    ],
)
def test_every_field_counts_in_the_fingerprint(other):
    assert other != PARAMS
    assert other.fingerprint != PARAMS.fingerprint


def test_parameters_survive_bytes_and_pickle():
    params = CodecParams(10, 8, 3, [8, 4000000000], 9, start=[(1, 2), (3, 3, 3)])
    assert CodecParams.from_bytes(params.to_bytes()) == params
    assert pickle.loads(pickle.dumps(params)) == params


def test_the_saved_form_is_the_documented_one():
    words = np.frombuffer(Codebook(CodecParams(10, 8, 3, [8], 9, start=[(1, 2)])).to_bytes(), "<u4")
    head = words[:15].tolist()
    assert words[:2].tobytes() == b"mlxzzcb\0"
    assert head[2:] == [1, 10, 8, 3, 1, 9, 2, 1, 8, 9, 2, 1, 2]
    assert words[15:17].tolist() == [0, 0]
    assert len(words) == 19


@pytest.mark.parametrize(
    "ids", [IDS, tuple(IDS), np.array(IDS), np.array(IDS, np.uint8), np.array([[x, 0] for x in IDS], np.uint32)[:, 0]]
)
def test_lists_tuples_and_integer_arrays_are_the_same_ids(ids):
    assert compress(PARAMS, ids)[0].tolist() == [1, 2, 10, 10]
    assert Codebook(PARAMS).push(ids).slots.tolist() == [0, 1, 2]


ONE = [1, np.uint32(1), np.int64(1), np.array(1), [1], (1,), [np.int64(1)], np.array([1]), np.array([1], np.uint8)]


@pytest.mark.parametrize("one", ONE)
def test_one_id_needs_no_list(one):
    book = Codebook(PARAMS)
    book.push(2)
    new = book.push(one)
    assert book.ids.tolist() == [2, 1]
    assert (list(new), new.at.tolist(), new.base_ids.tolist()) == ([(10, (2, 1))], [0], [[2, 1, 9]])
    assert book.expand(one).tolist() == [1]
    assert len(book.push(8)) == 0


def test_the_calls_for_one_id_keep_their_codebook_alive():
    push_one, expand_one = (lambda book: (book._push_one, book._expand_one))(started())
    gc.collect()
    assert push_one(3) is not None
    assert expand_one(10) == np.array([1, 2], np.uint32).tobytes()


class Number:
    """What counts as an integer in Python but is none that ids may be."""

    def __index__(self):
        return 1


NEITHER = [-1, 1 << 32, 1 << 70, True, 1.0, "1", None, Number(), np.int64(1), [1]]


@pytest.mark.parametrize("other", NEITHER)
def test_the_fast_calls_leave_all_but_plain_ids_to_the_general_ones(other):
    book = started()
    assert (book._push_one(other), book._expand_one(other), words_of([1, other])) == (None, None, None)
    assert book.ids.tolist() == IDS


def test_a_list_of_ids_becomes_their_words_and_words_become_ids():
    ids = [0, 1, (1 << 32) - 1]
    assert words_of(ids) == np.array(ids, np.uint32).tobytes()
    assert words_of([]) == b""
    assert ids_of(words_of(ids)) == tuple(ids)
    assert ids_of(b"") == ()
    assert words_of(tuple(ids)) is None


@pytest.mark.parametrize("empty", [[], (), range(0), np.array([], np.uint32)])
def test_no_ids_are_lawful(empty):
    ids, entries = compress(PARAMS, empty)
    assert (len(ids), len(entries), len(Codebook(PARAMS).push(empty))) == (0, 0, 0)


OUTSIDE = [-1, 1 << 32, 1 << 70, [-1], [1, -1], [1, 1 << 32], [1 << 70], [np.int64(-1)], (-1,), [[1, 2]] * 2, [[1]]]
OUTSIDE += [np.int64(-1), np.uint64(1 << 32), np.array([-1]), np.array([1 << 32]), np.array([[1]])]


@pytest.mark.parametrize("bad", OUTSIDE)
def test_ids_outside_the_range_of_ids_are_refused_and_change_nothing(bad):
    book = started()
    with pytest.raises((CodecError, TypeError)):
        book.push(bad)
    assert book.ids.tolist() == IDS


NO_INTEGER = [1.0, True, None, "1", np.float64(1), np.bool(True)]


@pytest.mark.parametrize("bad", [*NO_INTEGER, *([x] for x in NO_INTEGER), np.array([1.0]), np.array([True])])
def test_what_is_no_integer_is_a_type_error_and_changes_nothing(bad):
    book = started()
    with pytest.raises(TypeError):
        book.push(bad)
    assert book.ids.tolist() == IDS


def test_two_dimensions_are_refused():
    with pytest.raises(CodecError, match="shape"):
        compress(PARAMS, np.zeros((2, 2), np.uint32))


UNLAWFUL = [
    ((6, 8, 3), [1], 8, "is a hypertoken that is neither installed nor the next one to be installed"),
    ((6, 4, 3), [1], 30, "is neither a base id"),
    ((6, 1, 3), [1, 2, 3], 7, "is neither a base id"),  # the table is full
    ((6, 4, 3), [], 6, "is the next hypertoken, but there is no run before it"),
    ((6, 4, 3), [1, 5], 6, "is the next hypertoken, but there is no run before it"),  # 5 is disabled
    ((6, 4, 2), [1, 6], 7, "is the next hypertoken, but the run before it has 2 ids already"),
    ((4, 2, 2), [1, 1], 5, "is the next hypertoken, but the run it would stand for is already installed"),
]


@pytest.mark.parametrize(("sizes", "lawful", "bad", "reason"), UNLAWFUL)
def test_an_unlawful_id_in_a_sequence_is_refused_with_its_index_and_the_reason(sizes, lawful, bad, reason):
    book = Codebook(CodecParams(*sizes, pad_id=sizes[0] - 1))
    with pytest.raises(CodecError, match=f"^id {bad} at index {len(lawful)} {reason}"):
        book.push([*lawful, bad, 0])
    assert (book.mark(), len(book)) == (0, 0)


@pytest.mark.parametrize(("sizes", "lawful", "bad", "reason"), UNLAWFUL)
def test_an_unlawful_id_alone_is_refused_with_the_reason(sizes, lawful, bad, reason):
    book = Codebook(CodecParams(*sizes, pad_id=sizes[0] - 1))
    for x in lawful:
        book.push(x)
    with pytest.raises(CodecError, match=f"^id {bad} at index 0 {reason}"):
        book.push(bad)
    assert book.ids.tolist() == lawful


@pytest.mark.parametrize("ask", ["expand", "spans"])
def test_an_id_that_is_not_installed_cannot_be_expanded(ask):
    with pytest.raises(CodecError, match="id 15 at index 1"):
        getattr(started(), ask)([1, 15])


def test_one_id_expands_as_a_list_of_it_does():
    book = started()
    for one in [*range(PARAMS.vocab_size), *range(PARAMS.vocab_size, PARAMS.vocab_size + len(book))]:
        assert list(book.base_ids_of(one)) == book.expand(one).tolist() == book.expand((one,)).tolist()
    for bad in (PARAMS.vocab_size + len(book), -1, 2**32):
        with pytest.raises(CodecError, match=f"id {bad} at index 0"):
            book.expand(bad)
        with pytest.raises(CodecError, match=f"id {bad} at index 0"):
            book.base_ids_of(bad)


def test_an_entrys_words_are_its_base_ids():
    book = Codebook(PARAMS)
    book.push([1, 2, 1, 2, 3, 1, 2])
    assert len(book) > 1
    for slot, (_, entry) in enumerate(book.entries):
        assert np.frombuffer(book.entry_words(slot), np.uint32).tolist() == list(entry)
        assert book.entry(slot) == entry
    for slot in (len(book), -1, 1 << 32, 1 << 70):
        with pytest.raises(CodecError):
            book.entry_words(slot)


def test_an_entry_is_read_by_its_slot_also_where_its_id_is_disabled():
    book = Codebook(CodecParams(10, 8, 3, [10], start=[(1, 2)]))
    assert (book.entry(0), book.base_ids_of(10)) == ((1, 2), (10,))


def test_the_last_id_is_that_of_the_log():
    book = Codebook(PARAMS)
    with pytest.raises(IndexError):
        _ = book.last
    for one in (1, 2, 3):
        book.push(one)
        assert book.last == one
    book.rewind(1)
    assert book.last == 1


@pytest.mark.parametrize("ids", [[10], [1, 2, 12]])
def test_compressing_takes_base_ids_only(ids):
    with pytest.raises(CodecError, match="neither a base id"):
        compress(PARAMS, ids)
    with pytest.raises(CodecError, match="neither a base id"):
        started().compress(ids)


def test_a_hypertoken_whose_id_is_also_disabled_is_never_emitted():
    params = CodecParams(10, 8, 3, disabled_ids=[10])
    with pytest.raises(CodecError, match="also a disabled id"):
        compress(params, [1, 2, 1, 2])
    book = Codebook(params)
    book.push([1, 2, 3])
    assert book.compress([1, 2, 1, 2]).tolist() == [1, 2, 1, 2]


def test_new_entries_come_as_padded_rows_with_lengths_slots_and_causes():
    new = Codebook(PARAMS).push(IDS)
    assert new.base_ids.tolist() == [[1, 2, 9], [2, 1, 9], [1, 2, 1]]
    assert new.base_ids.dtype == np.uint32
    assert new.lengths.tolist() == [2, 2, 3]
    assert new.slots.tolist() == [0, 1, 2]
    assert new.at.tolist() == [1, 2, 4]


def test_rows_are_padded_with_zero_when_there_is_no_pad_id():
    assert Codebook(CodecParams(10, 8, 3)).push([1, 2]).base_ids.tolist() == [[1, 2, 0]]


def test_new_entries_do_not_change_when_the_codebook_does():
    book = Codebook(PARAMS)
    book.push(1)
    new, all_entries = book.push(2), book.entries
    book.rewind(0)
    book.push([3, 4])
    assert list(new) == list(all_entries) == [(10, (1, 2))]


def test_entries_are_a_sequence():
    entries = started().entries
    assert entries[0] == (10, (1, 2))
    assert entries[-1] == (12, (1, 2, 1))
    assert entries[1:] == list(entries)[1:]
    assert entries == compress(PARAMS, IDS)[1]
    assert entries != Codebook(PARAMS).entries
    with pytest.raises(IndexError):
        entries[3]


def test_start_entries_take_the_first_slots_and_count_in_the_codebook():
    params = CodecParams(10, 2, 3, start=[(1, 2, 3)])
    ids, entries = compress(params, [1, 2, 3, 4, 1, 2, 3, 4, 4])
    assert ids.tolist() == [10, 4, 10, 4, 4]
    assert list(entries) == [(10, (1, 2, 3)), (11, (4, 1))]


@pytest.mark.parametrize("mark", [-1, 7])
def test_rewinding_past_either_end_is_refused(mark):
    book = started()
    with pytest.raises(CodecError, match=f"rewind to {mark}"):
        book.rewind(mark)
    assert book.mark() == len(IDS)


def through_pickle(book):
    return pickle.loads(pickle.dumps(book))


@pytest.mark.parametrize("duplicate", [Codebook.copy, copy.copy, copy.deepcopy, through_pickle])
def test_every_way_of_copying_gives_an_independent_codebook(duplicate):
    book = started()
    other = duplicate(book)
    other.push(4)
    assert book.ids.tolist() == IDS
    assert other.ids.tolist() == [*IDS, 4]


def test_a_large_array_is_read_in_place_and_lengths_add_up():
    ids = np.random.default_rng(0).zipf(1.5, 50_000).astype(np.uint32) % 500
    params = CodecParams(500, 1 << 20, 16)
    emitted, entries = compress(params, ids)
    book = Codebook(params)
    book.push(emitted)
    assert book.entries == entries
    np.testing.assert_array_equal(book.expand(emitted), ids)
    assert book.base_length == len(ids)


def test_codebooks_of_different_threads_do_not_disturb_each_other():
    ids = np.random.default_rng(1).integers(0, 5, 20_000).astype(np.uint32)
    params, results = CodecParams(5, 1 << 16, 4), []

    def work():
        emitted, _ = compress(params, ids)
        book = Codebook(params)
        book.push(emitted)
        results.append(book.to_bytes())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1


def test_the_codec_needs_neither_mlx_nor_torch():
    code = "import sys, mlx_zip.codec; print({'mlx', 'mlx_lm', 'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_sources_without_the_extension_say_how_to_build_it():
    code = "import sys; sys.modules['mlx_zip.codec._native'] = None; import mlx_zip.codec"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "without its C extension: run `pip install -e .` there" in done.stderr.splitlines()[-1]
