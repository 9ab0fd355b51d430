"""`mlx_zip prepare`: turns texts, conversations and data sets into compressed samples to train on."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mlx_zip.arguments import add_pack_flag, add_separator_flag, add_trust_remote_code_flag
from mlx_zip.cli.actions import DATA_HELP, add_tokenizer_flag
from mlx_zip.errors import DataError
from mlx_zip.files import expand_home
from mlx_zip.progress import pluralize

_MOST_WORKERS = 8
_DATA_ONLY_FLAGS = ("separator", "columns", "subset", "split")  # flags for --data alone: a mixture sets them per source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `prepare`."""
    add_source_flags(parser)
    add_codec_flags(parser)
    add = parser.add_argument
    add("--out", required=True, help="folder to write; one that the same command left unfinished is completed")
    add("--context", type=int, default=1024, help="maximum base ids per sample (default: 1024)")
    add_pack_flag(
        add,
        "pack (.json, .npz or .npy) whose entries the codebook begins with (default: the model's own pack, if it has "
        "one)",
    )
    add(
        "--empty-start",
        action="store_true",
        help="begin codebooks without entries, even if the model has a pack of its own (default: off)",
    )
    add(
        "--start-draw",
        type=int,
        metavar="K",
        help="begin each sample with K entries drawn at random from --pack (default: with all its entries)",
    )
    add(
        "--fill-windows",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="put several records into one sample until it is full (default: yes for documents, no for conversations)",
    )
    add(
        "--train-on",
        choices=("answers", "all"),
        default="answers",
        help="what the loss counts in conversations; answers: assistant turns and completions, all: everything "
        "(default: answers)",
    )
    add("--limit", type=int, metavar="N", help="write at most N samples (default: no limit)")
    add(
        "--max-skipped",
        type=int,
        default=100,
        metavar="N",
        help="skip at most N invalid records, then fail (default: 100)",
    )
    add(
        "--shard-samples",
        type=int,
        default=1024,
        metavar="N",
        help="approximate number of samples per shard, the unit of work and of files (default: 1024)",
    )
    add("--seed", type=int, default=0, help="random seed of the entries that --start-draw draws (default: 0)")
    add("--workers", type=int, help=f"number of worker processes (default: one per core, at most {_MOST_WORKERS})")


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that name a tokenizer and texts; `make_sources` turns the latter into sources."""
    add = parser.add_argument
    add(
        "--model",
        help="model folder, bundled model or hub id; gives the tokenizer and, if it is a zip2zip model, the codec",
    )
    add_tokenizer_flag(add, "tokenizer to use instead of --model")
    add_text_flags(parser)


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags that name texts; `make_sources` turns them into sources."""
    add = parser.add_argument
    add_trust_remote_code_flag(add)
    add(
        "--data",
        nargs="+",
        metavar="NAME",
        help=f"texts to read: {DATA_HELP}",
    )
    add(
        "--mixture",
        metavar="FILE",
        help="instead of --data: a .yaml file that lists sources and their shares, or the word zip2zip for the zip2zip "
        "paper's mixture",
    )
    add_separator_flag(add)
    add_columns_flag(add)
    add(
        "--subset",
        nargs="+",
        default=[],
        help="subsets of a data set to read, one row of each in turn (default: its default subset)",
    )
    add("--split", help="split of a data set to read (default: train)")


def add_columns_flag(add: Any) -> None:
    """Declares --columns, whose values `parse_columns` reads."""
    add(
        "--columns",
        nargs="+",
        default=[],
        metavar="FIELD=COLUMN",
        help="columns whose names differ from those of the fields text, messages, prompt, completion and tools: "
        "text=content reads the text from the column content (default: each column has its field's name)",
    )


def add_codec_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the codec; if --model is a zip2zip model, their defaults are the model's values."""
    add = parser.add_argument
    add(
        "--merge-size", type=int, help="maximum base ids per hypertoken; 1: no hypertokens (default: the model's, or 3)"
    )
    add(
        "--codebook-size",
        type=int,
        help="maximum number of hypertokens in a codebook; 0: none (default: the model's, or 2048)",
    )
    add(
        "--protect",
        action="append",
        default=[],
        metavar="WHAT",
        help="further ids that never become part of a hypertoken: the word digits, or ids separated by commas; may be "
        "repeated (default: none)",
    )
    add(
        "--disable",
        metavar="IDS",
        help="ids that never become part of a hypertoken, separated by commas (default: the model's own list, "
        "else the special tokens)",
    )


