"""`Request`: follows one sequence from its prompt to its text and counts; used by single and batched generation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import LogitsProcessor

from mlx_zip.codec import compress_next
from mlx_zip.errors import GenerationError
from mlx_zip.generation import cache_notes
from mlx_zip.generation.canonical import CanonicalDecoding
from mlx_zip.generation.response import GenerationResponse
from mlx_zip.generation.sampling import Sampling, make_processors
from mlx_zip.layout import is_zip
from mlx_zip.models.rows.zip_state import find_state
from mlx_zip.text.prompts import as_chat, encode_prompt
from mlx_zip.text.stream import TextStream


class Request:
    """One sequence from prompt to text: compresses the prompt, keeps the limits, counts what is emitted.

    prompt_ids: the compressed prompt, without what the cache holds already. max_steps: maximum number of emitted ids,
    -1 for no limit. base_limit: number of base ids. Raises `GenerationError` for a prompt or a limit that cannot be.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompt: Any,
        cache: list[Any],
        *,
        max_tokens: int,
        stop: str | Sequence[str] | None,
    ) -> None:
        if not isinstance(max_tokens, int | np.integer) or max_tokens == 0 or max_tokens < -1:
            rule = "must be an integer of at least 1, or -1 for no limit"
            raise GenerationError(f"max_tokens (--max-tokens) {rule}, got {max_tokens!r:.80}")
        state = find_state(cache)
        self._state, self._row = state, 0
        self._book = None if state is None else state.books[0]
        self._canonical = state is not None and model.config.canonical
        self._cache, chat = cache, as_chat(prompt)
        self._notes = cache_notes.notes_on(cache)
        self._reader = self._notes.reader  # of the last request that used the cache, later this one's own mark
        begun, self._held = cache_notes.is_begun(cache), cache_notes.held_ids(cache)
        used_ids, used_base = self._held, self._held if state is None else state.books[0].base_length
        base_ids = encode_prompt(tokenizer, prompt, begun, cache_notes.answers_in(cache) if chat else None)
        self.cached_tokens = 0
        if chat is not None and begun:
            used_ids, used_base = cache_notes.common_prefix(cache, base_ids)
            base_ids, self.cached_tokens = base_ids[used_base:], used_base
        cache_notes.check_trim(cache, used_ids)
        # _kept_ids: ids of the cache that the prompt follows; _prefill: whether the prompt begins the answer itself
        self._kept_ids, self._prefill = used_ids, chat is not None and chat.prefill is not None
        self.base_limit = _base_id_limit(model, tokenizer)
        _check_ids(base_ids, self.base_limit)
        self.prompt_tokens = len(base_ids)
        self.prompt_ids = self._compress(base_ids, used_ids)
        by_base = state is not None and model.config.position_mode == "base_token_end"
        used = used_base + len(base_ids) if by_base else used_ids + len(self.prompt_ids)
        room = _positions_left(model, used)
        tokens = math.inf if max_tokens == -1 else max_tokens
        limit = min(tokens, room) if by_base else tokens
        self.max_steps = -1 if (steps := min(tokens, room)) == math.inf else int(steps)
        self._text = TextStream(tokenizer, None if limit == math.inf else int(limit), _stops(stop))
        self.steps = self.hypertokens = self.bytes = 0

    def bind(self, cache: Sequence[Any], row: int) -> None:
        """Makes the request use row `row` of a batch's cache from now on."""
        self._state, self._row = find_state(cache), row
        self._book = None if self._state is None else self._state.books[row]  # it stays when other rows leave

    def _compress(self, base_ids: Sequence[int], kept: int) -> np.ndarray:
        """Returns base ids compressed, as a continuation of the first `kept` ids of the cache."""
        ids = np.asarray(base_ids, dtype=np.uint32)
        if self._book is None:
            return ids
        book = self._book  # with the request's own start entries, which may differ from the model's
        if kept < book.mark():
            book = book.copy()
            book.rewind(kept)
        return compress_next(book, ids)

    def take_cache(self) -> None:
        """Trims the cache to the ids that the prompt follows.

        Raises `GenerationError`, with the cache unchanged, if it cannot be trimmed, or was used since the
        request was made.
        """
        if cache_notes.held_ids(self._cache) != self._held or self._notes.reader is not self._reader:
            raise GenerationError("the prompt cache was used since stream_generate was called: call it again")
        cache_notes.trim_to(self._cache, self._kept_ids)
        self._reader = self._notes.reader = object()

    def check_cache(self) -> None:
        """Raises `GenerationError` if another request has used the cache since this one took it."""
        if self._notes.reader is not self._reader:
            raise GenerationError("another request used the prompt cache in the middle of this answer, which ends here")

    def processors(self, options: Sampling, others: Sequence[LogitsProcessor] = ()) -> list[LogitsProcessor]:
        """Returns the sequence's logits processors: penalties, then `others`, then canonical decoding if it is on."""
        chain = [*make_processors(options, self.base_limit, self._state, self._row), *others]
        if self._book is not None and self._canonical:
            chain.append(CanonicalDecoding(self._book))
        return chain

    def start(self) -> None:
        """Starts the clock and empties the records of what was emitted."""
        self._started_s, self._first_id_s = time.perf_counter(), 0.0
        self._emitted: list[int] = []
        self._answer: list[tuple[str, Sequence[int]]] = []  # per emitted id: its piece of text, and its base ids

    def note(self, tokenizer: Any, finish_reason: str | None) -> None:
        """Notes what the cache has read, and the answer just generated, for the next turn of the conversation.

        An answer is not noted if a stop string cut it, the caller left early, or the prompt began it, because then the
        emitted ids are not exactly those of the answer.
        """
        if self._notes.reader is not self._reader:
            return  # the cache holds another request's ids now
        cache_notes.keep_notes(self._cache, self._notes)
        if self._emitted:
            cache_notes.note_read(self._cache, [*self.prompt_ids.tolist(), *self._emitted])
        ids = [i for _, base_ids in self._answer for i in base_ids]
        ended = bool(ids) and ids[-1] in tokenizer.eos_token_ids
        if self._prefill or not (ended or finish_reason == "length"):
            return
        text = "".join(text for text, _ in self._answer)
        answer = tuple(ids[:-1] if ended else ids)
        cache_notes.answers_in(self._cache).update({text: answer, text.strip(): answer})

    def emit(self, token: int, logprobs: mx.array) -> GenerationResponse:
        """Counts the next emitted id and returns its response. logprobs [W]: what the id was chosen from."""
        now = time.perf_counter()
        self._first_id_s = self._first_id_s or now
        base_ids = self._expand(token)
        self.steps += 1
        self.hypertokens += len(base_ids) > 1
        piece = self._text.feed(base_ids, last=self.steps == self.max_steps)
        self._emitted.append(token)
        self._answer.append((piece.text, piece.base_ids))
        self.bytes += len(piece.text.encode("utf-8"))
        return GenerationResponse(
            text=piece.text,
            token=token,
            base_ids=piece.base_ids,
            logprobs=logprobs,
            prompt_tokens=self.prompt_tokens,
            prompt_ids=len(self.prompt_ids),
            prompt_tps=self.prompt_tokens / max(self._first_id_s - self._started_s, 1e-9),
            generation_tokens=self._text.base_tokens,
            steps=self.steps,
            hypertokens=self.hypertokens,
            generation_tps=self._text.base_tokens / max(time.perf_counter() - self._first_id_s, 1e-9),
            bytes=self.bytes,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=piece.finish_reason,
            cached_tokens=self.cached_tokens,
        )

    def _expand(self, token: int) -> Sequence[int]:
        """Returns the base ids of an emitted id."""
        return (token,) if self._book is None else self._book.base_ids_of(token)


