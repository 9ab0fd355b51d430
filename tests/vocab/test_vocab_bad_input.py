"""Files of vocabularies that are damaged, made by hand or no files at all: one line, nothing written."""

import io
import json
import os
import struct
import zipfile

import numpy as np
import pytest

from mlx_zip import CodecParams
from mlx_zip.errors import DataError
from mlx_zip.packs.entries import read_entries
from mlx_zip.packs.learner import learn_pack
from mlx_zip.packs.pack import Pack, load_pack, merge_packs, save_pack
from mlx_zip.vocab.adaptbpe.adapted import _record_sha256, adapt_vocabulary, count_words, read_adapted_vocabulary
from mlx_zip.vocab.adaptbpe.base_vocabulary import read_base_vocabulary
from mlx_zip.vocab.first_stage import open_tokenizer_file
from mlx_zip.vocab.hbpe.patch_table import PatchTable
from mlx_zip.vocab.multitok import Dictionary
from support.command_line import runner, shown

ENTRIES = ((5, 6), (7, 8, 9))
TEXT = "to be or not to be\n"


@pytest.fixture
def vocab(capsys):
    """`mlx_zip vocab ...` -> (status, stdout, stderr)."""
    return runner(capsys, "vocab")


def npy(shape):
    """A .npy file that says it has this shape, and ends there."""
    header = f"{{'descr': '<u4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


def lengths(n=1):
    """A .npy file of n lengths."""
    data = io.BytesIO()
    np.save(data, np.full(n, 2))
    return data.getvalue()


def archive(path, **members):
    """An .npz file of these bytes; `_npy` at the end of a name is the suffix."""
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(name.replace("_npy", ".npy"), data)
    return path


def damaged(path, at, value):
    """A pack whose archive's directory has another number of two bytes at a place of each record."""
    save_pack(path, Pack(ENTRIES))
    data, record = bytearray(path.read_bytes()), b"PK\x01\x02"
    found = data.find(record)
    while found >= 0:
        data[found + at : found + at + 2] = struct.pack("<H", value)
        found = data.find(record, found + 1)
    path.write_bytes(data)
    return path


# ---- arrays


@pytest.mark.parametrize(("at", "value"), [(6, 99), (8, 1), (8, 0x20), (10, 99)])
def test_an_archive_that_is_encrypted_or_packed_in_no_known_way_is_one_line(tmp_path, at, value):
    path = damaged(tmp_path / "pack.npz", at, value)
    for load in (load_pack, PatchTable.load):
        with pytest.raises(DataError, match=r"pack\.npz cannot be read as a "):
            load(path)


@pytest.mark.parametrize(
    "entries", [b"no array", npy((1 << 40, 2)), npy((10**25, 2)), npy((-1, 2)), b"\x93NUMPY\x09\x00"]
)
def test_an_array_that_is_none_or_too_large_to_be_is_one_line(tmp_path, entries):
    path = archive(tmp_path / "pack.npz", entries_npy=entries, lengths_npy=lengths())
    with pytest.raises(DataError, match=r"pack\.npz cannot be read as a pack"):
        load_pack(path)


def test_a_member_that_is_no_array_is_named(tmp_path):
    with pytest.raises(DataError, match="'entries' in it is not an array"):
        load_pack(archive(tmp_path / "pack.npz", entries=b"hello", lengths=b"2"))


def test_one_array_is_no_archive_and_an_archive_no_array(tmp_path):
    (tmp_path / "pack.npz").write_bytes(lengths())
    with pytest.raises(DataError, match="it is not an archive of arrays"):
        load_pack(tmp_path / "pack.npz")
    np.save(tmp_path / "other.npy", np.array([[1, 2]]))
    with open(tmp_path / "other.lengths.npy", "wb") as file:
        np.savez(file, lengths=np.array([2]))
    told = r"other\.lengths\.npy cannot be read as the lengths of other\.npy: it is an archive"
    with pytest.raises(DataError, match=told):
        read_entries(tmp_path / "other.npy")


@pytest.mark.parametrize(("about", "reason"), [(b"[" * 100_000, ""), (b"9" * 5000, ".* 5000 digits$")], ids=len)
def test_what_a_pack_says_of_itself_may_be_nested_or_go_on_without_end(about, reason, tmp_path):
    arrays = {"entries": np.array([[1, 2]]), "lengths": np.array([2]), "about": np.frombuffer(about, np.uint8)}
    np.savez(tmp_path / "pack.npz", **arrays)
    with pytest.raises(DataError, match=rf"pack\.npz cannot be read as a pack: {reason}"):
        load_pack(tmp_path / "pack.npz")


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".json"])
def test_a_pipe_is_no_pack_and_is_not_waited_for(tmp_path, suffix):
    os.mkfifo(path := tmp_path / f"pipe{suffix}")
    with pytest.raises(DataError, match="is a folder or device, not a file"):
        read_entries(path)


