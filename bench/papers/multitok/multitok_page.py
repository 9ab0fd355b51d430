"""The tables of docs/multitok.md, from the records of `bench multitok`, `bench classify` and `bench packs`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_zip.bench.tables import table
from mlx_zip.errors import DataError
from mlx_zip.files import whole_file

from .classify_page import classified

NAMES = ("multitok", "classify", "packs-multitok")
RECORDS = tuple(Path(__file__).resolve().parents[2] / "records" / f"{name}.jsonl" for name in NAMES)
SECTION = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)
Line = dict[str, Any]


def write_page(page: Path, records: Sequence[Path] = RECORDS) -> None:
    """Writes the tables anew, the file whole or not at all. Raises `DataError` naming what cannot be read."""
    try:
        lines = read_lines(records)
        text = page.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        names = ", ".join(map(str, records))
        raise DataError(f"{page} cannot be written from {names}: {error}") from error
    with whole_file(page) as partial:
        partial.write_text(written(text, lines), encoding="utf-8")


def read_lines(records: Sequence[Path]) -> list[Line]:
    """All lines of all records. Raises what reading raises."""
    return [json.loads(line) for path in records for line in path.read_text(encoding="utf-8").splitlines()]


def written(text: str, lines: Sequence[Line]) -> str:
    """A page with its tables made from these lines."""
    return SECTION.sub(lambda found: f"{found[1]}\n{TABLES[found[2]](lines)}\n\n{found[3]}", text)


def _speed(lines: Sequence[Line]) -> str:
    rows = [
        [
            _doing(line),
            _window(line),
            _spread(line["ours"]),
            _spread(line.get("plain_python")),
            f"{line['ratio']}x" if "ratio" in line else "",
            str(line.get("bytes_per_phrase", "")),
        ]
        for line in lines
        if line.get("what") in ("train", "encode")
    ]
    return table(["", "window", "M units/s", "plain Python", "ratio", "bytes per phrase"], rows)


def _doing(line: Line) -> str:
    setting = line["setting"]
    return f"encode, pruned, {setting['matching']}" if "pruned" in setting else line["what"]


def _ratios(lines: Sequence[Line]) -> str:
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
        for line in lines
        if line.get("what") == "ratio" and line["data"]["units_are"] == "words"
    ]
    header = ["learn from", "window", "r", "paper's r", "phrases", "never used", "r held out", "by pairs at most"]
    return table(header, rows)


def _pruned(lines: Sequence[Line]) -> str:
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
        for line in lines
        if line.get("what") == "pruned" and line["data"]["units_are"] == "words"
    ]
    header = ["window", "K", "mode", "r", "paper's r", "phrases", "growth", "printed bound", "corrected", "r held out"]
    return table(header, rows)


def _cascade(lines: Sequence[Line]) -> str:
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
        for line in lines
        if line.get("what") == "ratio" and line["data"]["units_are"] != "words"
    ]
    header = ["units", "learn from", "window", "r", "paper's r", "tokens per word", "phrases", "r held out"]
    return table(header, rows)


def _packs(lines: Sequence[Line]) -> str:
    rows = [
        [
            line["domain"],
            f"{line['train_ids']:,}",
            f"{pack['size']:,}",
            f"{line['empty']:.3f}",
            f"{pack['rate']:.3f}",
            f"{pack['multitok']['rate']:.3f}",
            f"{pack['learned_s']:.1f}",
            f"{pack['multitok']['learned_s']:.1f}",
        ]
        for line in lines
        if line["bench"] == "packs"
        for pack in line["packs"]
    ]
    header = [
        "text",
        "base ids learned from",
        "entries",
        "growth alone",
        "vocab pack learn",
        "multitok export",
        "s to learn",
        "s to learn (multitok)",
    ]
    return table(header, rows)


def _window(line: Line) -> str:
    return str(line["setting"]["window"] or "Max")


def _paper(line: Line) -> str:
    return "" if line["paper"] is None else f"{line['paper']:.2f}"


def _others(line: Line) -> list[str]:
    held_out = line.get("held_out", {})
    return [f"{held_out[window]:.3f}" if window in held_out else "" for window in ("0", "2")]


def _spread(figure: dict[str, Any] | None) -> str:
    return f"{figure['median']:.2f} ({figure['min']:.2f}-{figure['max']:.2f})" if figure else ""


TABLES = {
    "multitok-speed": _speed,
    "multitok-ratios": _ratios,
    "multitok-pruned": _pruned,
    "multitok-cascade": _cascade,
    "multitok-packs": _packs,
    "multitok-classifier": lambda lines: classified(lines, of_paper=True),
    "multitok-classifier-others": lambda lines: classified(lines, of_paper=False),
}
