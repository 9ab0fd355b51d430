"""`Zip2ZipState`: what a worker knows of each request that runs: its codebook, and where the rows of its entries are.

The ids of a sequence determine its codebook, so only ids cross the borders of processes. A request that comes back
after preemption, or whose beginning lies in the prefix cache, has its ids replayed.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.states import RequestState

from mlx_zip.codec import Codebook
from mlx_zip.codec.entries import Installed
from mlx_zip.cuda.hyper_rows import ENTRIES_PER_PASS, entry_keys
from mlx_zip.cuda.sampling import exclude_ids
from mlx_zip.cuda.transfers import ids_to_device
from mlx_zip.errors import MlxZipError
from mlx_zip.sampling.exclusions import CanonicalIds
from mlx_zip.vllm.model import Zip2ZipForCausalLM
from mlx_zip.vllm.packs import HYPERTOKENS, NO_ENTRIES, PACK, Entries, StartRows, WorkerPacks
from mlx_zip.vllm.rows import RowTable

log = logging.getLogger("mlx_zip")
MOST_ROWS = 32_768  # places of the table of rows, unless fewer can be in use; it grows if more are


class RunningRequest:
    """A request. index: its slot among vLLM's requests. ids: those that were known when it came.

    emits: whether it may choose hypertokens; else its codebook is followed only to read them. places: of the rows of
    the entry in each slot of its codebook, 0 for none. excluded: ids that canonical decoding forbids next. broken:
    whether an id could not be read; then nothing but its end can be chosen.
    """

    def __init__(self, index: int, data: NewRequestData, start: StartRows, emits: bool, canonical: bool) -> None:
        assert data.prefill_token_ids is not None
        self.index, self.ids, self.start, self.emits = index, data.prefill_token_ids, start, emits
        self._prompt_ids = data.prompt_len
        self.book, self.broken = Codebook(start.params), False
        self.places = np.zeros(start.params.codebook_size, np.int64)
        self._canonical = CanonicalIds(self.book) if canonical and emits else None
        self.excluded: Sequence[int] = ()

    def read(self, ids: Sequence[int]) -> list[Installed]:
        """Reads ids into the codebook; returns the entries that they install. Raises `CodecError`."""
        if self._canonical is None:
            return [self.book.push(ids)]
        prompt = max(0, self._prompt_ids - self.book.mark())
        installed = []
        for part in ([ids[:prompt]] if prompt else []) + [[one] for one in ids[prompt:]]:
            installed.append(self.book.push(part))
            if self.book.mark() >= self._prompt_ids:
                self.excluded = self._canonical.excluded()
        return installed

    def entries_read(self, count: int) -> tuple[np.ndarray, Entries]:
        """Returns which of the last `count` ids read are hypertokens, and the entries that they stood for."""
        first = self.book.mark() - count
        base_ids, lengths = self.book.logged(first)
        at = np.flatnonzero(lengths > 1)
        if not len(at):
            return at, NO_ENTRIES
        base_ids, lengths = base_ids[at], lengths[at].astype(np.int64)
        keys = entry_keys(base_ids, lengths)
        if self.start.tuned is not None:
            slots = self.book.ids[first:][at].astype(np.int64) - self.book.params.vocab_size
            own = self.start.entries.keys
            keys = [own[slot] if slot < len(own) else key for slot, key in zip(slots, keys, strict=True)]
        return at, Entries(base_ids, lengths, keys)

    def positions(self, count: int) -> np.ndarray:
        """Returns the position of the last base id of each of the last `count` ids read."""
        spans = self.book.logged(self.book.mark() - count)[1].astype(np.int64)
        return self.book.base_length - spans.sum() + np.cumsum(spans) - 1


class Zip2ZipState(DefaultModelState):
    """The requests of one worker, their codebooks, and the table of rows that they share.

    A request emits hypertokens only if its sender says that it can expand them (`mlx_zip.vllm.packs.HYPERTOKENS`).
    slots [requests, slots]: on the device, the place in the table of each entry that a request may choose, 0 for none.
    """

    supports_prompt_embeds = False

    def __init__(self, vllm_config: VllmConfig, model: Any, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        assert isinstance(model, Zip2ZipForCausalLM)
        self._model, self.layout = model, model.layout
        self._by_base = model.config.position_mode == "base_token_end"
        self._packs = WorkerPacks(model, vllm_config.model_config.model)
        width, slots = model.decoder.config.hidden_size, model.config.codebook_size
        self.rows = RowTable(len(model.sides), min(self.max_num_reqs * slots, MOST_ROWS), width, self.dtype, device)
        self._embeds = torch.zeros((self.max_num_tokens, width), dtype=self.dtype, device=device)
        self._positions = torch.zeros(self.max_num_tokens, dtype=torch.int64, device=device)
        self.slots = torch.zeros((self.max_num_reqs, slots), dtype=torch.int64, device=device)
        self.requests: dict[str, RunningRequest] = {}
        self._unwritten = _UnwrittenRows()
        self._changed: list[tuple[np.ndarray, ...]] = []  # not yet in `slots`: requests, slots, places
        self._places_read: list[int] = []  # of the step's hypertokens
        self._end_id = _end_id(vllm_config)

    # ---- requests come and go

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        name, params, broken = new_req_data.req_id, new_req_data.sampling_params, False
        asked = (params.extra_args if params is not None else None) or {}
        try:
            start = self._packs.find(asked.get(PACK))
        except (MlxZipError, TypeError, ValueError) as error:
            start, broken = self._packs.own, True
            log.error("request %s is ended: its pack cannot be used: %s", name, error)
        emits = _may_emit(params, asked)
        request = RunningRequest(req_index, new_req_data, start, emits, self._model.config.canonical)
        self.requests[name], request.broken = request, broken
        self.slots[req_index].zero_()
        self._install(request, np.arange(len(start.entries.keys)), start.entries, start.tuned)
        self._read_ids(name, request, request.ids[: new_req_data.num_computed_tokens])

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        request = self.requests.pop(req_id, None)
        if request is not None:
            self.rows.release(request.places[request.places > 0].tolist())

    # ---- ids are read

    def _read_ids(self, name: str, request: RunningRequest, ids: Sequence[int]) -> bool:
        """Reads ids; returns whether they could be read. One that cannot ends the request, and nothing else."""
        if request.broken:
            return False
        try:
            for new in request.read(ids):
                if len(new):
                    lengths = new.lengths.astype(np.int64)
                    self._install(request, new.slots, Entries(new.base_ids, lengths, entry_keys(new.base_ids, lengths)))
        except MlxZipError as error:
            self._end_broken(name, request, error)
        return not request.broken

    def _end_broken(self, name: str, request: RunningRequest, why: object) -> None:
        request.broken = True
        log.error("request %s is ended: %s", name, why)

    def _install(
        self,
        request: RunningRequest,
        slots: np.ndarray,
        entries: Entries,
        tuned: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Notes entries in slots [N] of a request. tuned: rows [N, D] per side, if the entries have such."""
        if not len(slots):
            return
        places, missing = self.rows.acquire(entries.keys)
        self._unwritten.add(places, missing, entries, tuned)
        for slot, place in zip(slots.tolist(), places, strict=True):
            if before := request.places[slot]:
                self.rows.release([int(before)])
            request.places[slot] = place
        if request.emits:
            at = np.unique(slots).astype(np.int64)
            self._changed.append((np.full(len(at), request.index), at, request.places[at]))

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        """Reads the step's ids into the codebooks, makes the rows of new entries, and returns the ids' embeddings."""
        inputs, padded = super().prepare_inputs(input_batch, req_states), input_batch.num_tokens_after_padding
        if any(name in self.requests for name in input_batch.req_ids):  # a dummy batch is of nobody's
            self.rows.release(self._places_read)
            at = self._read_step(input_batch)
            self._write_rows()
            self._embed(input_batch, at)
        inputs["inputs_embeds"] = self._embeds[:padded]
        if self._by_base:
            inputs["positions"] = self._positions[:padded]
        return inputs

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """Returns the buffers that vLLM's graphs read."""
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        inputs["inputs_embeds"] = self._embeds[:num_tokens]
        if self._by_base:
            inputs["positions"] = self._positions[:num_tokens]
        return inputs

    def _read_step(self, batch: InputBatch) -> list[np.ndarray]:
        """Reads the ids of a batch into the codebooks of their requests; returns which of the ids are hypertokens."""
        self._places_read, hyper, chosen = [], list[np.ndarray](), None
        positions = np.zeros(batch.num_tokens, np.int64)
        for row, name in enumerate(batch.req_ids):
            request, computed = self.requests.get(name), int(batch.num_computed_tokens_np[row])
            begin, end = batch.query_start_loc_np[row : row + 2].tolist()
            if request is None or request.broken:
                continue
            ids = request.ids[computed : computed + end - begin]
            if len(ids) < end - begin:  # chosen by the model, so the device has them
                chosen = batch.input_ids.tolist() if chosen is None else chosen
                ids = [*ids, *chosen[begin + len(ids) : end]]
            if request.book.mark() != computed:
                self._end_broken(
                    name, request, f"{computed} ids are computed, its codebook has read {request.book.mark()}"
                )
            elif self._read_ids(name, request, ids):
                at, entries = request.entries_read(len(ids))
                if len(at):
                    places, missing = self.rows.acquire(entries.keys)
                    self._unwritten.add(places, missing, entries)  # evicted and displaced since, in this very step
                    self._places_read += places
                    hyper.append(begin + at)
                if self._by_base:
                    positions[begin:end] = request.positions(len(ids))
        if self._by_base:
            self._positions[: batch.num_tokens] = torch.from_numpy(positions).to(self.device)
        return hyper

    def _write_rows(self) -> None:
        """Makes the rows that the table lacks, and tells the device which entries requests may choose."""
        for places, rows in self._unwritten.take_tuned():
            self.rows.write(ids_to_device(places, self.device), [one.to(self.device) for one in rows])
        for places, entries, lengths in self._unwritten.take():
            made = self._model.encode(ids_to_device(entries, self.device), ids_to_device(lengths, self.device))
            self.rows.write(ids_to_device(places, self.device), made)
        if self._changed:
            requests, slots, places = (
                ids_to_device(np.concatenate(part), self.device) for part in zip(*self._changed, strict=True)
            )
            self.slots[requests, slots] = places
            self._changed.clear()

    def _embed(self, batch: InputBatch, hyper: Sequence[np.ndarray]) -> None:
        """Writes the embeddings of a batch's ids. hyper: which of them are hypertokens."""
        if not get_pp_group().is_first_rank:
            return
        ids = batch.input_ids[: batch.num_tokens]
        low = torch.where(self.layout.is_hyper(ids), 0, ids)
        self._embeds[: len(ids)] = self._model.embed_input_ids(low)
        if hyper:
            at = ids_to_device(np.concatenate(hyper), self.device)
            self._embeds[at] = self.rows.tensors[0][ids_to_device(np.array(self._places_read), self.device)]

    # ---- ids are chosen

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        return HyperSampler(sampler, self), None

    def add_hyper_logits(self, logits: torch.Tensor, batch: InputBatch) -> None:
        """Adds the logits of hypertokens to logits [B, W] of a batch, in which only base ids can be chosen yet."""
        running = [self.requests.get(name) for name in batch.req_ids]
        most = max((len(one.book) for one in running if one is not None and one.emits), default=0)
        if most:
            slots = self.slots[batch.idx_mapping, :most]
            first = self.layout.vocab_size
            logits[:, first : first + most] = torch.where(slots > 0, self._row_logits(slots), -torch.inf)
        if any(one is not None and one.excluded for one in running):
            excluded = [() if one is None else one.excluded for one in running]
            logits.copy_(exclude_ids(logits, logits.float().logsumexp(1), excluded, self._end_id))
        for row, one in enumerate(running):
            if one is not None and one.broken:
                logits[row] = -torch.inf
                logits[row, self._end_id] = 0.0

    def _row_logits(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the products [B, C] of each request's output with the rows at the places `slots` [B, C].

        Few rows are gathered; of many, those of all places are multiplied, which entries of several requests share.
        """
        h, table = self._model.outputs, self.rows.tensors[-1]
        assert h is not None
        if slots.numel() <= self.rows.used_places:
            return torch.einsum("bd,bcd->bc", h, table[slots])
        return (h @ table[: self.rows.used_places].T).gather(1, slots)


class HyperSampler:
    """vLLM's sampler, which sees the logits of hypertokens too."""

    def __init__(self, sampler: Any, state: Zip2ZipState) -> None:
        self._sampler, self._state = sampler, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> Any:
        self._state.add_hyper_logits(logits, input_batch)
        return self._sampler(logits, input_batch)


class _UnwrittenRows:
    """Places of the table whose rows are still to be made or copied; the last row that a place is given counts."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[np.ndarray, int]] = {}
        self._tuned: list[tuple[np.ndarray, list[torch.Tensor]]] = []

    def add(
        self,
        places: Sequence[int],
        missing: Sequence[int],
        entries: Entries,
        tuned: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Notes which of some entries, at these places, have no row yet. tuned: their rows [N, D] per side, if any."""
        if tuned is not None and missing:
            self._tuned.append((np.array(places)[missing], [rows[list(missing)] for rows in tuned]))
        for index in missing:
            if tuned is not None:
                self._entries.pop(places[index], None)
                continue
            self._entries[places[index]] = entries.base_ids[index], int(entries.lengths[index])

    def take_tuned(self) -> list[tuple[np.ndarray, list[torch.Tensor]]]:
        """Returns places [N] and tuned rows [N, D] per side, and forgets them."""
        found, self._tuned = self._tuned, []
        return found

    def take(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Returns places [N], entries [N, S] and lengths [N] for each pass of the encoders, and forgets them."""
        found, self._entries = list(self._entries.items()), {}
        return [
            (
                np.array([place for place, _ in part]),
                np.array([entry for _, (entry, _) in part]),
                np.array([length for _, (_, length) in part]),
            )
            for part in (found[begin : begin + ENTRIES_PER_PASS] for begin in range(0, len(found), ENTRIES_PER_PASS))
        ]


def _may_emit(params: SamplingParams | None, asked: Mapping[str, Any]) -> bool:
    """Returns whether a request may choose hypertokens: its sender can expand them, and no part of vLLM would trip."""
    if params is None or not asked.get(HYPERTOKENS):
        return False
    return params.structured_outputs is None and params.prompt_logprobs is None


def _end_id(config: VllmConfig) -> int:
    """Returns the id that ends a request whose ids cannot be read."""
    ends = getattr(config.model_config.hf_config, "eos_token_id", None)
    return int(ends[0] if isinstance(ends, list) else ends or 0)
