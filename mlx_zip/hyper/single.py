"""The row of a single entry, encoded in few operations: what a step of generation needs when it installs an entry.

The encoders (`mlx_zip.hyper.encoders`) take many entries at once and pad them all to one length. For one entry, the
forward pass here runs over its real positions only, multiplies with the three attention projections at once, and is
compiled. Its rows equal the encoders' within 1e-5 in float32. `transformer` and `attention` average over the padding
too; what the padding adds depends on the weights alone and is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_zip.hyper.encoders import Attention, Averaging, ResLatentAttention, Transformer
from mlx_zip.hyper.rows import matrix_rows

FLOAT_BYTES = 64 << 20  # on the CPU, quantized encoders of up to this size in float32 are used as float32 copies
_KINDS = (Averaging, Attention, ResLatentAttention, Transformer)
Dense = Callable[[mx.array], mx.array]  # x [1, n, D] -> x times a matrix


class SingleEncoder:
    """An encoder for one entry at a time: base_ids [1, n] without padding -> its row [1, D].

    Holds what was computed from the weights when it was made, so make another one when a weight is replaced.
    matrix: the embedding or head whose rows the encoder reads. pad_id: the base id that pads entries of fewer than
    `merge_size` base ids.
    """

    def __init__(self, encoder: nn.Module, matrix: nn.Module, merge_size: int, pad_id: int) -> None:
        as_float = mx.default_device() == mx.Device(mx.cpu) and _float_bytes(encoder) <= FLOAT_BYTES
        self._matrix = matrix
        self._run = mx.compile(_forward(encoder, matrix, merge_size, pad_id, as_float))

    def __call__(self, base_ids: mx.array) -> mx.array:
        return self._run(matrix_rows(self._matrix, base_ids))


def _forward(encoder: Any, matrix: nn.Module, merge_size: int, pad_id: int, as_float: bool) -> Dense:
    """Returns the encoder's function of x [1, n, D], the base rows of one entry -> row [1, D]."""
    if isinstance(encoder, Averaging):
        return lambda x: x.sum(axis=1) / x.shape[1]
    if isinstance(encoder, ResLatentAttention):
        return _res_latent(encoder, as_float)
    if isinstance(encoder, Transformer):
        positions = encoder.pos_embed.weight if "pos_embed" in encoder else None
        layers = [_post_norm(layer, as_float) for layer in encoder.layers]
    else:
        assert isinstance(encoder, Attention)
        positions, layers = encoder.pos_embed.weight, [_only_attention(encoder.attention, as_float)]
    padding = _padding(encoder, matrix, merge_size, pad_id)

    def forward(x: mx.array) -> mx.array:
        n = x.shape[1]
        if positions is not None:
            x = x + positions[:n].astype(x.dtype)
        for layer in layers:
            x = layer(x)
        return mx.concatenate([x, padding[:, n:]], axis=1).mean(axis=1)

    return forward


def _res_latent(encoder: ResLatentAttention, as_float: bool) -> Dense:
    """Returns the function of a `ResLatentAttention`."""
    enter = _dense(encoder.proj_in, as_float) if "proj_in" in encoder else _same
    leave = _dense(encoder.proj_out, as_float) if "proj_out" in encoder else _same
    layers = [_pre_norm(layer, as_float, encoder.causal) for layer in encoder.layers]
    positions, norm, causal, residual = encoder.pos_embed.weight, encoder.norm, encoder.causal, encoder.residual

    def forward(x: mx.array) -> mx.array:
        n, base = x.shape[1], x
        x = enter(x)
        x = x + positions[:n].astype(x.dtype)
        for layer in layers:
            x = layer(x)
        x = norm(x)
        # The mean is divided last, so that the division and the residual are one operation.
        row = leave(x[:, -1]) if causal else leave(x.sum(axis=1)) / n
        return row if residual is None else row + _residual_row(base, residual)

    return forward


def _residual_row(x: mx.array, kind: str) -> mx.array:
    """Returns the first, the last or the mean of an entry's base rows x [1, n, D], all of them real."""
    return x.mean(axis=1) if kind == "mean" else x[:, 0 if kind == "first" else -1]


def _pre_norm(block: Any, as_float: bool, causal: bool) -> Dense:
    """Returns the function of a `PreNormBlock`."""
    attend = _attention([block.wq, block.wk, block.wv], block.wo, block.num_heads, as_float, causal)
    up, down = _dense(block.w1, as_float), _dense(block.w2, as_float)

    def forward(x: mx.array) -> mx.array:
        x = x + attend(block.norm1(x))
        return x + down(nn.gelu(up(block.norm2(x))))

    return forward


