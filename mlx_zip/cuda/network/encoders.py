"""The hyper-encoders in PyTorch, which make one hyper row of each entry (`mlx_zip.models.rows.encoders` in MLX).

An encoder is a function of entries [N, S] int64, padded with the pad id; lengths [N] int64, the base ids of each entry;
and a matrix [R, D], dense or `Packed`: the embedding on the input side, the head on the output side. It returns rows
[N, D] in the matrix's dtype. Small pieces are kernels; products with weights are `Linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, layer_norm

from mlx_zip.config import SIDES, EncoderConfig, ZipConfig
from mlx_zip.cuda.kernels.hyper_rows import attend_in_entries, embed_entries, pool_places
from mlx_zip.cuda.kernels.packed import Matrix, Packed, unpack
from mlx_zip.cuda.network.linear import Linear, fused_product, join_by_rows
from mlx_zip.errors import ConfigError

LAYER_NORM_EPS = 1e-5
Encoder = Callable[[torch.Tensor, torch.Tensor, Matrix], torch.Tensor]


class EncoderWeights:
    """The tensors of one encoder by their names in the checkpoint, without the side's prefix.

    take: called with a tensor's whole name and its shape, like `TensorFolder.take_weight`. side: the rows' side, one of
    `SIDES`; tensor names begin with it. cpu_dtype: dtype of the vectors in products on a CPU
    (`Linear.prepare_for_cpu`); None to use kernels.
    """

    def __init__(self, take: Callable[..., Matrix], side: str, cpu_dtype: torch.dtype | None = None) -> None:
        self.side, self._take, self._cpu_dtype = side, take, cpu_dtype

    def take_linear(self, names: str | Sequence[str], rows: int, columns: int) -> Linear:
        """Returns the product with the matrix NAME.weight [rows, columns]; several matrices are joined by their rows.

        Raises `ModelError` if a matrix is missing or has another shape.
        """
        names = [names] if isinstance(names, str) else names
        whole = join_by_rows([Linear(self._take(f"{self.side}{name}.weight", rows, columns)) for name in names])
        return whole if self._cpu_dtype is None else whole.prepare_for_cpu(self._cpu_dtype)

    def take_dense_tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Returns a tensor, unpacked if it is packed. Raises `ModelError` if it is missing or has another shape."""
        value = self._take(self.side + name, *shape)
        return unpack(value, value.scales.dtype) if isinstance(value, Packed) else value

    def take_norm(self, name: str, width: int) -> LayerNorm:
        """Returns the layer norm `name`. Raises `ModelError` if a tensor is missing or has another shape."""
        return LayerNorm(self.take_dense_tensor(f"{name}.weight", width), self.take_dense_tensor(f"{name}.bias", width))


def make_encoders(
    config: ZipConfig, take: Callable[..., Matrix], sides: Sequence[str] = SIDES, cpu_dtype: torch.dtype | None = None
) -> dict[str, Encoder]:
    """Returns the encoder of each side in `sides`: one encoder for both sides if the encoders are tied.

    take, cpu_dtype: see `EncoderWeights`. Raises what `make_encoder` raises.
    """
    prefixes = {side: config.encoder.prefix_of(side) for side in sides}
    made = {
        prefix: make_encoder(config.encoder, config.merge_size, EncoderWeights(take, prefix, cpu_dtype))
        for prefix in sorted(set(prefixes.values()))
    }
    return {side: made[prefix] for side, prefix in prefixes.items()}


def make_encoder(config: EncoderConfig, merge_size: int, weights: EncoderWeights) -> Encoder:
    """Returns the encoder `config.kind` for entries of up to `merge_size` ids.

    Raises `ConfigError` if the kind is unknown, `ModelError` if a tensor is missing or has another shape.
    """
    kinds = {
        "averaging": _make_averaging_encoder,
        "attention": _make_attention_encoder,
        "transformer": _make_transformer_encoder,
        "res_latent_attn": _make_res_latent_encoder,
    }
    if config.kind not in kinds:
        raise ConfigError(f"encoder_type {config.kind!r} is not one of {', '.join(sorted(kinds))}")
    return kinds[config.kind](config, merge_size, weights)


def _make_averaging_encoder(config: EncoderConfig, merge_size: int, weights: EncoderWeights) -> Encoder:
    return lambda entries, lengths, matrix: pool_places(embed_entries(entries, matrix, None), lengths, "real")


