"""Fixtures that tests of many folders use, and what every run of the tests begins with."""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.util import get_temp_dir
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import pytest
from hypothesis import settings

from mlx_zip.device import disable_tf32, set_device_from_environment
from support.places import SHARED

disable_tf32()  # recorded results are float32; before anything imports MLX
set_device_from_environment()  # MLX_ZIP_DEVICE=cpu runs the tests on the CPU; before anything imports mlx_lm
if "PYTEST_XDIST_WORKER" in os.environ:  # before any library that counts cores is imported
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ.setdefault(variable, "1")

if not Path("/dev/nvidiactl").exists():  # no GPU: Triton reads this when it is first imported, by whichever test
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")

gc.disable()  # while tests are collected: half a million objects are made, and all of them stay


def pytest_collection_finish() -> None:
    """Lets the collector run from here on, without what was there before the first test: modules and test items."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Puts the temporary files of all processes of a run into one folder, and deletes it at the end.

    Forked and killed processes delete nothing themselves.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:  # the process that started this one has done it
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", gettempdir())  # pytest keeps the `tmp_path` folders of its last runs
    get_temp_dir()  # multiprocessing deletes its own folder, but later
    compiled = Path(gettempdir()) / "mlx"  # where MLX keeps the kernels that it compiled on a CPU, for later runs too
    compiled.mkdir(exist_ok=True)
    folder = TemporaryDirectory(ignore_cleanup_errors=True)  # a process that has not ended yet may write there
    Path(folder.name, compiled.name).symlink_to(compiled)
    os.environ["TMPDIR"] = tempfile.tempdir = folder.name
    config.add_cleanup(folder.cleanup)


SLOW_LEFT_OUT = pytest.StashKey[int]()


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Counts the slow tests that are left out."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.config.stash[SLOW_LEFT_OUT] = item.config.stash.get(SLOW_LEFT_OUT, 0) + 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tells the process that started this one, if one did, how many were left out: xdist itself does not."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["slow_left_out"] = session.config.stash.get(SLOW_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes that number from a process; each of them collects all tests, so all have the same."""
    left_out = getattr(node, "workeroutput", {}).get("slow_left_out", 0)  # a process that died says nothing
    node.config.stash[SLOW_LEFT_OUT] = max(node.config.stash.get(SLOW_LEFT_OUT, 0), left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says how many slow tests were left out, and how to run them."""
    if left_out := config.stash.get(SLOW_LEFT_OUT, 0):
        terminalreporter.write_line(f"slow tests left out: {left_out}; make test-slow runs them")


def pytest_report_header() -> str:
    """Says at the top of a run whether the larger shared data are there; tests that need them are skipped if not."""
    found = (
        "found" if SHARED.is_dir() else "not found: the tests that need them are skipped, each with the missing file"
    )
    return f"shared data: {SHARED} {found}"


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Gives each test random numbers that do not depend on the tests that ran before it in the same process."""
    random.seed(0)
    if "mlx.core" in sys.modules:
        sys.modules["mlx.core"].random.seed(0)


@pytest.fixture(autouse=True)
def passes_are_timed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps no test's timings: they would decide how many ids another test, or the user, has proposed."""
    monkeypatch.setattr("mlx_zip.engine.pass_costs.costs_folder", lambda: Path("/dev/null/pass-costs"))


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Gives the test an empty hub cache, no network and no folder of stored rows; returns the test's own folder."""
    from support.command_line import stay_home

    stay_home(monkeypatch, tmp_path)
    monkeypatch.delenv("MLX_ZIP_ROW_CACHE", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Returns a function that runs `mlx_zip WORDS...` in this process and returns (status, stdout, stderr)."""
    from support.command_line import runner

    return runner(capsys)
