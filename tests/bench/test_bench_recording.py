"""`--record FILE`: records of a quiet machine are also appended to a file, whole or not at all."""

import json
import os
from types import SimpleNamespace

import pytest

from mlx_zip.bench import recording
from mlx_zip.bench.__main__ import TIMED, main
from mlx_zip.bench.pages import benches, command_parser_of, experiments, timed_benches
from mlx_zip.errors import MlxZipError


@pytest.fixture
def machine(monkeypatch):
    """Sets the idle share and load average that the next bench finds; idle=None: the system does not give it."""

    def found(idle, load=0.0, processors=8):
        ticks = iter([(0, 0), (round(1000 * idle), 1000)] * 4) if idle is not None else iter([None] * 4)
        monkeypatch.setattr(recording, "read_processor_ticks", lambda: next(ticks))
        monkeypatch.setattr(recording, "IDLE_S", 0.0)
        monkeypatch.setattr(recording.os, "getloadavg", lambda: (load, load, load))
        monkeypatch.setattr(recording.os, "cpu_count", lambda: processors)

    yield found
    recording.load_before_bench.cache_clear()
    recording.installation_fields.cache_clear()


@pytest.fixture
def bench(monkeypatch):
    """Replaces `bench codec` by one of two records that then ends with `ends_with`; `runs` counts its runs."""
    made = SimpleNamespace(runs=0, ends_with=0)

    def run(args):
        made.runs += 1
        return 1 if made.ends_with == 1 else records()

    def records():
        yield from ({"number": number} for number in (1, 2))
        if isinstance(made.ends_with, BaseException):
            raise made.ends_with

    monkeypatch.setattr("mlx_zip.bench.codec.run", run)
    return made


def numbers(file):
    return [json.loads(line)["number"] for line in file.read_text().splitlines()]


def test_on_a_quiet_machine_the_records_are_printed_and_appended(machine, bench, tmp_path, capsys):
    machine(0.9)
    file = tmp_path / "records.jsonl"
    assert main(["codec", "--record", str(file)]) == 0
    assert file.read_text() == capsys.readouterr().out
    assert main(["codec", "--record", str(file)]) == 0
    assert numbers(file) == [1, 2, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


def test_a_recorded_bench_has_the_idle_share_that_it_was_allowed_for(machine, bench, tmp_path):
    machine(0.1)
    recording.load_before_bench()  # an earlier command's
    machine(0.95)
    file = tmp_path / "records.jsonl"
    assert main(["codec", "--record", str(file)]) == 0
    assert json.loads(file.read_text().splitlines()[0])["idle_share"] == 0.95


def test_a_busy_machine_is_refused_before_anything_is_measured(machine, bench, tmp_path, capsys):
    machine(0.899)
    file = tmp_path / "records.jsonl"
    assert main(["codec", "--record", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "89.9% idle" in said
    assert "without --record the bench always runs and prints to the screen" in said
    assert bench.runs == 0
    assert not file.exists()


def test_without_the_flag_a_busy_machine_prints_its_records(machine, bench, capsys):
    machine(0.0)
    assert main(["codec"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(("load", "allowed"), [(0.8, True), (0.9, False), (20.0, False)])
def test_without_an_idle_share_the_load_average_decides(load, allowed, machine, bench, tmp_path, capsys):
    machine(None, load)
    file = tmp_path / "records.jsonl"
    assert main(["codec", "--record", str(file)]) == (0 if allowed else 2)
    assert file.exists() == allowed == (bench.runs == 1)
    assert allowed or "idle by the load average" in capsys.readouterr().err


@pytest.mark.parametrize("end", [1, MlxZipError("it broke"), KeyboardInterrupt()])
def test_a_bench_that_does_not_end_well_adds_nothing(end, machine, bench, tmp_path):
    machine(1.0)
    file, bench.ends_with = tmp_path / "records.jsonl", end
    file.write_text('{"number": 7}\n')
    try:
        assert main(["codec", "--record", str(file)]) != 0
    except KeyboardInterrupt:
        assert isinstance(end, KeyboardInterrupt)
    assert bench.runs == 1
    assert numbers(file) == [7]


def test_a_last_line_without_an_end_is_kept_apart(machine, bench, tmp_path):
    machine(1.0)
    file = tmp_path / "records.jsonl"
    file.write_text('{"number": 7}')
    assert main(["codec", "--record", str(file)]) == 0
    assert numbers(file) == [7, 1, 2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none/x.jsonl", "no such folder"),
        ("a" * 250, "cannot be written: File name too long"),
        ("text", "not JSON lines"),
        (".", "is a folder or device, not a file"),
        ("pipe", "is a folder or device, not a file"),
    ],
)
def test_a_file_that_cannot_take_records_is_refused_before_anything_is_measured(
    name, words, machine, bench, tmp_path, capsys
):
    machine(1.0)
    (tmp_path / "text").write_text("a story")
    os.mkfifo(tmp_path / "pipe")
    assert main(["codec", "--record", str(tmp_path / name)]) == 2
    assert words in capsys.readouterr().err
    assert bench.runs == 0


def test_every_bench_that_measures_time_has_the_flag_and_no_other():
    assert timed_benches() <= set(benches()) | set(experiments())
    assert timed_benches() >= TIMED
    for name in (*benches(), *experiments()):
        flags = {flag for action in command_parser_of(f"bench {name}")._actions for flag in action.option_strings}
        assert ("--record" in flags) == (name in timed_benches()), name


def test_help_shows_the_flag(capsys):
    with pytest.raises(SystemExit):
        main(["codec", "--help"])
    assert "unless 90% of the processors' time is idle" in " ".join(capsys.readouterr().out.split())
