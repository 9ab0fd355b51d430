"""The tables and the picture of the MultiTok report, from the records `multitok` and `classify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING

import numpy as np

from mlx_zip.bench.plots import new_figure
from mlx_zip.bench.records import Cell, Columns, Record, Records, make_column_table, median_and_range, table
from mlx_zip.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def measured_by(line: Record) -> str:
    setting = line["setting"]
    return f"encode, pruned, {setting['matching']}" if "pruned" in setting else line["what"]


def paper_ratio_cell(line: Record) -> str:
    return "" if line["paper"] is None else f"{line['paper']:.2f}"


def held_out_cell(window: str) -> Cell:
    """Returns a cell with the held-out samples' ratio r. window: "0" for phrases of any length, "2" for pairs only."""
    return lambda line: f"{found[window]:.3f}" if window in (found := line.get("held_out", {})) else ""


def timed_lines(lines: Sequence[Record]) -> list[Record]:
    return [line for line in lines if line["what"] in ("train", "encode")]


def ratio_lines(lines: Sequence[Record], what: str, words: bool) -> list[Record]:
    return [line for line in lines if line["what"] == what and (line["data"]["units_are"] == "words") == words]


LEARNED_FROM: tuple[str, Cell] = ("learn from", "{setting[percent]} %")
WINDOW: tuple[str, Cell] = ("window", lambda line: str(line["setting"]["window"] or "Max"))  # most units in a phrase
RATIOS: Columns = (("r", "{ratio:.3f}"), ("paper's r", paper_ratio_cell))
PHRASES: tuple[str, Cell] = ("phrases", "{phrases:,}")
HELD_OUT: tuple[str, Cell] = ("r held out", held_out_cell("0"))
SPEED_COLUMNS: Columns = (
    ("", measured_by),
    WINDOW,
    ("M units/s", lambda line: median_and_range(line["ours"])),
    ("plain Python", lambda line: median_and_range(line.get("plain_python"))),
    ("ratio", lambda line: f"{line['ratio']}x" if "ratio" in line else ""),
    ("bytes per phrase", lambda line: str(line.get("bytes_per_phrase", ""))),
)
WORD_COLUMNS: Columns = (
    *(LEARNED_FROM, WINDOW, *RATIOS, PHRASES),
    ("never used", lambda line: f"{line['never_used'] / line['phrases']:.0%}"),
    HELD_OUT,
    ("by pairs at most", held_out_cell("2")),
)
PRUNED_COLUMNS: Columns = (
    *(WINDOW, ("K", "{setting[at_most]}"), ("mode", "{setting[mode]}"), *RATIOS, PHRASES),
    ("growth", "{growth:.3f}"),
    ("printed bound", "{lemma_printed:.3f}"),
    ("corrected", "{lemma_corrected:.3f}"),
    HELD_OUT,
)
TOKENIZER_COLUMNS: Columns = (
    *(("units", "{data[units_are]}"), LEARNED_FROM, WINDOW, *RATIOS),
    *(("tokens per word", "{per_word:.3f}"), PHRASES, HELD_OUT),
)


# ---- tables of the record `classify`

SAMPLED = {"imdb": "IMDB", "agnews": "AG-News", "sst2": "SST-2"}
# (units, setting) -> r, accuracy, AUC on IMDB in the paper's table I; r of plain tokens is tokens per word
PAPER = {
    ("words", "plain"): (1, 0.725, 0.77),
    ("words", "100,Max-Max"): (0.57, 0.648, 0.69),
    ("words", "100,2-2"): (0.6, 0.701, 0.75),
    ("words", "50,Max-Max"): (0.8, 0.661, 0.72),
    ("words", "50,2-2"): (0.83, 0.706, 0.76),
    ("words", "50,2-1"): (0.83, 0.743, 0.82),
    ("words", "25,2-1"): (0.93, 0.728, 0.78),
    ("words", "100,2-2,>=2"): (0.66, 0.729, 0.79),
    ("words", "100,Max-Max,>=2"): (0.65, 0.709, 0.77),
    ("bert_base_uncased", "plain"): (1.17, 0.738, 0.81),
    ("bert_base_uncased", "50,2-1"): (0.8, 0.735, 0.81),
    ("bert_base_uncased", "25,2-1"): (0.91, 0.753, 0.83),
    ("gpt2", "plain"): (1.26, 0.733, 0.8),
    ("gpt2", "50,2-1"): (0.81, 0.731, 0.79),
    ("gpt2", "33,2-1"): (0.88, 0.745, 0.82),
}
EPSILON = "0.01"  # the eps of C(eps) in the column "epochs to 0.01"


def classifier_table(lines: Sequence[Record], of_paper: bool) -> str:
    """Returns a table with a row per data set, units and setting.

    of_paper: True for IMDB's rows only, next to the paper's figures; False for the rows of all other data sets.
    """
    runs = [line for line in lines if line["bench"] == "classify" and (data_set_name(line) == "IMDB") == of_paper]
    rows = [classifier_row(group, of_paper) for group in group_by_seed(runs)]
    quality = ["r", "paper's r", "accuracy", "paper's", "AUC", "paper's"] if of_paper else ["r", "accuracy", "AUC"]
    cost = ["epochs to 0.01", "processor s to 0.01", "processor s per epoch", "rows", "of them trained"]
    return table(["texts", "encoding", "seeds", *quality, *cost], rows)


