"""One answer: a request to an engine, whose events become text and reasoning as they arrive."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mlx_zip.cli.chat.conversation import Use
from mlx_zip.cli.chat.front import View
from mlx_zip.engine import Counted, Counts, Emitted, Engine, Event, Failed, Finished, Progress, Started, Submission
from mlx_zip.text.stream import TextStream
from mlx_zip.text.tokenizers import REPLACEMENT, thinking_marks

Arrived = queue.SimpleQueue[Event | None]  # None: stop the answer
_TAIL_IDS = 16  # base ids of the prompt's end in which the start mark is looked for


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


@contextmanager
def split_reasoning(view: View, tokenizer: Any, prompt_ids: Sequence[int]) -> Iterator[Callable[[str, int], None]]:
    """Gives what an answer's pieces of text are fed to, each with the length of its id in base tokens.

    view: gets the answer's text and reasoning without the marks. prompt_ids: base ids of the prompt, at whose end the
    reasoning may have begun already.
    """
    if (marks := thinking_marks(tokenizer)) is None:
        yield view.feed
        return
    tail = tokenizer.decode(list(prompt_ids)[-_TAIL_IDS:], skip_special_tokens=False)
    splitter = _Splitter(view, *marks, tail.rstrip().endswith(marks[0]))
    try:
        yield splitter.feed
    finally:
        splitter.finish()


class _Splitter:
    """Gives a view reasoning and text. start, end: the marks. begun: whether the reasoning has begun already.

    White space next to the marks is dropped.
    """

    def __init__(self, view: View, start: str, end: str, begun: bool) -> None:
        self._view, self._start, self._end = view, start, end
        self._state = self._reason if begun else self._begin
        self._held, self._skips = "", begun  # _skips: whether white space that comes next is dropped

    def feed(self, text: str, length: int) -> None:
        """Takes the next piece of text, which came as an id of `length` base tokens."""
        self._held += text
        self._state(length)

    def finish(self) -> None:
        if self._held and self._state == self._reason:
            self._view.think(self._held)
        elif self._held:
            self._view.feed(self._held, 1)
        self._held = ""

    def _begin(self, length: int) -> None:
        text = self._held.lstrip()
        if text.startswith(self._start):
            self._go(self._reason, text[len(self._start) :], length)
        elif not self._start.startswith(text):
            self._go(self._text, self._held, length, skips=False)

    def _reason(self, length: int) -> None:
        """Within the reasoning."""
        self._skip()
        thought, mark, rest = self._held.partition(self._end)
        if mark:
            if thought.rstrip():
                self._view.think(thought.rstrip())
            self._go(self._text, rest, length)
            return
        begun = next((n for n in range(len(self._end) - 1, 0, -1) if self._held.endswith(self._end[:n])), 0)
        ready = self._held[: len(self._held) - begun].rstrip()
        if ready:
            self._view.think(ready)
        self._held = self._held[len(ready) :]

    def _text(self, length: int) -> None:
        self._skip()
        if self._held:
            self._view.feed(self._held, length)
        self._held = ""

    def _go(self, state: Callable[[int], None], held: str, length: int, skips: bool = True) -> None:
        self._state, self._held, self._skips = state, held, skips
        state(length)

    def _skip(self) -> None:
        if self._skips:
            self._held = self._held.lstrip()
            self._skips = not self._held
