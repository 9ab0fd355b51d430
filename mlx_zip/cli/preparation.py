"""`mlx_zip prepare`: text, conversations and data sets to shards of compressed samples, ready to train on."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError
from mlx_zip.flags import add_pack

_MOST_WORKERS = 8
_OF_DATA = ("separator", "columns", "subset", "split")  # flags that a mixture sets per source
_SAME_NAME = (
    "model",
    "tokenizer",
    "context",
    "merge_size",
    "codebook_size",
    "own_start",
    "start_draw",
    "train_on",
    "shard_samples",
    "seed",
    "limit",
    "max_skipped",
    "trust_remote_code",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add_source_flags(parser)
    add_codec_flags(parser)
    add = parser.add_argument
    add("--out", required=True, help="folder to write; one left by an interrupted run is completed")
    add("--context", type=int, default=1024, help="base ids of a sample at most (default: 1024)")
    add_pack(
        add,
        "pack (.json, .npz or .npy) whose entries the codebook begins with (default: the model's pack, if any)",
        aliases=["--start"],
        filled_windows=True,
    )
    add(
        "--no-start",
        dest="own_start",
        action="store_false",
        help="begin without entries where the model begins with some",
    )
    add("--start-draw", type=int, metavar="K", help="draw K entries of --pack anew for each sample")
    add(
        "--fill-windows",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="fill samples with several records (default: yes for documents, no for conversations)",
    )
    add(
        "--train-on",
        choices=("answers", "all"),
        default="answers",
        help="what the loss counts of conversations and completions (default: answers)",
    )
    add("--limit", type=int, metavar="N", help="samples at most")
    add("--max-skipped", type=int, default=100, metavar="N", help="more wrong records are an error (default: 100)")
    add("--shard-samples", type=int, default=1024, metavar="N", help="about so many samples a shard (default: 1024)")
    add("--seed", type=int, default=0, help="seed of --start-draw (default: 0)")
    add("--workers", type=int, help=f"processes (default: one per core, at most {_MOST_WORKERS})")


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that name a tokenizer and texts; `sources` reads the latter."""
    add = parser.add_argument
    add("--model", help="model folder, bundled model or hub id: its tokenizer, and its codec if it is a zip2zip model")
    add("--tokenizer", help="instead of --model: folder, tokenizer.json, bundled model or hub id")
    add_text_flags(parser)


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that name texts; `sources` reads them."""
    add = parser.add_argument
    add("--trust-remote-code", action="store_true", help="let the tokenizer run code of its own")
    add(
        "--data",
        nargs="+",
        metavar="NAME",
        help=".txt or .jsonl files (or with .gz), .parquet files, folders or hub names of data sets",
    )
    add("--mixture", metavar="FILE", help="instead of --data: a .yaml file of sources with shares, or zip2zip")
    add("--separator", help="a line that ends a document within a .txt file (default: a file is one document)")
    add(
        "--columns",
        nargs="+",
        default=[],
        metavar="KEY=NAME",
        help="what records call text, messages, prompt, completion or tools, as text=content",
    )
    add("--subset", nargs="+", default=[], help="subsets of a data set, read in turn")
    add("--split", help="split of a data set (default: train)")


def add_codec_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that set the codec where a model does not."""
    add = parser.add_argument
    add("--merge-size", type=int, help="base ids per hypertoken at most (default: 3, or the model's); 1: no codebook")
    add("--codebook-size", type=int, help="hypertokens at most (default: 2048, or the model's); 0: no codebook")
    add(
        "--protect",
        action="append",
        default=[],
        metavar="WHAT",
        help="ids that never merge, beside the others: digits, or a list with commas; may be repeated",
    )
    add("--disable", metavar="IDS", help="ids that never merge, with commas (default: special tokens, or the model's)")


def run(args: argparse.Namespace) -> int:
    """Prepares and prints a summary; 0. Raises `MlxZipError`."""
    from mlx_zip.training.prepare import PrepareOptions, prepare

    options = PrepareOptions(
        sources=sources(args),
        out=Path(args.out),
        disable=disabled_ids(args),
        protect=tuple(args.protect),
        start=_one_pack(args.pack),
        pack=args.fill_windows,
        **{name: getattr(args, name) for name in _SAME_NAME},
    )
    workers = args.workers if args.workers is not None else min(_MOST_WORKERS, os.cpu_count() or 1)
    print(summary(args.out, prepare(options, workers, progress=True)))
    return 0


def _one_pack(files: list[str] | None) -> Path | None:
    if files is not None and len(files) > 1:
        raise DataError("prepare takes one --pack: merge several first with `mlx_zip vocab pack merge`")
    return None if files is None else Path(files[0])


def sources(args: argparse.Namespace) -> tuple[Any, ...]:
    """The sources that the flags name. Raises `DataError`."""
    from mlx_zip.text.sources import Source
    from mlx_zip.training.mixture import load_mixture

    if (args.data is None) == (args.mixture is None):
        raise DataError("name either --data or --mixture")
    if args.mixture is not None:
        if given := [f"--{name}" for name in _OF_DATA if getattr(args, name)]:
            raise DataError(f"{', '.join(given)} cannot go with --mixture: each of its sources says so itself")
        return load_mixture(args.mixture)
    columns = dict(_column(text) for text in args.columns)
    return (Source(tuple(args.data), 1.0, args.separator, columns, tuple(args.subset), args.split or "train"),)


def _column(text: str) -> tuple[str, str]:
    key, equals, name = text.partition("=")
    if not (key and equals and name):
        raise DataError(f"--columns {text!r} is not of the form KEY=NAME")
    return key, name


def disabled_ids(args: argparse.Namespace) -> tuple[int, ...] | None:
    """The ids of --disable; None where it is not given. Raises `DataError`."""
    return None if args.disable is None else _ids(args.disable)


def _ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isdecimal() and len(part) < 12 for part in parts):
        raise DataError(f"--disable {text!r} is not a list of ids with commas between")
    return tuple(map(int, parts))


def summary(out: str, index: dict[str, Any]) -> str:
    """What was prepared, in a few lines."""
    totals, skipped = index["totals"], index["skipped"]
    lines = [
        f"{totals['samples']} samples in {len(index['shards'])} shards: {out}",
        f"{totals['base_ids']} base ids -> {totals['ids']} ids ({totals['base_ids'] / totals['ids']:.3f} per id), "
        f"{totals['bytes']} bytes of text",
        f"{index['records']} records: {index['windowed']} longer than the context, "
        + ", ".join(f"{n} {kind}" for kind, n in sorted(skipped.items())),
    ]
    if len(index["sources"]) > 1:
        lines += [f"{source['share']:7.2%}  {', '.join(source['data'])}" for source in index["sources"]]
    return "\n".join(lines)
