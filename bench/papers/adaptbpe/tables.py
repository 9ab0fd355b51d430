"""The tables and the picture of the AdaptBPE report, from the records of `adaptbpe` and `adapt_model`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mlx_zip.bench.plots import new_figure
from mlx_zip.bench.records import (
    Cell,
    Columns,
    Record,
    Records,
    column_table,
    machines_table,
    make_column_table,
    median_and_range,
    table,
)
from mlx_zip.errors import MlxZipError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


TEXTS = {
    "pubmedqa": "PubMedQA",
    "mbpp": "MBPP code",
    "ud_fr": "UD French",
    "ud_oc": "UD Occitan",
    "ud_tr": "UD Turkish",
    "ud_ar": "UD Arabic",
    "stories": "stories",
}
METHODS = {"first-k": "first-k", "top-k": "top-k", "adapt": "adapted"}


def group_adapted_models(lines: Sequence[Record]) -> dict[tuple[str, float], dict[float, dict[str, Record]]]:
    """Groups lines of `bench adapt_model` as result[text, file bytes of the whole model][share of merges][method].

    A whole model's line has share 1 and method "whole list", and precedes the lines of its adapted models.
    """
    found: dict[tuple[str, float], dict[float, dict[str, Record]]] = {}
    key = ("", 0.0)
    for line in lines:
        if line["method"] == "whole list":
            key = (line["text"], line["file_bytes"])
        found.setdefault(key, {}).setdefault(line["share"], {})[line["method"]] = line
    return found


RECORDS = ("adaptbpe", "adaptbpe-wide", "adapt_model")
LISTS = {"gpt2": "GPT-2", "cl100k_base": "cl100k"}
COLUMNS = {"first_k": "first-k", "top_k": "top-k", "replay": "adapted"}  # keys of `bench adaptbpe`


def lines_measuring(what: str, lines: Sequence[Record]) -> list[Record]:
    return [line for line in lines if line["what"] == what]


def utility_table(records: Records) -> str:
    rows, shown = [], ""
    for line in lines_measuring("utility", records.lines("adaptbpe")):
        first = line["text"] != shown
        shown = line["text"]
        found = bold_best([line["utility"][name] for name in COLUMNS])
        name = f"{TEXTS[shown]} ({line['train_bytes']:,} bytes)" if first else ""
        rows.append([name, str(line["merges"]), *found, f"{line['utility']['whole_list']:.4f}" if first else ""])
    return table(["text (adapted to)", "N", *COLUMNS.values(), "whole list"], rows)


def bold_best(values: Sequence[float]) -> list[str]:
    top = max(values)
    alone = sum(value == top for value in values) == 1
    return [f"**{value:.4f}**" if alone and value == top else f"{value:.4f}" for value in values]


def _speed_table(records: Records) -> str:
    lines = lines_measuring("encoding", records.lines("adaptbpe"))
    heads = {
        "tokenizers": "`tokenizers`",
        "whole_list": "whole list",
        "whole_list_fresh": "*fresh*",
        "adapted": f"adapted, N = {lines[0]['merges']}",
        "adapted_fresh": "*fresh*",
    }
    text: Cell = lambda line: f"{TEXTS[line['text']]} ({line['bytes']:,})"
    speeds = ((head, lambda line, way=way: median_and_range(line[way], 1)) for way, head in heads.items())
    return column_table(lines, (("text (bytes)", text), *speeds))


def _bits_table(records: Records) -> str:
    rows = []
    for (text, n_bytes), shares in group_adapted_models(records.lines("adapt_model")).items():
        whole = shares[1]["whole list"]
        name = f"{TEXTS.get(text, text)}, `{whole['model']}`: {whole['vocab_size']:,} ids, {n_bytes / 1e6:.1f} MB"
        for share, methods in _shares_below_1(shares):
            one = next(iter(methods.values()))
            size = f"{one['vocab_size']:,} ids, {one['file_bytes'] / 1e6:.1f} MB"
            bits = [_bits_cell(methods.get(method)) for method in METHODS]
            rows.append([name, f"{share:.0%}", size, *bits, f"{whole['bits_per_byte']:.3f}"])
            name = ""
    return table(["text, model", "merges kept", "", *METHODS.values(), "whole list"], rows)


def _shares_below_1(shares: dict[float, dict[str, Record]]) -> list[tuple[float, dict[str, Record]]]:
    return [(share, methods) for share, methods in sorted(shares.items()) if share < 1]


def _bits_cell(line: Record | None) -> str:
    return "" if line is None else f"{line['bits_per_byte']:.3f} ({line['change']:+.1%})"


def text_label(line: Record) -> str:
    name: str = line["text"]
    return TEXTS.get(name, name)


def adapted_lines(lines: Sequence[Record]) -> list[Record]:
    return [line for line in lines if line["method"] == "adapt" and line["where"]]


SPLIT_COLUMNS: Columns = (
    ("text", text_label),
    ("merges kept", "{share:.0%}"),
    ("text in split tokens", lambda line: f"{line['where']['split_bytes'] / line['test']['bytes']:.1%}"),
    ("their tokens", "{where[tokens_before]:,} to {where[tokens_after]:,}"),
    ("bits per byte on them", "{where[bits_per_byte_before][split]:.3f} to {where[bits_per_byte_after][split]:.3f}"),
    ("on all the others", "{where[bits_per_byte_before][same]:.3f} to {where[bits_per_byte_after][same]:.3f}"),
)


def _over_top_k_table(records: Records) -> str:
    """Returns the table of how much more the adapted list saves than the N most frequent merges, by text and N.

    Cells are differences of utility in percentage points.
    """
    lines = lines_measuring("utility", records.lines("adaptbpe-wide"))
    sizes = sorted({line["merges"] for line in lines})
    found: dict[tuple[str, str], dict[int, str]] = {}
    for line in lines:
        points = 100 * (line["utility"]["replay"] - line["utility"]["top_k"])
        found.setdefault((line["base"], line["text"]), {})[line["merges"]] = f"{points:+.2f}"
    rows = [[LISTS.get(base, base), TEXTS[text], *(row[n] for n in sizes)] for (base, text), row in found.items()]
    return table(["merge list", "text", *(f"N = {n:,}" for n in sizes)], rows)


# ---- the picture

PANELS = {"compression utility": "utility", "bits per byte": "bits_per_byte"}


def utility_and_bits_figure(records: Records) -> Figure:
    """Returns a figure of utility and of bits per byte by share of merges kept, a curve per method.

    It shows the first text and model in the record `adapt_model`. Raises `InstallationError` if matplotlib is missing,
    `MlxZipError` if the record has no lines.
    """
    found = group_adapted_models(records.lines("adapt_model"))
    if not found:
        raise MlxZipError("adapt_model.jsonl has no line to draw")
    (text, _), shares = next(iter(found.items()))
    figure = new_figure(8, 3)
    for panel, (label, key) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for method, name in METHODS.items():
            panel.plot(*curve_of_method(shares, method, key), marker=".", label=name)
        panel.set(xlabel="merges kept, %", ylabel=label)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(f"{shares[1]['whole list']['model']}, {TEXTS.get(text, text)}")
    return figure


def curve_of_method(shares: Any, method: str, key: str) -> tuple[list[float], list[float]]:
    """Returns the curve of a method: the percentages of merges kept, rising to 100, and the value of `key` at each.

    shares: share of merges kept -> method -> line, as in `group_adapted_models`.
    """
    points = [(100 * share, methods[method][key]) for share, methods in shares.items() if method in methods]
    points.append((100, shares[1]["whole list"][key]))
    x, y = zip(*sorted(points), strict=True)
    return list(x), list(y)


TABLES: dict[str, Callable[[Records], str]] = {
    "adapt-utility": utility_table,
    "adapt-over-top-k": _over_top_k_table,
    "adapt-speed": _speed_table,
    "adapt-bits": _bits_table,
    "adapt-where": make_column_table("adapt_model", SPLIT_COLUMNS, adapted_lines),
    "adapt-machines": lambda records: machines_table(records, RECORDS),
}
PICTURES: dict[str, Callable[[Records], Figure]] = {"docs/reports/adaptbpe.svg": utility_and_bits_figure}
