"""The flag --codebook of the commands that run models: packs of entries that exist before the first id."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlx_zip.errors import CodecError, GenerationError

if TYPE_CHECKING:
    from mlx_zip.vocab.packs import Pack


def add_flag(add: Any) -> None:
    """Declares --codebook, which may be given several times."""
    add("--codebook", "--start-codebook", dest="codebook", action="append", metavar="FILE",
        help="pack (.json, .npz, .npy) of entries that exist from the start, in place of the model's own; several are "
             "merged")  # fmt: skip


@dataclass(frozen=True)
class Packs:
    """The packs of the flag, by file name, and what they are merged into."""

    files: dict[str, Pack]
    merged: Pack


def read(args: argparse.Namespace) -> Packs | None:
    """The packs of the flag, None without any. Raises `DataError`."""
    if args.codebook is None:
        return None
    from mlx_zip.vocab.packs import load_pack, merge_packs

    files = {file: load_pack(file) for file in args.codebook}
    found = list(files.values())
    return Packs(files, merge_packs(found) if len(found) > 1 else found[0])


def check(packs: Packs, model: Any, tokenizer: Any) -> None:
    """Raises `GenerationError` or `DataError` naming the packs when they do not fit the model or its tokenizer."""
    name, entries = f"--codebook {' '.join(packs.files)}", packs.merged.entries
    _check_tokenizers(packs, tokenizer)
    if not hasattr(model, "layout"):
        return
    if len(entries) > (room := model.config.codebook_size):
        raise GenerationError(
            f"{name}: {len(entries)} entries, the model's codebook has {room} slots; make a smaller pack with "
            "`mlx_zip vocab pack merge --size`"
        )
    try:
        replace(model.config.codec_params, start=entries)
    except CodecError as error:
        raise GenerationError(f"{name} does not fit the model: {error}") from error


def _check_tokenizers(packs: Packs, tokenizer: Any) -> None:
    """Each pack on its own: merged with one of an unknown tokenizer, another's would no longer be told."""
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint

    if any(pack.tokenizer is not None for pack in packs.files.values()):
        mark = tokenizer_fingerprint(tokenizer)
        for file, pack in packs.files.items():
            pack.check_tokenizer(mark, file)