def group_by_seed(runs: Sequence[Record]) -> list[list[Record]]:
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for line in runs:
        groups.setdefault((data_set_name(line), line["data"]["units_are"], line["setting"]), []).append(line)
    return list(groups.values())


def data_set_name(line: Record) -> str:
    name: str = line["data"]["train"].split(".")[0]
    return SAMPLED.get(name, name)


def encoding_name(line: Record) -> str:
    units, setting = line["data"]["units_are"], line["setting"]
    return setting if units == "words" else units if setting == "plain" else f"{units}, {setting}"


def classifier_row(runs: Sequence[Record], of_paper: bool) -> list[str]:
    line = runs[0]
    units, setting = line["data"]["units_are"], line["setting"]
    ratio = line["per_word"] if setting == "plain" else line["ratio"]
    found = PAPER.get((units, setting))
    paper = [f"{found[0]:.2f}", f"{found[1]:.3f}", f"{found[2]:.2f}"] if found else [""] * 3
    measured = [
        f"{ratio:.3f}",
        mean_and_range([run["accuracy"] for run in runs]),
        mean_and_range([run["auc"] for run in runs]),
    ]
    quality = [cell for pair in zip(measured, paper, strict=True) for cell in pair] if of_paper else measured
    epochs, seconds = (
        mean_and_range([run[name][EPSILON] for run in runs], 1) for name in ("epochs_to", "processor_s_to")
    )
    return [
        data_set_name(line),
        encoding_name(line),
        str(len(runs)),
        *quality,
        epochs,
        seconds,
        f"{mean(s for run in runs for s in run['processor_s']):.2f}",
        f"{line['rows']:,}",
        f"{line['rows_trained']:,}",
    ]


def mean_and_range(figures: Sequence[float | None], places: int = 3) -> str:
    """Formats one figure per run as "mean (minimum-maximum)", followed by "n of m" if some runs have None.

    None stands for a run that did not reach the value. places: digits after the decimal point.
    """
    reached = [figure for figure in figures if figure is not None]
    if not reached:
        return "not reached"
    cell = f"{mean(reached):.{places}f}"
    if len(figures) > 1:
        cell += f" ({min(reached):.{places}f}-{max(reached):.{places}f})"
    return cell if len(reached) == len(figures) else f"{cell}, {len(reached)} of {len(figures)}"


def training_loss_figure(lines: Sequence[Record]) -> Figure:
    """Returns a figure of training loss by epochs and by processor seconds, a row of panels per data set.

    Each encoding has a curve, the mean over seeds, and a band from minimum to maximum. Raises `DataError` if the record
    has no runs, `InstallationError` if matplotlib is missing.
    """
    groups = group_by_seed([line for line in lines if line.get("bench") == "classify"])
    if not groups:
        raise DataError("the record holds no line of `classify`")
    names = list(dict.fromkeys(data_set_name(group[0]) for group in groups))
    encodings = list(dict.fromkeys(encoding_name(group[0]) for group in groups))
    figure = new_figure(10, 3.4 * len(names))
    panels = figure.subplots(len(names), 2, squeeze=False, sharey="row")
    for group in groups:
        row, color = panels[names.index(data_set_name(group[0]))], f"C{encodings.index(encoding_name(group[0])) % 10}"
        losses = np.array([run["loss"] for run in group])
        spent = np.mean([np.cumsum(run["processor_s"]) for run in group], axis=0)
        for panel, at in zip(row, (np.arange(1, losses.shape[1] + 1), spent), strict=True):
            panel.plot(at, losses.mean(axis=0), color=color, marker=".", label=encoding_name(group[0]))
            panel.fill_between(at, losses.min(axis=0), losses.max(axis=0), color=color, alpha=0.12, linewidth=0)
    for name, (left, right) in zip(names, panels, strict=True):
        left.set(yscale="log", xlabel="epochs", ylabel="training loss", title=name)
        right.set(yscale="log", xlabel="processor seconds", title=name)
        right.legend(fontsize="small")
        for panel in (left, right):
            panel.grid(alpha=0.3)
    return figure


TABLES: dict[str, Callable[[Records], str]] = {
    "multitok-speed": make_column_table("multitok", SPEED_COLUMNS, timed_lines),
    "multitok-ratios": make_column_table("multitok", WORD_COLUMNS, partial(ratio_lines, what="ratio", words=True)),
    "multitok-pruned": make_column_table("multitok", PRUNED_COLUMNS, partial(ratio_lines, what="pruned", words=True)),
    "multitok-cascade": make_column_table(
        "multitok", TOKENIZER_COLUMNS, partial(ratio_lines, what="ratio", words=False)
    ),
    "classifier": lambda records: classifier_table(records.lines("classify"), of_paper=True),
    "classifier-others": lambda records: classifier_table(records.lines("classify"), of_paper=False),
}
PICTURES: dict[str, Callable[[Records], Figure]] = {
    "docs/reports/multitok-classifier.svg": lambda records: training_loss_figure(records.lines("classify"))
}
