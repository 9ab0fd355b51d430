"""The joint loss of a llama-type model in numpy float64, sample by sample and entry by entry.

An independent reference for losses and gradients, written from the papers' equations and upstream's tensor names: no
batches, nothing shared between samples, no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import erf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip import Codebook
from mlx_zip.training.prepare.shards import Sample

Array = NDArray[np.float64]
Weights = Mapping[str, Array]
Row = Callable[[tuple[int, ...], bool], Array]  # of an entry, by the input or the output encoder
_erf = np.frompyfunc(erf, 1, 1)


def rms_norm(x: Array, gain: Array, eps: float = 1e-5) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def layer_norm(x: Array, p: Weights, name: str, eps: float = 1e-5) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * p[f"{name}.weight"] + p[f"{name}.bias"]


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def log_softmax(x: Array) -> Array:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + _erf(x / np.sqrt(2)).astype(np.float64))


def rotate(x: Array, positions: Array, theta: float = 10_000.0) -> Array:
    """Rotates the two halves of x [H, T, d] (RoPE)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / theta ** (np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def heads_of(x: Array, heads: int) -> Array:
    """[T, H * d] -> [H, T, d]."""
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def attention(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """[H, T, d] each; mask [T, T] -> [T, H * d]."""
    scores = np.where(mask, q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]), -1e300)
    return (softmax(scores) @ v).transpose(1, 0, 2).reshape(q.shape[1], -1)


def encoder_row(p: Weights, side: str, base_rows: Array, pad_row: Array, size: int, kind: str, heads: int) -> Array:
    """One entry's hyper row from the rows [n, D] of its base ids; `size` is the merge size."""
    n = len(base_rows)
    x = np.concatenate([base_rows, np.tile(pad_row, (size - n, 1))])
    first, keep = x[0], np.arange(size) < n
    if f"{side}.proj_in.weight" in p:
        x = x @ p[f"{side}.proj_in.weight"].T
    if f"{side}.pos_embed.weight" in p:
        x = x + p[f"{side}.pos_embed.weight"]
    layer = 0
    while any(name.startswith(f"{side}.layers.{layer}.") for name in p):
        block = _post_norm if kind == "transformer" else _pre_norm
        x = block(p, f"{side}.layers.{layer}", x, keep, heads)
        layer += 1
    if kind == "transformer":
        return x.mean(0)
    pooled = layer_norm(x, p, f"{side}.norm")[keep].mean(0)
    if f"{side}.proj_out.weight" in p:
        pooled = pooled @ p[f"{side}.proj_out.weight"].T
    return pooled + first


def _post_norm(p: Weights, name: str, x: Array, keep: Array, heads: int) -> Array:
    q, k, v = (heads_of(x @ p[f"{name}.attention.{side}_proj.weight"].T, heads) for side in "qkv")
    mixed = np.zeros_like(x)
    mixed[keep] = attention(q[:, keep], k[:, keep], v[:, keep], np.ones((keep.sum(),) * 2, bool))
    x = layer_norm(x + mixed @ p[f"{name}.attention.o_proj.weight"].T, p, f"{name}.post_attention_layernorm")
    inner = gelu(x @ p[f"{name}.mlp.fc1.weight"].T) @ p[f"{name}.mlp.fc2.weight"].T
    return layer_norm(x + inner, p, f"{name}.post_mlp_layernorm")


def _pre_norm(p: Weights, name: str, x: Array, keep: Array, heads: int) -> Array:
    y = layer_norm(x, p, f"{name}.norm1")
    q, k, v = (heads_of(y @ p[f"{name}.w{side}.weight"].T, heads) for side in "qkv")
    keys = np.tile(keep, (len(x), 1))
    x = x + attention(q, k, v, keys) @ p[f"{name}.wo.weight"].T
    return x + gelu(layer_norm(x, p, f"{name}.norm2") @ p[f"{name}.w1.weight"].T) @ p[f"{name}.w2.weight"].T


