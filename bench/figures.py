"""The figures of README.md and of pages in docs/, written from the records in bench/records.

A page holds tables between `<!-- figures: NAME -->` and `<!-- end of figures -->`; this command writes each anew and
leaves the rest of the page alone. Pictures are files of their own. `--check` only compares: a test runs it, so that no
page tells what no record has.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from mlx_zip.bench.papers.adaptbpe import adapt_page
from mlx_zip.bench.papers.hbpe import hbpe_page
from mlx_zip.errors import MlxZipError
from mlx_zip.files import whole_file

from .tables import table

PAGES = ("README.md", "docs/adaptbpe.md", "docs/hbpe.md", "docs/packs.md", "docs/performance.md")
FOLDER = "bench/records"
DIFFERS = 1  # exit status
_MARK = re.compile(r"<!-- (?:figures: ([\w-]+)|end of figures) -->")  # a table's beginning, or its end

Record = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench figures`."""
    add = parser.add_argument
    add("--root", type=Path, default=Path(), metavar="DIR", help="the checkout with pages and records (default: here)")
    add("--check", action="store_true", help="write nothing; status 1 where a page differs from the records")


def run(args: argparse.Namespace) -> int:
    """Writes the pages, or tells which differ. Raises `MlxZipError` for a page or record that cannot be used."""
    records = Records(args.root / FOLDER)
    pages = {args.root / name: page(args.root / name, records) for name in PAGES}
    shown = {name for path in pages for name in _MARK.findall(_read(path))}
    if missing := TABLES.keys() - shown:
        raise MlxZipError(f"no page shows the figures {', '.join(sorted(missing))}")
    wanted = pages | {args.root / name: draw(records) for name, draw in PICTURES.items()}
    old = [path for path, text in wanted.items() if not path.exists() or text != _read(path)]
    for path in old:
        if not args.check:
            _write(path, wanted[path])
        print(f"{path}: {'differs from the records' if args.check else 'written'}", file=sys.stderr)
    return DIFFERS if args.check and old else 0


def _write(path: Path, text: str) -> None:
    try:
        with whole_file(path) as partial:
            partial.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise MlxZipError(f"{path} cannot be written: {error.strerror or error}") from error


def page(path: Path, records: Records) -> str:
    """A page with its tables as the records have them. Raises `MlxZipError` for a table that is not known."""
    text, out, at, opened = _read(path), [], 0, None
    for mark in _MARK.finditer(text):
        if (mark[1] is None) == (opened is None):
            raise MlxZipError(f"{path}: not every '<!-- figures: NAME -->' has its '<!-- end of figures -->'")
        if opened is None:
            out.append(text[at : mark.end()])
        else:
            line = "\r\n" if "\r\n" in text else "\n"
            made = f"\n\n{_made(path, opened, records)}\n\n"
            out.append(made.replace("\n", line))
        at, opened = (mark.end(), mark[1]) if opened is None else (mark.start(), None)
    if opened is not None:
        raise MlxZipError(f"{path}: not every '<!-- figures: NAME -->' has its '<!-- end of figures -->'")
    return "".join([*out, text[at:]])


