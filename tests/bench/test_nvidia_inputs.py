"""bench nvidia with bad input and faults: one clear line, exit status not 0, and nothing that reads as a result."""

from __future__ import annotations

import os
import signal
import zipfile

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from mlx_zip.bench import machine
from mlx_zip.bench.engines import cuda_engines
from mlx_zip.bench.engines.shape_table import SHAPES
from mlx_zip.bench.generation import generate
from mlx_zip.bench.gpu import nvidia
from mlx_zip.bench.gpu import timing as steps
from mlx_zip.bench.gpu.nvidia import CaseRunner
from mlx_zip.bench.records import read_lines
from mlx_zip.errors import MlxZipError
from support import tiny_bench
from support.card_script import quick_python, run_script, start_script, wait_for_script


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    tiny_bench.small(monkeypatch)
    monkeypatch.setattr(nvidia, "STEPS", nvidia.STEPS[:2])
    monkeypatch.setattr(nvidia, "WHOLE", [one for one in nvidia.WHOLE[:3] if one[1] == "16"])
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
    monkeypatch.setattr("mlx_zip.cuda.devices.find_device", lambda name: name)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET is set" in refused(capsys, "--out", tmp_path)


def test_a_folder_that_holds_records_of_a_part_is_refused(tmp_path, capsys):
    (tmp_path / "steps.jsonl").write_text('{"bench": "nvidia-steps"}\n')
    for parts in ([], ["--parts", "steps"]):
        assert "holds records of an earlier run (steps)" in refused(capsys, "--rehearse", "--out", tmp_path, *parts)


@pytest.mark.slow
def test_an_engine_that_fails_is_recorded_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    phi = [name for name, _ in nvidia.WHOLE if SHAPES[name]["model_type"] == "phi3"]
    monkeypatch.setattr(cuda_engines, "torch_models_of_shape", _refusing(cuda_engines.torch_models_of_shape, phi))
    assert tiny_bench.run("nvidia", "--rehearse", "--out", tmp_path, "--parts", "generate", "steps") == 1
    for part, kind in (("generate", "generate"), ("steps", "nvidia-steps")):
        lines = read_lines(tmp_path / f"{part}.jsonl")
        assert {one["bench"] for one in lines} == {kind, "nvidia-error"}
        assert {one["model"]["name"] for one in lines if one["bench"] == kind} == {"llama-3.2-1b-narrow"}
        assert [one["error"] for one in lines if "error" in one] == ["RuntimeError: CUDA error: out of memory"]
    assert tiny_bench.run("nvidia", "--rehearse", "--out", tmp_path, "--parts", "summary") == 0
    assert "failed  torch-base torch-zip at phi-3.5-mini-narrow, 16 bit: RuntimeError" in capsys.readouterr().out


def _refusing(make, shapes):
    def of_shape(name, *args):
        if name.removesuffix("-narrow") in shapes:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return make(name, *args)

    return of_shape


def test_records_are_written_as_they_come_so_that_a_run_that_is_cut_keeps_them(tmp_path, monkeypatch):
    class CutError(BaseException):
        """Ends the process, as a signal does."""

    def times(engine, ids, rows, **setting):
        if rows == "cold":
            raise CutError
        return time_steps(engine, ids, rows=rows, **setting)

    time_steps = steps.time_steps
    monkeypatch.setattr(steps, "time_steps", times)
    with pytest.raises(CutError):
        tiny_bench.run("nvidia", "--rehearse", "--out", tmp_path, "--parts", "steps")
    assert [(one["engine"], one["rows"]) for one in read_lines(tmp_path / "steps.jsonl")] == [
        ("torch-base", "warm"),
        ("torch-zip", "warm"),
    ]


def test_whole_requests_are_kept_one_by_one(tmp_path, monkeypatch):
    def times(args):
        yield {"bench": "generate"}
        assert [one["bench"] for one in read_lines(tmp_path / "generate.jsonl")] == ["generate"]
        yield {"bench": "generate", "engine": "hf"}

    monkeypatch.setattr(generate, "run", times)
    cases = CaseRunner(tmp_path, "generate")
    cases.run("requests", lambda: nvidia.whole_request_records([]))
    assert (cases.status, read_lines(tmp_path / "generate.jsonl")[1]["engine"]) == (0, "hf")


# ---- the card's state

ASKED = """#!/bin/sh
case "$*" in
    *clocks_{unknown}_reasons*) echo 'Field "..." is not a valid field to query.'; exit 2 ;;
esac
[ "$2" = 3 ] || exit 1
echo "1980 MHz, 2619 MHz, 1980 MHz, 2619 MHz, 612.40 W, 700.00 W, 61, P0, Active, {no}, {no}, {no}, {no}"
"""


