"""Streams one answer: sends a request to an engine and turns its events into text and reasoning as they arrive."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from mlx_zip.cli.chat.conversation import HypertokenUse
from mlx_zip.engine import Counted, Counts, Emitted, Engine, Event, Failed, Finished, Progress, Started, Submission
from mlx_zip.text.stream import TextStream
from mlx_zip.text.tokenizers import REPLACEMENT

Arrived = queue.SimpleQueue[Event | None]  # None: stop the answer


class Answer:
    """An answer. show: called with each piece of text and the number of base tokens of its last id.

    Attributes: `text`; `base_ids` without the eos; `uses` of hypertokens, empty unless the request set `show`. When the
    answer has ended, also `counts` and `reason`: "stop" if the model ended it, "length" at a limit, "cancelled" by the
    user.
    """

    def __init__(self, tokenizer: Any, show: Callable[[str, int], None]) -> None:
        self._stream, self._show = TextStream(tokenizer), show
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._ended = False  # whether the text has ended
        self.text, self.reason, self.counts = "", "", Counts()
        self.base_ids: list[int] = []
        self.uses: list[HypertokenUse] = []

    def add_emitted(self, event: Emitted) -> None:
        """Shows the text that an emitted id completes; does nothing if the text has already ended."""
        if self._ended:
            return
        piece = self._stream.feed(event.base_ids)
        self._ended = piece.finish_reason is not None
        self.base_ids += [one for one in piece.base_ids if one not in self._eos]
        if event.origin is not None:
            self.uses.append(HypertokenUse(event.base_ids, event.origin.kind))
        self._show_text(piece.text, len(event.base_ids))

    def end_text(self) -> None:
        """Shows the text that was held back; ids that arrive later are ignored."""
        if not self._ended:
            self._ended = True
            self._show_text(self._stream.finish("stop").text, 1)

    def _show_text(self, text: str, length: int) -> None:
        if text:
            self.text += text
            self._show(text, length)


def stream_answer(
    engine: Engine,
    submission: Submission,
    arrived: Arrived,
    show: Callable[[str, int], None],
    show_prefill: Callable[[int, int], None],
) -> Answer:
    """Submits a request, shows its text as it arrives, and returns the answer when it has ended.

    arrived: queue that the engine's events are put into. A None in the queue stops the answer, which keeps the text
    shown so far; a signal handler may put None there, even before this call. show: see `Answer`. show_prefill:
    called with the number of prompt ids read so far and the number of all prompt ids. The engine stores the answer's
    base ids under its text, for later prompts that hold it. Raises what `Engine.submit` raises, and the error of a
    failed request.
    """
    answer = Answer(engine.tokenizer, show)
    ticket = engine.submit(submission, arrived.put)
    try:
        while True:
            event = arrived.get()
            if event is None:
                answer.end_text()  # ignores the ids that arrive from now on
                engine.cancel(ticket)
            elif isinstance(event, Emitted):
                answer.add_emitted(event)
            elif isinstance(event, Progress):
                show_prefill(event.read, event.total)
            elif isinstance(event, Failed):
                raise event.error
            elif isinstance(event, Finished):
                answer.end_text()
                answer.reason, answer.counts = event.reason, event.counts
                if answer.text and not answer.text.endswith(REPLACEMENT):
                    engine.note_answer(ticket, answer.text, answer.base_ids)
                return answer
            else:
                assert isinstance(event, Started | Counted)
    finally:
        engine.cancel(ticket)


@contextmanager
def split_reasoning(view: Any, tokenizer: Any, prompt_ids: Sequence[int]) -> Iterator[Callable[[str, int], None]]:
    """Context manager: yields a function that takes each piece of an answer and the number of base tokens of its id.

    view: see `Front.show_answer`; shows the answer's text and reasoning, without the marks around the reasoning.
    prompt_ids: base ids of the prompt, at whose end the mark that starts reasoning may stand.
    """
    turns = import_module("mlx_zip.server.answers.turn")
    splitter = import_module("mlx_zip.server.answers.splitter").Splitter(tokenizer, turns.Turn(), prompt_ids)

    def show(deltas: Sequence[Any], length: int) -> None:
        for delta in deltas:
            if isinstance(delta, turns.Reasoning):
                view.feed_reasoning(delta.text)
            else:
                view.feed(delta.text, length)

    try:
        yield lambda text, length: show(splitter.feed(text), length)
    finally:
        show(splitter.finish(), 1)