def _made(path: Path, name: str, records: Records) -> str:
    if name not in TABLES:
        raise MlxZipError(f"{path}: there are no figures named {name!r}; known: {', '.join(TABLES)}")
    try:
        return TABLES[name](records)
    except KeyError as missing:
        raise MlxZipError(f"figures {name}: its records have no {missing}") from missing
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise MlxZipError(f"figures {name}: its records do not hold what they should: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise MlxZipError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MlxZipError(f"{path} is not valid UTF-8 at byte {error.start}") from error


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


class Records:
    """The JSON lines of a folder, by file name without its ending."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines = cache(self._lines)

    def _lines(self, name: str) -> list[Record]:
        path = self.folder / f"{name}.jsonl"
        try:
            return [json.loads(line, parse_constant=_no_number) for line in _read(path).splitlines() if line]
        except (ValueError, RecursionError) as error:
            raise MlxZipError(f"{path}: not JSON lines: {error}") from error

    def one(self, name: str) -> Record:
        """The only line of a file."""
        lines = self.lines(name)
        if len(lines) != 1:
            raise MlxZipError(f"{self.folder / name}.jsonl: {len(lines)} records, not one")
        return lines[0]

    def pair(self, name: str, base: str = "mlx-lm", turn: int = 0) -> tuple[Record, Record]:
        """(the base engine's record, mlx-zip's) of one turn."""
        found = {line["engine"]: line for line in self.lines(name) if line["workload"]["turn"] == turn}
        return found[base], found["mlx-zip"]


@dataclass(frozen=True)
class Ratio:
    """A median, and the least and greatest of the trials."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"

    def over(self, divisor: float) -> Ratio:
        """All of it divided."""
        return Ratio(self.value / divisor, self.low / divisor, self.high / divisor)


def ratio(pair: tuple[Record, Record], figure: str) -> Ratio:
    """The second's over the first's, trial by trial, which ran beside one another."""
    a, b = (record["figures"][figure]["samples"] for record in pair)
    trials = [y / x for x, y in zip(a, b, strict=True)]
    return Ratio(median(trials), min(trials), max(trials))


def step_ratio(record: Record) -> Ratio:
    """`bench profile`: mlx-zip's step over mlx-lm's at equal KV length."""
    samples = record["ratio"]["samples"]
    return Ratio(median(samples), min(samples), max(samples))


def per_step(pair: tuple[Record, Record]) -> float:
    """Base tokens per step of the second."""
    return pair[1]["figures"]["base_tokens_per_step"]["median"]


def shortening(pair: tuple[Record, Record]) -> float:
    """Ids of the second's prompt over its base ids."""
    counts = pair[1]["counts"]
    return counts["prompt_ids"] / counts["prompt_tokens"]


def detokenizing(record: Record) -> float:
    """`bench profile`: us of processor time per base token."""
    counts = record["counts"]
    return record["parts"]["text"]["cpu_us"]["mean"] * counts["steps"] / counts["base_tokens"]


# ---- the tables

PROFILES = {
    "rows warm": "profile-warm",
    "rows cold": "profile-cold-transformer",
    "rows cold, `res_latent_attn`": "profile-cold-latent",
}
REQUESTS = {"code": "generate-code-1024", "chat": "generate-chat-1024"}
STORIES = {"float32": "chat-stories-float", "8 bit": "chat-stories"}
PUBLISHED = {"float32": "zip2zip-float", "8 bit": "zip2zip"}
TURNS = ("first", "second", "third")
HOST_PARTS = {"codec": "codec", "rows, host": "rows", "embedding": "embedding", "head": "head"}  # as `bench profile`'s


def _steps(records: Records) -> str:
    rows = [[name, f"`{file}`", str(step_ratio(records.one(file)))] for name, file in PROFILES.items()]
    return table(["", "record", "a step over mlx-lm's"], rows, "markdown")


def _requests(records: Records) -> str:
    rows = []
    for text, file in REQUESTS.items():
        pair = records.pair(file)
        found = (ratio(pair, name) for name in ("steps_per_s", "base_tokens_per_s", "ttft_ms"))
        rows.append([text, f"`{file}`", f"{per_step(pair):.2f}", *map(str, found)])
    header = ["text", "record", "base tokens per step", "steps/s", "base tokens/s", "time to first id"]
    return table(header, rows, "markdown")


def _stories(records: Records) -> str:
    rows = []
    for precision, file in STORIES.items():
        for turn, name in enumerate(TURNS):
            pair = records.pair(file, turn=turn)
            found = (ratio(pair, figure) for figure in ("steps_per_s", "base_tokens_per_s", "bytes_per_s"))
            rows.append([f"{precision}, {name}", f"{per_step(pair):.2f}", *map(str, found)])
    return table(["story", "base tokens per step", "steps/s", "base tokens/s", "bytes/s"], rows, "markdown")


def _published(records: Records) -> str:
    rows = []
    for precision, file in PUBLISHED.items():
        pair = records.pair(file, "zip2zip")
        rows.append([precision, f"`{file}`", *(str(ratio(pair, name)) for name in ("steps_per_s", "ttft_ms"))])
    return table(["weights", "record", "steps/s", "time to first id"], rows, "markdown")


def _parts(records: Records) -> str:
    before, after, bundled = map(records.one, ("profile-before", "profile-warm", "profile-stories"))
    both = (before, after, bundled)
    rows = [["step over mlx-lm's at equal KV length", *(f"{step_ratio(record).value:.2f}" for record in both)]]
    rows.append(["rows, apart", *(_us(record["parts"]["rows"]["apart_us"]) for record in both)])
    for name, part in HOST_PARTS.items():
        rows.append([name, *(_us(record["parts"][part]["host_us"]) for record in both)])
    rows.append(["host work of mlx_zip, by the wall's clock", *(_us(record["ours_us"]) for record in both)])
    rows.append(["host work of mlx_zip, processor time", "-", *(_us(r["ours_cpu_us"]) for r in both[1:])])
    return table(["us per step, median", "before", "after", "bundled model"], rows, "markdown")


def _us(figure: Mapping[str, float]) -> str:
    return f"{figure['median']:,.0f}"


def _codec(records: Records) -> str:
    wanted = {
        ("compress", "windows"): "compress, windows of 2,048 ids",
        ("compress", "sequence"): "compress, one sequence of 500,000 ids",
        ("push", "windows"): "follow compressed ids (push), windows",
        ("expand", "windows"): "expand ids, windows",
    }
    found = {(line["what"], line["setting"]["of"]): line for line in records.lines("codec-linux-x86_64")}
    rows = [[name, f"{found[key]['ours']['median']:.1f}", f"{found[key]['ratio']:.0f}"] for key, name in wanted.items()]
    return table(["2 cores, x86-64", "ours, ns per id", "times the published codec's speed"], rows, "markdown")


def _speed(records: Records) -> str:
    rows = []
    for text, file in REQUESTS.items():
        pair = records.pair(file)
        size = f"{pair[0]['workload']['prompt_tokens']:,} + {pair[0]['workload']['tokens']}"
        rows.append([f"`small-125m`, float32, {text}, {size}", *_gains(pair)])
    for turn in (0, 2):
        rows.append([f"`stories`, 8 bit, {TURNS[turn]} story", *_gains(records.pair(STORIES["8 bit"], turn=turn))])
    header = ["2 cores, x86-64", "base tokens per step", "steps/s", "base tokens/s", "bytes/s"]
    return table(header, rows, "markdown")


def _gains(pair: tuple[Record, Record]) -> list[str]:
    rates = (ratio(pair, name).value for name in ("steps_per_s", "base_tokens_per_s", "bytes_per_s"))
    return [f"{per_step(pair):.2f}", *(f"{rate:.2f} x" for rate in rates)]


# ---- the targets


@dataclass(frozen=True)
class Target:
    """A figure and its bound. most: whether the bound is the most it may be, else the least."""

    name: str
    bound: float
    measured: Callable[[Records], Ratio | float]
    most: bool = True
    unit: str = ""

    def row(self, records: Records) -> list[str]:
        """Name, bound, what was measured, and whether it is met: by all trials, or by the median alone."""
        found = self.measured(records)
        value = found.value if isinstance(found, Ratio) else found
        worst = value if not isinstance(found, Ratio) else found.high if self.most else found.low
        told = str(found) if isinstance(found, Ratio) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
        bound = f"{'at most' if self.most else 'at least'} {self.bound:g}{self.unit}"
        return [self.name, bound, f"{told}{self.unit}", self._judged(value, worst)]

    def _judged(self, value: float, worst: float) -> str:
        is_met, always = ((x <= self.bound if self.most else x >= self.bound) for x in (value, worst))
        return "missed" if not is_met else "met" if always else "met, not by every trial"


def _rate_over_compression(records: Records) -> Ratio:
    pair = records.pair(REQUESTS["code"])
    return ratio(pair, "base_tokens_per_s").over(per_step(pair))


def _first_id_over_length(records: Records) -> Ratio:
    pair = records.pair(REQUESTS["code"])
    return ratio(pair, "ttft_ms").over(shortening(pair))


def _bytes(precision: str, turn: int) -> Callable[[Records], Ratio]:
    return lambda records: ratio(records.pair(STORIES[precision], turn=turn), "bytes_per_s")


def _beside_published(precision: str) -> Callable[[Records], Ratio]:
    return lambda records: ratio(records.pair(PUBLISHED[precision], "zip2zip"), "steps_per_s")


TARGETS = (
    Target("zip step over mlx-lm's at equal KV length, rows warm", 1.04, lambda r: step_ratio(r.one("profile-warm"))),
    Target("the same, cold, two transformer layers", 1.25, lambda r: step_ratio(r.one("profile-cold-transformer"))),
    Target("the same, cold, `res_latent_attn`", 1.15, lambda r: step_ratio(r.one("profile-cold-latent"))),
    Target("code, 1,024 + 256, warm: base tokens/s over compression x mlx-lm's", 0.95, _rate_over_compression, False),
    Target("the same: time to first id over mlx-lm's x compressed length", 1.1, _first_id_over_length),
    *(
        Target(
            f"bundled model, warm, bytes/s over its base's: {TURNS[turn]} story, {name}",
            bound,
            _bytes(name, turn),
            most=False,
        )
        for name in STORIES
        for turn, bound in ((0, 1.35), (2, 1.35))
    ),
    *(
        Target(f"bundled model, steps/s over the published package's, {name}", 3, _beside_published(name), most=False)
        for name in PUBLISHED
    ),
    *(
        Target(
            f"host work of mlx_zip per step, processor time, {name}",
            150,
            lambda r, file=file: r.one(file)["ours_cpu_us"]["median"],
            unit=" us",
        )
        for name, file in (("`small-125m`", "profile-warm"), ("bundled model", "profile-stories"))
    ),
    *(
        Target(f"detokenizing a base token, {name}", 20, lambda r, file=file: detokenizing(r.one(file)), unit=" us")
        for name, file in (("`small-125m`", "profile-warm"), ("bundled model", "profile-stories"))
    ),
    Target(
        "a lookup among 1 M stored rows of width 256",
        2,
        lambda r: r.one("rows")["lookup_first_us_per_row"]["median"],
        unit=" us",
    ),
    Target("opening them", 200, lambda r: r.one("rows")["open_ms"]["median"], unit=" ms"),
)


def _targets(records: Records) -> str:
    return table(["", "wanted", "measured", ""], [target.row(records) for target in TARGETS], "markdown")


def _machines(records: Records) -> str:
    """Where and of which commit each record is."""
    files = [*PROFILES.values(), *REQUESTS.values(), *STORIES.values(), *PUBLISHED.values(), "profile-stories", "rows"]
    rows: list[Sequence[str]] = []
    for file in sorted({*files, "profile-before"}):
        line = records.lines(file)[0]
        rows.append([f"`{file}`", line["machine"], line["commit"] or "not recorded", line.get("time", "")[:10]])
    return table(["record", "machine", "commit", "day"], rows, "markdown")


def _packs(records: Records) -> str:
    lines = records.lines("packs")
    sizes = [pack["size"] for pack in lines[0]["packs"]]
    rows = []
    for line in lines:
        files = ", ".join(name.split(".")[0] for name in line["test"]["files"])
        found = {pack["size"]: pack["rate"] for pack in line["packs"]}
        rows.append(
            [
                f"{line['domain']} ({files})",
                f"{line['train_ids']:,}",
                f"{line['empty']:.3f}",
                *(f"{found[size]:.3f}" for size in sizes),
            ]
        )
    return table(["text", "base ids learned from", "growth alone", *(f"{size:,}" for size in sizes)], rows, "markdown")


def _pack_quality(records: Records) -> str:
    rows = []
    for line in records.lines("pack_quality"):
        kind = {"empty": "none", "own": "its own"}.get(line["curve"], line["curve"])
        rows.append([kind, f"{line['entries']:,}", *_scored(line)])
    heads = ["pack", "entries", "base ids per id", "bits per byte", "to the control", "to no pack"]
    return table(heads, rows, "markdown")


def _scored(line: Record) -> list[str]:
    """What `bench.pack_quality.scored` tells of a pack."""
    return [
        f"{line['base_ids_per_id']:.3f}",
        f"{line['bits_per_byte']:.3f}",
        f"{line['over_base']:+.1%}",
        f"{line['over_empty']:+.1%}",
    ]


def _pack_transfer(records: Records) -> str:
    rows = []
    for line in records.lines("pack_transfer"):
        rows.append([*_start(line), *_scored(line)])
    heads = ["pack", "entries", "base ids per id", "bits per byte", "to the base", "to no pack"]
    return table(heads, rows, "markdown")


def _pack_transfer_written(records: Records) -> str:
    rows = []
    for line in records.lines("pack_transfer"):
        row = [*_start(line), f"{line['own_base_tokens_per_step']:.3f}"]
        for told in (line["greedy"], line["sampled"]):
            shares = (told["of_gain"], told["of_own_gain"])
            row += [f"{told['base_tokens_per_step']:.3f}", *("-" if x is None else f"{x:.0%}" for x in shares)]
        rows.append(row)
    told = ["of the gain", "of the authors'"]
    return table(["pack", "entries", "theirs", "greedy", *told, "at 0.7", *told], rows, "markdown")


def _start(line: Record) -> list[str]:
    """A pack as `bench pack_transfer` names it, and its size."""
    kinds = {"empty": "none", "learned": "of the new text", "own": "of the training"}
    curve: str = line["curve"]
    return [kinds.get(curve, curve), f"{line['entries']:,}"]


TABLES: dict[str, Callable[[Records], str]] = {
    "codec": _codec,
    "speed": _speed,
    "steps": _steps,
    "requests": _requests,
    "stories": _stories,
    "published": _published,
    "parts": _parts,
    "targets": _targets,
    "records": _machines,
    "packs": _packs,
    "pack-quality": _pack_quality,
    "pack-transfer": _pack_transfer,
    "pack-transfer-written": _pack_transfer_written,
    **adapt_page.TABLES,
    **hbpe_page.TABLES,
}
PICTURES: dict[str, Callable[[Records], str]] = {**hbpe_page.PICTURES}
