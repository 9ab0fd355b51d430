"""Makes the models to time: named shapes with random weights, or models from folders, plain and with hypertokens.

Random weights are made in memory, one array at a time in its final number type, so that a large shape needs no file and
no more memory than its weights. The plain model and the one with hypertokens share the decoder's arrays. A shape shows
how long a step takes; random weights write no text, so they are for --mode replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_zip.config import SIDES
from mlx_zip.errors import MlxZipError
from mlx_zip.layout import is_zip

GROUP_SIZE = 64  # weights that share a scale in a quantized layer
PRECISIONS = ("float32", "16", "8", "4")
ENCODERS = ("transformer", "res_latent_attn", "attention", "averaging")
_LONG = [1.0 + 0.7 * i for i in range(48)]  # made-up factors: other values would take equal time
SHAPES: dict[str, dict[str, Any]] = {
    "small-125m": {
        "model_type": "llama",
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 50304,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "phi-3.5-mini": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32064,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": _LONG},
    },
}


@dataclass(frozen=True)
class ZipOptions:
    """Hypertokens of random weights: kind and layers of the hyper-encoders, which are untied, and the codebook.

    The encoder `res_latent_attn` works in half the model's width. encoder_bits: bits of the encoders' weights if the
    model is quantized (`mlx_zip convert -q` takes 8); None leaves them as they are.
    """

    encoder: str = "transformer"
    encoder_layers: int = 2
    merge_size: int = 3
    codebook_size: int = 2048
    encoder_bits: int | None = None


@dataclass(frozen=True)
class Models:
    """A model without and with hypertokens, from which the engines are made.

    name, precision, weights ("random" or "trained"): for the records. plain, zipped: functions that make a new model
    object over the same weights, without and with hypertokens; zipped is None if there is no model with hypertokens.
    base_config: the decoder's config.json. folder: the plain model's, for engines of other libraries; None without one.
    """

    name: str
    precision: str
    weights: str
    base_config: Mapping[str, Any]
    tokenizer: Any
    plain: Callable[[], Any]
    zipped: Callable[[], Any] | None
    folder: Path | None = None

    @property
    def context(self) -> int | None:
        """The decoder's number of positions; None if its config does not have it."""
        return self.base_config.get("max_position_embeddings")


def from_shape(name: str, precision: str, tokenizer: Any, options: ZipOptions, seed: int = 0) -> Models:
    """Makes models with random weights of a shape in `SHAPES`.

    Raises `MlxZipError` for an unknown name, and for a shape with fewer base ids than the tokenizer.
    """
    if name not in SHAPES:
        raise MlxZipError(f"shape {name!r} is not one of {', '.join(SHAPES)}")
    return from_config(name, SHAPES[name], precision, tokenizer, options, seed)


def from_config(
    name: str, config: Mapping[str, Any], precision: str, tokenizer: Any, options: ZipOptions, seed: int = 0
) -> Models:
    """Makes models with random weights for a decoder's config.json. precision: "float32", or "16", "8" or "4" bits."""
    from mlx_zip.models import Model

    if precision not in PRECISIONS:
        raise MlxZipError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}")
    if len(tokenizer) > config["vocab_size"]:
        raise MlxZipError(f"the tokenizer has {len(tokenizer)} ids, shape {name} only {config['vocab_size']}")
    mx.random.seed(seed)
    args = zip_args(config, options)
    quantization = quantization_of(precision, options, Model(args))
    weights = _random_weights(Model(args), _dtype(precision), quantization)
    decoder = _without_encoders(weights)
    return Models(
        name=name,
        precision=precision,
        weights="random",
        base_config=config,
        tokenizer=tokenizer,
        plain=lambda: _with_weights(_plain_model(config), decoder, quantization),
        zipped=lambda: _with_weights(Model(args), weights, quantization),
    )


def zip_args(config: Mapping[str, Any], options: ZipOptions) -> Any:
    """Returns the arguments of a model with hypertokens. config: the decoder's config.json."""
    from mlx_zip.models import ModelArgs

    return ModelArgs.from_dict({**config, "model_type": "zip2zip", "zip2zip": _section(config, options)})


