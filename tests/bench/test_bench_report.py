"""bench report: tables and plots of made-up records."""

from __future__ import annotations

import json

import pytest

from mlx_zip.bench.generation import report
from mlx_zip.bench.generation.generate_record import FIGURES, read_records
from mlx_zip.errors import MlxZipError
from support import tiny_bench
from support.tiny_bench import parse, record

H100 = {
    "device": {"device": "cuda", "chip": "NVIDIA H100", "threads": {}},
    "time": "2026-03-09T10:00:00+00:00",
    "run": "b",
    "machine": "Linux, a server, 64 cores",
}


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


def test_table_6_sets_machines_of_different_days_side_by_side(tmp_path, capsys):
    rows = printed(capsys, *two_machines(tmp_path), "--table", "6").splitlines()
    assert rows[0] == "| setting | method | 8+4 prefill | 8+4 decode | 16+4 prefill | 16+4 decode |"
    mac, gpu = ("Linux, a chip, 2 cores", "NVIDIA H100")
    of = [f"{place}: tiny, float32, random, replay, rows warm" for place in (mac, gpu)]
    assert rows[2:] == [
        f"| {of[0]} | mlx-lm | 16.0 | 9.1 | 16.0 | 9.1 |",
        f"| {of[0]} | mlx-zip | 16.0 | 18.2 | - | - |",
        f"| {of[0]} | mlx-zip, against mlx-lm | +0.0% | +100.0% | - | - |",
        f"| {of[1]} | hf | 16.0 | 50.0 | - | - |",
        f"| {of[1]} | zip2zip | 16.0 | 100.0 | - | - |",
        f"| {of[1]} | zip2zip, against hf | +0.0% | +100.0% | - | - |",
    ]


def test_two_days_on_one_machine_are_two_settings(tmp_path, capsys):
    file = written(tmp_path, record(), record(time="2026-01-05T00:00:00+00:00"))
    rows = printed(capsys, file, "--table", "6").splitlines()[2:]
    assert [row.split(" | ")[0][-10:] for row in rows] == ["2026-01-02", "2026-01-05"]


def test_the_papers_figures_stand_below_on_request(tmp_path, capsys):
    rows = printed(capsys, *two_machines(tmp_path), "--table", "6", "--paper").splitlines()
    assert "2048+256 decode" in rows[0]
    gain = next(row for row in rows if row.startswith("| H100 80GB, Phi-3.5-4B (paper) | zip2zip, against base"))
    assert gain.endswith("| +33.6% | +9.3% | +102.1% | +46.7% | +60.9% | +16.5% | +85.4% | +16.6% |")


def test_rates_of_several_texts_are_tokens_over_time(tmp_path):
    fast, slow = record(steps_s=(0.1,)), record(steps_s=(0.3,), domain="math")
    assert report.prefill_and_decoding_rate([fast, slow])[1] == pytest.approx(2 / (1 / 10 + 1 / (10 / 3)))


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
    with pytest.raises(MlxZipError, match=r"wrong\.jsonl: a record has a wrong field"):
        tiny_bench.run("report", written(tmp_path, made, name="wrong.jsonl"))


def test_a_record_with_a_wrong_field_is_not_compared(tmp_path):
    made = record()
    del made["figures"]["base_tokens_per_s"]["samples"]
    files = written(tmp_path, made, name="wrong.jsonl"), written(tmp_path, record(), name="right.jsonl")
    with pytest.raises(MlxZipError, match=r"wrong\.jsonl, .*right\.jsonl: a record has a wrong field"):
        tiny_bench.run("compare", *files)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MlxZipError, match=r"none\.jsonl cannot be read: "):
        read_records([tmp_path / "none.jsonl"])


def test_made_up_records_keep_to_the_schema():
    assert record()["figures"].keys() == FIGURES.keys()
    _, args = parse("report", "a")
    assert args.table == "all"
