"""How the stories recipe runs commands: their words, processes, signals; and settings that fit each other."""

import json
import signal
import subprocess
import sys
import time
from itertools import chain

import pytest

from recipes.stories import __main__ as main
from recipes.stories import packs
from recipes.stories.bundle import install_bundle, list_measurements, measure_models
from recipes.stories.commands import Recipe, as_words, run_in_own_process
from recipes.stories.settings import FULL, TINY


def test_flags_become_words():
    flags = {"batch_size": 4, "data": ["a", "b"], "fill_windows": True, "plot": False, "limit": None, "temp": 0.0}
    assert as_words(flags) == ["--batch-size", "4", "--data", "a", "b", "--fill-windows", "--temp", "0.0"]


CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(143)))
print('up', flush=True)
time.sleep(60)
"""
PARENT = "import sys; from pathlib import Path; from recipes.stories.commands import run_in_own_process as run; "


def test_a_command_runs_in_the_folder_and_gives_its_status(tmp_path):
    (tmp_path / "seven.py").write_text("import sys; sys.exit(7)")
    assert run_in_own_process("seven", [], tmp_path) == 7


FAKE = """
import json, os, pathlib, sys
place = {name: os.environ.get(name) for name in ("MLX_RANK", "MLX_HOSTFILE")}
hosts = json.loads(pathlib.Path(place["MLX_HOSTFILE"]).read_text()) if place["MLX_HOSTFILE"] else None
pathlib.Path(f"ran-{place['MLX_RANK']}").write_text(json.dumps([sys.argv[1:], hosts]))
sys.exit(5 if place["MLX_RANK"] == "1" else 0)
"""


def test_training_shares_its_batches_between_processes_and_nothing_else_does(tmp_path):
    (tmp_path / "mlx_zip.py").write_text(FAKE)  # stands before the installed package in the folder it runs in
    assert run_in_own_process("mlx_zip", ["train", "--iters", "1"], tmp_path, trainers=2) == 5
    ran = [json.loads((tmp_path / f"ran-{rank}").read_text()) for rank in (0, 1)]
    assert ran[0] == ran[1]
    assert ran[0][0] == ["train", "--iters", "1"]
    assert len({host for hosts in ran[0][1] for host in hosts}) == 2
    assert run_in_own_process("mlx_zip", ["prepare"], tmp_path, trainers=2) == 0
    assert json.loads((tmp_path / "ran-None").read_text()) == [["prepare"], None]


def test_the_engine_is_that_of_training_but_not_of_draft_heads(tmp_path):
    calls = []
    recipe = Recipe(TINY, tmp_path, tmp_path, call=lambda *call: calls.append(call[1]) or 0, engine="torch")
    for name, flags in (("train", {"iters": 1}), ("train", {"draft_head": True}), ("prepare", {})):
        recipe.run_mlx_zip(name, flags)
    assert calls == [["train", "--iters", "1", "--engine", "torch"], ["train", "--draft-head"], ["prepare"]]


def test_training_on_pytorch_in_several_processes_is_refused_at_once(tmp_path, capsys):
    words = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--processes", "2", "--engine", "torch"]
    assert main.main(words) == 2
    assert "leave out --processes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sigterm_is_passed_on_and_the_command_may_save_first(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    code = f"{PARENT} sys.exit(run('child', [], Path({str(tmp_path)!r})))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        time.sleep(0.2)  # the child is up before its parent listens for signals
        parent.send_signal(signal.SIGTERM)
        assert (parent.stdout.readline(), parent.wait()) == ("saved\n", 143)


@pytest.mark.parametrize("settings", [FULL, TINY])
def test_the_settings_fit_each_other(settings):
    assert settings.model["vocab_size"] == settings.vocab_size
    assert settings.short <= settings.long <= settings.model["max_position_embeddings"]
    runs = packs.list_runs(settings.packs).values()
    assert set(settings.bundled.values()) <= {"base", "zip", "control", *chain.from_iterable(runs)}
    figures = 3 + len(settings.packs.unseen) + 2 * len(settings.temperatures)
    assert len({name for name, _ in list_measurements(settings)}) == figures
    assert max(settings.packs.size, *settings.packs.sizes) <= settings.packs.codec["codebook_size"]
    _, conversations, asked = map(
        sum, zip(*(counts for _, counts in packs.list_text_parts(settings.packs)), strict=True)
    )
    assert conversations <= settings.conversations
    assert asked <= settings.asked


def test_what_is_measured_is_not_measured_again(tmp_path):
    figures = tmp_path / "figures"
    figures.mkdir()
    names = [name for name, _ in list_measurements(TINY)]
    for name in names:
        (figures / f"{name}.json").write_text(name)
    calls = []
    measure_models(Recipe(TINY, tmp_path, tmp_path, call=lambda *call: calls.append(call) or 0, say=lambda line: None))
    assert calls == []
    assert {file.stem: file.read_text() for file in figures.iterdir()} == {name: name for name in names}


def test_the_command_names_what_it_needs(capsys, tmp_path):
    status = main.main(["--data", str(tmp_path / "no"), "--out", str(tmp_path / "out")])
    assert (status, "lacks synth_t1.train.txt.gz" in capsys.readouterr().err) == (2, True)


def test_installing_the_bundle_keeps_the_models_of_other_recipes(tmp_path):
    out, place = tmp_path / "out", tmp_path / "place"
    for file in (out / "bundle/stories/new", place / "stories/old", place / "smollm2/adapter"):
        file.parent.mkdir(parents=True)
        file.touch()
    install_bundle(Recipe(TINY, tmp_path, out), place)
    assert sorted(str(file.relative_to(place)) for file in place.rglob("*") if file.is_file()) == [
        "smollm2/adapter",
        "stories/new",
    ]