@pytest.mark.parametrize("read", [PatchTable.load, Dictionary.load, read_adapted_vocabulary, open_tokenizer_file])
def test_a_pipe_is_no_vocabulary_and_is_not_waited_for(tmp_path, read):
    os.mkfifo(path := tmp_path / "pipe.npz")
    with pytest.raises(DataError, match="is a folder or device, not a file"):
        read(path)


def test_an_adapted_vocabulary_that_is_no_json_is_told_so_with_the_field_at_fault(tmp_path):
    (tmp_path / "adapted.json").write_text('{"rule": "final", "base": }')
    with pytest.raises(DataError, match=r'adapted\.json cannot be read: Expecting value.*, the value of "base"$'):
        read_adapted_vocabulary(tmp_path / "adapted.json")


# ---- what a pack says of itself


def said(path, tuned=False, **about):
    """A pack of two entries that says this of itself."""
    arrays = {"output_rows": np.ones((2, 4), np.float32)} if tuned else {}
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez(path, entries=np.array([[1, 2], [3, 4]]), lengths=np.array([2, 2]), about=text, **arrays)
    return path


@pytest.mark.parametrize(
    "about",
    [
        {"uses": 3},
        {"uses": {"a": 1}},
        {"uses": [None, [1] * 999]},
        {"base_ids": "x", "ids": 1, "ids_without": 1},
        {"base_ids": 3, "ids": 0, "ids_without": 0},
        {"base_ids": 3, "ids": None, "ids_without": 1},
        {"head_cost": [], "steps_cost": 0, "ids_without": 2},
        {"base_ids": 10**400, "ids": 2, "ids_without": 1},
    ],
)
def test_show_survives_what_a_pack_says(tmp_path, vocab, about):
    status, out, err = vocab("pack", "show", said(tmp_path / "pack.npz", **about))
    assert (status, err) == (0, "")
    assert shown(out)["entries"] == "2"


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ({"model": 3, "plain": None}, "the model of its rows is 3"),
        ({"model": "m", "plain": {"vocab_size": "x", "disabled_ids": [], "pad_id": 0}}, "must be integers from 0"),
        ({"model": "m", "plain": {"vocab_size": 9, "disabled_ids": ["a"], "pad_id": 0}}, "must be integers from 0"),
        ({"model": "m", "plain": {"vocab_size": -9, "disabled_ids": [], "pad_id": 0}}, "must be integers from 0"),
        ({"model": "m", "plain": {"vocab_size": 9, "disabled_ids": [], "pad_id": 0, "position_mode": 1}}, "be a name"),
    ],
)
def test_tuned_rows_are_of_a_model_and_of_sizes_that_can_be(tmp_path, rows, told):
    with pytest.raises(DataError, match=rf"pack\.npz: .*{told}"):
        load_pack(said(tmp_path / "pack.npz", tuned=True, rows=rows))


def test_what_a_pack_says_of_itself_is_not_told_in_place_of_what_it_is(tmp_path, vocab):
    path = said(tmp_path / "pack.npz", entries=999, rows_of="x", best=3, longest=7, window=256)
    status, out, err = vocab("pack", "show", path, "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert (told["entries"], told["rows_of"], told["longest"], told["window"]) == (2, None, 2, 256)
    assert vocab("pack", "show", path)[0] == 0


def test_what_a_pack_says_cannot_steer_the_terminal(tmp_path, vocab):
    rows = {"model": "\x1b[2J", "plain": None}
    status, out, _ = vocab("pack", "show", said(tmp_path / "pack.npz", tuned=True, rows=rows, window="\x1b[31m"))
    assert status == 0
    assert shown(out)["rows of"] == r"\x1b[2J"
    assert "\x1b" not in out


def test_a_version_is_a_number(tmp_path):
    with pytest.raises(DataError, match="a pack of version True"):
        load_pack(said(tmp_path / "pack.npz", version=True))


# ---- what is read is not written over


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["multitok", "train", "--data", "TEXT", "--out", "TEXT"], "--out"),
        (["multitok", "train", "--data", "TEXT", "--out", "o.mtok", "--encoded", "TEXT"], "--encoded"),
        (["multitok", "train", "--data", "TEXT", "--out", "o.mtok", "--encoded", "o.mtok"], "--encoded"),
        (["multitok", "encode", "o.mtok", "--data", "TEXT", "--out", "TEXT"], "--out"),
        (["multitok", "encode", "o.mtok", "--data", "TEXT", "--out", "o.mtok"], "--out"),
        (["adapt", "learn", "--tokenizer", "x.bpe", "--merges", "0", "--data", "TEXT", "--out", "TEXT"], "--out"),
        (["adapt", "learn", "--tokenizer", "x.bpe", "--merges", "0", "--data", "TEXT", "--out", "x.bpe"], "--out"),
        (
            [
                "adapt",
                "learn",
                "--tokenizer",
                "x.bpe",
                "--merges",
                "0",
                "--data",
                "TEXT",
                "--out",
                "a.json",
                "--tokenizer-json",
                "a.json",
            ],
            "--tokenizer-json",
        ),
    ],
)
def test_a_file_that_a_command_reads_is_not_written_over(tmp_path, monkeypatch, vocab, words, flag):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "x.bpe").write_text("t o\n")
    (tmp_path / "link.txt").symlink_to("text.txt")
    before = sorted(os.listdir())
    names = iter(["text.txt", "link.txt"])
    status, _, err = vocab(*(next(names) if word == "TEXT" else word for word in words))
    assert status == 2
    assert err.startswith(f"error: {flag} ")
    assert "reads or writes that file" in err
    assert sorted(os.listdir()) == before
    assert (tmp_path / "text.txt").read_text() == TEXT


