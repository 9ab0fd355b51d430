"""The codec bench: its records hold what they promise (no timing is judged here)."""

import json
import subprocess
import sys

import numpy as np
import pytest


def bench(*flags):
    command = [sys.executable, "-m", "mlx_zip.bench", "codec", "--windows", "2", "--trials", "2", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def records():
    return bench("--length", "5000")


def test_every_operation_is_measured_on_windows_and_the_three_long_ones_on_a_sequence(records):
    got = [(record["setting"]["of"], record["what"]) for record in records]
    long = ["compress", "push", "expand"]
    short = [*long, "push_one", "mark", "rewind_one"]
    assert got == [("windows", what) for what in short] + [("sequence", what) for what in long]


def test_each_record_has_raw_samples_with_median_and_spread_machine_and_versions(records):
    for record in records:
        ours = record["ours"]
        assert len(ours["samples"]) == 2
        assert ours["min"] <= ours["median"] <= ours["max"]
        assert record["machine"]
        assert record["versions"]["mlx_zip"]


def test_upstream_is_beside_ours_or_said_to_be_missing(records):
    for record in records:
        if record["what"] in ("compress", "push", "expand"):
            assert record["upstream"] is not None or "not installed" in record["note"]


def test_made_up_data_is_called_synthetic(records):
    assert all(record["data"].startswith("synthetic") for record in records)


def test_policies_are_measured_side_by_side_once_the_table_is_full():
    records = bench("--policies", "--length", "20000")
    got = [(record["what"], record["policy"]) for record in records]
    policies = ("freeze", "lru", "use-count")
    assert got == [(what, policy) for what in ("push_one, table full", "push, table full") for policy in policies]
    assert [record["of_freeze"] for record in records if record["policy"] == "freeze"] == [1.0, 1.0]


def test_ids_come_from_a_file_on_request(tmp_path):
    np.save(tmp_path / "some.npy", np.arange(3000) % 50)
    records = bench("--ids", str(tmp_path / "some.npy"), "--vocab-size", "500")
    assert {record["data"] for record in records} == {"ids from some.npy"}
    assert records[-3]["setting"]["ids_each"] == 3000
