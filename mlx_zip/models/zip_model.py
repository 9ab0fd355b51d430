"""The model: a decoder whose embedding and head also read the hyper rows of the request's `ZipState`.

One call: the ids are read on the host and learnt by the codebooks; rows that are missing come from the row store or
are encoded, in one batch per side; then embedding, decoder body and joint head run as one lazy graph. Source: arXiv
2506.01084 §2, zip2zip 0.2.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_zip.config import ZipConfig
from mlx_zip.errors import ConfigError, ModelError
from mlx_zip.hyper import RowStore, RowTable, encode_entries, make_encoder
from mlx_zip.layout import Layout
from mlx_zip.models.architectures import make_decoder
from mlx_zip.models.model_rows import ModelRows
from mlx_zip.models.rope import Positions
from mlx_zip.state import Advance, HostIds, Left, ZipState, find_state, split_start, with_starts

RECORD_KEYS = ("base_model_type", "source", "fingerprint")  # beside ZipConfig's keys in config.json's section


@dataclass(frozen=True)
class ModelArgs:
    """config.json of a converted model: the base model's keys plus a `zip2zip` section."""

    config: dict[str, Any]

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelArgs:
        """Named as mlx-lm's loader expects."""
        return cls(config)

    @property
    def zip_config(self) -> ZipConfig:
        """The section, checked. Raises `ConfigError`."""
        section = self.config.get("zip2zip")
        if not isinstance(section, dict):
            raise ConfigError("config.json has no zip2zip section; convert the checkpoint with `mlx_zip convert`")
        return ZipConfig.from_dict({key: v for key, v in section.items() if key not in RECORD_KEYS})

    @property
    def decoder_config(self) -> dict[str, Any]:
        """The base model's own config."""
        return {**self.config, "model_type": self.config["zip2zip"].get("base_model_type")}


