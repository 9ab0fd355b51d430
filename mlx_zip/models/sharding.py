"""Splits a model over the machines of one run, as mlx-lm does: each machine keeps a share of every layer.

A layer's attention heads and its MLP are split; each of the two ends in one sum over the machines. Embedding, head,
norms and hyper-encoders are whole on every machine, so that each machine follows the codebook by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_linear
from mlx.utils import tree_flatten

from mlx_zip.errors import ModelError
from mlx_zip.models.register import MODEL_TYPE
from mlx_zip.models.rows.fingerprints import fingerprint_of, sampled

SHARDED_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # those of our model types that mlx-lm can split
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def check_sharding(config: Mapping[str, Any], size: int) -> None:
    """Raises `ModelError` unless the model with this config.json can be split over `size` machines."""
    section = config.get("zip2zip")
    zip2zip = config["model_type"] == MODEL_TYPE and isinstance(section, Mapping)
    kind = section.get("base_model_type") if zip2zip and isinstance(section, Mapping) else config["model_type"]
    if kind not in SHARDED_TYPES:
        raise ModelError(f"a model of type {kind} cannot be split over machines; these can: {', '.join(SHARDED_TYPES)}")
    heads = config.get("num_attention_heads")
    counts = {
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "intermediate_size": config.get("intermediate_size"),
    }
    for name, count in counts.items():
        if isinstance(count, int) and count % size:
            raise ModelError(f"the model cannot be split over {size} machines: its {name} is {count}, no multiple")


def shard_layers(layers: Sequence[nn.Module], group: mx.distributed.Group) -> None:
    """Replaces the linear layers in decoder blocks by this machine's share of them; nothing is read yet.

    Raises `ModelError` if a quantized layer's groups cannot be divided.
    """
    for index, layer in enumerate(layers):
        parts: Any = layer
        attention, mlp = parts.self_attn, parts.mlp
        for module, outward, inward in ((attention, _ATTENTION, "o_proj"), (mlp, _MLP, "down_proj")):
            _check_groups(module[inward], group.size(), f"layers.{index}: {inward}")
            for name in outward:
                module[name] = shard_linear(module[name], "all-to-sharded", group=group)
            module[inward] = shard_linear(module[inward], "sharded-to-all", group=group)
        attention.n_heads //= group.size()
        attention.n_kv_heads //= group.size()


def _check_groups(linear: Any, size: int, name: str) -> None:
    """Raises `ModelError` if the groups of a quantized linear layer's input cannot be shared by `size` machines."""
    groups = linear.scales.shape[-1] if "scales" in linear else size
    if groups % size:
        raise ModelError(
            f"the model cannot be split over {size} machines: {name} has {groups} quantization groups per row, no "
            "multiple; convert it with a smaller --q-group-size"
        )


def split(model: Any, group: mx.distributed.Group) -> str:
    """Makes a model that was loaded lazily keep this machine's share only; returns the whole model's fingerprint.

    Weights are read one by one, so that little more than the share is in memory at any time. From then on ids are
    chosen by the first machine (`chosen_by_first`). Raises `ModelError` as `shard_layers` does.
    """
    whole = sampled(model)  # of the weights before the split: their values are taken as each weight is read
    _shard(model, group)
    shares: dict[str, mx.array] = dict(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    for one in whole:
        mx.eval(one.values, shares[one.name])
    mx.clear_cache()
    model.machines = group
    return fingerprint_of(whole)


def _shard(model: Any, group: mx.distributed.Group) -> None:
    """Calls the model's own `shard`. mlx-lm raises `ValueError` for what it cannot divide."""
    try:
        model.shard(group)
    except ValueError as error:
        raise ModelError(f"the model cannot be split over {group.size()} machines: {error}") from error


def machines_of(model: Any) -> mx.distributed.Group | None:
    """Returns the machines that a model is split over, None for a model that is whole."""
    return getattr(model, "machines", None)


def chosen_by_first(ids: mx.array, group: mx.distributed.Group) -> mx.array:
    """Returns the first machine's ids on every machine, in the dtype of ids.

    The machines' logits may differ in the last bit (other chips, other orders of summing), and so may ids that each
    would choose for itself. Other machines' ids are multiplied by 0, not left out: the sum must come after their own
    layers' sums, because all machines must sum in the same order.
    """
    return mx.distributed.all_sum(ids if group.rank() == 0 else ids * 0, group=group)
