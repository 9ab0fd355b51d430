"""`mlx_zip bench batch`: its record has both models in both ways, and gains taken trial by trial."""

import json
from types import SimpleNamespace

import pytest

from mlx_zip.bench.__main__ import main
from mlx_zip.bench.generation import batch
from mlx_zip.bench.generation.batch import TimedRun, throughput_figures, time_responses
from mlx_zip.bench.tables.performance import batch_table
from support import tiny_bench


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    tiny_bench.small(monkeypatch)


@pytest.mark.slow
def test_both_models_are_timed_in_both_ways_on_the_same_requests(capsys):
    assert main(["batch", "--model", "stories", "--rows", "2", "--max-tokens", "4", "--trials", "1"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    setting = {"requests": 2, "max_tokens": 4, "trials": 1, "warmup": 1, "rows": "warm"}
    assert found["setting"] == setting
    assert found["model"] == {"zip": "stories", "base": "decoder of stories", "precision": "as stored"}
    for kind in ("base", "zip"):
        ways = found["counts"][kind]
        assert ways["one_stream"]["base_tokens"] == ways["batch"]["base_tokens"] == 8
        assert ways["one_stream"]["ids"] == ways["batch"]["ids"]
        for way in ("one_stream", "batch"):
            assert len(found["figures"]["whole"][kind][way]["samples"]) == 1
    assert found["counts"]["base"]["batch"]["ids"] == 8
    assert "2 requests, trials: 1 after 1 warm-up" in err
    assert "| `stories` | warm | 2 |" in err


@pytest.mark.parametrize("cold", [True, False])
def test_cold_runs_begin_without_rows_of_earlier_ones(cold, monkeypatch):
    fresh = []
    monkeypatch.setattr(batch, "answer_all_prompts", lambda *args: TimedRun(4, 8, 1.0))
    engine = SimpleNamespace(forget_encoded_rows=lambda: fresh.append(1))
    batch.measure_batch_gain({"base": engine, "zip": engine}, [[1]], SimpleNamespace(trials=2, cold=cold, max_tokens=4))
    assert len(fresh) == (12 if cold else 0)


def test_the_ways_to_run_take_turns_in_going_first(monkeypatch):
    order = []

    def run(engine, way, prompts, max_tokens):
        order.append((engine.name, way))
        return TimedRun(4, 8, 1.0)

    monkeypatch.setattr(batch, "answer_all_prompts", run)
    engines = {name: SimpleNamespace(name=name) for name in ("base", "zip")}
    batch.measure_batch_gain(engines, [[1]], SimpleNamespace(trials=4, cold=False, max_tokens=4))
    rounds = [order[at : at + 4] for at in range(0, len(order), 4)]
    assert len(rounds) == 5
    assert all(len(set(one)) == 4 for one in rounds)
    assert len({one[0] for one in rounds[1:]}) == 4


def test_gains_and_their_quotient_are_taken_trial_by_trial():
    rates = {
        ("base", "one_stream"): [10.0, 20.0, 10.0],
        ("base", "batch"): [20.0, 40.0, 40.0],
        ("zip", "one_stream"): [10.0, 10.0, 10.0],
        ("zip", "batch"): [20.0, 10.0, 30.0],
    }
    found = throughput_figures(rates)
    assert found["base"]["gain"]["samples"] == [2.0, 2.0, 4.0]
    assert found["zip"]["gain"]["samples"] == [2.0, 1.0, 3.0]
    assert found["quotient"]["samples"] == [1.0, 0.5, 0.75]
    assert found["quotient"]["median"] == 0.75
    assert (found["quotient"]["low"], found["quotient"]["high"]) == (0.5, 1.0)


def test_all_responses_count_until_the_longest_answer_ends(monkeypatch):
    monkeypatch.setattr(batch.time, "perf_counter", lambda: 99.0)
    found = time_responses([SimpleNamespace(base_ids=[0] * count) for count in (1, 2, 3, 1)], 5.0)
    assert found == TimedRun(ids=4, base_tokens=7, seconds=94.0)


@pytest.mark.parametrize("flag", ["--rows", "--trials", "--max-tokens"])
def test_numbers_that_cannot_be_are_refused_before_a_model_is_loaded(flag, monkeypatch, capsys):
    monkeypatch.setattr(batch, "models_from_folders", None)
    assert main(["batch", "--model", "stories", flag, "0"]) == 2
    assert f"{flag} must be at least" in capsys.readouterr().err


def test_the_table_says_which_blas_was_preloaded():
    lines = batch_table([tiny_bench.batch_record()]).splitlines()
    assert len(lines) == 4
    one = "1.00 (1.00 to 1.00)"
    assert lines[-1] == f"| `stories` | cold | 8 | 1 | 1 | {one} | {one} | libopenblas.so.0; libblas |"
