"""The supported decoders: mlx-lm's blocks with rotary embeddings, norms, and Gemma's MLP and attention that are ours.

Rotary positions, windows, soft caps and embedding scale are read from the config here, because mlx-lm 0.32 ignores some
of them: Phi-3's short factors and windows, Mistral's and Gemma 2's windows, `rope_parameters` as transformers 5 writes
them. An option that is not supported raises `ConfigError`; no option is ignored.

mlx-lm's blocks call `self.rope(x, offset=cache.offset)`. `Model` gives them a view of the cache whose `offset` is a
`Positions` (`PositionedCache`), so the same blocks run with a position per token and with either set of LongRoPE
factors. `Rope` has every scaling rule of the supported models and keeps nothing between calls.

MLX's CPU backend has no kernels for RoPE and RMSNorm: it runs 15 operations for RoPE and 8 for RMSNorm, and starting an
operation costs more than its arithmetic. So on the CPU, a step of one id in float32 uses compiled functions of this
file. A rotation as one product with a matrix was even faster for narrow heads, but its cost grows with the square of
the head width, and it spreads values that are not finite. On a GPU, MLX's kernels are used.

Gemma 1's MLP is here because mlx-lm's differs from transformers, and Gemma 2's attention because mlx-lm's takes neither
a padded batch (its grouped KV heads do not fit a mask of four dimensions) nor a quantized KV cache. Gemma's factor on
embeddings is applied to hyper rows too. (On the newer Gemmas, zip2zip 0.2.0 replaces the embedding layer by one without
the factor, but no zip2zip checkpoint of a Gemma has been published.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlx_zip.models.decoder_options import (
    FAMILIES,
    count_rotated_columns,
    has_tied_head,
    head_width,
    layer_rope_parameters,
    layer_types,
    longrope_factors,
    norm_eps,
    pretraining_context,
    raise_if_options_unsupported,
    rope_errors_as_config_errors,
    sliding_window,
    yarn_settings,
)


class DecoderBody(nn.Module):
    """The decoder's weights under their checkpoint names: `embed_tokens`, `layers`, `norm`."""

    def __init__(self, config: Mapping[str, Any], layers: list[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = layers
        self.norm = norm


@dataclass(frozen=True)
class DecoderTraits:
    """The properties of a decoder beyond its blocks.

    windows: per layer, the sliding window in ids, or None for full attention. tied: whether the head uses the
    embedding's weights. embed_scale: factor on embeddings. soft_cap: c in c * tanh(logits / c), None for no cap.
    long_context: a call whose last id has this position or a later one uses LongRoPE's long factors; None if the model
    has no LongRoPE. mask_as_array: whether the blocks need the mask as an array, not as the word "causal".
    """

    windows: tuple[int | None, ...]
    tied: bool
    embed_scale: float = 1.0
    soft_cap: float | None = None
    long_context: int | None = None
    mask_as_array: bool = False


def raise_if_decoder_unsupported(config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` naming the model type, option or rope type that is not supported."""
    raise_if_options_unsupported(config)
    for layer_type in set(layer_types(config)):
        make_rope(layer_rope_parameters(config, layer_type), head_width(config), config)


def make_decoder(config: Mapping[str, Any]) -> tuple[DecoderBody, DecoderTraits]:
    """Returns a decoder with random weights, and its traits. Raises `ConfigError` if unsupported."""
    raise_if_options_unsupported(config)
    types = layer_types(config)
    parameters = {name: layer_rope_parameters(config, name) for name in set(types)}
    ropes = {name: make_rope(found, head_width(config), config) for name, found in parameters.items()}
    kind = config["model_type"]
    module = import_module(f"mlx_lm.models.{FAMILIES[kind].module}")
    defaults = _mlx_lm_defaults(config)
    given = {key: value for key, value in config.items() if value is not None or key not in defaults}
    args = module.ModelArgs.from_dict({**defaults, **given, **_NO_ROPE_KEYS})
    layers = [_make_block(module, kind, args, index) for index in range(config["num_hidden_layers"])]
    for layer, name in zip(layers, types, strict=True):
        if kind == "gemma":
            layer.mlp = TanhGeluMLP(config["hidden_size"], config["intermediate_size"])
        if kind == "gemma2":
            layer.self_attn = SoftCapAttention(args)
        layer.self_attn.rope = ropes[name]
        use_quick_norms(layer)
    norm = getattr(module, "RMSNorm", RMSNorm)(config["hidden_size"], eps=args.rms_norm_eps)
    long = [pretraining_context(p, config) for p in parameters.values() if p["rope_type"] == "longrope"]
    window = sliding_window(config)
    traits = DecoderTraits(
        windows=tuple(window if name == "sliding_attention" else None for name in types),
        tied=has_tied_head(config),
        embed_scale=config["hidden_size"] ** 0.5 if kind.startswith("gemma") else 1.0,
        soft_cap=args.final_logit_softcapping if kind == "gemma2" else None,
        long_context=min(long) if long else None,
        mask_as_array=kind == "gemma2",
    )
    return DecoderBody(config, layers, norm), traits


# Hides the rope settings from mlx-lm's constructors, which would misread them; `make_decoder` sets its own `Rope`.
_NO_ROPE_KEYS = {"rope_scaling": None, "rope_theta": 10_000.0, "rope_parameters": None, "layer_types": None}


def _make_block(module: Any, kind: str, args: Any, index: int) -> Any:
    """Returns one decoder block of mlx-lm's module; only Gemma 3's constructor needs the layer's index."""
    if kind == "gemma3_text":
        return module.TransformerBlock(args, index)
    return module.TransformerBlock(args)


def _mlx_lm_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for the keys that mlx-lm needs and transformers may leave out of config.json or write as null."""
    heads = config["num_attention_heads"]
    gemma = config["model_type"].startswith("gemma")
    return {
        "num_key_value_heads": heads,
        "max_position_embeddings": 32768,
        "rms_norm_eps": norm_eps(config),
        "head_dim": head_width(config),
        "tie_word_embeddings": FAMILIES[config["model_type"]].tied,
        **({"query_pre_attn_scalar": 256} if gemma else {}),
    }


# ---- positions and rotary embeddings


@dataclass(frozen=True)
class Positions:
    """The positions of the ids of one call.

    start: position of the first id, an int or an array [B]; each next id has the next position. index [B, L]: the
    position of each id, used instead of `start` if not None. long: whether to use LongRoPE's long factors. shared:
    cosines and sines that the layers of this call share, by the `id()` of their `Rope`; filled during the call. All
    arrays that a call rotates must have one dtype and the same number of ids.
    """

    start: int | mx.array = 0
    index: mx.array | None = None
    long: bool = False
    shared: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def first(self) -> int | mx.array:
        """The position of each sequence's first id: an int or an array [B]."""
        return self.start if self.index is None else self.index[:, 0]


class Rope(nn.Module):
    """Rotates the first `dims` dimensions of each head.

    short, long [dims / 2]: wavelengths divided by 2 pi; `long` is for LongRoPE's long factors, None if equal to
    `short`. magnitude: factor on the rotated dimensions.
    """

    def __init__(self, dims: int, short: mx.array, long: mx.array | None = None, magnitude: float = 1.0) -> None:
        super().__init__()
        self.dims, self.magnitude = dims, magnitude
        self._short, self._long = short, short if long is None else long

    def __call__(self, x: mx.array, offset: Positions) -> mx.array:
        """Returns x [B, H, L, D] rotated to the positions `offset`, in the same shape."""
        shared = offset.shared.get(id(self))
        # Not in training: shared arrays would carry the gradient trace of one layer into another.
        if shared is None and is_step_on_cpu(x) and not self.training:
            shared = offset.shared[id(self)] = self._cosines_and_sines_of_step(offset)
        if shared is not None:
            return _rotate_one_position(x, *shared)
        batch, heads, length, width = x.shape
        if self.magnitude != 1.0:
            x = self._scale_rotated_columns(x)
        freqs = self._long if offset.long else self._short
        if offset.index is None or length == 1:
            return self._rotate_by_kernel(x, offset.first, freqs)
        x = x.transpose(0, 2, 1, 3).reshape(batch * length, heads, 1, width)
        x = self._rotate_by_kernel(x, offset.index.reshape(-1), freqs)
        return x.reshape(batch, length, heads, width).transpose(0, 2, 1, 3)

    def _cosines_and_sines_of_step(self, offset: Positions) -> tuple[mx.array, mx.array]:
        """Returns the cosines and sines [B or 1, 1, 1, dims / 2] of one position per sequence."""
        position = mx.array(offset.first, mx.float32).reshape(-1, 1, 1, 1)
        return _cosines_and_sines(position, self._long if offset.long else self._short, self.magnitude)

    def _rotate_by_kernel(self, x: mx.array, start: int | mx.array, freqs: mx.array) -> mx.array:
        """Returns x [B, H, L, D] rotated by MLX's kernel; start: position of the first id, an int or [B]."""
        return mx.fast.rope(x, self.dims, traditional=False, base=None, scale=1.0, offset=start, freqs=freqs)

    def _scale_rotated_columns(self, x: mx.array) -> mx.array:
        if self.dims == x.shape[-1]:
            return x * self.magnitude
        return mx.concatenate([x[..., : self.dims] * self.magnitude, x[..., self.dims :]], axis=-1)


@mx.compile
def _cosines_and_sines(position: mx.array, freqs: mx.array, magnitude: float) -> tuple[mx.array, mx.array]:
    """Returns cosines and sines of positions [B or 1, 1, 1, 1], times `magnitude`. freqs [dims / 2]: wavelengths."""
    angles = position * (1 / freqs)
    return mx.cos(angles) * magnitude, mx.sin(angles) * magnitude


@mx.compile
def _rotate_one_position(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Returns x [B, H, 1, D] with its first `dims` dimensions rotated. cos, sin: [B or 1, 1, 1, dims / 2]."""
    half = cos.shape[-1]
    one, other, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return mx.concatenate([one * cos - other * sin, other * cos + one * sin, rest], axis=-1)


def make_rope(parameters: Mapping[str, Any], head_dim: int, config: Mapping[str, Any]) -> Rope:
    """Builds a layer's `Rope` from `parameters`, as `rope_parameters` returns them.

    head_dim: width of an attention head. config: config.json. Raises `ConfigError` if a parameter is wrong. Source of
    the formulas: transformers 5 `modeling_rope_utils`; LongRoPE arXiv 2402.13753; YaRN arXiv 2309.00071.
    """
    kind = parameters["rope_type"]
    with rope_errors_as_config_errors(kind):
        dims = count_rotated_columns(parameters, head_dim)
        waves = parameters["rope_theta"] ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)  # divided by 2 pi
        if kind == "linear":
            return Rope(dims, waves * parameters["factor"])
        if kind == "llama3":
            return Rope(dims, _llama3_wavelengths(waves, parameters, config))
        if kind == "yarn":
            return _yarn_rope(dims, waves, parameters, config)
        return _longrope_rope(dims, waves, parameters, config) if kind == "longrope" else Rope(dims, waves)


def _llama3_wavelengths(waves: mx.array, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> mx.array:
    """Multiplies the long wavelengths [dims / 2] by `factor`, keeps short ones, and blends those between."""
    factor, context = parameters["factor"], pretraining_context(parameters, config)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    length = 2 * math.pi * waves
    smooth = (context / length - low) / (high - low)
    blended = waves / ((1 - smooth) / factor + smooth)
    scaled = mx.where(length > context / low, waves * factor, waves)
    return mx.where((length >= context / high) & (length <= context / low), blended, scaled)


def _yarn_rope(dims: int, waves: mx.array, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> Rope:
    """Returns YaRN's `Rope`: stretches slow dimensions by `factor`, keeps fast ones, with a linear ramp between."""
    factor, low, high, magnitude = yarn_settings(parameters, config, dims)
    ramp = mx.clip((mx.arange(dims // 2, dtype=mx.float32) - low) / max(high - low, 0.001), 0, 1)
    inverse = (1 / waves) * (1 - ramp) + (1 / (factor * waves)) * ramp
    return Rope(dims, 1 / inverse, magnitude=magnitude)


def _longrope_rope(dims: int, waves: mx.array, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> Rope:
    """Returns LongRoPE's `Rope`, which has two sets of factors, short and long, with one factor per wavelength."""
    short, long, magnitude = longrope_factors(parameters, config, dims)
    return Rope(dims, waves * mx.array([*short], mx.float32), waves * mx.array([*long], mx.float32), magnitude)


# ---- RMSNorm

_CPU = mx.Device(mx.cpu)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, float32 inside."""

    def __call__(self, x: mx.array) -> mx.array:
        """Returns x [..., L, D] normalized, in the same shape and dtype."""
        return _rms_norm(x, self.weight, self.eps) if is_step_on_cpu(x) else super().__call__(x)


@mx.compile
def _rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return x * mx.rsqrt(mx.square(x).mean(axis=-1, keepdims=True) + eps) * weight


def is_step_on_cpu(x: mx.array) -> bool:
    """Returns whether x [..., L, D] belongs to a step of generation (L is 1) on the CPU in float32.

    Compiled, a norm is then 3 operations and a rotation 4, and the layers share cosines and sines.
    """
    return x.shape[-2:-1] == (1,) and x.dtype == mx.float32 and mx.default_device() == _CPU


def use_quick_norms(block: nn.Module) -> None:
    """Replaces every `nn.RMSNorm` inside a block by this file's `RMSNorm`; weights and names stay."""
    quick = []
    for name, module in block.named_modules():
        if type(module) is nn.RMSNorm:
            made = RMSNorm(module.weight.size, module.eps)
            made.weight = module.weight
            quick.append((name, made))
    block.update_modules(tree_unflatten(quick))


# ---- Gemma


class TanhGeluMLP(nn.Module):
    """Gemma 1's MLP with the tanh form of GELU, which transformers always uses; mlx-lm uses the exact form."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(_gelu_times(self.gate_proj(x), self.up_proj(x)))


@partial(mx.compile, shapeless=True)
def _gelu_times(gate: mx.array, up: mx.array) -> mx.array:
    return nn.gelu_approx(gate) * up


class SoftCapAttention(nn.Module):
    """Gemma 2's attention: scores become c * tanh(scores / c) before the mask.

    Unlike mlx-lm's class, this class also works with padded batches and quantized KV caches.
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
