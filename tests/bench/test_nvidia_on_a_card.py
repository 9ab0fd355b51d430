"""bench nvidia on a card that is pretended: with CUDA events and graphs, as on a real one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlx_zip.bench.engines import device_clock  # noqa: E402
from mlx_zip.bench.engines.shape_table import SHAPES  # noqa: E402
from mlx_zip.bench.gpu import nvidia  # noqa: E402
from mlx_zip.bench.gpu import timing as kernels  # noqa: E402
from mlx_zip.bench.records import read_lines  # noqa: E402
from support import tiny_bench  # noqa: E402
from support.pretend_card import pretended_card  # noqa: E402


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    tiny_bench.small(monkeypatch)
    monkeypatch.setattr(device_clock, "CARD_SIDE", 64)
    monkeypatch.setattr(kernels, "largest_cache_bytes", lambda device: 0)
    monkeypatch.setattr(nvidia, "STEPS", nvidia.STEPS[:1])
    monkeypatch.setattr(nvidia, "WHOLE", nvidia.WHOLE[:1])
    yield
    for name in [name for name in SHAPES if name.endswith("-narrow")]:
        del SHAPES[name]


@pytest.fixture
def card(monkeypatch):
    with pretended_card(monkeypatch, kernels=False) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("part", ["steps", "generate", "kernels"])
def test_the_timed_parts_run_with_events_and_graphs(part, card, tmp_path):
    assert tiny_bench.run("nvidia", "--rehearse", "--out", tmp_path, "--parts", part) == 0
    lines = read_lines(tmp_path / f"{part}.jsonl")
    assert {one["device"]["device"] for one in lines} == {"cuda"}
    assert {one["model"].get("dtype", "bfloat16") for one in lines} == {"bfloat16"}
    assert all(one["step"]["clock"] == "cuda events" for one in lines if part == "steps")
    assert card.replays > len(lines)


@pytest.mark.slow
def test_the_checks_hold_and_compare_graphs_with_eager_work(card, tmp_path):
    assert tiny_bench.run("nvidia", "--rehearse", "--out", tmp_path, "--parts", "checks") == 0
    names = [one["check"] for one in read_lines(tmp_path / "checks.jsonl") if one["holds"]]
    assert sum(name.startswith("CUDA graphs of") for name in names) == 2
    assert sum(name.startswith("two chunks equal one") for name in names) == 4
    assert len(names) == 9


def test_calls_of_the_hyper_embedding_read_other_rows_each_time_and_write_memory_of_their_own(card):
    """Rows and results of a single call would stay in the cache of a large GPU, which is faster than its memory."""
    config, device = SHAPES["tiny"], torch.device("cuda")
    found = kernels.kernel_cases(config, device, torch.bfloat16, 8, 8, 0)
    case = next(case for case in found if case.name.startswith("hyper embedding"))
    results = []

    def kept(impl):
        results.append(case.work(impl))
        return results[-1]

    kernels.time_kernel(case._replace(work=kept), device, 1, 1.0, False, 3)
    one, two, three = results[-3:]  # those that the graph holds
    assert len({part.held.untyped_storage().data_ptr() for part in (one, two, three)}) == 3
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)
