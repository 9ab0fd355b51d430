"""A Llama decoder in PyTorch that writes many texts at once on a CPU: one id per row and pass, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mlx_zip.cuda.folder import read_folder
from mlx_zip.cuda.kernels.packed import Packed, dequantize


class Decoder:
    """A plain Llama model (tied or untied head, no biases) with one cache row per text that is being written.

    Every row has a length of its own. A pass takes one id per row, so a row that is given a text reads it id by id
    beside the rows that write: with dozens of rows the products cost as little per id as those of a long prompt.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], rows: int, length: int) -> None:
        """Takes the keys of `config.json`, tensors by their names in transformers, and the sizes of the cache.

        rows: texts at a time. length: most ids per text.
        """
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps = config["rms_norm_eps"]
        self.embedding = weights["model.embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embedding)
        self.norm = weights["model.norm.weight"]
        self.layers = [_layer(weights, f"model.layers.{n}.") for n in range(config["num_hidden_layers"])]
        self.cos, self.sin = _rotations(self.head_dim, length, config["rope_theta"])
        shape = (len(self.layers), rows, self.kv_heads, length, self.head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.lengths = torch.zeros(rows, dtype=torch.int64)

    @classmethod
    def read(cls, model: Path, rows: int, length: int) -> Decoder:
        """Returns the decoder of a model's folder, dense or packed by MLX. Raises `ModelError`, `ConfigError`."""
        folder = read_folder(model, "cpu", "float32")
        tensors = {name: dequantize(one) if isinstance(one, Packed) else one for name, one in folder.tensors.items()}
        return cls(folder.config, tensors, rows, length)

    def clear(self, row: int) -> None:
        """Makes a row empty."""
        self.lengths[row] = 0

    @torch.inference_mode()
    def step(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Reads one id per row, ids [rows] int64, and returns the logits [n, vocabulary] of the rows in wanted [n]."""
        rows, places = torch.arange(len(ids)), self.lengths
        end = int(places.max()) + 1
        unseen = torch.where(torch.arange(end) > places[:, None], -torch.inf, 0.0)[:, None, None]  # [rows, 1, 1, end]
        cos, sin = self.cos[places][:, None], self.sin[places][:, None]  # [rows, 1, head_dim]
        h = self.embedding[ids]
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            mixed = F.linear(_norm(h, layer["input"], self.eps), layer["qkv"]).view(len(ids), -1, self.head_dim)
            q, k, v = mixed.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            keys[rows, :, places], values[rows, :, places] = _rotate(k, cos, sin), v
            grouped = _rotate(q, cos, sin).view(len(ids), self.kv_heads, -1, self.head_dim)  # heads of one kv head
            seen = F.scaled_dot_product_attention(grouped, keys[:, :, :end], values[:, :, :end], attn_mask=unseen)
            h = h + F.linear(seen.reshape(len(ids), -1), layer["out"])
            gate, up = F.linear(_norm(h, layer["post"], self.eps), layer["gate_up"]).chunk(2, dim=-1)
            h = h + F.linear(F.silu(gate) * up, layer["down"])
        self.lengths += 1
        return F.linear(_norm(h[wanted], self.norm, self.eps), self.head)


def _layer(weights: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """Returns one layer's matrices, those that read the same input joined."""
    attention = [weights[f"{name}self_attn.{one}_proj.weight"] for one in "qkv"]
    return {
        "input": weights[name + "input_layernorm.weight"],
        "qkv": torch.cat(attention),
        "out": weights[name + "self_attn.o_proj.weight"],
        "post": weights[name + "post_attention_layernorm.weight"],
        "gate_up": torch.cat([weights[name + "mlp.gate_proj.weight"], weights[name + "mlp.up_proj.weight"]]),
        "down": weights[name + "mlp.down_proj.weight"],
    }


def _rotations(head_dim: int, length: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns cosines and sines [length, head_dim] of all positions, the second half equal to the first."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns x [rows, heads, head_dim] rotated to its positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
