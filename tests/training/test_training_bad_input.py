"""What training is given and cannot use: one line that names the culprit, status 2, and nothing lost."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip import CodecParams
from mlx_zip.cli import main
from mlx_zip.errors import ConfigError, DataError, TrainingError
from mlx_zip.files import try_lock_folder
from mlx_zip.packs.entries import write_entries
from mlx_zip.training.checkpoints import list_checkpoints
from mlx_zip.training.prepare.shards import PreparedShards, make_codec_record, write_index, write_shard
from mlx_zip.training.run import train
from mlx_zip.training.run_folder import METRICS_FILE
from mlx_zip.training.trainer import Trainer
from support.tiny_training import TOKENS, make_sample, options, settings, text_ids, write_plain

FLAGS = ["--encoder", "transformer", "--encoder-layers", "1", "--encoder-heads", "2", "--lora-rank", "2"]
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, prepared data and a finished run of 4 steps whose checkpoints are of steps 2 and 4."""
    home = tmp_path_factory.mktemp("home")
    train(options(home / "run"), settings(iters=4), quiet=True)
    return home


@pytest.fixture
def copied(home: Path, tmp_path: Path) -> Path:
    """The same to be harmed, the run's model not yet saved."""
    shutil.copytree(home, tmp_path / "home")
    shutil.rmtree(tmp_path / "home" / "run" / "model")
    return tmp_path / "home"


def again(home: Path) -> Any:
    return train(options(home / "run"), settings(iters=4), quiet=True)


def refused(capsys: pytest.CaptureFixture[str], *argv: Any) -> str:
    """The one line that a command says when it ends with status 2."""
    assert main([str(word) for word in argv]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told


# ---- settings


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("data: 5", "data must be names of folders"),
        ("data: [null]", "data must be names of folders"),
        ("valid: true", "valid must be names of folders"),
        ("model: 5", "model must be text"),
        ("tokenizer: [a]", "tokenizer must be text"),
        ("out: 5", "out must be text"),
        ("plot: 'no'", "plot must be true or false"),
        ("encoder: [a]", "encoder ['a'] is not one of"),
        ("learning_rate: 1" + "0" * 400, "learning_rate must be a number of 0 or more, got inf"),
        ("learning_rate: .nan", "learning_rate must be a number of 0 or more, got nan"),
        ("seed: 1" + "0" * 30, "seed is too large"),
        ("iters: 1" + "0" * 30, "iters is too large"),
        ("learning_rate: 2020-13-45", "cannot be read"),
        ("a: " + "[" * 1000, "cannot be read"),
    ],
    ids=lambda text: text[:24],
)
def test_a_value_of_a_wrong_type_in_the_yaml_file_is_named(text, culprit, home, tmp_path, capsys):
    plain = {"model": home / "plain", "data": home / "data", "out": tmp_path / "out"}
    lines = [f"{name}: {value}" for name, value in plain.items() if not text.startswith(name)]
    (tmp_path / "c.yaml").write_text("\n".join([*lines, text]))
    assert culprit in refused(capsys, "train", "-c", tmp_path / "c.yaml")
    assert not (tmp_path / "out").exists()