def _make_attention_encoder(config: EncoderConfig, merge_size: int, weights: EncoderWeights) -> Encoder:
    """Returns the encoder of one attention layer; a row is the mean over all S places, padding included."""
    places = weights.take_dense_tensor("pos_embed.weight", merge_size, config.hidden_size)
    attend = _make_attention_of_projections(config, weights, "attention.", "both")

    def encode(entries: torch.Tensor, lengths: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        return pool_places(attend(embed_entries(entries, matrix, places), lengths), lengths, "all")

    return encode


def _make_transformer_encoder(config: EncoderConfig, merge_size: int, weights: EncoderWeights) -> Encoder:
    """Returns the post-norm transformer; a row is the mean over all S places, padding included."""
    width = config.hidden_size
    places = weights.take_dense_tensor("pos_embed.weight", merge_size, width) if config.has_positions else None
    layers = [_make_post_norm_layer(config, weights, f"layers.{i}.") for i in range(config.num_hidden_layers)]

    def encode(entries: torch.Tensor, lengths: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        x = embed_entries(entries, matrix, places)
        for layer in layers:
            x = layer(x, lengths)
        return pool_places(x, lengths, "all")

    return encode


def _make_res_latent_encoder(config: EncoderConfig, merge_size: int, weights: EncoderWeights) -> Encoder:
    """Returns the pre-norm transformer with a base row as residual, pooled over real places (zip2zip++)."""
    residual = {None: None, "first": "first", "last": "last", "mean": "real"}[config.residual_row_kind(weights.side)]
    width, model = config.hidden_size, config.model_size
    places = weights.take_dense_tensor("pos_embed.weight", merge_size, width)
    enter = weights.take_linear("proj_in", width, model) if model != width else None
    leave = weights.take_linear("proj_out", model, width) if model != width else None
    layers = [_make_pre_norm_layer(config, weights, f"layers.{i}.") for i in range(config.num_hidden_layers)]
    norm, kind = weights.take_norm("norm", width), "last" if config.causal else "real"

    def encode(entries: torch.Tensor, lengths: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        x = embed_entries(entries, matrix, None)
        base = x
        x = (x if enter is None else multiply_all_places(x, enter)) + places[: entries.shape[1]]
        for layer in layers:
            x = layer(x, lengths)
        row = pool_places(norm(x), lengths, kind)
        added = None if residual is None else _residual_row(base, lengths, residual)
        if leave is not None:
            return fused_product(row, leave, residual=added)
        return row if added is None else row + added

    return encode


def _residual_row(x: torch.Tensor, lengths: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns the residual [N, D] of base rows x [N, S, D]: the first row of each entry, or x pooled by `kind`."""
    return x[:, 0].contiguous() if kind == "first" else pool_places(x, lengths, kind)


@dataclass(frozen=True)
class LayerNorm:
    """A layer norm; weight and bias [H]."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the norm of x [..., H]."""
        return layer_norm(x, self.weight.shape, self.weight, self.bias, LAYER_NORM_EPS)


ApplyLayer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # x [N, S, H], lengths [N] -> [N, S, H]
ApplyAttention = Callable[..., torch.Tensor]  # x, lengths, residual to add or None -> [N, S, H]


def _make_post_norm_layer(config: EncoderConfig, weights: EncoderWeights, at: str) -> ApplyLayer:
    """Returns the layer x = LN(x + attention(x)), x = LN(x + MLP(x))."""
    width, inner = config.hidden_size, config.intermediate_size
    attend = _make_attention_of_projections(config, weights, f"{at}attention.", "both")
    up, down = weights.take_linear(f"{at}mlp.fc1", inner, width), weights.take_linear(f"{at}mlp.fc2", width, inner)
    first, second = (
        weights.take_norm(f"{at}{name}", width) for name in ("post_attention_layernorm", "post_mlp_layernorm")
    )

    def layer(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = first(attend(x, lengths, x))
        return second(multiply_all_places(gelu(multiply_all_places(x, up)), down, x))

    return layer


def _make_pre_norm_layer(config: EncoderConfig, weights: EncoderWeights, at: str) -> ApplyLayer:
    """Returns the layer x = x + attention(LN(x)), x = x + MLP(LN(x))."""
    width, inner = config.hidden_size, config.intermediate_size
    attend = _make_attention(
        config, weights, [f"{at}w{name}" for name in "qkvo"], "causal" if config.causal else "keys"
    )
    up, down = weights.take_linear(f"{at}w1", inner, width), weights.take_linear(f"{at}w2", width, inner)
    first, second = weights.take_norm(f"{at}norm1", width), weights.take_norm(f"{at}norm2", width)

    def layer(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = attend(first(x), lengths, x)
        return multiply_all_places(gelu(multiply_all_places(second(x), up)), down, x)

    return layer


def _make_attention_of_projections(
    config: EncoderConfig, weights: EncoderWeights, at: str, mask: str
) -> ApplyAttention:
    return _make_attention(config, weights, [f"{at}{name}_proj" for name in "qkvo"], mask)


def _make_attention(config: EncoderConfig, weights: EncoderWeights, names: list[str], mask: str) -> ApplyAttention:
    width = config.hidden_size
    enter, leave = weights.take_linear(names[:3], width, width), weights.take_linear(names[3], width, width)
    heads = config.num_heads

    def attend(x: torch.Tensor, lengths: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return multiply_all_places(
            attend_in_entries(multiply_all_places(x, enter), lengths, heads, mask), leave, residual
        )

    return attend


def multiply_all_places(x: torch.Tensor, linear: Linear, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Returns x W' [N, S, R] for x [N, S, D], plus the residual if given."""
    added = None if residual is None else residual.reshape(-1, residual.shape[-1])
    return fused_product(x.reshape(-1, x.shape[-1]), linear, residual=added).view(*x.shape[:-1], -1)
