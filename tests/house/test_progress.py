"""Progress of commands on stderr."""

import io
import sys

import pytest

from mlx_zip import progress
from mlx_zip.progress import ProgressBar, format_duration, pluralize


@pytest.fixture
def times(monkeypatch):
    """A clock that is set by hand."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_a_line_now_and_then_says_how_much_is_done_and_left(times, capsys):
    with ProgressBar(100, "window", "some/where/model", interval_s=30) as step:
        times[0] = 10.0
        step(10)
        times[0] = 40.0
        step(10)
        times[0] = 200.0
        step(80)
    assert capsys.readouterr().err == "model: 20 of 100 windows, 0.5 per s, 2:40 left\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_that_goes_away_at_the_end(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with ProgressBar(2, "window", "model") as count:
        count(1)
        count.report("loss 1.5")
    shown = sys.stderr.getvalue()
    assert "model:" in shown
    assert "1/2" in shown
    assert "loss 1.5" in shown
    assert shown.rpartition("\r")[0].rpartition("\r")[2].strip() == ""


def test_without_a_terminal_figures_are_on_a_line_of_their_own(capsys):
    with ProgressBar(4, "step", "Training") as count:
        count()
        count.report("loss 1.5")
    assert capsys.readouterr().err.startswith("step 1 of 4: loss 1.5, 0:0")


def test_where_the_total_is_not_known_a_line_says_how_much_is_done(times, capsys):
    with ProgressBar(None, "swap", "Adapting") as count:
        times[0] = 100.0
        count(5000)
    assert capsys.readouterr().err == "Adapting: 5,000 swaps, 50 per s\n"


def test_a_bar_that_is_not_to_be_shown_says_nothing(times, capsys):
    with ProgressBar(4, "step", "Training", shown=False) as count:
        times[0] = 100.0
        count()
        count.say("a line")
        count.report("loss 1.5")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (7325, "2:02:05")])
def test_a_duration_is_read_as_on_a_clock(seconds, shown):
    assert format_duration(seconds) == shown


def test_a_noun_is_in_the_plural_unless_the_number_is_1():
    assert [pluralize(n, "sample") for n in (0, 1, 1024)] == ["0 samples", "1 sample", "1,024 samples"]
    assert [pluralize(n, "entry") for n in (1, 2)] == ["1 entry", "2 entries"]
