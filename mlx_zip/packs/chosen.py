"""The packs that a user chose for a model: reading, merging, checking against the model, and recording them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from mlx_zip.errors import CodecError, GenerationError
from mlx_zip.layout import is_zip

if TYPE_CHECKING:
    from mlx_zip.config import ZipConfig
    from mlx_zip.packs.pack import Pack, PackLike


@dataclass(frozen=True)
class Packs:
    """The chosen packs. files: each by its file name. merged: the one pack that all of them are merged into."""

    files: dict[str, Pack]
    merged: Pack


def read_packs(packs: PackLike | Sequence[PackLike] | None) -> Packs | None:
    """Reads one pack or several, each a path or a `Pack`, and merges them; returns None for None.

    Raises `DataError` naming a file that is no pack.
    """
    if packs is None:
        return None
    from mlx_zip.packs.pack import Pack, as_pack, merge_packs

    several = [packs] if isinstance(packs, str | PathLike | Pack) else list(packs)
    found = [as_pack(one) for one in several]
    names = {one.name or f"pack {number}": one for number, one in enumerate(found, start=1)}
    return Packs(names, merge_packs(found) if len(found) > 1 else found[0])


def load_options(packs: Packs | None, codebook_size: int | None, plain: bool) -> dict[str, Any]:
    """Returns the arguments `pack` and `codebook_size` to call `load` with.

    packs: the chosen packs, None for the model's own. codebook_size: maximum number of hypertokens, None for the
    model's own. plain: whether it is a plain model. A pack with tuned rows is loaded with the model. A pack without
    rows is given to each request later; a zip2zip model is then loaded with an empty pack in place of its own.
    """
    from mlx_zip.packs.pack import Pack

    pack = None if packs is None else packs.merged
    if pack is not None and pack.rows is None:
        pack = None if plain else Pack(())
    return {"pack": pack, "codebook_size": None if plain else codebook_size}


def record(packs: Packs | None, model: Any) -> dict[str, Any]:
    """Returns the size of a zip2zip model's codebook and the fingerprint of its pack, by name; {} for a plain model.

    The fingerprint is that of the chosen packs, else of the tuned pack in the model's folder, else None.
    """
    if not is_zip(model):
        return {}
    own = model.session.pack
    fingerprint = own and own.pack if packs is None else packs.merged.fingerprint
    return {"codebook_size": model.layout.codebook_size, "codebook_fingerprint": fingerprint}


def check(packs: Packs, model: Any, tokenizer: Any) -> None:
    """Raises `GenerationError` or `DataError` naming the packs if they do not fit the model or its tokenizer."""
    check_tokenizers(packs, tokenizer)
    if is_zip(model):
        check_codec(packs, model.config)


def named(packs: Packs) -> str:
    """Returns the flag with the packs' files, for messages."""
    return f"--pack {' '.join(packs.files)}"


def check_codec(packs: Packs, config: ZipConfig) -> None:
    """Raises `GenerationError` naming the packs if their entries do not fit a zip2zip model's codebook."""
    check_slots(packs, config.codebook_size)
    try:
        replace(config.codec_params, start=packs.merged.entries)
    except CodecError as error:
        raise GenerationError(f"{named(packs)} does not fit the model: {error}") from error


def check_slots(packs: Packs, room: int) -> None:
    """Raises `GenerationError` naming the packs if they have more entries than a codebook of `room` slots holds."""
    if (count := len(packs.merged.entries)) > room:
        raise GenerationError(
            f"{named(packs)}: {count} entries, but the model's codebook has {room} slots; give it more "
            "(--codebook-size), or make a smaller pack with `mlx_zip vocab pack merge --size`"
        )


def check_tokenizers(packs: Packs, tokenizer: Any) -> None:
    """Raises `DataError` naming a pack that was made for another tokenizer.

    Each pack is checked by itself, because a merged pack has a tokenizer only if all of its parts have it.
    """
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint

    if any(pack.tokenizer is not None for pack in packs.files.values()):
        mark = tokenizer_fingerprint(tokenizer)
        for file, pack in packs.files.items():
            pack.check_tokenizer(mark, file)
