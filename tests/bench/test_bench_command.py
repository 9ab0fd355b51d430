"""`mlx_zip bench`: help without a name, errors on one line, and what a record says of the machine."""

import runpy
import subprocess
import sys

import pytest

from mlx_zip.bench import __main__ as command
from mlx_zip.bench import recording
from mlx_zip.bench.__main__ import BENCHES, main


def test_without_a_name_the_help_lists_every_bench(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in BENCHES)


def test_an_error_is_one_line(capsys):
    assert main(["codec", "--trials", "0"]) == 2
    assert capsys.readouterr().err == "error: --trials must be at least 1, got 0\n"


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["tokens", "--text", "web=x.txt"], "--tokenizers"),
        (["tokens", "--tokenizers", "x.model"], "--text"),
        (["ablations"], "--model, --data, --valid, --out"),
        (["adapt_model"], "--train, --test"),
        (["classify", "--train", "x.tsv"], "--test"),
        (["codec_latency"], "--text, --tokenizer"),
        (["multitok"], "--text"),
        (["pack_quality"], "--model, --base, --data"),
    ],
)
def test_flags_that_a_bench_needs_are_named_in_one_line(words, needed, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert (ended.value.code, capsys.readouterr().err) == (
        2,
        f"error: mlx_zip bench {words[0]} needs {needed} (mlx_zip bench {words[0]} --help shows how)\n",
    )


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_ctrl_c_in_a_module_that_python_runs_is_no_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "main", interrupted)
    monkeypatch.setattr(sys, "argv", ["mlx_zip.bench", "codec"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("mlx_zip.bench", run_name="__main__")
    assert (ended.value.code, capsys.readouterr().err) == (130, "")


def test_load_is_taken_once_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(recording, "IDLE_S", 0.01)
    recording.load_before_bench.cache_clear()
    first = recording.load_before_bench()
    assert recording.environment_fields()["load_average"] == first["load_average"]
    assert recording.load_before_bench() is first


def test_the_idle_share_is_null_where_the_system_does_not_say(monkeypatch):
    monkeypatch.setattr(recording, "read_processor_ticks", lambda: None)
    recording.load_before_bench.cache_clear()
    assert recording.load_before_bench()["idle_share"] is None
    recording.load_before_bench.cache_clear()


def test_preloaded_libraries_are_named_without_their_folders(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libopenblas.so.0:/opt/other.so")
    assert recording.preloaded_libraries() == ["libopenblas.so.0", "other.so"]


@pytest.mark.slow
def test_every_bench_declares_its_flags_where_torch_is_missing_and_names_it_in_one_line(tmp_path):
    script = """
import sys
from importlib import import_module
sys.modules["torch"] = None
from mlx_zip.bench.__main__ import BENCHES, main
for module, _ in BENCHES.values():
    assert import_module(module).add_arguments
sys.exit(main(["checkpoint", "--out", sys.argv[1]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "made"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: bench checkpoint needs torch, which is not installed: ")
