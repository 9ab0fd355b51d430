"""The decoder: weights, attention, and two passes, `prefill` for prompts and `step` for one id per sequence.

A layer of a step is seven kernel launches: (1) norm and the joined q, k, v product; (2) rotation, head norms and cache
write; (3, 4) attention; (5) output projection and residual; (6) norm, gate and up products, and activation; (7) down
product and residual. Prompts run the same layers through cuBLAS and PyTorch's attention, and unpack packed weights for
each product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from mlx_zip.cuda.kernels.activations import rms_norm
from mlx_zip.cuda.kernels.attention import decode_attention
from mlx_zip.cuda.kernels.rope import Rotation, rope_and_cache
from mlx_zip.cuda.network.checkpoint import TensorFolder
from mlx_zip.cuda.network.decoder_config import DecoderConfig
from mlx_zip.cuda.network.kv_cache import KVCache, make_kv_cache
from mlx_zip.cuda.network.linear import Linear, fused_product, join_by_rows
from mlx_zip.errors import ModelError


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of one layer.

    norm, mlp_norm [D]. qkv: D -> (H + 2K) E, queries, keys, values. q_norm, k_norm [E], or None. output: H E -> D.
    gate_up: D -> 2F, gate, then up. down: F -> D. window: sliding window in ids, or None.
    """

    norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int | None


def _take_layers(folder: TensorFolder) -> list[DecoderLayer]:
    layers = [_take_layer(folder, folder.decoder, index) for index in range(folder.decoder.layers)]
    if rest := sorted(name for name in folder.tensors if name.startswith("model.layers.")):
        raise ModelError(
            f"{folder.path / folder.files[rest[0]]}: {rest[0]} belongs to no layer of a {folder.decoder.kind}"
        )
    return layers


def _take_layer(folder: TensorFolder, config: DecoderConfig, index: int) -> DecoderLayer:
    at, width, inner = f"model.layers.{index}.", config.width, config.inner
    normed, biased = config.qk_norm, config.mlp_bias
    names = ["gate_up_proj"] if config.joined else ["gate_proj", "up_proj"]
    rows = 2 * inner // len(names)
    gate_up = [_take_linear(folder, f"{at}mlp.{name}", rows, width, biased) for name in names]
    return DecoderLayer(
        norm=folder.take_dense_tensor(f"{at}input_layernorm.weight", width),
        qkv=_take_qkv(folder, config, f"{at}self_attn."),
        q_norm=folder.take_dense_tensor(f"{at}self_attn.q_norm.weight", config.head_width) if normed else None,
        k_norm=folder.take_dense_tensor(f"{at}self_attn.k_norm.weight", config.head_width) if normed else None,
        output=_join_linears_for_device(
            folder, _take_linear(folder, f"{at}self_attn.o_proj", width, config.query_columns, config.output_bias)
        ),
        mlp_norm=folder.take_dense_tensor(f"{at}post_attention_layernorm.weight", width),
        gate_up=_join_linears_for_device(folder, *gate_up),
        down=_join_linears_for_device(folder, _take_linear(folder, f"{at}mlp.down_proj", width, inner, biased)),
        window=config.windows[index],
    )


