"""The packs that a command or a call begins with: read, merged, checked against a model, and recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from mlx_zip.errors import CodecError, GenerationError
from mlx_zip.layout import is_zip

if TYPE_CHECKING:
    from mlx_zip.vocab.packs import Pack, PackLike


@dataclass(frozen=True)
class Packs:
    """The packs of --pack by file name, and the one pack that they are merged into."""

    files: dict[str, Pack]
    merged: Pack


def read_packs(packs: PackLike | Sequence[PackLike] | None) -> Packs | None:
    """Returns one pack or several, each a path or a `Pack`, with their merger; None for None.

    Raises `DataError` naming a file that is no pack.
    """
    if packs is None:
        return None
    from mlx_zip.vocab.packs import Pack, as_pack, merge_packs

    several = [packs] if isinstance(packs, str | PathLike | Pack) else list(packs)
    found = [as_pack(one) for one in several]
    names = {one.name or f"pack {number}": one for number, one in enumerate(found, start=1)}
    return Packs(names, merge_packs(found) if len(found) > 1 else found[0])


def load_options(packs: Packs | None, codebook_size: int | None, plain: bool) -> dict[str, Any]:
    """Returns `load`'s arguments `pack` and `codebook_size`. plain: whether the model has no hypertokens of its own.

    A pack with tuned rows is loaded with the model. A pack without rows is given to each request instead, and an empty
    pack takes the place of a zip2zip model's own.
    """
    from mlx_zip.vocab.packs import Pack

    pack = None if packs is None else packs.merged
    if pack is not None and pack.rows is None:
        pack = None if plain else Pack(())
    return {"pack": pack, "codebook_size": None if plain else codebook_size}


def is_plain(name: str, revision: str | None = None) -> bool:
    """Returns whether a model's config says that it has no hypertokens. Raises `ModelError`."""
    from mlx_zip.loading import model_folder, read_config
    from mlx_zip.register import MODEL_TYPE

    return read_config(model_folder(name, revision))["model_type"] != MODEL_TYPE


def record(packs: Packs | None, model: Any) -> dict[str, Any]:
    """Returns a record's fields on a zip2zip model's codebook: its slots, and the fingerprint of the pack in them.

    That pack is the one of --pack, or else the tuned pack in the model's folder.
    """
    if not is_zip(model):
        return {}
    own = model.session.pack
    mark = own and own.pack if packs is None else packs.merged.fingerprint
    return {"codebook_size": model.layout.codebook_size, "codebook_fingerprint": mark}


def check(packs: Packs, model: Any, tokenizer: Any) -> None:
    """Raises `GenerationError` or `DataError` naming the packs if they do not fit the model or its tokenizer."""
    name, entries = f"--pack {' '.join(packs.files)}", packs.merged.entries
    check_tokenizers(packs, tokenizer)
    if not is_zip(model):
        return
    if len(entries) > (room := model.config.codebook_size):
        raise GenerationError(
            f"{name}: {len(entries)} entries, but the model's codebook has {room} slots; give it more "
            "(--codebook-size), or make a smaller pack with `mlx_zip vocab pack merge --size`"
        )
    try:
        replace(model.config.codec_params, start=entries)
    except CodecError as error:
        raise GenerationError(f"{name} does not fit the model: {error}") from error


def check_tokenizers(packs: Packs, tokenizer: Any) -> None:
    """Checks each pack by itself, because a merged pack does not know the tokenizer if one of its parts does not."""
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint

    if any(pack.tokenizer is not None for pack in packs.files.values()):
        mark = tokenizer_fingerprint(tokenizer)
        for file, pack in packs.files.items():
            pack.check_tokenizer(mark, file)
