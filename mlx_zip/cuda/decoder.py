"""The decoder's layers and final norm: many ids at a time for prompts, one id per sequence for steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mlx_zip.cuda.attention import Seen, attend
from mlx_zip.cuda.folder import Folder
from mlx_zip.cuda.kernels.attention import decode_attention
from mlx_zip.cuda.kernels.norm import rms_norm
from mlx_zip.cuda.kernels.rope import rope_and_cache
from mlx_zip.cuda.kernels.rotation import Rotation
from mlx_zip.cuda.kv import KV, make_kv
from mlx_zip.cuda.layers import Layer, take_layers
from mlx_zip.cuda.linear import product

Attention = Callable[[int, Layer, torch.Tensor], torch.Tensor]  # index, layer, qkv [N, (H + 2K) E] -> [N, H E]


class Decoder:
    """The body of a model, from embeddings to the output that the head takes. Holds weights only."""

    def __init__(self, folder: Folder) -> None:
        """Takes the layers and the final norm out of a folder. Raises `ModelError` naming file and tensor."""
        self.config, self.dtype, self.device = folder.decoder, folder.dtype, folder.device
        self.layers = take_layers(folder)
        self.norm = folder.take_dense("model.norm.weight", self.config.width)
        self.rope = self.config.rope.to(self.device)

    def make_kv(self, batch: int, capacity: int) -> KV:
        """Returns empty caches of `batch` sequences of up to `capacity` ids. Raises `ModelError` if they do not fit."""
        return make_kv(self.config, batch, capacity, self.dtype, self.device)

    def read(
        self, h: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, kv: KV, end: int | None = None
    ) -> torch.Tensor:
        """Returns the output [B, L, D] of embeddings h [B, L, D] and writes their keys and values into the caches.

        positions [B, L] int64: for the rotation. slots [B, L] int64: the cache slot of each id, rising from the length
        of each sequence, which the call moves on; -1 for padding at the end. `kv.which` chooses the rotary set. end:
        the slot after the last one, if all sequences end there; else the host waits for the slots.
        """
        batch, length, width = h.shape
        seen = Seen(slots, end)

        def attention(index: int, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
            q = self._rotated(layer, index, qkv.view(batch, length, -1), positions, slots, kv)
            return attend(q, kv.keys(index), kv.values(index), seen, layer.window).reshape(batch * length, -1)

        out = self._run(h.reshape(-1, width), attention)
        kv.lengths.copy_(torch.maximum(kv.lengths, slots.amax(1) + 1))
        return out.view(batch, length, width)

    def step(
        self,
        h: torch.Tensor,
        positions: torch.Tensor,
        kv: KV,
        active: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the output [B, D] of one embedding per sequence, h [B, D], which goes to the slot `kv.lengths`.

        positions [B] int64. active [B] int64: 1 where `kv.lengths` moves on, 0 for a sequence that takes no part and
        whose output means nothing; None for 1 everywhere. out [B, D]: where the output is written, None for new memory.
        The call reads nothing on the host and allocates by shapes alone, so that a CUDA graph can hold it.
        """
        slots, seen = kv.lengths[:, None], kv.lengths + 1

        def attention(index: int, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
            q = self._rotated(layer, index, qkv[:, None], positions[:, None], slots, kv)
            return decode_attention(q[:, 0], kv.keys(index), kv.values(index), seen, layer.window).view(len(h), -1)

        out = self._run(h, attention, out)
        kv.lengths.add_(1 if active is None else active)
        return out

    def _run(self, h: torch.Tensor, attention: Attention, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the output [N, D] of all layers and the final norm for embeddings h [N, D], in `out` if given."""
        eps = self.config.eps
        for index, layer in enumerate(self.layers):
            seen = attention(index, layer, product(h, layer.qkv, norm=(layer.norm, eps)))
            h = product(seen, layer.output, residual=h)
            inner = product(h, layer.gate_up, norm=(layer.mlp_norm, eps), gate=True)
            h = product(inner, layer.down, residual=h)
        return rms_norm(h, self.norm, eps, out)

    def _rotated(
        self, layer: Layer, index: int, qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, kv: KV
    ) -> torch.Tensor:
        """Returns rotated queries [B, L, H, E] of qkv [B, L, (H + 2K) E]; keys and values go into the caches."""
        rope = self.rope
        which = None if rope.long_from is None else kv.which
        rotation = Rotation(rope.frequencies, rope.magnitude, which, layer.q_norm, layer.k_norm, self.config.eps)
        return rope_and_cache(qkv, positions, slots, rotation, kv.keys(index), kv.values(index))