class Body(nn.Module):
    """The decoder's weights under their checkpoint names: `embed_tokens`, `layers`, `norm`."""

    def __init__(self, config: dict[str, Any], layers: list[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = layers
        self.norm = norm


class PositionedCache:
    """One layer's KV cache as the layer sees it during one call: the same cache, with our positions as its offset."""

    def __init__(self, cache: Any, offset: Positions) -> None:
        self.cache, self.offset = cache, offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self.cache.update_and_fetch(keys, values)

    def __getattr__(self, name: str) -> Any:  # bits and group_size, when the cache is a quantized one
        return getattr(self.cache, name)


class Model(nn.Module):
    """A causal model whose vocabulary grows: `model(ids, cache=cache) -> logits`.

    Built by mlx-lm's loader from `ModelArgs`. Holds weights only; what changes lives in the cache that `make_cache`
    makes. row_store: None, or the store in which rows outlive their request, which changes no result; `mlx_zip.load`
    gives one. Not used in training mode. Raises `ConfigError` when the config is not supported or contradicts itself.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.config = args.zip_config
        config = args.decoder_config
        layers, norm, self.traits = make_decoder(config)
        self.layout = Layout(self.config.vocab_size, self.config.codebook_size, config["vocab_size"])
        if self.config.encoder.model_size != config["hidden_size"]:
            raise ConfigError(
                f"the encoder makes rows of width {self.config.encoder.model_size}, "
                f"the model's are {config['hidden_size']}"
            )
        self.model_type = args.config.get("model_type")
        self.model = Body(config, layers, norm)
        if not self.traits.tied:
            self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        self.input_encoder = make_encoder(self.config.encoder, self.config.merge_size)
        self.row_store: RowStore | None = None
        self._rows = ModelRows(self, args.config["zip2zip"].get("fingerprint"))
        if not self.config.encoder.tie_encoders:
            self.output_encoder = make_encoder(self.config.encoder, self.config.merge_size)

    def __call__(self, ids: mx.array, cache: Sequence[Any] | None = None, *, causal: bool = False) -> mx.array:
        """Ids [B, L] integers -> logits [B, L, W] in the model's dtype, W = `layout.width`.

        The column is the id. Columns of entries that are not installed and of the base tail are -inf; an entry
        created by an id of this call can be chosen right after it. Within one call the entries of the whole chunk
        are open at every position, as upstream; `causal=True` opens each only from the position that created it.
        Raises `CodecError` for an illegal id and `ModelError` for a cache that does not fit, before anything
        changes. Without a cache the call stands alone.
        """
        _check_shape(ids)
        cache = self.make_cache(left_padding=[0] * len(ids)) if cache is None else cache
        kv, state = self.check_cache(cache)
        host_ids, before = _host_ids(ids, state), state.offset
        self._rows.settle()
        advance = state.advance(host_ids)
        with ExitStack() as on_error:  # an interrupt, say: codebook and KV caches must not part
            on_error.callback(self.forget, cache, before)
            logits = self._head(self._hidden(kv, state, host_ids), state, advance, causal)
            on_error.pop_all()
        return logits

    # ---- cache

    def make_cache(self, left_padding: Sequence[int] | None = None, start: Sequence[Any] | None = None) -> list[Any]:
        """KV caches and the `ZipState` of a new request.

        left_padding [B]: per sequence, how many ids at the start are padding, for batches; None makes a cache for
        one sequence. start: entries (sequences of base ids) that exist before the first id and take the first slots,
        in place of the model's own; or a list of B such codebooks, None among them for the model's own. An empty one
        starts from nothing. Every layer gets a full KV cache, also under a sliding window, so that every cache can be
        trimmed and quantized. Raises `ModelError` for an empty or negative left_padding and for starts that are not
        one per sequence, `CodecError` naming the start entry that does not fit the codec.
        """
        from mlx_lm.models.cache import BatchKVCache, KVCache  # importing it takes a second, so only when needed

        padding = [0] if left_padding is None else [int(n) for n in left_padding]
        if not padding or min(padding) < 0:
            raise ModelError(f"left_padding must give a count for each sequence, 0 or more, got {padding}")
        state = ZipState(with_starts(self.config.codec_params, split_start(start, len(padding))), padding)
        if padding == [0]:
            return [*(KVCache() for _ in self.layers), state]
        return [*(BatchKVCache(padding) for _ in self.layers), state]

    def check_cache(self, cache: Sequence[Any]) -> tuple[Sequence[Any], ZipState]:
        """The KV caches and the state of a cache; `ModelError` when it is not one of this model's, or uneven.

        Its starting codebooks may be any: they belong to the request.
        """
        state = find_state(cache)
        if state is None or state is not cache[-1] or len(cache) != len(self.layers) + 1:
            raise ModelError("the cache is not one that this model's make_cache() made")
        if not state.fits(self.config.codec_params):
            raise ModelError("the cache was made with other codec parameters than this model's")
        kv = cache[:-1]
        for length in map(_kv_length, kv):
            if length != state.offset:
                raise ModelError(f"a KV cache holds {length} ids, the codebook {state.offset}; trim all together")
        return kv, state

    # ---- one call, room by room

    def _hidden(self, kv: Sequence[Any], state: ZipState, ids: HostIds) -> mx.array:
        """The decoder's output [B, L, D] for ids [B, L], which the state has just learnt.

        LongRoPE has one factor set for all positions, chosen by the last one. When a call changes the set, keys made
        with the other are worthless: the KV caches are emptied and filled again from the id log.
        """
        length = _length(ids)
        positions = self._positions(state, ids)
        if positions.long != state.long_rope and state.offset > length:
            ids = state.log(self.config.pad_id)
            for cache in kv:
                cache.trim(_kv_length(cache))
            positions = self._positions(state, ids)
        state.long_rope = positions.long
        return self.run_layers(self._embed(state, ids), kv, positions)[:, -length:]

    def _positions(self, state: ZipState, ids: HostIds) -> Positions:
        """Where the last L ids stand, ids [B, L]."""
        context = self.traits.long_context
        if self.config.position_mode == "compressed":
            return self._compressed(state, state.offset - _length(ids), state.offset)
        if isinstance(ids, int):
            last = state.books[0].base_length - 1
            return Positions(start=last, long=context is not None and last >= context)
        index = state.base_positions(ids)
        return Positions(index=mx.array(index), long=context is not None and int(index.max()) >= context)

    def _compressed(self, state: ZipState, begin: int, end: int) -> Positions:
        """Where ids begin to end stand when each counts as one position."""
        context, padding = self.traits.long_context, state.left_padding
        start = begin - padding[0] if len(padding) == 1 else mx.array([begin - n for n in padding], mx.int32)
        return Positions(start=start, long=context is not None and end - min(padding) > context)

    def _embed(self, state: ZipState, ids: HostIds) -> mx.array:
        """Ids [B, L] -> [B, L, D], base rows and hyper rows."""
        if isinstance(ids, int):
            return self._scaled(self._embed_one(state, ids))
        hyper = self.layout.is_hyper(ids)
        h = self.model.embed_tokens(mx.array(np.where(hyper, 0, ids)))
        if hyper.any():
            slots = np.where(hyper, self.layout.slot(ids.astype(np.int64)), -1)
            if state.turns:
                h = self._embed_left(h, state, ids, slots)
            if (slots >= 0).any():
                h = self._embed_slots(h, state, slots)
        return self._scaled(h)

    def _embed_slots(self, h: mx.array, state: ZipState, slots: np.ndarray) -> mx.array:
        """Puts the rows of slots [B, L] (-1: none) into h [B, L, D]."""
        if self.sides_are_one:
            self._rows.encode_outputs(state)
        else:
            self._rows.encode_inputs(state, slots)
        where = mx.array(slots)
        rows = self._read_table(state).take(mx.maximum(where, 0))
        return mx.where((where >= 0)[..., None], rows.astype(h.dtype), h)

    def _embed_left(self, h: mx.array, state: ZipState, ids: np.ndarray, slots: np.ndarray) -> mx.array:
        """Puts the rows of entries that have left since ids [B, L] were read into h, and -1 into slots [B, L] there."""
        sequence, column, *entries = state.read_before(ids)
        if len(column):
            rows = self._rows.of_entries("input", *entries)
            h[mx.array(sequence), mx.array(column)] = rows.astype(h.dtype)
            slots[sequence, column] = -1
        return h

    def _embed_one(self, state: ZipState, one: int) -> mx.array:
        """One id -> [1, 1, D]."""
        hyper = self.layout.is_hyper(one)
        h = self.model.embed_tokens(mx.array([[0 if hyper else one]]))
        if not hyper:
            return h
        slot = self.layout.slot(one)
        if self.sides_are_one:
            self._rows.encode_outputs(state)
        else:
            self._rows.encode_input(state, slot)
        rows = self._read_table(state).rows
        assert rows is not None
        return rows[:, slot : slot + 1].astype(h.dtype)  # of `h` only the type is used

    def _scaled(self, h: mx.array) -> mx.array:
        """Gemma's factor of the embedding."""
        scale = self.traits.embed_scale
        return h if scale == 1.0 else h * mx.array(scale).astype(h.dtype)

    def _read_table(self, state: ZipState) -> RowTable:
        """Where input rows are."""
        return state.outputs if self.sides_are_one else state.inputs

    def pending_rows(self) -> list[mx.array]:
        """Rows that the store has not taken over yet, for a loop to evaluate along with the id they were needed for."""
        return [] if self.row_store is None else self.row_store.pending

    def weights_changed(self) -> None:
        """To be called after weights were changed in place (`w *= 2`): rows of the old ones are not used any more.

        Exchanged tensors are seen without it.
        """
        self._rows.forget_kinds()

    def run_layers(self, h: mx.array, kv: Sequence[Any], positions: Positions) -> mx.array:
        """The decoder body: [B, L, D] -> [B, L, D]."""
        masks: dict[int | None, Any] = {}
        as_array = self.traits.mask_as_array and h.shape[1] > 1
        end = _kv_length(kv[0]) + h.shape[1]
        for layer, cache, window in zip(self.model.layers, kv, self.traits.windows, strict=True):
            if window is not None and window >= end:
                window = None  # it hides nothing yet, and mlx-lm has no array to build for plain causal attention
            if window not in masks:
                masks[window] = cache.make_mask(h.shape[1], window_size=window, return_array=as_array)
            h = layer(h, masks[window], PositionedCache(cache, positions))
        return self.model.norm(h)

    def _head(self, h: mx.array, state: ZipState, advance: Advance, causal: bool) -> mx.array:
        """[B, L, D] -> logits [B, L, W] in the order of `Layout`."""
        self._rows.encode_outputs(state)
        base = self.cap(self.model.embed_tokens.as_linear(h) if self.traits.tied else self.lm_head(h))
        parts, columns = [base[..., : self.layout.vocab_size]], self.layout.vocab_size
        if state.outputs.rows is not None:
            hyper = (h @ state.outputs.rows.swapaxes(-1, -2)).astype(base.dtype)
            hyper = self.cap(self._with_left(hyper, h, advance.left) if causal and advance.left else hyper)
            installed = advance.available if causal else advance.live
            if not isinstance(installed, int):
                installed = mx.array(installed if causal else installed[:, None])[..., None]
            is_open = mx.arange(hyper.shape[-1]) < installed
            parts.append(mx.where(is_open, hyper, -mx.inf))
            columns += hyper.shape[-1]
        rest = self.layout.width - columns
        if rest:
            parts.append(mx.full((*base.shape[:-1], rest), -mx.inf, base.dtype))
        return mx.concatenate(parts, axis=-1)

    def _with_left(self, hyper: mx.array, h: mx.array, left: Sequence[Left]) -> mx.array:
        """Logits [B, L, slots] of h [B, L, D], those of entries that left within the call in the columns they had."""
        base_ids, lengths = np.stack([one.base_ids for one in left]), np.array([one.length for one in left])
        rows = self._rows.of_entries("output", base_ids, lengths)
        number = np.repeat(np.arange(len(left)), [one.end - one.begin for one in left])
        column = np.concatenate([np.arange(one.begin, one.end) for one in left])
        sequence, slot = np.array([one.sequence for one in left])[number], np.array([one.slot for one in left])[number]
        where = mx.array(sequence), mx.array(column)
        logits = (h @ rows.swapaxes(-1, -2)).astype(hyper.dtype)  # [B, L, entries that left]
        hyper[(*where, mx.array(slot))] = logits[(*where, mx.array(number))]
        return hyper

    def cap(self, logits: mx.array) -> mx.array:
        """Gemma 2's soft cap; before the mask, or it would lift -inf to -cap."""
        cap = self.traits.soft_cap
        return logits if cap is None else mx.tanh(logits / cap) * cap

    # ---- a step ahead of the host

    def run_ahead(self, ids: mx.array, cache: Sequence[Any]) -> mx.array | None:
        """The body's output [B, 1, D] for ids [B, 1] that may still be on the device; `follow` makes logits of it.

        Until then the KV caches are one id ahead of the codebooks, also when this ends in an exception: `forget` takes
        that back. None, and nothing done, where LongRoPE may change its factors. Raises `ModelError` for a cache that
        does not fit, before anything changes.
        """
        kv, state = self.check_cache(cache)
        if ids.dtype == mx.uint64:  # of which MLX makes floats where it meets a number with a sign
            ids = ids.astype(mx.int64)
        positions = self._positions_ahead(state, ids)
        if positions is None:
            return None
        hyper, table = self.layout.is_hyper(ids), self._read_table(state)
        h = self.model.embed_tokens(mx.where(hyper | (ids < 0), 0, ids))  # `follow` refuses those
        if table.rows is not None:
            slots = mx.clip(self.layout.slot(ids), 0, table.rows.shape[1] - 1)
            h = mx.where(hyper[..., None], table.take(slots).astype(h.dtype), h)
        return self.run_layers(self._scaled(h), kv, positions)

    def _positions_ahead(self, state: ZipState, ids: mx.array) -> Positions | None:
        """Where ids [B, 1] stand that the state does not know yet; None where LongRoPE may change its factors."""
        if self.config.position_mode == "compressed":
            positions = self._compressed(state, state.offset, state.offset + 1)
            return positions if positions.long == state.long_rope else None
        context, done = self.traits.long_context, state.base_lengths()
        longest = int(done.max()) + self.config.merge_size  # base ids after any id that may come
        if context is not None and not (int(done.max()) + 1 > context if state.long_rope else longest <= context):
            return None
        hyper = self.layout.is_hyper(ids)
        column = mx.where(hyper, mx.clip(self.layout.slot(ids), 0, self.config.codebook_size - 1) + 1, 0)
        spans = mx.take_along_axis(mx.array(state.spans()), column, axis=1)
        return Positions(index=mx.array(done)[:, None] + spans - 1, long=state.long_rope)

    def follow(self, h: mx.array, ids: mx.array, cache: Sequence[Any]) -> mx.array:
        """The logits [B, 1, W] behind `run_ahead(ids, cache)`, which gave h [B, 1, D].

        Here the ids are read. The body runs again for an id that had no input row yet: one that is read for the first
        time, or that installs itself. Errors are those of a call.
        """
        kv, state = cache[:-1], cache[-1]
        host_ids, before = _host_ids(ids, state), [len(book) for book in state.books]
        self._rows.settle()
        advance = state.advance(host_ids)
        if not self._had_rows(state, host_ids, before):
            for one in kv:
                one.trim(1)
            h = self._hidden(kv, state, host_ids)
        return self._head(h, state, advance, causal=False)

    def _had_rows(self, state: ZipState, ids: HostIds, installed: Sequence[int]) -> bool:
        """Whether every hypertoken among ids [B, 1] had its input row when `installed` [B] entries existed."""
        column = [ids] if isinstance(ids, int) else ids[:, 0].tolist()
        slots = [(b, self.layout.slot(one)) for b, one in enumerate(column) if self.layout.is_hyper(one)]
        return all(slot < installed[b] and (self.sides_are_one or state.encoded_inputs[b, slot]) for b, slot in slots)

    def forget(self, cache: Sequence[Any], offset: int) -> None:
        """Takes back what the codebooks and KV caches of a cache, or some of them, have read beyond `offset` ids."""
        cache[-1].trim(cache[-1].offset - offset)
        for one in cache[:-1]:
            one.trim(max(0, _kv_length(one) - offset))

    # ---- what mlx-lm's loader and converter ask for

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's blocks."""
        return self.model.layers

    def side(self, name: str) -> tuple[nn.Module, nn.Module]:
        """(encoder, the module whose rows it reads) of the rows of side "input" or "output"."""
        if name == "input":
            return self.input_encoder, self.model.embed_tokens
        return self.row_encoder, self.head_matrix

    @property
    def row_encoder(self) -> nn.Module:
        """The encoder of output rows."""
        return self.input_encoder if self.config.encoder.tie_encoders else self.output_encoder

    @property
    def head_matrix(self) -> nn.Module:
        """What holds the head's rows: the embedding when it is tied."""
        return self.model.embed_tokens if self.traits.tied else self.lm_head

    @property
    def sides_are_one(self) -> bool:
        """Whether an entry's input row is its output row: encoders and matrices both tied."""
        return self.config.encoder.tie_encoders and self.traits.tied

    def rows(self, base_ids: np.ndarray, lengths: np.ndarray) -> tuple[mx.array, mx.array]:
        """Input and output rows [N, D] of entries: base_ids [N, merge_size] padded with the pad id, lengths [N].

        Raises `ModelError` for other shapes, ids that are no base ids and lengths outside 1..merge_size.
        """
        width, vocab = self.config.merge_size, self.config.vocab_size
        if base_ids.ndim != 2 or base_ids.shape[1] != width or lengths.shape != base_ids.shape[:1]:
            raise ModelError(f"entries must be [N, {width}] with N lengths, got {base_ids.shape} and {lengths.shape}")
        real = (base_ids >= 0) & (base_ids < vocab)
        if not real.all() or not ((lengths >= 1) & (lengths <= width)).all():
            raise ModelError(f"entries must hold base ids below {vocab} and be 1 to {width} long")
        return (
            encode_entries(*self.side("input"), base_ids, lengths),
            encode_entries(*self.side("output"), base_ids, lengths),
        )

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Checkpoint names to attribute names: drops rotary buffers and the second copy of a tied matrix."""
        weights = {name: w for name, w in weights.items() if "rotary_emb.inv_freq" not in name}
        if self.traits.tied:
            head = weights.pop("lm_head.weight", None)
            if head is not None:
                weights.setdefault("model.embed_tokens.weight", head)
        return weights

    def quant_predicate(self, path: str, module: nn.Module) -> bool:
        """What mlx-lm's quantizer may quantize: decoder, embedding and head, but not the encoders."""
        return not path.startswith(("input_encoder", "output_encoder"))


def _check_shape(ids: mx.array) -> None:
    if ids.ndim != 2 or 0 in ids.shape or not mx.issubdtype(ids.dtype, mx.integer):
        raise ModelError(f"ids must be integers [B, L] with B, L > 0, got {ids.dtype} {list(ids.shape)}")


def _host_ids(ids: mx.array, state: ZipState) -> HostIds:
    """The one read of a call: ids [B, L] on the host. Raises `ModelError` for what is no 32-bit id.

    In a step of generation numpy is not touched: after half a gigabyte of weights its code is no longer in the
    processor's caches, and the first use costs as much as all else on the host.
    """
    if ids.size == 1 and state.takes_one():
        one = cast(int, ids.item())
        _check_range(one, one)
        return one
    host = np.array(ids)
    if host.dtype != np.uint32:
        _check_range(int(host.min()), int(host.max()))
    return np.ascontiguousarray(host.astype(np.uint32, copy=False))


def _length(ids: HostIds) -> int:
    return 1 if isinstance(ids, int) else ids.shape[1]


def _check_range(low: int, high: int) -> None:
    if low < 0 or high > 0xFFFFFFFF:
        raise ModelError(f"ids from {low} to {high} are not all 32-bit token ids")


def _kv_length(cache: Any) -> int:
    """Ids in a KV cache; a batch cache counts them in `_idx`, its `offset` being per sequence."""
    return cache._idx if hasattr(cache, "_idx") else cache.offset
