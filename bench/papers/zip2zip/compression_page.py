"""The page docs/compression.md: recorded counts, latencies and FLOPs beside the paper's tables 2, 7 and 9, figure 4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mlx_zip.bench.flops import TRAINED, record
from mlx_zip.files import whole_file

from . import compression_words as words
from .ablation_page import markdown
from .ablation_results import PAPER_RATES
from .codec_figure import added
from .compression_results import (
    DOMAINS,
    PHI_35,
    RATE_WINDOW,
    RECORDS,
    TABLE_2,
    Counts,
    Line,
    Printed,
    domain_of,
    printed_of,
    read_lines,
)

CLOSE = 0.03  # of the paper's gain: within 3 points
PICTURE = "compression-figure4.png"


def write_page(path: Path, records: Sequence[Path] | None = None) -> None:
    """Writes the page, whole or not at all, from files of records. Raises `MlxZipError` for one that cannot be used."""
    lines = [line for file in records or RECORDS for line in read_lines(file)]
    text = page(lines, picture=(path.parent / PICTURE).exists())
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def page(lines: Sequence[Line], picture: bool) -> str:
    """The page's text. picture: whether the drawn figure 4 lies beside it."""
    counts = Counts(lines)
    parts = [words.HEAD, words.TABLE_2, *_table2(counts)]
    if answers := "\n".join(f"- {sentence}" for sentence in _answers(counts)):
        parts += ["### The paper's gains for code", answers]
    parts += _codebooks(counts)
    parts += ["## Table 7: compression rate", words.TABLE_7, _table7(counts)]
    parts += ["## Table 9 and appendix B: FLOPs", words.TABLE_9, _table9(lines), *_our_flops(counts)]
    parts += ["## Figure 4: latency", words.FIGURE_4, _figure4([line for line in lines if line["bench"] == "codec"])]
    parts += [f"![Latency by bytes of text]({PICTURE})"] if picture else []
    parts += ["## Where and why we differ", words.WHY, "## The texts", words.TEXTS, _texts(counts), words.RERUN]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


# ---- table 2


def _table2(counts: Counts) -> Iterator[str]:
    for tokenizer in counts.tokenizers:
        paper = printed_of(tokenizer)
        size = next(line["tokenizer"]["size"] for key, line in counts.lines.items() if key[0] == tokenizer)
        yield f"### {tokenizer}: {size:,} base ids" + (f" ({paper.name} in the paper)" if paper else "")
        windows = [f"{window:,} ids" if isinstance(window, int) else "documents" for window in counts.windows]
        theirs = ["paper: base", "paper: with"] if paper else []
        rows = [["text", "base", *windows, *theirs]]
        for text in counts.texts:
            if (base := counts.base(tokenizer, text)) is not None:
                cells = [_cell(base, counts.rate(tokenizer, text, window)) for window in counts.windows]
                rows.append([text, f"{base:.2f}", *cells, *(_printed(paper, domain_of(text)) if paper else [])])
        yield markdown(rows)
    missing = [row for row in TABLE_2 if row.ours not in counts.tokenizers]
    if missing:
        yield "### Of the paper, not measured here"
        rows = [["tokenizer", *DOMAINS]]
        for row in missing:
            rows.append([row.name, *(f"{value:.1f}" for value in row.base)])
            rows.append(["with hypertokens", *(_printed(row, domain)[1] for domain in DOMAINS)])
        yield markdown(rows)


def _cell(base: float, rate: float | None) -> str:
    return "-" if rate is None else f"{base / rate:.2f} ({1 / rate - 1:+.1%})"


def _printed(paper: Printed, domain: str) -> list[str]:
    gain = paper.gain(domain)
    if gain is None:
        return ["-", "-"]
    i = DOMAINS.index(domain)
    return [f"{paper.base[i]:.1f}", f"{paper.compressed[i]:.1f} ({gain:+.0%})"]


def _answers(counts: Counts) -> Iterator[str]:
    """A sentence for each tokenizer and text of code: which windows give the paper's gain."""
    for tokenizer in counts.tokenizers:
        paper = printed_of(tokenizer)
        gain = paper.gain("code") if paper else None
        if paper is None or gain is None:
            continue
        low, high = paper.bounds("code")
        yield (
            f"{paper.name}: the paper has {gain:+.0%}; its numbers have one decimal, which leaves {low:+.1%} to "
            f"{high:+.1%} open."
        )
        texts = [text for text in counts.texts if domain_of(text) == "code"]
        if len(texts) > 1:
            rates = {window: counts.of_domain(tokenizer, "code", window) for window in counts.windows}
            yield from _answer(f"{tokenizer} on all of them, each counting alike", rates, gain)
        for text in texts:
            rates = {window: counts.rate(tokenizer, text, window) for window in counts.windows}
            yield from _answer(f"{tokenizer} on {text}", rates, gain)


def _answer(what: str, rates: Mapping[int | str, float | None], gain: float) -> Iterator[str]:
    gains = {window: 1 / rate - 1 for window, rate in rates.items() if rate}
    if not gains:
        return
    close = [window for window, ours in gains.items() if abs(ours - gain) <= CLOSE]
    best = min(gains, key=lambda window: abs(gains[window] - gain))
    found = ", ".join(f"{_window(window)} ({gains[window]:+.1%})" for window in close)
    nearest = f"none; {_window(best)} come nearest, {100 * (gains[best] - gain):+.1f} points"
    yield f"{what}: within {100 * CLOSE:.0f} points of it: {found or nearest}."


