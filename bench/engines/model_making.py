"""Makes the models to time: named shapes with random weights, or models from folders, plain and with hypertokens.

Random weights are made in memory, one array at a time in its final dtype, so a large shape needs no file and no more
memory than its weights. The plain model and the model with hypertokens share the decoder's arrays. Random weights show
how long a step takes but write no meaningful text, so they are timed with --mode replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_zip.config import SIDES
from mlx_zip.errors import MlxZipError
from mlx_zip.layout import has_hypertokens

from .shape_table import GROUP_SIZE, PRECISIONS, SHAPES, Models, ZipOptions, config_with_hypertokens


def models_from_shape(name: str, precision: str, tokenizer: Any, options: ZipOptions) -> Models:
    """Makes models with random weights of a shape in `SHAPES`.

    Raises `MlxZipError` if the shape is unknown or has fewer base ids than the tokenizer.
    """
    if name not in SHAPES:
        raise MlxZipError(f"shape {name!r} is not one of {', '.join(SHAPES)}")
    return models_from_config(name, SHAPES[name], precision, tokenizer, options)


def models_from_config(
    name: str, config: Mapping[str, Any], precision: str, tokenizer: Any, options: ZipOptions
) -> Models:
    """Makes models with random weights for a decoder's config.json. precision: "float32", or "16", "8" or "4" bits."""
    from mlx_zip.models.zip_model import Model

    if precision not in PRECISIONS:
        raise MlxZipError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}")
    if len(tokenizer) > config["vocab_size"]:
        raise MlxZipError(f"the tokenizer has {len(tokenizer)} ids, shape {name} only {config['vocab_size']}")
    mx.random.seed(0)
    args = model_args_with_hypertokens(config, options)
    quantization = quantization_config(precision, options, Model(args))
    weights = make_random_weights(Model(args), activation_dtype_of(precision), quantization)
    decoder = drop_encoder_weights(weights)
    return Models(
        name=name,
        precision=precision,
        weights="random",
        base_config=config,
        tokenizer=tokenizer,
        plain=lambda: load_weights_into(make_plain_model(config), decoder, quantization),
        zipped=lambda: load_weights_into(Model(args), weights, quantization),
        options=options,
    )


def model_args_with_hypertokens(config: Mapping[str, Any], options: ZipOptions) -> Any:
    """Returns the arguments of a model with hypertokens. config: the decoder's config.json."""
    from mlx_zip.models.model_folder import ModelArgs

    return ModelArgs.from_dict(config_with_hypertokens(config, options))


def models_from_folders(model: str | None, base: str | None, float32: bool = False) -> Models:
    """Loads stored models: `model` with hypertokens and the plain `base`, each a folder, hub id, bundled model or None.

    If `base` is None, the plain model is the decoder of `model`. float32: convert quantized weights to float32. Raises
    `MlxZipError` if `model` has no hypertokens, `base` has hypertokens, or their tokenizers differ in size.
    """
    from mlx_zip.models.loading import find_model_folder, load
    from mlx_zip.training.starting_model import dequantize_all_weights

    if model is None and base is None:
        raise MlxZipError("name a model with --model or --base, or a shape with --shape")
    nothing: tuple[Any, Any] = (None, None)
    zipped, tokenizer = load(model) if model else nothing
    if zipped is not None and not has_hypertokens(zipped):
        raise MlxZipError(f"--model {model} has no hypertokens; a plain model is named with --base")
    plain, base_tokenizer = load(base) if base else nothing
    if has_hypertokens(plain):
        raise MlxZipError(f"--base {base} has hypertokens; name a plain model")
    if len({len(one) for one in (tokenizer, base_tokenizer) if one is not None}) > 1:
        raise MlxZipError(f"--base {base} and --model {model} have tokenizers of different sizes")
    if float32:
        zipped, plain = (None if one is None else dequantize_all_weights(one) for one in (zipped, plain))
    name: Any = model or base
    return Models(
        name=Path(name).name,
        precision="float32" if float32 else "as stored",
        weights="trained",
        base_config=vars(cast(Any, plain).args) if zipped is None else zipped.args.decoder_config,
        tokenizer=tokenizer or base_tokenizer,
        plain=decoder_copier(zipped, float32) if plain is None else model_copier(plain, base, float32),
        zipped=None if zipped is None else model_copier(zipped, model, float32),
        folder=find_model_folder(base) if base else None,
        zip_folder=find_model_folder(model) if model else None,
    )


