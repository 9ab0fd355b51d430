"""`open_engine`: loads a model by its name into an engine on MLX. `MlxEngine`: runs a model in a thread of its own.

MLX's streams belong to threads, so no array leaves the engine's thread. Other threads exchange Python data with it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from mlx_zip.device import WiredMemory, measure_memory_bandwidth
from mlx_zip.engine.drafts import DRAFT_TOKENS, check_draft_options
from mlx_zip.engine.interface import Ceiling, Engine
from mlx_zip.engine.mlx.draft_model import load_draft_model
from mlx_zip.engine.mlx.group import Reading
from mlx_zip.engine.mlx.scoring import score_in_parts
from mlx_zip.engine.mlx.served import PREFILL_STEP_SIZE, Served
from mlx_zip.engine.options import KEEP_WIRED_S, RunOptions, ServeOptions
from mlx_zip.engine.request import Request
from mlx_zip.engine.scored import Compressed, Scored
from mlx_zip.engine.sessions.mlx_caches import open_session_store
from mlx_zip.engine.sessions.store import SessionOptions, SessionStore
from mlx_zip.engine.threaded import Load, ThreadedEngine
from mlx_zip.models.decoder import Positions
from mlx_zip.models.loading import load, weight_bytes_per_step
from mlx_zip.models.machines import Group
from mlx_zip.models.rows.fingerprints import named_arrays
from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.models.zip_model import Model

__all__ = ["DEFAULT_SESSIONS", "MlxEngine", "ServeOptions", "open_engine"]
DEFAULT_SESSIONS = SessionOptions()
_LARGEST = 0.9  # share of the memory that can be wired; a model that takes more causes a warning, as in mlx-lm
log = logging.getLogger(__name__)


def open_engine(
    model_name: str | Path,
    *,
    adapter_path: str | None = None,
    pack: Any = None,
    canonical: bool | None = None,
    codebook_size: int | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    draft: str = "off",
    draft_model: str | Path | None = None,
    num_draft_tokens: int = DRAFT_TOKENS,
    draft_exact: bool = False,
    max_running: int = 8,
    max_waiting: int = 64,
    max_prompt_tokens: int | None = None,
    max_kv_bytes: int | None = None,
    prefill_step_size: int | None = None,
    keep_wired_s: float = KEEP_WIRED_S,
    sessions: SessionOptions | None = DEFAULT_SESSIONS,
    row_cache: RowStore | None = None,
    group: Group | None = None,
    make: Callable[..., MlxEngine] | None = None,
) -> MlxEngine:
    """Loads a model and returns an engine that serves it. Raises what `mlx_zip.load` raises.

    Options up to `trust_remote_code` are those of `mlx_zip.load`. max_kv_size, kv_bits, kv_group_size,
    quantized_kv_start, draft, num_draft_tokens, draft_exact: see `RunOptions`. max_running, max_waiting,
    max_prompt_tokens, max_kv_bytes, keep_wired_s: see `ServeOptions`. prefill_step_size: prompt ids that are read
    between two steps; None for 512, or 2048 if only one request runs and none waits. draft_model: a model of the same
    vocabulary (folder, hub id or bundled model), plain or with hypertokens, that proposes ids, also if `draft` is
    "off". sessions: options of the session store, None to keep no sessions. row_cache: where encoded hyper rows are
    kept between requests, None for a new store. group, make: set only by `open_split_engine`, for a model on several
    machines.
    """
    check_draft_options(draft, num_draft_tokens)

    def load_model() -> tuple[Any, ...]:
        loaded = load(
            model_name,
            adapter_path=adapter_path,
            pack=pack,
            canonical=canonical,
            codebook_size=codebook_size,
            tokenizer_config=tokenizer_config,
            trust_remote_code=trust_remote_code,
            row_store=row_cache,
            group=group,
        )
        if draft_model is None:
            return loaded
        return *loaded, load_draft_model(draft_model, loaded[1], trust_remote_code)

    run = RunOptions(
        kv_bits,
        kv_group_size,
        quantized_kv_start,
        max_kv_size=max_kv_size,
        draft=draft,
        num_draft_tokens=num_draft_tokens,
        draft_exact=draft_exact,
    )
    if prefill_step_size is None:
        run = replace(run, alone_step_size=PREFILL_STEP_SIZE)
    else:
        run = replace(run, prefill_step_size=prefill_step_size)
    options = ServeOptions(max_running, max_waiting, max_prompt_tokens, max_kv_bytes, run, keep_wired_s)
    make = make or MlxEngine
    if sessions is None:
        return make(load_model, str(model_name), options)
    named = replace(sessions, model_name=sessions.model_name or str(model_name))

    def make_store(served: Served) -> SessionStore:
        return open_session_store(served.model, served.tokenizer, named, served.options.max_kv_size)

    return make(load_model, str(model_name), options, make_store)


class MlxEngine(ThreadedEngine):
    """An engine on MLX. load: returns model, tokenizer and, if any, draft model. make_store: see `ThreadedEngine`."""

    _wired: WiredMemory | None = None  # created in the engine's thread

    def _make_served(self, load: Load, name: str) -> Served:
        model, self.tokenizer, *draft_model = load()
        streams = [generation_stream, mx.default_stream(mx.default_device())]
        self._wired = WiredMemory(self._options.keep_wired_s, streams)
        self._wired.wire()
        served = Served(model, self.tokenizer, self._options.run, *draft_model)
        _warn_if_large(name, served.weight_bytes)
        return served

    def _make_reading(self, served: Served, request: Request) -> Reading:
        return Reading(served, request)

    def _score_in_parts(self, served: Served, row: Compressed, top: int) -> Iterator[Scored]:
        self._prepare_device()
        return score_in_parts(served.model, row, top, self._options.run.prefill_step_size)

    def _max_kv_bytes(self, served: Any) -> int | None:
        return _half_of_device_memory() if self._options.max_kv_bytes is None else self._options.max_kv_bytes

    def _memory_figures(self) -> dict[str, int]:
        return {"memory_bytes": mx.get_active_memory(), "peak_memory_bytes": mx.get_peak_memory()}

    def _prepare_device(self) -> None:
        if self._wired is not None:
            self._wired.wire()

    def _free_when_idle(self) -> float | None:
        return None if self._wired is None else self._wired.unwire_if_idle()

    def unwire_idle_memory(self) -> bool:
        return self._inbox.ask(self._unwire_idle_memory)

    def _unwire_idle_memory(self) -> bool:
        if self._scheduler.busy or self._wired is None:
            return False
        self._wired.unwire()
        return True

    def _free_thread_resources(self) -> None:
        if self._wired is not None:
            self._wired.unwire()
        mx.clear_streams()

    def without_hypertokens(self, name: str) -> Engine:
        served, options = self._inbox.ask(lambda: self._scheduler.served), self._options
        if not served.hyper or served.machines is not None:
            return super().without_hypertokens(name)
        plain = WithoutHypertokens(served.model)
        if options.run.draft == "head":  # the head belongs to the model with hypertokens
            options = replace(options, run=replace(options.run, draft="off"))
        draft_model = () if served.draft_model is None else (served.draft_model.model,)
        return MlxEngine(lambda: (plain, self.tokenizer, *draft_model), name, options)

    def ceiling(self) -> Ceiling | None:
        served = self._inbox.ask(lambda: self._scheduler.served)
        return _measured_ceiling(served.model) if served.machines is None else None


class WithoutHypertokens(nn.Module):
    """The decoder of a model with hypertokens: `model(ids, cache=cache) -> logits` as in mlx-lm, over base ids only.

    The weights are the model's own arrays, not copies. With LongRoPE, the context ends where the long factors begin,
    because keys in a plain KV cache cannot be computed again.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.layers = model, model.model.layers
        config = model.args.config
        limits = [config.get("max_position_embeddings"), model.traits.long_context]
        context = min((limit for limit in limits if limit is not None), default=None)
        sizes = {"max_position_embeddings": context, "vocab_size": model.layout.vocab_size}
        self.args = SimpleNamespace(**{**config, **sizes})

    @property
    def fingerprint(self) -> str:
        """A fingerprint that differs from that of the model with hypertokens."""
        return f"{self.model.fingerprint} base ids only"

    def make_cache(self) -> list[Any]:
        """Returns the cache of a new request: one KV cache per layer."""
        return self.model.make_cache()[:-1]

    def __call__(self, ids: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Returns logits [B, L, V] for base ids [B, L]. cache: from `make_cache`, updated in place."""
        cache, model = self.make_cache() if cache is None else cache, self.model
        h = model.scale_embeddings(model.model.embed_tokens(ids))
        h = model.run_layers(h, cache, Positions(start=cache[0].offset))
        for other in cache[1:]:  # offsets of a batch are lazy arrays; unread ones would grow into a long chain of sums
            other.offset = cache[0].offset
        return model.base_logits(h)[..., : model.layout.vocab_size]


def _warn_if_large(name: str, weight_bytes: int) -> None:
    limit = mx.device_info().get("max_recommended_working_set_size")
    if isinstance(limit, int) and weight_bytes > _LARGEST * limit:
        log.warning(
            "%s takes %d MB of the %d MB that this Mac can keep ready for its GPU: it may be slow",
            name,
            weight_bytes >> 20,
            limit >> 20,
        )


def _half_of_device_memory() -> int | None:
    """Returns half of the bytes of the device's memory, None if MLX does not know them."""
    size = mx.device_info().get("memory_size")
    return None if size is None else int(size) // 2


# ---- upper bound on steps per second: the memory's bandwidth divided by the bytes that a step reads

_LIMIT_S = 0.5  # no further measurement of the bandwidth begins after this time
_lock = threading.Lock()
_bandwidths: dict[str, float] = {}  # device -> bytes per second, measured once in this process


def _measured_ceiling(model: Any) -> Ceiling:
    """Returns a model's `Ceiling` on this machine. The first call measures the bandwidth for up to a second."""
    if isinstance(model, WithoutHypertokens):
        model = model.model
    read, found = weight_bytes_per_step(dict(named_arrays(model.parameters()))), _kept_memory_bandwidth()
    return Ceiling(found / read, found, read)


def _kept_memory_bandwidth() -> float:
    """Returns the memory bandwidth in bytes per second. The first call measures it in a thread of its own."""
    device = str(mx.default_device())
    with _lock:
        if device not in _bandwidths:
            thread = threading.Thread(target=_measure_bandwidth, args=(device,), name="mlx_zip-bandwidth")
            thread.start()
            thread.join()
        return _bandwidths[device]


def _measure_bandwidth(device: str) -> None:
    """Stores the bandwidth in `_bandwidths`; then frees the memory used and the thread's streams."""
    try:
        _bandwidths[device] = measure_memory_bandwidth(_LIMIT_S)
    finally:
        mx.clear_cache()
        mx.clear_streams()