@pytest.fixture
def smi(request, tmp_path, monkeypatch):
    """Puts a program in the place of nvidia-smi; an old one does not know the newer names."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text(ASKED.format(unknown={"old": "event", "new": "throttle"}[request.param], no="Not Active"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")


@pytest.mark.parametrize("smi", ["old", "new"], indirect=True)
def test_the_cards_clocks_power_and_what_holds_them_back_are_read(smi, monkeypatch):
    state = machine.card_state()
    assert (state["clocks.sm"], state["power.draw"], state["pstate"]) == ("1980 MHz", "612.40 W", "P0")
    assert machine.active_clock_limits(state) == ["sw_power_cap"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.card_state() == {}


@pytest.mark.slow
@pytest.mark.parametrize("smi", ["new"], indirect=True)
def test_each_part_has_the_cards_state_before_and_after_it_and_the_summary_says_what_held_it_back(
    smi, tmp_path, capsys
):
    folder = tmp_path / "out"
    assert tiny_bench.run("nvidia", "--rehearse", "--out", folder, "--parts", "steps", "summary") == 0
    lines = read_lines(folder / "steps.jsonl")
    ends = [(one["bench"], one["part"], one["when"]) for one in (lines[0], lines[-1])]
    assert ends == [("nvidia-card", "steps", "before"), ("nvidia-card", "steps", "after")]
    assert {one["bench"] for one in lines[1:-1]} == {"nvidia-steps"}
    assert "held back  before steps: sw_power_cap, at 1980 MHz" in capsys.readouterr().out


# ---- the script


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [
        (["--cpu-rehearsal"], {"PARTS": "speed"}, "PARTS: speed is not one of checks float64"),
        (["a", "b"], {}, "two folders are named: a and b"),
        (["--code"], {}, "--code needs a value"),
        (["--cpu-rehearsal"], {"WHEELS": "/nowhere"}, "there is no wheel in /nowhere"),
        (["--cpu-rehearsal", "/dev/null"], {}, "/dev/null is no folder that can be written to"),
        (["--cpu-rehearsal"], {"TMPDIR": "/nowhere"}, "there is no folder for temporary files"),
        (["--cpu-rehearsal"], {"WHOLE": "9m"}, "WHOLE: 9m is no number of seconds"),
        (["--cpu-rehearsal"], {"PYTHON": "/bin/false"}, "cannot import what is needed"),
    ],
)
def test_the_script_refuses_in_one_line(tmp_path, flags, variables, said):
    status, _, err = run_script(tmp_path, *flags, **variables)
    assert status == 2
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_the_script_hands_its_flags_on(tmp_path):
    flags = ["--engines", "torch-base torch-zip zip2zip", "--published", tmp_path, "--tokenizer", "stories"]
    status, out, err = run_script(tmp_path, "--cpu-rehearsal", *flags, PARTS="summary", PYTHON=quick_python(tmp_path))
    assert status == 0, out + err


@pytest.mark.slow
def test_the_script_does_not_mix_runs(tmp_path):
    quick = quick_python(tmp_path)
    status, out, err = run_script(tmp_path, "--cpu-rehearsal", PARTS="summary", PYTHON=quick)
    assert status == 0, out + err
    status, out, err = run_script(tmp_path, "--cpu-rehearsal", PYTHON=quick)
    assert (status, "holds records of an earlier run" in err) == (2, True)


@pytest.mark.slow
def test_a_part_over_its_limit_is_ended_and_the_summary_still_runs(tmp_path):
    """The Python sleeps in the part `checks`, which has the 12 s that a rehearsal makes of one."""
    slow = quick_python(tmp_path, f'*"--parts checks") echo $$ >"{tmp_path}/sleeper"; exec sleep 1000 ;;')
    status, out, _ = run_script(tmp_path, "--cpu-rehearsal", PARTS="checks summary", PYTHON=slow, WHOLE="26")
    assert "-- checks: out of time after" in out
    assert "not measured  torch-base reaches 78 %" in out
    assert (status, out.splitlines()[-1]) == (1, "failed or out of time: checks")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "sleeper").read_text()), 0)


@pytest.mark.slow
def test_parts_for_which_no_time_is_left_are_named_and_the_summary_still_runs(tmp_path):
    status, out, _ = run_script(
        tmp_path, "--cpu-rehearsal", PARTS="checks steps summary", WHOLE="25", PYTHON=quick_python(tmp_path)
    )
    assert "== checks: not run (no time is left)" in out
    assert "-- summary: exit status 0" in out
    assert (status, out.splitlines()[-1]) == (1, "failed or out of time: checks steps")


@pytest.mark.slow
def test_of_several_wheels_those_are_installed_that_fit(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for tag in ("cp27-cp27m-win32", "py3-none-any"):
        with zipfile.ZipFile(wheels / f"carried-1.0-{tag}.whl", "w") as file:
            file.writestr("carried.py", "")
            file.writestr("carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
            file.writestr("carried-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
            file.writestr("carried-1.0.dist-info/RECORD", "")
    given = {"PARTS": "summary", "WHEELS": str(wheels), "PYTHON": quick_python(tmp_path)}
    status, out, err = run_script(tmp_path, "--cpu-rehearsal", **given)
    assert status == 0, out + err
    (wheels / "carried-1.0-py3-none-any.whl").unlink()
    for record in tmp_path.rglob("*.jsonl"):  # a folder takes one run
        record.unlink()
    status, _, err = run_script(tmp_path, "--cpu-rehearsal", **given)
    assert (status, len(err.splitlines())) == (2, 1)
    assert "pip cannot install the wheels: ERROR" in err


@pytest.mark.slow
def test_an_interrupted_run_ends_at_once_and_says_so(tmp_path):
    process = start_script(tmp_path, "--cpu-rehearsal", PARTS="checks summary", PYTHON=quick_python(tmp_path))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("== checks"):
            break
    process.send_signal(signal.SIGINT)
    status, _, err = wait_for_script(process)
    assert status == 130
    assert err.strip().splitlines()[-1] == "interrupted; no target was judged"
    assert not (tmp_path / "an out folder" / "summary.jsonl").exists()
