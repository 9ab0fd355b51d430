"""Reads and merges the packs that a user chose for a model, checks that they fit the model, and records them."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from mlx_zip.errors import CodecError, GenerationError
from mlx_zip.layout import has_hypertokens

if TYPE_CHECKING:
    from mlx_zip.config import ZipConfig
    from mlx_zip.packs.pack import Pack, PackLike


def read_packs(packs: PackLike | Sequence[PackLike] | None) -> Pack | None:
    """Reads one pack or several, each a path or a `Pack`, and merges them; returns None for None.

    Raises `DataError` naming a file that is not a pack.
    """
    if packs is None:
        return None
    from mlx_zip.packs.pack import Pack, as_pack, merge_packs

    several = [packs] if isinstance(packs, str | PathLike | Pack) else list(packs)
    found = [as_pack(one) for one in several]
    return merge_packs(found) if len(found) > 1 else found[0]


def pack_load_options(pack: Pack | None, codebook_size: int | None, plain: bool) -> dict[str, Any]:
    """Returns the arguments `pack` and `codebook_size` to call `load` with.

    pack: the chosen pack, None for the model's own. codebook_size: maximum number of hypertokens, None for the model's
    own. plain: whether the model is plain. A pack with tuned rows is given to `load`. A pack without rows is given to
    each request instead, and a zip2zip model is then loaded with an empty pack in place of its own.
    """
    from mlx_zip.packs.pack import Pack

    if pack is not None and pack.rows is None:
        pack = None if plain else Pack(())
    return {"pack": pack, "codebook_size": None if plain else codebook_size}


def pack_record(pack: Pack | None, model: Any) -> dict[str, Any]:
    """Returns `codebook_size` and `codebook_fingerprint` of a zip2zip model, for a record; {} for a plain model.

    The fingerprint is that of `pack`, else of the tuned pack that the model was loaded with, else None.
    """
    if not has_hypertokens(model):
        return {}
    used = model.row_source.pack if pack is None else pack
    fingerprint = None if used is None else used.fingerprint
    return {"codebook_size": model.layout.codebook_size, "codebook_fingerprint": fingerprint}


def check_pack_fits(pack: Pack, model: Any, tokenizer: Any) -> None:
    """Raises `DataError` or `GenerationError`, naming the pack, if it does not fit the tokenizer or the model."""
    pack.check_made_for(tokenizer)
    if has_hypertokens(model):
        check_pack_fits_codec(pack, model.config)


def choose_request_pack(chosen: Pack | None, engine: Any) -> Pack | None:
    """Returns the pack for an engine's requests: `chosen`, or None if codebooks begin with the loaded model's pack.

    chosen: the packs of --pack, or None. Raises `MlxZipError` if the packs do not fit the model.
    """
    if chosen is None:
        return None
    chosen.check_made_for(engine.tokenizer)
    if chosen.rows is not None:
        return None
    name = pack_flag_with_files(chosen)
    if not engine.info.codebook_size:
        raise GenerationError(
            f"{name}: this model has no hypertokens, so nothing could use it; give a pack that was tuned for the model "
            "(mlx_zip vocab pack tune)"
        )
    check_pack_fits_slots(chosen, engine.info.codebook_size)
    try:
        engine.check_pack(chosen)
    except GenerationError as error:
        raise GenerationError(f"{name} does not fit the model: {error.__cause__ or error}") from error
    return chosen


def pack_flag_with_files(pack: Pack) -> str:
    """Returns --pack with the names of the pack's files, for messages."""
    return f"--pack {' '.join(pack.by_name)}"


def check_pack_fits_codec(pack: Pack, config: ZipConfig) -> None:
    """Raises `GenerationError` naming the pack if its entries do not fit a zip2zip model's codebook."""
    check_pack_fits_slots(pack, config.codebook_size)
    try:
        config.codec_params.with_start(pack)
    except CodecError as error:
        raise GenerationError(f"{pack_flag_with_files(pack)} does not fit the model: {error}") from error


def check_pack_fits_slots(pack: Pack, room: int) -> None:
    """Raises `GenerationError` naming the pack if it has more entries than a codebook of `room` slots holds."""
    if len(pack) > room:
        raise GenerationError(
            f"{pack_flag_with_files(pack)}: {len(pack)} entries, but the model's codebook has {room} slots; "
            "give it more (--codebook-size), or make a smaller pack with `mlx_zip vocab pack merge --size`"
        )