def _window(window: int | str) -> str:
    return f"windows of {window:,}" if isinstance(window, int) else "whole documents"


def _codebooks(counts: Counts) -> Iterator[str]:
    """Gains by codebook size, for the tokenizers of which several were measured."""
    sizes = {key[0]: _sizes(line) for key, line in counts.lines.items()}
    for tokenizer, found in sizes.items():
        if len(found) < 2:
            continue
        yield f"### Codebook size: {tokenizer}"
        windows = [window for window in counts.windows if isinstance(window, str) or window > min(found)]
        rows = [["text", *(f"{_window(window)}, {size:,} slots" for window in windows for size in found)]]
        for text in counts.texts:
            rates = [counts.rate(tokenizer, text, window, size=size) for window in windows for size in found]
            rows.append([text, *("-" if rate is None else f"{1 / rate - 1:+.1%}" for rate in rates)])
        yield markdown(rows)


def _sizes(line: Line) -> list[int]:
    return sorted({row[line["columns"].index("codebook_size")] for row in line["counts"]})


# ---- tables 7 and 9, figure 4


def _table7(counts: Counts) -> str:
    tokenizer = PHI_35 if PHI_35 in counts.tokenizers else next(iter(counts.tokenizers), None)
    rows = [["M", *counts.texts, "mixture", "paper"]]
    for m, paper in PAPER_RATES.items():
        if m == 1:
            ours: list[float | None] = [1.0] * (len(counts.texts) + 1)
        else:
            ours = [counts.rate(tokenizer or "", text, RATE_WINDOW, merge_size=m) for text in counts.texts]
            ours.append(counts.mixed(tokenizer or "", RATE_WINDOW, "ids", merge_size=m))
        rows.append([str(m), *("-" if rate is None else f"{100 * rate:.2f}" for rate in ours), f"{paper:.2f}"])
    return f"Base ids of {tokenizer}; per cent.\n\n{markdown(rows)}"


_FLOPS_HEAD = ["model", "L", "M", "l", "α", "paper: α", "ρ(1 + α)", "rows per id", "α by rows", "ρ(1 + α) by rows"]


def _table9(lines: Sequence[Line]) -> str:
    return markdown([_FLOPS_HEAD, *(_flops(line) for line in lines if line["bench"] == "flops")])


def _flops(line: Line) -> list[str]:
    paper = line["paper_overhead"]
    return [
        line["model"],
        str(line["layers"]),
        str(line["merge_size"]),
        str(line["encoder_layers"]),
        f"{line['overhead']:.4f}",
        "-" if paper is None else f"{paper:.2f}",
        f"{line['relative_flops']:.3f}",
        f"{line['rows_per_id']:.2f}",
        f"{line['counted_overhead']:.4f}",
        f"{line['counted_relative_flops']:.3f}",
    ]


def _our_flops(counts: Counts) -> Iterator[str]:
    """The models of the paper's experiments at our mixture's rate and rows."""
    found = [counts.mixed(PHI_35, RATE_WINDOW, column) for column in ("ids", "entries", "entries_used")]
    rate, entries, used = (value or 0.0 for value in found)
    if not rate:
        return
    yield (
        f"With our mixture of table 7, ρ = {rate:.4f}. Per id {entries / rate:.2f} entries are installed, whose "
        f"output rows are encoded, and {used / rate:.2f} are read, whose input rows are encoded."
    )
    yield markdown([_FLOPS_HEAD, *(_flops(record(shape, rate, (entries + used) / rate)) for shape in TRAINED)])


def _figure4(lines: Sequence[Line]) -> str:
    rows = [
        [
            "tokenizer",
            "library",
            "bytes",
            "tokenizer alone, ms",
            "with mlx_zip, ms",
            "with zip2zip-compression, ms",
            "added by mlx_zip",
            "added by zip2zip-compression",
        ]
    ]
    for line in lines:
        names = ("with_ours", "with_upstream")
        more = [f"{median(added(line, name)):+.1f}%" if line[name] else "-" for name in names]
        times = [_ms(line[name]) for name in ("tokenizer", *names)]
        rows.append([line["data"].split("; ")[-1], line["setting"]["library"], f"{line['bytes']:,}", *times, *more])
    if not lines:
        return "No run is recorded."
    machines = ", ".join(sorted({line["machine"] for line in lines}))
    loads = [line["load_average"] for line in lines]
    return f"{markdown(rows)}\n\nMachine: {machines}; load average {min(loads)} to {max(loads)}."


def _ms(times: dict[str, Any] | None) -> str:
    if times is None:
        return "-"
    middle, low, high = (f"{times[name] / 1e3:.2f}" for name in ("median", "min", "max"))
    return f"{middle} ({low} to {high})"


# ---- the texts


def _texts(counts: Counts) -> str:
    rows = [["text", "files", "documents", "bytes"]]
    for text in counts.texts:
        found = next(line["text"] for key, line in counts.lines.items() if key[1] == text)
        cut = ", the first of them" if found["cut_by_limit"] else ""
        rows.append([text, ", ".join(found["files"]), f"{found['documents']:,}{cut}", f"{found['bytes']:,}"])
    checked = sorted({str(line["checked_against"]) for line in counts.lines.values() if line["checked_against"]})
    all_checked = all(line["checked_against"] for line in counts.lines.values()) and counts.lines
    told = f"The ids of every window of these counts are {' and '.join(checked)}'s." if all_checked else ""
    return "\n\n".join(part for part in (markdown(rows), told) if part)
