"""The hyper-encoders, which make one hyper row from each entry, for many entries at once or for a single one.

Each encoder is a function of x [N, S, D], the rows of the embedding (input side) or head matrix (output side) for
the S base ids of N entries, and of lengths [N], how many of the S positions are real. The other positions are padding
and hold the pad id's row. Attribute names are the checkpoint's tensor names. Source: arXiv 2506.01084 §2.3 and
appendix A; zip2zip 0.2.0.

As upstream, the kinds treat padding differently: `transformer` and `attention` average over all S positions, padding
included (attention contributes exactly 0 to padding); `res_latent_attn` pools over real positions only.

Upstream's `attention` fails when a model calls it, so the tests compare ours with direct calls of upstream's class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_zip.config import ENCODER_FIELDS, SIDES, EncoderConfig
from mlx_zip.errors import ConfigError

LAYER_NORM_EPS = 1e-5
ENTRIES_PER_PASS = 512  # limits the encoder's activations when a long prompt installs thousands of entries


def make_encoder(config: EncoderConfig, merge_size: int, side: str = SIDES[0]) -> nn.Module:
    """Builds the encoder `config.kind` for entries of up to `merge_size` base ids. Raises `ConfigError`.

    side: one of `SIDES`, the side whose rows the encoder makes; matters only with `residual_by_side`.
    """
    kinds = {
        "averaging": Averaging,
        "attention": Attention,
        "transformer": Transformer,
    }
    if config.kind not in ENCODER_FIELDS:
        raise ConfigError(f"encoder_type {config.kind!r} is not one of {', '.join(sorted(ENCODER_FIELDS))}")
    if config.kind == "res_latent_attn":
        return ResLatentAttention(config, merge_size, config.residual_row_kind(side))
    return kinds[config.kind](config, merge_size)


def quantization_settings(module: Any) -> dict[str, Any]:
    """Returns the quantization settings of a layer or of what `_join_linear_layers` returned; {} if not quantized."""
    if "scales" not in module:
        return {}
    settings = module if "bits" in module else vars(module)
    return {name: settings[name] for name in ("group_size", "bits", "mode")}


def matrix_rows(module: Any, ids: mx.array | slice) -> mx.array:
    """Returns rows [..., D] of an embedding's or a linear layer's weights: those of ids [...], or those in a slice.

    If the layer is quantized, only these rows are dequantized. Source: zip2zip 0.2.0, which encodes output rows from
    rows of the head matrix, not of the embedding.
    """
    if "scales" not in module:
        return module["weight"][ids]
    biases = module.get("biases")
    biases = None if biases is None else biases[ids]
    return mx.dequantize(module["weight"][ids], module["scales"][ids], biases, **quantization_settings(module))


def encode_entries(encoder: nn.Module, matrix: nn.Module, base_ids: np.ndarray, lengths: np.ndarray) -> mx.array:
    """Returns the hyper rows [N, D] of N entries, encoded `ENTRIES_PER_PASS` at a time.

    matrix: the embedding or head whose rows the encoder reads. base_ids [N, S] uint32: padded with the pad id. lengths
    [N]: how many of the S base ids are real.
    """
    parts = []
    for begin in range(0, len(base_ids), ENTRIES_PER_PASS):
        block = slice(begin, begin + ENTRIES_PER_PASS)
        x = matrix_rows(matrix, mx.array(base_ids[block]))
        parts.append(encoder(x, mx.array(lengths[block].astype(np.int32))))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


class Averaging(nn.Module):
    """The mean of an entry's base rows; no parameters (the paper's baseline, appendix A)."""

    def __init__(self, config: EncoderConfig, merge_size: int) -> None:
        super().__init__()

    def __call__(self, x: mx.array, lengths: mx.array) -> mx.array:
        """Returns hyper rows [N, D] of entries x [N, S, D] with lengths [N]."""
        return mean_of_real_positions(x, lengths)


class Attention(nn.Module):
    """One attention layer over base rows plus learned positions, then the mean over S (the paper's first encoder)."""

    def __init__(self, config: EncoderConfig, merge_size: int) -> None:
        super().__init__()
        self.pos_embed = nn.Embedding(merge_size, config.hidden_size)
        self.attention = SelfAttention(config)

    def __call__(self, x: mx.array, lengths: mx.array) -> mx.array:
        """Returns hyper rows [N, D] of entries x [N, S, D] with lengths [N]."""
        x = x + self.pos_embed.weight[: x.shape[1]].astype(x.dtype)
        return self.attention(x, mask_of_real_positions(x, lengths)).mean(axis=1)


class Transformer(nn.Module):
    """A post-norm transformer over base rows, then the mean over all S positions, padding included."""

    def __init__(self, config: EncoderConfig, merge_size: int) -> None:
        super().__init__()
        if config.has_positions:
            self.pos_embed = nn.Embedding(merge_size, config.hidden_size)
        self.layers = [PostNormBlock(config) for _ in range(config.num_hidden_layers)]

    def __call__(self, x: mx.array, lengths: mx.array) -> mx.array:
        """Returns hyper rows [N, D] of entries x [N, S, D] with lengths [N]."""
        if "pos_embed" in self:
            x = x + self.pos_embed.weight[: x.shape[1]].astype(x.dtype)
        mask = mask_of_real_positions(x, lengths)
        for layer in self.layers:
            x = layer(x, mask)
        return x.mean(axis=1)


class ResLatentAttention(nn.Module):
    """A pre-norm transformer with its own width; a base row of the entry is added to its result (zip2zip++: the first).

    Pools over real positions: takes their mean, or the last real position if the attention is causal. residual: which
    base row is added, "first", "last" or "mean" (of all), None for none.
    """

    def __init__(self, config: EncoderConfig, merge_size: int, residual: str | None) -> None:
        super().__init__()
        width, model = config.hidden_size, config.model_size
        self.causal, self.residual = config.causal, residual
        self.pos_embed = nn.Embedding(merge_size, width)
        if model != width:
            self.proj_in = nn.Linear(model, width, bias=False)
            self.proj_out = nn.Linear(width, model, bias=False)
        self.layers = [PreNormBlock(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)

    def __call__(self, x: mx.array, lengths: mx.array) -> mx.array:
        """Returns hyper rows [N, D] of entries x [N, S, D] with lengths [N]."""
        residual = None if self.residual is None else residual_rows(x, lengths, self.residual)
        if "proj_in" in self:
            x = self.proj_in(x)
        x = x + self.pos_embed.weight[: x.shape[1]].astype(x.dtype)
        mask = self._mask(x, lengths)
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        pooled = last_real_position(x, lengths) if self.causal else mean_of_real_positions(x, lengths)
        if "proj_out" in self:
            pooled = self.proj_out(pooled)
        return pooled if residual is None else pooled + residual

    def _mask(self, x: mx.array, lengths: mx.array) -> mx.array:
        """Returns the attention mask [N, 1, 1 or S, S], true for real keys, and if causal only up to the query.

        Queries may be padding, because their results are not used.
        """
        keys = are_real_positions(x, lengths)[:, None, None, :]
        if not self.causal:
            return keys
        steps = mx.arange(x.shape[1])
        return keys & (steps[:, None] >= steps[None, :])


class PostNormBlock(nn.Module):
    """x = LN(x + attention(x)); x = LN(x + MLP(x))."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.mlp = FeedForward(config)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)
        self.post_mlp_layernorm = nn.LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS)

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        x = self.post_attention_layernorm(x + self.attention(x, mask))
        return self.post_mlp_layernorm(x + self.mlp(x))


class SelfAttention(nn.Module):
    """Multi-head self-attention without biases: x [N, S, H], mask as in `multi_head_attention` -> [N, S, H]."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.num_heads, width = config.num_heads, config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        return self.o_proj(multi_head_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x), self.num_heads, mask))


class FeedForward(nn.Module):
    """W2 gelu(W1 x), without biases."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc2(nn.gelu(self.fc1(x)))


class PreNormBlock(nn.Module):
    """x = x + attention(LN(x)); x = x + MLP(LN(x)), with upstream's flat tensor names."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.num_heads, width = config.num_heads, config.hidden_size
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.w1 = nn.Linear(width, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, width, bias=False)
        self.norm1 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.norm2 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        y = self.norm1(x)
        x = x + self.wo(multi_head_attention(self.wq(y), self.wk(y), self.wv(y), self.num_heads, mask))
        return x + self.w2(nn.gelu(self.w1(self.norm2(x))))


def multi_head_attention(q: mx.array, k: mx.array, v: mx.array, heads: int, mask: mx.array) -> mx.array:
    """Returns multi-head attention, softmax(q k' / sqrt(head width)) v, as [N, S, H] for q, k, v [N, S, H].

    heads: number of heads. mask: bool, broadcastable to [N, 1, S, S], true for keys to attend to. A query that may
    attend to no key gets exactly 0, as in torch >= 2.5 (older torch: NaN).
    """
    n, s, width = q.shape
    q, k, v = (a.reshape(n, s, heads, width // heads).transpose(0, 2, 1, 3) for a in (q, k, v))
    scores = (q * (width // heads) ** -0.5) @ k.transpose(0, 1, 3, 2)
    scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
    weights = mx.softmax(scores, axis=-1, precise=True) * mask.astype(scores.dtype)
    return (weights @ v).transpose(0, 2, 1, 3).reshape(n, s, width)


def are_real_positions(x: mx.array, lengths: mx.array) -> mx.array:
    """Returns whether each position of x [N, S, D] is not padding, [N, S] bool."""
    return mx.arange(x.shape[1])[None] < lengths[:, None]


def mask_of_real_positions(x: mx.array, lengths: mx.array) -> mx.array:
    """Returns the attention mask [N, 1, S, S] bool that is true where neither query nor key is padding."""
    keep = are_real_positions(x, lengths)
    return (keep[:, :, None] & keep[:, None, :])[:, None]


def residual_rows(x: mx.array, lengths: mx.array, kind: str) -> mx.array:
    """Returns, by `kind`, the first, the last real, or the mean of the real base rows of x [N, S, D], as [N, D]."""
    if kind == "first":
        return x[:, 0]
    return last_real_position(x, lengths) if kind == "last" else mean_of_real_positions(x, lengths)


def mean_of_real_positions(x: mx.array, lengths: mx.array) -> mx.array:
    """Returns the mean [N, D] of x [N, S, D] over the real positions."""
    keep = are_real_positions(x, lengths)[..., None].astype(x.dtype)
    return (x * keep).sum(axis=1) / lengths[:, None].astype(x.dtype)


def last_real_position(x: mx.array, lengths: mx.array) -> mx.array:
    """Returns the last real position [N, D] of x [N, S, D]."""
    return mx.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]


# ---- a single entry

MOST_FLOAT_BYTES = 64 << 20  # on the CPU, a quantized encoder is used as a float32 copy up to this size of the copy
_ENCODERS = (Averaging, Attention, ResLatentAttention, Transformer)
MatrixFunction = Callable[[mx.array], mx.array]  # x [1, n, D] -> x times a matrix


class SingleEncoder:
    """An encoder for one entry at a time: base_ids [1, n] without padding -> its row [1, D].

    A step of generation that installs an entry needs its row in few operations. The encoders above pad all entries to
    one length. This forward pass runs over the real positions only, computes queries, keys and values in one product,
    and is compiled; its rows equal the encoders' within 1e-5 in float32. `transformer` and `attention` average over the
    padding too; what the padding adds depends on the weights alone and is computed once.

    Some results are computed from the weights when the object is made, so make a new one when a weight is replaced.
    matrix: the embedding or head whose rows the encoder reads. pad_id: the base id that pads entries of fewer than
    `merge_size` base ids.
    """

    def __init__(self, encoder: nn.Module, matrix: nn.Module, merge_size: int, pad_id: int) -> None:
        as_float = mx.default_device() == mx.Device(mx.cpu) and _matrix_float_bytes(encoder) <= MOST_FLOAT_BYTES
        self._matrix = matrix
        self._run = mx.compile(_make_single_encoder_function(encoder, matrix, merge_size, pad_id, as_float))

    def __call__(self, base_ids: mx.array) -> mx.array:
        return self._run(matrix_rows(self._matrix, base_ids))


def _make_single_encoder_function(
    encoder: Any, matrix: nn.Module, merge_size: int, pad_id: int, as_float: bool
) -> MatrixFunction:
    """Returns the encoder's function of x [1, n, D], the base rows of one entry -> row [1, D]."""
    if isinstance(encoder, Averaging):
        return lambda x: x.sum(axis=1) / x.shape[1]
    if isinstance(encoder, ResLatentAttention):
        return _make_res_latent_function(encoder, as_float)
    if isinstance(encoder, Transformer):
        positions = encoder.pos_embed.weight if "pos_embed" in encoder else None
        layers = [_make_post_norm_function(layer, as_float) for layer in encoder.layers]
    else:
        assert isinstance(encoder, Attention)
        positions, layers = encoder.pos_embed.weight, [_make_self_attention_function(encoder.attention, as_float)]
    padding = _encode_padding(encoder, matrix, merge_size, pad_id)

    def forward(x: mx.array) -> mx.array:
        n = x.shape[1]
        if positions is not None:
            x = x + positions[:n].astype(x.dtype)
        for layer in layers:
            x = layer(x)
        return mx.concatenate([x, padding[:, n:]], axis=1).mean(axis=1)

    return forward


def _make_res_latent_function(encoder: ResLatentAttention, as_float: bool) -> MatrixFunction:
    enter = _make_linear_function(encoder.proj_in, as_float) if "proj_in" in encoder else _identity
    leave = _make_linear_function(encoder.proj_out, as_float) if "proj_out" in encoder else _identity
    layers = [_make_pre_norm_function(layer, as_float, encoder.causal) for layer in encoder.layers]
    positions, norm, causal, residual = encoder.pos_embed.weight, encoder.norm, encoder.causal, encoder.residual

    def forward(x: mx.array) -> mx.array:
        n, base = x.shape[1], x
        x = enter(x)
        x = x + positions[:n].astype(x.dtype)
        for layer in layers:
            x = layer(x)
        x = norm(x)
        # Dividing last lets MLX do the division and the residual in one operation.
        row = leave(x[:, -1]) if causal else leave(x.sum(axis=1)) / n
        return row if residual is None else row + _residual_row_of_entry(base, residual)

    return forward


def _residual_row_of_entry(x: mx.array, kind: str) -> mx.array:
    """Returns the first, the last or the mean of an entry's base rows x [1, n, D], all of them real."""
    return x.mean(axis=1) if kind == "mean" else x[:, 0 if kind == "first" else -1]


def _make_pre_norm_function(block: Any, as_float: bool, causal: bool) -> MatrixFunction:
    attend = _make_attention_function([block.wq, block.wk, block.wv], block.wo, block.num_heads, as_float, causal)
    up, down = _make_linear_function(block.w1, as_float), _make_linear_function(block.w2, as_float)

    def forward(x: mx.array) -> mx.array:
        x = x + attend(block.norm1(x))
        return x + down(nn.gelu(up(block.norm2(x))))

    return forward


def _make_post_norm_function(block: Any, as_float: bool) -> MatrixFunction:
    attend = _make_self_attention_function(block.attention, as_float)
    up, down = _make_linear_function(block.mlp.fc1, as_float), _make_linear_function(block.mlp.fc2, as_float)

    def forward(x: mx.array) -> mx.array:
        x = block.post_attention_layernorm(x + attend(x))
        return block.post_mlp_layernorm(x + down(nn.gelu(up(x))))

    return forward


def _make_self_attention_function(module: Any, as_float: bool) -> MatrixFunction:
    return _make_attention_function(
        [module.q_proj, module.k_proj, module.v_proj], module.o_proj, module.num_heads, as_float, False
    )


def _make_attention_function(
    inputs: list[Any], output: Any, heads: int, as_float: bool, causal: bool
) -> MatrixFunction:
    """Returns the function that applies multi-head self-attention to x [1, n, D].

    inputs: the projections to queries, keys and values, done by one matrix product. output: the last projection.
    """
    project, leave = (
        _make_linear_function(_join_linear_layers(inputs), as_float),
        _make_linear_function(output, as_float),
    )

    def forward(x: mx.array) -> mx.array:
        n, width = x.shape[1], x.shape[2] // heads
        q, k, v = project(x).reshape(1, n, 3, heads, width).transpose(2, 0, 3, 1, 4)
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=width**-0.5, mask="causal" if causal else None)
        return leave(out.transpose(0, 2, 1, 3).reshape(1, n, -1))

    return forward


def _join_linear_layers(modules: list[Any]) -> dict[str, Any]:
    """Returns the weights of one linear layer that computes the concatenated outputs of several, all of one kind."""
    names = [name for name in ("weight", "scales", "biases") if modules[0].get(name) is not None]
    joined: dict[str, Any] = {name: mx.concatenate([module[name] for module in modules]) for name in names}
    mx.eval(joined)
    return joined | quantization_settings(modules[0])


def _make_linear_function(layer: Any, as_float: bool) -> MatrixFunction:
    """Returns the function of a linear layer without bias; layer: a module, or what `_join_linear_layers` returned."""
    settings = quantization_settings(layer)
    weight = layer["weight"]
    if not settings:
        return lambda x: x @ weight.swapaxes(-1, -2)
    scales, biases = layer["scales"], layer.get("biases")
    if as_float:
        floats = mx.contiguous(mx.dequantize(weight, scales, biases, **settings).swapaxes(-1, -2))
        mx.eval(floats)
        return lambda x: x @ floats
    return lambda x: mx.quantized_matmul(x, weight, scales, biases, transpose=True, **settings)


def _encode_padding(encoder: Any, matrix: nn.Module, merge_size: int, pad_id: int) -> mx.array:
    """Returns the output of the encoder's layers for padding at each position, [1, merge_size, width].

    Padding attends to no position and no position attends to it, so its output depends on no other position.
    """
    x = matrix_rows(matrix, mx.full((1, merge_size), pad_id, mx.int32))
    if "pos_embed" in encoder:
        x = x + encoder.pos_embed.weight.astype(x.dtype)
    nothing = mx.zeros((1, 1, merge_size, merge_size), mx.bool_)
    for layer in encoder.layers if isinstance(encoder, Transformer) else [encoder.attention]:
        x = layer(x, nothing)
    mx.eval(x)
    return x


def can_encode_singly(encoder: nn.Module) -> bool:
    """Returns whether `SingleEncoder` supports all of an encoder's layers (it does not support LoRA's, for example)."""
    return type(encoder) in _ENCODERS and all(_is_known_layer(module) for _, module in encoder.named_modules())


def _is_known_layer(module: Any) -> bool:
    if "weight" not in module and "lora_a" not in module:
        return True
    matrix = type(module) in (nn.Linear, nn.QuantizedLinear) and "bias" not in module
    return matrix or type(module) in (nn.LayerNorm, nn.Embedding)


def _matrix_float_bytes(encoder: nn.Module) -> int:
    """Returns the bytes of an encoder's matrices as float32."""
    layers: list[Any] = [one for _, one in encoder.named_modules() if isinstance(one, nn.Linear | nn.QuantizedLinear)]
    return sum(4 * one["weight"].size * (32 // one.bits if "scales" in one else 1) for one in layers)


def _identity(x: mx.array) -> mx.array:
    return x
