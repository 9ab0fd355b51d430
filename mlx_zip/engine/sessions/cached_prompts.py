"""Reads a prompt once and saves it as a session's file, for `mlx_zip generate --prompt-cache-file` and for engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlx_zip.codec.ids import as_ids
from mlx_zip.engine.interface import SessionInfo, Submission
from mlx_zip.engine.mlx.group import Reading
from mlx_zip.engine.mlx.prompt_caches import CacheTurn
from mlx_zip.engine.mlx.served import Served, check_kv, check_prompt
from mlx_zip.engine.options import RunOptions
from mlx_zip.engine.request import Request
from mlx_zip.engine.sampling.options import Sampling
from mlx_zip.engine.sessions.mlx_caches import open_session_store
from mlx_zip.engine.sessions.store import Checkout, SessionOptions, SessionStore
from mlx_zip.engine.submissions import Checked
from mlx_zip.models.rows.zip_state import find_zip_state
from mlx_zip.text.prompts import encode_prompt, encode_text, render_chat


def encode_shared_prompt(tokenizer: Any, text: str) -> list[int]:
    """Returns the base ids of a text with which several prompts begin.

    If the tokenizer has a chat template, the ids end inside the user's message, which each prompt continues.
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
    run: RunOptions,
    progress: Callable[[int], None] = lambda read: None,
) -> tuple[SessionStore, SessionInfo]:
    """Has the model read a prompt. Returns a store whose only session holds the prompt, and the session's info.

    options: options of the store. run: how the model is run. progress: called with the number of base tokens read so
    far. Raises `GenerationError` if the prompt or the KV quantization is invalid.
    """
    served = Served(model, tokenizer, run)
    cache = served.new_cache(None)
    check_kv(served, cache)
    check_prompt(served, cache, CacheTurn(tokenizer, base_ids, cache))
    state, submission = find_zip_state(cache), Submission(base_ids, max_tokens=1)
    request = Request(Checked(submission, as_ids(base_ids), Sampling(), None, "", 0), lambda event: None)
    request.begin(served, Checkout(cache, 0, 0, ""))
    reading, group = Reading(served, request), None
    progress(0)
    while group is None:
        _, group = reading.read(run.prefill_step_size)
        progress(request.held_ids if state is None else state.books[0].base_length)
    store = open_session_store(model, tokenizer, options)
    held = None if state is not None else base_ids
    store.put(cache, pack_key="", base_ids=held)
    return store, store.sessions()[0]
