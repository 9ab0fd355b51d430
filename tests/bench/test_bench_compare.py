"""bench compare: ratios, their intervals, and the exit status, of made-up records."""

from __future__ import annotations

import json
from dataclasses import astuple

import pytest

from mlx_zip.bench.generation.compare import Comparison, compare_figure, match_records
from mlx_zip.bench.generation.ratios import Ratio, paired_ratio, unpaired_ratio
from mlx_zip.errors import MlxZipError
from support import tiny_bench
from support.tiny_bench import record

EVEN = (0.100, 0.101, 0.102, 0.103, 0.104)
SLOW = tuple(1.2 * step for step in EVEN)


def written(path, *records):
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


@pytest.fixture
def files(tmp_path):
    """Writes two files of one record each and compares them; gives the exit status."""

    def compare(a, b, *flags):
        names = (
            written(tmp_path / "a.jsonl", record(steps_s=a)),
            written(tmp_path / "b.jsonl", record(steps_s=b, run="b")),
        )
        return tiny_bench.run("compare", *names, *flags)

    return compare


def test_the_same_is_no_regression(files, capsys):
    assert files(EVEN, EVEN) == 0
    out, err = capsys.readouterr()
    assert "| tiny | code 8+4 | mlx-lm | steps_per_s | 9.8039 | 9.8039 | 1.000 |" in out
    assert err.splitlines()[-1] == "0 of 3 ratios are worse by more than 5%"


def test_a_regression_beyond_the_bound_ends_with_status_1(files, capsys):
    assert files(EVEN, SLOW) == 1
    rows = capsys.readouterr().out.splitlines()
    assert [row.endswith("| worse |") for row in rows[2:]] == [False, True, True]  # the first id came as soon
    assert files(EVEN, SLOW, "--bound", "0.25") == 0
    assert files(SLOW, EVEN) == 0


def test_a_difference_that_chance_explains_is_none(files):
    assert files((0.05, 0.1, 0.2), (0.05, 0.12, 0.2)) == 0


def test_lower_is_better_for_times_and_memory(files):
    assert files(EVEN, SLOW, "--measures", "step_ms") == 1
    assert files(SLOW, EVEN, "--measures", "step_ms") == 0
    a, b = record(), record()
    assert Comparison("peak_bytes", a, b, Ratio(1.2, 1.1, 1.3, 5)).regresses(0.05)
    assert not Comparison("peak_bytes", a, b, Ratio(0.8, 0.7, 0.9, 5)).regresses(0.05)
    assert not Comparison("peak_bytes", a, b, Ratio(1.2, 0.9, 1.3, 5)).regresses(0.05)


def test_engines_of_one_file_are_held_against_each_other(tmp_path, capsys):
    both = written(tmp_path / "a.jsonl", record("mlx-lm", EVEN), record("mlx-zip", EVEN))
    assert tiny_bench.run("compare", both, both, "--engines", "mlx-lm", "mlx-zip") == 0
    out = capsys.readouterr().out
    assert "| mlx-zip over mlx-lm | base_tokens_per_s | 9.8039 | 19.608 | 2.000 | 2.000 to 2.000 |" in out
    assert tiny_bench.run("compare", both, both, "--engines", "mlx-zip", "mlx-lm") == 1


def test_trials_of_one_command_are_paired():
    """What slows both engines of a trial alike cancels out."""
    noise = [1.0, 2.0, 4.0, 8.0, 16.0]
    faster = [1.1 * x for x in noise]
    assert astuple(paired_ratio(noise, faster)) == pytest.approx((1.1, 1.1, 1.1, 5))
    found = unpaired_ratio(noise, faster)
    assert found.value == pytest.approx(1.1)
    assert found.low < 0.5 < 2 < found.high


def test_the_ratio_of_one_command_is_the_median_of_paired_ratios():
    a, b = record(steps_s=(0.1, 0.2, 0.4)), record(steps_s=(0.2, 0.2, 0.2))
    found = compare_figure("step_ms", a, b, 0)
    assert found is not None
    assert found.ratio.value == pytest.approx(1.0)
    assert (found.ratio.low, found.ratio.high) == pytest.approx((0.5, 2.0))


def test_an_interval_holds_the_ratio_of_medians():
    a, b = record(steps_s=EVEN), record(steps_s=SLOW, run="b")
    found = compare_figure("step_ms", a, b, 0)
    assert found is not None
    assert found.ratio.value == pytest.approx(1.2, rel=1e-4)
    assert found.ratio.low < found.ratio.value < found.ratio.high


def test_what_one_record_lacks_is_not_compared():
    assert compare_figure("joules", record(), record(), 0) is None


def test_records_without_a_counterpart_are_counted(capsys):
    pairs = match_records([record(), record(domain="math")], [record(), record("mlx-zip")], None)
    assert [(a["engine"], b["workload"]["domain"]) for a, b in pairs] == [("mlx-lm", "code")]
    assert "2 record(s) are in one file only" in capsys.readouterr().err


def test_other_machines_are_told(capsys):
    match_records([record()], [record(machine="another")], None)
    assert "different machines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "flags", "message"),
    [
        ({"domain": "math"}, [], "have no record of the same engine"),
        ({}, ["--bound", "-1"], "--bound must be from 0 to below 1"),
        ({}, ["--seed", "-1"], "--seed must be at least 0, got -1"),
        ({}, ["--engines", "mlx-lm", "vllm"], "engine 'vllm' is not one of"),
        ({}, ["--measures", "joules"], "no figure of --measures in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, other, flags, message):
    names = written(tmp_path / "a.jsonl", record()), written(tmp_path / "b.jsonl", record(**other))
    with pytest.raises(MlxZipError, match=message):
        tiny_bench.run("compare", *names, *flags)
