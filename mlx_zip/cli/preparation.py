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
    "empty_start",
    "fill_windows",
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
    add("--out", required=True, help="folder to write; a folder that the same command left unfinished is completed")
    add("--context", type=int, default=1024, help="maximum length of a sample in base ids (default: 1024)")
    add_pack(
        add,
        "pack (.json, .npz or .npy) whose entries the codebook begins with (default: the model's pack, if any)",
        aliases=["--start"],
        filled_windows=True,
    )
    add(
        "--empty-start",
        action="store_true",
        help="begin codebooks without entries although the model has a pack of its own (default: off)",
    )
    add("--no-start", dest="empty_start", action="store_true", help=argparse.SUPPRESS)
    add(
        "--start-draw",
        type=int,
        metavar="K",
        help="number of entries of --pack that are drawn anew for each sample (default: all entries, no drawing)",
    )
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
        help="what the loss counts; answers: assistant turns and completions, all: everything (default: answers)",
    )
    add("--limit", type=int, metavar="N", help="maximum number of samples (default: no limit)")
    add(
        "--max-skipped",
        type=int,
        default=100,
        metavar="N",
        help="maximum number of wrong records that are skipped (default: 100)",
    )
    add(
        "--shard-samples",
        type=int,
        default=1024,
        metavar="N",
        help="approximate number of samples per shard (default: 1024)",
    )
    add("--seed", type=int, default=0, help="seed of the entries that --start-draw draws (default: 0)")
    add("--workers", type=int, help=f"number of processes (default: one per core, at most {_MOST_WORKERS})")


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that name a tokenizer and texts; `sources` reads the latter."""
    add = parser.add_argument
    add(
        "--model",
        help="model folder, bundled model or hub id, whose tokenizer is used and, of a zip2zip model, its codec",
    )
    add("--tokenizer", help="tokenizer in place of a --model: folder, tokenizer.json, bundled model or hub id")
    add_text_flags(parser)


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that name texts; `sources` reads them."""
    add = parser.add_argument
    add("--trust-remote-code", action="store_true", help="let the tokenizer run code of its own (default: off)")
    add(
        "--data",
        nargs="+",
        metavar="NAME",
        help="texts: .txt, .jsonl and source files such as .py (all also .gz), .parquet files, folders of source "
        "files, and folders or hub names of data sets",
    )
    add(
        "--mixture",
        metavar="FILE",
        help="texts in place of --data: a .yaml file of sources with shares, or zip2zip for the paper's",
    )
    add("--separator", help="a line that ends a document within a .txt file (default: a file is one document)")
    add(
        "--columns",
        nargs="+",
        default=[],
        metavar="KEY=NAME",
        help="names of the records' columns where they are not text, messages, prompt, completion and tools, for "
        "example text=content",
    )
    add(
        "--subset",
        nargs="+",
        default=[],
        help="subsets of a data set, of which rows are read in turn (default: its default subset)",
    )
    add("--split", help="split of a data set (default: train)")


def add_codec_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that set the codec where a model does not."""
    add = parser.add_argument
    add(
        "--merge-size", type=int, help="maximum base ids per hypertoken; 1: no hypertokens (default: the model's, or 3)"
    )
    add("--codebook-size", type=int, help="maximum number of hypertokens; 0: none (default: the model's, or 2048)")
    add(
        "--protect",
        action="append",
        default=[],
        metavar="WHAT",
        help="more ids that never merge: digits, or ids separated by commas; may be repeated (default: none)",
    )
    add(
        "--disable",
        metavar="IDS",
        help="ids that never merge, separated by commas (default: the model's, or the special tokens)",
    )


def run(args: argparse.Namespace) -> int:
    """Prepares and prints a summary; 0. Raises `MlxZipError`."""
    from mlx_zip.training.prepare import PrepareOptions, prepare

    options = PrepareOptions(
        sources=sources(args),
        out=Path(args.out),
        disable=disabled_ids(args),
        protect=tuple(args.protect),
        pack=_one_pack(args.pack),
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
