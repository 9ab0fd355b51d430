"""A model over patches (local encoder, causal latent transformer, local autoregressive decoder) and its baseline.

Source: arXiv 2510.15517 §2.2, table 1. Where the paper leaves a choice open, this is done:

- Blocks: mlx-lm's Llama block (RMSNorm first, rotary positions, three-matrix feed-forward part, no biases). The
  paper's parameter counts need three matrices. Positions of the local models count within the patch, from 0.
- Encoder: attention in both directions over the patch's symbols, padding masked; the patch is the state at its last
  symbol, which is the mark unless there is none; one matrix takes it to the latent width. No cross-attention, and no
  hash embeddings, as in the paper.
- What a state depends on (equations 2 and 3 differ): the latent model reads a learned start vector and then the
  patches, so the state that decodes patch t depends on the patches before t only.
- Decoder: its first input is the state, through one matrix, in place of a start symbol; the symbols follow.
- Encoder, decoder and the decoder's head (tied) share one embedding of symbols.
- S symbols without a mark are a valid patch, and the mark's likelihood counts at every place, the last one included. A
  patch of the mark alone has no bytes; it ends a document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache
from mlx_lm.models.llama import ModelArgs, TransformerBlock

from mlx_zip.config import MAX_LAYERS
from mlx_zip.errors import ConfigError
from mlx_zip.vocab.hbpe import FIRST_MERGE, MARK, MAX_MERGES, MAX_PATCH
from mlx_zip.vocab.hbpe_measures import Tower

NORM_EPS, ROPE_THETA = 1e-5, 10_000.0
INIT = 0.02  # standard deviation of the start vector


@dataclass(frozen=True)
class PatchConfig:
    """Sizes of a `PatchModel`; checked when built. Raises `ConfigError` naming the field.

    symbols: 257 plus the number of merges V'. patch_size: S. latent: sizes of the large transformer. local: sizes of
    the encoder, and of the decoder.
    """

    symbols: int
    patch_size: int
    latent: Tower
    local: Tower

    def __post_init__(self) -> None:
        _check("symbols", self.symbols, FIRST_MERGE, FIRST_MERGE + MAX_MERGES)
        _check("patch_size", self.patch_size, 2, MAX_PATCH)
        _check_tower("latent", self.latent)
        _check_tower("local", self.local)

    @classmethod
    def from_dict(cls, values: Any) -> PatchConfig:
        """The sizes that `to_dict` returned. Raises `ConfigError` for a key that is unknown or missing."""
        values = _object("config", values, cls)
        towers = {name: Tower(**_object(name, values[name], Tower)) for name in ("latent", "local")}
        return cls(values["symbols"], values["patch_size"], **towers)

    def to_dict(self) -> dict[str, Any]:
        """All sizes as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class PlainConfig:
    """Sizes of a `PlainModel`: vocab_size ids. Raises `ConfigError` naming the field."""

    vocab_size: int
    tower: Tower

    def __post_init__(self) -> None:
        _check("vocab_size", self.vocab_size, 1, (1 << 31) - 1)
        _check_tower("tower", self.tower)

    @classmethod
    def from_dict(cls, values: Any) -> PlainConfig:
        """The sizes that `to_dict` returned. Raises `ConfigError` for a key that is unknown or missing."""
        values = _object("config", values, cls)
        return cls(values["vocab_size"], Tower(**_object("tower", values["tower"], Tower)))

    def to_dict(self) -> dict[str, Any]:
        """All sizes as plain JSON values."""
        return asdict(self)


