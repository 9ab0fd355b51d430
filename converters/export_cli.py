"""`mlx_zip export`: the way back to PyTorch; flags named as in `mlx_lm.fuse` and `mlx_lm.convert`."""

from __future__ import annotations

import argparse

from mlx_zip.converters.cli import warnings_on_stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags; imports nothing heavy."""
    add = parser.add_argument
    add("--model", required=True, help="mlx_zip model: a folder or a Hugging Face hub id.")
    add("--save-path", default="zip2zip_model", help="Folder to write; it must not exist. Default: %(default)s.")
    add("--dtype", choices=["float16", "bfloat16", "float32"], help="Type to store. Default: the model's.")
    add("--drop-start", action="store_true", help="Leave out the model's starting codebook, which cannot be expressed.")
    add("--trust-remote-code", action="store_true", help="Run and copy the tokenizer's own code.")


def run(args: argparse.Namespace) -> int:
    """Exports and prints the folder's path. Raises `MlxZipError`."""
    from mlx_zip.converters.export import export

    with warnings_on_stderr():
        print(export(args.model, args.save_path, args.dtype, args.drop_start, args.trust_remote_code))
    return 0
