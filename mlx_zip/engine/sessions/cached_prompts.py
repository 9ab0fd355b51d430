"""Reads a prompt once and saves it as a session's file, for `mlx_zip generate --prompt-cache-file` and for engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from mlx_zip.engine.interface import SessionInfo
from mlx_zip.engine.sessions.mlx_caches import open_store
from mlx_zip.engine.sessions.store import SessionOptions, SessionStore
from mlx_zip.generation.decode import read_again
from mlx_zip.generation.generate import PREFILL_STEP_SIZE, bounded_cache, check_kv
from mlx_zip.generation.request import Request
from mlx_zip.models.rows.zip_state import ZipState, find_state
from mlx_zip.text.prompts import encode_prompt, encode_text, render_chat


@dataclass(frozen=True)
class KvOptions:
    """KV cache options as in mlx-lm. bits: None for none. start: ids from which on the cache is quantized.

    max_size: bound on a plain model's ids in the cache, None for none.
    """

    bits: int | None = None
    group_size: int = 64
    start: int = 5000
    max_size: int | None = None


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Returns the base ids of a prompt that others will follow.

    With a chat template they end inside the user's message, which the next prompt goes on with.
    """
    if not tokenizer.has_chat_template:
        return encode_prompt(tokenizer, text)
    message = {"role": "user", "content": text}
    return encode_text(tokenizer, render_chat(tokenizer, [message], continue_final_message=True))


def cache_prompt(
    model: Any,
    tokenizer: Any,
    base_ids: Sequence[int],
    options: SessionOptions,
    kv: KvOptions,
    progress: Callable[[int], None] = lambda read: None,
) -> tuple[SessionStore, SessionInfo]:
    """Has the model read a prompt, and returns a store that holds it as its only session, and what that session is.

    options: of the store. progress: called with the number of base tokens read so far. Raises `GenerationError` for a
    prompt or a quantization that cannot be.
    """
    cache = make_prompt_cache(model) if kv.max_size is None else bounded_cache(model, kv.max_size)
    check_kv(model, cache, kv.bits, kv.group_size, PREFILL_STEP_SIZE, kv.start)
    request = Request(model, tokenizer, base_ids, cache, max_tokens=1, stop=None)
    state = find_state(cache)
    progress(0)
    factors = read_again(model, cache, request.prompt_ids[None], PREFILL_STEP_SIZE) if state is not None else {}
    for begin in range(0, len(request.prompt_ids), PREFILL_STEP_SIZE):
        ids = request.prompt_ids[begin : begin + PREFILL_STEP_SIZE].astype(np.int32)
        model(mx.array(ids)[None], cache=cache, **factors)
        maybe_quantize_kv_cache(cache, quantized_kv_start=kv.start, kv_group_size=kv.group_size, kv_bits=kv.bits)
        mx.eval([entry.state for entry in cache if not isinstance(entry, ZipState)])
        progress(begin + len(ids) if state is None else state.books[0].base_length)
    store = open_store(model, tokenizer, options)
    held = None if state is not None else base_ids
    store.put(cache, pack_key="", base_ids=held)
    return store, store.sessions()[0]
