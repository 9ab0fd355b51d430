"""The parts of Gemma 1 and 2 where mlx-lm's blocks differ from transformers or cannot take batches.

mlx-lm's attention of Gemma 2 takes neither a padded batch (grouped KV heads against a mask of four dimensions) nor a
quantized KV cache. In Gemma 1's MLP, transformers always uses the tanh form of GELU. The embedding's scale applies to
hyper rows too: zip2zip 0.2.0 replaces the embedding layer by one without the scale on the newer Gemmas, but no Gemma
checkpoint has been published with it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class TanhGeluMLP(nn.Module):
    """Gemma 1's MLP with the tanh form of GELU, which transformers uses whatever the config says; mlx-lm's is exact."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(_gated(self.gate_proj(x), self.up_proj(x)))


@partial(mx.compile, shapeless=True)
def _gated(gate: mx.array, up: mx.array) -> mx.array:
    """Returns tanh-GELU of gate, times up, both of one shape."""
    return nn.gelu_approx(gate) * up


class SoftCapAttention(nn.Module):
    """Gemma 2's attention: scores become c * tanh(scores / c) before the mask.

    Unlike mlx-lm's, this one also works with padded batches and quantized KV caches.
    """

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = args.num_attention_heads, args.num_key_value_heads, args.head_dim
        self.scale, self.cap = args.query_pre_attn_scalar**-0.5, args.attn_logit_softcapping
        self.q_proj = nn.Linear(args.hidden_size, self.n_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(args.hidden_size, self.n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(args.hidden_size, self.n_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.n_heads * self.head_dim, args.hidden_size, bias=False)
        self.rope: Any = None  # set by make_decoder

    def __call__(self, x: mx.array, mask: mx.array | None, cache: Any) -> mx.array:
        """Returns the attention's output [B, L, D] for x [B, L, D].

        mask: bool, broadcastable to [B, 1, L, K] for K cached ids, true for keys to attend to; None hides nothing.
        """
        batch, length, _ = x.shape
        queries, keys, values = (
            proj(x).reshape(batch, length, heads, self.head_dim).transpose(0, 2, 1, 3)
            for proj, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        queries, keys = self.rope(queries, cache.offset), self.rope(keys, cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
        queries = queries.reshape(batch, self.n_kv_heads, -1, length, self.head_dim) * self.scale
        scores = mx.tanh(_grouped_matmul(queries, keys, cache, transpose=True) / self.cap) * self.cap
        if mask is not None:
            mask = mask[:, :, None] if mask.ndim == 4 else mask
            scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
        weights = mx.softmax(scores, axis=-1, precise=True)
        out = _grouped_matmul(weights, values, cache, transpose=False).reshape(batch, self.n_heads, length, -1)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))


def _grouped_matmul(a: mx.array, b: Any, cache: Any, transpose: bool) -> mx.array:
    """Returns a [B, KV heads, query heads per KV head, L, .] times b, the cache's keys or values [B, KV heads, K, D].

    A quantized cache returns b as a tuple (packed weights, scales, biases). transpose: swap b's last two axes first.
    """
    if hasattr(cache, "bits"):
        parts = [part[:, :, None] for part in b]
        return mx.quantized_matmul(a, *parts, transpose=transpose, group_size=cache.group_size, bits=cache.bits)
    b = b[:, :, None]
    return a @ (b.swapaxes(-1, -2) if transpose else b)