def from_folders(model: str | None, base: str | None) -> Models:
    """Loads stored models: `model` with hypertokens and the plain `base`, each a folder, hub id, bundled model or None.

    Without `base` the plain model is the decoder of `model`. Raises `MlxZipError` for a model of the wrong kind and for
    models with tokenizers of different sizes.
    """
    from mlx_zip.loading import load, model_folder

    if model is None and base is None:
        raise MlxZipError("name a model with --model or --base, or a shape with --shape")
    nothing: tuple[Any, Any] = (None, None)
    zipped, tokenizer = load(model) if model else nothing
    if zipped is not None and not is_zip(zipped):
        raise MlxZipError(f"--model {model} has no hypertokens; a plain model is named with --base")
    plain, base_tokenizer = load(base) if base else nothing
    if is_zip(plain):
        raise MlxZipError(f"--base {base} has hypertokens; name a plain model")
    if len({len(one) for one in (tokenizer, base_tokenizer) if one is not None}) > 1:
        raise MlxZipError(f"--base {base} and --model {model} have tokenizers of different sizes")
    name: Any = model or base
    return Models(
        name=Path(name).name,
        precision="as stored",
        weights="trained",
        base_config=vars(plain.args) if zipped is None else zipped.args.decoder_config,
        tokenizer=tokenizer or base_tokenizer,
        plain=_decoder_maker(zipped) if plain is None else _maker(plain, base),
        zipped=None if zipped is None else _maker(zipped, model),
        folder=model_folder(base) if base else None,
    )


def sliced(models: Models, ids: Any) -> Callable[[], Any]:
    """Returns a function that makes the plain model with only these rows of its embedding and head. ids: uint32 [n]."""
    whole, chosen = models.plain(), mx.array(ids)
    has_id_rows = lambda name: {"embed_tokens", "lm_head"} & set(name.split("."))
    found: dict[str, Any] = dict(tree_flatten(whole.parameters()))
    weights = {name: mx.take(value, chosen, axis=0) if has_id_rows(name) else value for name, value in found.items()}
    mx.eval(weights)
    packed = {
        name: {key: getattr(module, key) for key in ("group_size", "bits", "mode")}
        for name, module in whole.named_modules()
        if hasattr(module, "bits")
    }
    args = replace(whole.args, vocab_size=len(ids))

    def make() -> Any:
        model = type(whole)(args)
        if packed:
            nn.quantize(model, class_predicate=lambda path, module: packed.get(path, False))
        model.load_weights(list(weights.items()))
        model.eval()
        return model

    return make


def _maker(loaded: Any, name: Any) -> Callable[[], Any]:
    """Returns a function that makes new model objects over a loaded model's weights, each beginning with its pack.

    name: where it was loaded from.
    """
    from mlx_zip.loading import model_folder, read_config

    weights, quantization = dict(tree_flatten(loaded.parameters())), read_config(model_folder(name)).get("quantization")
    pack = loaded.session.pack if is_zip(loaded) else None

    def make() -> Any:
        model = _with_weights(type(loaded)(loaded.args), weights, quantization)
        if pack is not None:
            model.take_pack(pack)
        return model

    return make


def _decoder_maker(zipped: Any) -> Callable[[], Any]:
    """Returns a function that makes the plain decoder over the weights of a model with hypertokens."""
    config = zipped.args.decoder_config
    weights = _without_encoders(dict(tree_flatten(zipped.parameters())))
    return lambda: _with_weights(_plain_model(config), weights, config.get("quantization"))


def _dtype(precision: str) -> mx.Dtype:
    """Returns the number type of activations and of weights that are not quantized.

    Quantized models on the CPU have float32, because quantized products in 16 bit are slow there.
    """
    if precision == "float32" or (precision != "16" and mx.default_device() == mx.Device(mx.cpu)):
        return mx.float32
    return mx.bfloat16


