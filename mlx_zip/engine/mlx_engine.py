"""`open_engine`: an engine on MLX for a model by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mlx_zip.engine.engine_thread import MlxEngine
from mlx_zip.engine.options import KEEP_WIRED_S, RunOptions, ServeOptions
from mlx_zip.engine.served import Served
from mlx_zip.engine.sessions.mlx_caches import open_store
from mlx_zip.engine.sessions.store import SessionOptions, SessionStore
from mlx_zip.generate import PREFILL_STEP_SIZE
from mlx_zip.hyper import RowStore
from mlx_zip.loading import load
from mlx_zip.machines import Group

__all__ = ["DEFAULT_SESSIONS", "MlxEngine", "ServeOptions", "open_engine"]
DEFAULT_SESSIONS = SessionOptions()


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

    Options up to `trust_remote_code` are those of `mlx_zip.load`. kv_*, quantized_kv_start: those of `stream_generate`.
    max_*, keep_wired_s: see `ServeOptions`. prefill_step_size: ids of prompts that are read between two steps; None
    for 512, and 2048 while a request is alone. max_kv_size: as in `RunOptions`. sessions: bounds of the kept sessions,
    None to keep none. row_cache: where rows of hypertokens are kept. group, make: for `open_split_engine`, which takes
    a model on several machines.
    """

    def load_model() -> tuple[Any, Any]:
        return load(
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

    run = RunOptions(kv_bits, kv_group_size, quantized_kv_start, max_kv_size=max_kv_size)
    if prefill_step_size is None:
        run = replace(run, alone_step_size=PREFILL_STEP_SIZE)
    else:
        run = replace(run, prefill_step_size=prefill_step_size)
    options = ServeOptions(max_running, max_waiting, max_prompt_tokens, max_kv_bytes, run, keep_wired_s)
    make = make or MlxEngine
    if sessions is None:
        return make(load_model, str(model_name), options)
    named = replace(sessions, model_name=sessions.model_name or str(model_name))
    make_store = partial(_make_store, options=named)
    return make(load_model, str(model_name), options, make_store)


def _make_store(served: Served, options: SessionOptions) -> SessionStore:
    """Returns a new store of sessions for a model."""
    return open_store(served.model, served.tokenizer, options, served.options.max_kv_size)
