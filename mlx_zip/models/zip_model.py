"""The model: a decoder whose embedding and head also read the hyper rows of the request's `ZipState`.

One call: the ids are read on the host and learnt by the codebooks; rows that are missing come from the row store or
are encoded, in one batch per side; then embedding, decoder body and joint head run as one lazy graph. Source: arXiv
2506.01084 §2, zip2zip 0.2.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_zip.errors import ConfigError, ModelError
from mlx_zip.hyper import RowStore, RowTable, encode_entries, make_encoder
from mlx_zip.layout import Layout
from mlx_zip.models.ahead import Ahead
from mlx_zip.models.architectures import make_decoder
from mlx_zip.models.model_rows import ModelRows
from mlx_zip.models.parts import Body, ModelArgs, PositionedCache, check_shape, kv_length, length_of, read_ids
from mlx_zip.models.rope import Positions
from mlx_zip.state import Advance, HostIds, Left, ZipState, find_state, split_start, with_starts
from mlx_zip.vocab.tuned import TunedStart


class Model(Ahead):
    """A causal model whose vocabulary grows: `model(ids, cache=cache) -> logits`.

    Built by mlx-lm's loader from `ModelArgs`. Holds weights only; what changes lives in the cache that `make_cache`
    makes. row_store: None, or the store in which rows outlive their request, which changes no result; `mlx_zip.load`
    gives one. Not used in training mode. pack: None, or the pack of tuned rows that requests begin with unless they
    name another start, set by `take_pack`. Raises `ConfigError` when the config is not supported or contradicts itself.
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
        self.pack: TunedStart | None = None
        self._rows = ModelRows(self)
        if not self.config.encoder.tie_encoders:
            self.output_encoder = make_encoder(self.config.encoder, self.config.merge_size)

    def __copy__(self) -> Model:
        """Another model of the same modules, whose rows are made of its own when one is exchanged."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        dict.update(twin, self)
        twin._rows = ModelRows(twin)
        twin._rows.forget_kinds()
        return twin

    def __call__(self, ids: mx.array, cache: Sequence[Any] | None = None, *, causal: bool = False) -> mx.array:
        """Ids [B, L] integers -> logits [B, L, W] in the model's dtype, W = `layout.width`.

        The column is the id. Columns of entries that are not installed and of the base tail are -inf; an entry
        created by an id of this call can be chosen right after it. Within one call the entries of the whole chunk
        are open at every position, as upstream; `causal=True` opens each only from the position that created it.
        Raises `CodecError` for an illegal id and `ModelError` for a cache that does not fit, before anything
        changes. Without a cache the call stands alone.
        """
        check_shape(ids)
        cache = self.make_cache(left_padding=[0] * len(ids)) if cache is None else cache
        kv, state = self.check_cache(cache)
        host_ids, before = read_ids(ids, state), state.offset
        self._rows.settle()
        self._rows.bind_tuned(state)
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
        starts from nothing; a `TunedStart` brings its rows. Every layer gets a full KV cache, also under a sliding
        window, so that every cache can be trimmed and quantized. Raises `ModelError` for an empty or negative
        left_padding, for starts that are not one per sequence, and for rows that were tuned for another model,
        `CodecError` naming the start entry that does not fit the codec.
        """
        from mlx_lm.models.cache import BatchKVCache, KVCache  # importing it takes a second, so only when needed

        padding = [0] if left_padding is None else [int(n) for n in left_padding]
        if not padding or min(padding) < 0:
            raise ModelError(f"left_padding must give a count for each sequence, 0 or more, got {padding}")
        starts = [self._checked(one) for one in split_start(start, len(padding))]
        tuned = [one if isinstance(one, TunedStart) else None for one in starts]
        state = ZipState(with_starts(self.config.codec_params, starts), padding, tuned)
        if padding == [0]:
            return [*(KVCache() for _ in self.layers), state]
        return [*(BatchKVCache(padding) for _ in self.layers), state]

    def _checked(self, start: Any) -> Any:
        """A sequence's starting codebook, the model's pack for None. Raises `ModelError` for one it cannot use."""
        start = self.pack if start is None else start
        if isinstance(start, TunedStart):
            self._rows.check_tuned(start)
        elif self.is_plain:
            raise ModelError("this model has no hyper-encoder: it can begin with a pack of rows tuned for it only")
        return start

    def take_pack(self, start: Sequence[Any]) -> None:
        """Requests begin with these entries from now on, unless they name others.

        Raises `ConfigError` naming the entry that does not fit, `ModelError` for rows of another model.
        """
        config = replace(self.config, start=tuple(map(tuple, start)))
        if isinstance(start, TunedStart):
            self._rows.check_tuned(start)
        self.config, self.pack = config, start if isinstance(start, TunedStart) else None

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
        for length in map(kv_length, kv):
            if length != state.offset:
                raise ModelError(f"a KV cache holds {length} ids, the codebook {state.offset}; trim all together")
        return kv, state

    # ---- one call, room by room

    def _hidden(self, kv: Sequence[Any], state: ZipState, ids: HostIds) -> mx.array:
        """The decoder's output [B, L, D] for ids [B, L], which the state has just learnt.

        LongRoPE has one factor set for all positions, chosen by the last one. When a call changes the set, keys made
        with the other are worthless: the KV caches are emptied and filled again from the id log.
        """
        length = length_of(ids)
        positions = self._positions(state, ids)
        if positions.long != state.long_rope and state.offset > length:
            ids = state.log(self.config.pad_id)
            for cache in kv:
                cache.trim(kv_length(cache))
            positions = self._positions(state, ids)
        state.long_rope = positions.long
        return self.run_layers(self._embed(state, ids), kv, positions)[:, -length:]

    def _positions(self, state: ZipState, ids: HostIds) -> Positions:
        """Where the last L ids stand, ids [B, L]."""
        context = self.traits.long_context
        if self.config.position_mode == "compressed":
            return self._compressed(state, state.offset - length_of(ids), state.offset)
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
        end = kv_length(kv[0]) + h.shape[1]
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

    @property
    def is_plain(self) -> bool:
        """Whether it is a plain model that was given a codebook for a pack's sake (`mlx_zip.models.packed`)."""
        return bool(self.args.config["zip2zip"].get("plain"))

    @property
    def fingerprint(self) -> str:
        """What tuned rows are bound to: see `mlx_zip.hyper.model_fingerprint`."""
        return self._rows.name

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
