"""The shapes that benches time with random weights, and the description of the models to time. Needs no MLX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_zip.layout import MODEL_TYPE

GROUP_SIZE = 64  # number of weights that share a scale in a quantized layer
PRECISIONS = ("float32", "16", "8", "4")
ENCODERS = ("transformer", "res_latent_attn", "attention", "averaging")
_LONG = [1.0 + 0.7 * i for i in range(48)]  # made-up long factors of the rope: their values do not change the time


def decoder_config(
    kind: str, sizes: tuple[int, int, int], heads: tuple[int, int], vocab_size: int, positions: int, **others: Any
) -> dict[str, Any]:
    """Returns a decoder's config.json. kind: "llama" (tied) or "phi3" (untied). others: further fields.

    sizes: width, inner width of the feed-forward layers, number of layers. heads: query heads, key heads.
    """
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    tied = {"tie_word_embeddings": kind == "llama", "max_position_embeddings": positions}
    fixed = {"model_type": kind, "vocab_size": vocab_size, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    return fixed | dict(zip(names, (*sizes, *heads), strict=True)) | tied | others


_LLAMA_ROPE = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}
_PHI = {"original_max_position_embeddings": 4096, "sliding_window": None}
_LONG_ROPE = {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": _LONG}}
SHAPES = {
    "smollm2-135m": decoder_config("llama", (576, 1536, 30), (9, 3), 49152, 8192, head_dim=64, rope_theta=100000.0),
    "small-125m": decoder_config("llama", (768, 2048, 12), (12, 12), 50304, 8192),
    "llama-3.2-1b": decoder_config(
        "llama", (2048, 8192, 16), (32, 8), 128256, 131072, head_dim=64, rope_theta=500000.0, **_LLAMA_ROPE
    ),
    "phi-3.5-mini": decoder_config("phi3", (3072, 8192, 32), (32, 32), 32064, 131072, **_PHI, **_LONG_ROPE),
    "phi-3-medium": decoder_config("phi3", (5120, 17920, 40), (40, 10), 32064, 4096, **_PHI),
}

# sizes of small models by model_type: quantized layers need 64 columns, LongRoPE needs 48 factors
NARROW: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "phi3": {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 2},
}
SMALL = {"intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 4160}


@dataclass(frozen=True)
class ZipOptions:
    """Settings of a random model's hypertokens: type and layers of its two separate hyper-encoders, and its codebook.

    The encoder `res_latent_attn` has half the model's width. encoder_bits: bits of the encoders' weights if the model
    is quantized (`mlx_zip convert -q` takes 8); None leaves the encoders unquantized.
    """

    encoder: str = "transformer"
    encoder_layers: int = 2
    merge_size: int = 3
    codebook_size: int = 2048
    encoder_bits: int | None = None


def narrow_shape_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a shape's config.json with two narrow layers and a small vocabulary, for rehearsals and for counts."""
    return {**config, **SMALL, **NARROW[config["model_type"]]}


@dataclass(frozen=True)
class Models:
    """A model without and with hypertokens, from which the engines are made.

    name, precision, weights ("random" or "trained"): for the records. plain, zipped: functions that make a new model
    object over the same weights, without and with hypertokens; zipped is None if there is no model with hypertokens.
    base_config: the decoder's config.json. folder, zip_folder: folders of the plain model and of the model with
    hypertokens, for engines that load a folder; None if there is none. options: the hypertokens of random weights, None
    for trained weights. opened: library -> the model that all engines of this library share.
    """

    name: str
    precision: str
    weights: str
    base_config: Mapping[str, Any]
    tokenizer: Any
    plain: Callable[[], Any]
    zipped: Callable[[], Any] | None
    folder: Path | None = None
    zip_folder: Path | None = None
    options: ZipOptions | None = None
    opened: dict[str, Any] = field(default_factory=dict)

    @property
    def context(self) -> int | None:
        """The decoder's number of positions; None if its config does not say."""
        return self.base_config.get("max_position_embeddings")


def zip2zip_config_section(config: Mapping[str, Any], options: ZipOptions) -> dict[str, Any]:
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


def config_with_hypertokens(config: Mapping[str, Any], options: ZipOptions) -> dict[str, Any]:
    """Returns the config.json of a model with hypertokens. config: the decoder's config.json."""
    return {**config, "model_type": MODEL_TYPE, "zip2zip": zip2zip_config_section(config, options)}
