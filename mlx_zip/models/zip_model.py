"""The model with hypertokens (`Model`).

In one call the ids are read on the host and pushed to the request's codebooks; hyper rows that are missing come from
the row store or are encoded, in one batch per side; then embedding, decoder body and joint head run as one lazy graph.
Source: arXiv 2506.01084 §2, zip2zip 0.2.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_zip.config import SIDES, ZipConfig
from mlx_zip.errors import ModelError
from mlx_zip.layout import Layout
from mlx_zip.models.call_inputs import (
    PositionedCache,
    ids_per_sequence,
    kv_length,
    positions_of_read_ids,
    raise_unless_ids_shape,
    read_ids_on_host,
    set_plain_offsets,
)
from mlx_zip.models.decoder import Positions, make_decoder
from mlx_zip.models.longrope_refill import LongRopeRefill
from mlx_zip.models.machines import raise_unless_splittable, shard_layers
from mlx_zip.models.model_folder import ModelArgs
from mlx_zip.models.row_source import RowSide, RowSource
from mlx_zip.models.rows.encoders import encode_entries, make_encoder
from mlx_zip.models.rows.row_tables import RowTable
from mlx_zip.models.rows.sequence_rows import EvictedEntry
from mlx_zip.models.rows.zip_state import Advance, HostIds, ZipState
from mlx_zip.packs.pack import Pack, PackOrEntries, resolve_pack, split_packs


class Model(nn.Module):
    """A causal model whose vocabulary grows: `model(ids, cache=cache) -> logits`.

    Built by mlx-lm's loader from `ModelArgs`. Holds weights only: a request's state is in the cache that `make_cache`
    makes, and what was chosen at load (row store, pack, start entries, canonical decoding) is in `row_source`, which
    MLX does not treat as a parameter. Raises `ConfigError` if the config is not supported or contradicts itself.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        zip_config, config = args.zip_config, args.decoder_config
        decoder, self.traits = make_decoder(config)
        self.layout = Layout(zip_config.vocab_size, zip_config.codebook_size, config["vocab_size"])
        zip_config.encoder.check_width(config["hidden_size"])
        self.sides_are_one = zip_config.encoder.tie_encoders and self.traits.tied  # an entry's two rows are one
        self.row_source = RowSource(zip_config, args.config["zip2zip"].get("fingerprint"))
        self.model_type = args.config.get("model_type")
        self.model = decoder
        if not self.traits.tied:
            self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        self.input_encoder = make_encoder(zip_config.encoder, zip_config.merge_size, SIDES[0])
        if not zip_config.encoder.tie_encoders:
            self.output_encoder = make_encoder(zip_config.encoder, zip_config.merge_size, SIDES[1])

    def __copy__(self) -> Model:
        """Returns a model with the same modules; assigning a module to one of the two does not change the other."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        dict.update(twin, self)
        twin.row_source = self.row_source.for_copy()
        return twin

    @property
    def config(self) -> ZipConfig:
        """The `zip2zip` section of config.json, with the start entries and canonical decoding chosen at load."""
        return self.row_source.config

    def __call__(
        self,
        ids: mx.array,
        cache: Sequence[Any] | None = None,
        *,
        causal: bool = False,
        long: bool | None = None,
    ) -> mx.array:
        """Returns logits [B, L, W] in the model's dtype for ids [B, L], integers; W = `layout.width`, column = id.

        Columns of slots without an entry and of the base tail are -inf. causal: whether an entry that an id of this
        call installs can be chosen only from that id's position on; by default, as upstream, it can be chosen at all L
        positions. cache: from `make_cache`, updated in place; None starts a new request. long: whether LongRoPE uses
        its long factors; None decides by the last id's position. For a prompt read in several calls, give
        `call_needs_long_factors` of the whole prompt. Raises, before anything changes, `CodecError` for an illegal id
        and `ModelError` if the cache does not fit the model.
        """
        if cache is None:
            raise_unless_ids_shape(ids)
            cache = self.make_cache(left_padding=[0] * len(ids))
        return self.read(ids, cache, causal=causal, long=long)[0]

    def read(
        self, ids: mx.array, cache: Sequence[Any], *, causal: bool = False, long: bool | None = None
    ) -> tuple[mx.array, mx.array]:
        """Returns the logits, as `__call__` does, and the body's output [B, L, D] that gave them."""
        raise_unless_ids_shape(ids)
        kv, state = self.split_cache(cache)
        host_ids, before = read_ids_on_host(ids, state), state.offset
        self.row_source.store_unsubmitted_rows()
        self.bind_tuned_rows(state)
        try:
            advance = state.advance(host_ids)
            self.fill_outputs(state)  # first, so that new rows can be encoded while the rest of the call is built
            h = self.run_body(kv, state, host_ids, long)
            return self.joint_head(h, state, advance, causal), h
        except BaseException:  # after an interrupt, for example, codebook and KV caches must still agree
            self.trim_cache(cache, before)
            raise

    # ---- the cache of a request

    def make_cache(
        self,
        left_padding: Sequence[int] | None = None,
        pack: PackOrEntries | Sequence[PackOrEntries | None] | None = None,
    ) -> list[Any]:
        """Returns the cache of a new request: one KV cache per layer, then the `ZipState`.

        left_padding [B]: per sequence, how many ids at the start are padding, for batches; None makes a cache for one
        sequence. pack: replaces the model's own pack. It is the path of a pack file, a `Pack`, or a sequence of
        entries, each a sequence of base ids (`()`: begin without entries); or a list of B of these, with None for the
        model's own. If the pack is tuned, its rows are used.

        Every layer gets a full KV cache, also under a sliding window, so that every cache can be trimmed and quantized.
        Raises `ModelError` if `left_padding` is empty or has a negative number, if there is not one pack per sequence,
        or if rows were tuned for another model; `CodecError` naming the entry that does not fit the codec; `DataError`
        if a file is not a pack. The pack's tokenizer is not checked: `stream_generate` does that.
        """
        from mlx_lm.models.cache import BatchKVCache, KVCache  # importing it takes a second, so only when needed

        padding = [0] if left_padding is None else [int(n) for n in left_padding]
        if not padding or min(padding) < 0:
            raise ModelError(f"left_padding must give a count for each sequence, 0 or more, got {padding}")
        packs = [self._checked_pack(one) for one in split_packs(pack, len(padding))]
        codecs = {id(one): self.config.codec_params.with_start(one) for one in packs}
        tuned = [None if one is None or one.rows is None else one for one in packs]
        state = ZipState([codecs[id(one)] for one in packs], padding, tuned)
        if padding == [0]:
            return [*(KVCache() for _ in self.layers), state]
        return [*(BatchKVCache(padding) for _ in self.layers), state]

    def _checked_pack(self, pack: Pack | None) -> Pack | None:
        """Returns `pack`, or the model's own pack if `pack` is None.

        Raises `ModelError` if its rows are of another model, or if there are neither rows nor a hyper-encoder.
        """
        pack = self.row_source.pack if pack is None else pack
        if pack is not None and pack.rows is not None:
            self.check_pack(pack)
        elif self.is_plain:
            raise ModelError("this model has no hyper-encoder: it can begin with a pack of rows tuned for it only")
        return pack

    def check_pack(self, pack: Pack) -> None:
        """Raises `ModelError` if the pack has rows that were not tuned for this model as it is now."""
        if pack.rows is not None:
            pack.rows.check_model(self.fingerprint, self.sides_are_one, self.config.encoder.model_size)

    def use_pack(self, pack: PackOrEntries) -> None:
        """Makes requests begin with this pack from now on, unless they name another. pack: as in `make_cache`.

        Raises `ConfigError` naming the entry that does not fit, and `ModelError` if the rows are of another model.
        """
        found = resolve_pack(pack)
        config = replace(self.config, start=found.entries)
        self.check_pack(found)
        self.row_source.config, self.row_source.pack = config, None if found.rows is None else found

    def split_cache(self, cache: Sequence[Any]) -> tuple[Sequence[Any], ZipState]:
        """Returns a request's KV caches and its `ZipState`.

        Raises `ModelError` if the cache is of another model, or its KV caches and codebooks hold different numbers of
        ids. A cache that began with any pack is accepted.
        """
        state = cache[-1] if len(cache) == len(self.layers) + 1 else None
        if not isinstance(state, ZipState):
            raise ModelError("the cache is not one that this model's make_cache() made")
        if not state.fits_codec(self.config.codec_params):
            raise ModelError("the cache was made with other codec parameters than this model's")
        kv = cache[:-1]
        for length in map(kv_length, kv):
            if length != state.offset:
                raise ModelError(f"a KV cache holds {length} ids, the codebook {state.offset}; trim all together")
        return kv, state

    def call_needs_long_factors(self, state: ZipState, ids: np.ndarray) -> bool:
        """Returns whether a call that reads ids [B, L] next uses LongRoPE's long factors; False without LongRoPE.

        Raises `CodecError` if the call would refuse an id.
        """
        context, length = self.traits.long_context, ids.shape[1]
        if context is None:
            return False
        if self.config.position_mode == "compressed":
            return state.offset + length - min(state.left_padding) > context
        first = int(state.base_lengths().max())  # position of the longest sequence's next base id
        if (first >= context) == (first + self.config.merge_size * length > context):
            return first >= context
        return int(state.base_lengths_after(ids).max()) > context

    def trim_cache(self, cache: Sequence[Any], offset: int) -> None:
        """Trims codebooks and KV caches to `offset` ids per sequence. KV caches with fewer ids are not changed."""
        cache[-1].trim(cache[-1].offset - offset)
        for layer_cache in cache[:-1]:
            layer_cache.trim(max(0, kv_length(layer_cache) - offset))

    def bind_tuned_rows(self, state: ZipState) -> None:
        """Puts the tuned rows that a request begins with into its row tables, unless the tables have them.

        Raises `ModelError`, leaving everything unchanged, if the rows were tuned for another model or the pack of a
        saved state is not loaded.
        """
        if all(state.bound):
            return
        for pack in self.row_source.resolve_packs(state):
            self.check_pack(pack)
        names = ["output"] if self.sides_are_one else ["output", "input"]
        self.row_source.put_tuned_rows(state, [self.side_named(name) for name in names])

    # ---- from ids to the body's output

    def run_body(self, kv: Sequence[Any], state: ZipState, ids: HostIds, long: bool | None = None) -> mx.array:
        """Returns the body's output [B, L, D] for ids [B, L], which the state has just read. long: as in `__call__`.

        If the call changes LongRoPE's factors, it also fills the KV caches again from the whole id log. A decode loop
        avoids this by filling them in chunks before the call (`mlx_zip.models.longrope_refill`).
        """
        length = ids_per_sequence(ids)
        positions = positions_of_read_ids(state, ids, self.config.position_mode, self.traits.long_context)
        if long is not None:
            positions = replace(positions, long=long)
        if positions.long != state.long_rope and state.offset > length:
            refill = LongRopeRefill(self, kv, state, positions.long)
            h = refill.read_next(state.offset)[:, -length:]
            refill.install_refilled_caches()
            return h
        state.long_rope = positions.long
        h = self.run_layers(self.embed(state, ids), kv, positions, state.submit)
        set_plain_offsets(kv, state.left_padding)
        return h

    def embed(self, state: ZipState, ids: HostIds) -> mx.array:
        """Returns embeddings [B, L, D] of ids [B, L]: from the embedding, or from input rows for hypertokens."""
        if isinstance(ids, int):
            return self.scale_embeddings(self._embed_single_id(state, ids))
        hyper = self.layout.is_hyper(ids)
        h = self.model.embed_tokens(mx.array(np.where(hyper, 0, ids)))
        if hyper.any():
            slots = np.where(hyper, self.layout.slot(ids.astype(np.int64)), -1)
            if state.can_evict_entries:
                h = self._embed_evicted(h, state, ids, slots)
            if (slots >= 0).any():
                h = self._embed_slots(h, state, slots)
        return self.scale_embeddings(h)

    def _embed_slots(self, h: mx.array, state: ZipState, slots: np.ndarray) -> mx.array:
        """Returns h [B, L, D] with the input rows of slots [B, L] in it. Where the slot is -1, the row of h is kept."""
        if not self.sides_are_one:
            self.row_source.fill_inputs(state, self.input_side, state.missing_inputs(slots))
        places = state.places_of(np.arange(len(slots))[:, None], np.maximum(slots, 0))
        rows = self.input_row_table(state).take_rows(mx.array(places))
        return mx.where((mx.array(slots) >= 0)[..., None], rows.astype(h.dtype), h)

    def _embed_evicted(self, h: mx.array, state: ZipState, ids: np.ndarray, slots: np.ndarray) -> mx.array:
        """Puts input rows into h [B, L, D] for those ids [B, L] whose entries have been evicted since; returns h.

        Sets `slots` [B, L] to -1 for these ids, because their slots hold other entries now.
        """
        sequence, column, *entries = state.evicted_since_read(ids)
        if len(column):
            rows = self.row_source.rows_of_entries(self.side_named("input"), *entries)
            h[mx.array(sequence), mx.array(column)] = rows.astype(h.dtype)
            slots[sequence, column] = -1
        return h

    def _embed_single_id(self, state: ZipState, one: int) -> mx.array:
        """Returns the embedding [1, 1, D] of one id of a single sequence."""
        hyper = self.layout.is_hyper(one)
        h = self.model.embed_tokens(mx.array([[0 if hyper else one]]))
        if not hyper:
            return h
        slot = self.layout.slot(one)
        if not self.sides_are_one and not state.encoded_inputs[slot]:
            self.row_source.fill_inputs(state, self.input_side, np.array([slot]))
        rows = self.input_row_table(state).rows
        assert rows is not None
        return rows[:, slot : slot + 1].astype(h.dtype)  # `h` only provides the type here

    def input_row_table(self, state: ZipState) -> RowTable:
        """Returns the table that a call reads input rows from: the output table if both sides have the same rows.

        `TwoPartStep` always reads `state.inputs`.
        """
        return state.outputs if self.sides_are_one else state.inputs

    def fill_outputs(self, state: ZipState) -> None:
        """Puts the missing output rows of all installed entries into the output table."""
        if not state.has_all_output_rows():
            self.row_source.fill_outputs(state, self.side_named("output"))

    @property
    def input_side(self) -> RowSide:
        """The side that input rows are encoded for: the output side if both sides have the same rows."""
        return self.side_named("output" if self.sides_are_one else "input")

    def scale_embeddings(self, h: mx.array) -> mx.array:
        """Returns embeddings h times Gemma's factor, or h itself for other models."""
        scale = self.traits.embed_scale
        return h if scale == 1.0 else h * mx.array(scale).astype(h.dtype)

    def run_layers(
        self, h: mx.array, kv: Sequence[Any], positions: Positions, submit: Callable[[mx.array], None] | None = None
    ) -> mx.array:
        """Runs the decoder's body: embeddings h [B, L, D] -> output [B, L, D]. Adds L ids to the KV caches.

        submit: called with each layer's output as soon as it is built.
        """
        masks: dict[int | None, Any] = {}
        as_array = self.traits.mask_as_array and h.shape[1] > 1
        end = kv_length(kv[0]) + h.shape[1]
        for layer, cache, window in zip(self.model.layers, kv, self.traits.windows, strict=True):
            if window is not None and window >= end:
                window = None  # the window hides nothing yet, and a plain causal mask is cheaper
            if window not in masks:
                masks[window] = cache.make_mask(h.shape[1], window_size=window, return_array=as_array)
            h = layer(h, masks[window], PositionedCache(cache, positions))
            if submit is not None:
                submit(h)
        return self.model.norm(h)

    # ---- from the body's output to logits

    def joint_head(self, h: mx.array, state: ZipState, advance: Advance, causal: bool) -> mx.array:
        """Returns logits [B, L, W] of the body's output h [B, L, D], columns in the order of `Layout`.

        advance: what `ZipState.advance` returned for the ids. causal: as in `__call__`. The output table must hold the
        rows of all installed entries (`fill_outputs`).
        """
        base = self.base_logits(h)
        parts = [base[..., : self.layout.vocab_size]]
        if state.outputs.array is not None:
            hyper = self.soft_cap_logits(state.outputs.times_rows(h).astype(base.dtype))
            opened = advance.available if causal else advance.live
            parts += self._slot_logits(hyper, h, state, opened, advance.evicted if causal else ())
        columns = sum(part.shape[-1] for part in parts)
        closed = mx.array(-mx.inf, base.dtype)
        parts.append(mx.broadcast_to(closed, (*base.shape[:-1], self.layout.width - columns)))
        return mx.concatenate(parts, axis=-1)

    def _slot_logits(
        self, hyper: mx.array, h: mx.array, state: ZipState, opened: int | np.ndarray, evicted: Sequence[EvictedEntry]
    ) -> list[mx.array]:
        """Returns the slots' logits, -inf for slots that cannot be chosen, as arrays to join along the last axis.

        hyper [B, L, places]: the logits of h [B, L, D] by place. opened: how many slots can be chosen, as `installed`
        of `_mask_closed_slots`. evicted: entries that were evicted within the call.
        """
        places = None if evicted else state.places
        alike = 0 if places is None else places.count_slots_with_equal_places(int(np.min(opened)))
        own = state.values_by_slot(hyper, alike)
        own = self._restore_evicted_logits(own, h, evicted) if evicted else own
        parts = [hyper[..., :alike], _mask_closed_slots(own, opened, alike)]
        return parts[0 if alike else 1 :]

    def base_logits(self, h: mx.array) -> mx.array:
        """Returns the head's own logits [B, L, rows of the head] of h [B, L, D], soft-capped if the model has a cap."""
        return self.soft_cap_logits(self.model.embed_tokens.as_linear(h) if self.traits.tied else self.lm_head(h))

    def _restore_evicted_logits(self, hyper: mx.array, h: mx.array, evicted: Sequence[EvictedEntry]) -> mx.array:
        """Corrects `hyper` for entries that were evicted within the call, and returns it.

        hyper [B, L, slots]: logits of h [B, L, D] for the entries that the slots hold after the call. At positions
        where a slot held an entry that was evicted later in the call, the logit is replaced by that entry's.
        """
        base_ids, lengths = np.stack([one.base_ids for one in evicted]), np.array([one.length for one in evicted])
        rows = self.row_source.rows_of_entries(self.side_named("output"), base_ids, lengths)
        number = np.repeat(np.arange(len(evicted)), [one.end - one.begin for one in evicted])
        column = np.concatenate([np.arange(one.begin, one.end) for one in evicted])
        sequence = np.array([one.sequence for one in evicted])[number]
        slot = np.array([one.slot for one in evicted])[number]
        where = mx.array(sequence), mx.array(column)
        logits = (h @ rows.swapaxes(-1, -2)).astype(hyper.dtype)  # [B, L, evicted entries]
        hyper[(*where, mx.array(slot))] = self.soft_cap_logits(logits[(*where, mx.array(number))])
        return hyper

    def soft_cap_logits(self, logits: mx.array) -> mx.array:
        """Returns logits under Gemma 2's soft cap. Apply it before the mask: the cap would turn -inf into -cap."""
        cap = self.traits.soft_cap
        return logits if cap is None else mx.tanh(logits / cap) * cap

    # ---- rows

    def encode_rows(self, base_ids: np.ndarray, lengths: np.ndarray) -> tuple[mx.array, mx.array]:
        """Returns the input rows and the output rows [N, D] of N entries, encoded now.

        base_ids [N, merge_size]: padded with the pad id. lengths [N]: how many base ids of each entry are real.

        Raises `ModelError` if a shape is wrong, an id is not a base id, or a length is outside 1..merge_size.
        """
        width, vocab = self.config.merge_size, self.config.vocab_size
        if base_ids.ndim != 2 or base_ids.shape[1] != width or lengths.shape != base_ids.shape[:1]:
            raise ModelError(f"entries must be [N, {width}] with N lengths, got {base_ids.shape} and {lengths.shape}")
        real = (base_ids >= 0) & (base_ids < vocab)
        if not real.all() or not ((lengths >= 1) & (lengths <= width)).all():
            raise ModelError(f"entries must hold base ids below {vocab} and be 1 to {width} long")
        read, written = self.side_named("input"), self.side_named("output")
        return (
            encode_entries(read.encoder, read.matrix, base_ids, lengths),
            encode_entries(written.encoder, written.matrix, base_ids, lengths),
        )

    def side_named(self, name: str) -> RowSide:
        """Returns the `RowSide` called `name`, "input" or "output"."""
        if name == "input":
            return RowSide(name, self.input_encoder, self.model.embed_tokens, self.training)
        return RowSide(name, self.row_encoder, self.head_matrix, self.training)

    @property
    def row_encoder(self) -> nn.Module:
        """The encoder of output rows."""
        return self.input_encoder if self.config.encoder.tie_encoders else self.output_encoder

    @property
    def head_matrix(self) -> nn.Module:
        """The module that holds the head's rows: the embedding if the head is tied to it."""
        return self.model.embed_tokens if self.traits.tied else self.lm_head

    @property
    def is_plain(self) -> bool:
        """Whether this is a plain model with a pack tuned for it (`config_with_pack`), which has no hyper-encoder."""
        return bool(self.args.config["zip2zip"].get("plain"))

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the weights as they are now. A pack with rows tuned for this model records it."""
        return self.row_source.fingerprint.of_model(self)

    def weights_changed(self) -> None:
        """Stops using rows that were encoded before the weights changed.

        Call this after changing weights in place (`w *= 2`). The replacement of a tensor is noticed without this call.
        """
        self.row_source.weights_changed()

    # ---- what mlx-lm's loader and converter ask for

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's blocks."""
        return self.model.layers

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Returns a checkpoint's weights by attribute name, without rotary buffers and a tied head's second copy."""
        weights = {name: w for name, w in weights.items() if "rotary_emb.inv_freq" not in name}
        if self.traits.tied:
            head = weights.pop("lm_head.weight", None)
            if head is not None:
                weights.setdefault("model.embed_tokens.weight", head)
        return weights

    def shard(self, group: mx.distributed.Group | None = None) -> None:
        """Keeps this machine's share of every layer; the name and argument are mlx-lm's. Raises `ModelError`."""
        group = mx.distributed.init() if group is None else group
        raise_unless_splittable(self.args.config, group.size())
        shard_layers(self.layers, group)

    def quant_predicate(self, path: str, module: nn.Module) -> bool:
        """Returns whether mlx-lm may quantize the module at `path`: every module but those of the hyper-encoders."""
        return not path.startswith(SIDES)


def _mask_closed_slots(hyper: mx.array, installed: int | np.ndarray, first: int = 0) -> mx.array:
    """Returns the logits hyper [B, L, slots] of the slots from `first` on, with -inf for slots that cannot be chosen.

    installed [B], or [B, L] per position: how many slots, counted from slot 0, can be chosen. For a single sequence it
    may be an int; then the columns of the other slots are cut off.
    """
    if isinstance(installed, int):
        return hyper[..., :installed]
    limit = mx.array(installed if installed.ndim == 2 else installed[:, None])[..., None]
    return mx.where(mx.arange(first, first + hyper.shape[-1]) < limit, hyper, -mx.inf)
