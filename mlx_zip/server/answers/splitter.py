"""Splits an answer's streamed text into reasoning, text, and tool calls, at the marks of the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from mlx_zip.server.answers.tool_formats import ToolFormat, tool_format
from mlx_zip.server.answers.turn import Delta, Reasoning, ShownToken, Text, TokenLogprob, Turn
from mlx_zip.text.stream import partial_mark_length
from mlx_zip.text.tokenizers import thinking_marks

TokensOf = Callable[[int, str], tuple[tuple[TokenLogprob, ...], tuple[ShownToken, ...]]]
MOST_CALL_CHARACTERS = 256 * 1024  # characters between the marks of a call; a longer call becomes text
MOST_SPACE = 64  # maximum characters of white space that are dropped before a mark, and so held back
_QUOTES = re.compile(r'\\.|"', re.DOTALL)
_CALL_BEGINNINGS = ('{"name":', '{"type":', '{"function":', '[{"name":', '[{"type":', "<|python_tag|>")
_BEGINNING_CHARACTERS = 256  # number of characters of an answer that decide whether it is a call
_TAIL_IDS = 64  # number of base ids at the prompt's end that are searched for a mark


# ---- whether an answer begins within reasoning


class ReasoningStart(Enum):
    """Whether an answer begins with reasoning.

    NO: it does not. BEGUN: it does, and the prompt already holds the start mark. MAYBE: it does if its text begins with
    the start mark.
    """

    NO = "no"
    BEGUN = "begun"
    MAYBE = "maybe"


def reasoning_start(
    tokenizer: Any, turn: Turn, prompt_ids: Sequence[int] = (), prefilled: bool = True
) -> ReasoningStart:
    """Returns whether an answer begins with reasoning. prompt_ids: base ids of the prompt; only their end is read.

    prefilled: True to count the answer from the end of `turn.prefill`, which is the end of the prompt; False to count
    `turn.prefill` as a part of the answer.
    """
    marks = thinking_marks(tokenizer)
    if marks is None or turn.prompt is not None:
        return ReasoningStart.NO
    tail = tokenizer.decode(list(prompt_ids)[-_TAIL_IDS:], skip_special_tokens=False) if len(prompt_ids) else ""
    prefill = (turn.prefill or "").strip()
    before = _reasoning_start_after(tail.rstrip().removesuffix(prefill).rstrip(), *marks)
    if not (prefill and prefilled):
        return before
    begun = before is ReasoningStart.BEGUN or prefill.startswith(marks[0])
    return ReasoningStart.BEGUN if begun and marks[1] not in prefill else ReasoningStart.NO


def _reasoning_start_after(text: str, start: str, end: str) -> ReasoningStart:
    if text.endswith(start):
        return ReasoningStart.BEGUN
    return ReasoningStart.NO if text.endswith(end) else ReasoningStart.MAYBE


# ---- the pieces of an answer


class Splitter:
    """Splits the text of one answer into deltas, whose joined texts do not depend on how the text arrived in pieces.

    tokenizer: our `Tokenizer` or mlx-lm's wrapper. prompt_ids: base ids of the prompt, whose end shows whether the
    reasoning has begun. Only the beginning of an answer can be reasoning. White space next to the marks of reasoning
    and of calls is dropped. An invalid call becomes text, with its marks. Raises `GenerationError` if the turn has
    tools and the model's chat template takes none or the model's calls cannot be read.

    tokens_of: function from (index of a piece's first character, the piece) to the piece's log-probabilities and
    tokens. Attributes: `called`, whether there was a call; `reasoning_tokens`, number of base tokens fed within the
    reasoning.
    """

    def __init__(
        self,
        tokenizer: Any,
        turn: Turn,
        prompt_ids: Sequence[int] = (),
        tokens_of: TokensOf = lambda begin, text: ((), ()),
    ) -> None:
        self._turn = turn
        self._think = thinking_marks(tokenizer) or ("", "")
        self._format = tool_format(tokenizer) if turn.tools and turn.tool_choice != "none" else None
        reasons = reasoning_start(tokenizer, turn, prompt_ids)
        states = {
            ReasoningStart.NO: self._read_text_start,
            ReasoningStart.BEGUN: self._read_reasoning,
            ReasoningStart.MAYBE: self._read_answer_start,
        }
        self._state: Callable[[bool], bool] = states[reasons]
        self._skip = reasons is ReasoningStart.BEGUN  # whether to drop the next white space
        self._tokens_of = tokens_of
        self.called = False
        self.reasoning_tokens = 0
        self._deltas: list[Delta] = []
        self._cut = False  # whether a limit has ended the answer
        self._held, self._at = "", 0  # text without a delta yet; number of characters before it
        self._looked = self._body = 0  # in a call: where to look for its end; where its text begins
        self._quoted = False  # whether `_looked` is within a JSON string

    def feed(self, text: str, base_tokens: int = 0) -> list[Delta]:
        """Takes the next piece of text, and returns the deltas that later text cannot change.

        base_tokens: number of base tokens of the piece.
        """
        if self._state == self._read_reasoning:
            self.reasoning_tokens += base_tokens
        self._held += text
        return self._run_states(final=False)

    def finish(self, reason: str = "stop") -> list[Delta]:
        """Returns the deltas of the text that was held back. reason: why the answer ended, as in `Done`.

        The last call may lack its end mark. If the reason is "length", an incomplete call is dropped, with its marks.
        """
        self._cut = reason == "length"
        return self._run_states(final=True)

    def _run_states(self, final: bool) -> list[Delta]:
        """Runs the states on the held text until more text is needed, and returns the deltas."""
        while self._state(final):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def _enter_state(self, state: Callable[[bool], bool], skip: bool = False) -> bool:
        """Sets the next state. skip: whether to drop the next white space. Returns True, as a state does to go on."""
        self._state, self._skip = state, skip
        return True

    # States: each adds the deltas that later text cannot change, and returns whether to run the next state.

    def _read_answer_start(self, final: bool) -> bool:
        """At the beginning of an answer that may begin with reasoning."""
        text, start = self._held.lstrip(), self._think[0]
        spaces = len(self._held) - len(text)
        if spaces <= MOST_SPACE and text.startswith(start):
            self._drop_held(spaces + len(start))
            return self._enter_state(self._read_reasoning, skip=True)
        if spaces <= MOST_SPACE and start.startswith(text) and not final:
            return False
        return self._enter_state(self._read_text_start)

    def _read_reasoning(self, final: bool) -> bool:
        """Within the reasoning, which lasts until its end mark."""
        self._skip_space()
        end = self._held.find(self._think[1])
        if end < 0:
            self._emit_text(
                Reasoning, len(self._held) if final else self._length_before_mark(self._held, self._think[1])
            )
            return False
        self._emit_text(Reasoning, _length_without_space(self._held[:end]))
        self._drop_held(self._held.find(self._think[1]) + len(self._think[1]))
        return self._enter_state(self._read_text_start, skip=True)

    def _read_text_start(self, final: bool) -> bool:
        """At the beginning of the text, which as a whole may be a call if the format has no start mark."""
        if self._format is None or self._format.start:
            return self._enter_state(self._read_text, self._skip)
        may_be = _begins_json_call(self._held)
        if may_be is None and self._cut and len(self._held.strip()) > 1:
            return self._drop_cut_call()
        if may_be is None and not final:
            return False
        if not may_be:
            return self._enter_state(self._read_text, self._skip)
        return self._enter_call(0)

    def _read_text(self, final: bool) -> bool:
        self._skip_space()
        start = "" if self._format is None or self._has_all_calls else self._format.start
        at = self._held.find(start) if start else -1
        if at < 0:
            shown = self._length_before_mark(self._held, start) if start else len(self._held)
            if final and not (self._cut and len(self._held[shown:].strip()) > 1):
                shown = len(self._held)
            self._emit_text(Text, shown)
            return self._drop_cut_call() if final else False
        self._emit_text(Text, _length_without_space(self._held[:at]))
        return self._enter_call(self._held.find(start) + len(start))

    def _enter_call(self, body: int) -> bool:
        """Enters a call, and keeps its start mark and the space before it held. body: index of the call's text."""
        self._body = self._looked = body
        self._quoted = False
        return self._enter_state(self._read_call)

    def _read_call(self, final: bool) -> bool:
        """Within a call, which is held until it is complete."""
        form, most = self._format, self._body + MOST_CALL_CHARACTERS
        assert form is not None
        end = self._find_call_end(form)
        if 0 <= end <= most:
            self._emit_calls(form, self._held[self._body : end], end + len(form.end))
            return self._enter_state(self._read_text, skip=self.called)
        if len(self._held) >= most + max(len(form.end), 1):
            self._emit_text(Text, most)
            return self._enter_state(self._read_text)
        if final:
            self._emit_calls(form, self._held[self._body :], len(self._held))
        return False

    def _find_call_end(self, form: ToolFormat) -> int:
        """Returns the index of the end mark in the held text, -1 if the mark has not arrived."""
        if not form.end:
            return -1
        while (end := self._held.find(form.end, self._looked)) >= 0:
            if not (form.is_json and self._is_in_json_string(end)):
                return end
        if not form.is_json:
            self._looked = max(self._looked, len(self._held) - len(form.end) + 1)
        return -1

    def _is_in_json_string(self, end: int) -> bool:
        """Returns whether the index `end` is within a JSON string of the held text; moves `_looked` forward."""
        while (found := _QUOTES.search(self._held, self._looked, end + 1)) and found.start() < end:
            self._quoted ^= found[0] == '"'
            self._looked = found.end()
        if self._quoted:
            self._looked = max(self._looked, end + 1)
        return self._quoted

    def _emit_calls(self, form: ToolFormat, body: str, n: int) -> None:
        """Adds the calls in `body`; if there are none, adds `n` held characters as text, or drops a cut-off call."""
        calls = [] if self._has_all_calls else form.parse_calls(body, self._turn.tools)
        if not calls and self._cut:
            self._drop_cut_call()
            return
        if not calls or (len(calls) > 1 and not self._turn.parallel_tool_calls):
            self._emit_text(Text, n)
            return
        self._deltas += calls
        self.called = True
        self._drop_held(n)

    def _drop_cut_call(self) -> bool:
        """Drops the held text, a call that a limit has cut off. Returns False: no state is to run."""
        self._drop_held(len(self._held))
        return False

    # Parts of the held text.

    @property
    def _has_all_calls(self) -> bool:
        return self.called and not self._turn.parallel_tool_calls

    def _length_before_mark(self, text: str, mark: str) -> int:
        return _length_without_space(text[: len(text) - partial_mark_length(text, (mark,))])

    def _skip_space(self) -> None:
        if self._skip:
            self._drop_held(len(self._held) - len(self._held.lstrip()))
            self._skip = not self._held

    def _emit_text(self, kind: type[Text] | type[Reasoning], n: int) -> None:
        text, begin = self._held[:n], self._at
        self._drop_held(n)
        if text:
            self._deltas.append(Text(text, *self._tokens_of(begin, text)) if kind is Text else Reasoning(text))

    def _drop_held(self, n: int) -> None:
        self._held, self._at = self._held[n:], self._at + n


def _length_without_space(text: str) -> int:
    """Returns the length of `text` without its trailing white space, of which at most `MOST_SPACE` is dropped."""
    return max(len(text.rstrip()), len(text) - MOST_SPACE)


def _begins_json_call(text: str) -> bool | None:
    """Returns whether an answer that begins with `text` is a call; None if `text` is too short to tell."""
    begun = re.sub(r"\s+", "", text[:_BEGINNING_CHARACTERS])
    if any(begun.startswith(beginning) for beginning in _CALL_BEGINNINGS):
        return True
    may_be = any(beginning.startswith(begun) for beginning in _CALL_BEGINNINGS)
    return None if may_be and len(text) < _BEGINNING_CHARACTERS else False
