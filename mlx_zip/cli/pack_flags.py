"""The flags --pack and --codebook-size of the commands that run models."""

from __future__ import annotations

import argparse
from typing import Any

from mlx_zip.arguments import add_pack
from mlx_zip.models.folders import is_plain
from mlx_zip.packs import chosen as chosen_packs
from mlx_zip.packs.chosen import Packs, check, record

__all__ = ["Packs", "add_flags", "check", "is_plain", "load_options", "read", "record"]


def add_flags(add: Any) -> None:
    """Declares --pack (see `mlx_zip.arguments.add_pack`) and --codebook-size."""
    add_pack(add)
    add(
        "--codebook-size",
        type=int,
        metavar="N",
        help="maximum number of hypertokens, the pack's entries included (default: the model's)",
    )


def read(args: argparse.Namespace) -> Packs | None:
    """Reads the packs that --pack names; None without the flag. Raises `DataError` naming a file that is no pack."""
    return chosen_packs.read_packs(args.pack)


def load_options(args: argparse.Namespace, packs: Packs | None, plain: bool) -> dict[str, Any]:
    """Returns the arguments `pack` and `codebook_size` of `mlx_zip.load`; see `chosen_packs.load_options`.

    packs: those of `read`. plain: whether the model has no hypertokens of its own.
    """
    return chosen_packs.load_options(packs, args.codebook_size, plain)
