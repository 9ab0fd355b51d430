"""What the model is put together from: its arguments, the decoder's weights, a layer's view of its cache, ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_zip.config import ZipConfig
from mlx_zip.errors import ConfigError, ModelError
from mlx_zip.models.rope import Positions
from mlx_zip.state import HostIds, ZipState

RECORD_KEYS = ("base_model_type", "source", "fingerprint", "plain")  # beside ZipConfig's keys in config.json's section


@dataclass(frozen=True)
class ModelArgs:
    """config.json of a converted model: the base model's keys plus a `zip2zip` section."""

    config: dict[str, Any]

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelArgs:
        """Named as mlx-lm's loader expects."""
        return cls(config)

    @property
    def zip_config(self) -> ZipConfig:
        """The section, checked. Raises `ConfigError`."""
        section = self.config.get("zip2zip")
        if not isinstance(section, dict):
            raise ConfigError("config.json has no zip2zip section; convert the checkpoint with `mlx_zip convert`")
        return ZipConfig.from_dict({key: v for key, v in section.items() if key not in RECORD_KEYS})

    @property
    def decoder_config(self) -> dict[str, Any]:
        """The base model's own config."""
        return {**self.config, "model_type": self.config["zip2zip"].get("base_model_type")}


class Body(nn.Module):
    """The decoder's weights under their checkpoint names: `embed_tokens`, `layers`, `norm`."""

    def __init__(self, config: dict[str, Any], layers: list[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = layers
        self.norm = norm


class PositionedCache:
    """One layer's KV cache as the layer sees it during one call: the same cache, with our positions as its offset."""

    def __init__(self, cache: Any, offset: Positions) -> None:
        self.cache, self.offset = cache, offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self.cache.update_and_fetch(keys, values)

    def __getattr__(self, name: str) -> Any:  # bits and group_size, when the cache is a quantized one
        return getattr(self.cache, name)


def check_shape(ids: mx.array) -> None:
    if ids.ndim != 2 or 0 in ids.shape or not mx.issubdtype(ids.dtype, mx.integer):
        raise ModelError(f"ids must be integers [B, L] with B, L > 0, got {ids.dtype} {list(ids.shape)}")


def read_ids(ids: mx.array, state: ZipState) -> HostIds:
    """The one read of a call: ids [B, L] on the host. Raises `ModelError` for what is no 32-bit id.

    In a step of generation numpy is not touched: after half a gigabyte of weights its code is no longer in the
    processor's caches, and the first use costs as much as all else on the host.
    """
    if ids.size == 1 and state.takes_one():
        one = cast(int, ids.item())
        _check_range(one, one)
        return one
    host = np.array(ids)
    if host.dtype != np.uint32:
        _check_range(int(host.min()), int(host.max()))
    return np.ascontiguousarray(host.astype(np.uint32, copy=False))


def length_of(ids: HostIds) -> int:
    return 1 if isinstance(ids, int) else ids.shape[1]


def _check_range(low: int, high: int) -> None:
    if low < 0 or high > 0xFFFFFFFF:
        raise ModelError(f"ids from {low} to {high} are not all 32-bit token ids")


def kv_length(cache: Any) -> int:
    """Ids in a KV cache; a batch cache counts them in `_idx`, its `offset` being per sequence."""
    return cache._idx if hasattr(cache, "_idx") else cache.offset
