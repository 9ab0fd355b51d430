"""`mlx_zip bench rows`: its record holds what it promises (no timing is judged here)."""

import json

import pytest

from mlx_zip.bench.__main__ import main


@pytest.fixture
def record(capsys, tmp_path):
    flags = ["--rows", "5000", "--width", "16", "--batch", "50", "--trials", "3", "--memory-bytes", "20000"]
    assert main(["rows", *flags, "--folder", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []
    return json.loads(capsys.readouterr().out)


def test_the_record_has_samples_of_every_time_and_the_memory_beside_its_bound(record):
    times = ["open_ms", "lookup_first_us_per_row", "lookup_us_per_row", "lookup_of_one_us"]
    times += ["store_from_disk_us_per_row", "store_from_memory_us_per_row"]
    assert [len(record[name]["samples"]) for name in times] == [3] * 6
    assert record["disk_bytes"] > 5000 * 64
    assert 0 < record["store_memory_bytes"] <= record["store_memory_bound_bytes"] == 20000
    assert record["versions"]["mlx_zip"]
