"""Reads PEFT LoRA adapters strictly, merges them into weights, or rewrites them as mlx-lm adapters.

An unsupported option that would change the result raises `ConversionError`, which names the option. Source: peft 0.21
(LoraConfig), mlx-lm 0.32.2 (`tuner.utils.load_adapters`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_zip.converters.tensors import (
    DTYPES,
    FLOATS,
    dtype_name,
    list_some_names,
    read_json_object_strictly,
    read_tensors,
)
from mlx_zip.errors import ConversionError
from mlx_zip.models.model_folder import ADAPTER_CONFIG as CONFIG
from mlx_zip.models.model_folder import ADAPTER_WEIGHTS as WEIGHTS

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_READ = {"r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "peft_type"}
_HARMLESS = {  # about how the adapter was trained; the tensors alone decide the result
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "task_type",
    "inference_mode",
    "base_model_name_or_path",
    "revision",
    "auto_mapping",
    "peft_version",
    "megatron_core",
    "init_lora_weights",
    "qalora_group_size",
    "ensure_weight_tying",
    "eva_config",
    "runtime_config",
}
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # other values change the base's weights


@dataclass(frozen=True, eq=False)
class LoraPair:
    """The adapter of one linear layer W, which becomes W + scale * up @ down; down [r, in], up [out, r]."""

    down: mx.array
    up: mx.array
    scale: float

    @property
    def rank(self) -> int:
        """The rank r."""
        return self.down.shape[0]


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter. pairs: module path -> its `LoraPair`. dropout: dropout rate of the training."""

    pairs: dict[str, LoraPair]
    dropout: float


def read_lora(folder: Path) -> Lora:
    """Reads a PEFT LoRA folder. Raises `ConversionError` if an option or a tensor is not supported, naming it."""
    if not (folder / CONFIG).is_file():
        raise ConversionError(f"{folder} is not a PEFT adapter: it has no {CONFIG}")
    config = read_json_object_strictly(folder / CONFIG)
    _refuse_unsupported_options(config)
    if not (folder / WEIGHTS).is_file():
        raise ConversionError(f"{folder} has {CONFIG} but no {WEIGHTS}")
    halves: dict[str, dict[str, mx.array]] = {}
    unknown = []
    for name, tensor in read_tensors(folder / WEIGHTS).items():
        if (match := _NAME.fullmatch(name)) is None:
            unknown.append(name)
        else:
            halves.setdefault(match["module"], {})[match["side"]] = tensor
    if unknown:
        raise ConversionError(f"{WEIGHTS}: not LoRA tensors of linear layers: {list_some_names(unknown)}")
    if not halves:
        raise ConversionError(f"{WEIGHTS} holds no LoRA tensors")
    pairs = {module: _read_lora_pair(module, half, config) for module, half in sorted(halves.items())}
    return Lora(pairs, _checked_number("lora_dropout", config.get("lora_dropout", 0.0)))


def _refuse_unsupported_options(config: Mapping[str, Any]) -> None:
    """Raises `ConversionError` if adapter_config.json has an unsupported option that would change the result."""
    if config.get("peft_type") != "LORA":
        raise ConversionError(f"{CONFIG}: peft_type {config.get('peft_type')!r} is not LORA")
    if config.get("bias", "none") != "none":
        raise ConversionError(f"{CONFIG}: bias {config['bias']!r} is not supported (only 'none')")
    if not isinstance(config.get("use_rslora"), bool | None):
        raise ConversionError(f"{CONFIG}: use_rslora must be true or false, got {config['use_rslora']!r}")
    start = config.get("init_lora_weights")
    if not (start is None or isinstance(start, bool) or start in _PLAIN_STARTS):
        raise ConversionError(f"{CONFIG}: init_lora_weights {start!r} changes the base weights; merge it in PEFT")
    active = {key for key, value in config.items() if value} - _READ - _HARMLESS - {"bias"}
    if active:
        raise ConversionError(f"{CONFIG}: not supported: {list_some_names(active)}; merge the adapter in PEFT first")


