"""`mlx_zip export`: writes an mlx_zip model as a zip2zip checkpoint for PyTorch."""

from __future__ import annotations

import argparse

from mlx_zip.converters.cli import warnings_on_stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags; imports nothing heavy."""
    add = parser.add_argument
    add("--model", required=True, help="mlx_zip model to export: a folder, hub id or bundled model")
    add("--out", default="zip2zip_model", help="folder to write; it must not exist yet (default: %(default)s)")
    add("--save-path", dest="out", default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # --out's old name
    add("--dtype", choices=["float16", "bfloat16", "float32"], help="type of the stored tensors (default: the model's)")
    add("--drop-start", action="store_true", help="export without the model's pack, which the format cannot hold")
    add("--trust-remote-code", action="store_true", help="run and copy Python code that comes with the tokenizer")


def run(args: argparse.Namespace) -> int:
    """Exports and prints the folder's path. Raises `MlxZipError`."""
    from mlx_zip.converters.export import export

    with warnings_on_stderr():
        print(export(args.model, args.out, args.dtype, args.drop_start, args.trust_remote_code))
    return 0
