"""Measures strict bits per byte and base ids per id with codebook packs, compared with the base model and with no pack.

Each document is scored separately, the same documents with every model and pack. A zip2zip model's bits are those of
the canonical ids, each predicted only from the preceding ids, so that they are comparable with the base model's bits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlx_zip.arguments import add_limit_bytes_flag, add_separator_flag, default_flags
from mlx_zip.errors import MlxZipError
from mlx_zip.evaluation.bits import compare_bits, cut_scored_windows, measure_bits
from mlx_zip.packs.pack import Pack, load_pack
from mlx_zip.text.documents import read_corpus

CONTEXT = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench pack_quality` to a parser."""
    add = parser.add_argument
    flag = default_flags(add)
    add_models(add)
    add("--data", nargs="+", metavar="FILE", help="held-out texts to score: .txt or .jsonl files, also with .gz")
    add_separator_flag(add)
    add_limit_bytes_flag(add, "--data")
    add(
        "--pack",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="pack files to measure; packs of the same NAME form one curve of the plot (default: no pack only)",
    )
    flag("--batch-size", 8, "windows per model call")


def add_models(add: Any, required: bool = False) -> None:
    """Adds the flags --model and --base. add: a parser's add_argument. required: whether both flags must be given."""
    add("--model", required=required, help="zip2zip model to measure with packs: a folder or a bundled model's name")
    add(
        "--base",
        required=required,
        help="plain model with the same tokenizer to compare --model with: a folder or a bundled model's name",
    )


def record_names(args: argparse.Namespace) -> dict[str, str]:
    """Returns the names of texts, model and base model for a record."""
    names = {"model": Path(args.model).name, "base": Path(args.base).name}
    return {"data": " ".join(Path(name).name for name in args.data), **names}


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Scores the documents; yields the record of the model without a pack, then one per pack in the order given.

    Raises `MlxZipError` if a flag or file cannot be used, before anything is measured.
    """
    if missing := [name for name in ("model", "base", "data") if getattr(args, name) is None]:
        raise MlxZipError(f"--{missing[0]} is missing")
    from mlx_zip.engine.mlx.generate import load

    packs = read_packs(args.pack)
    (model, tokenizer), (base, base_tokenizer) = load(args.model), load(args.base)
    check_packs(packs, model, tokenizer)
    corpus = read_corpus(args.data, args.separator, args.limit_bytes)
    windows = cut_scored_windows(tokenizer, corpus.documents, CONTEXT)
    if not windows.same_as(cut_scored_windows(base_tokenizer, corpus.documents, CONTEXT)):
        raise MlxZipError(f"{args.base} has another tokenizer than {args.model}: their windows are not the same text")
    fixed = {"bench": "pack_quality", **record_names(args), "documents": len(corpus.documents)}
    for _, line in score_packs(model, base, windows, packs, args.batch_size):
        print(f"{line['curve']} {line['entries']}: {line['bits_per_byte']:.4f} bits/byte", file=sys.stderr)
        yield {**fixed, **line}


Named = tuple[str, str | None, Pack]  # name of the curve, name of the file, pack


def score_packs(
    model: Any, base: Any, windows: Any, packs: Sequence[Named], batch_size: int
) -> Iterator[tuple[Pack, dict[str, Any]]]:
    """Yields no pack and then each of `packs`, with fields of its record.

    The fields are names, bits and rates of the model with the pack, bits of the base model, and the relative changes of
    bits per byte from the base model and from no pack.
    """
    control, empty = measure_bits(base, windows, batch_size), measure_bits(model, windows, batch_size, pack=Pack(()))
    for curve, file, pack in [("empty", None, Pack(())), *packs]:
        bits = measure_bits(model, windows, batch_size, pack=pack) if len(pack) else empty
        record = bits.record()
        names = ("bytes", "bits_per_byte", "bits_per_byte_standard_error", "base_ids_per_id")
        over = {"over_base": compare_bits(bits, control), "over_empty": compare_bits(bits, empty)}
        line = {"base_bits_per_byte": control.bits_per_byte, "curve": curve, "pack": file, "entries": len(pack.entries)}
        line |= {name: record[name] for name in names}
        yield pack, line | {name: compared["bits_per_byte_relative"] for name, compared in over.items()}


def read_packs(words: Sequence[str]) -> list[Named]:
    """Reads the packs of --pack. Raises `MlxZipError` if a word is not NAME=FILE or a file cannot be read."""
    named = [split_name_and_file(word) for word in words]
    return [(curve, Path(file).name, load_pack(file)) for curve, file in named]


def split_name_and_file(word: str) -> tuple[str, str]:
    name, is_there, file = word.partition("=")
    if not (name and is_there and file):
        raise MlxZipError(f"--pack takes NAME=FILE, not {word!r}")
    return name, file


def check_packs(packs: Sequence[Named], model: Any, tokenizer: Any) -> None:
    """Raises `DataError` if a pack is for another tokenizer, `CodecError` if a pack does not fit the model."""
    for _, file, pack in packs:
        pack.check_made_for(tokenizer, file)
        model.make_cache(pack=pack)  # raises an error if the pack does not fit
