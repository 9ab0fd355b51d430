"""Answers of an engine as the responses that `stream_generate` and `stream_batch` give."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mlx_zip.engine.interface import Emitted, Engine, Event, Failed, Finished, Started, Submission
from mlx_zip.generation.response import GenerationResponse
from mlx_zip.text.stream import Piece, TextStream


def answer(
    engine: Engine,
    base_ids: Sequence[int],
    sampling: Mapping[str, Any],
    pack: Any,
    max_tokens: int,
    stop: str | Sequence[str] | None,
) -> Iterator[GenerationResponse]:
    """Yields the answer to one prompt of base ids; see `answers`."""
    return (one for _, one in answers(engine, [base_ids], [sampling], pack, max_tokens, stop))


def answers(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Mapping[str, Any]],
    pack: Any,
    max_tokens: int,
    stop: str | Sequence[str] | None,
) -> Iterator[tuple[int, GenerationResponse]]:
    """Yields the answers to prompts of base ids, id by id, with the index of the prompt, as the engine makes them.

    A last response without text says why the engine ended an answer. samplings: of each prompt. sampling, pack,
    max_tokens: as in `Submission`. stop: texts that end an answer. Raises a request's error, and what `Engine.submit`
    raises; the other answers are cancelled then.
    """
    ends = frozenset(engine.tokenizer.eos_token_ids)
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    arrived: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    running: dict[int, _Answer] = {}
    tickets = {}
    try:
        for at, (base_ids, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            submission = Submission(base_ids, max_tokens, ends, sampling, pack=pack, keep=False)
            running[at] = _Answer(engine, TextStream(engine.tokenizer, None if max_tokens == -1 else max_tokens, stops))
            tickets[at] = engine.submit(submission, partial(_put, arrived, at))
        while running:
            at, event = arrived.get()
            if at not in running:  # its text has ended, and the engine is told below
                continue
            if (response := running[at].take(event)) is not None:
                yield at, response
            if isinstance(event, Finished) or (response is not None and response.finish_reason is not None):
                engine.cancel(tickets.pop(at))
                del running[at]
    finally:
        for ticket in tickets.values():
            engine.cancel(ticket)


def _put(arrived: queue.SimpleQueue[tuple[int, Event]], at: int, event: Event) -> None:
    """Puts an event of the answer number `at` into the queue."""
    arrived.put((at, event))


class _Answer:
    """One answer that is being made."""

    def __init__(self, engine: Engine, text: TextStream) -> None:
        self._text, self._counts = text, _Counts(engine)

    def take(self, event: Event) -> GenerationResponse | None:
        """Returns the response that an event makes, None for none. Raises the error of a request that failed."""
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Started):
            self._counts.begin(event)
        elif isinstance(event, Emitted):
            return self._counts.response(event.id, self._text.feed(event.base_ids))
        elif isinstance(event, Finished):  # at the end of the context
            return self._counts.response(self._counts.last, self._text.finish("length"), step=False)
        return None


class _Counts:
    """Counts what an answer has emitted. last: the id that was emitted last."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begun_s, self._first_s = time.perf_counter(), 0.0
        self._prompt_tokens = self._prompt_ids = self._tokens = self._steps = self._hypertokens = self._bytes = 0
        self.last = 0

    def begin(self, started: Started) -> None:
        """Notes the prompt."""
        self._prompt_tokens, self._prompt_ids = started.prompt_tokens, started.prompt_ids

    def response(self, token: int, piece: Piece, step: bool = True) -> GenerationResponse:
        """Returns the response for an emitted id. step: whether the id is one of a step."""
        now = time.perf_counter()
        self._first_s, self.last = self._first_s or now, token
        self._steps += step
        self._hypertokens += step and token >= self._engine.info.vocab_size
        self._tokens += len(piece.base_ids)
        self._bytes += len(piece.text.encode("utf-8", "replace"))
        prompt_s, answer_s = self._first_s - self._begun_s, now - self._first_s
        return GenerationResponse(
            text=piece.text,
            token=token,
            base_ids=piece.base_ids,
            logprobs=None,
            prompt_tokens=self._prompt_tokens,
            prompt_ids=self._prompt_ids,
            prompt_tps=self._prompt_tokens / max(prompt_s, 1e-9),
            generation_tokens=self._tokens,
            steps=self._steps,
            hypertokens=self._hypertokens,
            generation_tps=self._tokens / answer_s if answer_s else 0.0,
            bytes=self._bytes,
            peak_memory=self._engine.figures().peak_memory_bytes / 1e9,
            finish_reason=piece.finish_reason,
        )
