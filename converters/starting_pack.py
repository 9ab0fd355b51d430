"""The pack that a converted model begins with: given by the caller, or brought along by the source."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_zip.chosen_packs import Packs, check_tokenizers
from mlx_zip.converters.hub import Place
from mlx_zip.converters.prepared import Prepared
from mlx_zip.converters.tensors import FLOATS, load, read_header, some
from mlx_zip.errors import CodecError, ConversionError, DataError
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.vocab.first_stage import tokenizer_fingerprint
from mlx_zip.vocab.packs import IN_ADAPTER, IN_FOLDER, ROWS, Pack, pack_in_folder
from mlx_zip.vocab.tuned import TunedRows


def begin_with(prepared: Prepared, packs: Packs, trust_remote_code: bool) -> None:
    """Makes every codebook of the model begin with the entries of these packs, merged.

    Raises `DataError` or `ConversionError` if they do not fit the model or its tokenizer.
    """
    check_tokenizers(packs, load_tokenizer(prepared.tokenizer, trust_remote_code))
    config: Any = prepared.model.config
    try:
        params = replace(config.codec_params, start=packs.merged.entries)
    except CodecError as error:
        raise ConversionError(f"--pack {' '.join(packs.files)} does not fit the model: {error}") from error
    prepared.config["zip2zip"]["start"] = [list(entry) for entry in params.start or ()]
    prepared.pack = None if packs.merged.rows is None else packs.merged


def keep_pack(prepared: Prepared, trust_remote_code: bool) -> None:
    """Sets `prepared.pack` to the tuned pack in the source's folder, None if there is none.

    Raises `ModelError` or `DataError` for a pack of another model or tokenizer.
    """
    model: Any = prepared.model
    prepared.pack = pack = pack_in_folder(prepared.tokenizer, model.config.start)
    if pack is not None and pack.tokenizer is not None:
        mark = tokenizer_fingerprint(load_tokenizer(prepared.tokenizer, trust_remote_code))
        pack.check_tokenizer(mark, str(prepared.tokenizer / IN_FOLDER))


def check_rows(prepared: Prepared, packs: Packs | None) -> None:
    """Checks that the tuned rows of `prepared.pack` were tuned for the weights that will be written.

    packs: the packs that the caller gave, None if `prepared.pack` is the source's own. If the rows were tuned for other
    weights, given packs raise `ConversionError`, and the source's own pack is left out with a warning.
    """
    pack, model = prepared.pack, cast(Any, prepared.model)
    if pack is None or pack.rows is None:
        return
    if pack.rows.model == model.fingerprint:
        model.check_pack(pack.start)
        return
    if packs is not None:
        raise ConversionError(
            f"--pack {' '.join(packs.files)}: its rows were tuned for other weights than those to be written; "
            "convert first, tune the pack for the new folder, then convert that one with it, or drop its rows "
            "(mlx_zip vocab pack merge --drop-rows)"
        )
    warnings.warn(f"the tuned rows in {IN_FOLDER} are left out: they were tuned for other weights", stacklevel=2)
    prepared.pack = None


def take_trained_rows(prepared: Prepared, place: Place, trust_remote_code: bool) -> None:
    """Sets `prepared.pack` to the checkpoint's pack with the rows that were trained with its adapter, if there are any.

    Call it when the weights are those to be written. Raises `ConversionError` naming a file that does not fit.
    """
    file = place.folder / IN_ADAPTER
    if not file.is_file():
        return
    model: Any = prepared.model
    if prepared.kept is not None:
        raise ConversionError(f"{file}: its rows are for the merged model; leave out --keep-adapter")
    shape = (len(model.config.start or ()), model.config.encoder.model_size)
    wanted = ROWS[1:] if model.sides_are_one else ROWS
    table = read_header(file)
    if table.keys() != set(wanted) or any(one.shape != shape or one.dtype not in FLOATS for one in table.values()):
        found = some([f"{name} {one.dtype} {list(one.shape)}" for name, one in sorted(table.items())])
        raise ConversionError(
            f"{file} must hold {' and '.join(wanted)}, numbers of shape {list(shape)}; it holds {found}"
        )
    kept = {name: rows if rows.dtype == mx.float16 else rows.astype(mx.float32) for name, rows in load(table).items()}
    rows = {name: np.array(value) for name, value in kept.items()}
    try:
        tuned = TunedRows(rows.get("input_rows", rows["output_rows"]), rows["output_rows"], model.fingerprint)
    except DataError as error:
        raise ConversionError(f"{file}: {error}") from error
    mark = tokenizer_fingerprint(load_tokenizer(prepared.tokenizer, trust_remote_code))
    prepared.pack = Pack(tuple(map(tuple, model.config.start)), mark, rows=tuned)