def run(args: argparse.Namespace) -> int:
    """Prepares the data and prints a summary. Returns the exit status 0. Raises `MlxZipError`."""
    from mlx_zip.training.prepare.preparation import prepare_data

    if not args.out:
        raise DataError("--out is empty: name the folder to write")
    if args.pack is not None and len(args.pack) > 1:
        raise DataError("prepare takes one --pack: merge several first with `mlx_zip vocab pack merge`")
    pack = None if args.pack is None else Path(args.pack[0])
    options = make_prepare_options(args, out=expand_home(args.out), pack=pack)
    workers = args.workers if args.workers is not None else min(_MOST_WORKERS, os.cpu_count() or 1)
    print(format_prepared_summary(args.out, prepare_data(options, workers, progress=True)))
    return 0


def make_prepare_options(args: argparse.Namespace, **changed: Any) -> Any:
    """Returns the flags in `args` as `PrepareOptions`; `changed` takes precedence. Raises `DataError`."""
    from mlx_zip.training.prepare.plan import PrepareOptions

    options = {one.name: getattr(args, one.name) for one in fields(PrepareOptions) if hasattr(args, one.name)}
    options |= {
        "sources": make_sources(args),
        "disable": _parse_disabled_ids(getattr(args, "disable", None)),
        "protect": tuple(getattr(args, "protect", ())),
    }
    return PrepareOptions(**options | changed)


def make_sources(args: argparse.Namespace) -> tuple[Any, ...]:
    """Returns the sources of text that --data or --mixture names. Raises `DataError` if flags contradict each other."""
    from mlx_zip.text.sources import Source
    from mlx_zip.training.prepare.mixture import load_mixture

    if (args.data is None) == (args.mixture is None):
        raise DataError("name either --data or --mixture")
    if args.mixture is not None:
        if given := [f"--{name}" for name in _DATA_ONLY_FLAGS if getattr(args, name)]:
            raise DataError(f"{', '.join(given)} cannot go with --mixture, whose sources set them one by one")
        return load_mixture(args.mixture)
    _check_data_set_flags(args)
    columns = parse_columns(args.columns)
    return (Source(tuple(args.data), 1.0, args.separator, columns, tuple(args.subset), args.split or "train"),)


def make_similar_source(names: Sequence[str], like: Any) -> Any:
    """Returns texts as a source with the separator, columns, subsets and split of the source `like`.

    names: files, folders or data sets. Raises `DataError` if one of them does not exist.
    """
    source = replace(like, data=tuple(names), share=1.0, revision=None)
    source.check()
    return source


def _check_data_set_flags(args: argparse.Namespace) -> None:
    from mlx_zip.text.sources import is_read_from_files

    given = [f"--{name}" for name in ("subset", "split") if getattr(args, name)]
    if given and all(is_read_from_files(name) for name in args.data):
        raise DataError(f"{', '.join(given)}: of data sets only, and --data {' '.join(args.data)} names none")


def parse_columns(given: Sequence[str]) -> dict[str, str]:
    """Returns field -> column for the values of --columns.

    Raises `DataError` if a value does not have the form FIELD=COLUMN, or a field is given twice.
    """
    columns: dict[str, str] = {}
    for text in given:
        field, equals, column = text.partition("=")
        if not (field and equals and column):
            raise DataError(f"--columns {text!r} is not of the form FIELD=COLUMN")
        if field in columns:
            raise DataError(f"--columns gives the field {field!r} two columns: {columns[field]} and {column}")
        columns[field] = column
    return columns


def _parse_disabled_ids(text: str | None) -> tuple[int, ...] | None:
    """Returns the ids in a value of --disable, None for None. Raises `DataError` if the value is not a list of ids."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isdecimal() and len(part) < 12 for part in parts):
        raise DataError(f"--disable {text!r} is not a list of ids with commas between")
    return tuple(map(int, parts))


def format_prepared_summary(out: str, index: dict[str, Any]) -> str:
    """Returns a summary of the prepared data in a few lines. out: its folder. index: what `prepare_data` returned."""
    totals, skipped = index["totals"], index["skipped"]
    per_id = totals["base_ids"] / totals["ids"]
    lines = [
        f"{pluralize(totals['samples'], 'sample')} in {pluralize(len(index['shards']), 'shard')}: {out}",
        f"{pluralize(totals['base_ids'], 'base id')} -> {pluralize(totals['ids'], 'id')} ({per_id:.3f} per id), "
        f"{pluralize(totals['bytes'], 'byte')} of text",
        f"{pluralize(index['records'], 'record')}: {index['windowed']:,} longer than the context, "
        + ", ".join(f"{n:,} {kind}" for kind, n in sorted(skipped.items())),
    ]
    if len(index["sources"]) > 1:
        lines += [f"{source['share']:7.2%}  {', '.join(source['data'])}" for source in index["sources"]]
    return "\n".join(lines)
