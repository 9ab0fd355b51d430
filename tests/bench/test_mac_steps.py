"""The computed steps on Macs: the arithmetic, and what it takes from the shapes. Nothing is measured."""

import pytest

from mlx_zip.bench import mac_steps
from mlx_zip.bench.mac_steps import Cost, Step
from mlx_zip.bench.shape_table import SHAPES
from support.places import DOCS


def test_a_step_takes_the_time_of_its_bytes_and_of_its_launches():
    assert Cost(80e6, 200).ms(bandwidth=100, launch_us=5) == pytest.approx(1.0 + 1.0)


def test_a_cold_step_runs_the_encoders_in_the_steps_that_install_an_entry():
    step = Step(Cost(100, 10), Cost(1, 2), Cost(50, 20), Cost(90, 9))
    warm, cold = step.costs
    assert warm == Cost(101, 12)
    assert cold == Cost(101 + 50 * mac_steps.INSTALLS, 12 + 20 * mac_steps.INSTALLS)


def test_llama_1b_launches_and_reads_what_is_known_of_it():
    step = mac_steps.step_of("llama-3.2-1b", "4")
    assert step.plain.launches == 281  # known of mlx-lm from its own graph
    assert step.plain.bytes_read == pytest.approx(0.695e9 + 33.5e6, rel=0.01)  # 1.24 B parameters of 4.5 bits, KV
    assert step.body.bytes_read < step.plain.bytes_read
    assert 0 < step.warm.launches < step.cold.launches


def test_the_launches_of_a_layer_do_not_depend_on_the_depth():
    one, two, four = (mac_steps._small_launches("llama-3.2-1b", "16", layers) for layers in (1, 2, 4))
    assert four.plain - two.plain == 2 * (two.plain - one.plain)
    assert four.warm == one.warm
    assert four.cold == one.cold


def test_every_chip_model_and_precision_has_a_row(monkeypatch):
    monkeypatch.setattr(
        mac_steps, "step_of", lambda *_: Step(Cost(1e9, 300), Cost(1e6, 10), Cost(1e8, 50), Cost(8e8, 9))
    )
    rows = mac_steps.steps_table(None).splitlines()[2:]
    assert len(rows) == len(mac_steps.CHIPS) * len(mac_steps.MODELS) * len(mac_steps.PRECISIONS)
    assert set(mac_steps.MODELS.values()) <= set(SHAPES)


def test_the_page_says_that_it_is_a_calculation():
    page = (DOCS / "reports" / "mac_steps.md").read_text()
    assert page.startswith("# Steps on a Mac: a calculation\n\nNothing on this page was measured on a Mac.")
