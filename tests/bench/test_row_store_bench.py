"""`mlx_zip bench rows`: its record holds what it promises (no timing is judged here)."""

import json
from functools import partial

import pytest

from mlx_zip.bench.__main__ import main
from mlx_zip.progress import ProgressBar


@pytest.fixture
def record(capsys, tmp_path):
    flags = ["--rows", "5000", "--width", "16", "--batch", "50", "--trials", "3", "--memory-bytes", "20000"]
    assert main(["rows", *flags, "--folder", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []
    return json.loads(capsys.readouterr().out)


def test_the_record_has_samples_of_every_time_and_the_memory_next_to_its_bound(record):
    times = ["open_ms", "lookup_first_us_per_row", "lookup_us_per_row", "lookup_of_one_us"]
    times += ["store_from_disk_us_per_row", "store_from_memory_us_per_row"]
    assert [len(record[name]["samples"]) for name in times] == [3] * 6
    assert record["disk_bytes"] > 5000 * 64
    assert 0 < record["store_memory_bytes"] <= record["store_memory_bound_bytes"] == 20000
    assert record["versions"]["mlx_zip"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rows", "0"], "--rows must be at least 1, got 0"),
        (["--width", "-1"], "--width must be at least 1, got -1"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--memory-bytes", "-1"], "--memory-bytes must be at least 1, got -1"),
        (["--trials", "0"], "--trials must be at least 1, got 0"),
        (["--folder", "nowhere"], "--folder nowhere is not an existing folder"),
    ],
)
def test_a_number_or_folder_that_cannot_be_is_named_before_anything_is_measured(flags, words, capsys, monkeypatch):
    monkeypatch.setattr("mlx_zip.bench.row_store.load_before_bench", None)
    assert main(["rows", *flags]) == 2
    assert capsys.readouterr().err == f"error: {words}\n"


def test_progress_is_shown_for_storing_and_for_looking_up(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_zip.bench.row_store.ProgressBar", partial(ProgressBar, interval_s=0.0))
    assert main(["rows", "--rows", "20000", "--width", "4", "--trials", "3", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "Storing: 8,192 of 20,000 rows" in said
    assert "Looking up: 1 of 3 trials" in said
