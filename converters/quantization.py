"""Quantizes models as `mlx_lm.convert` does, and hyper-encoders to 4 or 8 bits; records each layer's settings."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_zip.config import SIDES
from mlx_zip.converters.tensors import list_some_names
from mlx_zip.errors import ConversionError, errors_as

RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")  # mlx_lm.convert.QUANT_RECIPES
ENCODER_BITS = (4, 8)
KEEP = "none"  # encoder_bits that leaves the encoders as they are
GROUP_SIZES = {"affine": 64, "mxfp4": 32, "nvfp4": 16, "mxfp8": 32}  # by mode, as mlx_lm.utils.quantize_model's own
_GROUPS = (64, 32)  # group sizes tried for an encoder layer, best first

QuantPredicate = Callable[[str, nn.Module], bool | dict[str, Any]]


@dataclass(frozen=True)
class QuantizationRecipe:
    """What to quantize and how.

    quantize: whether to quantize decoder, embedding and head. group_size, bits: None for the mode's own. mode: one of
    `GROUP_SIZES`. predicate: a name in `RECIPES`, a function of a layer's path and module, or None for all layers.
    encoder_bits: bits of the hyper-encoders' weights; "none" leaves the weights unchanged; None means 8 if `quantize`,
    else "none". dequantize: dequantize the whole model instead. half: quantize with `_quantize_with_float16_values`,
    for 8 bits. Raises `ConversionError` if a value is unknown or values contradict each other.
    """

    quantize: bool = False
    group_size: int | None = None
    bits: int | None = None
    mode: str = "affine"
    predicate: QuantPredicate | str | None = None
    encoder_bits: int | str | None = None
    dequantize: bool = False
    half: bool = False

    def __post_init__(self) -> None:
        asked = {"--q-group-size": self.group_size, "--q-bits": self.bits, "--quant-predicate": self.predicate}
        if not self.quantize and (given := [flag for flag, value in asked.items() if value is not None]):
            raise ConversionError(f"{' and '.join(given)} has no effect without -q (quantize)")
        if self.bits is not None and self.bits < 1:
            raise ConversionError(f"q_bits must be above zero, got {self.bits}")
        if self.mode not in GROUP_SIZES:
            raise ConversionError(f"q_mode {self.mode!r} is not one of {', '.join(GROUP_SIZES)}")
        if isinstance(self.predicate, str) and self.predicate not in RECIPES:
            raise ConversionError(f"quant_predicate {self.predicate!r} is not one of {', '.join(RECIPES)}")
        if isinstance(self.predicate, str) and self.mode != "affine":
            raise ConversionError("mixed quantization recipes are affine; leave q_mode out")
        if self.half and (self.bits, self.mode, self.predicate) != (8, "affine", None):
            raise ConversionError("q_half is for 8 affine bits in every layer")
        if self.encoder_bits not in (*ENCODER_BITS, KEEP, None):
            raise ConversionError(f"encoder_bits {self.encoder_bits} is not one of 4, 8, {KEEP}")

    @property
    def bits_of_encoders(self) -> int | None:
        """Bits per quantized weight of the hyper-encoders; None to leave the hyper-encoders unchanged."""
        if self.encoder_bits is None:
            return 8 if self.quantize else None
        return self.encoder_bits if isinstance(self.encoder_bits, int) else None


def quantize_model(
    model: nn.Module, config: dict[str, Any], recipe: QuantizationRecipe
) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the model and its config, quantized or dequantized by the recipe. Encoders are never quantized here.

    Raises `ConversionError` if the recipe does not fit the model or would quantize no layer.
    """
    from mlx_lm import utils

    if recipe.dequantize:
        if not config.get("quantization"):
            warnings.warn("the model is not quantized: -d (dequantize) changes nothing", stacklevel=2)
        config = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
        return utils.dequantize_model(model), config
    if not recipe.quantize:
        return model, config
    if config.get("quantization"):
        raise ConversionError("the model is quantized already; dequantize it first (mlx_zip convert -d)")
    left_out = _find_layers_of_unfit_width(model, recipe)
    before = {path: module.weight for path, module in model.named_modules() if recipe.half and "weight" in module}
    with (
        errors_as(ConversionError, "cannot quantize as asked", ValueError),  # MLX's, on bits, group size and mode
        contextlib.redirect_stdout(sys.stderr),  # mlx-lm prints to stdout
    ):
        quantized, config = utils.quantize_model(
            model,
            config,
            recipe.group_size,
            recipe.bits,
            recipe.mode,
            quant_predicate=_predicate_of_quantizable_layers(model, recipe),
        )
    if not any(hasattr(module, "scales") for _, module in quantized.named_modules()):
        raise ConversionError("-q would quantize nothing: quant_predicate refuses every layer")
    for path, module in quantized.named_modules():
        if recipe.half and hasattr(module, "scales"):
            module.weight, module.scales, module.biases = _quantize_with_float16_values(before[path], module.group_size)
    if left_out:
        warnings.warn(
            f"{len(left_out)} layers are not quantized, because their width is not a multiple of the group size: "
            f"{list_some_names(left_out, 3)}",
            stacklevel=2,
        )
    return quantized, config


