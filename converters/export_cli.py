"""`mlx_zip export`: writes an mlx_zip model as a zip2zip checkpoint for PyTorch."""

from __future__ import annotations

import argparse

from mlx_zip.converters.cli import warnings_on_stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags; imports nothing heavy."""
    add = parser.add_argument
    add("--model", required=True, help="mlx_zip model to export: folder, hub id or bundled model")
    add("--out", default="zip2zip_model", help="folder to write; it must not exist yet (default: %(default)s)")
    add(
        "--dtype",
        choices=["float16", "bfloat16", "float32"],
        help="type of the tensors to write (default: that of the model's embedding)",
    )
    add(
        "--drop-start",
        action="store_true",
        help="leave out the model's pack, which zip2zip's format cannot hold (default: a model with a pack is refused)",
    )
    add(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the tokenizer, and copy it to the output (default: off)",
    )


def run(args: argparse.Namespace) -> int:
    """Exports the model and prints the path of the written folder; returns 0. Raises `MlxZipError` on failure."""
    from mlx_zip.converters.export import export

    with warnings_on_stderr():
        print(export(args.model, args.out, args.dtype, args.drop_start, args.trust_remote_code))
    return 0