def _stops(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """Returns stop strings as a tuple. Raises `GenerationError` for what is neither text nor a list."""
    if stop is None or isinstance(stop, str):
        return () if stop is None else (stop,)
    if not isinstance(stop, Iterable) or isinstance(stop, bytes):
        raise GenerationError(f"stop (--stop) must be text or a list of texts, got {stop!r:.80}")
    return tuple(stop)


def _base_id_limit(model: Any, tokenizer: Any) -> int:
    """Returns the number of base ids: a prompt's ids must be below it."""
    if is_zip(model):
        return model.layout.vocab_size
    return base_config(model).get("vocab_size", len(tokenizer))


def base_config(model: Any) -> Mapping[str, Any]:
    """Returns the decoder's config: config.json, or for a plain model the arguments that mlx-lm read from it."""
    return model.args.config if is_zip(model) else vars(model.args)


def _positions_left(model: Any, used: int) -> float:
    """Returns how many positions of the model's context are left after `used` ones, inf if the config has no limit.

    Raises `GenerationError` if none are left.
    """
    context = base_config(model).get("max_position_embeddings")  # None: the config does not say
    if context is None:
        return math.inf
    if used >= context:
        raise GenerationError(
            f"the prompt (with what the cache holds) takes {used} positions, the model's context has {context} and "
            "generation needs at least one; shorten the prompt"
        )
    return context - used


def _check_ids(base_ids: Sequence[int], limit: int) -> None:
    """Raises `GenerationError` for the first id that is not a base id, from 0 to limit - 1."""
    for at, base_id in enumerate(base_ids):
        if not 0 <= base_id < limit:
            raise GenerationError(f"prompt id {base_id} at index {at} is not a base id (0 to {limit - 1})")