def quantization_of(precision: str, options: ZipOptions, model: Any) -> dict[str, Any] | None:
    """Returns the quantization for a config.json; None if the precision is not 8 or 4 bits. model: with hypertokens."""
    if precision not in ("8", "4"):
        return None
    common = {"group_size": GROUP_SIZE, "bits": int(precision)}
    if options.encoder_bits is None:
        return common
    return common | {path: {**common, "bits": options.encoder_bits} for path in _encoder_layers(model)}


def _section(config: Mapping[str, Any], options: ZipOptions) -> dict[str, Any]:
    """Returns the section `zip2zip` of a config.json. config: the decoder's."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    encoder: dict[str, Any] = {"hidden_size": width, "tie_encoders": False}
    if options.encoder != "averaging":
        encoder["num_heads"] = heads
    if options.encoder == "res_latent_attn":
        encoder |= {"hidden_size": width // 2, "model_hidden_size": width}
    if options.encoder in ("transformer", "res_latent_attn"):
        encoder |= {"num_hidden_layers": options.encoder_layers, "intermediate_size": 4 * encoder["hidden_size"]}
    disabled = sorted({0, 1, 2, config["vocab_size"] - 1})
    sizes = {"initial_vocab_size": config["vocab_size"], "max_codebook_size": options.codebook_size}
    return {
        "base_model_type": config["model_type"],
        "encoder_type": options.encoder,
        "encoder": encoder,
        "compression": {**sizes, "max_subtokens": options.merge_size, "disabled_ids": disabled},
        "pad_token_id": config["vocab_size"] - 1,
    }


def _random_weights(model: Any, dtype: mx.Dtype, quantization: Mapping[str, Any] | None) -> dict[str, mx.array]:
    """Returns a model's random weights in their final number type or quantized.

    They are evaluated one by one, so that at most one array is in memory twice.
    """
    quantize(model, dtype, quantization)
    weights = dict(tree_flatten(model.parameters()))
    for value in weights.values():
        mx.eval(value)
    return weights


def quantize(model: Any, dtype: mx.Dtype, quantization: Mapping[str, Any] | None) -> None:
    """Gives a model's weights their number type, and quantizes the layers that it allows and those named apart.

    Nothing is evaluated. quantization: as in a config.json; a mapping in it names a layer and its own values.
    """
    model.set_dtype(dtype)
    if quantization:
        common, special = _split_quantization(quantization)
        allowed = lambda path, module: hasattr(module, "to_quantized") and model.quant_predicate(path, module)
        nn.quantize(model, **common, class_predicate=lambda path, module: special.get(path) or allowed(path, module))


def _split_quantization(quantization: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (group size and bits, values of the layers that have their own) of a config.json's quantization."""
    special = {key: value for key, value in quantization.items() if isinstance(value, Mapping)}
    return {key: quantization[key] for key in ("group_size", "bits")}, special


def _encoder_layers(model: Any) -> list[str]:
    """Returns the names of the hyper-encoders' linear layers."""
    return [path for path, one in model.named_modules() if path.startswith(SIDES) and isinstance(one, nn.Linear)]


def _without_encoders(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Returns the weights without those of the hyper-encoders."""
    return {name: value for name, value in weights.items() if not name.startswith(SIDES)}


def _plain_model(config: Mapping[str, Any]) -> Any:
    """Makes mlx-lm's own model for a decoder's config.json, with weights still to be loaded."""
    from mlx_lm.utils import _get_classes

    from mlx_zip.loading import rope_settings

    full = {**config, **rope_settings(config)}
    model, args = _get_classes(full)
    return model(args.from_dict(full))


def _with_weights(model: Any, weights: Mapping[str, mx.array], quantization: Mapping[str, Any] | None) -> Any:
    """Loads weights into a model, whose layers are quantized first as the weights are, and returns the model."""
    if quantization:
        common, special = _split_quantization(quantization)
        stored: Any = lambda path, module: f"{path}.scales" in weights and special.get(path, True)
        nn.quantize(model, **common, class_predicate=stored)
    model.load_weights(list(weights.items()))
    model.eval()
    return model
