"""`convert --pack`: a model that begins every request with the entries of a pack."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip.bench.engines.model_making import models_from_folders
from mlx_zip.cli import main
from mlx_zip.engine.mlx.generate import load
from mlx_zip.errors import ConversionError, DataError, MlxZipError, ModelError
from mlx_zip.packs.pack import Pack, load_pack, save_pack
from mlx_zip.packs.tuned import TunedRows
from mlx_zip.vocab.first_stage import tokenizer_fingerprint
from support.converting import config_of, convert
from support.places import GOLDEN_MODELS

CHECKPOINT = GOLDEN_MODELS / "llama_transformer_untied_pos"
ENTRIES = ((10, 11), (11, 12, 13))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(CHECKPOINT, tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture
def packed(converted: Path, tmp_path: Path) -> Any:
    """Converts the converted model again with packs -> the new folder."""
    mark = tokenizer_fingerprint(load(str(converted))[1])

    def command(*packs: tuple[tuple[int, ...], ...], tokenizer: str | None = mark, **options: Any) -> Path:
        files = [tmp_path / f"{n}.npz" for n in range(len(packs))]
        for file, entries in zip(files, packs, strict=True):
            save_pack(file, Pack(entries, tokenizer))
        return convert(converted, tmp_path / "out", pack=files, **options)

    return command


def test_the_model_begins_with_the_packs_merged(packed: Any, converted: Path) -> None:
    folder = packed(ENTRIES, ((10, 11), (20, 21)), quantize=True, q_group_size=32)
    assert config_of(folder)["zip2zip"]["start"] == [[10, 11], [11, 12, 13], [20, 21]]
    model = load(str(folder))[0]
    assert model.make_cache()[-1].books[0].entries[1] == (model.config.vocab_size + 1, (11, 12, 13))
    assert load(str(converted))[0].config.start is None


def test_an_entry_stands_on_a_line_of_its_own_in_config_json(packed: Any) -> None:
    lines = (packed(ENTRIES) / "config.json").read_text().splitlines()
    assert [line.strip() for line in lines if line.strip().startswith("[1")] == ["[10, 11],", "[11, 12, 13]"]


def test_another_pack_takes_the_place_of_the_first_and_none_leaves_it(packed: Any, tmp_path: Path) -> None:
    first = packed(ENTRIES)
    save_pack(tmp_path / "other.npz", Pack(((30, 31),)))
    other = convert(first, tmp_path / "other", pack=[tmp_path / "other.npz"])
    assert config_of(other)["zip2zip"]["start"] == [[30, 31]]
    assert config_of(convert(first, tmp_path / "again"))["zip2zip"]["start"] == [list(entry) for entry in ENTRIES]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (((1, 2, 3, 4, 5, 6, 7, 8, 9),), r"0\.npz does not fit the model: start entry 0 has 9 ids"),
        (((1, 999_999),), "disabled or not a base id"),
        (tuple((i, i + 1) for i in range(10, 210)), "do not fit in codebook_size"),
    ],
)
def test_a_pack_that_does_not_fit_is_refused(entries: Any, message: str, packed: Any, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=message):
        packed(entries)
    assert not (tmp_path / "out").exists()


def test_a_pack_of_another_tokenizer_is_refused(packed: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"0\.npz was learned with another tokenizer"):
        packed(ENTRIES, tokenizer="0" * 64)
    assert not (tmp_path / "out").exists()


def tuned_for(model: Any) -> Pack:
    """The entries with rows for a model, unlike any that an encoder would make."""
    rows = np.random.default_rng(0).normal(size=(2, len(ENTRIES), model.args.config["hidden_size"])).astype(np.float32)
    return Pack(ENTRIES, about={"note": "kept"}, rows=TunedRows(*rows, model.fingerprint))


@pytest.fixture(scope="module")
def tuned(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tuned pack in it, quantized before."""
    place = tmp_path_factory.mktemp("tuned")
    first = convert(converted, place / "quantized", quantize=True, q_group_size=32)
    save_pack(place / "tuned.npz", tuned_for(load(str(first))[0]))
    return convert(first, place / "model", pack=[place / "tuned.npz"])


def test_tuned_rows_go_along_and_are_used(tuned: Path) -> None:
    pack = load_pack(tuned / "pack.npz")
    assert (pack.entries, pack.about["note"]) == (ENTRIES, "kept")
    model = load(str(tuned))[0]
    assert model.row_source.pack.rows.fingerprint == pack.rows.fingerprint
    assert model.config.start == ENTRIES
    given = load(str(tuned.parent / "quantized"), pack=load_pack(tuned.parent / "tuned.npz"))[0]
    ids = mx.array([[10, 11, 12]])
    same, other = (one(ids, cache=one.make_cache()) for one in (model, given))
    assert mx.array_equal(same, other)
    assert not mx.array_equal(same, model(ids, cache=model.make_cache(pack=ENTRIES)))


def test_other_commands_do_without_the_rows(tuned: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"tuned rows in pack\.npz are left out"):
        other = convert(tuned, tmp_path / "other", dequantize=True)
    assert not (other / "pack.npz").exists()
    assert load(str(other))[0].config.start == ENTRIES
    same = convert(tuned, tmp_path / "same", canonical=True)  # the same weights
    assert load(str(same))[0].row_source.pack.rows.fingerprint == load(str(tuned))[0].row_source.pack.rows.fingerprint
    save_pack(tmp_path / "plain.npz", Pack(((30, 31),)))
    plain = convert(tuned, tmp_path / "plain", pack=[tmp_path / "plain.npz"])
    assert load(str(plain))[0].row_source.pack is None


