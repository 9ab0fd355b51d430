"""Makes the model that a run starts from: a zip2zip or a plain model, with loaded or random weights.

New encoders first make rows at the scale of the rows of the embedding or head: `res_latent_attn` begins as its
residual, and in a post-norm transformer the last norm's gain begins at the scale of that matrix.

With `--residual-by-side`, an entry's input row begins as the row of the entry's last base id, from which the text
continues, and the output row as the mean of the entry's base rows, because the entry competes with each of its base
ids. Before any training, SmolLM2-135M with these rows needs 60 % more bits per byte than without hypertokens; with rows
that begin as the first base row, as in zip2zip++, 115 % more (a static pack of 1,024 entries, Python sources; measured
once). The output encoder's last norm begins at a gain of 0.02: the absolute values of a hidden state of SmolLM2 sum to
620, so with a gain of 1 a step of 1e-4 can move every entry's logit by 12. Bits per byte after twelve steps: 1.476 with
a gain of 0.02, 1.487 with a learning rate of 3e-6 for both sides, 1.497 with frozen encoders, 1.510 with a gain of 1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import _get_classes, dequantize_model, load_model

from mlx_zip.codec import CodecParams
from mlx_zip.config import RECORD_KEYS, SIDES, ZipConfig
from mlx_zip.errors import ConfigError, TrainingError, errors_as, first_message_line
from mlx_zip.layout import MODEL_TYPE
from mlx_zip.models.loading import load_error_types, read_model_config, rope_settings_for_mlx_lm
from mlx_zip.models.model_folder import ModelArgs, hidden_width
from mlx_zip.models.rows.encoders import matrix_rows
from mlx_zip.models.rows.fingerprints import named_arrays
from mlx_zip.models.zip_model import Model
from mlx_zip.training.prepare.shards import can_have_entries
from mlx_zip.training.settings import EncoderOptions, TrainSettings

_SAMPLED_ROWS = 1024  # number of rows from which to estimate the scale of a matrix
_OUTPUT_NORM_GAIN = 0.02  # initial gain of the output encoder's last norm


def make_starting_model(
    folder: Path | None,
    scratch: Mapping[str, Any] | None,
    params: CodecParams,
    encoder: EncoderOptions,
    canonical: bool | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the model to train on data of codec `params`, and its config.json.

    folder: a model folder, zip2zip or plain. scratch: if `folder` is None, the content of a config.json, whose model
    gets random weights. encoder: the hyper-encoder to add to a plain model if the codec has a codebook. A zip2zip model
    takes over codebook size and merge size of `params`. canonical: whether the model decodes canonically from now on;
    None: as in the model's config.

    Raises `TrainingError` if a zip2zip model's merge size is larger than in `params`, its codec differs in anything
    else than the two sizes, or its policy is not freeze; and if `canonical` is set but there is no codebook. Raises
    `ConfigError` if the model type is not supported.
    """
    config = dict(scratch or {}) if folder is None else read_model_config(folder)
    if not isinstance(config.get("model_type"), str):
        raise ConfigError("config.json of the new model names no model_type")
    config |= rope_settings_for_mlx_lm(config)
    if config.get("model_type") == MODEL_TYPE:
        wanted = _set_canonical(_adopt_codec_sizes(config, params), canonical)
        return (
            _build_random_model(wanted) if folder is None else _load_with_longer_entries(folder, config, wanted)
        ), wanted
    if can_have_entries(params):
        config = _set_canonical(make_zip_config(config, params, encoder), canonical)
    elif canonical:
        raise TrainingError("canonical decoding needs a codebook, and the data were prepared without one")
    if folder is None:
        model = _build_random_model(config)
    else:
        model = _load_model_weights(folder, config, strict=not can_have_entries(params))
    if isinstance(model, Model):
        if folder is not None:
            _check_decoder_tensors(folder, model)
            _check_weight_shapes(folder, model)
        _init_hyper_encoders(model)
    return model, config


def make_zip_config(base: Mapping[str, Any], params: CodecParams, encoder: EncoderOptions) -> dict[str, Any]:
    """Returns config.json of a zip2zip model made from a plain model. base: the plain model's config.json."""
    if params.pad_id is None:
        raise TrainingError("the data were prepared without a pad id; prepare them with the model's tokenizer")
    config = ZipConfig(
        vocab_size=params.vocab_size,
        codebook_size=params.codebook_size,
        merge_size=params.merge_size,
        disabled_ids=params.disabled_ids,
        pad_id=params.pad_id,
        encoder=encoder.config(hidden_width(base)),
        position_mode=encoder.position_mode,
        format_version=2,
        base_model=".",
        start=params.start,
    )
    section = {**config.to_dict(), "base_model_type": base["model_type"]}
    return {**base, "model_type": MODEL_TYPE, "zip2zip": section}


