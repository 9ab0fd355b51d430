"""bench nvidia with bad input and faults: one clear line, exit status not 0, and nothing that reads as a result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from mlx_zip.bench import cuda_engines, nvidia
from mlx_zip.bench.records import read_lines
from mlx_zip.bench.shape_table import SHAPES
from mlx_zip.errors import MlxZipError
from support import tiny_bench
from support.places import REPO


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    tiny_bench.small(monkeypatch)
    monkeypatch.setattr(cuda_engines, "CPU_COPY_BYTES", 1 << 12)
    monkeypatch.setattr(nvidia, "STEPS", nvidia.STEPS[:2])
    monkeypatch.setattr(nvidia, "WHOLE", nvidia.WHOLE[:2])
    yield
    for name in [name for name in SHAPES if name.endswith("-narrow")]:
        del SHAPES[name]


def refused(capsys, *flags):
    """Returns the line that a refused run prints."""
    try:
        raise AssertionError(f"it ended with {tiny_bench.run('nvidia', *flags)}")
    except MlxZipError as error:
        return str(error)
    except SystemExit:
        return capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--parts", "speed"], "invalid choice: 'speed'"),
        (["--parts", "generate", "--engines", "fast"], "engine 'fast' is not one of"),
        (["--engines", "zip2zip"], "--published"),
        (["--published", "nowhere"], "--published"),
        (["--code", "nowhere.txt"], "--code nowhere.txt: there is no such file"),
        (["--parts", "steps", "--tokenizer", "no/where"], "no/where"),
    ],
)
def test_flags_that_cannot_be_used_are_refused(tmp_path, capsys, monkeypatch, flags, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = refused(capsys, "--rehearse", "--out", tmp_path / "out", *flags)
    assert said in line
    assert not list((tmp_path / "out").glob("*.jsonl"))


@pytest.mark.parametrize("text", ["", "word " * 3])
def test_a_text_that_is_too_short_is_refused_with_both_lengths(tmp_path, capsys, text):
    (tmp_path / "code.txt").write_text(text)
    line = refused(capsys, "--rehearse", "--out", tmp_path, "--parts", "steps", "--code", tmp_path / "code.txt")
    assert "base ids, 20 are needed" in line


def test_a_folder_that_is_none_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert "cannot be written to" in refused(capsys, "--rehearse", "--out", folder)


def test_on_a_card_the_interpreter_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mlx_zip.cuda.memory.find_device", lambda name: name)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET is set" in refused(capsys, "--out", tmp_path)


def test_records_of_an_earlier_run_are_replaced_only_if_their_part_is_named(tmp_path, capsys):
    (tmp_path / "steps.jsonl").write_text('{"bench": "nvidia-steps"}\n')
    assert "holds records of an earlier run (steps)" in refused(capsys, "--rehearse", "--out", tmp_path)
    assert (tmp_path / "steps.jsonl").exists()
    (tmp_path / "code.txt").write_text("short")
    flags = ["--rehearse", "--out", tmp_path, "--parts", "steps", "--code", tmp_path / "code.txt"]
    refused(capsys, *flags)
    assert not (tmp_path / "steps.jsonl").exists()  # it would read as this run's result


def test_records_of_different_runs_are_not_summed_up(tmp_path, capsys):
    one = {"bench": "nvidia-steps", "commit": "abc", "versions": {"torch": "2.13.0"}}
    (tmp_path / "steps.jsonl").write_text(json.dumps(one) + "\n")
    (tmp_path / "kernels.jsonl").write_text(json.dumps({**one, "versions": {"torch": "2.12.0"}}) + "\n")
    line = refused(capsys, "--rehearse", "--out", tmp_path, "--parts", "summary")
    assert "kernels.jsonl and steps.jsonl are not of one run: torch is 2.12.0 and 2.13.0" in line


def test_an_engine_that_fails_is_recorded_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    phi = [name for name in nvidia.WHOLE if SHAPES[name]["model_type"] == "phi3"]
    monkeypatch.setattr(cuda_engines, "_of_shape", _refusing(cuda_engines._of_shape, phi))
    assert tiny_bench.run("nvidia", "--rehearse", "--out", tmp_path, "--parts", "generate", "steps") == 1
    for part, kind in (("generate", "generate"), ("steps", "nvidia-steps")):
        lines = read_lines(tmp_path / f"{part}.jsonl")
        assert {one["bench"] for one in lines} == {kind, "nvidia-error"}
        assert {one["model"]["name"] for one in lines if one["bench"] == kind} == {"llama-3.2-1b-narrow"}
        assert [one["error"] for one in lines if "error" in one] == ["RuntimeError: CUDA error: out of memory"]
    assert tiny_bench.run("nvidia", "--rehearse", "--out", tmp_path, "--parts", "summary") == 0
    assert "failed  torch-base torch-zip at phi-3.5-mini-narrow: RuntimeError" in capsys.readouterr().out


def _refusing(make, shapes):
    def of_shape(name, *args):
        if name.removesuffix("-narrow") in shapes:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return make(name, *args)

    return of_shape


# ---- the script


def script(tmp_path, *flags, **variables):
    command = ["bash", str(REPO / "bench" / "h100.sh"), *map(str, flags)]
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path / "an out folder"), **variables}
    return subprocess.Popen(command, text=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def said_by(process):
    out, err = process.communicate(timeout=400)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [
        (["--cpu-rehearsal"], {"PARTS": "speed"}, "PARTS: speed is not one of float64"),
        (["a", "b"], {}, "two folders are named: a and b"),
        (["--code"], {}, "--code needs a value"),
        (["--cpu-rehearsal"], {"WHEELS": "/nowhere"}, "there is no wheel in /nowhere"),
        (["--cpu-rehearsal", "/dev/null"], {}, "/dev/null is no folder that can be written to"),
        (["--cpu-rehearsal"], {"PYTHON": "/bin/false"}, "cannot import what is needed"),
    ],
)
def test_the_script_refuses_in_one_line(tmp_path, flags, variables, said):
    status, _, err = said_by(script(tmp_path, *flags, **variables))
    assert status == 2
    assert said in err
    assert len(err.splitlines()) == 1


def test_the_script_packs_its_records_into_one_file_and_does_not_mix_runs(tmp_path):
    folder = tmp_path / "an out folder"
    status, out, err = said_by(script(tmp_path, "--cpu-rehearsal", "--pack", PARTS="summary"))
    assert status == 0, out + err
    assert [one.name for one in folder.iterdir()] == ["nvidia-records.tar.gz"]
    status, out, err = said_by(script(tmp_path, "--cpu-rehearsal", "--pack"))
    assert (status, "holds records of an earlier run" in err) == (2, True)


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    (tmp_path / "an out folder").mkdir()
    with subprocess.Popen(["flock", str(tmp_path / "an out folder"), "sleep", "60"]) as holder:
        try:
            for _ in range(100):
                status, _, err = said_by(script(tmp_path, "--cpu-rehearsal", PARTS="summary", PYTHON="/bin/false"))
                if "another run writes to" in err:
                    break
                time.sleep(0.1)
            assert (status, "another run writes to" in err) == (2, True)
        finally:
            subprocess.run(["pkill", "-P", str(holder.pid)], check=False)
            holder.kill()


def test_an_interrupted_run_ends_at_once_and_says_so(tmp_path):
    process = script(tmp_path, "--cpu-rehearsal", PARTS="checks summary")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("== checks"):
            break
    process.send_signal(signal.SIGINT)
    status, _, err = said_by(process)
    assert status == 130
    assert err.strip().splitlines()[-1] == "interrupted; no target was judged"
    assert not (tmp_path / "an out folder" / "summary.jsonl").exists()
