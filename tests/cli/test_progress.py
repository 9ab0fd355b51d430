"""Progress of commands on stderr."""

import io
import sys

import pytest

from mlx_zip.cli import progress
from mlx_zip.cli.progress import Progress, clock


@pytest.fixture
def times(monkeypatch):
    """A clock that is set by hand."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_a_line_now_and_then_says_how_much_is_done_and_left(times, capsys):
    with Progress(100, "windows", "some/where/model", interval_s=30) as step:
        times[0] = 10.0
        step(10)
        times[0] = 40.0
        step(10)
        times[0] = 200.0
        step(80)
    assert capsys.readouterr().err == "model: 20 of 100 windows, 0.5 per s, 2:40 left\n"


def test_a_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(2, "windows", "model") as step:
        step(1)
    assert "model:" in sys.stderr.getvalue()


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (7325, "2:02:05")])
def test_a_duration_is_read_as_on_a_clock(seconds, shown):
    assert clock(seconds) == shown
