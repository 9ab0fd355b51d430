"""A tiny stand-in for SmolLM2: an installed package with a GGUF file, a hub folder, and an adapter with encoders."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip import named
from support.checkpoints import ENCODERS, Arrays, decoder_shapes, random_arrays, write_adapter, write_encoders
from support.checkpoints import write_json as write

LETTERS = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the bytes that stand for themselves
REST = sorted({*range(256)} - {*LETTERS})
TOKENS = ["<|im_start|>", "<|im_end|>", *map(chr, LETTERS), *(chr(256 + i) for i in range(len(REST))), "th", "the"]
SIZES: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": len(TOKENS),
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
Q = "model.layers.0.self_attn.q_proj"
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}


def write_gguf(path: Path, seed: int = 0) -> Arrays:
    """Writes a llama with matrices in Q8_0; returns its tensors' values under transformers' names and in its order."""
    values, listed, data = {}, b"", b""
    for name, array in random_arrays(decoder_shapes(SIZES), seed).items():
        if array.ndim == 1:
            stored, kind, values[name] = array.astype("<f4").tobytes(), 0, array
        else:
            levels = np.random.default_rng(len(values)).integers(-127, 128, array.shape, np.int8)
            values[name], kind = levels.astype(np.float32) * np.float32(2**-9), 8
            blocks = _rows_of_file(name, levels).reshape(-1, 32)
            scale = np.full((len(blocks), 1), 2**-9, "<f2").view(np.uint8)
            stored = np.concatenate([scale, blocks.view(np.uint8)], axis=1).tobytes()
        shape = array.shape[::-1]
        listed += _text(_in_file(name)) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data))
        data += stored + b"\0" * (-len(stored) % 32)
    keys = b"".join(_text(key) + _value(value) for key, value in _metadata().items())
    head = b"GGUF" + struct.pack("<IQQ", 3, len(values), len(_metadata())) + keys + listed
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return values


def _rows_of_file(name: str, array: np.ndarray) -> np.ndarray:
    """The rows of q and k as llama.cpp has them: the halves of each head alternate."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return array
    return np.ascontiguousarray(array.reshape(-1, 2, 4, array.shape[-1]).swapaxes(1, 2))


def _in_file(name: str) -> str:
    path = name.removesuffix(".weight")
    block, _, part = path.removeprefix("model.layers.").partition(".")
    return f"{_PARTS[path]}.weight" if path in _PARTS else f"blk.{block}.{_PARTS[part]}.weight"


def _metadata() -> dict[str, Any]:
    sizes = {
        "block_count": 1,
        "context_length": 256,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    tokenizer = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": TOKENS,
        "token_type": [3, 3] + [1] * (len(TOKENS) - 2),
        "merges": ["t h", "th e"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {
        "general.architecture": "llama",
        **{f"llama.{key}": value for key, value in sizes.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()},
        "tokenizer.chat_template": TEMPLATE,
    }


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        packed = [_text(one) if isinstance(one, str) else struct.pack("<i", one) for one in value]
        return struct.pack("<IIQ", 9, 8 if isinstance(value[0], str) else 5, len(value)) + b"".join(packed)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def write_our_adapter(folder: Path, **changes: Any) -> Arrays:
    """Writes an adapter of q_proj with hyper-encoders, as this package holds it; returns the adapter's tensors."""
    lora = write_adapter(folder, {Q: (32, 32, 4)}, **changes)
    options = ENCODERS["attention"]
    sizes = {"initial_vocab_size": len(TOKENS), "max_codebook_size": 16, "max_subtokens": 3, "disabled_ids": [0, 1]}
    config = {"format_version": 1, "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    config |= {"position_mode": "compressed", "encoder_type": "attention", "encoder": options, "compression": sizes}
    write(folder / "zip2zip_config.json", config)
    write_encoders(folder / "zip2zip_encoders.safetensors", "attention", options, 3)
    return lora


def install_package(monkeypatch: Any, site: Path) -> Path:
    """Installs the stand-in for the package in a folder of sys.path and returns its file of weights."""
    info = site / "tiny_smollm2-0.1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-smollm2\nVersion: 0.1.2\n")
    file = site / named.PACKED
    file.parent.mkdir()
    write_gguf(file)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(named, "PACKED_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    return file


def use_stand_in(monkeypatch: Any, folder: Path, adapter: bool = True) -> Path:
    """Makes `mlx_zip.named` know the stand-in alone, neither installed nor on the hub; returns the folder of models."""
    from support.command_line import stay_home

    stay_home(monkeypatch, folder)
    monkeypatch.setattr(named, "PACKAGE", "tiny-smollm2")
    monkeypatch.setattr(named, "ADAPTER", folder / "adapter")
    monkeypatch.setenv(named.ENVIRONMENT, str(folder / "kept" / "models"))
    if adapter:
        write_our_adapter(folder / "adapter")
    return folder / "kept" / "models"
