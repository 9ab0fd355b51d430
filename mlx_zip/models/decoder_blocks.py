"""Builds the supported decoders from mlx-lm's blocks, and applies options of config.json that the blocks ignore.

The blocks (attention, MLP, norms) are mlx-lm's. Rotary positions, windows, soft caps and embedding scale are read
from the config here, because mlx-lm 0.32 ignores some of them: Phi-3's short factors and windows, Mistral's and
Gemma 2's windows, `rope_parameters` as transformers 5 writes them. An option that is not supported raises
`ConfigError`; no option is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import mlx.nn as nn

from mlx_zip.models.decoder_options import (
    FAMILIES,
    has_tied_head,
    head_width,
    layer_rope_parameters,
    layer_types,
    norm_eps,
    pretraining_context,
    raise_if_options_unsupported,
    sliding_window,
)
from mlx_zip.models.layers import RMSNorm, SoftCapAttention, TanhGeluMLP, make_rope, use_quick_norms


@dataclass(frozen=True)
class DecoderTraits:
    """The properties of a decoder beyond its blocks.

    windows: per layer, the sliding window in ids, or None for full attention. tied: whether the head uses the
    embedding's weights. embed_scale: factor on embeddings. soft_cap: c in c * tanh(logits / c), None for no cap.
    long_context: a call whose last id has this position or a later one uses LongRoPE's long factors; None if the model
    has no LongRoPE. mask_as_array: whether the blocks need the mask as an array, not as the word "causal".
    """

    windows: tuple[int | None, ...]
    tied: bool
    embed_scale: float = 1.0
    soft_cap: float | None = None
    long_context: int | None = None
    mask_as_array: bool = False


def raise_if_decoder_unsupported(config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` naming the model type, option or rope type that is not supported."""
    raise_if_options_unsupported(config)
    for layer_type in set(layer_types(config)):
        make_rope(layer_rope_parameters(config, layer_type), head_width(config), config)


def make_decoder(config: Mapping[str, Any]) -> tuple[list[nn.Module], nn.Module, DecoderTraits]:
    """Returns a decoder with random weights as (layers, final norm, traits). Raises `ConfigError` if unsupported."""
    raise_if_decoder_unsupported(config)
    kind = config["model_type"]
    module = import_module(f"mlx_lm.models.{FAMILIES[kind].module}")
    defaults = _mlx_lm_defaults(config)
    given = {key: value for key, value in config.items() if value is not None or key not in defaults}
    args = module.ModelArgs.from_dict({**defaults, **given, **_NO_ROPE_KEYS})
    types = layer_types(config)
    parameters = {name: layer_rope_parameters(config, name) for name in set(types)}
    ropes = {name: make_rope(found, head_width(config), config) for name, found in parameters.items()}
    layers = [_make_block(module, kind, args, index) for index in range(config["num_hidden_layers"])]
    for layer, name in zip(layers, types, strict=True):
        if kind == "gemma":
            layer.mlp = TanhGeluMLP(config["hidden_size"], config["intermediate_size"])
        if kind == "gemma2":
            layer.self_attn = SoftCapAttention(args)
        layer.self_attn.rope = ropes[name]
        use_quick_norms(layer)
    norm = getattr(module, "RMSNorm", RMSNorm)(config["hidden_size"], eps=args.rms_norm_eps)
    long = [pretraining_context(p, config) for p in parameters.values() if p["rope_type"] == "longrope"]
    window = sliding_window(config)
    traits = DecoderTraits(
        windows=tuple(window if name == "sliding_attention" else None for name in types),
        tied=has_tied_head(config),
        embed_scale=config["hidden_size"] ** 0.5 if kind.startswith("gemma") else 1.0,
        soft_cap=args.final_logit_softcapping if kind == "gemma2" else None,
        long_context=min(long) if long else None,
        mask_as_array=kind == "gemma2",
    )
    return layers, norm, traits


# Hides the rope settings from mlx-lm's constructors, which would misread them; `make_decoder` sets its own `Rope`.
_NO_ROPE_KEYS = {"rope_scaling": None, "rope_theta": 10_000.0, "rope_parameters": None, "layer_types": None}


def _make_block(module: Any, kind: str, args: Any, index: int) -> Any:
    """Returns one decoder block of mlx-lm's module; only Gemma 3's constructor needs the layer's index."""
    if kind == "gemma3_text":
        return module.TransformerBlock(args, index)
    return module.TransformerBlock(args)


def _mlx_lm_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for the keys that mlx-lm needs and transformers may leave out of config.json or write as null."""
    heads = config["num_attention_heads"]
    gemma = config["model_type"].startswith("gemma")
    return {
        "num_key_value_heads": heads,
        "max_position_embeddings": 32768,
        "rms_norm_eps": norm_eps(config),
        "head_dim": head_width(config),
        "tie_word_embeddings": FAMILIES[config["model_type"]].tied,
        **({"query_pre_attn_scalar": 256} if gemma else {}),
    }
