"""bench profile: parts of a step add up to it, and the clocks leave no trace (no timing is judged here)."""

from __future__ import annotations

import json

import pytest

from mlx_zip.bench.engines.mlx_engines import MlxZip
from mlx_zip.bench.steps import tracer as tracer_module
from mlx_zip.bench.steps.tracer import CPU, OURS, PARTS, ZIP_HOOKS, Hook, Tracer
from mlx_zip.errors import MlxZipError
from mlx_zip.models.two_part_step import TwoPartStep
from support import tiny, tiny_bench
from support.places import DOCS
from support.tiny_bench import ON

TEXT = [i for i in tiny.base_ids(60, seed=3) if i > 2][:40]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    tiny_bench.small(monkeypatch)


def record(capsys, *flags):
    assert tiny_bench.run("profile", *flags) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_a_step_is_split_into_parts_that_add_up(capsys):
    found, table = record(capsys, *ON, "--sizes", "24+12", "--trials", 2)
    assert list(found["parts"]) == list(PARTS)
    assert list(found["steps"]) == ["mlx-lm", "mlx-zip", "mlx-zip traced", "mlx-zip apart"]
    for way, kind in (("mlx-zip traced", "host_us"), ("mlx-zip apart", "apart_us")):
        parts = sum(found["parts"][part][kind]["mean"] for part in PARTS)
        assert parts == pytest.approx(found["steps"][way]["mean"], rel=1e-3)
        assert found["parts"]["loop"][kind]["mean"] > 0  # no time is counted in two parts
    for part in ("wait", "call", "codec", "embedding", "blocks", "head", "sampling", "enqueue", "text", "response"):
        assert found["parts"][part]["host_us"]["mean"] > 0
    assert len(found["steps"]["mlx-zip"]["samples"]) == len(found["ratio"]["samples"]) == 2
    assert all(f"| {part} |" in table for part in PARTS)


def test_no_body_runs_ahead_on_this_device(capsys):
    found, table = record(capsys, *ON, "--sizes", "24+12", "--trials", 1)
    assert found["second_bodies"] is None
    assert "body twice" not in table


def test_bodies_that_ran_twice_are_counted(capsys, monkeypatch):
    follow = TwoPartStep.compute_logits

    def twice(self, h, ids):
        self.cache[-1].second_bodies += 1
        return follow(self, h, ids)

    monkeypatch.setattr(TwoPartStep, "compute_logits", twice)
    found, table = record(capsys, *ON, "--sizes", "24+12", "--trials", 1, "--ahead", "on")
    assert found["setting"]["ahead"] is True
    assert found["second_bodies"] >= 1.0
    assert "Steps that ran the body twice: 1" in table


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["cold", "warm"])
def test_bodies_that_run_ahead_are_seldom_run_twice(capsys, rows):
    found, _ = record(capsys, *ON, "--sizes", "40+40", "--trials", 1, "--ahead", "on", "--rows", rows)
    assert found["second_bodies"] <= 0.1


def test_mlx_lm_reads_and_emits_as_many_ids(capsys, monkeypatch):
    seen = {}
    run = tracer_module.import_module("mlx_zip.bench.engines.mlx_engines").MlxLm.run

    def watched(self, prompt, tokens, replay=None, held=None):
        seen["prompt"], seen["steps"] = len(prompt), len(replay)
        return run(self, prompt, tokens, replay, held)

    monkeypatch.setattr("mlx_zip.bench.engines.mlx_engines.MlxLm.run", watched)
    found, _ = record(capsys, *ON, "--sizes", "40+20", "--trials", 1)
    assert seen == {"prompt": found["counts"]["prompt_ids"], "steps": found["counts"]["steps"]}
    assert found["counts"]["steps"] < found["counts"]["base_tokens"] == 20


@pytest.mark.slow
def test_a_trained_model_is_split_in_free_generation(capsys):
    found, _ = record(capsys, "--model", "stories", "--mode", "free", "--sizes", "16+6", "--trials", 1)
    assert found["parts"]["canonical"]["host_us"]["mean"] > 0
    assert found["parts"]["replay"]["host_us"]["mean"] == 0


@pytest.mark.parametrize("hook", ZIP_HOOKS, ids=lambda hook: hook.name)
def test_every_clock_is_around_something_that_is_there(hook):
    assert callable(getattr(hook.find_owner(), hook.name))
    assert hook.part in PARTS


def test_a_clock_around_nothing_is_an_error():
    before = ZIP_HOOKS[0].find_owner().logsumexp
    lost = Hook("codec", "mlx_zip.models.rows.zip_state:ZipState", "retreat")
    with pytest.raises(MlxZipError, match="ZipState has no retreat"), Tracer((*ZIP_HOOKS, lost)):
        pass
    assert ZIP_HOOKS[0].find_owner().logsumexp is before


@pytest.mark.parametrize("apart", [False, True])
def test_clocks_change_nothing_and_are_taken_away(apart):
    models = tiny_bench.models()
    made = MlxZip(models)
    expected = made.run(TEXT, 20)
    before = [getattr(hook.find_owner(), hook.name) for hook in ZIP_HOOKS]
    with Tracer(ZIP_HOOKS, apart) as tracer:
        found = made.run(TEXT, 20)
    assert found.ids == expected.ids
    assert len(tracer.marks) == len(found.ids)
    assert [getattr(hook.find_owner(), hook.name) for hook in ZIP_HOOKS] == before


def test_clocks_are_taken_away_after_an_error():
    before = ZIP_HOOKS[0].find_owner().logsumexp
    with pytest.raises(ZeroDivisionError), Tracer(ZIP_HOOKS):
        raise ZeroDivisionError
    assert ZIP_HOOKS[0].find_owner().logsumexp is before


class Nested:
    """Two functions, one inside the other, and the two clocks that they advance."""

    wall = cpu = 0

    def perf_counter(self):
        return self.wall

    def thread_time(self):
        return self.cpu

    def outer(self):
        self.wall, self.cpu = self.wall + 2, self.cpu + 1
        self.inner()

    def inner(self):
        self.wall, self.cpu = self.wall + 40, self.cpu + 30


def test_a_functions_time_is_its_own(monkeypatch):
    nested = Nested()
    monkeypatch.setattr(tracer_module, "time", nested)
    with Tracer((Hook("call", Nested, "outer"), Hook("codec", Nested, "inner"))) as tracer:
        nested.outer()
    assert tracer.totals == {"call": 2, "call" + CPU: 1, "codec": 40, "codec" + CPU: 30}


def test_our_parts_are_parts():
    assert set(OURS) < set(PARTS)


def test_the_page_explains_every_part():
    page = (DOCS / "bench.md").read_text()
    assert all(f"| `{name}` | {what} |" in page for name, what in PARTS.items())


def test_a_plain_model_has_nothing_to_split():
    with pytest.raises(MlxZipError, match="mlx-zip needs a model with hypertokens"):
        tiny_bench.run("profile", "--base", "stories-base", "--sizes", "8+4")


def test_trials_are_at_least_one():
    with pytest.raises(MlxZipError, match="--trials must be at least 1, got 0"):
        tiny_bench.run("profile", *ON, "--trials", 0)
