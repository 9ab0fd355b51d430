"""Streams one answer: sends a request to an engine and turns its events into text and reasoning as they arrive."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlx_zip.cli.chat.conversation import HypertokenUse
from mlx_zip.engine import Counted, Counts, Emitted, Engine, Event, Failed, Finished, Progress, Started, Submission
from mlx_zip.text.stream import TextStream, partial_mark_length
from mlx_zip.text.tokenizers import REPLACEMENT, thinking_marks

Arrived = queue.SimpleQueue[Event | None]  # None: stop the answer
_TAIL_IDS = 16  # number of base ids at the prompt's end that are searched for the mark that starts reasoning


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
    if (marks := thinking_marks(tokenizer)) is None:
        yield view.feed
        return
    tail = tokenizer.decode(list(prompt_ids)[-_TAIL_IDS:], skip_special_tokens=False)
    splitter = _ReasoningSplitter(view, *marks, tail.rstrip().endswith(marks[0]))
    try:
        yield splitter.feed
    finally:
        splitter.finish()


class _ReasoningSplitter:
    """Feeds reasoning and text to `view`, without the marks around the reasoning and the white space next to the marks.

    start, end: the marks. begun: whether the prompt has already begun the reasoning.
    """

    def __init__(self, view: Any, start: str, end: str, begun: bool) -> None:
        self._view, self._start, self._end = view, start, end
        self._state = self._read_reasoning if begun else self._read_answer_start
        self._held, self._skips = "", begun  # _skips: whether to drop the next white space

    def feed(self, text: str, length: int) -> None:
        """Takes the next piece of text. length: number of base tokens of its id."""
        self._held += text
        self._state(length)

    def finish(self) -> None:
        if self._held and self._state == self._read_reasoning:
            self._view.feed_reasoning(self._held)
        elif self._held:
            self._view.feed(self._held, 1)
        self._held = ""

    def _read_answer_start(self, length: int) -> None:
        text = self._held.lstrip()
        if text.startswith(self._start):
            self._enter_state(self._read_reasoning, text[len(self._start) :], length)
        elif not self._start.startswith(text):
            self._enter_state(self._read_text, self._held, length, skips=False)

    def _read_reasoning(self, length: int) -> None:
        self._skip_space()
        thought, mark, rest = self._held.partition(self._end)
        if mark:
            if thought.rstrip():
                self._view.feed_reasoning(thought.rstrip())
            self._enter_state(self._read_text, rest, length)
            return
        ready = self._held[: len(self._held) - partial_mark_length(self._held, (self._end,))].rstrip()
        if ready:
            self._view.feed_reasoning(ready)
        self._held = self._held[len(ready) :]

    def _read_text(self, length: int) -> None:
        self._skip_space()
        if self._held:
            self._view.feed(self._held, length)
        self._held = ""

    def _enter_state(self, state: Callable[[int], None], held: str, length: int, skips: bool = True) -> None:
        self._state, self._held, self._skips = state, held, skips
        state(length)

    def _skip_space(self) -> None:
        if self._skips:
            self._held = self._held.lstrip()
            self._skips = not self._held