class Layers(nn.Module):
    """The blocks of a tower and the final norm: x [N, L, D] -> [N, L, D]."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        args = ModelArgs(
            model_type="llama",
            hidden_size=tower.width,
            num_hidden_layers=tower.layers,
            intermediate_size=tower.ffn,
            num_attention_heads=tower.heads,
            rms_norm_eps=NORM_EPS,
            vocab_size=1,
            rope_theta=ROPE_THETA,
        )
        self.layers = [TransformerBlock(args) for _ in range(tower.layers)]
        self.norm = nn.RMSNorm(tower.width, eps=NORM_EPS)

    def __call__(self, x: mx.array, mask: Any, cache: list[KVCache] | None = None) -> mx.array:
        """Runs the blocks. mask: "causal" or bool [N, 1, 1, L], true for keys to attend to. cache: one per layer."""
        if cache is not None and x.shape[1] == 1:
            mask = None
        for i, layer in enumerate(self.layers):
            x = layer(x, mask, None if cache is None else cache[i])
        return self.norm(x)

    def make_cache(self) -> list[KVCache]:
        """Empty KV caches, one per layer."""
        return [KVCache() for _ in self.layers]


class PatchModel(nn.Module):
    """Next-patch prediction. Shapes: B texts, T patches, S symbols; N patches anywhere; D latent, d local width."""

    def __init__(self, config: PatchConfig) -> None:
        super().__init__()
        self.config = config
        latent, local = config.latent.width, config.local.width
        self.symbols = nn.Embedding(config.symbols, local)
        self.encoder, self.decoder, self.latent = Layers(config.local), Layers(config.local), Layers(config.latent)
        self.up, self.down = nn.Linear(local, latent, bias=False), nn.Linear(latent, local, bias=False)
        self.start = INIT * mx.random.normal((latent,))

    def encode(self, patches: mx.array) -> mx.array:
        """Encodes each patch alone, e = g(x) (equation 1): patches [N, S] of integers -> [N, D]."""
        last = patch_lengths(patches) - 1
        seen = mx.arange(patches.shape[1]) <= last[:, None]
        states = self.encoder(self.symbols(patches), seen[:, None, None, :])
        return self.up(mx.take_along_axis(states, last[:, None, None], axis=1)[:, 0])

    def contexts(self, e: mx.array) -> mx.array:
        """States h = f(e) (equation 2): [B, T, D] -> [B, T, D]; h of patch t depends on the patches before t only."""
        return self.latent(mx.concatenate([self.begin(e.shape[0]), e[:, :-1]], axis=1), "causal")

    def begin(self, batch: int) -> mx.array:
        """The learned start vector [B, 1, D], which the latent model reads before the first patch."""
        return mx.broadcast_to(self.start, (batch, 1, self.start.size))

    def states(self, h: mx.array, symbols: mx.array) -> mx.array:
        """The decoder's states [N, K + 1, d] for h [N, D], symbols [N, K]; state s depends on symbols before s only."""
        x = mx.concatenate([self.down(h)[:, None], self.symbols(symbols)], axis=1)
        return self.decoder(x, "causal")

    def head(self, states: mx.array) -> mx.array:
        """Logits [..., symbols] of states [..., d]."""
        return self.symbols.as_linear(states)

    def __call__(self, patches: mx.array) -> mx.array:
        """Logits [B, T, S, symbols] of patches [B, T, S] (equation 3).

        Those of symbol s of patch t depend on the symbols before s in that patch, and on the patches before t.
        """
        n, length, size = patches.shape
        flat = patches.reshape(-1, size)
        h = self.contexts(self.encode(flat).reshape(n, length, -1))
        states = self.states(h.reshape(n * length, -1), flat[:, :-1])
        return self.head(states).reshape(n, length, size, -1)


class PlainModel(nn.Module):
    """The baseline: the latent transformer over ids of plain BPE or bytes, with an embedding tied to the head."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        self.ids = nn.Embedding(config.vocab_size, config.tower.width)
        self.latent = Layers(config.tower)
        self.start = INIT * mx.random.normal((config.tower.width,))

    def states(self, ids: mx.array) -> mx.array:
        """States [B, T, D] of ids [B, T]; state t depends on the ids before t, state 0 on a learned start vector."""
        start = mx.broadcast_to(self.start, (ids.shape[0], 1, self.start.size))
        return self.latent(mx.concatenate([start, self.ids(ids[:, :-1])], axis=1), "causal")

    def head(self, states: mx.array) -> mx.array:
        """Logits [..., vocab_size] of states [..., D]."""
        return self.ids.as_linear(states)

    def __call__(self, ids: mx.array) -> mx.array:
        """Logits [B, T, vocab_size] of ids [B, T]."""
        return self.head(self.states(ids))


def patch_lengths(patches: mx.array) -> mx.array:
    """Lengths int32 [...] of patches [..., S]: symbols up to the first mark, mark included, or S without a mark."""
    marked = patches == MARK
    return mx.where(marked.any(axis=-1), marked.argmax(axis=-1) + 1, patches.shape[-1]).astype(mx.int32)


def parameters_of(model: nn.Module) -> int:
    """How many numbers a model's parameters hold."""
    from mlx.utils import tree_flatten

    named: Any = tree_flatten(model.parameters())
    return sum(value.size for _, value in named)


def _check(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def _check_tower(name: str, tower: Any) -> None:
    if not isinstance(tower, Tower):
        raise ConfigError(f"{name} must be a Tower, got {tower!r}")
    for size in fields(tower):
        _check(f"{name}: {size.name}", getattr(tower, size.name), 1, MAX_LAYERS if size.name == "layers" else 1 << 20)
    if tower.width % (2 * tower.heads):
        raise ConfigError(f"{name}: width {tower.width} must be {tower.heads} heads of an even width")


def _object(name: str, values: Any, kind: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} must be an object, got {type(values).__name__}")
    known = {field.name for field in fields(kind)}
    if wrong := known.symmetric_difference(values):
        raise ConfigError(f"{name}: unknown or missing: {', '.join(sorted(map(str, wrong)))}")
    return values
