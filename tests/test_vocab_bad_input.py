"""Files of vocabularies that are damaged, made by hand or no files at all: one line, nothing written."""

import io
import json
import os
import struct
import zipfile

import numpy as np
import pytest
from command_line import runner

from mlx_zip.codec.pack import read_pack
from mlx_zip.errors import DataError
from mlx_zip.vocab.adaptbpe.adapted import _digest, adapted, read_adapted, words_of
from mlx_zip.vocab.adaptbpe.base import read_base
from mlx_zip.vocab.first_stage import open_tokenizer
from mlx_zip.vocab.hbpe_table import PatchTable
from mlx_zip.vocab.multitok import Dictionary
from mlx_zip.vocab.packs import Pack, load_pack, save_pack

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
    with pytest.raises(DataError, match=r"pack\.npz cannot be read as a starting codebook"):
        load_pack(path)


def test_a_member_that_is_no_array_is_named(tmp_path):
    with pytest.raises(DataError, match="'entries' in it is no array"):
        load_pack(archive(tmp_path / "pack.npz", entries=b"hello", lengths=b"2"))


def test_one_array_is_no_archive_and_an_archive_no_array(tmp_path):
    (tmp_path / "pack.npz").write_bytes(lengths())
    with pytest.raises(DataError, match="it is no archive of arrays"):
        load_pack(tmp_path / "pack.npz")
    np.save(tmp_path / "other.npy", np.array([[1, 2]]))
    with open(tmp_path / "other.lengths.npy", "wb") as file:
        np.savez(file, lengths=np.array([2]))
    with pytest.raises(DataError, match=r"other\.lengths\.npy cannot be read as a starting codebook: it is an archive"):
        read_pack(tmp_path / "other.npy")


def test_what_a_pack_says_of_itself_may_be_nested_without_end(tmp_path):
    about = np.frombuffer(b"[" * 100_000, np.uint8)
    np.savez(tmp_path / "pack.npz", entries=np.array([[1, 2]]), lengths=np.array([2]), about=about)
    with pytest.raises(DataError, match=r"pack\.npz cannot be read as a pack"):
        load_pack(tmp_path / "pack.npz")


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".json"])
def test_a_pipe_is_no_pack_and_is_not_waited_for(tmp_path, suffix):
    os.mkfifo(path := tmp_path / f"pipe{suffix}")
    with pytest.raises(DataError, match="is a folder or device, not a file"):
        read_pack(path)


@pytest.mark.parametrize("read", [PatchTable.load, Dictionary.load, read_adapted, open_tokenizer])
def test_a_pipe_is_no_vocabulary_and_is_not_waited_for(tmp_path, read):
    os.mkfifo(path := tmp_path / "pipe.npz")
    with pytest.raises(DataError, match="is a folder or device, not a file"):
        read(path)


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
        {"uses": 3}, {"uses": {"a": 1}}, {"uses": [None, [1] * 999]}, {"base_ids": "x", "ids": 1, "ids_without": 1},
        {"base_ids": 3, "ids": 0, "ids_without": 0}, {"base_ids": 3, "ids": None, "ids_without": 1},
        {"head_cost": [], "steps_cost": 0, "ids_without": 2},
    ],
)  # fmt: skip
def test_show_survives_what_a_pack_says(tmp_path, vocab, about):
    status, out, err = vocab("pack", "show", said(tmp_path / "pack.npz", **about))
    assert (status, err) == (0, "")
    assert "2 entries of 2 to 2 base ids" in out


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


def test_a_version_is_a_number(tmp_path):
    with pytest.raises(DataError, match="a pack of version True"):
        load_pack(said(tmp_path / "pack.npz", version=True))