# ---- adapted vocabularies


@pytest.fixture
def adapted_record(tmp_path):
    """An adapted vocabulary as its file has it, and what writes it back with a checksum that is right."""
    (tmp_path / "x.bpe").write_text("t o\no r\nto r\nn o\n")
    (tmp_path / "text.txt").write_text(TEXT)
    path = tmp_path / "a.json"
    base = read_base_vocabulary(tmp_path / "x.bpe")
    adapt_vocabulary(base, count_words(base.splitter, [TEXT]), 2).save(path)
    record = json.loads(path.read_text())

    def write():
        del record["sha256"]
        path.write_text(json.dumps(record | {"sha256": _record_sha256(record)}))
        return path

    return record, write


def test_a_rank_beyond_the_base_is_no_index(adapted_record, tmp_path, vocab):
    record, write = adapted_record
    for rank in (len(record["merges"]) + 9, (1 << 32) - 100):
        record["ranks"][0], record["sha256"] = rank, ""
        status, _, err = vocab("adapt", "show", write(), "--tokenizer", tmp_path / "x.bpe")
        assert status == 2
        assert "whose ids differ" in err


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ("front", {"pieces": "tokenizers", "pre_tokenizer": None}, "pieces 'tokenizers' needs a pre_tokenizer"),
        ("method", "zzz", "method 'zzz' is none of"),
        ("base", {"ids": -5}, "base.ids is -5"),
    ],
)
def test_what_an_adapted_vocabulary_cannot_be_is_told_when_it_is_read(adapted_record, part, value, told):
    record, write = adapted_record
    record[part] = record[part] | value if isinstance(value, dict) else value
    with pytest.raises(DataError, match=told):
        read_adapted_vocabulary(write())


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("top-k", ["--rule", "replay"]),
        ("top-k", ["--margin", "0"]),
        ("first-k", ["--max-swaps", "3"]),
        ("first-k", ["--tie", "low"]),
        ("first-k", ["--counting", "firing"]),
    ],
)
def test_a_flag_that_the_method_has_no_use_for_is_refused(tmp_path, vocab, method, flags):
    (tmp_path / "x.bpe").write_text("t o\n")
    (tmp_path / "text.txt").write_text(TEXT)
    status, _, err = vocab(
        "adapt",
        "learn",
        "--tokenizer",
        tmp_path / "x.bpe",
        "--data",
        tmp_path / "text.txt",
        "--merges",
        "1",
        "--out",
        tmp_path / "a.json",
        "--method",
        method,
        *flags,
    )
    assert status == 2
    assert f"{flags[0]} " in err
    assert not (tmp_path / "a.json").exists()


def test_the_name_of_an_adapted_vocabulary_cannot_steer_the_terminal(adapted_record, vocab):
    record, write = adapted_record
    record["base"]["name"] = "\x1b[2J"
    status, out, _ = vocab("adapt", "show", write())
    assert status == 0
    assert "\x1b" not in out


# ---- functions


@pytest.mark.parametrize(("packs", "size"), [(0, None), (1, 0), (1, -1)])
def test_a_merge_of_nothing_or_into_nothing_is_refused(packs, size):
    with pytest.raises(DataError, match="packs to merge and room for an entry"):
        merge_packs([Pack(ENTRIES)] * packs, size)


@pytest.mark.parametrize("window", [1, 0, -1])
def test_a_pack_is_not_learned_from_windows_too_short_for_an_entry(window):
    with pytest.raises(DataError, match=r"a window \(--window\) must have at least 2 base ids"):
        learn_pack(CodecParams(16, 4, 3), [[1, 2, 1, 2]], 2, window=window)
