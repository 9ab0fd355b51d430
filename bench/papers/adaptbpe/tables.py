"""The tables and the picture of the AdaptBPE report, from the records of `adaptbpe`, `adapt_model` and `adapt_step`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mlx_zip.bench.records import Records, machines
from mlx_zip.bench.tables import table

from .figure import picture
from .lines import METHODS, TEXTS, Line, groups

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORDS = ("adaptbpe", "adaptbpe-wide", "adapt_model", "adapt_step")
LISTS = {"gpt2": "GPT-2", "cl100k_base": "cl100k"}
COLUMNS = {"first_k": "first-k", "top_k": "top-k", "replay": "adapted"}  # keys of `bench adaptbpe`
PRECISIONS = {"8": "8 bit", "4": "4 bit", "16": "16 bit"}
CLOCKS = {"processor_ms": "processor's time", "wall_ms": "wall's clock"}


def _utility(records: Records) -> str:
    rows, shown = [], ""
    for line in _of(records, "adaptbpe", "utility"):
        first = line["text"] != shown
        shown = line["text"]
        found = _best([line["utility"][name] for name in COLUMNS])
        name = f"{TEXTS[shown]} ({line['train_bytes']:,} bytes)" if first else ""
        rows.append([name, str(line["merges"]), *found, f"{line['utility']['whole_list']:.4f}" if first else ""])
    return table(["text (adapted to)", "N", *COLUMNS.values(), "whole list"], rows)


def _best(values: Sequence[float]) -> list[str]:
    """To four digits, the greatest in bold unless there are two."""
    top = max(values)
    alone = sum(value == top for value in values) == 1
    return [f"**{value:.4f}**" if alone and value == top else f"{value:.4f}" for value in values]


def _speed(records: Records) -> str:
    ways = ("tokenizers", "whole_list", "whole_list_fresh", "adapted", "adapted_fresh")
    lines = _of(records, "adaptbpe", "encoding")
    rows = [[f"{TEXTS[line['text']]} ({line['bytes']:,})", *(_spread(line[way]) for way in ways)] for line in lines]
    merges = lines[0]["merges"]
    header = ["text (bytes)", "`tokenizers`", "whole list", "*fresh*", f"adapted, N = {merges}", "*fresh*"]
    return table(header, rows)


def _of(records: Records, name: str, what: str) -> list[Line]:
    return [line for line in records.lines(name) if line["what"] == what]


def _spread(figure: Line, digits: int = 1) -> str:
    return f"{figure['median']:.{digits}f} ({figure['min']:.{digits}f}-{figure['max']:.{digits}f})"


def _bits(records: Records) -> str:
    rows = []
    for (text, n_bytes), shares in groups(records.lines("adapt_model")).items():
        whole = shares[1]["whole list"]
        name = f"{TEXTS.get(text, text)}, `{whole['model']}`: {whole['vocab_size']:,} ids, {n_bytes / 1e6:.1f} MB"
        for share, methods in _cut(shares):
            one = next(iter(methods.values()))
            size = f"{one['vocab_size']:,} ids, {one['file_bytes'] / 1e6:.1f} MB"
            told = [_bit(methods.get(method)) for method in METHODS]
            rows.append([name, f"{share:.0%}", size, *told, f"{whole['bits_per_byte']:.3f}"])
            name = ""
    return table(["text, model", "merges kept", "", *METHODS.values(), "whole list"], rows)


def _cut(shares: dict[float, dict[str, Line]]) -> list[tuple[float, dict[str, Line]]]:
    """The shares below 1, rising, with their lines by method."""
    return [(share, methods) for share, methods in sorted(shares.items()) if share < 1]


def _bit(line: Line | None) -> str:
    return "" if line is None else f"{line['bits_per_byte']:.3f} ({line['change']:+.1%})"


def _saved(records: Records) -> str:
    rows = []
    for (text, _), shares in groups(records.lines("adapt_model")).items():
        whole = shares[1]["whole list"]
        name = f"{TEXTS.get(text, text)}, `{whole['model']}`"
        for share, methods in _cut(shares):
            told = [f"{methods[method]['utility']:.4f}" if method in methods else "" for method in METHODS]
            rows.append([name, f"{share:.0%}", *told, f"{whole['utility']:.4f}"])
            name = ""
    return table(["text, model", "merges kept", *METHODS.values(), "whole list"], rows)


def _where(records: Records) -> str:
    rows = []
    for (text, _), shares in groups(records.lines("adapt_model")).items():
        for share, methods in _cut(shares):
            line = methods.get("adapt")
            if line is not None and line["where"]:
                rows.append([TEXTS.get(text, text), f"{share:.0%}", *_told(line)])
    header = [
        "text",
        "merges kept",
        "text in split tokens",
        "their tokens",
        "bits per byte on them",
        "on all the others",
    ]
    return table(header, rows)


def _told(line: Line) -> list[str]:
    where, n_bytes = line["where"], line["test"]["bytes"]
    before, after = where["bits_per_byte_before"], where["bits_per_byte_after"]
    return [
        f"{where['split_bytes'] / n_bytes:.1%}",
        f"{where['tokens_before']:,} to {where['tokens_after']:,}",
        *(f"{before[side]:.3f} to {after[side]:.3f}" for side in ("split", "same")),
    ]


def _steps(records: Records) -> str:
    rows = []
    for line in records.lines("adapt_step"):
        model = f"`{line['model']['name']}`, {PRECISIONS.get(line['model']['precision'], line['model']['precision'])}"
        ratios = [_spread(line["ratio"][clock], 3) for clock in CLOCKS]
        of_bound = [f"{line['of_bound'][clock]:.2f}" for clock in CLOCKS]
        rows.append(
            [
                f"{model}, {line['vocab_size']:,} to {line['kept']:,}",
                f"{line['bound']:.1%}",
                *(cell for pair in zip(ratios, of_bound, strict=True) for cell in pair),
            ]
        )
    header = ["model, ids", "bytes of a step that go"]
    return table([*header, *(cell for clock in CLOCKS.values() for cell in (clock, "of the bound"))], rows)


def _over_top_k(records: Records) -> str:
    """Utility of the adapted list over that of the N most frequent merges, in points, by text and N."""
    lines = [line for line in records.lines("adaptbpe-wide") if line["what"] == "utility"]
    sizes = sorted({line["merges"] for line in lines})
    found: dict[tuple[str, str], dict[int, str]] = {}
    for line in lines:
        points = 100 * (line["utility"]["replay"] - line["utility"]["top_k"])
        found.setdefault((line["base"], line["text"]), {})[line["merges"]] = f"{points:+.2f}"
    rows = [[LISTS.get(base, base), TEXTS[text], *(row[n] for n in sizes)] for (base, text), row in found.items()]
    return table(["merge list", "text", *(f"N = {n:,}" for n in sizes)], rows)


TABLES: dict[str, Callable[[Records], str]] = {
    "adapt-utility": _utility,
    "adapt-over-top-k": _over_top_k,
    "adapt-speed": _speed,
    "adapt-bits": _bits,
    "adapt-saved": _saved,
    "adapt-where": _where,
    "adapt-steps": _steps,
    "adapt-machines": lambda records: machines(records, RECORDS),
}
PICTURES: dict[str, Callable[[Records], Figure]] = {"docs/reports/adaptbpe.svg": picture}