def _post_norm(block: Any, as_float: bool) -> Dense:
    """Returns the function of a `PostNormBlock`."""
    attend = _only_attention(block.attention, as_float)
    up, down = _dense(block.mlp.fc1, as_float), _dense(block.mlp.fc2, as_float)

    def forward(x: mx.array) -> mx.array:
        x = block.post_attention_layernorm(x + attend(x))
        return block.post_mlp_layernorm(x + down(nn.gelu(up(x))))

    return forward


def _only_attention(module: Any, as_float: bool) -> Dense:
    """Returns the function of a `SelfAttention` over real positions."""
    return _attention([module.q_proj, module.k_proj, module.v_proj], module.o_proj, module.num_heads, as_float, False)


def _attention(inputs: list[Any], output: Any, heads: int, as_float: bool, causal: bool) -> Dense:
    """Returns multi-head attention of x [1, n, D] with itself.

    inputs: the projections to queries, keys and values, which are multiplied with at once. output: the last projection.
    """
    project, leave = _dense(_joined(inputs), as_float), _dense(output, as_float)

    def forward(x: mx.array) -> mx.array:
        n, width = x.shape[1], x.shape[2] // heads
        q, k, v = project(x).reshape(1, n, 3, heads, width).transpose(2, 0, 3, 1, 4)
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=width**-0.5, mask="causal" if causal else None)
        return leave(out.transpose(0, 2, 1, 3).reshape(1, n, -1))

    return forward


def _joined(modules: list[Any]) -> dict[str, Any]:
    """Returns the weights of several linear layers of one kind as those of one layer, whose outputs stand in a row."""
    names = [name for name in ("weight", "scales", "biases") if modules[0].get(name) is not None]
    joined: dict[str, Any] = {name: mx.concatenate([module[name] for module in modules]) for name in names}
    mx.eval(joined)
    return joined | _quantization(modules[0])


def _quantization(module: Any) -> dict[str, Any]:
    """Returns the settings of a quantized layer, a module or what `_joined` returned; nothing for another layer."""
    if "scales" not in module:
        return {}
    settings = module if "bits" in module else vars(module)
    return {name: settings[name] for name in ("group_size", "bits", "mode")}


def _dense(layer: Any, as_float: bool) -> Dense:
    """Returns the function of a linear layer without bias; layer: a module, or what `_joined` returned."""
    settings = _quantization(layer)
    weight = layer["weight"]
    if not settings:
        return lambda x: x @ weight.swapaxes(-1, -2)
    scales, biases = layer["scales"], layer.get("biases")
    if as_float:
        floats = mx.contiguous(mx.dequantize(weight, scales, biases, **settings).swapaxes(-1, -2))
        mx.eval(floats)
        return lambda x: x @ floats
    return lambda x: mx.quantized_matmul(x, weight, scales, biases, transpose=True, **settings)


def _padding(encoder: Any, matrix: nn.Module, merge_size: int, pad_id: int) -> mx.array:
    """Returns what the encoder's layers make of padding at each position, [1, merge_size, width].

    A position of padding is not attended to and attends to nothing, so its output depends on no other position.
    """
    x = matrix_rows(matrix, mx.full((1, merge_size), pad_id, mx.int32))
    if "pos_embed" in encoder:
        x = x + encoder.pos_embed.weight.astype(x.dtype)
    nothing = mx.zeros((1, 1, merge_size, merge_size), mx.bool_)
    for layer in encoder.layers if isinstance(encoder, Transformer) else [encoder.attention]:
        x = layer(x, nothing)
    mx.eval(x)
    return x


def is_supported(encoder: nn.Module) -> bool:
    """Returns whether `SingleEncoder` knows all of an encoder's layers; it does not know LoRA's, for example."""
    return type(encoder) in _KINDS and all(_is_known(module) for _, module in encoder.named_modules())


def _is_known(module: Any) -> bool:
    """Returns whether a module is one without weights of its own, or of a kind that the functions above use."""
    if "weight" not in module and "lora_a" not in module:
        return True
    matrix = type(module) in (nn.Linear, nn.QuantizedLinear) and "bias" not in module
    return matrix or type(module) in (nn.LayerNorm, nn.Embedding)


def _float_bytes(encoder: nn.Module) -> int:
    """Returns the size of the encoder's matrices in float32, in bytes."""
    return sum(4 * _values(module) for module in _linear_layers(encoder))


def _values(module: Any) -> int:
    """Returns the number of values of a linear layer's matrix."""
    weight = module["weight"]
    return weight.size * (32 // module.bits if "scales" in module else 1)


def _linear_layers(encoder: nn.Module) -> Iterator[Any]:
    """Yields the linear layers of an encoder, quantized or not."""
    for _, module in encoder.named_modules():
        if isinstance(module, nn.Linear | nn.QuantizedLinear):
            yield module


def _same(x: mx.array) -> mx.array:
    """Returns x."""
    return x
