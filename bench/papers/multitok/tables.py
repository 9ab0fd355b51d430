"""The tables and the picture of the MultiTok report, from the records `multitok`, `classify` and `packs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlx_zip.bench.records import Record, Records, table

from .classify_tables import accuracy_spread, classified, losses

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _speed_table(records: Records) -> str:
    """Returns the table of the speed of learning and encoding, ours and plain Python's."""
    rows = [
        [
            _measured(line),
            _window_cell(line),
            _spread(line["ours"]),
            _spread(line.get("plain_python")),
            f"{line['ratio']}x" if "ratio" in line else "",
            str(line.get("bytes_per_phrase", "")),
        ]
        for line in records.lines("multitok")
        if line["what"] in ("train", "encode")
    ]
    return table(["", "window", "M units/s", "plain Python", "ratio", "bytes per phrase"], rows)


def _measured(line: Record) -> str:
    """Returns what a line of speed measures: "train", "encode", or encoding after pruning."""
    setting = line["setting"]
    return f"encode, pruned, {setting['matching']}" if "pruned" in setting else line["what"]


def _ratios_table(records: Records) -> str:
    """Returns the table of ratios r of words, by percentage of samples learned from and window."""
    rows = [
        [
            f"{line['setting']['percent']} %",
            _window_cell(line),
            f"{line['ratio']:.3f}",
            _paper_cell(line),
            f"{line['phrases']:,}",
            f"{line['never_used'] / line['phrases']:.0%}",
            *_held_out_cells(line),
        ]
        for line in records.lines("multitok")
        if line["what"] == "ratio" and line["data"]["units_are"] == "words"
    ]
    header = ["learn from", "window", "r", "paper's r", "phrases", "never used", "r held out", "by pairs at most"]
    return table(header, rows)


def _pruned_table(records: Records) -> str:
    """Returns the table of ratios r of words after phrases used at most K times are pruned."""
    rows = [
        [
            _window_cell(line),
            str(line["setting"]["at_most"]),
            line["setting"]["mode"],
            f"{line['ratio']:.3f}",
            _paper_cell(line),
            f"{line['phrases']:,}",
            f"{line['growth']:.3f}",
            f"{line['lemma_printed']:.3f}",
            f"{line['lemma_corrected']:.3f}",
            *_held_out_cells(line)[:1],
        ]
        for line in records.lines("multitok")
        if line["what"] == "pruned" and line["data"]["units_are"] == "words"
    ]
    header = ["window", "K", "mode", "r", "paper's r", "phrases", "growth", "printed bound", "corrected", "r held out"]
    return table(header, rows)


def _tokenizer_ratios_table(records: Records) -> str:
    """Returns the table of ratios r where phrases are made of a tokenizer's ids."""
    rows = [
        [
            line["data"]["units_are"],
            f"{line['setting']['percent']} %",
            _window_cell(line),
            f"{line['ratio']:.3f}",
            _paper_cell(line),
            f"{line['per_word']:.3f}",
            f"{line['phrases']:,}",
            *_held_out_cells(line)[:1],
        ]
        for line in records.lines("multitok")
        if line["what"] == "ratio" and line["data"]["units_are"] != "words"
    ]
    header = ["units", "learn from", "window", "r", "paper's r", "tokens per word", "phrases", "r held out"]
    return table(header, rows)


def _packs_table(records: Records) -> str:
    """Returns the table of base ids per id with packs made by `vocab pack learn` and by `vocab multitok export`."""
    rows = []
    for line in records.lines("packs"):
        found = {(pack["size"], pack["learner"]): pack for pack in line["packs"]}
        for size in sorted({size for size, _ in found}):
            pair = [found[size, learner] for learner in ("learn", "multitok")]
            rates = [f"{pack['rates'][line['domain']]:.3f}" for pack in pair]
            empty = line["tests"][line["domain"]]["empty"]
            rows.append([line["domain"], f"{line['train_ids']:,}", f"{size:,}", f"{empty:.3f}", *rates])
    head = ["text", "base ids learned from", "entries", "growth alone", "vocab pack learn", "multitok export"]
    return table(head, rows)


def _window_cell(line: Record) -> str:
    """Returns the most units in a phrase of a line's setting; "Max" for no limit."""
    return str(line["setting"]["window"] or "Max")


def _paper_cell(line: Record) -> str:
    """Returns the paper's r for a line's setting, "" where the paper has none."""
    return "" if line["paper"] is None else f"{line['paper']:.2f}"


def _held_out_cells(line: Record) -> list[str]:
    """Returns the ratios of held-out samples, with phrases of any length and with pairs at most."""
    held_out = line.get("held_out", {})
    return [f"{held_out[window]:.3f}" if window in held_out else "" for window in ("0", "2")]


def _spread(figure: dict[str, Any] | None) -> str:
    """Formats a summary as "median (least-greatest)"; "" for None."""
    return f"{figure['median']:.2f} ({figure['min']:.2f}-{figure['max']:.2f})" if figure else ""


TABLES: dict[str, Callable[[Records], str]] = {
    "multitok-speed": _speed_table,
    "multitok-ratios": _ratios_table,
    "multitok-pruned": _pruned_table,
    "multitok-cascade": _tokenizer_ratios_table,
    "multitok-packs": _packs_table,
    "classifier": lambda records: classified(records.lines("classify"), of_paper=True),
    "classifier-others": lambda records: classified(records.lines("classify"), of_paper=False),
    "classifier-seeds": lambda records: accuracy_spread(records.lines("classify")),
}
PICTURES: dict[str, Callable[[Records], Figure]] = {
    "docs/reports/multitok-classifier.svg": lambda records: losses(records.lines("classify"))
}