def _quantize_with_float16_values(weight: mx.array, group_size: int) -> tuple[mx.array, mx.array, mx.array]:
    """Quantizes a matrix [R, D] to 8 bits such that every dequantized value is exact in float16.

    Returns packed words, scales and biases as `mx.quantize` does. Scales and biases are whole multiples of a power of
    two, and no value exceeds 2,048 times this power, because float16 has 11 bits of precision. So dequantizing in
    float16 rounds no weight. Scales are at most a quarter larger than necessary, or an eighth in a group whose values
    lie around zero.
    """
    grouped = np.array(weight.astype(mx.float32)).reshape(weight.shape[0], -1, group_size)
    low, high = grouped.min(-1, keepdims=True), grouped.max(-1, keepdims=True)
    least = np.maximum(np.maximum(-low, high) / 2030, 2.0**-24)
    unit = np.ldexp(np.float32(1), np.ceil(np.log2(least)).astype(int))
    scales = np.maximum(np.ceil((high - low) / (254 * unit)), 1) * unit
    biases = np.floor(low / unit) * unit
    levels = np.clip(np.rint((grouped - biases) / scales), 0, 255).astype(np.uint8)
    words = mx.array(levels.reshape(weight.shape).view(np.uint32))
    scales, biases = (mx.array(x[..., 0].astype(np.float32)).astype(weight.dtype) for x in (scales, biases))
    return words, scales, biases


def _find_layers_of_unfit_width(model: Any, recipe: QuantizationRecipe) -> list[str]:
    """Returns the paths of layers that stay unquantized because their width is not a multiple of the group size.

    Raises `ConversionError` if no layer can be quantized.
    """
    group, allowed = recipe.group_size, _model_predicate(model)
    group = GROUP_SIZES[recipe.mode] if group is None else group
    widths = {
        path: module.weight.shape[-1]
        for path, module in model.named_modules()
        if hasattr(module, "to_quantized") and allowed(path, module)
    }
    left_out = [path for path, width in widths.items() if group < 1 or width % group]
    if len(left_out) == len(widths):
        sizes = ", ".join(map(str, sorted(set(widths.values()))))
        fitting = [g for g in (64, 32) if recipe.mode == "affine" and any(w % g == 0 for w in widths.values())]
        hint = f"choose --q-group-size {fitting[0]}" if fitting else "leave -q out"
        raise ConversionError(
            f"-q would quantize nothing: no layer's width ({sizes}) is a multiple of the group size {group}; {hint}"
        )
    return sorted(left_out)


def _predicate_of_quantizable_layers(model: Any, recipe: QuantizationRecipe) -> QuantPredicate:
    """Returns the predicate of layers to quantize: the recipe's predicate, and False for layers the model excludes.

    The model always excludes the encoders.
    """
    chosen: Any = recipe.predicate
    if isinstance(chosen, str):
        from mlx_lm.convert import mixed_quant_predicate_builder

        chosen = mixed_quant_predicate_builder(chosen, model, recipe.group_size or 64)
    allowed = _model_predicate(model)
    if chosen is None:
        return allowed
    return lambda path, module: allowed(path, module) and chosen(path, module)


def _model_predicate(model: Any) -> QuantPredicate:
    return getattr(model, "quant_predicate", None) or (lambda path, module: True)


def quantize_encoders(model: nn.Module, config: dict[str, Any], recipe: QuantizationRecipe) -> None:
    """Quantizes the encoders' linear layers in place if the recipe says so, and records each in `config`.

    A layer is quantized in groups of 64 weights if 64 divides its width, else in groups of 32. If 32 does not divide
    the width, the layer is not quantized, and a warning names it. Raises `ConversionError` if the recipe sets bits for
    encoders but no layer can be quantized.
    """
    bits = recipe.bits_of_encoders
    if bits is None:
        return
    chosen: dict[str, dict[str, Any]] = {}
    left_out: list[str] = []

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not path.startswith(SIDES) or not isinstance(module, nn.Linear):
            return False
        group = next((g for g in _GROUPS if module.weight.shape[-1] % g == 0), None)
        if group is None:
            left_out.append(path)
            return False
        chosen[path] = {"group_size": group, "bits": bits, "mode": "affine"}
        return chosen[path]

    nn.quantize(model, class_predicate=predicate)
    if not chosen and recipe.encoder_bits is not None:
        raise ConversionError(f"encoder_bits changes nothing: no encoder layer's width is a multiple of {_GROUPS[-1]}")
    if left_out:
        warnings.warn(
            f"{len(left_out)} encoder layers are not quantized, because their width is not a multiple of "
            f"{_GROUPS[-1]}: {list_some_names(sorted(left_out), 3)}",
            stacklevel=2,
        )
    if chosen:
        default = {"group_size": _GROUPS[0], "bits": bits, "mode": "affine"}
        config["quantization"] = {**(config.get("quantization") or default), **chosen}
        config["quantization_config"] = config["quantization"]
