"""What training leaves of a quantized model: which layers are quantized in the saved one, how, and in which type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_zip.config import SIDES
from mlx_zip.training.settings import BASE, SAVE_DTYPES, UNQUANTIZED

Config = Mapping[str, Any]


def type_to_save(model: nn.Module) -> str:
    """Returns the type that a trained model's weights are saved in unless another is asked for.

    It is float32, or for a quantized model the type of its other values, so that it computes in that type as before.
    model: as it was loaded; new hyper-encoders are left out of account.
    """
    named: Any = tree_flatten(model.parameters())
    if not any(name.endswith(".scales") for name, _ in named):
        return "float32"
    old = [value for name, value in named if not name.startswith(SIDES) and mx.issubdtype(value.dtype, mx.floating)]
    largest = max(old, key=lambda value: value.size)
    return next((name for name in SAVE_DTYPES if largest.dtype == getattr(mx, name)), "float32")


def fuse(model: nn.Module, bits: str = UNQUANTIZED) -> None:
    """Merges LoRA layers into the linear layers that they adapt, in place and in float32.

    bits: one of `ADAPTED_BITS`, the bits per weight that a quantized layer gets again. One layer is computed at a time,
    so that the float weights of all need not be in memory together.
    """
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "fuse")]
    for name, module in layers:
        module.set_dtype(mx.float32)
        fused = _quantized_again(module.fuse(dequantize=True), module.linear, bits)
        mx.eval(fused.parameters())
        model.update_modules(tree_unflatten([(name, fused)]))


def _quantized_again(fused: nn.Linear, base: nn.Module, bits: str) -> nn.Module:
    """Returns a fused layer with `bits` per weight. base: the layer that was adapted, without its adapter.

    Bits other than the base's are affine, in groups of the base's size, or of 32 if that is smaller.
    """
    if bits == UNQUANTIZED or not isinstance(base, nn.QuantizedLinear):
        return fused
    if bits == BASE:
        return nn.QuantizedLinear.from_linear(fused, base.group_size, base.bits, mode=base.mode)
    group = max(base.group_size, 32)
    return nn.QuantizedLinear.from_linear(fused, group, int(bits)) if fused.weight.shape[-1] % group == 0 else fused


def quantize_encoders_again(model: nn.Module, config: Config) -> None:
    """Quantizes the hyper-encoders' layers that config.json says were quantized, in place and as they were."""
    before = config.get("quantization") or {}

    def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
        is_float = path.startswith(SIDES) and isinstance(module, nn.Linear)
        return before.get(path, False) if is_float else False

    nn.quantize(model, class_predicate=chosen)


def quantization(model: nn.Module, config: Config) -> dict[str, Any]:
    """Returns the keys of config.json by which mlx-lm's loader quantizes layers as they are in the model.

    config: that of the model that training began with, whose default for all layers stays. {} if no layer is quantized.
    """
    layers = {path: _sizes(module) for path, module in model.named_modules() if hasattr(module, "scales")}
    if not layers:
        return {}
    before = config.get("quantization") or next(iter(layers.values()))
    default = {name: value for name, value in before.items() if not isinstance(value, Mapping)}
    usual = {"mode": "affine", **default}
    own = {path: sizes for path, sizes in layers.items() if any(usual.get(name) != sizes[name] for name in sizes)}
    made = {**default, **own}
    return {"quantization": made, "quantization_config": made}


def _sizes(module: Any) -> dict[str, Any]:
    """Returns how a layer is quantized, as config.json has it."""
    return {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
