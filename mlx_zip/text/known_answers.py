"""Finds, in a rendered conversation, answers whose emitted ids are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mlx_zip.errors import GenerationError

Turns = Sequence[Mapping[str, Any]]
_PARTS = ("tool_calls", "reasoning_content")  # of a message, which the template writes in its own way
_MOST_ENDS = 16  # places that are tried as the end of one message


class Known(NamedTuple):
    """An answer in a rendered conversation: its first character, the one after its last, and its emitted ids."""

    begin: int
    end: int
    ids: Sequence[int]


def known_answers(
    turns: Turns,
    whole: str,
    render: Callable[[Turns], str],
    answers: Mapping[str, Sequence[int]],
    think_start: str | None = None,
) -> list[Known]:
    """Returns the known answers in a conversation, in order; they do not overlap.

    turns: its messages, without a prefill. whole: its text. render: makes text of changed messages. answers: text of an
    answer, as it was emitted -> its ids. think_start: the mark that a prompt may have ended with, so that the emitted
    text goes on behind it.

    A message is found by rendering the conversation with a mark in place of what was emitted. A message with calls or
    reasoning counts if the text in the mark's place is one of `answers`; other messages if their content is.
    """
    if not answers:
        return []
    plain = [i for i, turn in enumerate(turns) if _is_answer(turn) and turn.get("content") in answers]
    composed = [i for i, turn in enumerate(turns) if _is_answer(turn) and any(turn.get(part) for part in _PARTS)]
    leads = ("", *((f"{think_start}\n", think_start) if think_start else ()))
    for marked in [sorted({*plain, *composed}), *([plain] if composed else [])]:
        try:
            found = _found(turns, marked, whole, render, _Answers(answers, leads)) if marked else []
        except GenerationError:  # the template checks that results follow calls, which the marks hide
            continue
        if found is not None:
            return found
    return []


def _is_answer(turn: Mapping[str, Any]) -> bool:
    """Returns whether a message is an assistant's, with text or nothing as its content."""
    return turn.get("role") == "assistant" and isinstance(turn.get("content"), str | None)


class _Answers(NamedTuple):
    """Emitted ids by text. leads: what may stand before an emitted text, because it was the prompt's end."""

    ids: Mapping[str, Sequence[int]]
    leads: Sequence[str]

    def of(self, text: str) -> Sequence[int] | None:
        """Returns the ids of an emitted text, None if it is unknown; another thread may forget it at any time."""
        try:
            return self.ids[text]
        except KeyError:
            return None

    def within(self, text: str, at: int) -> Known | None:
        """Returns the answer that a message's text is. at: the text's first character in the conversation."""
        for lead in self.leads:
            if text.startswith(lead) and (ids := self.of(text[len(lead) :])) is not None:
                return Known(at + len(lead), at + len(text), ids)
        return None


def _found(
    turns: Turns, marked: Sequence[int], whole: str, render: Callable[[Turns], str], answers: _Answers
) -> list[Known] | None:
    """Returns the known ones among the marked messages; None if the rendered marks do not lead to them."""
    marks = [f"\ue000answer {i}\ue001" for i in marked]
    parts = _split(render(_with_marks(turns, dict(zip(marked, marks, strict=True)))), marks)
    if parts is None or not whole.startswith(parts[0]):
        return None
    found, at = [], len(parts[0])
    for i, part in zip(marked, parts[1:], strict=True):
        ends = _ends(whole, part, at) if i != marked[-1] else [len(whole) - len(part)] * whole.endswith(part)
        end, known = _message(turns[i], whole, at, ends, answers)
        if end is None:
            return None
        found += [known] if known else []
        at = end + len(part)
    return found if at == len(whole) else None


def _with_marks(turns: Turns, marks: Mapping[int, str]) -> Turns:
    """Returns the messages with a mark for everything that was emitted in some of them."""
    return [
        {**{key: value for key, value in turn.items() if key not in _PARTS}, "content": marks[i]}
        if i in marks
        else turn
        for i, turn in enumerate(turns)
    ]


def _split(text: str, marks: Sequence[str]) -> list[str] | None:
    """Returns the texts before, between and after marks; None if a mark does not stand there exactly once."""
    parts = [text]
    for mark in marks:
        if parts[-1].count(mark) != 1:
            return None
        parts += parts.pop().split(mark)
    return parts


def _ends(whole: str, part: str, at: int) -> list[int]:
    """Returns the first places from `at` on where a message may end, because `part` follows."""
    ends: list[int] = []
    while len(ends) < _MOST_ENDS and (end := whole.find(part, ends[-1] + 1 if ends else at)) >= 0:
        ends.append(end)
    return ends


def _message(
    turn: Mapping[str, Any], whole: str, at: int, ends: Sequence[int], answers: _Answers
) -> tuple[int | None, Known | None]:
    """Returns where a marked message ends in the conversation, None if unknown, and its answer if that is known.

    at: where it begins. ends: where it may end.
    """
    if any(turn.get(part) for part in _PARTS):
        known = next((found for end in ends if (found := answers.within(whole[at:end], at))), None)
        return (known.end if known else next(iter(ends), None)), known
    content = turn["content"]
    end = next((end for end in ends if whole[at:end] in (content, content.strip())), None)
    ids = answers.of(content)
    return end, None if end is None or ids is None else Known(at, end, ids)
