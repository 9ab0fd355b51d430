"""What codebook packs cost: strict bits per byte against base ids per id, compared with the base and an empty start.

Each document is scored on its own, every model and pack on the same ones. A zip2zip model's figure is of the canonical
ids, each predicted from what stands before it alone, so that it compares with the base's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlx_zip.bench.plots import save
from mlx_zip.bench.record import surroundings
from mlx_zip.errors import MlxZipError
from mlx_zip.evaluation.bits import Bits, compare_bits, measure_bits
from mlx_zip.evaluation.windows import cut_windows
from mlx_zip.text.documents import read_corpus
from mlx_zip.vocab.first_stage import tokenizer_fingerprint
from mlx_zip.vocab.packs import Pack, load_pack

from .figure import picture

CONTEXT = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench pack_quality`."""
    add = parser.add_argument
    add_models(add)
    add("--data", nargs="+", metavar="FILE", help="held-out documents, as `mlx_zip evaluate --data`")
    add("--separator", help="line that ends a document of a text file (default: a file is one document)")
    add("--limit-bytes", type=int, metavar="N", help="bytes of text at most, whole documents (default: all)")
    add(
        "--pack",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="packs to measure, each with the name of its curve in the picture",
    )
    add("--batch-size", type=int, default=8, help="rows scored at a time (default: 8)")
    add(
        "--draw", nargs=2, type=Path, metavar=("RECORD", "PNG"), help="draws a record as a picture; nothing is measured"
    )


def add_models(add: Any, required: bool = False) -> None:
    """Declares the flags of a model, of its base, and of what a record calls them."""
    add("--model", required=required, help="zip2zip model that takes the packs")
    add("--base", required=required, help="plain model of the same tokenizer that it is compared with")
    add("--model-name", help="name in the record (default: the folder's)")
    add("--base-name", help="name in the record (default: the folder's)")


def names_of(args: argparse.Namespace) -> dict[str, str]:
    """Names of the texts and the models in a record."""
    names = {name: getattr(args, f"{name}_name") or Path(getattr(args, name)).name for name in ("model", "base")}
    return {"data": " ".join(Path(name).name for name in args.data), **names}


def run(args: argparse.Namespace) -> int:
    """Prints one JSON line per start, or draws a record. Raises `MlxZipError` before anything long."""
    if args.draw:
        save(picture(_read(args.draw[0])), args.draw[1])
        return 0
    if missing := [name for name in ("model", "base", "data") if getattr(args, name) is None]:
        raise MlxZipError(f"--{missing[0]} is missing")
    for line in measure(args):
        print(json.dumps(line), flush=True)
    return 0


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a record of the empty start, then one per pack, in the order given."""
    from mlx_zip.generate import load

    packs = read_packs(args.pack)
    (model, tokenizer), (base, base_tokenizer) = load(args.model), load(args.base)
    check_packs(packs, model, tokenizer)
    corpus = read_corpus(args.data, args.separator, args.limit_bytes)
    windows = cut_windows(tokenizer, corpus.documents, CONTEXT)
    if not windows.same_as(cut_windows(base_tokenizer, corpus.documents, CONTEXT)):
        raise MlxZipError(f"{args.base} has another tokenizer than {args.model}: their windows are not the same text")
    control = measure_bits(base, windows, args.batch_size)
    empty = measure_bits(model, windows, args.batch_size, start=())
    fixed = {
        "bench": "pack_quality",
        **names_of(args),
        "documents": len(corpus.documents),
        "base_bits_per_byte": control.bits_per_byte,
    }
    for curve, file, pack in [("empty", None, None), *packs]:
        bits = empty if pack is None else measure_bits(model, windows, args.batch_size, start=pack.start)
        entries = 0 if pack is None else len(pack.entries)
        print(f"{curve} {entries}: {bits.bits_per_byte:.4f} bits/byte", file=sys.stderr)
        yield {
            **fixed,
            "curve": curve,
            "pack": file,
            "entries": entries,
            **scored(bits, control, empty),
            **surroundings("mlx"),
        }


def scored(bits: Bits, control: Bits, empty: Bits) -> dict[str, Any]:
    """Returns the bits with a pack, and their ratios to the base's and to those of an empty start."""
    record = bits.record()
    names = ("bytes", "bits_per_byte", "bits_per_byte_standard_error", "base_ids_per_id")
    over = {"over_base": compare_bits(bits, control), "over_empty": compare_bits(bits, empty)}
    relative = {name: compared["bits_per_byte_relative"] for name, compared in over.items()}
    return {**{name: record[name] for name in names}, **relative}


Named = tuple[str, str, Pack]  # the name of its curve, its file's, and a pack


def read_packs(words: Sequence[str]) -> list[Named]:
    """Reads the packs of --pack. Raises `MlxZipError`."""
    named = [_split(word) for word in words]
    return [(curve, Path(file).name, load_pack(file)) for curve, file in named]


def _split(word: str) -> tuple[str, str]:
    name, is_there, file = word.partition("=")
    if not (name and is_there and file):
        raise MlxZipError(f"--pack takes NAME=FILE, not {word!r}")
    return name, file


def check_packs(packs: Sequence[Named], model: Any, tokenizer: Any) -> None:
    """Raises `DataError` or `CodecError` for a pack of another tokenizer, and for one that the model cannot take."""
    for _, file, pack in packs:
        pack.check_tokenizer(tokenizer_fingerprint(tokenizer), file)
        model.make_cache(pack=pack)  # refuses what does not fit


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, ValueError) as error:
        raise MlxZipError(f"{path} cannot be read as a record: {error}") from error
    if not lines:
        raise MlxZipError(f"{path} is empty: there is nothing to draw")
    return lines
