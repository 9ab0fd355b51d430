"""Starting codebooks at rest: pack files, and the section of a converted model's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_zip.config import ZipConfig
from mlx_zip.converters import convert
from mlx_zip.errors import ConfigError, DataError
from mlx_zip.models.model_folder import ModelArgs
from mlx_zip.packs.entries import read_entries, write_entries
from support.checkpoints import write_checkpoint
from support.tiny import tiny_config

ENTRIES = ((5, 6), (7, 8, 9, 10), (6, 5, 5))
SUFFIXES = ["json", "npz", "npy"]


# ---- packs


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("entries", [ENTRIES, ()], ids=["three", "none"])
def test_a_pack_reads_back_as_it_was_written(suffix: str, entries: Any, tmp_path: Path) -> None:
    write_entries(tmp_path / f"pack.{suffix}", entries, merge_size=4, pad_id=2)
    assert read_entries(tmp_path / f"pack.{suffix}") == entries


def test_rows_of_a_pack_are_padded_with_the_pad_id(tmp_path: Path) -> None:
    write_entries(tmp_path / "pack.npy", ENTRIES, merge_size=4, pad_id=2)
    rows, lengths = np.load(tmp_path / "pack.npy"), np.load(tmp_path / "pack.lengths.npy")
    assert (rows.dtype, lengths.dtype) == (np.uint32, np.int64)
    assert rows.tolist() == [[5, 6, 2, 2], [7, 8, 9, 10], [6, 5, 5, 2]]
    assert lengths.tolist() == [2, 4, 3]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("entries", "culprit"),
    [
        ([(5, 6), (7,)], "entry 1 has 1 ids"),
        ([(5, 6), (7, 8, 9, 10, 11)], "entry 1 has 5 ids, not 2..4"),
        ([(5, 6), (7, -8)], "entry 1 holds -8"),
        ([(5, 6), (7, True)], "entry 1 holds True"),
        ([(5, 6), (7, 2**32)], "entry 1 holds 4294967296"),
        ([(5, 6), (7, 8), (5, 6)], r"entry 2 \(5, 6\) repeats entry 0"),
    ],
)
def test_an_entry_that_cannot_be_is_named_and_nothing_is_written(
    suffix: str, entries: Any, culprit: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=culprit):
        write_entries(tmp_path / f"pack.{suffix}", entries, merge_size=4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("[[5, 6], 7]", "entry 1 is 7, not a list"),
        ('{"entries": []}', "must hold a list of entries, got dict"),
        ("[[5, 6], [7, 7.0]]", "entry 1 holds 7.0"),
        ("[[5, 6], [7]]", "entry 1 has 1 ids"),
        ("[[5, 6], [5, 6]]", "repeats entry 0"),
        ("[[5, 6]", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_json_that_is_no_pack_is_one_error_naming_file_and_entry(text: str, culprit: str, tmp_path: Path) -> None:
    (tmp_path / "pack.json").write_text(text)
    with pytest.raises(DataError, match=rf"pack\.json.*{culprit}"):
        read_entries(tmp_path / "pack.json")


@pytest.mark.parametrize(
    ("arrays", "culprit"),
    [
        ({"entries": np.array([[5, 6]], np.uint32)}, "no array lengths"),
        ({"entries": np.array([[5.0, 6.0]]), "lengths": np.array([2])}, "integers, not float64"),
        ({"entries": np.array([5, 6], np.uint32), "lengths": np.array([2])}, r"\[P, M\]"),
        ({"entries": np.array([[5, 6]], np.uint32), "lengths": np.array([2, 2])}, "lengths"),
        ({"entries": np.array([[5, 6], [7, 8]], np.uint32), "lengths": np.array([2, 3])}, "entry 1 has length 3"),
        ({"entries": np.array([[5, 6]], np.uint32), "lengths": np.array([1])}, "entry 0 has length 1"),
        ({"entries": np.array([[5, 6]], object), "lengths": np.array([2])}, "cannot be read"),
    ],
)
def test_arrays_that_are_no_pack_are_named(arrays: dict[str, Any], culprit: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "pack.npz", **arrays)
    with pytest.raises(DataError, match=rf"pack\.npz.*{culprit}"):
        read_entries(tmp_path / "pack.npz")


def test_a_file_that_is_missing_torn_or_of_another_kind_is_named(tmp_path: Path) -> None:
    write_entries(tmp_path / "alone.npy", ENTRIES, merge_size=4)
    (tmp_path / "alone.lengths.npy").unlink()
    write_entries(tmp_path / "torn.npz", ENTRIES, merge_size=4)
    (tmp_path / "torn.npz").write_bytes((tmp_path / "torn.npz").read_bytes()[:100])
    np.savez_compressed(tmp_path / "spoilt.npz", entries=np.zeros((90, 4), np.uint32), lengths=np.ones(90, np.int64))
    content = bytearray((tmp_path / "spoilt.npz").read_bytes())
    at = content.index(b"entries.npy") + 40
    content[at : at + 20] = b"\xff" * 20
    (tmp_path / "spoilt.npz").write_bytes(content)
    for name in ("none.json", "alone.npy", "torn.npz", "spoilt.npz", "pack.txt"):
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            read_entries(tmp_path / name)


# ---- a model's own


def section(**changes: Any) -> dict[str, Any]:
    made = {**tiny_config()["zip2zip"], **changes}
    del made["base_model_type"]
    return made


def test_a_configs_pack_is_read_back_as_it_was_written() -> None:
    config = ZipConfig.from_dict(section(start=[list(entry) for entry in ENTRIES]))
    assert config.codec_params.start == config.start == ENTRIES
    assert ZipConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_config_without_a_pack_is_written_as_before_packs_existed() -> None:
    assert "start" not in ZipConfig.from_dict(section()).to_dict()
    assert ZipConfig.from_dict(section(start=[])) == ZipConfig.from_dict(section())


@pytest.mark.parametrize(
    ("start", "culprit"),
    [
        ("5 6", "start must be a list"),
        ([[5, 6], 7], "start must be a list"),
        ([[5, 6], [7, "8"]], "start entry id must be an integer, not '8'"),
        ([[5, 6], [7, 2]], r"start entry 1 \(7, 2\)"),
        ([[5, 6], [7, 40]], r"start entry 1 \(7, 40\)"),
        ([[5, 6], [5, 6, 7, 8, 9]], "start entry 1 has 5 ids"),
    ],
)
def test_a_pack_that_does_not_fit_its_model_is_refused(start: Any, culprit: str) -> None:
    with pytest.raises(ConfigError, match=culprit):
        ZipConfig.from_dict(section(start=start))


def test_a_folders_pack_is_also_loaded_by_mlx_lm_and_kept_when_converted_again(tmp_path: Path) -> None:
    import mlx_lm

    from mlx_zip.models.loading import load

    write_checkpoint(tmp_path / "src", merge_size=4)
    first = convert(str(tmp_path / "src"), tmp_path / "first", progress=False)
    config = json.loads((first / "config.json").read_text())
    config["zip2zip"]["start"] = [list(entry) for entry in ENTRIES]
    (first / "config.json").write_text(json.dumps(config))
    second = convert(str(first), tmp_path / "second", dtype="float16", progress=False)
    for folder in (first, second):
        assert load(folder)[0].config.start == ENTRIES
        assert mlx_lm.load(str(folder))[0].make_cache()[-1].params.start == ENTRIES


def test_the_command_compress_keeps_the_models_start_entries() -> None:
    from types import SimpleNamespace

    from mlx_zip.cli.compression import choose_codec_params
    from mlx_zip.text.vocabularies import Vocabulary

    own = ModelArgs({"zip2zip": section(start=ENTRIES)}).zip_config.codec_params
    vocabulary = Vocabulary("ids", 40, "none", list, str, str, frozenset({0}))
    for disabled in (None, ["specials"]):
        flags = SimpleNamespace(merge_size=None, codebook_size=None, disabled=disabled, policy=None)
        assert choose_codec_params(vocabulary, own, flags).start == ENTRIES