def _take_qkv(folder: TensorFolder, config: DecoderConfig, at: str) -> Linear:
    queries, keys = config.query_columns, config.key_columns
    rows = {"qkv_proj": queries + 2 * keys} if config.joined else {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    return _join_linears_for_device(
        folder, *(_take_linear(folder, at + name, n, config.width, config.qkv_bias) for name, n in rows.items())
    )


def _join_linears_for_device(folder: TensorFolder, *parts: Linear) -> Linear:
    """Returns one linear layer with the rows of all `parts`, in order; without kernels it is prepared for a CPU."""
    whole = join_by_rows(parts)
    return whole if folder.kernels else whole.prepare_for_cpu(folder.dtype)


def _take_linear(folder: TensorFolder, name: str, rows: int, columns: int, biased: bool) -> Linear:
    bias = folder.take_dense_tensor(f"{name}.bias", rows) if biased else None
    return Linear(folder.take_weight(f"{name}.weight", rows, columns), bias)


# ---- attention of many queries over KV caches of fixed size, by PyTorch's own operation


class VisibleKeys:
    """Which keys each query of a call sees: keys in its own slot and in earlier slots, within a layer's window.

    slots [B, L] int64: the slot of each query, -1 for padding, whose results are meaningless.
    """

    def __init__(self, slots: torch.Tensor, end: int | None = None) -> None:
        """end: the slot after the last one, if all rows end at the same slot; None makes the host wait for `slots`."""
        self.slots, self.is_in_order = slots, end is not None
        self.end = int(slots.max()) + 1 if end is None else end
        if end is None:
            last = torch.arange(self.end - slots.shape[1], self.end, device=slots.device)
            self.is_in_order = bool((slots == last).all())
        self.masks: dict[int | None, torch.Tensor] = {}

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Returns which keys each query sees, [B, 1, L, end] bool; None if PyTorch's plain causal mask is right.

        window: maximum number of keys that a query sees, its own included; None for no limit.
        """
        window = None if window is None or window >= self.end else window
        if window is None and self.is_in_order:
            return None
        if window not in self.masks:
            self.masks[window] = visible_key_mask(self.slots, self.end, window)
        return self.masks[window]


def attend_to_cache(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: VisibleKeys, window: int | None
) -> torch.Tensor:
    """Returns softmax(q k' / sqrt(E)) v [B, L, H, E] of q [B, L, H, E]; keys, values [B, K, S, E]."""
    mask, q = seen.mask(window), q.transpose(1, 2)
    keys, values = keys[:, :, : seen.end], values[:, :, : seen.end]
    if mask is None:
        is_first = q.shape[2] == seen.end  # PyTorch's plain causal mask counts from the first key
        order = None if is_first else causal_mask(q.shape[2], seen.end, q.device)
        found = scaled_dot_product_attention(q, keys, values, attn_mask=order, is_causal=is_first, enable_gqa=True)
        return found.transpose(1, 2)
    # with a mask, PyTorch's fused attention needs as many key heads as query heads; heads are repeated for one sequence
    # at a time, to save memory
    copies = q.shape[1] // keys.shape[1]
    rows = [
        scaled_dot_product_attention(
            own[None], *(part[None].repeat_interleave(copies, dim=1) for part in cached), attn_mask=seen_by_own[None]
        )
        for seen_by_own, own, *cached in zip(mask, q, keys, values, strict=True)
    ]
    return torch.cat(rows).transpose(1, 2)


def causal_mask(length: int, end: int, device: torch.device) -> torch.Tensor:
    """Returns which of `end` keys each of the last `length` sees, [length, end] bool: those that are not after it."""
    if device.type != "cuda":
        return torch.ones(length, end, dtype=torch.bool, device=device).tril(end - length)
    from torch.nn.attention.bias import causal_lower_right  # imports PyTorch's compiler, which takes seconds

    return causal_lower_right(length, end)  # a tensor that fused attention takes for what it is


def visible_key_mask(slots: torch.Tensor, end: int, window: int | None) -> torch.Tensor:
    """Returns which of `end` keys each query sees, [B, 1, L, end] bool. A padding query sees the first key."""
    key, own = torch.arange(end, device=slots.device), slots.clamp(min=0)[:, None, :, None]
    seen = key <= own
    return seen if window is None else seen & (key > own - window)


# ---- passes

Attention = Callable[[int, DecoderLayer, torch.Tensor], torch.Tensor]  # index, layer, qkv [N, (H + 2K) E] -> [N, H E]


class Decoder:
    """The body of a model: from embeddings to the outputs that the head takes. Holds weights only.

    takes_rows_of_any_length: whether `prefill` takes sequences that end at different slots.
    """

    takes_rows_of_any_length = True

    def __init__(self, folder: TensorFolder) -> None:
        """Takes the layers and the final norm out of a folder. Raises `ModelError` if a tensor is missing or wrong."""
        self.config, self.dtype, self.device = folder.decoder, folder.dtype, folder.device
        self.layers = _take_layers(folder)
        self.norm = folder.take_dense_tensor("model.norm.weight", self.config.width)
        self.rope = self.config.rope.to(self.device)

    def make_kv_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns empty caches for `batch` sequences of `capacity` ids. Raises `ModelError` if memory is too small."""
        return make_kv_cache(self.config, batch, capacity, self.dtype, self.device)

    def prefill(
        self, h: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, kv: KVCache, end: int | None = None
    ) -> torch.Tensor:
        """Returns the output [B, L, D] for embeddings h [B, L, D] and writes keys and values into the caches.

        positions [B, L] int64: for the rotation. slots [B, L] int64: the cache slot of each id, rising from the
        sequence's length in `kv.lengths`; -1 for padding at the end. The call updates `kv.lengths`. end: the slot after
        the last one, if all sequences end at the same slot; None makes the host wait for the slots.
        """
        batch, length, width = h.shape
        seen = VisibleKeys(slots, end)

        def attention(index: int, layer: DecoderLayer, qkv: torch.Tensor) -> torch.Tensor:
            q = self._rotate_and_store(layer, index, qkv.view(batch, length, -1), positions, slots, kv)
            return attend_to_cache(q, kv.keys(index), kv.values(index), seen, layer.window).reshape(batch * length, -1)

        out = self._run_layers(h.reshape(-1, width), attention)
        kv.lengths.copy_(torch.maximum(kv.lengths, slots.amax(1) + 1))
        return out.view(batch, length, width)

    def step(
        self,
        h: torch.Tensor,
        positions: torch.Tensor,
        kv: KVCache,
        active: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the output [B, D] for one embedding per sequence, h [B, D]; keys and values go to slots `kv.lengths`.

        positions [B] int64. active [B] int64: added to `kv.lengths`, 0 for a sequence that takes no part and whose
        output is meaningless; None for 1 everywhere. out [B, D]: where the output is written, None for new memory. The
        call reads nothing on the host, and the sizes of its allocations depend on shapes alone, so that a CUDA graph
        can hold it.
        """
        slots, seen = kv.lengths[:, None], kv.lengths + 1

        def attention(index: int, layer: DecoderLayer, qkv: torch.Tensor) -> torch.Tensor:
            q = self._rotate_and_store(layer, index, qkv[:, None], positions[:, None], slots, kv)
            return decode_attention(q[:, 0], kv.keys(index), kv.values(index), seen, layer.window).view(len(h), -1)

        out = self._run_layers(h, attention, out)
        kv.lengths.add_(1 if active is None else active)
        return out

    def _run_layers(self, h: torch.Tensor, attention: Attention, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the output [N, D] of all layers and the final norm for embeddings h [N, D], in `out` if given."""
        eps = self.config.eps
        for index, layer in enumerate(self.layers):
            seen = attention(index, layer, fused_product(h, layer.qkv, norm=(layer.norm, eps)))
            h = fused_product(seen, layer.output, residual=h)
            inner = fused_product(h, layer.gate_up, norm=(layer.mlp_norm, eps), gate=True)
            h = fused_product(inner, layer.down, residual=h)
        return rms_norm(h, self.norm, eps, out)

    def _rotate_and_store(
        self,
        layer: DecoderLayer,
        index: int,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: KVCache,
    ) -> torch.Tensor:
        """Returns rotated queries [B, L, H, E] of qkv [B, L, (H + 2K) E]; writes keys and values into the caches."""
        rope = self.rope
        frequency_set = None if rope.long_from is None else kv.frequency_set
        rotation = Rotation(
            rope.frequencies, rope.magnitude, frequency_set, layer.q_norm, layer.k_norm, self.config.eps
        )
        return rope_and_cache(qkv, positions, slots, rotation, kv.keys(index), kv.values(index))
