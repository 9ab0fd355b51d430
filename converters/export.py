"""`export`: writes an mlx_zip model as a checkpoint of format 2, one folder that zip2zip loads in PyTorch.

Source of the format: zip2zip 0.2.0 (`Zip2ZipConfig`, `Zip2ZipModel.from_pretrained`). A model that zip2zip cannot run
is refused. For a model that zip2zip would run differently, `export` warns, because zip2zip itself does not.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

import mlx_zip
from mlx_zip.config import SELF_CONTAINED, SIDES, ZipConfig
from mlx_zip.converters import output, source
from mlx_zip.converters.prepared import ADAPTERS, cast_floats, load_converted_model
from mlx_zip.converters.source import ModelPlace
from mlx_zip.converters.tensors import DTYPES, dtype_name, read_json_object_strictly
from mlx_zip.converters.tokenizer_files import ADAPTED, TokenizerFacts, copy_tokenizer, read_tokenizer_facts
from mlx_zip.errors import ConversionError
from mlx_zip.files import write_json
from mlx_zip.models.decoder_options import FAMILIES
from mlx_zip.models.model_folder import UPSTREAM_CONFIG_NAME, UPSTREAM_ENCODERS

FLAG = "--out"
_OURS = ("zip2zip", "quantization", "quantization_config")  # sections of config.json to leave out for PyTorch
_REFUSED_ENCODERS = {  # encoder kinds that zip2zip 0.2.0 cannot run, and why
    "averaging": "it knows no such kind",
    "attention": "its own class fails as soon as a model calls it",
}


def export(
    model: str,
    save_path: str | Path,
    dtype: str | None = None,
    drop_start: bool = False,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> Path:
    """Writes a converted or trained model as a self-contained zip2zip checkpoint (format 2); returns its folder.

    model: a folder or a hub id. save_path: folder to write, which must not exist. dtype: "float16", "bfloat16" or
    "float32", None for the embedding's type. drop_start: leave out the pack that the model begins with, which the
    format cannot hold. A quantized model is dequantized, and an adapter kept in `adapters/` is merged in float32, each
    with a warning. Converting the checkpoint back gives bit-identical tensors, except those that were dequantized,
    merged or cast.

    Raises `ConversionError` or `ConfigError` if the model cannot be exported. After an error no folder is left.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConversionError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    out = Path(save_path)
    output.refuse_existing_path(out, FLAG)
    place = source.locate_model(model, None)
    if not source.is_converted_model(place):
        raise ConversionError(f"{place.name} is not an mlx_zip model: its config.json has no zip2zip section")
    place = source.download_all_files(place)
    facts = read_tokenizer_facts(place.folder, trust_remote_code)
    model = _read_exported_model(place, facts, dtype, drop_start)
    _write_checkpoint(out, place, model, facts, trust_remote_code, progress)
    return out


# ---- reading


def _read_exported_model(place: ModelPlace, facts: TokenizerFacts, dtype: str | None, drop_start: bool) -> Any:
    """Reads and checks a converted model; dequantizes it, merges its adapter and casts it, all lazily."""
    from mlx_lm.utils import dequantize_model

    model: Any
    model, config = load_converted_model(place)
    _check_exportable(model, facts, drop_start, (place.folder / ADAPTED).is_file())
    if config.get("quantization"):
        what = "what is exported is what its quantized weights stand for"
        warnings.warn(f"{place.folder.name} is quantized; {what}", stacklevel=2)
        model = dequantize_model(model)
    stored = DTYPES[dtype] if dtype else model.model.embed_tokens.weight.dtype
    model = _merge_mlx_adapter(model, place.folder / ADAPTERS)
    cast_floats(model, stored)
    return model


def _check_exportable(model: Any, facts: TokenizerFacts, drop_start: bool, adapted: bool) -> None:
    """Raises `ConversionError` if zip2zip 0.2.0 cannot run the model; warns if the results in zip2zip would differ.

    drop_start: whether the model's pack may be left out. adapted: whether the folder has an adapted vocabulary.
    """
    config: ZipConfig = model.config
    if (kind := config.encoder.kind) in _REFUSED_ENCODERS:
        why = _REFUSED_ENCODERS[kind]
        raise ConversionError(f"zip2zip 0.2.0 cannot run the {kind!r} encoder: {why}; nothing to export")
    if config.encoder.residual_by_side:
        raise ConversionError(
            "zip2zip 0.2.0 has no encoder whose rows begin by side (residual_by_side); nothing to export"
        )
    if config.codebook_size == 0:
        raise ConversionError("zip2zip 0.2.0 cannot run a model without a codebook (max_codebook_size 0)")
    if facts.pad_id != config.pad_id:
        raise ConversionError(
            f"the model's pad id is {config.pad_id}, but zip2zip takes its tokenizer's pad token, else its eos: "
            f"{facts.pad_id}"
        )
    model.layout.check_tokenizer(facts.length)
    if config.policy != "freeze":
        raise ConversionError(
            f"the model's codebook has the policy {config.policy!r}, but zip2zip's keeps what a full table holds: "
            "nothing to export (`mlx_zip convert --policy freeze` gives it up)"
        )
    if config.start is not None and not drop_start:
        raise ConversionError(
            f"the model begins with a pack of {len(config.start)} entries, which zip2zip's format cannot hold; "
            "leave it out with --drop-start (ids then differ from this model's)"
        )
    if adapted:
        warnings.warn(f"zip2zip does not know {ADAPTED}: it encodes texts to other ids than this model", stacklevel=2)
    if config.canonical:
        warnings.warn("zip2zip writes ids that are not canonical too: what it generates may differ", stacklevel=2)
    if config.start is not None:
        warnings.warn(f"the pack of {len(config.start)} entries that the model begins with is left out", stacklevel=2)
    if model.traits.embed_scale != 1.0:
        warnings.warn(_gemma_warning(model.traits.soft_cap), stacklevel=2)


