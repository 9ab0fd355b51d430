"""The paper's figure 4: latency of a tokenizer alone, with our codec and with the published codec, by bytes of text.

Each trial times the tokenizer and both codecs on one text; the time with a codec is the sum of tokenizer and codec.
Both codecs get the list of ids that the tokenizer returns, and one codebook is used for the whole text. Source: arXiv
2506.01084, §3.6, figure 4, which has no printed numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mlx_zip.arguments import check_flags_at_least, default_flags
from mlx_zip.bench.codec import MERGE_SIZE, WINDOW, mean_call_seconds, upstream, upstream_sizes
from mlx_zip.bench.plots import new_figure
from mlx_zip.bench.recording import load_before_bench, run_in_turns, summarize_samples
from mlx_zip.codec import CodecParams, compress
from mlx_zip.errors import MlxZipError
from mlx_zip.text.documents import read_corpus
from mlx_zip.text.vocabularies import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = tuple(10**n for n in range(3, 8))  # bytes
CURVES = {"tokenizer": "tokenizer alone", "with_ours": "with mlx_zip", "with_upstream": "with zip2zip-compression"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench codec_latency` to a parser."""
    add = parser.add_argument
    flag = default_flags(add)
    add("--text", nargs="+", metavar="FILE", help="texts to tokenize and compress, .txt or .jsonl")
    add("--tokenizer", help="tokenizer of --text: a folder, a hub id or a vocabulary file")
    flag("--trials", 9, "timed calls per measurement")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times the tokenizer alone and with each codec; yields a record for each of `SIZES` up to the text's size.

    Raises `MlxZipError` if a flag or file cannot be used, before anything is measured.
    """
    check_flags_at_least(args, 1, "trials")
    load_before_bench()
    if args.text is None or args.tokenizer is None:
        raise MlxZipError("codec_latency needs --text and --tokenizer")
    corpus = read_corpus(args.text)
    text = "\n".join(document.text for document in corpus.documents).encode("utf-8")
    sizes = [size for size in SIZES if size <= len(text)]
    if not sizes:
        raise MlxZipError(f"--text holds {len(text)} bytes; the smallest size is {SIZES[0]}")
    if len(sizes) < len(SIZES):
        print(f"--text holds {len(text):,} bytes: sizes up to {sizes[-1]:,} are measured", file=sys.stderr)
    vocabulary = read_vocabulary(args.tokenizer)
    names = ", ".join(Path(name).name for name in corpus.files)
    for size in sizes:
        line = measure_latency(vocabulary, text[:size].decode("utf-8", "ignore"), args.trials)
        yield {"bench": "codec", **line, "data": f"{names}; {vocabulary.name}"}


def measure_latency(vocabulary: Vocabulary, text: str, trials: int) -> dict[str, Any]:
    """Returns the record of one text: microseconds of the tokenizer alone, with our codec and with the published codec.

    The times with the published codec are None if that codec is not installed.
    """
    params = CodecParams(vocabulary.size + 1, WINDOW, MERGE_SIZE, pad_id=vocabulary.size)
    theirs = upstream and upstream.LZWCompressor(*upstream_sizes(params))
    ids = list(vocabulary.encode(text))
    calls: dict[str, Callable[[], Any]] = {
        "tokenizer": lambda: vocabulary.encode(text),
        "with_ours": lambda: compress(params, ids),
        **({"with_upstream": lambda: theirs.encode(ids)} if theirs else {}),
    }
    ways = {name: lambda trial, call=call: mean_call_seconds(call) * 1e6 for name, call in calls.items()}
    found = run_in_turns(ways, trials)
    alone = found.pop("tokenizer")
    samples = {"tokenizer": alone}
    samples |= {name: [a + b for a, b in zip(alone, added, strict=True)] for name, added in found.items()}
    return {
        "what": "figure4",
        "unit": "us per text",
        "bytes": len(text.encode("utf-8")),
        "base_ids": len(ids),
        "ids": len(compress(params, ids)[0]),
        **{name: summarize_samples(samples[name]) if name in samples else None for name in CURVES},
        "setting": {
            "codebook_size": WINDOW,
            "merge_size": MERGE_SIZE,
            "library": vocabulary.library,
            "trials": trials,
        },
    }


def latency_figure(lines: Sequence[dict[str, Any]]) -> Figure:
    """Returns a figure with two panels: the latencies, and what each codec adds, of the first line's tokenizer.

    Points are medians; bars reach from minimum to maximum.
    """
    lines = [line for line in lines if line["data"] == lines[0]["data"]]
    figure = new_figure()
    latency_panel, added_panel = figure.subplots(1, 2)
    for i, (name, label) in enumerate(CURVES.items()):
        found = [line for line in lines if line[name]]
        if not found:
            continue
        sizes = [line["bytes"] for line in found]
        draw_points(latency_panel, sizes, [[x / 1e3 for x in line[name]["samples"]] for line in found], i, label)
        if name != "tokenizer":
            draw_points(added_panel, sizes, [added_latency_percent(line, name) for line in found], i, label)
    latency_panel.set(xscale="log", yscale="log", xlabel="bytes of text", ylabel="ms")
    added_panel.set(xscale="log", ylim=(0, None), xlabel="bytes of text", ylabel="added to the tokenizer's time, %")
    for panel in (latency_panel, added_panel):
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(lines[0]["data"].split("; ")[-1])
    return figure


def added_latency_percent(line: dict[str, Any], name: str) -> list[float]:
    """Returns the time that a codec adds in each trial, in percent of the tokenizer's time.

    name: "with_ours" or "with_upstream".
    """
    pairs = zip(line["tokenizer"]["samples"], line[name]["samples"], strict=True)
    return [100 * (total / alone - 1) for alone, total in pairs]


def draw_points(panel: Any, sizes: Sequence[int], samples: Sequence[Sequence[float]], color: int, label: str) -> None:
    middle = [median(values) for values in samples]
    low = [m - min(values) for m, values in zip(middle, samples, strict=True)]
    high = [max(values) - m for m, values in zip(middle, samples, strict=True)]
    panel.errorbar(sizes, middle, [low, high], color=f"C{color}", marker="o", capsize=3, label=label)
