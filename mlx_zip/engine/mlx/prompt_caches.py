"""Prompt caches: `CacheTurn`, one request's use of a caller's cache; `Notes` on what a cache has read; cache files.

With notes, only the new part of a conversation has to be read. The notes on a plain model's cache hold the cache's ids,
and the answers that were generated with the cache. (For a zip2zip model, the codebook in the cache logs the ids, and
the `ZipState` keeps the answers, also in copies of the cache.)

Notes are kept in a dictionary outside the cache, because a cache is a list of mlx-lm's own objects: these have no place
for notes, and mlx-lm's functions that save, load, trim and count a cache's entries would not know an entry with notes.
The dictionary has weak references to caches, so notes live exactly as long as their cache: they never keep its keys and
values in memory, and never pass to a later cache. Lists cannot be weakly referenced, so the key is the cache's last
entry. A cache without notes, for example a copy or a cache loaded from a file, still works, but a plain model then
reads the whole conversation again, and past answers are tokenized like any other text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from mlx_lm.models.cache import QuantizedKVCache, can_trim_prompt_cache, load_prompt_cache, trim_prompt_cache

from mlx_zip.codec import compress_next
from mlx_zip.codec.ids import as_ids, common_prefix_length
from mlx_zip.engine.mlx.served import Served
from mlx_zip.engine.submissions import check_base_ids
from mlx_zip.errors import GenerationError, MlxZipError
from mlx_zip.models.batching import flatten_cache_lists
from mlx_zip.models.rows.zip_state import find_zip_state
from mlx_zip.text.prompts import as_chat, encode_prompt


@dataclass
class Notes:
    """Notes on a cache.

    ids: all base ids that a plain model's cache holds. answers: for a plain model's cache, the base ids of each answer
    as they were emitted, by the answer's text. reader: object that identifies the request that used the cache last,
    None before the first request.
    """

    ids: list[int] = field(default_factory=list)
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reader: object = None


CANNOT_TRIM = (
    "the conversation differs from what the cache holds, and this model's cache cannot be trimmed: begin with a new "
    "cache"
)
_NOTES: WeakKeyDictionary[Any, Notes] = WeakKeyDictionary()  # the key is the cache's last entry


class CacheTurn:
    """One request's use of a new or used prompt cache: what the cache keeps, and what is read of the prompt.

    base_ids: base ids of the prompt that are to be read. kept_ids: number of ids that the cache keeps. kept_tokens:
    number of base tokens of these ids. cached_tokens: number of base tokens of a conversation that the cache already
    holds. Raises `GenerationError` if the prompt is invalid, or the cache must be trimmed but cannot be trimmed.
    """

    def __init__(self, tokenizer: Any, prompt: Any, cache: list[Any]) -> None:
        self._tokenizer, self._cache, chat = tokenizer, cache, as_chat(prompt)
        self._notes = notes_on(cache)
        self._reader = self._notes.reader  # `Notes.reader` of the last request; from `begin` on, of this request
        self._prefill = chat is not None and chat.prefill is not None  # whether the prompt has the answer's beginning
        state, begun, self._held = find_zip_state(cache), is_cache_used(cache), count_cached_ids(cache)
        self.kept_ids, self.kept_tokens = self._held, self._held if state is None else state.books[0].base_length
        base_ids = encode_prompt(tokenizer, prompt, begun, answers_in_cache(cache) if chat else None)
        self.cached_tokens = 0
        if chat is not None and begun:
            self.kept_ids, self.kept_tokens = reusable_prefix(cache, base_ids)
            base_ids, self.cached_tokens = base_ids[self.kept_tokens :], self.kept_tokens
        self.base_ids = base_ids
        check_can_trim(cache, self.kept_ids)

    def begin(self) -> None:
        """Trims the cache to `kept_ids` ids: those that come before what is still to be read.

        Raises `GenerationError`, leaving the cache unchanged, if the cache cannot be trimmed, or was used since this
        object was made.
        """
        if count_cached_ids(self._cache) != self._held or self._notes.reader is not self._reader:
            raise GenerationError("the prompt cache was used since stream_generate was called: call it again")
        trim_cache_to(self._cache, self.kept_ids)
        self._reader = self._notes.reader = object()

    def check_cache_unchanged(self) -> None:
        """Raises `GenerationError` if another request has used the cache since this one began."""
        if self._notes.reader is not self._reader:
            raise GenerationError("another request used the prompt cache in the middle of this answer, which ends here")

    def end(self, read: Sequence[int], answer: Sequence[tuple[str, Sequence[int]]], finish_reason: str | None) -> None:
        """Notes what the cache has read, and the answer just generated, for the next turn of the conversation.

        read: ids of the prompt and of the answer. answer: text and base ids per emitted id.

        The answer is not noted if a stop string cut it, the caller stopped early, or the prompt contains its beginning,
        because the emitted ids are then not exactly those of the answer.
        """
        if self._notes.reader is not self._reader:
            return  # the cache holds another request's ids now
        attach_notes(self._cache, self._notes)
        if find_zip_state(self._cache) is None:  # with hypertokens, the codebook logs the ids
            self._notes.ids.extend(map(int, read))
        ids = [i for _, base_ids in answer for i in base_ids]
        ended = bool(ids) and ids[-1] in self._tokenizer.eos_token_ids
        if self._prefill or not (ended or finish_reason == "length"):
            return
        text, noted = "".join(text for text, _ in answer), tuple(ids[:-1] if ended else ids)
        answers_in_cache(self._cache).update({text: noted, text.strip(): noted})


def check_prompt(served: Served, cache: list[Any], turn: CacheTurn) -> None:
    """Raises `GenerationError` if the prompt has an invalid base id, or no position is left for an answer.

    Both the prompt and the ids that the cache holds take positions.
    """
    check_base_ids(turn.base_ids, served.vocab_size)
    context, ids, state = served.context, turn.base_ids, find_zip_state(cache)
    used = turn.kept_tokens if served.by_base else turn.kept_ids
    if context is None or used + len(ids) < context:
        return
    if state is not None and not served.by_base:
        book = state.books[0].copy()
        book.rewind(turn.kept_ids)
        ids = compress_next(book, as_ids(ids))
    if (used := used + len(ids)) >= context:
        raise GenerationError(
            f"the prompt (with what the cache holds) takes {used} positions, the model's context has {context} and "
            "generation needs at least one; shorten the prompt"
        )


def notes_on(cache: Sequence[Any]) -> Notes:
    """Returns the notes on a cache, which are empty at first."""
    return _NOTES.setdefault(cache[-1], Notes())


def attach_notes(cache: Sequence[Any], notes: Notes) -> None:
    """Attaches notes to a cache again, because KV quantization may have replaced the cache's last entry, their key."""
    _NOTES[cache[-1]] = notes