def _set_canonical(config: dict[str, Any], canonical: bool | None) -> dict[str, Any]:
    return config if canonical is None else {**config, "zip2zip": {**config["zip2zip"], "canonical": canonical}}


def _adopt_codec_sizes(config: dict[str, Any], params: CodecParams) -> dict[str, Any]:
    """Returns a zip2zip model's config.json with the codebook size and the merge size of `params`."""
    found = ModelArgs.from_dict(config).zip_config
    theirs = found.codec_params
    if theirs.policy != "freeze":
        raise TrainingError(
            f"the model's codebook has the policy {theirs.policy!r}, and training follows freeze only: "
            "`mlx_zip convert --policy freeze` makes a model to train"
        )
    sizes = {"codebook_size": params.codebook_size, "merge_size": params.merge_size}
    if replace(theirs, start=None, **sizes) != replace(params, start=None) or params.merge_size < theirs.merge_size:
        raise TrainingError(
            f"the data were prepared for another codec than the model's "
            f"({_describe_codec_difference(params, theirs)}): "
            "prepare them with `mlx_zip prepare --model`, naming this model"
        )
    if (theirs.codebook_size, theirs.merge_size) == (params.codebook_size, params.merge_size):
        return config
    kept = {key: value for key, value in config["zip2zip"].items() if key in RECORD_KEYS}
    return {**config, "zip2zip": {**replace(found, **sizes).to_dict(), **kept}}


def _describe_codec_difference(data: CodecParams, model: CodecParams) -> str:
    differ = [one.name for one in fields(data) if getattr(data, one.name) != getattr(model, one.name)]
    lists = [f"other {name}" for name in differ if name == "disabled_ids"]
    numbers = [name for name in differ if name not in ("disabled_ids", "start")]
    return "; ".join(
        [*(f"{name} {getattr(data, name)}, the model's {getattr(model, name)}" for name in numbers), *lists]
    )


def _load_with_longer_entries(folder: Path, config: dict[str, Any], wanted: dict[str, Any]) -> nn.Module:
    """Loads a zip2zip model with the codec of `wanted`, whose merge size may be larger than that of `config`.

    config: the model's own config.json. Position embeddings that the encoders lack become copies of the last one.
    """
    before, after = (one["zip2zip"]["compression"]["max_subtokens"] for one in (config, wanted))
    if before == after:  # the number of slots does not change the weights
        return _load_model_weights(folder, wanted)
    if "quantization" in config:
        raise TrainingError(f"{folder} is quantized: its entries of {before} base ids cannot become longer ({after})")
    made, weights = _build_random_model(wanted), dict[str, mx.array]()
    for name, value in named_arrays(_load_model_weights(folder, config).parameters()):
        more = [value[-1:]] * (after - before) if name.endswith("pos_embed.weight") else []
        weights[name] = mx.concatenate([value, *more])
    made.load_weights(list(weights.items()))
    return made


def _build_random_model(config: dict[str, Any]) -> nn.Module:
    with errors_as(ConfigError, "config.json of the new model", ValueError, TypeError, KeyError):
        model_class, arguments = _get_classes(config)
        return model_class(arguments.from_dict(config))


def _load_model_weights(folder: Path, config: dict[str, Any], strict: bool = True) -> nn.Module:
    try:
        return load_model(folder, lazy=False, strict=strict, model_config=config)[0]
    except load_error_types() as error:
        raise TrainingError(f"cannot load {folder}: {first_message_line(error)}") from error


def _check_decoder_tensors(folder: Path, model: Model) -> None:
    """Raises `TrainingError` unless the folder's files hold exactly the decoder's tensors.

    Loading was not strict, because new encoders are not in the files.
    """
    found: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= mx.load(str(file))  # type: ignore[arg-type]  # lazy: only names and shapes are read
    wanted = {name for name, _ in named_arrays(model.parameters()) if not name.startswith(SIDES)}
    there = model.sanitize(found).keys()
    if missing := wanted - there:
        raise TrainingError(f"{folder} lacks tensors of the decoder: {', '.join(sorted(missing)[:8])}")
    if unknown := there - wanted:
        raise TrainingError(f"{folder} has tensors the decoder has no place for: {', '.join(sorted(unknown)[:8])}")


def _check_weight_shapes(folder: Path, model: Model) -> None:
    """Raises `TrainingError` if weights do not fit the config. Builds a forward pass without computing it."""
    with errors_as(
        TrainingError, f"{folder}: its weights do not fit its config.json", ValueError, TypeError, RuntimeError
    ):
        model(mx.zeros((1, 1), mx.int32))