def test_yaml_spells_on_and_off_as_true_and_false(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr("mlx_zip.training.run.train", lambda made, chosen: seen.setdefault("compile", chosen.compile))
    (tmp_path / "c.yaml").write_text("data: d\nout: o\ncompile: off\n")
    with pytest.raises(AttributeError):  # what is given back is no outcome
        main(["train", "-c", str(tmp_path / "c.yaml")])
    assert seen == {"compile": "off"}


def test_curves_that_cannot_be_drawn_are_told_before_the_run(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    argv = ["train", "--model", home / "plain", "--data", home / "data", "--out", tmp_path / "out", "--plot", *FLAGS]
    assert "--plot needs matplotlib" in refused(capsys, *argv)
    assert not (tmp_path / "out").exists()


# ---- data


def harmed(folder: Path, part: str, change: Callable[[Any], Any]) -> None:
    path = folder / f"shard-00000.{part}.npy"
    np.save(path, change(np.load(path)))


def rewritten(folder: Path, change: Callable[[bytes], bytes], part: str = "ids") -> None:
    path = folder / f"shard-00000.{part}.npy"
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("part", ["ids", "mask", "ends", "base", "bytes"])
def test_an_array_of_another_shape_is_named(part, copied):
    harmed(copied / "data", part, lambda array: array[:, None])
    with pytest.raises(DataError, match=rf"shard-00000\.{part}\.npy holds 2 dimensions.*delete the folder"):
        PreparedShards(copied / "data")


def test_a_damaged_header_and_an_archive_are_named(copied):
    rewritten(copied / "data", lambda data: data.replace(b", }", b",  "))
    with pytest.raises(DataError, match=r"ids\.npy cannot be read"):
        PreparedShards(copied / "data")
    with open(copied / "data" / "shard-00000.ids.npy", "wb") as file:
        np.savez(file, ids=np.zeros(3, np.uint32))
    with pytest.raises(DataError, match=r"ids\.npy holds an archive"):
        PreparedShards(copied / "data")


def test_ends_that_begin_below_zero_do_not_fit(copied):
    harmed(copied / "data", "ends", lambda ends: np.concatenate([[-5], ends[1:]]))
    with pytest.raises(DataError, match="do not fit together"):
        PreparedShards(copied / "data")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("context", "64"),
        ("context", 0),
        ("context", float("inf")),
        ("tokenizer", "x"),
        ("samples", "24"),
        ("samples", -24),
        ("samples", 24.0),
        ("samples", True),
    ],
)
def test_an_index_with_counts_that_cannot_be_is_named(key, value, copied):
    path = copied / "data" / "index.json"
    index = json.loads(path.read_text())
    (index["shards"][0] if key == "samples" else index)[key] = value
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match=rf"index\.json.*({key}|Infinity).*delete the folder"):
        PreparedShards(copied / "data")


def test_an_index_without_its_shards_is_named_in_plain_words(copied):
    path = copied / "data" / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shards": None}))
    with pytest.raises(DataError, match=r"index\.json: 'NoneType' object is not iterable; delete the folder"):
        PreparedShards(copied / "data")


def test_an_index_nested_too_deeply_and_one_of_odd_settings_are_named(copied):
    path = copied / "data" / "index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "settings": {"sources": [5]}}))
    with pytest.raises(DataError, match="index is damaged"):
        again(copied)
    path.write_text(DEEP)
    with pytest.raises(DataError, match=r"index\.json cannot be read"):
        again(copied)


@pytest.mark.parametrize(
    ("part", "change", "culprit"),
    [
        ("ids", lambda ids: ids * 0 + 5, "its ids stand for"),
        ("ids", lambda ids: ids[::-1], "neither installed nor"),
        ("base", lambda base: base + 1, "its ids stand for"),
    ],
)
def test_a_sample_that_is_not_what_was_prepared_is_named_with_its_folder(part, change, culprit, copied):
    harmed(copied / "data", part, change)
    with pytest.raises(DataError, match=rf"data: sample \d+ is damaged: .*{culprit}.*prepare the data again"):
        train(options(copied / "other"), settings(), quiet=True)
    assert list_checkpoints(copied / "other") == []


@pytest.mark.parametrize("row", [-1, 3])
def test_a_starting_entry_that_is_not_in_the_pool_is_named(row, tmp_path):
    params, pool = CodecParams(96, 48, 3, (0, 1, 2, 3), 2), [(5, 6), (7, 8), (9, 10, 11)]
    sample = make_sample(params, text_ids(30, 0), start=(pool[0], pool[1]))
    shards = [write_shard(tmp_path, "shard-00000", [sample], np.array([[0, row]], np.int32))]
    write_entries(tmp_path / "pool.npy", pool, 3, 2)
    index = {"codec": make_codec_record(params), "context": 64, "shards": shards, "pool": "pool.npy"}
    write_index(tmp_path, index)
    with pytest.raises(DataError, match="sample 0 starts with an entry that is not in the pool"):
        PreparedShards(tmp_path)[0]