def decoder(p: Weights, x: Array, config: Mapping[str, Any]) -> Array:
    """[T, D] -> [T, D], with the final norm."""
    positions, causal = np.arange(len(x), dtype=np.float64), np.tril(np.ones((len(x), len(x)), bool))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for i in range(config["num_hidden_layers"]):
        name = f"model.layers.{i}"
        y = rms_norm(x, p[f"{name}.input_layernorm.weight"])
        q = rotate(heads_of(y @ p[f"{name}.self_attn.q_proj.weight"].T, heads), positions)
        k = rotate(heads_of(y @ p[f"{name}.self_attn.k_proj.weight"].T, kv_heads), positions)
        v = heads_of(y @ p[f"{name}.self_attn.v_proj.weight"].T, kv_heads)
        k, v = (np.repeat(a, heads // kv_heads, axis=0) for a in (k, v))
        x = x + attention(q, k, v, causal) @ p[f"{name}.self_attn.o_proj.weight"].T
        y = rms_norm(x, p[f"{name}.post_attention_layernorm.weight"])
        gate = y @ p[f"{name}.mlp.gate_proj.weight"].T
        up = y @ p[f"{name}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p[f"{name}.mlp.down_proj.weight"].T
    return rms_norm(x, p["model.norm.weight"])


class Reference:
    """The objective of some samples as a function of the weights: `loss(weights)`, a mean per counted id.

    weights are named as the trainee's, without "model." in front of the model's own. config: config.json.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        samples: Sequence[Sample],
        codec: Any,
        availability: str,
        reconstruction: float,
        token_type: float,
    ) -> None:
        self.config, self.codec, self.availability = config, codec, availability
        self.reconstruction, self.token_type = reconstruction, token_type
        self.tied = bool(config["tie_word_embeddings"])
        self.followed = [self._follow(sample) for sample in samples]

    def _follow(self, sample: Sample) -> tuple[Sample, list[tuple[int, ...]], list[int]]:
        """Returns the entries at the end, and the number of entries after each id."""
        book, counts = Codebook(sample.params(self.codec)), []
        for token in sample.ids[:-1].tolist():
            book.push(token)
            counts.append(len(book))
        entries = [tuple(entry) for _, entry in book.entries]
        return sample, entries, counts if self.availability == "causal" else [len(book)] * len(counts)

    def row(self, p: Weights, entry: tuple[int, ...], output: bool) -> Array:
        """The hyper row [D] of an entry by one side's encoder."""
        section = self.config["zip2zip"]
        side = "output_encoder" if output and not section["encoder"]["tie_encoders"] else "input_encoder"
        matrix = p["lm_head.weight" if output and not self.tied else "model.embed_tokens.weight"]
        kind, heads = section["encoder_type"], section["encoder"]["num_heads"]
        size, pad = self.codec.merge_size, matrix[self.codec.pad_id]
        return encoder_row(p, side, matrix[list(entry)], pad, size, kind, heads)

    def loss(self, p: Weights) -> float:
        row = cache(lambda entry, output: self.row(p, entry, output))
        parts = np.sum([self._sample(p, row, *followed) for followed in self.followed], axis=0)
        nats, count, types = parts
        extra = self.reconstruction * count * self._rebuilt(p, row) if self.reconstruction else 0.0
        return float((nats + extra + self.token_type * types) / count)

    def _sample(self, p: Weights, row: Row, sample: Sample, entries: list[tuple[int, ...]], counts: list[int]) -> Array:
        vocab = self.codec.vocab_size
        embed = p["model.embed_tokens.weight"]
        inputs, outputs = (np.array([row(entry, output) for entry in entries]) for output in (False, True))
        ids = sample.ids.tolist()
        hidden = decoder(p, np.array([embed[i] if i < vocab else inputs[i - vocab] for i in ids[:-1]]), self.config)
        head = embed if self.tied else p["lm_head.weight"]
        nats = count = types = 0.0
        for i, h in enumerate(hidden):
            logits = np.concatenate([head[:vocab] @ h, outputs[: counts[i]] @ h])
            weight, target = float(sample.mask[i + 1]), ids[i + 1]
            nats -= weight * log_softmax(logits)[target]
            count += weight
            if self.token_type:
                score = float(p["type_head.weight"][0] @ h + p["type_head.bias"][0])
                types += weight * (np.log1p(np.exp(-score)) if target >= vocab else np.log1p(np.exp(score)))
        return np.array([nats, count, types])

    def _rebuilt(self, p: Weights, row: Row) -> float:
        """Mean nats of all entries' base ids, decoded from both rows. Source: arXiv 2506.01084 eq. 3."""
        entries = sorted({entry for _, found, _ in self.followed for entry in found})
        nats: list[float] = []
        for output in (False, True):
            matrix = p["lm_head.weight" if output and not self.tied else "model.embed_tokens.weight"]
            for entry in entries:
                guesses = (p["decoder.weight"] @ row(entry, output) + p["decoder.bias"]).reshape(
                    self.codec.merge_size, -1
                )
                logs = log_softmax(guesses @ matrix.T)
                nats += [-logs[k, base] for k, base in enumerate(entry)]
        return float(np.mean(nats))
