"""`Zip2ZipState`: a worker's state of each running request: its codebook, and the places of its entries' rows.

The ids of a sequence determine its codebook, so only ids are sent between processes. If a request resumes after
preemption, or its beginning is in the prefix cache, the worker replays the request's ids into a new codebook.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

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
from mlx_zip.cuda.hyper_rows import ENTRIES_PER_PASS, entry_keys
from mlx_zip.cuda.sampling import exclude_ids
from mlx_zip.cuda.transfers import ids_to_device, to_device
from mlx_zip.engine.sampling.exclusions import CanonicalIds
from mlx_zip.errors import CodecError, MlxZipError
from mlx_zip.packs.entries import pad_entries
from mlx_zip.vllm.packs import HYPERTOKENS, PACK, TELL_BROKEN, StartRows, WorkerPacks
from mlx_zip.vllm.rows import RowTable

log = logging.getLogger("mlx_zip")
MOST_ROWS = 32_768  # maximum initial places of the table of rows; the table grows if requests need more


class RunningRequest:
    """A running request. index: its index among vLLM's requests. ids: the ids known when the request was added.

    emits: whether the request may choose hypertokens; if not, its codebook only reads them. keeps_entries: whether the
    codebook never evicts. places: by slot of the codebook, the place of the entry's row in the table, 0 for none.
    excluded: ids that canonical decoding forbids next. broken: whether the request has failed, for example at an
    illegal id; then only an id that ends it can be chosen. tells_broken: whether that id is `broken_id`, else an end of
    text.
    """

    def __init__(self, index: int, data: NewRequestData, start: StartRows, emits: bool, canonical: bool) -> None:
        assert data.prefill_token_ids is not None
        self.index, self.ids, self.start, self.emits = index, data.prefill_token_ids, start, emits
        self._prompt_ids, self._first_id = data.prompt_len, start.params.vocab_size
        self.book, self.broken, self.tells_broken = Codebook(start.params), False, False
        self.keeps_entries = start.params.policy == "freeze"
        self.places = [0] * start.params.codebook_size
        self._canonical = CanonicalIds(self.book) if canonical and emits else None
        self.excluded: Sequence[int] = ()

    def read(self, ids: Sequence[int]) -> tuple[Sequence[int], list[bytes]]:
        """Reads ids into the codebook; returns slots and keys of the entries that they install. Raises `CodecError`."""
        if self._canonical is None:
            return self._push(ids[0] if len(ids) == 1 else ids)
        prompt = max(0, self._prompt_ids - self.book.mark())
        slots, keys = list[int](), list[bytes]()
        for part in ([ids[:prompt]] if prompt else []) + [[one] for one in ids[prompt:]]:
            more = self._push(part)
            slots += more[0]
            keys += more[1]
            if self.book.mark() >= self._prompt_ids:
                self.excluded = self._canonical.excluded()
        return slots, keys

    def _push(self, ids: int | Sequence[int]) -> tuple[Sequence[int], list[bytes]]:
        book = self.book
        known = len(book)
        new = book.push(ids)
        if self.keeps_entries:
            slots = range(known, len(book))
            return slots, [book.entry_words(slot) for slot in slots]
        return new.slots.tolist(), entry_keys(new.base_ids, new.lengths)

    def hypertokens(self, ids: Sequence[int]) -> list[int]:
        """Returns the indices of the hypertokens among `ids`."""
        first = self._first_id
        return [n for n, one in enumerate(ids) if one >= first]

    def places_of(self, ids: Sequence[int]) -> list[int]:
        """Returns the places of the rows of `ids`, which are hypertokens. Only if the codebook never evicts."""
        return [self.places[one - self._first_id] for one in ids]

    def keys_read(self, ids: Sequence[int], at: Sequence[int]) -> list[bytes]:
        """Returns keys of the entries that hypertokens stood for when read.

        ids: read last; at: hypertokens' indices.
        """
        own, slots = self.start.keys, [ids[n] - self._first_id for n in at]
        base_ids, lengths = self.book.logged_base_ids(self.book.mark() - len(ids))
        keys = entry_keys(base_ids[at], lengths[at])
        return [own[slot] if slot < len(own) else key for slot, key in zip(slots, keys, strict=True)]

    def read_up_to_bad(self, ids: Sequence[int], read: int) -> int:
        """Reads the ids before the first illegal one, after `read` has refused `ids`; returns how many were read.

        The model's results for these ids are right, and vLLM's prefix cache keeps them. read: number of ids that the
        codebook had read before.
        """
        self.book.rewind(read)
        for count, one in enumerate(ids):
            try:
                self.book.push(one)
            except CodecError:
                return count
        return len(ids)

    def positions(self, count: int) -> np.ndarray:
        """Returns the position of the last base id of each of the last `count` ids read."""
        if count == 1:
            return np.array([self.book.base_length - 1])
        return self.book.ends(self.book.mark() - count) - 1


class Zip2ZipState(DefaultModelState):
    """The requests of one worker, their codebooks, and the table of rows that the requests share.

    A request emits hypertokens only if its sender can expand them (`mlx_zip.vllm.packs.HYPERTOKENS`). model: our
    `Zip2ZipForCausalLM`. slots [requests, slots]: on the device, the place in the table of each entry that a request
    may choose, 0 for none.
    """

    supports_prompt_embeds = False

    def __init__(self, vllm_config: VllmConfig, model: Any, encoder_cache: Any, device: torch.device) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self._model, self.layout = model, model.layout
        self._by_base = model.config.by_base
        self._packs = WorkerPacks(model, vllm_config.model_config.model)
        width, slots = model.decoder.config.hidden_size, model.config.codebook_size
        self.rows = RowTable(len(model.sides), min(self.max_num_reqs * slots, MOST_ROWS), width, self.dtype, device)
        self._embeds = torch.zeros((self.max_num_tokens, width), dtype=self.dtype, device=device)
        self._positions = torch.zeros(self.max_num_tokens, dtype=torch.int64, device=device)
        self.slots = torch.zeros((self.max_num_reqs, slots), dtype=torch.int64, device=device)
        self.requests: dict[str, RunningRequest] = {}
        # by place, rows still to be written: the key of an entry to encode, or an entry's tuned rows [D] per side
        self._unwritten: dict[int, bytes | list[torch.Tensor]] = {}
        self._changed: dict[int, int] = {}  # values that are still to be written to `slots`, by flat index
        self._held: list[int] = []  # places that only the ids of the last step need
        self._end_id, self._broken_id = _end_id(vllm_config), model.hf_config.broken_id
        self._last_position = model.decoder.config.max_position_embeddings - 1

    # ---- requests come and go

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        name, params, start = new_req_data.req_id, new_req_data.sampling_params, self._packs.own
        asked, wrong = (params.extra_args if params is not None else None) or {}, None
        try:
            start = self._packs.find(asked.get(PACK))
        except (MlxZipError, TypeError, ValueError) as error:
            wrong = f"its pack cannot be used: {error}"
        emits = _may_emit(params, asked)
        request = RunningRequest(req_index, new_req_data, start, emits, self._model.config.canonical)
        self.requests[name], request.tells_broken = request, bool(asked.get(TELL_BROKEN))
        if wrong is not None:
            self._end_broken(name, request, wrong)
        self.slots[req_index].zero_()
        self._install(request, range(len(start.keys)), start.keys, start.tuned)
        self._read_ids(name, request, request.ids[: new_req_data.num_computed_tokens])

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        request = self.requests.pop(req_id, None)
        if request is not None:
            self.rows.release([place for place in request.places if place])

    # ---- ids are read

    def _read_ids(self, name: str, request: RunningRequest, ids: Sequence[int]) -> int:
        """Reads ids into a request's codebook; returns how many. An illegal id ends this request only."""
        if not ids:
            return 0
        read = request.book.mark()
        try:
            slots, keys = request.read(ids)
        except CodecError as error:
            self._end_broken(name, request, error)
            return request.read_up_to_bad(ids, read)
        if request.emits and slots:  # a request that emits no hypertokens needs rows only for those that it reads
            self._install(request, slots, keys)
        return len(ids)

    def _end_broken(self, name: str, request: RunningRequest, why: object) -> None:
        request.broken = True
        log.error("request %s is ended: %s", name, why)

    def _install(
        self,
        request: RunningRequest,
        slots: Sequence[int],
        keys: Sequence[bytes],
        tuned: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Installs entries in places of the table and in `slots` of a request. tuned: their rows [N, D] per side."""
        places, missing = self.rows.acquire(keys)
        self._note_missing(places, missing, keys, tuned)
        for slot, place in zip(slots, places, strict=True):
            if before := request.places[slot]:
                self.rows.release([before])
            request.places[slot] = place
        if request.emits:
            first = request.index * self.slots.shape[1]
            self._changed.update(zip([first + slot for slot in slots], places, strict=True))

    def _note_missing(
        self,
        places: Sequence[int],
        missing: Sequence[int],
        keys: Sequence[bytes],
        tuned: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Notes that the rows at indices `missing` must be written; replaces earlier notes for their places."""
        for index in missing:
            self._unwritten[places[index]] = keys[index] if tuned is None else [rows[index] for rows in tuned]

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        """Reads the step's ids into the codebooks, makes rows of new entries, and returns inputs with embeddings."""
        inputs, padded = super().prepare_inputs(input_batch, req_states), input_batch.num_tokens_after_padding
        if any(name in self.requests for name in input_batch.req_ids):  # a dummy batch has none of these requests
            self.rows.release(self._held)
            self._held = []
            at, places = self._read_step(input_batch)
            self._write_rows()
            self._embed(input_batch, at, places)
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

    def _read_step(self, batch: InputBatch) -> tuple[list[int], list[int]]:
        """Reads the ids of a batch into the codebooks of their requests.

        Returns the indices of the hypertokens among the batch's ids, and the places of their rows.
        """
        at, places, chosen = list[int](), list[int](), None
        positions = np.zeros(batch.num_tokens, np.int64)
        starts, computed = batch.query_start_loc_np.tolist(), batch.num_computed_tokens_np.tolist()
        for row, name in enumerate(batch.req_ids):
            request, begin, end = self.requests.get(name), starts[row], starts[row + 1]
            if request is None:
                continue
            ids = request.ids[computed[row] : computed[row] + end - begin]
            if len(ids) < end - begin:  # the rest was chosen by the model and is on the device
                chosen = batch.input_ids.tolist() if chosen is None else chosen
                ids = [*ids, *chosen[begin + len(ids) : end]]
            if request.book.mark() != computed[row]:
                if not request.broken:
                    self._end_broken(
                        name, request, f"vLLM has read {computed[row]} ids, the codebook {request.book.mark()}"
                    )
            elif count := self._read_ids(name, request, ids):
                ids = ids[:count]
                hyper = request.hypertokens(ids)
                if hyper:
                    at += [begin + n for n in hyper]
                    places += self._places_read(request, ids, hyper)
                if self._by_base:
                    positions[begin : begin + count] = request.positions(count)
                    last = positions[begin + count - 1]
                    if last > self._last_position and not request.broken:
                        self._end_broken(name, request, f"position {last} is beyond {self._last_position}")
        if self._by_base:
            self._positions[: len(positions)] = to_device(np.minimum(positions, self._last_position), self.device)
        return at, places

    def _places_read(self, request: RunningRequest, ids: Sequence[int], hyper: Sequence[int]) -> list[int]:
        """Returns the places of hypertokens' rows. ids: those just read. hyper: indices of hypertokens in `ids`."""
        if request.keeps_entries and request.emits and not request.broken:
            return request.places_of([ids[n] for n in hyper])
        keys = request.keys_read(ids, hyper)
        places, missing = self.rows.acquire(keys)  # a later id may have evicted an entry since
        self._note_missing(places, missing, keys)
        self._held += places
        return places

    def _write_rows(self) -> None:
        """Makes the rows that the table lacks, and writes to `slots` which entries requests may choose."""
        if tuned := {place: rows for place, rows in self._unwritten.items() if not isinstance(rows, bytes)}:
            sides = [torch.stack(rows).to(self.device) for rows in zip(*tuned.values(), strict=True)]
            self.rows.write(ids_to_device(np.array(list(tuned)), self.device), sides)
        untuned = [(place, key) for place, key in self._unwritten.items() if isinstance(key, bytes)]
        for begin in range(0, len(untuned), ENTRIES_PER_PASS):
            places, keys = zip(*untuned[begin : begin + ENTRIES_PER_PASS], strict=True)
            entries = [np.frombuffer(key, np.uint32) for key in keys]
            base_ids, lengths = pad_entries(entries, self._model.config.merge_size, self._model.config.pad_id)
            made = self._model.encode(ids_to_device(base_ids, self.device), ids_to_device(lengths, self.device))
            self.rows.write(ids_to_device(np.array(places), self.device), made)
        self._unwritten.clear()
        if self._changed:
            changes = np.array([list(self._changed), list(self._changed.values())])
            where, places = ids_to_device(changes, self.device)
            self.slots.view(-1).index_copy_(0, where, places)
            self._changed.clear()

    def _embed(self, batch: InputBatch, at: Sequence[int], places: Sequence[int]) -> None:
        """Writes the embeddings of a batch's ids. at, places: indices of hypertokens, and the places of their rows."""
        if not get_pp_group().is_first_rank:
            return
        ids = batch.input_ids[: batch.num_tokens]
        low = ids.clamp(max=self.layout.vocab_size - 1)  # a broken request may have any id
        self._embeds[: len(ids)] = self._model.embed_input_ids(low)
        if at:
            where, rows = ids_to_device(np.array([at, places]), self.device)
            self._embeds.index_copy_(0, where, self.rows.tensors[0].index_select(0, rows))

    # ---- ids are chosen

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        return HyperSampler(sampler, self), None

    def add_hyper_logits(self, logits: torch.Tensor, batch: InputBatch) -> None:
        """Writes hypertokens' logits into logits [B, W + 1], then sets excluded ids to -inf.

        A broken request keeps only the id that ends it.
        """
        most, excluded, broken = 0, list[Sequence[int]](), list[tuple[int, int]]()
        for row, name in enumerate(batch.req_ids):
            request = self.requests.get(name)
            if request is not None and request.emits:
                most = max(most, len(request.book))
            if request is not None and request.broken:
                broken.append((row, self._broken_id if request.tells_broken else self._end_id))
            excluded.append(() if request is None else request.excluded)
        if most:
            slots, first = self.slots[batch.idx_mapping, :most], self.layout.vocab_size
            logits[:, first : first + most] = self._row_logits(slots).masked_fill_(slots == 0, -torch.inf)
        exclude_ids(logits, excluded, self._broken_id)
        for row, end in broken:
            logits[row] = -torch.inf
            logits[row, end] = 0.0

    def _row_logits(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the products [B, C] of each request's output with the rows at the places `slots` [B, C].

        Gathers the rows if their number is under a third of the used places; else multiplies with all places and
        gathers the products.
        """
        h, table = self._model.outputs, self.rows.tensors[-1]
        assert h is not None
        if 3 * slots.numel() < self.rows.used_places:
            return torch.bmm(table[slots], h[:, :, None])[:, :, 0]
        return (h @ table[: self.rows.used_places].T).gather(1, slots)


class HyperSampler:
    """vLLM's sampler, called with logits that include those of hypertokens."""

    def __init__(self, sampler: Any, state: Zip2ZipState) -> None:
        self._sampler, self._state = sampler, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> Any:
        self._state.add_hyper_logits(logits, input_batch)
        return self._sampler(logits, input_batch)


def _may_emit(params: SamplingParams | None, asked: Mapping[str, Any]) -> bool:
    """Returns whether a request may choose hypertokens.

    The sender must be able to expand hypertokens, and ask neither for a grammar nor for log-probabilities of the
    prompt.
    """
    if params is None or asked.get(HYPERTOKENS) not in (True, 1):
        return False
    return params.structured_outputs is None and params.prompt_logprobs is None


def _end_id(config: VllmConfig) -> int:
    """Returns the end-of-text id, which ends a broken request whose sender does not know `broken_id`."""
    ends = getattr(config.model_config.hf_config, "eos_token_id", None)
    return int((ends or [0])[0] if isinstance(ends, list) else ends or 0)
