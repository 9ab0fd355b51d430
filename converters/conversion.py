"""`convert`: writes a zip2zip checkpoint, a PEFT adapter or a GGUF file as an mlx-lm folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_zip.config import parse_zip_section
from mlx_zip.converters import output, source
from mlx_zip.converters.gguf.gguf_conversion import convert_gguf
from mlx_zip.converters.output import write_adapter, write_model_folder
from mlx_zip.converters.prepared import PreparedModel, prepare_model
from mlx_zip.converters.quantization import QuantizationRecipe, QuantPredicate, quantize_encoders, quantize_model
from mlx_zip.converters.source import ModelPlace
from mlx_zip.converters.tensors import DTYPES, FLOATS, dtype_name, list_some_names, read_tensors
from mlx_zip.errors import CodecError, ConversionError, DataError, errors_as
from mlx_zip.packs.chosen import pack_flag_with_files, read_packs
from mlx_zip.packs.pack import IN_ADAPTER, IN_FOLDER, ROWS, Pack, PackLike, pack_in_folder
from mlx_zip.packs.tuned import TunedRows
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.vocab.first_stage import tokenizer_fingerprint


def convert(
    hf_path: str,
    mlx_path: str | Path = "mlx_model",
    quantize: bool = False,
    q_group_size: int | None = None,
    q_bits: int | None = None,
    q_mode: str = "affine",
    dtype: str | None = None,
    upload_repo: str | None = None,
    revision: str | None = None,
    dequantize: bool = False,
    quant_predicate: QuantPredicate | str | None = None,
    keep_adapter: bool = False,
    lora_only: bool = False,
    encoder_bits: int | str | None = None,
    canonical: bool | None = None,
    pack: PackLike | Sequence[PackLike] | None = None,
    policy: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
    base: str | None = None,
    q_half: bool = False,
) -> Path:
    """Converts a zip2zip checkpoint (formats 1 and 2) to an mlx-lm folder, and returns that folder's path.

    hf_path: folder or hub id (at `revision`) of a checkpoint, or of a converted model to quantize, dequantize or cast.
    A GGUF file, or a folder or repository that holds one, is converted to a plain model. mlx_path: folder to write,
    which must not exist. Arguments up to `quant_predicate` are those of `mlx_lm.convert`. dtype: "float16", "bfloat16"
    or "float32"; None for the type of the source's decoder. keep_adapter: write a PEFT LoRA unmerged to `adapters/` in
    the output. lora_only: `hf_path` is a plain PEFT LoRA; write an mlx-lm adapter folder. encoder_bits: bits of the
    hyper-encoders' weights, 4 or 8; "none" leaves the weights unchanged; None means 8 if `quantize`, else "none".
    canonical: whether the model decodes canonically (`engine.sampling.canonical`), None for the source's setting.
    pack: one pack or several to merge, each a path or a `Pack`, whose entries every codebook of the model begins with;
    None for the source's pack. A given pack's tuned rows must have been tuned for the weights that are written. policy:
    what a full codebook does (see `CodecParams`), None for the source's setting. base: folder, hub id or GGUF file of a
    base model to use in place of the one that the checkpoint names. A GGUF file's weights are unpacked to float32 in a
    temporary folder next to `mlx_path`. q_half: with 8 bits, choose scales and biases that make every dequantized value
    exact in float16, so that a CPU can keep the matrices in float16.

    Raises `ConversionError` or `ConfigError` if the source or the arguments cannot be converted, `DataError` if a pack
    cannot be read or does not fit, and `ModelError` if tuned rows belong to another model. Each message names the file,
    tensor or key at fault. After an error no folder is left, unless only the upload failed. Checking a tuned pack reads
    all weights.
    """
    if quantize and dequantize:
        raise ConversionError("quantize (-q) and dequantize (-d) exclude each other: choose one")
    if dtype is not None and dtype not in DTYPES:
        raise ConversionError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if upload_repo is not None:
        output.check_repository_name(upload_repo)
    out = Path(mlx_path)
    output.refuse_existing_path(out)
    recipe = QuantizationRecipe(
        quantize, q_group_size, q_bits, q_mode, quant_predicate, encoder_bits, dequantize, q_half
    )
    place = source.locate_model(hf_path, revision)
    if base is not None and not lora_only:
        source.check_needs_base(place)
    if place.folder.is_file():
        given = {
            "--keep-adapter": keep_adapter,
            "--lora-only": lora_only,
            "--encoder-bits": encoder_bits is not None,
            "--canonical": canonical is not None,
            "--pack": pack is not None,
            "--policy": policy is not None,
            "--trust-remote-code": trust_remote_code,
        }
        if flags := [flag for flag, value in given.items() if value]:
            raise ConversionError(
                f"{' and '.join(flags)}: a GGUF file holds a plain model, for which this has no effect"
            )
        convert_gguf(place, out, dtype, recipe, progress)
    elif lora_only:
        others = any(option is not None for option in (canonical, pack, policy, base))
        if recipe != QuantizationRecipe() or keep_adapter or others:
            raise ConversionError(
                "--lora-only writes an adapter alone; it takes no quantization, no --base, no --keep-adapter, "
                "no --canonical, no --pack and no --policy"
            )
        write_adapter(out, source.download_all_files(place), dtype)
    else:
        with open_base_model(base, out, progress) as given:
            prepared = prepare_model(place, dtype, keep_adapter, trust_remote_code, given)
            _set_codec_options(prepared.config["zip2zip"], canonical, policy)
            packs = read_packs(pack)
            if packs is not None:
                _set_pack(prepared, packs, trust_remote_code)
            elif source.is_converted_model(place):
                _keep_source_pack(prepared, trust_remote_code)
            prepared.model, prepared.config = quantize_model(prepared.model, prepared.config, recipe)
            quantize_encoders(prepared.model, prepared.config, recipe)
            _check_rows_fit_weights(prepared, packs)
            if packs is None and not source.is_converted_model(place):
                _add_trained_rows(prepared, source.download_all_files(place), trust_remote_code)
            write_model_folder(out, prepared, trust_remote_code, progress)
    if upload_repo is not None:
        output.upload_folder(out, upload_repo)
    return out


def _set_codec_options(section: dict[str, Any], canonical: bool | None, policy: str | None) -> None:
    """Sets `canonical` and `policy` in the config's zip2zip section; None leaves the source's value.

    Raises `ConfigError` if the two settings contradict each other.
    """
    if canonical is not None:
        section["canonical"] = canonical
    if policy is not None:
        section["compression"]["policy"] = policy
    settled = parse_zip_section(section)
    section["compression"] = settled.to_dict()["compression"]


# ---- the pack that a converted model begins with: given by the caller, or taken from the source


def _set_pack(prepared: PreparedModel, pack: Pack, trust_remote_code: bool) -> None:
    """Makes every codebook of the model begin with the entries of `pack`.

    Raises `DataError` or `ConversionError` if `pack` does not fit the model or its tokenizer.
    """
    pack.check_made_for(load_tokenizer(prepared.tokenizer, trust_remote_code))
    config: Any = prepared.model.config
    with errors_as(ConversionError, f"{pack_flag_with_files(pack)} does not fit the model", CodecError):
        params = config.codec_params.with_start(pack)
    prepared.config["zip2zip"]["start"] = [list(entry) for entry in params.start or ()]
    prepared.pack = None if pack.rows is None else pack


def _keep_source_pack(prepared: PreparedModel, trust_remote_code: bool) -> None:
    """Sets `prepared.pack` to the tuned pack in the source's folder, or to None if the folder has no tuned pack.

    Raises `ModelError` or `DataError` if the pack was made for another model or tokenizer.
    """
    model: Any = prepared.model
    prepared.pack = pack = pack_in_folder(prepared.tokenizer, model.config.start)
    if pack is not None and pack.tokenizer is not None:
        pack.check_made_for(load_tokenizer(prepared.tokenizer, trust_remote_code), str(prepared.tokenizer / IN_FOLDER))


def _check_rows_fit_weights(prepared: PreparedModel, given: Pack | None) -> None:
    """Checks that the tuned rows of `prepared.pack` were tuned for the weights that will be written.

    given: the caller's pack, None if `prepared.pack` is the source's own. If the rows were tuned for other weights,
    raises `ConversionError` for the caller's pack, and drops the source's own pack with a warning.
    """
    pack, model = prepared.pack, cast(Any, prepared.model)
    if pack is None or pack.rows is None:
        return
    if pack.rows.model == model.fingerprint:
        model.check_pack(pack)
        return
    if given is not None:
        raise ConversionError(
            f"{pack_flag_with_files(given)}: its rows were tuned for other weights than those to be written; "
            "convert first, tune the pack for the new folder, then convert that one with it, or drop its rows "
            "(mlx_zip vocab pack merge --drop-rows)"
        )
    warnings.warn(f"the tuned rows in {IN_FOLDER} are left out: they were tuned for other weights", stacklevel=2)
    prepared.pack = None


def _add_trained_rows(prepared: PreparedModel, place: ModelPlace, trust_remote_code: bool) -> None:
    """Sets `prepared.pack` to the checkpoint's pack with the rows that were trained with the checkpoint's adapter.

    Does nothing if the checkpoint has no such rows. Call this after quantization, because the pack records the
    fingerprint of the model's weights. Raises `ConversionError` if the file of rows does not fit the model.
    """
    file = place.folder / IN_ADAPTER
    if not file.is_file():
        return
    model: Any = prepared.model
    if prepared.kept is not None:
        raise ConversionError(f"{file}: its rows are for the merged model; leave out --keep-adapter")
    shape = (len(model.config.start or ()), model.config.encoder.model_size)
    wanted = ROWS[1:] if model.sides_are_one else ROWS
    table = read_tensors(file)
    if table.keys() != set(wanted) or any(one.shape != shape or one.dtype not in FLOATS for one in table.values()):
        found = [f"{name} {dtype_name(one.dtype)} {list(one.shape)}" for name, one in sorted(table.items())]
        expected = f"{' and '.join(wanted)}, numbers of shape {list(shape)}"
        raise ConversionError(f"{file} must hold {expected}; it holds {list_some_names(found)}")
    rows = {name: np.array(one if one.dtype == mx.float16 else one.astype(mx.float32)) for name, one in table.items()}
    with errors_as(ConversionError, str(file), DataError):
        tuned = TunedRows(rows.get("input_rows", rows["output_rows"]), rows["output_rows"], model.fingerprint)
    mark = tokenizer_fingerprint(load_tokenizer(prepared.tokenizer, trust_remote_code))
    prepared.pack = Pack(tuple(map(tuple, model.config.start)), mark, rows=tuned)


# ---- the base model that a caller names for a checkpoint


@contextlib.contextmanager
def open_base_model(base: str | None, out: Path, progress: bool) -> Iterator[ModelPlace | None]:
    """Context manager: yields the place of the base model `base`; yields None if `base` is None.

    base: a folder, a hub id or a GGUF file. The weights of a GGUF file are unpacked to float32 in a temporary folder
    next to `out`. This folder is removed after the block. Raises `ConversionError` if `base` cannot be read.
    """
    if base is None:
        yield None
        return
    place = source.locate_model(base, None)
    if not place.folder.is_file():
        yield (
            place if place.revision is None else source.download_to_cache(place.name, place.revision, source.BASE_FILES)
        )
        return
    unpacked = out.with_name(f".{out.name}.partial-{os.getpid()}-base")
    try:
        convert_gguf(place, unpacked, "float32", QuantizationRecipe(dequantize=True), progress)
        yield ModelPlace(unpacked, place.name, place.revision)
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
