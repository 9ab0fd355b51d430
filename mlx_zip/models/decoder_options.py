"""The supported decoders and the options of config.json that describe them, read without MLX or PyTorch.

Rotary positions, windows and biases are read as transformers 5 reads them. An option that is not supported raises
`ConfigError`; no option is ignored. `mlx_zip.models` and `mlx_zip.cuda` build decoders from these options.
Rotary frequencies are computed in float64 on PyTorch and in float32 on MLX, where recorded results must not change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mlx_zip.config import MAX_LAYERS
from mlx_zip.errors import ConfigError
from mlx_zip.layout import MODEL_TYPE


@dataclass(frozen=True)
class DecoderFamily:
    """The properties of the decoders of one `model_type`.

    module: name of the mlx-lm module that has the blocks. architecture: name of transformers' class. tied, theta:
    transformers' defaults for `tie_word_embeddings` and `rope_theta`. activations, ropes: the MLP activations and rope
    types that are supported.
    """

    module: str
    architecture: str
    tied: bool
    activations: tuple[str, ...] = ("silu", "swish")
    theta: float = 10_000.0
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "longrope")


_GELU = ("gelu_pytorch_tanh", "gelu_new")
FAMILIES = {
    "llama": DecoderFamily("llama", "LlamaForCausalLM", tied=False),
    "mistral": DecoderFamily("llama", "MistralForCausalLM", tied=False),
    "phi3": DecoderFamily("phi3", "Phi3ForCausalLM", tied=False, ropes=("default", "longrope")),
    "qwen2": DecoderFamily("qwen2", "Qwen2ForCausalLM", tied=False),
    "qwen3": DecoderFamily("qwen3", "Qwen3ForCausalLM", tied=False),
    "gemma": DecoderFamily("gemma", "GemmaForCausalLM", tied=True, activations=(*_GELU, "gelu"), ropes=("default",)),
    "gemma2": DecoderFamily("gemma2", "Gemma2ForCausalLM", tied=True, activations=_GELU, ropes=("default",)),
    "gemma3_text": DecoderFamily("gemma3_text", "Gemma3ForCausalLM", tied=True, activations=_GELU, theta=1_000_000.0),
}
TORCH_FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3")  # families that `mlx_zip.cuda` runs too
TORCH_BITS, TORCH_GROUPS = (4, 8), (32, 64, 128)  # quantizations that `mlx_zip.cuda` reads (mode "affine")


def decoder_type(config: Mapping[str, Any]) -> Any:
    """Returns the decoder's model type in a config.json: of a model with hypertokens, that of its base model."""
    section = config.get("zip2zip")
    if config["model_type"] == MODEL_TYPE and isinstance(section, Mapping):
        return section.get("base_model_type")
    return config["model_type"]


def why_not_on_torch(config: Mapping[str, Any]) -> str | None:
    """Returns as text which model type or quantization of a config.json `mlx_zip.cuda` does not support, else None."""
    if (kind := decoder_type(config)) not in TORCH_FAMILIES:
        return f"models of type {kind!r}"
    record = config.get("quantization")
    whole = record if isinstance(record, Mapping) else {}
    for one in (whole, *(value for value in whole.values() if isinstance(value, Mapping))):
        bits, group, mode = one.get("bits", 4), one.get("group_size", 32), one.get("mode", "affine")
        if bits not in TORCH_BITS or group not in TORCH_GROUPS or mode != "affine":
            return f"weights of {bits} bits in groups of {group}, mode {mode}"
    return None


