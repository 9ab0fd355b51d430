"""bench report: tables and plots of made-up records."""

from __future__ import annotations

import json
from dataclasses import astuple

import pytest

from mlx_zip.bench.generation.generate_record import FIGURES, read_records
from mlx_zip.bench.generation.ratios import figure_ratio, paired_ratio
from mlx_zip.errors import MlxZipError
from support import tiny_bench
from support.tiny_bench import record

H100 = {
    "device": {"device": "cuda", "chip": "NVIDIA H100", "threads": {}},
    "time": "2026-03-09T10:00:00+00:00",
    "run": "b",
    "machine": "Linux, a server, 64 cores",
}

EVEN = (0.100, 0.101, 0.102, 0.103, 0.104)
SLOW = tuple(1.2 * step for step in EVEN)


def written(tmp_path, *records, name="records.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def two_machines(tmp_path):
    """Two files, of two machines and days."""
    mac = [record("mlx-lm"), record("mlx-zip"), record("mlx-lm", prompt_tokens=16)]
    gpu = [record(engine, (0.02, 0.02, 0.03), **H100) for engine in ("hf", "zip2zip")]
    return written(tmp_path, *mac, name="mac.jsonl"), written(tmp_path, *gpu, name="gpu.jsonl")


def printed(capsys, *flags):
    assert tiny_bench.run("report", *flags) == 0
    return capsys.readouterr().out


def test_every_record_has_a_row_with_median_and_spread(tmp_path, capsys):
    rows = printed(capsys, *two_machines(tmp_path)).splitlines()
    assert len(rows) == 2 + 5
    assert rows[2].startswith(
        "| Linux, a chip, 2 cores | tiny, float32, random | code 8+4 | replay, rows warm | mlx-lm |"
    )
    assert "| 9.09 (8.33 to 10) |" in rows[2]  # steps/s of steps of 0.1, 0.11 and 0.12 s
    assert " | - | - | - | 3 | 0.1, 95% idle | none; libblas |" in rows[2]


def test_an_engine_that_ran_in_turns_with_the_base_has_ratios_with_intervals(tmp_path, capsys):
    row = printed(capsys, *two_machines(tmp_path)).splitlines()[3]
    assert "| mlx-zip |" in row
    assert "| 2.00 (2.00 to 2.00) | 2.00 (2.00 to 2.00) | 3 |" in row


def test_trials_of_one_command_are_paired():
    """What slows both engines of a trial alike cancels out."""
    noise = [1.0, 2.0, 4.0, 8.0, 16.0]
    faster = [1.1 * x for x in noise]
    assert astuple(paired_ratio(noise, faster)) == pytest.approx((1.1, 1.1, 1.1, 5))


def test_the_ratio_of_one_command_is_the_median_of_paired_ratios():
    found = figure_ratio((record(steps_s=(0.1, 0.2, 0.4)), record(steps_s=(0.2, 0.2, 0.2))), "step_ms")
    assert found.value == pytest.approx(1.0)
    assert (found.low, found.high) == pytest.approx((0.5, 2.0))


def test_records_of_two_commands_have_no_ratio():
    with pytest.raises(ValueError, match="two commands"):
        figure_ratio((record(steps_s=EVEN), record(steps_s=SLOW, run="b")), "step_ms")


# ---- reading


def test_lines_of_other_benches_are_left_out(tmp_path):
    path = written(tmp_path, {"bench": "codec"}, record())
    assert [one["engine"] for one in read_records([path])] == ["mlx-lm"]


def damaged(change):
    made = record()
    change(made)
    return json.dumps(made)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON lines"),
        ("[]", "not JSON lines: each must be an object"),
        ('{"engine": "hf"}', "not a record of a bench"),
        (damaged(lambda r: r.update(schema=99)), "schema 99, this version reads 1"),
        (damaged(lambda r: r.pop("commit")), "a record lacks commit"),
        (damaged(lambda r: r["figures"].pop("ttft_ms")), "a record lacks ttft_ms"),
        ("[" * 99_999, "not JSON lines"),
        ("9" * 5000, "not JSON lines: .* 5000 digits$"),
        ('{"bench": "codec"}', "no record of `bench generate`"),
    ],
)
def test_what_is_no_record_is_named(tmp_path, line, message):
    path = tmp_path / "records.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(MlxZipError, match=message):
        read_records([path])


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["figures"].update(peak_bytes=[1]),
        lambda r: r.update(setting=True),
        lambda r: r["model"].pop("precision"),
    ],
    ids=["a list for a figure", "no setting", "no precision"],
)
def test_a_record_with_a_wrong_field_is_named(change, tmp_path):
    made = record()
    change(made)
    with pytest.raises(MlxZipError, match=r"wrong\.jsonl: its records (have no|do not hold)"):
        tiny_bench.run("report", written(tmp_path, made, name="wrong.jsonl"))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MlxZipError, match=r"none\.jsonl cannot be read: "):
        read_records([tmp_path / "none.jsonl"])


def test_made_up_records_keep_to_the_schema():
    assert record()["figures"].keys() == FIGURES.keys()
