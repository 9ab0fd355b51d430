"""Tiny random checkpoints in the published layout, made without torch: base model, encoders, adapter, meta.pt."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

VOCAB, WIDTH, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 96, 32, 48, 2, 4, 2, 8
Arrays = dict[str, np.ndarray]

BASE = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
TRANSFORMER = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_heads": 4,
    "intermediate_size": None,
    "position_encoding": None,
    "tie_encoders": False,
}
LATENT = {
    "hidden_size": WIDTH,
    "model_hidden_size": None,
    "num_hidden_layers": 1,
    "num_heads": 4,
    "intermediate_size": 40,
    "position_encoding": None,
    "tie_encoders": False,
    "causal": False,
    "residual": True,
}
ATTENTION = {"hidden_size": WIDTH, "num_heads": 4, "position_encoding": None, "tie_encoders": False}
AVERAGING = {"hidden_size": WIDTH, "position_encoding": None, "tie_encoders": False}
ENCODERS = {"transformer": TRANSFORMER, "res_latent_attn": LATENT, "attention": ATTENTION, "averaging": AVERAGING}


def random_arrays(shapes: Mapping[str, tuple[int, ...]], seed: int = 0, dtype: Any = np.float32) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: (rng.standard_normal(shape) * 0.1).astype(dtype) for name, shape in shapes.items()}


def decoder_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors transformers saves for a llama, mistral, qwen2, qwen3, gemma or phi3 of this config."""
    kind, width, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or width // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    if not config.get("tie_word_embeddings", kind == "gemma"):
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for i in range(config["num_hidden_layers"]):
        layer = {"input_layernorm": (width,), "post_attention_layernorm": (width,), "mlp.down_proj": (width, inner)}
        layer["self_attn.o_proj"] = (width, q)
        if kind == "phi3":
            layer |= {"self_attn.qkv_proj": (q + 2 * kv, width), "mlp.gate_up_proj": (2 * inner, width)}
        else:
            layer |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
            layer |= {"self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width)}
        if kind == "qwen3":
            layer |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        if kind == "qwen2":
            shapes |= {f"model.layers.{i}.self_attn.{p}_proj.bias": (n,) for p, n in (("q", q), ("k", kv), ("v", kv))}
    return shapes


def encoder_shapes(kind: str, options: Mapping[str, Any], merge_size: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one encoder, by the table of zip2zip 0.2.0, without the side's prefix."""
    h = options["hidden_size"]
    inner = options.get("intermediate_size") or 4 * h
    shapes: dict[str, tuple[int, ...]] = {}
    if kind in ("attention", "res_latent_attn") or options.get("position_encoding") == "learnable":
        shapes["pos_embed.weight"] = (merge_size, h)
    if kind == "attention":
        shapes |= {f"attention.{p}_proj.weight": (h, h) for p in "qkvo"}
    for i in range(options.get("num_hidden_layers", 0)):
        if kind == "transformer":
            layer = {f"attention.{p}_proj.weight": (h, h) for p in "qkvo"}
            layer |= {"mlp.fc1.weight": (inner, h), "mlp.fc2.weight": (h, inner)}
            norms = ("post_attention_layernorm", "post_mlp_layernorm")
        else:
            layer = {f"{p}.weight": (h, h) for p in ("wq", "wk", "wv", "wo")}
            layer |= {"w1.weight": (inner, h), "w2.weight": (h, inner)}
            norms = ("norm1", "norm2")
        layer |= {f"{norm}.{part}": (h,) for norm in norms for part in ("weight", "bias")}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if kind == "res_latent_attn":
        shapes |= {"norm.weight": (h,), "norm.bias": (h,)}
        if (d := options.get("model_hidden_size")) and d != h:
            shapes |= {"proj_in.weight": (h, d), "proj_out.weight": (d, h)}
    return shapes


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON object in a file; None removes one."""
    data = {**json.loads(path.read_text()), **changes}
    write_json(path, {k: v for k, v in data.items() if v is not None})


def edit_tensors(path: Path, changes: Mapping[str, np.ndarray | None]) -> None:
    """Sets or (with None) removes tensors of a safetensors file."""
    data: dict[str, Any] = {**load_file(path), **changes}
    save_file({k: v for k, v in data.items() if v is not None}, path)


def write_tokenizer(folder: Path, size: int = VOCAB, **special: Any) -> None:
    """Writes a word-level tokenizer with `size` ids: <bos> 0, <eos> 1, <pad> 2, <unk> 3, then w4, w5, ..."""
    names = ["<bos>", "<eos>", "<pad>", "<unk>"]
    vocab = {**{name: i for i, name in enumerate(names)}, **{f"w{i}": i for i in range(4, size)}}
    added = [
        {
            "id": i,
            "content": name,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, name in enumerate(names)
    ]
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        },
    )
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", **special}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    write_json(folder / "tokenizer_config.json", {k: v for k, v in config.items() if v is not None})


def write_base(folder: Path, shards: int = 1, seed: int = 0, **config: Any) -> Arrays:
    """Writes a base model's folder and returns its tensors. shards > 1: several files and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**BASE, **config}
    write_json(folder / "config.json", config)
    write_tokenizer(folder, config["vocab_size"] - 8)  # real embeddings are padded too
    arrays = random_arrays(decoder_shapes(config), seed)
    if shards == 1:
        save_file(arrays, folder / "model.safetensors")
        return arrays
    weight_map = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(arrays)}
    for file in set(weight_map.values()):
        save_file({name: a for name, a in arrays.items() if weight_map[name] == file}, folder / file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return arrays


def write_encoders(path: Path, kind: str, options: Mapping[str, Any], merge_size: int, seed: int = 1) -> Arrays:
    """Writes the file of the encoders and returns its tensors."""
    sides = ["input_encoder"] if options["tie_encoders"] else ["input_encoder", "output_encoder"]
    shapes = encoder_shapes(kind, options, merge_size)
    arrays = random_arrays({f"{side}.{name}": s for side in sides for name, s in shapes.items()}, seed)
    save_file(arrays, path)
    return arrays


def write_checkpoint(
    folder: Path,
    kind: str = "transformer",
    encoder: Mapping[str, Any] | None = None,
    merge_size: int = 3,
    boundary: int = VOCAB,
    self_contained: bool = False,
    shards: int = 1,
    alias: bool = False,
    **base: Any,
) -> Arrays:
    """Writes a whole checkpoint of format 1 (base model in `base/`) or 2 and returns all its tensors.

    encoder: changes to the kind's options. alias: the encoder file's other name. base: changes to the base's config.
    """
    folder.mkdir(parents=True)
    options = {**ENCODERS[kind], **(encoder or {})}
    write_json(
        folder / "zip2zip_config.json",
        {
            "format_version": 2 if self_contained else 1,
            "base_model_name_or_path": "." if self_contained else "base",
            "position_mode": "compressed",
            "encoder_type": kind,
            "encoder": options,
            "compression": {
                "initial_vocab_size": boundary,
                "max_codebook_size": 16,
                "max_subtokens": merge_size,
                "disabled_ids": [0, 1, 2, 3],
            },
        },
    )
    arrays = write_base(folder if self_contained else folder / "base", shards, **base)
    if kind == "averaging":
        return arrays
    name = "encoders.safetensors" if alias else "zip2zip_encoders.safetensors"
    return arrays | write_encoders(folder / name, kind, options, merge_size)


def write_adapter(folder: Path, modules: Mapping[str, tuple[int, int, int]], seed: int = 2, **config: Any) -> Arrays:
    """Writes a PEFT LoRA and returns {module.A, module.B}; `modules` maps a path to (in, out, rank)."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(iter(modules.values()))[2]
    defaults = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 8,
        "bias": "none",
        "use_dora": False,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "base",
    }
    write_json(folder / "adapter_config.json", {**defaults, **config})
    shapes = {f"{m}.A": (r, i) for m, (i, _, r) in modules.items()}
    shapes |= {f"{m}.B": (o, r) for m, (_, o, r) in modules.items()}
    arrays = random_arrays(shapes, seed)
    saved = {f"base_model.model.{n[:-2]}.lora_{n[-1]}.weight": a for n, a in arrays.items()}
    save_file(saved, folder / "adapter_model.safetensors")
    return arrays


def write_meta(path: Path, pickled: bytes) -> None:
    """Writes a meta.pt in the layout of torch.save around a hand-made pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("meta/data.pkl", pickled)
        archive.writestr("meta/version", "3\n")


def pickled_args(**args: Any) -> bytes:
    """The pickle of {"step": 7, "args": {...}}."""
    return pickle.dumps({"step": 7, "args": args}, protocol=2)