def model_copier(loaded: Any, name: Any, dequantized: bool = False) -> Callable[[], Any]:
    """Returns a function that makes new model objects over a loaded model's weights, each with the model's pack.

    name: the model's folder or name. dequantized: whether the weights are floats, even if the folder's are quantized.
    """
    from mlx_zip.models.loading import find_model_folder, read_model_config

    weights = dict(tree_flatten(loaded.parameters()))
    quantization = None if dequantized else read_model_config(find_model_folder(name)).get("quantization")
    pack = loaded.row_source.pack if has_hypertokens(loaded) else None
    head = getattr(loaded, "draft_head", None)

    def make() -> Any:
        model = load_weights_into(type(loaded)(loaded.args), weights, quantization)
        if pack is not None:
            if dequantized and pack.rows is not None:  # the rows were tuned for quantized weights of equal value
                model.row_source.fingerprint.set(model, pack.rows.model)
            model.use_pack(pack)
        if head is not None:
            model.draft_head = head
        return model

    return make


def decoder_copier(zipped: Any, dequantized: bool = False) -> Callable[[], Any]:
    config = zipped.args.decoder_config
    weights = drop_encoder_weights(dict(tree_flatten(zipped.parameters())))
    quantization = None if dequantized else config.get("quantization")
    return lambda: load_weights_into(make_plain_model(config), weights, quantization)


def activation_dtype_of(precision: str) -> mx.Dtype:
    """Returns the dtype of activations and of weights that are not quantized.

    Quantized models on the CPU use float32, because 16-bit quantized products are slow there.
    """
    if precision == "float32" or (precision != "16" and mx.default_device() == mx.Device(mx.cpu)):
        return mx.float32
    return mx.bfloat16


def quantization_config(precision: str, options: ZipOptions, model: Any) -> dict[str, Any] | None:
    """Returns config.json's entry `quantization` if `precision` is "8" or "4", else None.

    model: the model with hypertokens, whose layers the entry names.
    """
    if precision not in ("8", "4"):
        return None
    common = {"group_size": GROUP_SIZE, "bits": int(precision)}
    if options.encoder_bits is None:
        return common
    return common | {path: {**common, "bits": options.encoder_bits} for path in encoder_layer_names(model)}


def make_random_weights(model: Any, dtype: mx.Dtype, quantization: Mapping[str, Any] | None) -> dict[str, mx.array]:
    """Returns a model's random weights, quantized or in their final dtype.

    The arrays are evaluated one by one, so that at most one is in memory twice.
    """
    cast_and_quantize(model, dtype, quantization)
    weights = dict(tree_flatten(model.parameters()))
    for value in weights.values():
        mx.eval(value)
    return weights


def cast_and_quantize(model: Any, dtype: mx.Dtype, quantization: Mapping[str, Any] | None) -> None:
    """Casts a model's weights, and quantizes the layers that the model allows and those that `quantization` names.

    Nothing is evaluated. quantization: as in a config.json; an entry that is a mapping holds the settings of one layer.
    """
    model.set_dtype(dtype)
    if quantization:
        common, special = split_encoder_quantization(quantization)
        allowed = lambda path, module: hasattr(module, "to_quantized") and model.quant_predicate(path, module)
        nn.quantize(model, **common, class_predicate=lambda path, module: special.get(path) or allowed(path, module))


def split_encoder_quantization(quantization: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    special = {key: value for key, value in quantization.items() if isinstance(value, Mapping)}
    return {key: quantization[key] for key in ("group_size", "bits")}, special


def encoder_layer_names(model: Any) -> list[str]:
    return [path for path, one in model.named_modules() if path.startswith(SIDES) and isinstance(one, nn.Linear)]


def drop_encoder_weights(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    return {name: value for name, value in weights.items() if not name.startswith(SIDES)}


def make_plain_model(config: Mapping[str, Any]) -> Any:
    from mlx_lm.utils import _get_classes

    from mlx_zip.models.loading import rope_settings_for_mlx_lm

    full = {**config, **rope_settings_for_mlx_lm(config)}
    model, args = _get_classes(full)
    return model(args.from_dict(full))


def load_weights_into(model: Any, weights: Mapping[str, mx.array], quantization: Mapping[str, Any] | None) -> Any:
    if quantization:
        common, special = split_encoder_quantization(quantization)
        stored: Any = lambda path, module: f"{path}.scales" in weights and special.get(path, True)
        nn.quantize(model, **common, class_predicate=stored)
    model.load_weights(list(weights.items()))
    model.eval()
    return model
