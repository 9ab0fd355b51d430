"""What an id's keys and values depend on beside the weights: how positions are counted and rotated, and the windows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_zip.config import ZipConfig

COMPRESSED = "compressed"  # the position mode of models without hypertokens, too
_SCALING = ("rope_scaling", "rope_parameters")
_NAMES = (
    "rope_theta", *_SCALING, "rope_local_base_freq", "rope_traditional", "partial_rotary_factor", "no_rope_layers",
    "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "layer_types",
)  # fmt: skip
_CONTEXT = ("max_position_embeddings", "original_max_position_embeddings")  # rules of scaling compute with these
_TRAINED_WITH = ("default", "llama3", "longrope", "su")  # rope types that come with the weights; people add the others


def positions_mark(config: Mapping[str, Any], zip_config: ZipConfig | None) -> str:
    """Returns these settings as text. Two ways of writing the same setting give two texts.

    config: config.json, or what mlx-lm read of it. zip_config: None for a model without hypertokens.
    """
    mode = COMPRESSED if zip_config is None else zip_config.position_mode
    return json.dumps({"position_mode": mode, "config": [_settings(part) for part in _parts(config)]}, sort_keys=True)


def is_as_trained(mark: str) -> bool:
    """Returns whether a mark's settings are those that come with weights: compressed positions, no scaling by hand."""
    found = json.loads(mark)
    types = (kind for part in found["config"] for name in _SCALING for kind in _types(part.get(name)))
    return found["position_mode"] == COMPRESSED and all(kind in _TRAINED_WITH for kind in types)


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields a config, and the one of its text decoder where that is nested."""
    yield config
    if isinstance(inner := config.get("text_config"), Mapping):
        yield inner


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a config that are not null. The context counts only where rotation is scaled."""
    is_scaled = any(kind != "default" for name in _SCALING for kind in _types(config.get(name)))
    names = (*_NAMES, *(_CONTEXT if is_scaled else ()))
    return {name: config[name] for name in names if config.get(name) is not None}


def _types(scaling: Any) -> Iterator[Any]:
    """Yields the rope types in `rope_scaling` or `rope_parameters`, which may hold one set for each kind of layer."""
    if not isinstance(scaling, Mapping):
        return
    nested = [value for value in scaling.values() if isinstance(value, Mapping)]
    for one in nested or [scaling]:
        yield one.get("rope_type", one.get("type", "default"))