def raise_if_options_unsupported(config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` naming the model type or option that is not supported. Rope parameters are not checked."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(f"model_type {kind!r} is not supported; supported: {', '.join(FAMILIES)}")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        _raise_unless_size(key, config.get(key))
    for key in ("num_key_value_heads", "head_dim"):
        if config.get(key) is not None:
            _raise_unless_size(key, config[key])
    if config["num_hidden_layers"] > MAX_LAYERS:
        raise ConfigError(f"config.json: num_hidden_layers is {config['num_hidden_layers']}, at most {MAX_LAYERS}")
    if (eps := config.get("rms_norm_eps")) is not None and not (_is_number(eps) and 0 <= eps < math.inf):
        raise ConfigError(f"config.json: rms_norm_eps must be a number of at least 0, got {eps!r}")
    _raise_unless_size("max_position_embeddings", config.get("max_position_embeddings", 1))
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if not isinstance(config.get(key), bool | None):
            raise ConfigError(f"config.json: {key} must be true or false, got {config[key]!r}")
    if _activation_name(config) not in FAMILIES[kind].activations:
        raise ConfigError(f"hidden activation {_activation_name(config)!r} is not supported for {kind}")
    _raise_if_heads_unsupported(config)
    if kind in ("qwen3", "gemma", "gemma2", "gemma3_text") and config.get("attention_bias"):
        raise ConfigError(f"attention_bias is not supported for {kind}")
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if kind == "gemma3_text" and config.get(key):
            raise ConfigError(f"{key} is not supported for gemma3_text")
    if kind == "gemma2" and not config.get("attn_logit_softcapping", 50.0):
        raise ConfigError("gemma2 without attn_logit_softcapping is not supported")


def _raise_unless_size(key: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ConfigError(f"config.json: {key} must be a positive integer below 2^31, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def has_tied_head(config: Mapping[str, Any]) -> bool:
    """Returns whether the head uses the embedding's weights."""
    return bool(config.get("tie_word_embeddings", FAMILIES[config["model_type"]].tied))


def norm_eps(config: Mapping[str, Any]) -> float:
    """Returns the epsilon of RMS norms in config.json, or transformers' default for the model type."""
    given = config.get("rms_norm_eps")
    return (1e-5 if config["model_type"] == "phi3" else 1e-6) if given is None else given


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Returns each layer's kind of attention, "full_attention" or "sliding_attention".

    Follows transformers 5's rules for the model type. Raises `ConfigError` if a kind is not supported.
    """
    kind, layers, window = config["model_type"], config["num_hidden_layers"], sliding_window(config)
    full, sliding = "full_attention", "sliding_attention"
    if kind in ("llama", "gemma"):
        declared = config.get("layer_types")
        if declared and (not isinstance(declared, list) or any(one != full for one in declared)):
            raise ConfigError(f"layer_types other than {full} are not supported for {kind}")
        return [full] * layers
    if kind in ("mistral", "phi3"):
        return [full if window is None else sliding] * layers
    if kind in ("qwen2", "qwen3") and not config.get("use_sliding_window"):
        return [full] * layers
    if config.get("layer_types") is not None:
        return _checked_layer_types(config["layer_types"], layers)
    if kind in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", 28)
        return [sliding if window is not None and i >= first else full for i in range(layers)]
    pattern = 2 if kind == "gemma2" else config.get("sliding_window_pattern", 6)
    if window is None:
        raise ConfigError(f"config.json: {kind} needs a sliding_window")
    return [sliding if (i + 1) % pattern else full for i in range(layers)]


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Returns the sliding window in ids (None: none), or the model type's default. Raises `ConfigError` if invalid."""
    default = None if config["model_type"] in ("llama", "phi3", "gemma") else 4096
    window = config.get("sliding_window", default)
    if window is not None and (type(window) is not int or not 1 <= window < 1 << 31):
        raise ConfigError(f"config.json: sliding_window must be a positive integer below 2^31 or null, got {window!r}")
    return window


def _checked_layer_types(types: Any, layers: int) -> list[str]:
    """Returns the config's `layer_types`. Raises `ConfigError` unless they name a known kind for each layer."""
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(one not in known for one in types):
        raise ConfigError(f"layer_types must name {' or '.join(sorted(known))} for each of {layers} layers")
    return types


def _activation_name(config: Mapping[str, Any]) -> str:
    """Returns the name of the MLP activation. (Gemma 1's first release wrote "gelu" and meant the tanh form.)"""
    kind = config["model_type"]
    default = "gelu_pytorch_tanh" if kind.startswith("gemma") else "silu"
    return config.get("hidden_activation") or config.get("hidden_act") or default


def head_width(config: Mapping[str, Any]) -> int:
    """Returns the width of an attention head, or the model type's default if the config has none."""
    default = 256 if config["model_type"].startswith("gemma") else None
    if config["model_type"] == "qwen3":
        default = 128
    return config.get("head_dim") or default or config["hidden_size"] // config["num_attention_heads"]


def _raise_if_heads_unsupported(config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if the model type cannot have this head width or these numbers of heads."""
    even = config["hidden_size"] // config["num_attention_heads"]
    if config["model_type"] in ("phi3", "qwen2") and head_width(config) != even:
        raise ConfigError(f"head_dim {head_width(config)} is not supported for {config['model_type']}")
    if not head_width(config) or config["num_attention_heads"] * head_width(config) >= 1 << 31:
        heads = config["num_attention_heads"]
        raise ConfigError(f"config.json: {heads} attention heads of width {head_width(config)} are not possible")
    if config["num_attention_heads"] % (config.get("num_key_value_heads") or 1):
        raise ConfigError(f"config.json: num_key_value_heads {config['num_key_value_heads']} does not divide the heads")


def layer_rope_parameters(config: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """Returns the rope parameters of layers with this kind of attention. Raises `ConfigError` if unsupported."""
    kind = config["model_type"]
    family = FAMILIES[kind]
    if kind == "gemma3_text" and layer_type == "sliding_attention":
        local = (config.get("rope_parameters") or {}).get(layer_type) or {}
        config = {"rope_theta": config.get("rope_local_base_freq") or 10_000.0, "rope_parameters": local}
    parameters = rope_parameters(config, layer_type, family.theta)
    if kind == "phi3" and parameters["rope_type"] == "yarn":  # transformers reads Phi-3's "yarn" as LongRoPE too
        parameters["rope_type"] = "longrope"
    theta = parameters["rope_theta"]
    if _is_number(theta) and not 0 < theta < math.inf:
        raise ConfigError(f"config.json: rope_theta must be a positive number, got {theta!r}")
    if parameters["rope_type"] not in family.ropes:
        raise ConfigError(f"rope_type {parameters['rope_type']!r} is not supported for {kind}")
    return parameters


def rope_parameters(config: Mapping[str, Any], layer_type: str, theta: float) -> dict[str, Any]:
    """Returns the rope parameters of config.json, written either as `rope_parameters` or as `rope_scaling`.

    layer_type: "full_attention" or "sliding_attention", for configs with one set of parameters per layer type. theta:
    the value of `rope_theta` if the config has none. Raises `ConfigError` if the two ways of writing contradict each
    other.
    """
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, Mapping):
            raise ConfigError(f"config.json: {key} must be an object or null, got {config[key]!r}")
    new = config.get("rope_parameters") or {}
    if new and all(isinstance(value, Mapping) for value in new.values()):
        new = new.get(layer_type) or {}
    old = dict(config.get("rope_scaling") or {})
    if "type" in old:
        old.setdefault("rope_type", old.pop("type"))
    if config.get("rope_theta") is not None:
        old["rope_theta"] = config["rope_theta"]
    if clash := sorted(key for key in old.keys() & new.keys() if old[key] != new[key]):
        raise ConfigError(f"rope_parameters and rope_scaling/rope_theta disagree about {', '.join(clash)}")
    merged = {"rope_theta": theta, "rope_type": "default", **old, **new}
    if merged["rope_type"] == "su":  # the first Phi-3 releases' name for LongRoPE
        merged["rope_type"] = "longrope"
    merged.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    return merged


def count_rotated_columns(parameters: Mapping[str, Any], head_width: int) -> int:
    """Returns the number of a head's columns that the rope rotates. Raises `ConfigError` if it is odd or too large."""
    columns = int(head_width * parameters["partial_rotary_factor"])
    if not 0 < columns <= head_width or columns % 2:
        raise ConfigError(f"config.json: partial_rotary_factor rotates {columns} of {head_width} dimensions")
    return columns


@contextmanager
def rope_errors_as_config_errors(kind: str) -> Iterator[None]:
    """Context manager: turns errors in reading rope parameters into a `ConfigError` that names the type `kind`."""
    try:
        yield
    except KeyError as missing:
        raise ConfigError(f"rope_type {kind!r}: {missing.args[0]} is missing") from None
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"rope_type {kind!r}: a parameter is not a number: {error}") from error


def pretraining_context(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Returns the context length, in ids, that the model was pretrained with.

    As in transformers, the value at config.json's top level takes precedence over the one in the rope parameters.
    """
    key = "original_max_position_embeddings"
    return int(config.get(key) or parameters.get(key) or config["max_position_embeddings"])


def yarn_settings(
    parameters: Mapping[str, Any], config: Mapping[str, Any], columns: int
) -> tuple[float, float, float, float]:
    """Returns YaRN's (factor, low, high, magnitude). columns: number of a head's columns that are rotated.

    Wavelengths of column pairs before `low` stay, those from `high` on are stretched by `factor`, with a ramp between.
    magnitude: factor on the rotated columns.
    """
    theta, context = parameters["rope_theta"], pretraining_context(parameters, config)
    factor = parameters.get("factor") or config["max_position_embeddings"] / context
    ends = [parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1]  # turns within the pretraining context
    low, high = (columns * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in ends)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    return factor, max(low, 0), min(high, columns - 1), _yarn_magnitude(parameters, factor)


def _yarn_magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    stretch = math.log(factor) if factor > 1 else 0.0
    weight, weight_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if weight and weight_all:
        return (0.1 * weight * stretch + 1.0) / (0.1 * weight_all * stretch + 1.0)
    return 0.1 * stretch + 1.0


def longrope_factors(
    parameters: Mapping[str, Any], config: Mapping[str, Any], columns: int
) -> tuple[Sequence[float], Sequence[float], float]:
    """Returns LongRoPE's short factors and long factors, one per pair of columns, and the factor on rotated columns."""
    for name in ("short_factor", "long_factor"):
        if len(parameters[name]) != columns // 2:
            raise ConfigError(f"rope {name} has {len(parameters[name])} factors, the heads need {columns // 2}")
    magnitude = parameters.get("attention_factor")
    if magnitude is None:
        context = pretraining_context(parameters, config)
        growth = parameters.get("factor") or config["max_position_embeddings"] / context
        magnitude = 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(context))
    return parameters["short_factor"], parameters["long_factor"], magnitude
