"""Counts bytes per token with and without compression: tokenizers x domains x merge size x window x codebook size.

The ids of a domain's documents are concatenated and cut into windows, each with its own codebook; "document" is one
window per document, whatever its length. Every byte of text counts once. Nothing is timed: the counts depend only on
text, tokenizer and codec. Source: arXiv 2506.01084, table 2, and the rates of table 7.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.arguments import add_limit_bytes_flag, check_flags_at_least, default_flags
from mlx_zip.codec import CodecParams, compress
from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import DataError, MlxZipError, missing_library_error
from mlx_zip.text.documents import Corpus, read_corpus
from mlx_zip.text.formats import KINDS
from mlx_zip.text.vocabularies import Vocabulary, read_vocabulary

from .codec import upstream_sizes

WHOLE = "document"  # value of --windows: each document is one window
COLUMNS = ["window", "merge_size", "codebook_size", "ids", "entries", "entries_used"]  # columns of `counts`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench tokens`."""
    add = parser.add_argument
    flag = default_flags(add)
    add("--tokenizers", type=Path, nargs="+", default=[], metavar="FILE", help=f"vocabulary files to compare: {KINDS}")
    add(
        "--text",
        nargs="+",
        default=[],
        metavar="DOMAIN=FILE",
        help="text file of a domain (.txt or .jsonl, each also .gz); several files of a domain are joined; fields of a "
        ".jsonl line to read follow the file's name (default: text), for example math=FILE:question+answer",
    )
    add_limit_bytes_flag(add, "each domain's text")
    flag("--merge-sizes", [2, 3, 4, 5], "maximum base ids per hypertoken; every value is measured", metavar="M")
    flag(
        "--windows",
        ["1024", "2048", "4096", "8192", WHOLE],
        f"base ids per window, or {WHOLE} for one window per document",
        metavar="N",
    )
    flag(
        "--codebook-sizes",
        [2048],
        "maximum number of hypertokens; of the values that a window cannot fill only the smallest is measured",
        metavar="N",
    )
    add(
        "--check",
        action="store_true",
        help="stop with an error if zip2zip-compression, which must be installed, gives other ids for a window",
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a record per tokenizer and domain. Raises `MlxZipError` if a flag or file cannot be used."""
    windows = check_flags(args)
    upstream = import_upstream() if args.check else None
    corpora = read_domains(args.text, args.limit_bytes)
    vocabularies = [read_vocabulary(path) for path in args.tokenizers]
    for vocabulary in vocabularies:
        for domain, corpus in corpora.items():
            settings = list(distinct_settings(windows, args.merge_sizes, args.codebook_sizes))
            line = count_corpus(vocabulary, corpus, settings, upstream)
            yield {"bench": "tokens", "domain": domain, **line}
            print(f"{vocabulary.name}, {domain}: {len(settings)} settings", file=sys.stderr)


def check_flags(args: argparse.Namespace) -> list[int | None]:
    """Checks the flags and returns the windows, None for whole documents. Raises `MlxZipError` if a flag is invalid."""
    for name in ("tokenizers", "text"):
        if not getattr(args, name):
            raise MlxZipError(f"--{name} is missing")
    check_flags_at_least(args, 1, "merge_sizes", "codebook_sizes")
    if wrong := [w for w in args.windows if w != WHOLE and not re.fullmatch("[1-9][0-9]{0,8}", w)]:
        raise MlxZipError(f"--windows: {wrong[0]!r} is neither a number of ids nor {WHOLE!r}")
    for codebook_size in args.codebook_sizes:  # the codec's own bounds, before any text is read
        for merge_size in args.merge_sizes:
            CodecParams(1, codebook_size, merge_size)
    return [None if w == WHOLE else int(w) for w in dict.fromkeys(args.windows)]


def distinct_settings(
    windows: Sequence[int | None], merge_sizes: Sequence[int], codebook_sizes: Sequence[int]
) -> Iterator[Any]:
    """Yields (window, merge size, codebook size); of the sizes that a window cannot fill, only the smallest."""
    sizes = sorted(set(codebook_sizes))
    for window in windows:
        fillable = [size for size in sizes if window is None or size < window]
        for merge_size in dict.fromkeys(merge_sizes):
            yield from ((window, merge_size, size) for size in sizes[: len(fillable) + 1])


# ---- texts


def read_domains(
    texts: Sequence[str], limit_bytes: int | None = None, separator: str | None = None
) -> dict[str, Corpus]:
    """Reads documents by domain, from arguments `DOMAIN=FILE[:FIELD[+FIELD]]`, at most `limit_bytes` of each domain.

    separator: a line that ends a document in a text file. Raises `DataError` if an argument or a file is invalid.
    """
    files: dict[str, list[str]] = {}
    columns: dict[str, dict[str, str]] = {}
    for text in texts:
        domain, equals, rest = text.partition("=")
        name, _, fields = rest.partition(":")
        if not (domain and equals and name):
            raise DataError(f"--text {text!r} is not of the form DOMAIN=FILE or DOMAIN=FILE:FIELD+FIELD")
        files.setdefault(domain, []).append(name)
        if columns.setdefault(domain, parse_columns(text, fields)) != parse_columns(text, fields):
            raise DataError(f"--text {text!r}: the files of a domain have the same fields; give it a domain of its own")
    return {domain: read_corpus(names, separator, limit_bytes, columns[domain]) for domain, names in files.items()}


def parse_columns(argument: str, fields: str) -> dict[str, str]:
    names = fields.split("+") if fields else []
    if len(names) > 2 or not all(names):
        raise DataError(f"--text {argument!r}: one field or two with + between")
    keys = ("prompt", "completion") if len(names) == 2 else ("text",)
    return dict(zip(keys, names, strict=False))


def corpus_record(corpus: Corpus) -> dict[str, Any]:
    """Returns the record of a corpus, with the names of its files instead of their paths."""
    return {**corpus.record(), "files": [Path(name).name for name in corpus.files]}


# ---- counts


def count_corpus(
    vocabulary: Vocabulary,
    corpus: Corpus,
    settings: Sequence[Any],
    upstream: Any = None,
) -> dict[str, Any]:
    """Returns the number of base ids of a corpus, and its counts under each setting, as rows of `COLUMNS`.

    settings: (window, None for whole documents; merge size; codebook size). In the rows, `entries` counts installed
    entries and `entries_used` those emitted at least once. upstream: the module
    zip2zip_compression, to compare its ids with ours, or None. Raises `MlxZipError` if ids differ, and `DataError` if
    the corpus has no ids.
    """
    documents = [np.array(vocabulary.encode(document.text), np.uint32) for document in corpus.documents]
    stream = np.concatenate(documents)
    if not len(stream):
        raise DataError(f"{corpus.files[0]}: {vocabulary.name} reads no ids in it")
    counts = []
    for window, merge_size, codebook_size in settings:
        pieces = documents if window is None else [stream[i : i + window] for i in range(0, len(stream), window)]
        # the codec's vocabulary has one more id than the tokenizer: a pad id that occurs in no text
        params = CodecParams(vocabulary.size + 1, codebook_size, merge_size, pad_id=vocabulary.size)
        counted = count_pieces(params, pieces)
        counts.append([window or WHOLE, merge_size, codebook_size, *counted])
        if upstream is not None:
            check_against_upstream(params, pieces, upstream)
    base = len(stream)
    return {
        "tokenizer": {"name": vocabulary.name, "size": vocabulary.size, "library": vocabulary.library},
        "text": corpus_record(corpus),
        "base_ids": base,
        "bytes_per_base_id": round(corpus.n_bytes / base, 4),
        "columns": COLUMNS,
        "counts": counts,
        "checked_against": f"zip2zip_compression {version('zip2zip_compression')}" if upstream is not None else None,
    }


def count_pieces(params: CodecParams, pieces: Sequence[Uint32s]) -> tuple[int, int, int]:
    ids = entries = used = 0
    for piece in pieces:
        emitted, installed = compress(params, piece)
        ids += len(emitted)
        entries += len(installed)
        used += len(np.unique(emitted[emitted >= params.vocab_size]))
    return ids, entries, used


def check_against_upstream(params: CodecParams, pieces: Sequence[Uint32s], upstream: Any) -> None:
    theirs = upstream.LZWCompressor(*upstream_sizes(params))
    for n, piece in enumerate(pieces):
        if compress(params, piece)[0].tolist() != list(theirs.encode(piece.tolist())[0]):
            raise MlxZipError(f"window {n} of {len(pieces)} at {params}: zip2zip-compression gives other ids")


def import_upstream() -> Any:
    try:
        import zip2zip_compression
    except ImportError as error:
        raise missing_library_error("--check", "zip2zip-compression") from error
    return zip2zip_compression
