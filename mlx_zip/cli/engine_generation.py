"""One answer of an engine as the responses that `stream_generate` gives; for `mlx_zip generate` on PyTorch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlx_zip.engine import Emitted, Engine, Failed, Finished, Started, Submission, events
from mlx_zip.response import GenerationResponse
from mlx_zip.text.stream import Piece, TextStream


def answer(
    engine: Engine,
    base_ids: Sequence[int],
    sampling: Mapping[str, Any],
    pack: Any,
    max_tokens: int,
    stop: str | Sequence[str] | None,
) -> Iterator[GenerationResponse]:
    """Yields the answer to a prompt of base ids, id by id; a last response without text says why the engine ended.

    sampling, pack, max_tokens: as in `Submission`. stop: texts that end the answer. Raises the request's error, and
    what `Engine.submit` raises.
    """
    ends = frozenset(engine.tokenizer.eos_token_ids)
    submission = Submission(base_ids, max_tokens, ends, sampling, pack=pack, keep=False)
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    text = TextStream(engine.tokenizer, None if max_tokens == -1 else max_tokens, stops)
    counters = _Counts(engine)
    for event in events(engine, submission):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Started):
            counters.begin(event)
        elif isinstance(event, Emitted):
            yield counters.response(event.id, piece := text.feed(event.base_ids))
            if piece.finish_reason is not None:
                return
        elif isinstance(event, Finished):  # at the end of the context
            yield counters.response(counters.last, text.finish("length"), step=False)


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