def test_a_pack_that_is_not_the_configs_is_an_error(tuned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tuned, folder)
    save_pack(folder / "pack.npz", Pack(((30, 31),)))
    for use in (lambda: load(str(folder)), lambda: convert(folder, tmp_path / "out")):
        with pytest.raises(ModelError, match=r"pack\.npz is not the pack that config\.json says"):
            use()
    assert not (tmp_path / "out").exists()
    (folder / "pack.npz").write_bytes(b"no pack")
    with pytest.raises(DataError, match=r"pack\.npz"):
        load(str(folder))
    (folder / "pack.npz").unlink()
    assert load(str(folder))[0].config.start == ENTRIES


def changed(folder: Path, **changes: Any) -> None:
    """Writes another pack into a folder."""
    save_pack(folder / "pack.npz", replace(load_pack(folder / "pack.npz"), **changes))


@pytest.mark.parametrize("kind", ["link", "pipe", "tokenizer", "entries", "width"])
def test_a_folder_with_a_wrong_pack_is_neither_run_nor_converted(kind: str, tuned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tuned, folder)
    path, rows = folder / "pack.npz", load_pack(tuned / "pack.npz").rows
    narrow = replace(rows, input=rows.input[:, 1:], output=rows.output[:, 1:])
    told = {
        "link": lambda: (path.unlink(), path.symlink_to("nowhere"), "pack.npz cannot be read.*delete it"),
        "pipe": lambda: (path.unlink(), os.mkfifo(path), "pack.npz: is a folder or device.*delete it"),
        "tokenizer": lambda: (changed(folder, tokenizer="0" * 64), "pack.npz was learned with another tokenizer"),
        "entries": lambda: (changed(folder, entries=ENTRIES[::-1]), "pack.npz is not the pack that config.json says"),
        "width": lambda: (changed(folder, rows=narrow), "rows have 63 values, the model's have 64: tune"),
    }[kind]()[-1]
    for command in (lambda: load(str(folder)), lambda: convert(folder, tmp_path / "out")):
        with pytest.raises(MlxZipError, match=told):
            command()
        assert not (tmp_path / "out").exists()
    save_pack(tmp_path / "other.npz", Pack(((30, 31),)))  # in its place
    other = convert(folder, tmp_path / "other", pack=[tmp_path / "other.npz"])
    assert load(str(other))[0].config.start == ((30, 31),)


def test_a_folder_whose_weights_were_exchanged_names_its_pack(tuned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tuned, folder)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"),
        {name: -value if "norm" in name else value for name, value in weights.items()},
    )
    shutil.move(tmp_path / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"pack\.npz: .*tuned for another model.*or delete it"):
        load(str(folder))


def test_a_pack_that_says_it_is_for_the_weights_and_cannot_be_is_refused(tuned: Path, tmp_path: Path) -> None:
    pack = load_pack(tuned / "pack.npz")
    narrow = replace(pack.rows, input=pack.rows.input[:, 1:], output=pack.rows.output[:, 1:])
    save_pack(tmp_path / "narrow.npz", replace(pack, rows=narrow))
    with pytest.raises(ModelError, match="rows have 63 values"):
        convert(tuned, tmp_path / "out", pack=[tmp_path / "narrow.npz"])
    assert not (tmp_path / "out").exists()


def test_the_bench_runs_a_model_with_the_pack_in_its_folder(tuned: Path) -> None:
    ids = mx.array([[10, 11, 12]])
    made, loaded = models_from_folders(str(tuned), None).zipped(), load(str(tuned))[0]
    assert mx.array_equal(made(ids, cache=made.make_cache()), loaded(ids, cache=loaded.make_cache()))
    assert made.row_source.pack == loaded.row_source.pack


def test_adapting_says_that_the_rows_are_left_behind(tuned: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n")
    learn = ("vocab", "adapt", "learn", "--tokenizer", tuned, "--data", tmp_path / "text.txt", "--merges", 0)
    assert main([*map(str, learn), "--out", str(tmp_path / "adapted.json")]) == 0
    command = ("vocab", "adapt", "convert", tmp_path / "adapted.json", "--model", tuned, "--out", tmp_path / "small")
    assert main([*map(str, command)]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "warn" in line.lower()]
    assert [line.startswith("warning: ") for line in told] == [True] * len(told)
    assert any("tuned rows in pack.npz are left out" in line for line in told)
    assert not (tmp_path / "small" / "pack.npz").exists()
    load(str(tmp_path / "small"))


def test_rows_that_were_tuned_for_other_weights_are_refused(converted: Path, tuned: Path, tmp_path: Path) -> None:
    for options in ({}, {"quantize": True, "q_group_size": 32, "q_bits": 8}):
        with pytest.raises(ConversionError, match=r"tuned\.npz: its rows were tuned for other weights.*--drop-rows"):
            convert(converted, tmp_path / "out", pack=[tuned.parent / "tuned.npz"], **options)
        assert not (tmp_path / "out").exists()


def test_an_adapter_alone_takes_no_codebook(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="no --canonical, no --pack and no --policy"):
        convert(CHECKPOINT, tmp_path / "out", lora_only=True, pack=["x.npz"])


def test_a_pack_may_be_given_as_an_object(converted: Path, tmp_path: Path) -> None:
    assert config_of(convert(converted, tmp_path / "out", pack=Pack(ENTRIES[:1])))["zip2zip"]["start"] == [[10, 11]]
