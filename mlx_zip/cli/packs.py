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

    found = [load_pack(file) for file in args.codebook]
    return merge_packs(found) if len(found) > 1 else found[0]


def check(args: argparse.Namespace, pack: Pack, model: Any, tokenizer: Any) -> None:
    """Raises `GenerationError` or `DataError` naming the packs when they do not fit the model or its tokenizer."""
    name = f"--codebook {' '.join(args.codebook)}"
    _check_tokenizers(args, tokenizer)
    room = model.config.codebook_size if hasattr(model, "layout") else len(pack.entries)
    if len(pack.entries) > room:
        raise GenerationError(
            f"{name}: {len(pack.entries)} entries, the model's codebook has {room} slots; make a smaller pack with "
            "`mlx_zip vocab pack merge --size`"
        )
    try:
        if hasattr(model, "layout"):
            replace(model.config.codec_params, start=pack.entries)
    except CodecError as error:
        raise GenerationError(f"{name} does not fit the model: {error}") from error


def _check_tokenizers(args: argparse.Namespace, tokenizer: Any) -> None:
    """Each pack on its own: merged with one of an unknown tokenizer, another's would no longer be told."""
    from mlx_zip.training.encoding import fingerprint
    from mlx_zip.vocab.packs import load_pack

    found = [(file, load_pack(file)) for file in args.codebook]
    if any(pack.tokenizer is not None for _, pack in found):
        mark = fingerprint(tokenizer)
        for file, pack in found:
            pack.check_tokenizer(mark, file)