def _read_lora_pair(module: str, half: Mapping[str, mx.array], config: Mapping[str, Any]) -> LoraPair:
    """Returns the adapter of one module. half: the tensors "A" and "B". Raises `ConversionError` if they do not fit."""
    if half.keys() != {"A", "B"}:
        raise ConversionError(f"{WEIGHTS}: {module} has only one of lora_A and lora_B")
    down, up = half["A"], half["B"]
    if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1]:
        raise ConversionError(f"{WEIGHTS}: {module}: lora_A {list(down.shape)} and lora_B {list(up.shape)} do not fit")
    if odd := [dtype_name(half.dtype) for half in (down, up) if half.dtype not in FLOATS]:
        raise ConversionError(f"{WEIGHTS}: {module} has the type {odd[0]}, not one of {', '.join(DTYPES)}")
    rank = _checked_number("r", _match_module_pattern(config, "rank_pattern", module, config.get("r")))
    alpha = _checked_number(
        "lora_alpha", _match_module_pattern(config, "alpha_pattern", module, config.get("lora_alpha"))
    )
    if rank != down.shape[0] or rank < 1:
        raise ConversionError(f"{CONFIG} gives {module} rank {rank:g}, its tensors have {down.shape[0]}")
    return LoraPair(down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _match_module_pattern(config: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """Returns a module's own rank or alpha, as PEFT finds it, or `default` if no pattern matches the module.

    config[key] maps patterns to values; the first pattern that matches the end of the module's path counts.
    """
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise ConversionError(f"{CONFIG}: {key} must be an object, got {patterns!r}")
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise ConversionError(f"{CONFIG}: {key} has the invalid pattern {pattern!r}") from error
    return default


def _checked_number(key: str, value: Any) -> float:
    """Returns the value of a key in adapter_config.json. Raises `ConversionError` if it is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1 << 53:
        raise ConversionError(f"{CONFIG}: {key} must be a number, got {value!r}")
    return value


def check_lora_targets(lora: Lora, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `ConversionError` unless every adapted module is a linear layer of the decoder with fitting shapes.

    shapes: tensor name -> shape, of all tensors of the decoder.
    """
    if unknown := [m for m in lora.pairs if f"{m}.weight" not in shapes or not _LAYER.search(m)]:
        raise ConversionError(
            f"the adapter changes modules other than the decoder layers' own: {list_some_names(unknown)}"
        )
    for module, pair in lora.pairs.items():
        need, have = (pair.up.shape[0], pair.down.shape[1]), shapes[f"{module}.weight"]
        if need != have:
            raise ConversionError(f"the adapter for {module} is {list(need)}, the layer {list(have)}")


def merge_lora(weights: dict[str, mx.array], lora: Lora) -> None:
    """Adds the adapter to `weights`, in place and lazily. The weights that change become float32."""
    for module, pair in lora.pairs.items():
        down, up = pair.down.astype(mx.float32), pair.up.astype(mx.float32)
        name = f"{module}.weight"
        weights[name] = weights[name].astype(mx.float32) + pair.scale * (up @ down)


def to_mlx_adapter(lora: Lora, dtype: mx.Dtype | None = None) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Returns the adapter as mlx-lm stores it: the tensors of `adapters.safetensors`, and `adapter_config.json`.

    mlx-lm has one rank and one scale for all layers. So lower ranks are padded with zeros, and a differing scale is
    multiplied into `lora_b`.
    """
    rank = max(pair.rank for pair in lora.pairs.values())
    scale = next(iter(lora.pairs.values())).scale
    weights = {}
    for module, pair in lora.pairs.items():
        a, b = pair.down.T, pair.up.T
        if pair.scale != scale:
            b = (b.astype(mx.float32) * (pair.scale / scale)).astype(b.dtype)
        missing = rank - pair.rank
        weights[f"{module}.lora_a"] = mx.pad(a, [(0, 0), (0, missing)]).astype(dtype or a.dtype)
        weights[f"{module}.lora_b"] = mx.pad(b, [(0, missing), (0, 0)]).astype(dtype or b.dtype)
    layers = [int(found[1]) for module in lora.pairs if (found := _LAYER.search(module))]
    config = {
        "fine_tune_type": "lora",
        "num_layers": max(layers, default=-1) + 1,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": lora.dropout, "keys": list(lora.pairs)},
    }
    return weights, config
