"""The decoder and the head on a CPU, with few PyTorch operations per layer, over the filled part of the caches."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from mlx_zip.cuda.kernels.head import HeadOutput
from mlx_zip.cuda.network.decoder import (
    Attention,
    Decoder,
    DecoderLayer,
    KVCache,
    VisibleKeys,
    attend_to_cache,
    visible_key_mask,
)
from mlx_zip.cuda.network.linear import Linear

RotationFactors = tuple[torch.Tensor, torch.Tensor]  # cosines and signed sines [N, 1, R]


class CpuDecoder(Decoder):
    """A decoder whose weights are prepared for a CPU (`mlx_zip.cuda.network.linear`)."""

    takes_rows_of_any_length = False

    def prefill(
        self, h: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, kv: KVCache, end: int | None = None
    ) -> torch.Tensor:
        """See `Decoder.prefill`. All sequences must end at the same slot, and `end` is the slot after that."""
        assert end is not None
        batch, length, width = h.shape
        begin, seen = end - length, VisibleKeys(slots, end)
        factors = self._rotation_factors(positions.flatten(), kv.frequency_set.repeat_interleave(length))

        def attention(index: int, layer: DecoderLayer, qkv: torch.Tensor) -> torch.Tensor:
            q, new = self._split_and_rotate(layer, qkv, factors)
            kv.whole[index, :, :, :, begin:end] = new.unflatten(0, (batch, length)).permute(2, 0, 3, 1, 4)
            q = q.unflatten(0, (batch, length))
            return attend_to_cache(q, kv.keys(index), kv.values(index), seen, layer.window).reshape(batch * length, -1)

        out = self._run_layers(h.reshape(-1, width), attention)
        kv.lengths.fill_(end)
        return out.view(batch, length, width)

    def step(
        self,
        h: torch.Tensor,
        positions: torch.Tensor,
        kv: KVCache,
        active: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Decoder.step`. Rows of `out` for sequences that are not active stay unchanged."""
        out = torch.empty_like(h) if out is None else out
        rows = list(range(len(h))) if active is None else active.nonzero()[:, 0].tolist()
        if len(rows) == 1:
            self._step_one_sequence(h, positions, kv, rows[0], out)
        elif rows:
            self._step_several_sequences(h, positions, kv, rows, out)
        return out

    def _step_one_sequence(
        self, h: torch.Tensor, positions: torch.Tensor, kv: KVCache, row: int, out: torch.Tensor
    ) -> None:
        config, slot, one = self.config, int(kv.lengths[row]), slice(row, row + 1)
        factors, shape = (
            self._rotation_factors(positions[one], kv.frequency_set[one]),
            (config.kv_heads, -1, config.head_width),
        )
        scale, unused = config.head_width**-0.5, h.new_zeros(1)

        def attention(index: int, layer: DecoderLayer, qkv: torch.Tensor) -> torch.Tensor:
            q, new = self._split_and_rotate(layer, qkv, factors)
            cache = kv.whole[index, :, row]
            cache[:, :, slot].copy_(new[0])
            first = 0 if layer.window is None else max(0, slot + 1 - layer.window)
            keys, values = cache[:, :, first : slot + 1].unbind(0)
            # the query heads that share a key head are a batch of queries for that key head; each sees all keys
            scores = torch.baddbmm(unused, q.view(shape), keys.mT, beta=0, alpha=scale)
            return torch.bmm(scores.softmax(-1), values).view(1, -1)

        out[one] = self._run_layers(h[one], attention)
        kv.lengths[row] += 1

    def _step_several_sequences(
        self, h: torch.Tensor, positions: torch.Tensor, kv: KVCache, rows: list[int], out: torch.Tensor
    ) -> None:
        at, count = torch.tensor(rows), len(rows)
        slots, everyone = kv.lengths[at], count == kv.whole.shape[2]
        end, factors = int(slots.max()) + 1, self._rotation_factors(positions[at], kv.frequency_set[at])
        masks = {window: visible_key_mask(slots[:, None], end, window) for window in set(self.config.windows)}
        shape = (count, self.config.kv_heads, -1, self.config.head_width)

        def attention(index: int, layer: DecoderLayer, qkv: torch.Tensor) -> torch.Tensor:
            q, new = self._split_and_rotate(layer, qkv, factors)
            cache = kv.whole[index]
            cache[:, at, :, slots] = new
            keys, values = (cache[:, :, :, :end] if everyone else cache[:, at, :, :end]).unbind(0)
            seen = scaled_dot_product_attention(q.reshape(shape), keys, values, masks[layer.window])
            return seen.reshape(count, -1)

        out[at] = self._run_layers(h[at], attention)
        kv.lengths[at] += 1

    def _run_layers(self, h: torch.Tensor, attention: Attention) -> torch.Tensor:
        eps = torch.tensor(self.config.eps)
        for index, layer in enumerate(self.layers):
            seen = attention(index, layer, layer.qkv(_rms_norm(h, layer.norm, eps)))
            h = layer.output(seen).add_(h)
            gate, up = layer.gate_up(_rms_norm(h, layer.mlp_norm, eps)).chunk(2, -1)
            h = layer.down(silu(gate).mul_(up)).add_(h)
        return _rms_norm(h, self.norm, eps)

    def _rotation_factors(self, positions: torch.Tensor, frequency_set: torch.Tensor) -> RotationFactors:
        """Returns cosines and signed sines of N ids at `positions` [N] by their frequency sets [N]."""
        rates = self.rope.frequencies[0 if self.rope.long_from is None else frequency_set]
        angles = positions[:, None].float() * rates
        cos, sin = (part.mul_(self.rope.magnitude).to(self.dtype) for part in (angles.cos(), angles.sin()))
        return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]

    def _split_and_rotate(
        self, layer: DecoderLayer, qkv: torch.Tensor, factors: RotationFactors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rotated queries [N, H, E], and rotated keys and values [N, 2, K, E], of qkv [N, (H + 2K) E]."""
        config, (cos, sin) = self.config, factors
        width, heads, turned = config.head_width, config.heads, config.heads + config.kv_heads
        parts = qkv.view(len(qkv), -1, width)
        if layer.q_norm is not None and layer.k_norm is not None:
            eps = torch.tensor(config.eps)
            parts[:, :heads] = _rms_norm(parts[:, :heads], layer.q_norm, eps)
            parts[:, heads:turned] = _rms_norm(parts[:, heads:turned], layer.k_norm, eps)
        columns = cos.shape[-1]
        rotated = parts[:, :turned] if columns == width else parts[:, :turned, :columns]
        swapped = rotated.roll(columns // 2, -1)
        rotated.mul_(cos).addcmul_(swapped, sin)
        return parts[:, :heads], parts[:, heads:].view(len(qkv), 2, -1, width)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """Returns the RMS norm of x [..., D] in few PyTorch operations. eps: scalar float32."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    factor = torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    return factor.mul(x).to(x.dtype).mul_(weight)


def joint_head_on_cpu(
    h: torch.Tensor, scores: Linear, rows: torch.Tensor, installed: torch.Tensor, boundary: int, logits: bool
) -> HeadOutput:
    """Returns what `joint_head` returns, with weights prepared for a CPU.

    scores: the product with the head's matrix. Only the rows up to the last installed row are read.
    """
    low, filled = scores(h).float(), installed.any(0).nonzero()
    end = int(filled[-1]) + 1 if len(filled) else 0
    high = torch.bmm(rows[:, :end], h[:, :, None])[..., 0].float()
    if not installed[:, :end].all():
        high.masked_fill_(~installed[:, :end], -torch.inf)  # also hides NaN in rows that are not installed
    if not logits:
        return HeadOutput(torch.cat([low[:, :boundary], high], 1).argmax(1), None)
    closed = rows.shape[1] - end + low.shape[1] - boundary  # columns of empty slots and of the tail
    every = torch.cat([low[:, :boundary], high, low.new_full((len(h), closed), -torch.inf)], 1)
    return HeadOutput(every.argmax(1), every)
