"""A model call for one id per sequence, in two parts, so that the device can begin before the host has read the ids.

`run_body` builds the decoder's body for ids that are still on the device. `compute_logits` reads the ids, updates the
codebooks and builds the head. So the host reads an id while the device runs the body for this id. The host must read
the id from the array of the step that chose the id, because MLX makes the arrays of a graph available only when the
whole graph is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_zip.models.call_inputs import positions_of_unread_ids, read_ids_on_host, set_plain_offsets
from mlx_zip.models.rows.zip_state import HostIds, ZipState
from mlx_zip.models.zip_model import Model

# How many missing input rows are encoded together. Encoding them one by one would read the encoder's weights in every
# step that installs an entry. Not encoding them in advance would run the body twice whenever a hypertoken is read for
# the first time, in 19 to 33 % of the steps of real text; that costs more, because an 8-bit encoder of two layers reads
# only 11 to 15 % of what a 4-bit body reads. The body still runs twice in a step that reads an entry before its input
# row is encoded (`ZipState.second_bodies`). With five rows together, Llama-3's ids, 2,048 entries and texts of 1,024
# ids, this happens in 0.04 % (dialogues), 0.2 % (encyclopedia), 0.7 % (mathematics) and 0.4 to 0.9 % (code) of the
# steps; with eight rows together, in 1.7 and 1.8 % (code). The aim was at most 1 %.
INPUT_ROWS_TOGETHER = 5


class TwoPartStep:
    """Runs a model on a cache, one id per sequence at a time.

    `run_body` and `compute_logits` together are one model call. The body looks up an id that the host has not read in
    the table of input rows. `run_body` puts the missing rows of installed entries into this table when
    `INPUT_ROWS_TOGETHER` of them are missing. In the rare case that an id is read before its row is in the table,
    `compute_logits` runs the body again.
    """

    def __init__(self, model: Model, cache: Sequence[Any]) -> None:
        self.model, self.cache = model, cache

    def run_body(self, ids: mx.array) -> mx.array | None:
        """Returns the body's output [B, 1, D] for ids [B], which may still be on the device.

        `compute_logits` takes the output. Until `compute_logits` returns, the KV caches are one id longer than the
        codebooks. If one of the two methods raises, call `Model.trim_cache` to trim them. Returns None, leaving the KV
        caches unchanged, if the ids may make LongRoPE switch between its short and long factors. Raises `ModelError`,
        leaving everything unchanged, if the cache does not fit the model.
        """
        model = self.model
        kv, state = model.split_cache(self.cache)
        model.bind_tuned_rows(state)
        self._fill_missing_inputs(state)
        table, layout = state.inputs, model.layout
        capacity = state.slots_covered() or layout.codebook_size
        if ids.dtype.size != 4:  # narrow types cannot hold every id, and MLX compares uint64 with a signed id as floats
            ids = ids.astype(mx.int64)
        base, hyper, slots = _split_base_and_hyper(layout.vocab_size, capacity, ids[:, None])
        rule = model.config.position_mode, model.traits.long_context
        positions = positions_of_unread_ids(state, hyper, slots, *rule, model.config.merge_size)
        if positions is None:
            return None
        h = model.model.embed_tokens(base)
        if table.array is not None:
            h = _put_hyper_rows(hyper, table.take_rows(state.places_at_slots(slots)), h)
        h = model.run_layers(model.scale_embeddings(h), kv, positions)
        set_plain_offsets(kv, state.left_padding)
        return h

    def compute_logits(self, h: mx.array, ids: mx.array) -> mx.array:
        """Reads ids [B] and returns their logits [B, 1, W]. h [B, 1, D]: what `run_body(ids)` returned.

        Runs the body a second time if an id is a hypertoken that had no input row during `run_body`;
        `state.second_bodies` counts these cases. Raises what `Model.__call__` raises.
        """
        model, kv, state = self.model, self.cache[:-1], self.cache[-1]
        host_ids = read_ids_on_host(ids, state)
        had_rows = self._had_input_rows(state, host_ids)
        advance = state.advance(host_ids)
        model.fill_outputs(state)
        if not had_rows:
            state.second_bodies += 1
            for layer_cache in kv:
                layer_cache.trim(1)
            h = model.run_body(kv, state, host_ids)
        return model.joint_head(h, state, advance, causal=False)

    def _fill_missing_inputs(self, state: ZipState) -> None:
        """Puts missing input rows of installed entries into the table of input rows, if enough are missing."""
        if state.places is not None:
            self.model.fill_outputs(state)  # gives new entries their places
        places = state.missing_installed_inputs()
        if len(places) >= (1 if self.model.sides_are_one else INPUT_ROWS_TOGETHER):
            self.model.fill_outputs(state)
            state.use_two_copies_of_inputs()
            self.model.row_source.fill_inputs(state, self.model.input_side, places)

    def _had_input_rows(self, state: ZipState, ids: HostIds) -> bool:
        """Returns whether the body had the input row of every hypertoken among ids [B, 1].

        The state must not have read the ids yet. An id that installs its own entry (LZW's KwKwK) never has a row.
        """
        end = self.model.layout.vocab_size
        column = [ids] if isinstance(ids, int) else ids[:, 0].tolist()
        return all(one < end or state.has_input_row(b, one - end) for b, one in enumerate(column))


@partial(mx.compile, shapeless=True)
def _split_base_and_hyper(vocab_size: int, capacity: int, ids: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Returns three arrays [B, 1] for ids [B, 1]: base ids (0 for hypertokens), whether each is a hypertoken, slots.

    Slots are clipped below `capacity`, and negative ids become base id 0; for illegal ids `compute_logits` raises.
    """
    hyper = ids >= vocab_size
    return mx.where(hyper | (ids < 0), 0, ids), hyper, mx.clip(ids - vocab_size, 0, capacity - 1)


@partial(mx.compile, shapeless=True)
def _put_hyper_rows(hyper: mx.array, rows: mx.array, h: mx.array) -> mx.array:
    """Returns rows [B, 1, D] where hyper [B, 1] is true, else h [B, 1, D], in the dtype of h."""
    return mx.where(hyper[..., None], rows.astype(h.dtype), h)