def _init_hyper_encoders(model: Model) -> None:
    """Initializes new encoders so that their rows have the scale of the matrix (embedding or head) that they read.

    For `res_latent_attn`, the last weight is set to zero (as in zip2zip++), so that the encoder begins as its residual:
    one base row or the mean of the base rows. With `residual_by_side`, the output encoder's norm also gets a small
    gain: an entry's logit is the product of its output row and the hidden state, so at the input encoder's learning
    rate one step would move the logits of all entries by several nats. For `transformer`, the gain of the last norm is
    set to the matrix's scale. Encoders of other kinds stay random.
    """
    sides: list[tuple[Any, Any]] = [(model.input_encoder, model.model.embed_tokens)]
    if not model.config.encoder.tie_encoders:
        sides.append((model.output_encoder, model.head_matrix))
    for encoder, matrix in sides:
        if model.config.encoder.kind == "res_latent_attn" and model.config.encoder.residual:
            last = encoder.proj_out if "proj_out" in encoder else encoder.norm
            last.weight = mx.zeros_like(last.weight)
            quiet = model.config.encoder.residual_by_side and encoder is not model.input_encoder
            if quiet and last is not encoder.norm:
                encoder.norm.weight = encoder.norm.weight * _OUTPUT_NORM_GAIN
        elif model.config.encoder.kind == "transformer":
            norm = encoder.layers[-1].post_mlp_layernorm
            rows = matrix_rows(matrix, mx.arange(min(_SAMPLED_ROWS, model.config.vocab_size))).astype(mx.float32)
            norm.weight = norm.weight * mx.sqrt(rows.square().mean())


def freeze_and_add_lora(model: nn.Module, settings: TrainSettings) -> None:
    """Freezes weights that are not trained, and adds LoRA layers. Raises `TrainingError` if nothing can be trained."""
    if settings.dtype == "float32" or settings.fine_tune_type == "full":
        model.set_dtype(mx.float32)
    if settings.fine_tune_type == "full":
        if any("scales" in module for module in model.modules()):
            raise TrainingError("a quantized model cannot be trained in full: use --fine-tune-type lora")
        return
    model.freeze()
    if settings.fine_tune_type == "lora":
        blocks: Any = model.layers
        layers = len(blocks) if settings.lora_layers < 0 else settings.lora_layers
        lora = {"rank": settings.lora_rank, "scale": settings.lora_scale, "dropout": settings.lora_dropout}
        if settings.lora_keys:
            lora["keys"] = _parse_lora_keys(settings.lora_keys, blocks)
        linear_to_lora_layers(model, layers, lora)
    if isinstance(model, Model):
        for encoder in (model.input_encoder, model.row_encoder):
            dequantize_all_weights(encoder).unfreeze()  # quantized weights could not be trained
    if not named_arrays(model.trainable_parameters()):
        raise TrainingError(f"--fine-tune-type {settings.fine_tune_type} leaves nothing to train in this model")


def dequantize_all_weights(model: nn.Module, dtype: str = "float32") -> Any:
    """Returns the model, or part of one, with all quantized weights dequantized, in place.

    dtype: dtype in which the model will compute: "float32" or "bfloat16".
    """
    if dtype == "float32":
        model.set_dtype(mx.float32)  # before dequantizing: 16-bit scales would give weights rounded to 16 bits
    return dequantize_model(model)


def _parse_lora_keys(names: str, blocks: Sequence[nn.Module]) -> list[str]:
    keys = [name.strip() for name in names.split(",") if name.strip()]
    if not keys:
        raise TrainingError(f"lora_keys {names!r} names no layer; leave it out for all linear layers")
    found = {name for block in blocks for name, _ in block.named_modules() if name}
    if unknown := [name for name in keys if name not in found]:
        raise TrainingError(f"lora_keys: no block has a layer {', '.join(unknown)}")
    return keys


def fingerprint_run(model: nn.Module, config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Returns a hex digest of a run. Only a run with an equal digest may resume its checkpoints.

    The digest covers config.json, `facts`, every weight's name, shape and dtype, the values of all vectors and, because
    frozen weights are not in a checkpoint, the first row of each frozen matrix.
    """
    digest = hashlib.sha256(json.dumps([config, facts], sort_keys=True, default=str).encode())
    trained = {name for name, _ in named_arrays(model.trainable_parameters())}
    for name, value in sorted(named_arrays(model.parameters())):
        digest.update(f"{name} {value.shape} {value.dtype}".encode())
        if name not in trained and value.ndim > 1:
            value = value[0]
        if value.ndim == 1 and mx.issubdtype(value.dtype, mx.floating):
            single: Any = value.astype(mx.float32)
            digest.update(memoryview(single))
    return digest.hexdigest()
