"""Writes a checkpoint of random weights for the published zip2zip package, to be timed next to mlx_zip's shapes.

It needs torch and transformers, not MLX and not the package. Weights are made on the GPU if torch finds one. They are
those of `--shape` in other benches in all but their values: sizes, encoders, codebook.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mlx_zip.bench.engines.shape_table import SHAPES, ZipOptions, narrow
from mlx_zip.errors import MlxZipError, missing_library, reason
from mlx_zip.files import check_out, whole_folder
from mlx_zip.layout import Layout
from mlx_zip.text.tokenizers import load_tokenizer

DTYPES = {"16": "bfloat16", "float32": "float32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench checkpoint`."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write; it must not exist")
    add("--shape", choices=tuple(SHAPES), default="phi-3.5-mini", help="layer sizes (default: phi-3.5-mini)")
    add(
        "--precision",
        choices=tuple(DTYPES),
        default="16",
        help="number type of the weights: 16 is bfloat16 (default: 16)",
    )
    add("--tokenizer", default="stories", help="tokenizer to copy: folder or hub id (default: stories, bundled)")
    add("--rehearse", action="store_true", help="write the narrow shape of `bench nvidia --rehearse`")


def run(args: argparse.Namespace) -> int:
    """Writes the folder and prints its size. Raises `MlxZipError` for what cannot be written."""
    try:
        from .checkpoint_weights import write
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise missing_library("bench checkpoint", "torch", extra="cuda") from error
    config = narrow(SHAPES[args.shape]) if args.rehearse else SHAPES[args.shape]
    tokenizer = load_tokenizer(args.tokenizer)
    Layout(config["vocab_size"], 0, config["vocab_size"]).check_tokenizer(len(tokenizer))
    if args.out.exists():
        raise MlxZipError(f"--out {args.out} exists already")
    check_out(args.out)
    try:
        with whole_folder(args.out, replace=False) as partial:
            write(partial, config, ZipOptions(), tokenizer, DTYPES[args.precision])
    except OSError as error:
        raise MlxZipError(f"--out {args.out} cannot be written: {reason(error)}") from error
    size = sum(file.stat().st_size for file in args.out.iterdir())
    print(f"{args.out}: random weights of {args.shape}, {size / 1e6:.0f} MB", file=sys.stderr)
    return 0
