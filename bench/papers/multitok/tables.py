"""The tables and the picture of the MultiTok report, from the records `multitok`, `classify` and `packs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlx_zip.bench.records import Record, Records
from mlx_zip.bench.tables import table

from .classify_tables import accuracy_spread, classified, losses

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _speed(records: Records) -> str:
    rows = [
        [
            _doing(line),
            _window(line),
            _spread(line["ours"]),
            _spread(line.get("plain_python")),
            f"{line['ratio']}x" if "ratio" in line else "",
            str(line.get("bytes_per_phrase", "")),
        ]
        for line in records.lines("multitok")
        if line["what"] in ("train", "encode")
    ]
    return table(["", "window", "M units/s", "plain Python", "ratio", "bytes per phrase"], rows)


def _doing(line: Record) -> str:
    setting = line["setting"]
    return f"encode, pruned, {setting['matching']}" if "pruned" in setting else line["what"]


def _ratios(records: Records) -> str:
    rows = [
        [
            f"{line['setting']['percent']} %",
            _window(line),
            f"{line['ratio']:.3f}",
            _paper(line),
            f"{line['phrases']:,}",
            f"{line['never_used'] / line['phrases']:.0%}",
            *_others(line),
        ]
        for line in records.lines("multitok")
        if line["what"] == "ratio" and line["data"]["units_are"] == "words"
    ]
    header = ["learn from", "window", "r", "paper's r", "phrases", "never used", "r held out", "by pairs at most"]
    return table(header, rows)


def _pruned(records: Records) -> str:
    rows = [
        [
            _window(line),
            str(line["setting"]["at_most"]),
            line["setting"]["mode"],
            f"{line['ratio']:.3f}",
            _paper(line),
            f"{line['phrases']:,}",
            f"{line['growth']:.3f}",
            f"{line['lemma_printed']:.3f}",
            f"{line['lemma_corrected']:.3f}",
            *_others(line)[:1],
        ]
        for line in records.lines("multitok")
        if line["what"] == "pruned" and line["data"]["units_are"] == "words"
    ]
    header = ["window", "K", "mode", "r", "paper's r", "phrases", "growth", "printed bound", "corrected", "r held out"]
    return table(header, rows)


def _cascade(records: Records) -> str:
    rows = [
        [
            line["data"]["units_are"],
            f"{line['setting']['percent']} %",
            _window(line),
            f"{line['ratio']:.3f}",
            _paper(line),
            f"{line['per_word']:.3f}",
            f"{line['phrases']:,}",
            *_others(line)[:1],
        ]
        for line in records.lines("multitok")
        if line["what"] == "ratio" and line["data"]["units_are"] != "words"
    ]
    header = ["units", "learn from", "window", "r", "paper's r", "tokens per word", "phrases", "r held out"]
    return table(header, rows)


def _packs(records: Records) -> str:
    rows = []
    for line in records.lines("packs"):
        found = {(pack["size"], pack["learner"]): pack for pack in line["packs"]}
        for size in sorted({size for size, _ in found}):
            both = [found[size, learner] for learner in ("learn", "multitok")]
            rates = [f"{pack['rates'][line['domain']]:.3f}" for pack in both]
            empty = line["tests"][line["domain"]]["empty"]
            rows.append([line["domain"], f"{line['train_ids']:,}", f"{size:,}", f"{empty:.3f}", *rates])
    head = ["text", "base ids learned from", "entries", "growth alone", "vocab pack learn", "multitok export"]
    return table(head, rows)


def _window(line: Record) -> str:
    return str(line["setting"]["window"] or "Max")


def _paper(line: Record) -> str:
    return "" if line["paper"] is None else f"{line['paper']:.2f}"


def _others(line: Record) -> list[str]:
    held_out = line.get("held_out", {})
    return [f"{held_out[window]:.3f}" if window in held_out else "" for window in ("0", "2")]


def _spread(figure: dict[str, Any] | None) -> str:
    return f"{figure['median']:.2f} ({figure['min']:.2f}-{figure['max']:.2f})" if figure else ""


TABLES: dict[str, Callable[[Records], str]] = {
    "multitok-speed": _speed,
    "multitok-ratios": _ratios,
    "multitok-pruned": _pruned,
    "multitok-cascade": _cascade,
    "multitok-packs": _packs,
    "classifier": lambda records: classified(records.lines("classify"), of_paper=True),
    "classifier-others": lambda records: classified(records.lines("classify"), of_paper=False),
    "classifier-seeds": lambda records: accuracy_spread(records.lines("classify")),
}
PICTURES: dict[str, Callable[[Records], Figure]] = {
    "docs/reports/multitok-classifier.svg": lambda records: losses(records.lines("classify"))
}