# ---- models


def test_weights_of_another_shape_than_the_config_says_are_refused(tmp_path):
    write_plain(tmp_path / "plain", tensors={"model.norm.weight": np.ones(5, np.float32)})
    with pytest.raises(TrainingError, match=r"weights do not fit its config\.json"):
        train(options(tmp_path / "run"), settings(), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_zip2zip_config_without_its_section_is_refused(home, tmp_path):
    config = json.loads((home / "plain" / "config.json").read_text()) | {"model_type": "zip2zip"}
    (tmp_path / "new.json").write_text(json.dumps(config))
    run = options(home / "none", model=None, scratch=tmp_path / "new.json", tokenizer=home / "plain")
    run = replace(run, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="no zip2zip section"):
        train(run, settings(), quiet=True)


def test_a_tokenizer_of_a_kind_unknown_here_is_named(home, tmp_path, capsys):
    shutil.copytree(home / "plain", tmp_path / "plain")
    path = tmp_path / "plain" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    assert len(tokenizer["model"]["vocab"]) <= TOKENS
    tokenizer["model"]["type"] = "NoSuchModel"
    path.write_text(json.dumps(tokenizer))
    model, data = tmp_path / "plain", home / "data"
    told = refused(capsys, "train", "--model", model, "--data", data, "--out", tmp_path / "run", *FLAGS)
    assert f"the tokenizer in {model} cannot be loaded" in told
    assert f"cannot load {model}" in refused(capsys, "generate", "--model", model, "--prompt", "a")


# ---- checkpoints and the run's folder


def edit_state(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "4"},
        {"step": 4.5},
        {"step": -1},
        {"step": 2},
        {"step": True},
        {"step": None},
        {"step": 10**30},
        {"seen_ids": "x"},
        {"seen_bytes": -5},
        {"seconds": "x"},
        {"seconds": float("nan")},
    ],
    ids=str,
)
def test_a_checkpoint_whose_counts_cannot_be_is_named(changes, copied):
    edit_state(copied / "run" / "checkpoints" / "step-000004" / "state.json", **changes)
    with pytest.raises(TrainingError, match=r"step-000004.* cannot be read.*delete"):
        again(copied)
    assert not (copied / "run" / "model").exists()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("trained", lambda value: value * mx.nan),
        pytest.param("trained", lambda value: value.astype(mx.float16), marks=pytest.mark.slow),
        pytest.param("trained", lambda value: value.astype(mx.int32), marks=pytest.mark.slow),
        ("optimizer", lambda value: value.astype(mx.float32)),
    ],
)
def test_a_checkpoint_of_other_numbers_is_named_and_the_one_before_it_serves(file, change, copied):
    last = copied / "run" / "checkpoints" / "step-000004"
    path = str(last / f"{file}.safetensors")
    arrays: Any = {name: change(value) for name, value in mx.load(path).items()}  # type: ignore[union-attr]
    mx.eval(arrays)
    mx.save_safetensors(path, arrays)
    with pytest.raises(TrainingError, match=r"step-000004.*delete"):
        again(copied)
    shutil.rmtree(last)
    assert again(copied).progress.step == 4


def test_a_last_step_that_leaves_no_numbers_is_not_saved(home, tmp_path):
    run = replace(options(home / "none"), out=tmp_path / "run")
    with pytest.raises(TrainingError, match=r"step 1 left values that are not numbers.*lower the learning rate"):
        train(run, settings(iters=1, learning_rate=1e39), quiet=True)
    assert list_checkpoints(run.out) == []
    assert not (run.out / "model").exists()


