"""The hyper-encoders, which make one hyper row of each entry.

Each encoder is a function of x [N, S, D], the rows of the embedding (input side) or head matrix (output side) for
the S base ids of N entries, and of lengths [N], how many of the S positions are real. The other positions are padding
and hold the pad id's row. Attribute names are the checkpoint's tensor names. Source: arXiv 2506.01084 §2.3 and
appendix A; zip2zip 0.2.0.

As upstream, the kinds treat padding differently: `transformer` and `attention` average over all S positions, padding
included (attention contributes exactly 0 there); `res_latent_attn` pools over real positions only.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_zip.config import ENCODER_FIELDS, SIDES, EncoderConfig
from mlx_zip.errors import ConfigError

LAYER_NORM_EPS = 1e-5


def make_encoder(config: EncoderConfig, merge_size: int, side: str = SIDES[0]) -> nn.Module:
    """Builds the encoder `config.kind` for entries of up to `merge_size` base ids. Raises `ConfigError`.

    side: one of `SIDES`, the rows that it makes; it matters with `residual_by_side` only.
    """
    kinds = {
        "averaging": Averaging,
        "attention": Attention,
        "transformer": Transformer,
    }
    if config.kind not in ENCODER_FIELDS:
        raise ConfigError(f"encoder_type {config.kind!r} is not one of {', '.join(sorted(ENCODER_FIELDS))}")
    if config.kind == "res_latent_attn":
        return ResLatentAttention(config, merge_size, config.residual_of(side))
    return kinds[config.kind](config, merge_size)


class Averaging(nn.Module):
    """The mean of an entry's base rows; no parameters (the paper's baseline, appendix A)."""

    def __init__(self, config: EncoderConfig, merge_size: int) -> None:
        super().__init__()

    def __call__(self, x: mx.array, lengths: mx.array) -> mx.array:
        """Returns hyper rows [N, D] of entries x [N, S, D] with lengths [N]."""
        return mean_of_real(x, lengths)


class Attention(nn.Module):
    """One attention layer over base rows plus learned positions, then the mean over all S (the paper's first)."""

    def __init__(self, config: EncoderConfig, merge_size: int) -> None:
        super().__init__()
        self.pos_embed = nn.Embedding(merge_size, config.hidden_size)
        self.attention = SelfAttention(config)

    def __call__(self, x: mx.array, lengths: mx.array) -> mx.array:
        """Returns hyper rows [N, D] of entries x [N, S, D] with lengths [N]."""
        x = x + self.pos_embed.weight[: x.shape[1]].astype(x.dtype)
        return self.attention(x, both_real(x, lengths)).mean(axis=1)


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
        mask = both_real(x, lengths)
        for layer in self.layers:
            x = layer(x, mask)
        return x.mean(axis=1)


class ResLatentAttention(nn.Module):
    """A pre-norm transformer of a width of its own, plus a base row as residual (zip2zip++: the entry's first).

    Pools over real positions: their mean, or the last of them if the attention is causal. residual: "first", "last" or
    "mean" of the entry's base rows, None for none.
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
        residual = None if self.residual is None else residual_row(x, lengths, self.residual)
        if "proj_in" in self:
            x = self.proj_in(x)
        x = x + self.pos_embed.weight[: x.shape[1]].astype(x.dtype)
        mask = self._mask(x, lengths)
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        pooled = last_real(x, lengths) if self.causal else mean_of_real(x, lengths)
        if "proj_out" in self:
            pooled = self.proj_out(pooled)
        return pooled if residual is None else pooled + residual

    def _mask(self, x: mx.array, lengths: mx.array) -> mx.array:
        """Returns the attention mask [N, 1, 1 or S, S], true for keys that are real (and not later, if causal).

        Queries may be padding, because their results are not used.
        """
        keys = real(x, lengths)[:, None, None, :]
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
    """Multi-head self-attention without biases: x [N, S, H], mask as in `attend` -> [N, S, H]."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.num_heads, width = config.num_heads, config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        return self.o_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), self.num_heads, mask))


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
        x = x + self.wo(attend(self.wq(y), self.wk(y), self.wv(y), self.num_heads, mask))
        return x + self.w2(nn.gelu(self.w1(self.norm2(x))))


def attend(q: mx.array, k: mx.array, v: mx.array, heads: int, mask: mx.array) -> mx.array:
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


def real(x: mx.array, lengths: mx.array) -> mx.array:
    """Returns whether each position of x [N, S, D] is not padding, [N, S] bool."""
    return mx.arange(x.shape[1])[None] < lengths[:, None]


def both_real(x: mx.array, lengths: mx.array) -> mx.array:
    """Returns the attention mask [N, 1, S, S] bool that is true where neither query nor key is padding."""
    keep = real(x, lengths)
    return (keep[:, :, None] & keep[:, None, :])[:, None]


def residual_row(x: mx.array, lengths: mx.array, kind: str) -> mx.array:
    """Returns the first, the last real, or the mean of the real rows [N, D] of x [N, S, D]; kind names which."""
    if kind == "first":
        return x[:, 0]
    return last_real(x, lengths) if kind == "last" else mean_of_real(x, lengths)


def mean_of_real(x: mx.array, lengths: mx.array) -> mx.array:
    """Returns the mean [N, D] of x [N, S, D] over the real positions."""
    keep = real(x, lengths)[..., None].astype(x.dtype)
    return (x * keep).sum(axis=1) / lengths[:, None].astype(x.dtype)


def last_real(x: mx.array, lengths: mx.array) -> mx.array:
    """Returns the last real position [N, D] of x [N, S, D]."""
    return mx.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
