"""`CudaEngine`: serves requests with PyTorch on an NVIDIA GPU; on a CPU it is a slow reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from mlx_zip.codec.ids import Uint32s
from mlx_zip.cuda.batch import Batch
from mlx_zip.cuda.devices import (
    as_out_of_memory_error,
    find_device,
    free_gpu_bytes,
    make_gpu_current,
    measure_step_ceiling,
    peak_allocated_bytes,
    raise_if_memory_too_small,
)
from mlx_zip.cuda.group import CudaGroup, CudaReading
from mlx_zip.cuda.model import CudaModel, open_model
from mlx_zip.cuda.sampling import BaseTokenPenalties, RequestSampler
from mlx_zip.cuda.scorer import RowScorer
from mlx_zip.cuda.sequence import SequenceState
from mlx_zip.cuda.session_caches import CudaCaches
from mlx_zip.device import DEVICE_VARIABLE, device_in_environment, host_memory_bytes
from mlx_zip.engine.draft_sources import make_text_sources
from mlx_zip.engine.drafts import Drafter, check_draft_options
from mlx_zip.engine.interface import Ceiling, Engine
from mlx_zip.engine.options import RunOptions, ServeOptions
from mlx_zip.engine.parts import Served
from mlx_zip.engine.pass_costs import SAVE_EVERY_S, CostFile
from mlx_zip.engine.request import Request
from mlx_zip.engine.sampling.options import Sampling
from mlx_zip.engine.scored import Compressed, Scored
from mlx_zip.engine.sessions.store import SessionOptions, SessionStore
from mlx_zip.engine.submissions import ModelFacts
from mlx_zip.engine.threaded import ThreadedEngine
from mlx_zip.errors import GenerationError, ModelError
from mlx_zip.vocab.first_stage import tokenizer_fingerprint

DEFAULT_SESSIONS = SessionOptions()


class CudaEngine(ThreadedEngine):
    """An engine on PyTorch. load: returns model and tokenizer. Other arguments: see `ThreadedEngine`."""

    def _make_served(self, load: Callable[[], tuple[CudaModel, Any]], name: str) -> CudaServed:
        torch.set_grad_enabled(False)  # in this thread
        try:
            model, self.tokenizer = load()
            self._device = model.device
            make_gpu_current(model.device)  # in this thread too; another thread may have loaded the model
            return CudaServed(model, self.tokenizer, self._options)
        except torch.OutOfMemoryError as error:
            raise as_out_of_memory_error(error) from error

    def _make_reading(self, served: CudaServed, request: Request) -> CudaReading:
        return CudaReading(served.batch, served.group, request)

    def _score_in_parts(self, served: CudaServed, row: Compressed, top: int) -> Iterator[Scored]:
        return RowScorer(served.model).score_in_parts(row, top=top)

    def _max_kv_bytes(self, served: CudaServed) -> None:
        """Returns None: each request has its own fixed part of the KV caches, so requests do not compete for room."""

    def _memory_figures(self) -> dict[str, int]:
        now = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0
        return {"memory_bytes": now, "peak_memory_bytes": peak_allocated_bytes(self._device)}

    def ceiling(self) -> Ceiling | None:
        return self._inbox.ask(
            lambda: measure_step_ceiling(self._device, self._scheduler.served.model.step_weight_bytes)
        )

    def without_hypertokens(self, name: str) -> Engine:
        served: CudaServed = self._inbox.ask(lambda: self._scheduler.served)
        if not served.hyper:
            return super().without_hypertokens(name)
        plain = served.model.without_hypertokens()
        return CudaEngine(lambda: (plain, self.tokenizer), name, self._options)


def open_cuda_engine(
    model_name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | None = None,
    pack: Any = None,
    canonical: bool | None = None,
    codebook_size: int | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    max_running: int = 8,
    max_waiting: int = 64,
    max_prompt_tokens: int | None = None,
    max_kv_bytes: int | None = None,
    prefill_step_size: int | None = None,
    draft: str = "off",
    sessions: SessionOptions | None = DEFAULT_SESSIONS,
) -> CudaEngine:
    """Loads a model and returns an engine that serves it. Raises what `mlx_zip.cuda.model.open_model` raises.

    device: None for `device_from_environment()`. dtype: see `read_tensor_folder`. tokenizer_config: may hold
    `chat_template` only. max_kv_bytes: size of the KV caches of all requests together, each of which gets an equal
    part; None for 70% of a GPU's free memory or 25% of a CPU's memory. draft: see `RunOptions`. sessions: limits of the
    kept sessions, None to keep none. Other options: see `mlx_zip.engine.mlx.mlx_engine.open_engine`.
    """
    where = device_from_environment() if device is None else device

    def load() -> tuple[CudaModel, Any]:
        model = open_model(
            model_name,
            where,
            dtype,
            pack=pack,
            codebook_size=codebook_size,
            canonical=canonical,
            trust_remote_code=trust_remote_code,
            chat_template=(tokenizer_config or {}).get("chat_template"),
        )
        return model, model.tokenizer

    check_draft_options(draft)
    if draft == "head":
        raise GenerationError("draft (--draft head): only MLX has draft heads")
    run = RunOptions(draft=draft)
    run = run if prefill_step_size is None else replace(run, prefill_step_size=prefill_step_size)
    options = ServeOptions(max_running, max_waiting, max_prompt_tokens, max_kv_bytes, run)
    if sessions is None:
        return CudaEngine(load, str(model_name), options)
    named = replace(sessions, model_name=sessions.model_name or str(model_name))
    return CudaEngine(load, str(model_name), options, partial(make_session_store, options=named))


def make_session_store(served: CudaServed, options: SessionOptions) -> SessionStore:
    """Returns a new store of sessions for a model."""
    return SessionStore(CudaCaches(served.model, served.tokenizer, served.batch), options)


def device_from_environment(needs_card: bool = False) -> torch.device:
    """Returns the device to run on: MLX_ZIP_DEVICE ("cpu" or "gpu") if set, else a GPU, else the CPU.

    needs_card: True returns the CPU only if the variable is "cpu". Raises `ModelError` with the reason if no GPU can be
    used, `ConfigError` if the variable has another value.
    """
    asked = device_in_environment()
    try:
        return find_device("cpu" if asked == "cpu" else "cuda" if asked == "gpu" or needs_card else None)
    except ModelError as error:
        raise ModelError(f"{error} ({DEVICE_VARIABLE}=cpu computes on the CPU)") from error


# ---- the model that an engine serves; used in the engine's thread only

CARD_KV_SHARE = 0.7  # of a GPU's free memory, for the KV caches of all requests
HOST_KV_SHARE = 0.25  # of a CPU's memory; memory is taken only as ids fill the caches
MIN_REQUEST_IDS = 16  # ids that a request must have room for


class CudaServed(Served):
    """A loaded model and the batch whose rows are its requests.

    `mlx_zip.engine.parts.Served` documents the methods without a docstring; a `cache` is a sequence of the batch.
    Raises `ModelError` if there is no memory for the KV caches, and what the model raises if it cannot run.
    """

    def __init__(self, model: CudaModel, tokenizer: Any, options: ServeOptions) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options.run
        config, decoder = model.config, model.folder.decoder
        self.long_context = decoder.rope.long_from
        self.hyper = config is not None
        self.by_base = model.by_base
        self.canonical = config is not None and config.canonical
        self.vocab_size = model.layout.vocab_size
        self.kv_bytes_per_id = decoder.kv_bytes_per_id(model.dtype)
        trained: int | None = model.folder.config.get("max_position_embeddings")
        capacity = self._ids_per_request(options, trained)
        self.context = trained if self.by_base else min(capacity, trained or capacity)
        self.never_excluded = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
        self.batch = Batch(model, options.max_running, capacity)
        ahead = model.device.type == "cuda" if self.options.ahead is None else self.options.ahead
        pad_id = 0 if config is None else config.pad_id
        self.group = CudaGroup(self.batch, pad_id, ahead)
        self._take_warm_up_step()

    def _ids_per_request(self, options: ServeOptions, context: int | None) -> int:
        """Returns how many ids each request has room for. Raises `ModelError` if the number is too small."""
        free, most = free_gpu_bytes(self.model.device), options.max_running
        room = int(HOST_KV_SHARE * host_memory_bytes() if free is None else CARD_KV_SHARE * free)
        room = room if options.max_kv_bytes is None else options.max_kv_bytes
        capacity = room // (most * self.kv_bytes_per_id)
        if capacity < MIN_REQUEST_IDS:
            needed = MIN_REQUEST_IDS * most * self.kv_bytes_per_id
            raise ModelError(f"KV caches of {most} requests: {needed} bytes needed at least, there is room for {room}")
        capacity = capacity if context is None else min(capacity, context)
        raise_if_memory_too_small("KV caches", most * capacity * self.kv_bytes_per_id, self.model.device)
        return capacity

    def _take_warm_up_step(self) -> None:
        """Takes a step, so that loading fails if the model cannot run, and kernels are ready for the first request.

        On a GPU this takes a step with 1, 2, 4, ... requests: each number has its own kernels and CUDA graphs.
        """
        batch = self.batch
        for count in range(1, 1 + (batch.max_sequences if self.model.device.type == "cuda" else 1)):
            # different ids, so that each request installs a new entry
            batch.read(batch.add(), [(self.vocab_size // 2 + count) % self.vocab_size])
            if count == batch.max_sequences or not count & (count - 1):
                batch.choose_ids(lambda head: head.best)  # with logits
                batch.choose_ids()
                batch.start_body()
                batch.update_codebooks(batch.wait_for_ids())
        while len(batch):
            batch.remove(0)

    def make_facts(self) -> ModelFacts:
        model, config = self.model, self.model.config
        return ModelFacts(
            vocab_size=self.vocab_size,
            width=model.layout.width,
            context=self.context,
            by_base=self.by_base,
            params=None if config is None else model.default_start.params,
            model=model.fingerprint,
            tokenizer=tokenizer_fingerprint(self.tokenizer),
            kv_bytes_per_id=self.kv_bytes_per_id,
            sides_are_one=model.sides == 1,
            row_width=model.width,
        )

    # ---- what the engine's thread asks for

    def new_cache(self, start: Any) -> SequenceState:
        return self.batch.sequences[self.batch.add(start)]

    def state_of(self, cache: SequenceState) -> SequenceState:
        """Returns the sequence itself, which holds the codebook."""
        return cache

    def make_request_sampler(self, options: Sampling, state: torch.Tensor | None) -> RequestSampler:
        return RequestSampler(options, self.never_excluded, self.model.device, state)

    def make_penalties(self, options: Sampling, state: SequenceState) -> list[Any]:
        return [BaseTokenPenalties(options, state, 0)] if options.has_penalties else []

    def make_drafter(self, text: Callable[[], Sequence[int]], prediction: Sequence[int] | Uint32s) -> Drafter | None:
        if self.options.draft == "off":
            return None
        self._cost_file.save(SAVE_EVERY_S)
        costs = self._cost_file.costs if self.options.draft == "auto" else None
        return Drafter(make_text_sources(text(), prediction), costs)

    @cached_property
    def _cost_file(self) -> CostFile:
        device = self.model.device
        chip = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
        return CostFile(
            {
                "model": f"{self.model.fingerprint} {self.model.dtype}",
                "device": device.type,
                "chip": chip,
                "torch": torch.__version__,
            }
        )

    def free(self, cache: SequenceState) -> None:
        self.batch.release(cache)

    def settle(self) -> None:
        """If drafts are on, writes the measured costs of passes to their file."""
        if self.options.draft != "off":
            self._cost_file.save()
