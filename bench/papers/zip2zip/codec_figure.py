"""The paper's figure 4: latency of a tokenizer alone, with our codec and with the published one, by bytes of text.

Tokenizer and codecs run in turn on the same text; what is drawn is their sum within a trial. Both codecs get the list
of ids a tokenizer gives, and one codebook follows the whole text. Source: arXiv 2506.01084, §3.6, figure 4, which has
no numbers in print.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mlx_zip.bench.codec import MERGE_SIZE, WINDOW, seconds, upstream
from mlx_zip.bench.record import summary
from mlx_zip.bench.tokens import read_domains
from mlx_zip.bench.vocabularies import Vocabulary, named_vocabulary
from mlx_zip.codec import CodecParams, compress
from mlx_zip.errors import MlxZipError, missing_library
from mlx_zip.files import whole_file

SIZES = tuple(10**n for n in range(3, 8))  # bytes
CURVES = {"tokenizer": "tokenizer alone", "with_ours": "with mlx_zip", "with_upstream": "with zip2zip-compression"}


def measure_figure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line per size up to the text's. Raises `MlxZipError` before any measurement."""
    new_figure()  # matplotlib is missed now rather than at the end
    if args.text is None or args.tokenizer is None:
        raise MlxZipError("--figure4 needs --text and --tokenizer")
    corpus = read_domains([f"text={name}" for name in args.text])["text"]
    text = "\n".join(document.text for document in corpus.documents).encode("utf-8")
    sizes = [size for size in SIZES if size <= len(text)]
    if not sizes:
        raise MlxZipError(f"--text holds {len(text)} bytes; the smallest size is {SIZES[0]}")
    if len(sizes) < len(SIZES):
        print(f"--text holds {len(text):,} bytes: sizes up to {sizes[-1]:,} are measured", file=sys.stderr)
    vocabulary = named_vocabulary(args.tokenizer)
    names = ", ".join(Path(name).name for name in corpus.files)
    for size in sizes:
        line = latency(vocabulary, text[:size].decode("utf-8", "ignore"), args.trials)
        yield {**line, "data": f"{names}; {vocabulary.name}"}


def latency(vocabulary: Vocabulary, text: str, trials: int) -> dict[str, Any]:
    """Microseconds of one text, trial by trial: tokenizer, and its sum with either codec; null where it is missing."""
    pad_id = vocabulary.size
    params = CodecParams(pad_id + 1, WINDOW, MERGE_SIZE, pad_id=pad_id)
    theirs = upstream and upstream.LZWCompressor(pad_id + 1, WINDOW, MERGE_SIZE, pad_id, [pad_id])
    ids = list(vocabulary.encode(text))
    samples: dict[str, list[float]] = {name: [] for name in CURVES}
    for trial in range(trials + 1):  # the first one warms up
        alone = seconds(lambda: vocabulary.encode(text)) * 1e6
        ours = seconds(lambda: compress(params, ids)) * 1e6
        other = seconds(lambda: theirs.encode(ids)) * 1e6 if theirs else 0.0
        if trial:
            for name, sample in zip(CURVES, (alone, alone + ours, alone + other), strict=True):
                samples[name].append(sample)
    if not theirs:
        samples["with_upstream"] = []
    return {
        "what": "figure4",
        "unit": "us per text",
        "bytes": len(text.encode("utf-8")),
        "base_ids": len(ids),
        "ids": len(compress(params, ids)[0]),
        **{name: summary(values) if values else None for name, values in samples.items()},
        "setting": {"codebook_size": WINDOW, "merge_size": MERGE_SIZE, "library": vocabulary.library},
        "load_average": round(os.getloadavg()[0], 1),
    }


def draw_figure(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """The lines of one tokenizer as PNG, at `path` whole or not at all: latency, and what each codec adds to it.

    Points are medians, bars least and greatest.
    """
    figure = new_figure()
    latency_panel, added_panel = figure.subplots(1, 2)
    for i, (name, label) in enumerate(CURVES.items()):
        found = [line for line in lines if line[name]]
        if not found:
            continue
        sizes = [line["bytes"] for line in found]
        _points(latency_panel, sizes, [[x / 1e3 for x in line[name]["samples"]] for line in found], i, label)
        if name != "tokenizer":
            _points(added_panel, sizes, [added(line, name) for line in found], i, label)
    latency_panel.set(xscale="log", yscale="log", xlabel="bytes of text", ylabel="ms")
    added_panel.set(xscale="log", ylim=(0, None), xlabel="bytes of text", ylabel="added to the tokenizer's time, %")
    for panel in (latency_panel, added_panel):
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(lines[0]["data"].split("; ")[-1])
    with whole_file(path) as partial:
        figure.savefig(partial, dpi=120, format="png")


def added(line: dict[str, Any], name: str) -> list[float]:
    """What a codec adds to the tokenizer's time in each trial, in per cent."""
    pairs = zip(line["tokenizer"]["samples"], line[name]["samples"], strict=True)
    return [100 * (both / alone - 1) for alone, both in pairs]


def _points(panel: Any, sizes: Sequence[int], samples: Sequence[Sequence[float]], color: int, label: str) -> None:
    middle = [median(values) for values in samples]
    low = [m - min(values) for m, values in zip(middle, samples, strict=True)]
    high = [max(values) - m for m, values in zip(middle, samples, strict=True)]
    panel.errorbar(sizes, middle, [low, high], color=f"C{color}", marker="o", capsize=3, label=label)


def new_figure() -> Any:
    """A figure without a window. Raises `InstallationError` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_library("the figure", "matplotlib", extra="bench") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
