"""Writes tiny GGUF files, as llama.cpp's converters would, from random weights under transformers' names."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12}
TYPES |= {"Q5_K": 13, "Q6_K": 14, "BF16": 30}
BLOCKS = {  # type -> values of a block, its bytes, where in it the float16 numbers are
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q2_K": (256, 84, (80, 82)),
    "Q3_K": (256, 110, (108,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}
_LEVELS = {"Q4_0": 8, "Q4_1": 8, "Q5_0": 16, "Q5_1": 16, "Q8_0": 64, "Q2_K": 24, "Q3_K": 64, "Q4_K": 256, "Q5_K": 512}
_LEVELS |= {"Q6_K": 1024}  # about how large a block's values are, in units of its float16 numbers
_NUMBERS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}


@dataclass
class Stored:
    """A tensor as a file holds it: its type, its shape as NumPy has it, and its bytes."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


def dense(array: np.ndarray, kind: str = "F32") -> Stored:
    """The tensor in F32, F16 or BF16; the last is cut off, not rounded."""
    if kind == "BF16":
        return Stored(kind, array.shape, (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes())
    return Stored(kind, array.shape, array.astype("<f4" if kind == "F32" else "<f2").tobytes())


def blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: str, size: float = 0.1) -> Stored:
    """A tensor of random blocks, any of which is lawful; its values are about as large as `size`."""
    values, length, numbers = BLOCKS[kind]
    made = rng.integers(0, 256, (int(np.prod(shape)) // values, length), np.uint8)
    for place, at in enumerate(numbers):
        sign = -4 if kind in ("Q4_1", "Q5_1") and place else 1  # the second one there is the smallest value
        number = sign * rng.uniform(0.5, 1.0, (len(made), 1)) * size / _LEVELS[kind]
        made[:, at : at + 2] = number.astype("<f2").view(np.uint8)
    return Stored(kind, shape, made.tobytes())


def value(data: Any) -> bytes:
    """A value of metadata with its type: whole numbers are uint32 and others float32 unless they are NumPy's."""
    if isinstance(data, str):
        return struct.pack("<I", 8) + string(data)
    if isinstance(data, list):
        return struct.pack("<IIQ", 9, 8, len(data)) + b"".join(map(string, data))
    if isinstance(data, np.ndarray):
        return struct.pack("<IIQ", 9, _NUMBERS[data.dtype.str[1:]], len(data)) + data.tobytes()
    if not isinstance(data, np.generic):
        data = (
            np.bool_(data) if isinstance(data, bool) else np.uint32(data) if isinstance(data, int) else np.float32(data)
        )
    return struct.pack("<I", _NUMBERS[data.dtype.str[1:]]) + data.tobytes()


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(name: str, tensor: Stored, offset: int) -> bytes:
    shape = tensor.shape[::-1]
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, TYPES[tensor.kind], offset)


def encode(metadata: Mapping[str, Any], tensors: Mapping[str, Stored], version: int = 3) -> bytes:
    """The bytes of a file."""
    step = int(metadata.get("general.alignment", 32))
    listed, data = b"", b""
    for name, tensor in tensors.items():
        listed += entry(name, tensor, len(data))
        data += tensor.data + b"\0" * (-len(tensor.data) % step)
    keys = b"".join(string(key) + value(one) for key, one in metadata.items())
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + keys + listed
    return header + b"\0" * (-len(header) % step) + data


# ---- tiny models

LLAMA3 = {"factor": 8.0, "low": 1.0, "high": 4.0, "original": 64}


@dataclass
class Tiny:
    """A tiny random model. config: of transformers. metadata: settings without the tokenizer. state: weights by
    transformers' names. extra: tensors of the file that hold settings.
    """

    architecture: str
    config: dict[str, Any]
    metadata: dict[str, Any]
    state: dict[str, np.ndarray]
    extra: dict[str, Stored] = field(default_factory=dict)

    def tensors(self, kind: str = "F32", rng: np.random.Generator | None = None) -> dict[str, Stored]:
        """The tensors under llama.cpp's names and in its order of rows. Matrices get the type `kind`: a packed one
        is made of random blocks, which need `rng`.
        """
        made = {}
        for name, array in self.state.items():
            array = _stored_rows(self, name, array)
            if array.ndim == 1:
                shifted = self.architecture.startswith("gemma")
                made[gguf_name(self.architecture, name)] = dense(array + 1 if shifted else array)
            elif kind in BLOCKS:
                assert rng is not None
                made[gguf_name(self.architecture, name)] = blocks(rng, array.shape, kind)
            else:
                made[gguf_name(self.architecture, name)] = dense(array, kind)
        return made | self.extra


def _stored_rows(tiny: Tiny, name: str, array: np.ndarray) -> np.ndarray:
    """The rows of q and k of Llama's files: the halves of each head alternate."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if tiny.architecture != "llama" or heads is None:
        return array
    return array.reshape(tiny.config[heads], 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def gguf_name(architecture: str, name: str) -> str:
    """llama.cpp's name of a tensor that transformers calls `name`."""
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    path, _, kind = name.rpartition(".")
    if path in outer:
        return f"{outer[path]}.{kind}"
    _, _, index, part = path.split(".", 3)
    double = architecture in ("gemma2", "gemma3")
    inner = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm" if double else "ffn_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    return f"blk.{index}.{inner[part]}.{kind}"


def tiny(architecture: str = "llama", vocab: int = 288, width: int = 64, seed: int = 0, **changes: Any) -> Tiny:
    """A tiny random model. width: of the model and, doubled, of the MLP.

    changes: tied, bias (Llama's), head_dim, rope ("llama3", "linear", "yarn", "longrope", None), partial (of Phi-3's
    heads that is rotated), window.
    """
    gemma, double = architecture.startswith("gemma"), architecture in ("gemma2", "gemma3")
    heads, kv_heads, head = 4, 2, changes.get("head_dim") or width // 4
    layers = 6 if architecture == "gemma3" else 2  # the sixth is the first with full attention
    tied, bias = changes.get("tied", gemma), changes.get("bias", False)
    theta = {"qwen2": 1e6, "qwen3": 1e6, "gemma3": 1e6}.get(architecture, 10_000.0)
    config: dict[str, Any] = {
        "model_type": "gemma3_text" if architecture == "gemma3" else architecture,
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "rope_theta": theta,
        "pad_token_id": None,
    }
    metadata: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": width,
        "block_count": layers,
        "feed_forward_length": 2 * width,
        "rope.dimension_count": head,
        "rope.freq_base": theta,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    if architecture not in ("phi3", "qwen2"):
        config["head_dim"] = head
        metadata |= {"attention.key_length": head, "attention.value_length": head}
    if architecture == "llama":
        config |= {"attention_bias": bias, "mlp_bias": bias}
    if gemma:
        config["hidden_activation"] = "gelu_pytorch_tanh"
    if double:
        config |= {"sliding_window": 12, "query_pre_attn_scalar": head}
        metadata["attention.sliding_window"] = 12
    if architecture == "gemma2":
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        config, metadata = config | caps, metadata | caps
    if window := changes.get("window"):
        config["sliding_window"] = metadata["attention.sliding_window"] = window
    made = Tiny(architecture, config, {}, _state(architecture, config, head, bias, seed))
    _add_rope(made, metadata, head, changes)
    named = {f"{architecture}.{key}": one for key, one in metadata.items()}
    made.metadata = {"general.architecture": architecture, "general.name": "tiny", **named}
    return made


def _add_rope(tiny: Tiny, metadata: dict[str, Any], head: int, changes: Mapping[str, Any]) -> None:
    """Adds scaling of the rotary frequencies to a model's config, metadata and tensors."""
    kind, theta = changes.get("rope"), tiny.config["rope_theta"]
    if partial := changes.get("partial"):
        tiny.config["partial_rotary_factor"] = partial
        metadata["rope.dimension_count"] = head = int(head * partial)
    if kind in ("linear", "yarn"):
        tiny.config["rope_scaling"] = {"rope_type": kind, "factor": 4.0}
        metadata |= {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
        if kind == "yarn":
            tiny.config["rope_scaling"]["original_max_position_embeddings"] = 64
            metadata["rope.scaling.original_context_length"] = 64
    if kind == "longrope":
        long, short = 1 + np.arange(head // 2) * 1.5, 1 + np.arange(head // 2) * 0.05
        long, short = long.astype(np.float32), short.astype(np.float32)
        tiny.config["rope_scaling"] = {"type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist()}
        tiny.config["original_max_position_embeddings"] = 32
        magnitude = float(np.sqrt(1 + np.log(256 / 32) / np.log(32)))
        metadata |= {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": magnitude}
        tiny.extra = {"rope_factors_long.weight": dense(long), "rope_factors_short.weight": dense(short)}
    if kind == "llama3":
        r = LLAMA3
        waves = 2 * np.pi * theta ** (np.arange(0, head, 2) / head)
        smooth = np.clip((r["original"] / waves - r["low"]) / (r["high"] - r["low"]), 0, 1)
        tiny.extra = {"rope_freqs.weight": dense(1 / ((1 - smooth) / r["factor"] + smooth))}
        tiny.config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": r["factor"],
            "low_freq_factor": r["low"],
            "high_freq_factor": r["high"],
            "original_max_position_embeddings": r["original"],
        }


def _state(architecture: str, config: Mapping[str, Any], head: int, bias: bool, seed: int) -> dict[str, np.ndarray]:
    """Random weights under transformers' names; norms of Gemma are around 0 there, others around 1."""
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    norms = ["input_layernorm", "post_attention_layernorm"]
    if architecture in ("gemma2", "gemma3"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    matrices = {"self_attn.o_proj": (width, queries), "mlp.down_proj": (width, inner)}
    if architecture == "phi3":
        matrices |= {"self_attn.qkv_proj": (queries + 2 * keys, width), "mlp.gate_up_proj": (2 * inner, width)}
    else:
        matrices |= {f"self_attn.{n}_proj": (r, width) for n, r in (("q", queries), ("k", keys), ("v", keys))}
        matrices |= {f"mlp.{one}_proj": (inner, width) for one in ("gate", "up")}
    biased = list(matrices) if bias else [f"self_attn.{n}_proj" for n in "qkv"] if architecture == "qwen2" else []
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, width)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        shapes |= {f"{layer}{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"{layer}{name}.bias": matrices[name][:1] for name in biased}
        shapes |= {f"{layer}{name}.weight": (width,) for name in norms}
        if architecture in ("qwen3", "gemma3"):
            shapes |= {f"{layer}self_attn.{one}_norm.weight": (head,) for one in "qk"}
    rng = np.random.default_rng(seed)
    around = 0 if architecture.startswith("gemma") else 1
    return {
        name: (rng.normal(0, 0.15, shape) + (around if "norm" in name else 0)).astype(np.float32)
        for name, shape in shapes.items()
    }


def save(path: Path, model: Tiny, tokenizer: Mapping[str, Any], kind: str = "F32", **more: Any) -> Path:
    """Writes a model's file with the given tokenizer. more: metadata to add, dots written as two underscores."""
    added = {key.replace("__", "."): one for key, one in more.items()}
    rng = np.random.default_rng(7)
    path.write_bytes(encode({**model.metadata, **tokenizer, **added}, model.tensors(kind, rng)))
    return path
