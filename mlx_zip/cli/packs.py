"""The flag --codebook of the commands that run models: packs of entries that exist before the first id."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlx_zip.errors import CodecError, GenerationError

if TYPE_CHECKING:
    from mlx_zip.vocab.packs import Pack


def add_flag(add: Any) -> None:
    """Declares --codebook, which may be given several times."""
    add("--codebook", "--start-codebook", dest="codebook", action="append", metavar="FILE",
        help="pack (.json, .npz, .npy) of entries that exist from the start, in place of the model's own; several are "
             "merged")  # fmt: skip


def read(args: argparse.Namespace) -> Pack | None:
    """The packs of the flag as one, None without any. Raises `DataError`."""
    if args.codebook is None:
        return None
    from mlx_zip.vocab.packs import load_pack, merge_packs

    return merge_packs([load_pack(file) for file in args.codebook])


def check(args: argparse.Namespace, pack: Pack, model: Any, tokenizer: Any) -> None:
    """Raises `GenerationError` or `DataError` naming the packs when they do not fit the model or its tokenizer."""
    name = f"--codebook {' '.join(args.codebook)}"
    if pack.tokenizer is not None:
        from mlx_zip.training.encoding import fingerprint

        pack.check_tokenizer(fingerprint(tokenizer), name)
    try:
        if hasattr(model, "layout"):
            replace(model.config.codec_params, start=pack.entries)
    except CodecError as error:
        raise GenerationError(f"{name} does not fit the model: {error}") from error
