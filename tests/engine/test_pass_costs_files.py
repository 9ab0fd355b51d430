"""What passes cost is kept from run to run, and a file that cannot be used costs nothing but that."""

import gc
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_zip.engine import pass_costs
from mlx_zip.engine.mlx.generate import stream_generate
from mlx_zip.engine.mlx.served import Served
from mlx_zip.engine.options import RunOptions
from mlx_zip.engine.pass_costs import CostFile, PassCosts
from support.generating import ENDLESS, plain_model

KEY = {"model": "0123", "chip": "M4", "mlx": "0.32.4"}
CURVE = {1: 0.010, 2: 0.011, 4: 0.012, 8: 0.018, 16: 0.030}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(pass_costs, "costs_folder", lambda: tmp_path / "cache" / "pass-costs")
    return tmp_path / "cache" / "pass-costs"


def kept(curve=CURVE, held=1000, key=KEY):
    file = CostFile(key)
    for width, seconds in curve.items():
        file.costs.note_pass(width, held, seconds, known=True)
    file.save()
    return file


def first_choice(slower=1.0):
    """How many ids a new run proposes after its first pass, which is over one id."""
    costs = CostFile(KEY).costs
    assert costs.choose_draft_length([0.7], 1000, 15) == 0
    costs.note_pass(1, 1000, slower * CURVE[1])
    return costs.choose_draft_length([0.7], 1000, 15)


@pytest.mark.parametrize("slower", [0.5, 1.0, 2.0])
def test_the_next_run_chooses_by_the_kept_costs_from_its_second_step(slower):
    before = kept()
    assert CostFile(KEY).costs.ratios(1000) == pytest.approx(before.costs.ratios(1000))
    before.costs.note_pass(1, 1000, CURVE[1])
    assert first_choice(slower) == before.costs.choose_draft_length([0.7], 1000, 15) > 0


def test_passes_are_compared_with_those_of_their_own_run():
    kept()
    costs = CostFile(KEY).costs
    costs.note_pass(1, 1000, 2 * CURVE[1])
    for _ in range(3):
        costs.note_pass(8, 1000, 2 * CURVE[8])
    assert costs.ratios(1000)[8] == pytest.approx(CURVE[8] / CURVE[1])


def test_a_run_on_a_slower_machine_leaves_what_passes_cost_in_relation_to_each_other():
    kept()
    slower = CostFile(KEY)
    slower.costs = PassCosts()
    for _ in range(2):
        slower.costs.note_pass(1, 1000, 2 * CURVE[1])
    slower.save()
    assert CostFile(KEY).costs.ratios(1000) == pytest.approx({n: CURVE[n] / CURVE[1] for n in CURVE})


def test_newer_times_replace_the_kept_ones():
    kept()
    again = CostFile(KEY)
    for _ in range(4):
        again.costs.note_pass(1, 1000, 0.020)
        again.costs.note_pass(8, 1000, 0.160)
    assert again.costs.ratios(1000)[8] == pytest.approx(8.0)
    again.save()
    assert CostFile(KEY).costs.ratios(1000)[8] == pytest.approx(8.0)


def test_other_models_chips_and_versions_have_other_files(folder):
    kept()
    for name in KEY:
        assert CostFile({**KEY, name: "other"}).costs.ratios(1000) == {}
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"\xff\xfe",
        lambda data: b"[1, 2]",
        lambda data: b"[" * 100_000,
        lambda data: json.dumps({**data, "version": 2}).encode(),
        lambda data: json.dumps({**data, "key": {**KEY, "chip": "M1"}}).encode(),
        lambda data: json.dumps({**data, "passes": [{"ids": 2}]}).encode(),
        lambda data: json.dumps({**data, "passes": [{**data["passes"][0], "seconds": float("nan")}]}).encode(),
        lambda data: json.dumps({**data, "passes": [{**data["passes"][0], "seconds": "1"}]}).encode(),
        lambda data: json.dumps({**data, "passes": [{**data["passes"][0], "seconds": 0}]}).encode(),
        lambda data: json.dumps({**data, "passes": [{**data["passes"][0], "seconds": 5e-324}]}).encode(),
        lambda data: json.dumps({**data, "passes": [{**data["passes"][0], "held": 10**300}]}).encode(),
        lambda data: json.dumps({**data, "passes": [{**data["passes"][0], "rows": 0.5}]}).encode(),
        lambda data: json.dumps({**data, "passes": [{**data["passes"][0], "seconds": 10**400}]}).encode(),
    ],
)
def test_a_file_that_cannot_be_used_counts_as_none_and_is_replaced(damage):
    path = kept().path
    path.write_bytes(damage(json.loads(path.read_bytes())))
    assert CostFile(KEY).costs.figures() == {}
    kept()
    assert first_choice() > 0


def test_a_pipe_in_the_files_place_is_neither_read_nor_replaced():
    path = kept().path
    path.unlink()
    os.mkfifo(path)
    assert CostFile(KEY).costs.figures() == {}
    kept()
    assert path.is_fifo()


def test_a_deleted_file_is_forgotten():
    kept().path.unlink()
    assert CostFile(KEY).costs.figures() == {}


def test_a_folder_that_cannot_be_written_to_is_said_once_and_no_error(folder, caplog):
    folder.parent.write_text("a file")
    with caplog.at_level(logging.INFO):
        file = kept()
        file.save()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["what passes cost is not kept"]


def test_what_another_process_has_timed_meanwhile_stays_in_the_file():
    one, other = CostFile(KEY), CostFile(KEY)
    one.costs.note_pass(1, 1000, 0.01, known=True)
    other.costs.note_pass(1, 9000, 0.02, known=True)
    one.save()
    other.save()
    assert set(CostFile(KEY).costs.figures()) == {(1, 1024, 1), (1, 16384, 1)}


def test_a_file_is_written_rarely_and_only_after_a_change(monkeypatch):
    written, now = [], [0.0]
    monkeypatch.setattr(pass_costs, "write_json", lambda path, data: written.append(now[0]))
    monkeypatch.setattr(pass_costs.time, "monotonic", lambda: now[0])
    file = CostFile(KEY)
    for now[0] in range(0, 200, 10):
        file.save(every_s=60)
        if now[0] < 100:
            file.costs.note_pass(1, 1000, 0.01 + now[0])
    assert written == [60, 120]


def test_writers_at_one_time_leave_a_whole_file(folder):
    def save_often(held):
        file = CostFile(KEY)
        for n in range(20):
            file.costs.note_pass(1, held, 0.01 / (n + 1))
            file.save()

    with ThreadPoolExecutor() as pool:
        list(pool.map(save_often, (1000, 9000)))
    assert CostFile(KEY).costs.figures()
    assert len(list(folder.iterdir())) == 1


def test_generation_begins_with_what_an_earlier_run_has_timed(folder):
    def ids(draft):
        model = plain_model()
        found = [one.token for one in stream_generate(model, ENDLESS, [1, 2, 3, 4] * 8, 30, draft=draft)]
        return found, Served(model, ENDLESS, RunOptions()).pass_costs.figures()

    first, timed = ids("lookup")
    gc.collect()  # the model is gone
    other = plain_model()
    assert timed == Served(other, ENDLESS, RunOptions()).pass_costs.figures() != {}
    assert ids("auto")[0] == first
    gc.collect()
    assert len(list(folder.iterdir())) == 1
