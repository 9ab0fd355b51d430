"""The flags --codebook and --codebook-size of the commands that run models: packs, and how much may grow beside."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlx_zip.errors import CodecError, GenerationError
from mlx_zip.layout import is_zip

if TYPE_CHECKING:
    from mlx_zip.vocab.packs import Pack


def add_flag(add: Any) -> None:
    """Declares --codebook, which may be given several times, and --codebook-size."""
    add(
        "--codebook",
        "--start-codebook",
        dest="codebook",
        action="append",
        metavar="FILE",
        help="pack (.json, .npz, .npy) of entries that exist from the start, in place of the model's own; several are "
        "merged; a plain model takes one that was tuned for it",
    )
    add(
        "--codebook-size",
        type=int,
        metavar="N",
        help="hypertokens at most, the pack's and those that grow (default: as the model's config says)",
    )


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


def load_options(args: argparse.Namespace, packs: Packs | None, plain: bool) -> dict[str, Any]:
    """What `load` needs to know of them: a pack with rows, and a size. plain: whether the model is no zip2zip one.

    Without rows the requests bring the pack; then a zip2zip model's own entries are out of its way.
    """
    from mlx_zip.vocab.packs import Pack

    pack = None if packs is None else packs.merged
    if pack is not None and pack.rows is None:
        pack = None if plain else Pack(())
    return {"pack": pack, "codebook_size": None if plain else args.codebook_size}


def is_plain(name: str, revision: str | None = None) -> bool:
    """Whether a model is no zip2zip one, by its config. Raises `ModelError`."""
    from mlx_zip.loading import model_folder, read_config
    from mlx_zip.register import MODEL_TYPE

    return read_config(model_folder(name, revision))["model_type"] != MODEL_TYPE


def record(packs: Packs | None, model: Any) -> dict[str, Any]:
    """What a record says of a zip2zip model's codebook: its slots, and the pack in them, the flag's or a tuned one of
    the model's own.
    """
    if not is_zip(model):
        return {}
    own = model.session.pack
    mark = own and own.pack if packs is None else packs.merged.fingerprint
    return {"codebook_size": model.layout.codebook_size, "codebook_fingerprint": mark}


def check(packs: Packs, model: Any, tokenizer: Any) -> None:
    """Raises `GenerationError` or `DataError` naming the packs when they do not fit the model or its tokenizer."""
    name, entries = f"--codebook {' '.join(packs.files)}", packs.merged.entries
    _check_tokenizers(packs, tokenizer)
    if not is_zip(model):
        return
    if len(entries) > (room := model.config.codebook_size):
        raise GenerationError(
            f"{name}: {len(entries)} entries, the model's codebook has {room} slots; give it more (--codebook-size), "
            "or make a smaller pack with `mlx_zip vocab pack merge --size`"
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