def _gemma_warning(soft_cap: float | None) -> str:
    cap = f", and its soft cap lifts entries that are not installed from -inf to -{soft_cap:g}" if soft_cap else ""
    return (
        "zip2zip 0.2.0 runs Gemma differently: on transformers 5 it loses the embedding scale (it replaces the layer "
        f"that has it){cap}; its results will differ from this model's, though the checkpoint is right"
    )


def _merge_mlx_adapter(model: Any, adapters: Path) -> Any:
    """Returns the model with the adapter in the folder `adapters` merged in float32, if that folder exists."""
    if not adapters.is_dir():
        return model
    from mlx_lm.tuner.utils import load_adapters

    cast_floats(model, mx.float32)
    try:
        model = load_adapters(model, str(adapters))
    except (OSError, ValueError, RuntimeError, TypeError, LookupError, AttributeError) as error:
        raise ConversionError(f"{adapters} cannot be merged: {str(error).strip().splitlines()[0]}") from error
    fused = [(name, layer.fuse()) for name, layer in model.named_modules() if hasattr(layer, "fuse")]
    if fused:
        model.update_modules(tree_unflatten(fused))
    warnings.warn(f"the adapter in {adapters.parent.name}/{adapters.name} is merged into the weights", stacklevel=2)
    return model


# ---- what is written


def _decoder_config_json(config: dict[str, Any], stored: str) -> dict[str, Any]:
    """Returns config.json of the decoder in transformers. config: the mlx_zip model's config. stored: dtype's name."""
    kind = config["zip2zip"]["base_model_type"]
    plain = {key: value for key, value in config.items() if key not in _OURS}
    plain |= {"model_type": kind, "torch_dtype": stored}
    if "dtype" in plain:
        plain["dtype"] = stored
    plain.setdefault("architectures", [FAMILIES[kind].architecture])
    return plain


def _zip2zip_config_json(config: ZipConfig) -> dict[str, Any]:
    """Returns the content of zip2zip_config.json with zip2zip's keys only, because zip2zip refuses unknown ones."""
    made = replace(config, format_version=2, base_model=SELF_CONTAINED, start=None, canonical=False).to_dict()
    del made["pad_token_id"]
    return made


def _write_checkpoint(
    out: Path, place: ModelPlace, model: Any, facts: TokenizerFacts, trust_remote_code: bool, progress: bool
) -> None:
    """Writes a model as a checkpoint to the new folder `out`. place: the source, whose tokenizer files are copied."""
    source_config = read_json_object_strictly(place.folder / "config.json")
    config = _decoder_config_json(source_config, dtype_name(model.model.embed_tokens.weight.dtype))
    weights, parameters = output.take_weights(model)
    encoders = {name: weights.pop(name) for name in list(weights) if name.startswith(SIDES)}
    parameters -= sum(array.size for array in encoders.values())
    with output.new_model_folder(out, FLAG) as folder:
        output.write_model(folder, weights, parameters, config, progress, framework="pt")
        output.write_tensors(folder / UPSTREAM_ENCODERS, encoders, framework="pt")
        write_json(folder / UPSTREAM_CONFIG_NAME, _zip2zip_config_json(model.config))
        copy_tokenizer(place.folder, folder, facts, trust_remote_code)
        (folder / "README.md").write_text(_export_model_card(place), encoding="utf-8")


def _export_model_card(place: ModelPlace) -> str:
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- zip2zip\n- mlx_zip\n---\n\n"
        f"# {place.name}, exported for PyTorch\n\n"
        "A self-contained zip2zip checkpoint (format 2), for `zip2zip>=0.2.0`:\n\n"
        "```python\nfrom zip2zip import Zip2ZipModel, Zip2ZipTokenizer\n\n"
        'model = Zip2ZipModel.from_pretrained("<this folder or repository>")\n'
        'tokenizer = Zip2ZipTokenizer.from_pretrained("<this folder or repository>")\n```\n\n'
        f"Written by `mlx_zip export` {mlx_zip.__version__}. The licence is that of the model it was made from.\n"
    )
