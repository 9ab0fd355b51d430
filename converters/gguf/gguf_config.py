"""Translates a GGUF file's metadata to config.json, and its tensor names to the model's tensor names.

Source: gguf.md of ggml for the keys, llama.cpp for what a missing key means and for the tensors' names and order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from mlx_zip.config import MAX_LAYERS
from mlx_zip.converters.gguf.gguf_file import GgufFile
from mlx_zip.converters.tensors import list_some_names
from mlx_zip.models.decoder_options import FAMILIES, head_width, longrope_factors

KINDS = ("llama", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3")  # values of general.architecture
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_ROPE_FREQS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_HARMLESS = ("general.", "quantize.", "imatrix.", "mradermacher.")  # keys that describe the file, not the model
_LARGE = {"gemma2": 46, "gemma3": 62}  # number of layers of the 27B models, whose attention scale differs
_META = "Meta AI original pth"  # the only known order of q and k rows, which `tensor_row_order` undoes


class GgufSettings:
    """The metadata of a file. Each read removes its key, so that keys left at the end are unknown ones."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.error = file, file.error
        self.left = {k: v for k, v in file.metadata.items() if not k.startswith(("tokenizer.", *_HARMLESS))}
        kind = file.metadata.get("general.architecture")
        self.kind = kind if isinstance(kind, str) else ""
        if self.kind not in KINDS:
            raise self.error(f"general.architecture {str(kind)[:80]!r} is not supported; supported: {', '.join(KINDS)}")
        if (content := self._single("general.type", file.metadata.get("general.type", "model"))) != "model":
            raise self.error(f"general.type is {str(content)[:80]!r}; only models are converted")
        parts = [self.left.pop(f"split.{name}", 0) for name in ("count", "no", "tensors.count")]
        if self._single("split.count", parts[0]) not in (0, 1):
            raise self.error(
                f"one of {str(parts[0])[:80]} parts of a model: join them first (llama-gguf-split --merge)"
            )

    def take_value(self, name: str, default: Any = ...) -> Any:
        """Removes the key `<architecture>.<name>` and returns its single value, or `default` if the key is missing."""
        return self._single(f"{self.kind}.{name}", self._take(name, default))

    def _take(self, name: str, default: Any) -> Any:
        value = self.left.pop(f"{self.kind}.{name}", default)
        if value is ...:
            raise self.error(f"{self.kind}.{name} is missing")
        return value

    def _single(self, key: str, value: Any) -> Any:
        if isinstance(value, np.ndarray | list):
            raise self.error(f"{key} must be one value, got an array of {len(value)}")
        return value

    def take_size(self, name: str, default: Any = ...) -> int:
        """Returns the value of a key, an integer from 1 to 2^31 - 1. An array of values per layer must repeat one."""
        value: Any = self._take(name, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if value is not default and not (type(value) is int and 1 <= value < 1 << 31):
            raise self.error(
                f"{self.kind}.{name} must be a positive integer, one for all layers, got {str(value)[:80]}"
            )
        return cast(int, value)

    def take_number(self, name: str, default: Any = ...) -> Any:
        """Returns the value of a key, a finite number above zero, as the shortest decimal of the same float32 value."""
        value = self.take_value(name, default)
        if value is default:
            return default
        with np.errstate(over="ignore"):
            short = float(str(np.float32(value))) if type(value) in (int, float) else 0.0
        if not 0 < short < math.inf:
            raise self.error(f"{self.kind}.{name} must be a number above zero, got {str(value)[:80]}")
        return short

    def read_factors(self, name: str, count: int) -> list[float]:
        """Returns the values of a tensor that holds `count` factors of the rotary frequencies."""
        tensor = self.file.tensors[name]
        if tensor.kind.name != "F32" or tensor.shape != (count,):
            raise self.error(f"{name} must hold {count} values in F32, got {list(tensor.shape)} in {tensor.kind.name}")
        values = self.file.read_bytes(tensor.offset, tensor.nbytes).view("<f4")
        if not (np.isfinite(values) & (values > 0)).all():
            raise self.error(f"{name} must hold finite numbers above zero")
        return [float(str(value)) for value in values]


def read_config(file: GgufFile) -> dict[str, Any]:
    """Returns the content of config.json without dtype, quantization and the tokenizer's special ids.

    Raises `ConversionError` if the architecture or a value is not supported, or if keys are unknown.
    """
    settings = GgufSettings(file)
    heads, width = settings.take_size("attention.head_count"), settings.take_size("embedding_length")
    model_type = "gemma3_text" if settings.kind == "gemma3" else settings.kind
    config: dict[str, Any] = {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        "hidden_size": width,
        "num_hidden_layers": settings.take_size("block_count"),
        "intermediate_size": settings.take_size("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.take_size("attention.head_count_kv", heads),
        "rms_norm_eps": settings.take_number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": settings.take_size("context_length"),
        "vocab_size": _count_vocabulary_rows(settings),
        "tie_word_embeddings": HEAD not in file.tensors,
        "hidden_act": "gelu_pytorch_tanh" if model_type.startswith("gemma") else "silu",
    }
    _add_head_width(settings, config)
    _check_tensor_sizes(settings, config)
    _add_attention_config(settings, config)
    _add_rope_config(settings, config)
    if settings.take_value("expert_count", 0):
        raise settings.error("a mixture of experts, which is not supported")
    if (order := settings.take_value("tensor_data_layout", _META)) != _META:
        raise settings.error(f"{settings.kind}.tensor_data_layout is {str(order)[:80]!r}, which is not supported")
    if settings.left:
        raise settings.error(f"unknown keys: {list_some_names(settings.left)}")
    return config


def _count_vocabulary_rows(settings: GgufSettings) -> int:
    if EMBEDDING not in settings.file.tensors:
        raise settings.error(f"the tensor {EMBEDDING} is missing")
    rows = settings.file.tensors[EMBEDDING].shape[0]
    if (said := settings.take_size("vocab_size", rows)) != rows:
        raise settings.error(f"{settings.kind}.vocab_size is {said}, and {EMBEDDING} has {rows} rows")
    return rows


def _add_head_width(settings: GgufSettings, config: dict[str, Any]) -> None:
    """Adds the width of an attention head, and for Phi-3 the fraction of the width that is rotated, to `config`."""
    even = config["hidden_size"] // config["num_attention_heads"]
    width = settings.take_size("attention.key_length", even)
    if settings.take_size("attention.value_length", width) != width:
        raise settings.error("heads whose keys and values differ in width are not supported")
    if settings.kind not in ("phi3", "qwen2"):
        config["head_dim"] = width
    elif width != even:
        raise settings.error(f"{settings.kind}.attention.key_length {width} is not supported; expected {even}")
    rotated = settings.take_size("rope.dimension_count", width)
    if settings.kind == "phi3" and rotated < width:
        config["partial_rotary_factor"] = rotated / width
    elif rotated != width:
        raise settings.error(
            f"{settings.kind}.rope.dimension_count is {rotated}; expected {width}, the width of a head"
        )


def _check_tensor_sizes(settings: GgufSettings, config: Mapping[str, Any]) -> None:
    """Raises `ConversionError` unless the sizes in `config` equal the tensors' sizes, which the file's size limits."""
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    queries = config["num_attention_heads"] * head_width(config)
    keys = config["num_key_value_heads"] * head_width(config)
    joined = settings.kind == "phi3"
    expected = {
        EMBEDDING: (config["vocab_size"], width),
        "blk.0.attn_qkv.weight" if joined else "blk.0.attn_q.weight": (queries + 2 * keys * joined, width),
        "blk.0.ffn_down.weight": (width, config["intermediate_size"]),
        **{f"blk.{i}.attn_norm.weight": (width,) for i in range(min(layers, MAX_LAYERS))},
    }
    for name, shape in expected.items():
        found = settings.file.tensors.get(name)
        if found is None:
            raise settings.error(f"the tensor {name} is missing")
        if found.shape != shape:
            raise settings.error(f"{name} has the shape {list(found.shape)}; the metadata say {list(shape)}")


def _add_attention_config(settings: GgufSettings, config: dict[str, Any]) -> None:
    """Adds the attention's window, soft caps, biases and scale to `config`."""
    kind, window = settings.kind, settings.take_value("attention.sliding_window", 0)
    if type(window) is not int or not 0 <= window < 1 << 31:
        raise settings.error(f"{kind}.attention.sliding_window must be a number of ids, got {str(window)[:80]}")
    if kind in ("gemma2", "gemma3"):
        config["sliding_window"] = window or 4096
        large = config["num_hidden_layers"] == _LARGE[kind]
        scaled = config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
        config["query_pre_attn_scalar"] = scaled
        if kind == "gemma3":
            config["sliding_window_pattern"] = settings.take_size("attention.sliding_window_pattern", 6)
        else:
            config["attn_logit_softcapping"] = settings.take_number("attn_logit_softcapping", 50.0)
            config["final_logit_softcapping"] = settings.take_number("final_logit_softcapping", 30.0)
    elif 0 < window < config["max_position_embeddings"]:
        if kind not in ("llama", "phi3"):
            raise settings.error(f"{kind}.attention.sliding_window {window} is not supported")
        config |= {"model_type": "mistral"} if kind == "llama" else {}
        config["sliding_window"] = window
    if kind == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in settings.file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in settings.file.tensors
    if kind == "qwen2":
        config["use_sliding_window"] = False


def _add_rope_config(settings: GgufSettings, config: dict[str, Any]) -> None:
    """Adds the rotary embedding's base and scaling to `config`, from the metadata and the tensors of factors."""
    config["rope_theta"] = settings.take_number("rope.freq_base", 10_000.0)
    if settings.kind == "gemma3":
        config["rope_local_base_freq"] = settings.take_number("rope.freq_base_swa", 10_000.0)
    factor = settings.take_number("rope.scaling.factor", settings.take_number("rope.scale_linear", 1.0))
    kind = settings.take_value("rope.scaling.type", "linear" if factor != 1.0 else "none")
    original = settings.take_size("rope.scaling.original_context_length", None)
    settings.take_value("rope.scaling.finetuned", None)
    magnitude = settings.take_number("rope.scaling.attn_factor", None)
    scaling: dict[str, Any] = {}
    expected = 1.0
    if settings.kind == "phi3" and (_LONG in settings.file.tensors or _SHORT in settings.file.tensors):
        scaling, expected = _longrope_scaling(settings, config, original, kind)
    elif _ROPE_FREQS in settings.file.tensors:
        if kind not in ("none", "llama3"):
            raise settings.error(f"{_ROPE_FREQS} beside {settings.kind}.rope.scaling of the type {str(kind)[:80]!r}")
        scaling = _llama3_scaling(settings, config)
    elif kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = original or config["max_position_embeddings"]
            extra = {
                "attention_factor": magnitude,
                **{n: settings.take_number(f"rope.scaling.yarn_{n}", None) for n in _YARN},
            }
            scaling |= {name: value for name, value in extra.items() if value is not None}
    elif kind != "none":
        raise settings.error(
            f"{settings.kind}.rope.scaling.type {str(kind)[:80]!r} is not supported without its factors"
        )
    if kind not in ("none", "linear", "yarn") and factor != 1.0:
        raise settings.error(f"{settings.kind}.rope.scaling.factor {factor} is not supported with the type {kind!r}")
    if kind != "yarn" and abs((magnitude or 1.0) - expected) > 1e-3:
        raise settings.error(f"{settings.kind}.rope.scaling.attn_factor is {magnitude or 1.0}; expected {expected:.6g}")
    if scaling:
        config["rope_scaling"] = {**scaling, "type": scaling["rope_type"]}


_YARN = ("beta_fast", "beta_slow")


def _longrope_scaling(
    settings: GgufSettings, config: dict[str, Any], original: int | None, kind: str
) -> tuple[dict[str, Any], float]:
    """Returns `rope_scaling` of a Phi-3 config, with factors from tensors, and the factor on queries and keys.

    Adds the original context to `config`.
    """
    if kind not in ("none", "longrope") or original is None or original < 2:
        raise settings.error(f"{_LONG} and {_SHORT} need phi3.rope.scaling.original_context_length and type longrope")
    if missing := [name for name in (_LONG, _SHORT) if name not in settings.file.tensors]:
        raise settings.error(f"the tensor {missing[0]} is missing")
    count = round(head_width(config) * config.get("partial_rotary_factor", 1.0)) // 2
    config["original_max_position_embeddings"] = original
    long, short = settings.read_factors(_LONG, count), settings.read_factors(_SHORT, count)
    scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    return scaling, longrope_factors(scaling, config, 2 * count)[2]


def _llama3_scaling(settings: GgufSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `rope_scaling` of a Llama 3 config. The file holds only the resulting divisors of the frequencies.

    Tries each power of two as the original context length until the computed divisors equal those in the file.
    """
    width = head_width(config)
    found = np.array(settings.read_factors(_ROPE_FREQS, width // 2))
    waves = 2 * np.pi * config["rope_theta"] ** (np.arange(0, width, 2) / width)
    low, high, factor = 1.0, 4.0, float(found.max())
    for original in (1 << power for power in range(20, 4, -1)):
        smooth = np.clip((original / waves - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), found, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise settings.error(
        f"{_ROPE_FREQS} holds factors that do not follow Llama 3's rule, the only one that is supported"
    )


def gguf_tensor_names(config: Mapping[str, Any], architecture: str) -> dict[str, str]:
    """Returns name in the file -> name in the model, for all tensors that this architecture and config may have."""
    gemma = architecture in ("gemma2", "gemma3")
    layer = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "pre_feedforward_layernorm" if gemma else "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
        "ffn_down": "mlp.down_proj",
    }
    if gemma:
        layer |= {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
    if architecture in ("qwen3", "gemma3"):
        layer |= {f"attn_{one}_norm": f"self_attn.{one}_norm" for one in "qk"}
    if architecture == "phi3":
        layer |= {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    else:
        layer |= {f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"}
        layer |= {f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up")}
    names = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
    for index in range(config["num_hidden_layers"]):
        for short, path in layer.items():
            for kind in ("weight", "bias"):
                names[f"blk.{index}.{short}.{kind}"] = f"model.layers.{index}.{path}.{kind}"
    return names


def tensor_row_order(name: str, config: Mapping[str, Any], architecture: str) -> np.ndarray | None:
    """Returns the indices that sort a tensor's rows into the model's order, None if the rows are in that order already.

    llama.cpp interleaves the two halves of each head of q and k in files of the architecture llama.
    """
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if architecture != "llama" or heads is None:
        return None
    width = head_width(config)
    return np.arange(config[heads] * width).reshape(-1, width // 2, 2).swapaxes(1, 2).ravel()


SETTINGS_TENSORS = {"llama": (_ROPE_FREQS,), "phi3": (_LONG, _SHORT)}  # architecture: tensors read into config.json
