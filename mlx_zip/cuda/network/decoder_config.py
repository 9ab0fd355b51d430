"""The sizes and options of a decoder that this engine runs, and its rotary frequencies, read from config.json.

Frequencies follow the scaling rule that the config names; they are computed in float64 and kept as float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mlx_zip.errors import ConfigError
from mlx_zip.layout import MODEL_TYPE
from mlx_zip.models.decoder_options import (
    TORCH_FAMILIES,
    count_rotated_columns,
    has_tied_head,
    head_width,
    layer_rope_parameters,
    layer_types,
    longrope_factors,
    norm_eps,
    pretraining_context,
    raise_if_options_unsupported,
    rope_errors_as_config_errors,
    sliding_window,
    yarn_settings,
)
from mlx_zip.models.model_folder import ModelArgs

SHORT, LONG = 0, 1  # rows of `Rope.frequencies`


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder.

    layers, heads, kv_heads: counts. width: D of the residual stream. head_width: E. inner: width F of the MLP. rows:
    rows of the embedding. eps: of RMS norms. qkv_bias, output_bias, mlp_bias: which products have biases. qk_norm:
    whether queries and keys are normed. joined: whether the checkpoint stores q, k and v as one matrix, and gate and up
    as one matrix. windows: per layer, the sliding window in ids, or None. tied: whether the head is the embedding.
    rope: rotation of queries and keys. positions: number of positions that the model was made for.
    """

    kind: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    rows: int
    eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    joined: bool
    windows: tuple[int | None, ...]
    tied: bool
    rope: Rope
    positions: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Reads the contents of config.json, of a converted or a plain model.

        Raises `ConfigError` naming the architecture or option if it is not supported.
        """
        if config.get("model_type") == MODEL_TYPE:
            config = ModelArgs.from_dict(dict(config)).decoder_config
        kind = config.get("model_type")
        if kind not in TORCH_FAMILIES:
            known = ", ".join(TORCH_FAMILIES)
            raise ConfigError(f"model_type {kind!r} is not supported on PyTorch; supported: {known}")
        raise_if_options_unsupported(config)
        types = layer_types(config)
        ropes = [layer_rope_parameters(config, one) for one in sorted(set(types))]
        if any(rope != ropes[0] for rope in ropes):
            raise ConfigError("config.json: rope_parameters that differ between layers are not supported on PyTorch")
        window, has_options = sliding_window(config), kind in ("llama", "mistral")
        heads, width = config["num_attention_heads"], head_width(config)
        return cls(
            kind=kind,
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_width=width,
            inner=config["intermediate_size"],
            rows=config["vocab_size"],
            eps=norm_eps(config),
            qkv_bias=kind == "qwen2" or (has_options and bool(config.get("attention_bias"))),
            output_bias=has_options and bool(config.get("attention_bias")),
            mlp_bias=has_options and bool(config.get("mlp_bias")),
            qk_norm=kind == "qwen3",
            joined=kind == "phi3",
            windows=tuple(window if one == "sliding_attention" else None for one in types),
            tied=has_tied_head(config),
            rope=make_rope(ropes[0], width, config),
            positions=config.get("max_position_embeddings") or 32768,
        )

    @property
    def query_columns(self) -> int:
        """Columns of all queries: H E."""
        return self.heads * self.head_width

    @property
    def key_columns(self) -> int:
        """Columns of all keys, which are also the columns of all values: K E."""
        return self.kv_heads * self.head_width

    def kv_bytes_per_id(self, dtype: torch.dtype) -> int:
        """Returns the bytes that a KV cache of `dtype` takes per id."""
        return 2 * self.layers * self.key_columns * dtype.itemsize


# ---- the rotation of queries and keys


@dataclass(frozen=True)
class Rope:
    """The rotation of one decoder's queries and keys.

    frequencies [2, R / 2] float32: radians per position, LongRoPE's short set and its long set; without LongRoPE both
    are equal. magnitude: factor on the R rotated columns. long_from: the position from which LongRoPE uses the long
    set; a sequence that reaches this position uses the long set for all its positions. None without LongRoPE.
    """

    frequencies: torch.Tensor
    magnitude: float
    long_from: int | None

    def frequency_set(self, last: int) -> int:
        """Returns SHORT or LONG: the set of frequencies for a sequence whose last id has position `last`."""
        return LONG if self.long_from is not None and last >= self.long_from else SHORT

    def to(self, device: torch.device) -> Rope:
        """Returns the rotation with its frequencies on a device."""
        return Rope(self.frequencies.to(device), self.magnitude, self.long_from)


def make_rope(parameters: Mapping[str, Any], head_width: int, config: Mapping[str, Any]) -> Rope:
    """Returns the rotation for `parameters`, a result of `mlx_zip.models.decoder_options.layer_rope_parameters`.

    Raises `ConfigError` if the parameters are invalid. Source of the formulas: transformers 5 `modeling_rope_utils`;
    LongRoPE arXiv 2402.13753; YaRN arXiv 2309.00071.
    """
    kind = parameters["rope_type"]
    with rope_errors_as_config_errors(kind):
        columns = count_rotated_columns(parameters, head_width)
        plain = float(parameters["rope_theta"]) ** (-np.arange(0, columns, 2, dtype=np.float64) / columns)
        sets, magnitude = _RULES[kind](plain, parameters, config)
    long_from = pretraining_context(parameters, config) if kind == "longrope" else None
    return Rope(torch.from_numpy(np.stack(sets).astype(np.float32)), float(magnitude), long_from)


FrequencySets = tuple[tuple[np.ndarray, np.ndarray], float]  # short and long frequencies [R / 2], and the magnitude


def _default_frequencies(plain: np.ndarray, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> FrequencySets:
    """Returns frequencies without scaling. plain [R / 2], here and below: the unscaled frequencies."""
    return (plain, plain), 1.0


def _linear_frequencies(plain: np.ndarray, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> FrequencySets:
    scaled = plain / parameters["factor"]
    return (scaled, scaled), 1.0


def _llama3_frequencies(plain: np.ndarray, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> FrequencySets:
    """Returns Llama 3's frequencies: low ones are divided by `factor`, high ones stay, with a smooth transition."""
    factor, context = parameters["factor"], pretraining_context(parameters, config)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = context * plain / (2 * math.pi)  # full turns within the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    scaled = plain * ((1 - smooth) / factor + smooth)
    return (scaled, scaled), 1.0


def _yarn_frequencies(plain: np.ndarray, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> FrequencySets:
    """Returns YaRN's frequencies: low ones are divided by `factor`, high ones stay, with a linear ramp between."""
    factor, low, high, magnitude = yarn_settings(parameters, config, 2 * len(plain))
    ramp = np.clip((np.arange(len(plain)) - low) / max(high - low, 0.001), 0, 1)
    scaled = plain * (1 - ramp) + plain / factor * ramp
    return (scaled, scaled), magnitude


def _longrope_frequencies(plain: np.ndarray, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> FrequencySets:
    short, long, magnitude = longrope_factors(parameters, config, 2 * len(plain))
    return (plain / np.asarray(short, np.float64), plain / np.asarray(long, np.float64)), magnitude


_RULES = {
    "default": _default_frequencies,
    "linear": _linear_frequencies,
    "llama3": _llama3_frequencies,
    "yarn": _yarn_frequencies,
    "longrope": _longrope_frequencies,
}