def count_cached_ids(cache: Sequence[Any]) -> int:
    """Returns how many ids a cache holds; a hypertoken counts as one.

    For a zip2zip model this is the length of the codebook's log of ids; for a plain model the largest `offset` of the
    cache's entries or, if no entry has an offset (mlx-lm's `ArraysCache`), the number of ids in the cache's notes.
    """
    state = find_zip_state(cache)
    if state is not None:
        return len(state.books[0].ids)
    offsets = [int(entry.offset) for entry in flatten_cache_lists(cache) if hasattr(entry, "offset")]
    return max(offsets, default=len(notes_on(cache).ids) if cache else 0)


def is_cache_used(cache: Sequence[Any]) -> bool:
    """Returns whether a cache holds anything, even if the number of its ids is unknown."""
    return count_cached_ids(cache) > 0 or any(
        not hasattr(entry, "offset") and not entry.empty() for entry in flatten_cache_lists(cache)
    )


def answers_in_cache(cache: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """Returns the answers that were generated with a cache, as a map from text to base ids that may be added to."""
    state = find_zip_state(cache)
    return notes_on(cache).answers if state is None else state.answers


def reusable_prefix(cache: Sequence[Any], base_ids: Sequence[int]) -> tuple[int, int]:
    """Returns how much of a cache a prompt of base ids can reuse, as (number of ids, number of base tokens).

    That is the longest common prefix of cache and prompt that ends where an id of the cache ends and leaves at least
    one base id of the prompt to be read. Raises `GenerationError` if the number of ids in the cache is unknown.
    """
    state, ids, count = find_zip_state(cache), notes_on(cache).ids, count_cached_ids(cache)
    if not count and is_cache_used(cache):
        raise GenerationError(CANNOT_TRIM)
    if state is not None:
        held, ends = state.books[0].base_ids(0), state.books[0].ends()
    else:  # no ids if the notes on a plain model's cache do not cover all that it holds
        held = np.array(ids if len(ids) == count else [], np.uint32)
        ends = np.arange(1, 1 + len(held))
    common = common_prefix_length(held.astype(np.int64), np.asarray(base_ids[:-1], dtype=np.int64))
    kept = int(np.searchsorted(ends, common, side="right"))
    return kept, int(ends[kept - 1]) if kept else 0


def check_can_trim(cache: Sequence[Any], ids: int) -> None:
    """Raises `GenerationError` if a cache holds more than `ids` ids and cannot be trimmed."""
    if count_cached_ids(cache) > ids and not can_trim_prompt_cache(list(cache)):
        raise GenerationError(CANNOT_TRIM)


def trim_cache_to(cache: list[Any], ids: int) -> None:
    """Trims a cache, KV caches and codebook together, to its first `ids` ids.

    Raises `GenerationError` if the cache cannot be trimmed.
    """
    check_can_trim(cache, ids)
    if surplus := count_cached_ids(cache) - ids:
        trim_prompt_cache(cache, surplus)
        del notes_on(cache).ids[ids:]


# ---- files, as `mlx_lm.cache_prompt` and `save_prompt_cache` write them


@dataclass(frozen=True)
class SavedCache:
    """A prompt cache from a file, and the file's facts about its model.

    cache: `prompt_cache` for `stream_generate`. model: name of the model that made the cache, None if unknown.
    tokenizer_config: arguments with which that model's tokenizer was loaded. positions: settings on which the keys in
    the cache depend, as written by `mlx_zip cache-prompt`; None if unknown.
    """

    file: str
    cache: list[Any]
    model: str | None
    tokenizer_config: dict[str, Any]
    positions: str | None = None

    def model_for(self, name: str | None) -> str:
        """Returns the name of the model to load. name: the name asked for, None for the name in the file.

        Raises `GenerationError` if the two names differ, or neither is known.
        """
        if not name and self.model is None:
            raise GenerationError(f"--prompt-cache-file {self.file} does not name its model; give it with --model")
        if name is not None and self.model is not None and name != self.model:
            raise GenerationError(f"--model {name} is not the model that made the prompt cache ({self.model})")
        return name or self.model or ""

    def check_positions(self, positions: str) -> None:
        """Raises `GenerationError` if the loaded model's `positions` differ from those that the cache was made with."""
        if self.positions not in (None, positions):
            raise GenerationError(
                f"--prompt-cache-file {self.file} was made with another position mode, rotary setting or attention "
                "window than config.json has now; make it again with mlx_zip cache-prompt"
            )

    def check_kv_bits(self, bits: int | None, group_size: int) -> None:
        """Raises `GenerationError` if a quantized cache has other bits or another group size. bits: None for any."""
        if bits is not None and isinstance(self.cache[0], QuantizedKVCache):
            saved = (self.cache[0].bits, self.cache[0].group_size)
            if saved != (bits, group_size):
                raise GenerationError(f"--kv-bits, --kv-group-size: the saved cache has {saved[0]} and {saved[1]}")


def read_prompt_cache(file: str) -> SavedCache:
    """Returns the prompt cache in a file. Raises `GenerationError` if the file is missing or not a prompt cache."""
    if not Path(file).is_file():
        raise GenerationError(f"--prompt-cache-file {file}: no such file")
    try:
        cache, metadata = load_prompt_cache(file, return_metadata=True)
        metadata = dict(metadata)
        tokenizer_config = json.loads(metadata.get("tokenizer_config", "{}"))
    except MlxZipError:
        raise
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise GenerationError(f"--prompt-cache-file {file} is not a saved prompt cache: {error}") from error
    return SavedCache(file, cache, metadata.get("model"), tokenizer_config, metadata.get("positions"))
