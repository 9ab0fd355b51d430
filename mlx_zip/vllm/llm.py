"""`LLM`: answers a list of prompts on vLLM."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlx_zip.engine.interface import Counts, Emitted, Failed, Finished, Submission
from mlx_zip.text.stream import TextStream
from mlx_zip.vllm.engine import open_vllm_engine


@dataclass(frozen=True)
class Answer:
    """A model's answer. counts: see `Counts`.

    base_ids: base ids of the text. reason: "stop" if the text ended, "length" if a limit was reached.
    """

    text: str
    base_ids: tuple[int, ...]
    reason: str
    counts: Counts


class LLM:
    """A model on vLLM for prompts that are all known in advance. Use it in a `with` statement, or call `close`."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Loads a model. Arguments and errors: see `mlx_zip.vllm.engine.open_vllm_engine`."""
        self.engine = open_vllm_engine(model, max_waiting=1 << 31, keep_sessions=False, **options)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Shuts the engine down, which frees the model."""
        self.engine.close()

    def generate(
        self, prompts: str | Sequence[str], max_tokens: int = 256, pack: Any = None, **sampling: Any
    ) -> list[Answer]:
        """Returns the answers to prompts, in the order of the prompts; vLLM runs the prompts together.

        max_tokens: maximum base tokens of an answer. pack: the pack that codebooks begin with, None for the model's
        own. sampling: fields of `engine.sampling.options.Sampling`, for example `temp`. Raises `GenerationError` if a
        request cannot be served, before any request is submitted to vLLM, and the error of the first request that
        fails.
        """
        tokenizer, arrived = self.engine.tokenizer, queue.SimpleQueue[tuple[int, Any]]()
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        ends = frozenset(tokenizer.eos_token_ids)
        asked = [Submission(tokenizer.encode(one), max_tokens, ends, sampling, pack=pack) for one in texts]
        for one in asked:
            self.engine.check(one)
        tickets = []
        try:
            for index, one in enumerate(asked):
                tickets.append(self.engine.submit(one, partial(_put_numbered, arrived, index)))
            return self._take_answers(arrived, len(texts))
        finally:
            for ticket in tickets:
                self.engine.cancel(ticket)

    def _take_answers(self, arrived: queue.SimpleQueue[tuple[int, Any]], count: int) -> list[Answer]:
        """Waits for the answers of `count` requests. arrived: pairs (number of the request, event)."""
        base_ids: list[list[int]] = [[] for _ in range(count)]
        answers = dict[int, Answer]()
        while len(answers) < count:
            index, event = arrived.get()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Emitted):
                base_ids[index] += event.base_ids
            elif isinstance(event, Finished):
                ids = tuple(base_ids[index])
                text = TextStream(self.engine.tokenizer).feed(ids, last=True).text
                answers[index] = Answer(text, ids, event.reason, event.counts)
        return [answers[index] for index in range(count)]


def _put_numbered(arrived: queue.SimpleQueue[tuple[int, Any]], index: int, event: Any) -> None:
    arrived.put((index, event))
