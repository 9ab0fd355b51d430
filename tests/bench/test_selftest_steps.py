"""The parts of a step: a stall is named, a slow kernel is none, copies are found."""

import time
from itertools import accumulate

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_zip.bench.engines.mlx_engines import MlxZip
from mlx_zip.bench.steps import selftest_steps as steps
from mlx_zip.bench.steps.tracer import CPU, PARTS
from mlx_zip.models.rows.zip_state import ZipState
from mlx_zip.models.two_part_step import TwoPartStep
from support import buffer_copies, tiny_bench

PROMPT, TEXT = tuple(range(5, 25)), (5, 6, 7, 8) * 10
WAIT_S = 0.05


@pytest.fixture(scope="module")
def models():
    return tiny_bench.models()


@pytest.fixture
def stalled(monkeypatch):
    """Makes `compute_logits` settle the body that was just handed over, and all tables, before it learns the id."""
    bodies, run, advance = [], TwoPartStep.run_body, ZipState.advance

    def running(self, ids):
        bodies.append(run(self, ids))
        return bodies[-1]

    def settling(self, ids):
        if bodies:
            mx.eval(bodies.pop(), *(table.array for table in (self.inputs, self.outputs) if table.array is not None))
            time.sleep(WAIT_S)  # this model's body is computed at once; a larger one takes its time
        return advance(self, ids)

    monkeypatch.setattr(TwoPartStep, "run_body", running)
    monkeypatch.setattr(ZipState, "advance", settling)


def test_a_loop_that_waits_for_tables_is_named(models, stalled):
    found = steps.summarize_parts([steps.trace_stream_generate(MlxZip(models), PROMPT, len(TEXT), TEXT)])
    assert found["stalls"][0]["part"] == "codec"
    assert found["stalls"][0]["share"] == 1
    assert "stalls: codec (100% of steps" in steps.way_summary(found)


def marks(wall, cpu, count=20):
    """The clocks of steps that all take these seconds in these parts; what is not named takes none."""
    rows = [{"at": 0.0, "at" + CPU: 0.0, **{part + end: 0.0 for part in PARTS for end in ("", CPU)}}]
    added = {**wall, **{part + CPU: value for part, value in cpu.items()}}
    added |= {"at": sum(wall.values()), "at" + CPU: sum(cpu.values())}
    rows += [added] * count
    return list(accumulate(rows, lambda a, b: {name: a[name] + b.get(name, 0.0) for name in a}))


def test_a_slow_kernel_is_no_stall():
    slow = steps.summarize_parts([marks({"call": 1e-3, "wait": 50e-3}, {"call": 1e-3})])
    assert slow["stalls"] == []
    assert slow["parts_ms"]["wait"] == {"p50": 50.0, "p90": 50.0, "p99": 50.0}


def test_a_slow_host_is_no_stall():
    assert steps.summarize_parts([marks({"call": 9e-3, "wait": 1e-3}, {"call": 9e-3})])["stalls"] == []


def test_the_part_that_waits_most_is_named_first():
    found = steps.summarize_parts([marks({"codec": 3e-3, "head": 1e-3, "wait": 1e-3}, {"head": 0.2e-3})])
    assert [one["part"] for one in found["stalls"]] == ["codec", "head"]
    assert found["stalls"][0]["ms"] == pytest.approx(3.0)


def test_a_rare_wait_is_no_stall_but_a_part_of_the_steps_is():
    once, often = (
        steps.find_stalls(
            {part: [3e-3 if part == "codec" and i < count else 1e-3 for i in range(100)] for part in PARTS},
            {part: [1e-3] * 100 for part in PARTS},
        )
        for count in (5, 20)
    )
    assert once == []
    assert [(one["part"], one["share"]) for one in often] == [("codec", 0.2)]


def test_what_no_part_holds_is_the_loops():
    clocks = marks({"call": 1e-3, "loop": 4e-3}, {"call": 1e-3})
    found = steps.summarize_parts([[{**mark, "loop": 0.0} for mark in clocks]])
    assert found["parts_ms"]["loop"]["p50"] == pytest.approx(4.0)
    assert found["step_ms"]["p50"] == pytest.approx(5.0)


def test_a_cache_that_is_copied_at_each_step_is_found(models, monkeypatch):
    kept = buffer_copies.count_buffer_copies(models.zipped(), PROMPT, TEXT, 24)
    assert kept["moved"]["KV cache"] == {"windows": 0, "bytes": 0}
    update, held = KVCache.update_and_fetch, []

    def copying(self, keys, values):
        found = update(self, keys, values)
        held.append(self.keys[:, :, :1])  # so MLX may not write into the buffer
        return found

    monkeypatch.setattr(KVCache, "update_and_fetch", copying)
    found = buffer_copies.count_buffer_copies(models.zipped(), PROMPT, TEXT, 24)
    held.clear()
    assert found["windows"] == kept["windows"] > 3
    assert found["moved"]["KV cache"]["windows"] == found["windows"]
    assert found["moved"]["KV cache"]["bytes"] > 0


def test_a_table_that_is_not_there_yet_has_no_place(models):
    assert buffer_copies.buffer_places(models.zipped().make_cache())["output rows"] == []
