"""Rotary frequencies of every scaling rule of the supported models, computed in float64 and kept as float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mlx_zip.models.decoder_options import (
    count_rotated_columns,
    longrope_factors,
    pretraining_context,
    rope_errors_as_config_errors,
    yarn_settings,
)

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
