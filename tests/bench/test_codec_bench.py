"""The codec bench: its records hold what they promise (no timing is judged here)."""

import json
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pytest

from mlx_zip.bench import codec
from mlx_zip.bench import recording as surroundings
from mlx_zip.bench.__main__ import main
from mlx_zip.codec import CodecParams, compress


def bench(*flags):
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.setattr(codec, "TRIAL_S", 0.0)
        patch.setattr(surroundings, "IDLE_S", 0.01)
        assert main(["codec", "--windows", "2", "--trials", "2", *flags]) == 0
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.fixture(scope="module")
def records():
    return bench("--length", "5000")


def test_whole_decoding_gives_the_base_ids_that_were_compressed():
    params = CodecParams(500, 64, 3)
    ids = np.arange(300, dtype=np.uint32) % 40
    emitted = compress(params, ids)[0]
    assert len(emitted) < 300
    for given in (emitted, emitted.tolist()):
        assert codec.decode_with_new_codebook(params, given).tolist() == ids.tolist()


def test_single_calls_are_measured_on_windows_and_whole_ones_on_a_sequence_too(records):
    got = [(record["setting"]["of"], record["what"]) for record in records]
    long = ["compress arrays", "compress lists", "decode arrays", "decode lists", "push"]
    short = [*long, "push_one", "mark", "rewind_one"]
    assert got == [("windows", what) for what in short] + [("sequence", what) for what in long]


def test_each_record_has_raw_samples_with_median_and_spread_machine_and_versions(records):
    for record in records:
        ours = record["ours"]
        assert len(ours["samples"]) == 2
        assert ours["min"] <= ours["median"] <= ours["max"]
        assert record["machine"]
        assert record["versions"]["mlx_zip"]


def test_what_the_published_codec_can_do_too_is_compared_where_it_is_installed(records):
    names = {"compress arrays", "compress lists", "decode arrays", "decode lists", "push_one"}
    installed = records[0]["versions"]["zip2zip_compression"] is not None
    assert {record["what"] for record in records if record["upstream"]} == (names if installed else set())


def test_a_record_says_how_many_trials_were_fixed_and_how_busy_the_machine_was(records):
    for record in records:
        assert record["setting"]["trials"] == len(record["ours"]["samples"]) == 2
        assert record["load_average"] >= 0
        assert record["preloaded"] == []


def test_made_up_data_is_called_synthetic(records):
    assert all(record["data"].startswith("synthetic") for record in records)


@pytest.mark.parametrize("size", ["0", "256", str(10**20)])
def test_a_vocabulary_of_no_use_is_refused(size, capsys):
    assert main(["codec", "--vocab-size", size]) == 2
    assert f"--vocab-size must be from 257 to 16777216, got {size}" in capsys.readouterr().err
