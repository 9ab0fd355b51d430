"""The supported decoders: which mlx-lm blocks each is made of, and which options of its config are applied here.

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

from mlx_zip.config import MAX_LAYERS
from mlx_zip.errors import ConfigError
from mlx_zip.models.gemma import SoftCapAttention, TanhGeluMLP
from mlx_zip.models.norm import RMSNorm, with_quick_norms
from mlx_zip.models.rope import make_rope, original_context, rope_parameters


@dataclass(frozen=True)
class Traits:
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


@dataclass(frozen=True)
class Family:
    """What is known of one `model_type`.

    module: name of mlx-lm's module with its blocks. tied, theta: transformers' defaults for `tie_word_embeddings` and
    `rope_theta`. activations, ropes: the MLP activations and rope types that are supported.
    """

    module: str
    tied: bool
    activations: tuple[str, ...] = ("silu", "swish")
    theta: float = 10_000.0
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "longrope")


_GELU = ("gelu_pytorch_tanh", "gelu_new")
FAMILIES = {
    "llama": Family("llama", tied=False),
    "mistral": Family("llama", tied=False),
    "phi3": Family("phi3", tied=False, ropes=("default", "longrope")),
    "qwen2": Family("qwen2", tied=False),
    "qwen3": Family("qwen3", tied=False),
    "gemma": Family("gemma", tied=True, activations=(*_GELU, "gelu"), ropes=("default",)),
    "gemma2": Family("gemma2", tied=True, activations=_GELU, ropes=("default",)),
    "gemma3_text": Family("gemma3_text", tied=True, activations=_GELU, theta=1_000_000.0),
}


def supported_types() -> tuple[str, ...]:
    """Returns the base model types (`model_type` in config.json) that can be made or converted."""
    return tuple(FAMILIES)


def check_config(config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` naming the model type or option that is not supported."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(f"model_type {kind!r} is not supported; supported: {', '.join(FAMILIES)}")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        _check_size(key, config.get(key))
    for key in ("num_key_value_heads", "head_dim"):
        if config.get(key) is not None:
            _check_size(key, config[key])
    if config["num_hidden_layers"] > MAX_LAYERS:
        raise ConfigError(f"config.json: num_hidden_layers is {config['num_hidden_layers']}, at most {MAX_LAYERS}")
    _check_size("max_position_embeddings", config.get("max_position_embeddings", 1))
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if not isinstance(config.get(key), bool | None):
            raise ConfigError(f"config.json: {key} must be true or false, got {config[key]!r}")
    if _activation(config) not in FAMILIES[kind].activations:
        raise ConfigError(f"hidden activation {_activation(config)!r} is not supported for {kind}")
    _check_head_dim(config)
    if kind in ("qwen3", "gemma", "gemma2", "gemma3_text") and config.get("attention_bias"):
        raise ConfigError(f"attention_bias is not supported for {kind}")
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if kind == "gemma3_text" and config.get(key):
            raise ConfigError(f"{key} is not supported for gemma3_text")
    if kind == "gemma2" and not config.get("attn_logit_softcapping", 50.0):
        raise ConfigError("gemma2 without attn_logit_softcapping is not supported")
    for layer_type in set(layer_types(config)):
        make_rope(_rope_parameters(config, layer_type), _head_dim(config), config)


def _check_size(key: str, value: Any) -> None:
    """Raises `ConfigError` unless the value of this key of config.json is a positive integer below 2^31."""
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ConfigError(f"config.json: {key} must be a positive integer below 2^31, got {value!r}")


def make_decoder(config: Mapping[str, Any]) -> tuple[list[nn.Module], nn.Module, Traits]:
    """Returns a decoder with random weights as (layers, final norm, traits). Raises as `check_config` does."""
    check_config(config)
    kind = config["model_type"]
    module = import_module(f"mlx_lm.models.{FAMILIES[kind].module}")
    defaults = _mlx_lm_defaults(config)
    given = {key: value for key, value in config.items() if value is not None or key not in defaults}
    args = module.ModelArgs.from_dict({**defaults, **given, **_NO_ROPE_KEYS})
    types = layer_types(config)
    parameters = {name: _rope_parameters(config, name) for name in set(types)}
    ropes = {name: make_rope(found, _head_dim(config), config) for name, found in parameters.items()}
    layers = [_layer(module, kind, args, index) for index in range(config["num_hidden_layers"])]
    for layer, name in zip(layers, types, strict=True):
        if kind == "gemma":
            layer.mlp = TanhGeluMLP(config["hidden_size"], config["intermediate_size"])
        if kind == "gemma2":
            layer.self_attn = SoftCapAttention(args)
        layer.self_attn.rope = ropes[name]
        with_quick_norms(layer)
    norm = getattr(module, "RMSNorm", RMSNorm)(config["hidden_size"], eps=args.rms_norm_eps)
    long = [original_context(p, config) for p in parameters.values() if p["rope_type"] == "longrope"]
    window = _window(config)
    traits = Traits(
        windows=tuple(window if name == "sliding_attention" else None for name in types),
        tied=bool(config.get("tie_word_embeddings", FAMILIES[kind].tied)),
        embed_scale=config["hidden_size"] ** 0.5 if kind.startswith("gemma") else 1.0,
        soft_cap=args.final_logit_softcapping if kind == "gemma2" else None,
        long_context=min(long) if long else None,
        mask_as_array=kind == "gemma2",
    )
    return layers, norm, traits


# Replaces the rope settings that mlx-lm's constructors would read, and misread: `make_decoder` sets its own `Rope`.
_NO_ROPE_KEYS = {"rope_scaling": None, "rope_theta": 10_000.0, "rope_parameters": None, "layer_types": None}


def _layer(module: Any, kind: str, args: Any, index: int) -> Any:
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
        "rms_norm_eps": 1e-5 if config["model_type"] == "phi3" else 1e-6,
        "head_dim": _head_dim(config),
        "tie_word_embeddings": FAMILIES[config["model_type"]].tied,
        **({"query_pre_attn_scalar": 256} if gemma else {}),
    }


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Returns each layer's kind of attention, "full_attention" or "sliding_attention".

    Follows transformers 5's rules for the model type. Raises `ConfigError` for kinds that are not supported.
    """
    kind, layers, window = config["model_type"], config["num_hidden_layers"], _window(config)
    full, sliding = "full_attention", "sliding_attention"
    if kind in ("llama", "gemma"):
        declared = config.get("layer_types")
        if declared and set(declared) != {full}:
            raise ConfigError(f"layer_types other than {full} are not supported for {kind}")
        return [full] * layers
    if kind in ("mistral", "phi3"):
        return [full if window is None else sliding] * layers
    if kind in ("qwen2", "qwen3") and not config.get("use_sliding_window"):
        return [full] * layers
    if config.get("layer_types") is not None:
        return _declared_types(config["layer_types"], layers)
    if kind in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", 28)
        return [sliding if window is not None and i >= first else full for i in range(layers)]
    pattern = 2 if kind == "gemma2" else config.get("sliding_window_pattern", 6)
    if window is None:
        raise ConfigError(f"config.json: {kind} needs a sliding_window")
    return [sliding if (i + 1) % pattern else full for i in range(layers)]


