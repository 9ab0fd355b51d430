"""Tells a model's reasoning from the rest of its answer, where its chat template marks reasoning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlx_zip.cli.chat.front import View
from mlx_zip.text.tokenizer import think_marks

_TAIL_IDS = 16  # base ids of the prompt's end in which the start mark is looked for


@contextmanager
def split(view: View, tokenizer: Any, prompt_ids: Sequence[int]) -> Iterator[Callable[[str, int], None]]:
    """Gives what an answer's pieces of text are fed to, each with the length of its id in base tokens.

    view: gets the answer's text and reasoning without the marks. prompt_ids: base ids of the prompt, at whose end the
    reasoning may have begun already.
    """
    if (marks := think_marks(tokenizer)) is None:
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
        """Shows what was held back."""
        if self._held and self._state == self._reason:
            self._view.think(self._held)
        elif self._held:
            self._view.feed(self._held, 1)
        self._held = ""

    def _begin(self, length: int) -> None:
        """The answer begins, perhaps with the start mark."""
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
        """After the reasoning."""
        self._skip()
        if self._held:
            self._view.feed(self._held, length)
        self._held = ""

    def _go(self, state: Callable[[int], None], held: str, length: int, skips: bool = True) -> None:
        """Goes on in another state, with the text that is left."""
        self._state, self._held, self._skips = state, held, skips
        state(length)

    def _skip(self) -> None:
        """Drops white space at the beginning of the held text, if any is to be dropped."""
        if self._skips:
            self._held = self._held.lstrip()
            self._skips = not self._held
