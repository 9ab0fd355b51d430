"""Rotary frequencies of every scaling rule of the supported models, computed in float64 and kept as float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mlx_zip.errors import ConfigError
from mlx_zip.models.decoder_options import count_rotated_columns, pretraining_context, rope_errors_as_config_errors

SHORT, LONG = 0, 1  # rows of `Rope.frequencies`


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
    theta, context, columns = parameters["rope_theta"], pretraining_context(parameters, config), 2 * len(plain)
    factor = parameters.get("factor") or config["max_position_embeddings"] / context
    ends = [parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1]  # turns within the original context
    low, high = (columns * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in ends)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, columns - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / max(high - low, 0.001), 0, 1)
    scaled = plain * (1 - ramp) + plain / factor * ramp
    return (scaled, scaled), _yarn_magnitude(parameters, factor)


def _yarn_magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    """Returns YaRN's factor on rotated columns: `attention_factor` if given, else a value computed from `factor`."""
    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    stretch = math.log(factor) if factor > 1 else 0.0
    weight, weight_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if weight and weight_all:
        return (0.1 * weight * stretch + 1.0) / (0.1 * weight_all * stretch + 1.0)
    return 0.1 * stretch + 1.0


def _longrope_frequencies(plain: np.ndarray, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> FrequencySets:
    context = pretraining_context(parameters, config)
    for name in ("short_factor", "long_factor"):
        if len(parameters[name]) != len(plain):
            raise ConfigError(f"rope {name} has {len(parameters[name])} factors, the heads need {len(plain)}")
    short, long = (plain / np.asarray(parameters[name], np.float64) for name in ("short_factor", "long_factor"))
    magnitude = parameters.get("attention_factor")
    if magnitude is None:
        growth = parameters.get("factor") or config["max_position_embeddings"] / context
        magnitude = 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(context))
    return (short, long), magnitude


_RULES = {
    "default": _default_frequencies,
    "linear": _linear_frequencies,
    "llama3": _llama3_frequencies,
    "yarn": _yarn_frequencies,
    "longrope": _longrope_frequencies,
}
