"""Memory of a run: wired on a Mac, and given back after every step."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_zip.training.checkpoints import Progress
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.trainer import free_cached_memory, train_to_step


class Job:
    """Steps that do nothing but leave memory behind; `seen` has what happened."""

    def __init__(self, seen: list[str]) -> None:
        self.progress, self.seen = Progress(), seen

    def step(self, stop: bool) -> bool:
        self.progress = Progress(self.progress.step + 1)
        mx.eval(mx.zeros(1000) + 1)
        self.seen.append(f"step, {mx.get_cache_memory() > 0}")
        return stop

    def report(self) -> str:
        return ""

    def validate(self) -> None: ...

    def save_checkpoint(self) -> None:
        self.seen.append("save")


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine that recommends 1000 wired bytes; gives the list of limits that were set."""
    seen: list[str] = []
    limits = [70]

    def set_wired_limit(limit: int) -> int:
        seen.append(f"wired {limit}")
        limits.append(limit)
        return limits[-2]

    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000})
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    return seen


def run(seen: list[str]) -> None:
    train_to_step(Job(seen), TrainSettings(iters=2), lambda: None, quiet=True)


def test_memory_is_wired_during_a_run_and_as_before_afterwards(mac):
    run(mac)
    assert (mac[0], mac[-1]) == ("wired 1000", "wired 70")
    assert [line.split(",")[0] for line in mac[1:-1]] == ["step", "step", "save"]


def test_an_error_in_a_run_sets_the_limit_as_before(mac, monkeypatch):
    monkeypatch.setattr(Job, "report", lambda job: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(mac)
    assert (mac[0], mac[-1]) == ("wired 1000", "wired 70")


def test_a_device_that_recommends_nothing_is_left_alone(monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "a processor"})
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: pytest.fail("set"))
    run([])


def test_memory_is_given_back_after_every_step(monkeypatch):
    seen, cleared = [], []
    clear_cache = mx.clear_cache
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(SimpleNamespace(after=len(seen))) or clear_cache())
    run(seen)
    assert [one.after for one in cleared] == [1, 2]
    assert mx.get_cache_memory() == 0


def test_nothing_is_given_back_where_nothing_is_kept(monkeypatch):
    mx.clear_cache()
    monkeypatch.setattr(mx, "clear_cache", lambda: pytest.fail("cleared"))
    free_cached_memory()