def _window(config: Mapping[str, Any]) -> int | None:
    """Returns the sliding window in ids, None for none, with the model type's default. Raises `ConfigError`."""
    default = None if config["model_type"] in ("llama", "phi3", "gemma") else 4096
    window = config.get("sliding_window", default)
    if window is not None and (type(window) is not int or not 1 <= window < 1 << 31):
        raise ConfigError(f"config.json: sliding_window must be a positive integer below 2^31 or null, got {window!r}")
    return window


def _declared_types(types: Any, layers: int) -> list[str]:
    """Returns the config's `layer_types`. Raises `ConfigError` unless it names a known kind for each layer."""
    known = {"full_attention", "sliding_attention"}
    if not isinstance(types, list) or len(types) != layers or not set(types) <= known:
        raise ConfigError(f"layer_types must name {' or '.join(sorted(known))} for each of {layers} layers")
    return types


def _activation(config: Mapping[str, Any]) -> str:
    """Returns the name of the MLP activation. (Gemma 1's first release wrote "gelu" and meant the tanh form.)"""
    kind = config["model_type"]
    default = "gelu_pytorch_tanh" if kind.startswith("gemma") else "silu"
    return config.get("hidden_activation") or config.get("hidden_act") or default


def _head_dim(config: Mapping[str, Any]) -> int:
    """Returns the width of an attention head, with the model type's default."""
    default = 256 if config["model_type"].startswith("gemma") else None
    if config["model_type"] == "qwen3":
        default = 128
    return config.get("head_dim") or default or config["hidden_size"] // config["num_attention_heads"]


def _check_head_dim(config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a head width, or a number of heads, that the model type cannot have."""
    even = config["hidden_size"] // config["num_attention_heads"]
    if config["model_type"] in ("phi3", "qwen2") and _head_dim(config) != even:
        raise ConfigError(f"head_dim {_head_dim(config)} is not supported for {config['model_type']}")
    if not _head_dim(config) or config["num_attention_heads"] * _head_dim(config) >= 1 << 31:
        heads = config["num_attention_heads"]
        raise ConfigError(f"config.json: {heads} attention heads of width {_head_dim(config)} are not possible")
    if config["num_attention_heads"] % (config.get("num_key_value_heads") or 1):
        raise ConfigError(f"config.json: num_key_value_heads {config['num_key_value_heads']} does not divide the heads")


def _rope_parameters(config: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """Returns the rope parameters of layers with this kind of attention. Raises `ConfigError` for unsupported ones."""
    kind = config["model_type"]
    family = FAMILIES[kind]
    if kind == "gemma3_text" and layer_type == "sliding_attention":
        local = (config.get("rope_parameters") or {}).get(layer_type) or {}
        config = {"rope_theta": config.get("rope_local_base_freq") or 10_000.0, "rope_parameters": local}
    parameters = rope_parameters(config, layer_type, family.theta)
    if kind == "phi3" and parameters["rope_type"] == "yarn":  # transformers reads Phi-3's "yarn" as LongRoPE too
        parameters["rope_type"] = "longrope"
    if parameters["rope_type"] not in family.ropes:
        raise ConfigError(f"rope_type {parameters['rope_type']!r} is not supported for {kind}")
    return parameters
