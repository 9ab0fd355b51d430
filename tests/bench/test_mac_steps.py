"""The computed steps on Macs: the arithmetic, and what it takes from the shapes and the records."""

import json

import pytest

from mlx_zip.bench.engines.shape_table import SHAPES
from mlx_zip.bench.records import Records
from mlx_zip.bench.steps import mac_steps
from mlx_zip.bench.steps.launches import step_seconds
from mlx_zip.bench.steps.mac_steps import BASE, MAX, Chip, DeviceCost, HostTimes, StepCosts
from mlx_zip.errors import MlxZipError
from mlx_zip.models.two_part_step import INPUT_ROWS_TOGETHER
from support import tiny_bench
from support.places import DOCS, REPO

NO_HOST = HostTimes(0.0, 0.0, 0.0)
CHIP = Chip(100, BASE)  # reads 80e6 bytes in a ms


def made_step(host=NO_HOST, **changes):
    """A step whose device takes 1 ms in mlx-lm, as much in a warm step, 1 ms more for a row of each side."""
    costs = {
        "plain": DeviceCost(80e6, 0),
        "warm": DeviceCost(0, 0),
        "output_row": DeviceCost(80e6, 0),
        "input_rows": DeviceCost(INPUT_ROWS_TOGETHER * 80e6, 0),
        "body": DeviceCost(0, 0),
    }
    return StepCosts(**{**costs, "host": host, **changes})


def test_a_step_takes_the_time_of_its_bytes_launches_and_command_buffers():
    cost = DeviceCost(80e6, 200, numbers=10 << 20, evals=1)
    assert cost.buffers(BASE) == 1 + 200 / 40
    assert cost.ms(CHIP, launch_us=5) == pytest.approx(1.0 + 1.0 + 6 * mac_steps.BUFFER_US / 1e3)


def test_a_command_buffer_is_full_by_launches_or_by_numbers():
    assert DeviceCost(0, 100, numbers=400 << 20).buffers(BASE) == 10
    assert DeviceCost(0, 100, numbers=400 << 20).buffers(MAX) == 8
    assert DeviceCost(0, 600, numbers=400 << 20).buffers(MAX) == 12


def test_a_step_takes_the_longer_of_device_and_host():
    assert made_step().plain_ms(CHIP, 5) == 1.0
    assert made_step(HostTimes(3.0, 4.0, 5.0)).plain_ms(CHIP, 5) == 3.0
    assert made_step(HostTimes(3.0, 4.0, 5.0)).warm_ms(CHIP, 5) == 4.0


def test_a_cold_step_encodes_in_the_steps_that_install_an_entry():
    assert made_step().cold_ms(CHIP, 5, installs=0.5) == pytest.approx(0.5 * 3.0 + 0.5 * 1.0)


def test_input_rows_in_one_pass_share_its_cost():
    step = made_step(input_rows=DeviceCost(160e6, 0))
    assert step.cold_ms(CHIP, 5, installs=1.0) == pytest.approx(1.0 + 1.0 + 2.0 / INPUT_ROWS_TOGETHER)


def test_second_bodies_cost_their_share_in_all_steps():
    assert made_step(body=DeviceCost(40e6, 0)).warm_ms(CHIP, 5) == pytest.approx(1.0 + 0.01 * 0.5)


@pytest.mark.slow
def test_llama_1b_launches_and_reads_what_is_known_of_it():
    step = mac_steps.step_costs_of("llama-3.2-1b", "4", NO_HOST)
    assert step.plain.launches == 281  # known of mlx-lm from its own graph
    assert step.plain.bytes_read == pytest.approx(0.695e9 + 33.5e6, rel=0.01)  # 1.24 B parameters of 4.5 bits, KV
    assert step.body.bytes_read < step.plain.bytes_read
    assert 0 < step.warm.launches < step.output_row.launches
    assert step.input_rows.bytes_read == step.output_row.bytes_read  # both encoders have one size
    assert step.output_row.launches < step.input_rows.launches < 2 * step.output_row.launches


@pytest.mark.slow
def test_the_launches_of_a_layer_do_not_depend_on_the_depth():
    one, two, four = (mac_steps.count_small_model_launches("llama-3.2-1b", "16", layers) for layers in (1, 2, 4))
    assert four.plain - two.plain == 2 * (two.plain - one.plain)
    assert four.warm == one.warm
    assert (four.one_row, four.input_rows) == (one.one_row, one.input_rows)


def test_fewer_steps_install_an_entry_in_a_longer_text():
    records = Records(REPO)
    shares = [mac_steps.install_shares(records, ids) for ids in (500, 1000, mac_steps.INSTALL_IDS)]
    for domain, share in shares[0].items():
        assert 1 >= share >= shares[1][domain] > shares[2][domain] > 0
    full = mac_steps.INSTALLS_OF["codebook_size"] / mac_steps.INSTALL_IDS
    assert max(shares[2].values()) <= full


def test_shares_are_those_of_the_recorded_windows(tmp_path):
    line = {"domain": "a", "tokenizer": {"name": "llama3"}, "base_ids": 8192, "columns": ["window", "merge_size"]}
    line["columns"] += ["codebook_size", "ids", "entries", "entries_used"]
    line["counts"] = [[1024, 3, 1024, 6400, 5600, 1], [1024, 3, 512, 1, 1, 1], [8192, 3, 2048, 5600, 2048, 1]]
    line["counts"] += [[8192, 2, 2048, 1, 1, 1], ["document", 3, 2048, 1, 1, 1]]
    (tmp_path / "bench/records").mkdir(parents=True)
    (tmp_path / "bench/records/tokens.jsonl").write_text(json.dumps(line) + "\n")
    found = [mac_steps.install_shares(Records(tmp_path), ids)["a"] for ids in (400, 800, 3200, 5600)]
    assert found == pytest.approx([700 / 800, 700 / 800, ((700 + 2048) / 2) / 3200, 2048 / 5600])


def test_every_chip_model_and_precision_has_a_row(monkeypatch):
    monkeypatch.setattr(mac_steps, "step_costs_of", lambda *_: made_step())
    rows = mac_steps.steps_table(Records(REPO)).splitlines()[2:]
    assert len(rows) == len(mac_steps.CHIPS) * len(mac_steps.MODELS) * len(mac_steps.PRECISIONS)
    assert set(mac_steps.MODELS.values()) <= set(SHAPES)


def test_the_host_is_measured_for_every_model_of_the_page(monkeypatch):
    monkeypatch.setattr(mac_steps, "HOST_ROUNDS", 1)
    monkeypatch.setattr(mac_steps, "layer_count", lambda name: 1)
    monkeypatch.setattr(mac_steps, "MODELS", {"Llama-3.2-1B": "llama-3.2-1b"})
    monkeypatch.setattr(mac_steps, "PRECISIONS", ("16",))
    (line,) = mac_steps.measure_host()
    assert set(line["host_us"]) == set(HostTimes._fields)
    assert min(line["host_us"].values()) > 0
    recorded = Records(REPO).lines("mac-host")
    assert {name for one in recorded for name in one["host_us"]} == set(HostTimes._fields)
    assert line.keys() == recorded[0].keys()


def test_too_few_steps_are_not_timed():
    with pytest.raises(MlxZipError, match="5 base ids are too few"):
        step_seconds(tiny_bench.models(), range(5), "warm")


def test_the_page_says_that_it_is_a_calculation():
    page = (DOCS / "reports" / "mac_steps.md").read_text()
    assert page.startswith("# Steps on a Mac: a calculation\n\nNothing on this page was measured on a Mac.")