@pytest.mark.parametrize("text", ['{"fixed": 5}', '{"fixed": {"settings": [1]}}', DEEP], ids=lambda text: text[:20])
def test_an_edited_record_of_the_run_is_another_run(text, copied):
    (copied / "run" / "train.json").write_text(text)
    with pytest.raises(TrainingError, match="choose another --out"):
        again(copied)


@pytest.mark.parametrize("content", [b"\xff\xfe", DEEP.encode()], ids=["no text", "deep"])
def test_a_damaged_log_does_not_stop_the_run(content, copied):
    (copied / "run" / METRICS_FILE).write_bytes(content)
    assert again(copied).progress.step == 4


def test_a_folder_in_which_another_process_trains_is_left_alone(copied, capsys):
    before = {path: path.stat().st_mtime_ns for path in (copied / "run").rglob("*")}
    with try_lock_folder(copied / "run") as alone:
        assert alone
        with pytest.raises(TrainingError, match="another process trains in"):
            again(copied)
    assert {path: path.stat().st_mtime_ns for path in (copied / "run").rglob("*")} == before
    assert again(copied).progress.step == 4


def test_a_run_that_failed_lets_the_next_one_in(copied, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", lambda self: (_ for _ in ()).throw(TrainingError("gone wrong")))
        with pytest.raises(TrainingError, match="gone wrong"):
            again(copied)
    assert again(copied).progress.step == 4


# ---- what a command says


def train_argv(home: Path, out: Path, *more: Any) -> list[Any]:
    return ["train", "--model", home / "plain", "--data", home / "data", "--out", out, *FLAGS, *more]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch-size", "25"], "24 usable samples do not fill a batch of 25: .*smaller --batch-size"),
        (["--max-seq-length", "0"], "max_seq_length must be a whole number of 1 or more, got 0"),
        (["--lora-keys", ","], "lora_keys ',' names no layer"),
        (["--report-to", "wandb"], "report_to of mlx-lm: OUT/metrics.jsonl has all figures"),
        (["--valid", "nowhere"], "nowhere: no such file or folder; --valid names a folder"),
        (["-c", "nowhere.yaml"], "--config nowhere.yaml cannot be read: No such file or directory$"),
    ],
    ids=lambda one: one[0] if isinstance(one, list) else "",
)
def test_a_flag_that_cannot_be_met_is_named_with_what_to_do(flags, words, home, tmp_path, capsys):
    assert re.search(words, refused(capsys, *train_argv(home, tmp_path / "out", *flags)))
    assert not (tmp_path / "out").exists()


def test_an_out_that_cannot_be_made_is_named_once(home, capsys):
    file = home / "plain" / "config.json"
    assert refused(capsys, *train_argv(home, file / "x")) == f"error: cannot write {file / 'x'}: Not a directory\n"


def test_the_parts_of_the_codec_that_differ_are_named(home, tmp_path, capsys):
    argv = ["train", "--model", home / "run" / "model", "--data", tmp_path / "data", "--out", tmp_path / "out"]
    index = json.loads((shutil.copytree(home / "data", tmp_path / "data") / "index.json").read_text())
    index["codec"] |= {"disabled_ids": [0, 1], "vocab_size": 99}
    (tmp_path / "data" / "index.json").write_text(json.dumps(index))
    told = refused(capsys, *argv)
    assert "another codec than the model's (vocab_size 99, the model's 96; other disabled_ids)" in told
    assert "mlx_zip prepare --model" in told


def test_paths_take_a_home_folder(home, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(home / "data", tmp_path / "data")
    argv = ["train", "--model", home / "plain", "--data", "~/data", "--out", "~/out", *FLAGS, "--iters", "1"]
    assert main([str(word) for word in argv]) == 0
    assert (tmp_path / "out" / "model" / "config.json").exists()
