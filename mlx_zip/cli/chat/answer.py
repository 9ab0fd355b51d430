"""One answer: a request to an engine, whose events become text as they arrive."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_zip.cli.chat.vocabulary import Use
from mlx_zip.engine import Counted, Counts, Emitted, Engine, Event, Failed, Finished, Progress, Started, Submission
from mlx_zip.text.detokenizer import REPLACEMENT
from mlx_zip.text.stream import TextStream

Arrived = queue.SimpleQueue[Event | None]  # None: stop the answer


@dataclass(frozen=True)
class Answer:
    """An answer that has ended. reason: "stop" at its own end, "length" at a limit, "cancelled" by the user.

    uses: its hypertokens, if the request asked for `show`.
    """

    text: str
    reason: str
    counts: Counts
    uses: tuple[Use, ...] = ()


class Answering:
    """An answer under way. show: called with each piece of text and the base tokens of the id that completed it.

    text, base_ids, uses: the answer so far, base_ids without the eos; uses: its hypertokens.
    """

    def __init__(self, tokenizer: Any, show: Callable[[str, int], None]) -> None:
        self._stream, self._show = TextStream(tokenizer), show
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._texts: list[str] = []
        self._ended = False
        self.base_ids: list[int] = []
        self.uses: list[Use] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def take(self, event: Emitted) -> None:
        """Shows the text that an emitted id completes; nothing after the text has ended."""
        if self._ended:
            return
        piece = self._stream.feed(event.base_ids)
        self._ended = piece.finish_reason is not None
        self.base_ids += [one for one in piece.base_ids if one not in self._eos]
        if event.origin is not None:
            self.uses.append(Use(event.base_ids, event.origin.kind))
        self._add(piece.text, len(event.base_ids))

    def finish(self) -> None:
        """Shows the text that was held back; nothing is added afterwards."""
        if not self._ended:
            self._ended = True
            self._add(self._stream.finish("stop").text, 1)

    def _add(self, text: str, length: int) -> None:
        if text:
            self._texts.append(text)
            self._show(text, length)


def follow(
    engine: Engine,
    submission: Submission,
    arrived: Arrived,
    show: Callable[[str, int], None],
    reading: Callable[[int, int], None] = lambda read, total: None,
) -> Answer:
    """Submits a request, shows its text, and returns the answer when it has ended.

    arrived: where the engine's events go; None in it stops the answer, which then holds what was shown. It may be put
    there by a signal handler, before this call too. show: see `Answering`. reading: called with the ids of the prompt
    read so far, and all. The engine notes the answer's base ids, for later prompts that hold its text. Raises what
    `Engine.submit` raises, and the error of a request that failed.
    """
    answering = Answering(engine.tokenizer, show)
    ticket = engine.submit(submission, arrived.put)
    try:
        while True:
            event = arrived.get()
            if event is None:
                answering.finish()  # what arrives from now on is left out
                engine.cancel(ticket)
            elif isinstance(event, Emitted):
                answering.take(event)
            elif isinstance(event, Progress):
                reading(event.read, event.total)
            elif isinstance(event, Failed):
                raise event.error
            elif isinstance(event, Finished):
                answering.finish()
                text = answering.text
                if text and not text.endswith(REPLACEMENT):
                    engine.note_answer(ticket, text, answering.base_ids)
                return Answer(text, event.reason, event.counts, tuple(answering.uses))
            else:
                assert isinstance(event, Started | Counted)
    finally:
        engine.cancel(ticket)
