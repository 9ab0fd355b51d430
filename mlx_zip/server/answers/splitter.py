"""Splits an answer's streamed text into reasoning between the template's marks, text, and tool calls."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from mlx_zip.server.answers.tool_formats import ToolFormat, tool_format
from mlx_zip.server.answers.turn import Delta, Reasoning, ShownToken, Text, TokenLogprob, Turn
from mlx_zip.text.stream import partial_mark_length
from mlx_zip.text.tokenizers import thinking_marks

MOST_CALL_CHARACTERS = 256 * 1024  # between the marks of a call; a longer one becomes text
MOST_SPACE = 64  # maximum characters of white space that are dropped at a mark, and so held back
_QUOTES = re.compile(r'\\.|"', re.DOTALL)
_CALL_BEGINNINGS = ('{"name":', '{"type":', '{"function":', '[{"name":', '[{"type":', "<|python_tag|>")
_BEGINNING_CHARACTERS = 256  # a call's beginning must be found within so many characters
_TAIL_IDS = 64  # base ids of the prompt's end in which a mark is looked for


# ---- where an answer begins: in the reasoning, before it, or after it


class ReasoningStart(Enum):
    """Where an answer stands in a model's reasoning when it begins.

    NO: no reasoning will come. BEGUN: the prompt ends with the start mark. MAYBE: the answer may begin with the mark.
    """

    NO = "no"
    BEGUN = "begun"
    MAYBE = "maybe"


def reasoning_start(
    tokenizer: Any, turn: Turn, prompt_ids: Sequence[int] = (), prefilled: bool = True
) -> ReasoningStart:
    """Returns where an answer stands in the reasoning. prompt_ids: base ids of the prompt; only the end is read.

    prefilled: True for the state after `turn.prefill`, with which the prompt ends; False for the state before it.
    """
    marks = thinking_marks(tokenizer)
    if marks is None or turn.prompt is not None:
        return ReasoningStart.NO
    tail = tokenizer.decode(list(prompt_ids)[-_TAIL_IDS:], skip_special_tokens=False) if len(prompt_ids) else ""
    prefill = (turn.prefill or "").strip()
    before = _reasoning_after(tail.rstrip().removesuffix(prefill).rstrip(), *marks)
    if not (prefill and prefilled):
        return before
    begun = before is ReasoningStart.BEGUN or prefill.startswith(marks[0])
    return ReasoningStart.BEGUN if begun and marks[1] not in prefill else ReasoningStart.NO


def _reasoning_after(text: str, start: str, end: str) -> ReasoningStart:
    if text.endswith(start):
        return ReasoningStart.BEGUN
    return ReasoningStart.NO if text.endswith(end) else ReasoningStart.MAYBE


# ---- the pieces of an answer


class Splitter:
    """Splits the text of one answer into deltas. Their joined texts do not depend on how the text was cut into pieces.

    tokenizer: our `Tokenizer` or mlx-lm's wrapper. prompt_ids: base ids of the prompt; its end shows whether
    the reasoning has begun already. Reasoning is looked for at the beginning of the answer only. White space next to
    marks of reasoning and of calls is dropped. A call that is not valid stays text, with its marks.

    tokens_of: returns the tokens of a piece of text; called with the place of its first character, and the text.
    called: whether there was a call. reasoning_tokens: base tokens fed while in the reasoning. Raises `GenerationError`
    for tools that the model's chat template cannot take, or whose calls cannot be read.
    """

    def __init__(self, tokenizer: Any, turn: Turn, prompt_ids: Sequence[int] = ()) -> None:
        self._turn = turn
        self._think = thinking_marks(tokenizer) or ("", "")
        self._format = tool_format(tokenizer) if turn.tools and turn.tool_choice != "none" else None
        reasons = reasoning_start(tokenizer, turn, prompt_ids)
        states = {
            ReasoningStart.NO: self._before_text,
            ReasoningStart.BEGUN: self._in_reasoning,
            ReasoningStart.MAYBE: self._before_reasoning,
        }
        self._state: Callable[[bool], bool] = states[reasons]
        self._skip = reasons is ReasoningStart.BEGUN  # whether white space that comes next is dropped
        self.tokens_of: Callable[[int, str], tuple[ShownToken, ...]] = lambda begin, text: ()
        self.called = False
        self.reasoning_tokens = 0
        self._deltas: list[Delta] = []
        self._cut = False  # whether a limit has ended the answer
        self._held, self._at = "", 0  # text that is not given out yet, and the characters before it
        self._looked = self._body = 0  # in a call: where to look for its end, and where its text begins
        self._quoted = False  # whether `_looked` is within a string of JSON
        self._logprobs: deque[tuple[int, tuple[TokenLogprob, ...]]] = deque()  # (first character, of its tokens)

    def feed(self, text: str, logprobs: Sequence[TokenLogprob] = (), base_tokens: int = 0) -> list[Delta]:
        """Takes the next piece of text, and returns the deltas that are certain.

        logprobs: of the piece's tokens. base_tokens: their number of base tokens, for `reasoning_tokens`.
        """
        if self._state == self._in_reasoning:
            self.reasoning_tokens += base_tokens
        if logprobs:
            self._logprobs.append((self._at + len(self._held), tuple(logprobs)))
        self._held += text
        return self._run_states(final=False)

    def finish(self, reason: str = "stop") -> list[Delta]:
        """Returns the deltas of the text that was held back. reason: why the answer ended, as in `Done`.

        A last call may lack its end mark. At a limit ("length") a call that was cut off is dropped, with its marks.
        """
        self._cut = reason == "length"
        return self._run_states(final=True)

    def _run_states(self, final: bool) -> list[Delta]:
        """Runs the states on the held text until they need more text, and returns the deltas."""
        while self._state(final):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def _enter_state(self, state: Callable[[bool], bool], skip: bool = False) -> bool:
        """Goes on in another state. skip: drop the white space that comes next. Returns True."""
        self._state, self._skip = state, skip
        return True

    # States. Each adds the deltas that are certain, and returns whether the next state can run on the held text.

    def _before_reasoning(self, final: bool) -> bool:
        """The answer begins, perhaps with reasoning."""
        text, start = self._held.lstrip(), self._think[0]
        spaces = len(self._held) - len(text)
        if spaces <= MOST_SPACE and text.startswith(start):
            self._drop_held(spaces + len(start))
            return self._enter_state(self._in_reasoning, skip=True)
        if spaces <= MOST_SPACE and start.startswith(text) and not final:
            return False
        return self._enter_state(self._before_text)

    def _in_reasoning(self, final: bool) -> bool:
        self._skip_space()
        end = self._held.find(self._think[1])
        if end < 0:
            self._give_text(
                Reasoning, len(self._held) if final else self._length_before_mark(self._held, self._think[1])
            )
            return False
        self._give_text(Reasoning, _length_without_space(self._held[:end]))
        self._drop_held(self._held.find(self._think[1]) + len(self._think[1]))
        return self._enter_state(self._before_text, skip=True)

    def _before_text(self, final: bool) -> bool:
        """The text begins. In a format without a start mark, the whole text may be a call."""
        if self._format is None or self._format.start:
            return self._enter_state(self._in_text, self._skip)
        may_be = _may_begin_call(self._held)
        if may_be is None and self._cut and len(self._held.strip()) > 1:
            return self._drop_cut_call()
        if may_be is None and not final:
            return False
        if not may_be:
            return self._enter_state(self._in_text, self._skip)
        return self._enter_call(0)

    def _in_text(self, final: bool) -> bool:
        self._skip_space()
        start = self._call_start
        at = self._held.find(start) if start else -1
        if at < 0:
            shown = self._length_before_mark(self._held, start) if start else len(self._held)
            if final and not (self._cut and len(self._held[shown:].strip()) > 1):
                shown = len(self._held)
            self._give_text(Text, shown)
            return self._drop_cut_call() if final else False
        self._give_text(Text, _length_without_space(self._held[:at]))
        return self._enter_call(self._held.find(start) + len(start))

    def _enter_call(self, body: int) -> bool:
        """Enters a call; its mark and the space before stay held. body: held characters before the call's text."""
        self._body = self._looked = body
        self._quoted = False
        return self._enter_state(self._in_call)

    def _in_call(self, final: bool) -> bool:
        """Within a call, which is held as a whole."""
        form, most = self._known_format, self._body + MOST_CALL_CHARACTERS
        end = self._find_call_end(form)
        if 0 <= end <= most:
            self._give_call(form, self._held[self._body : end], end + len(form.end))
            return self._enter_state(self._in_text, skip=self.called)
        if len(self._held) >= most + max(len(form.end), 1):
            self._give_text(Text, most)
            return self._enter_state(self._in_text)
        if final:
            self._give_call(form, self._held[self._body :], len(self._held))
        return False

    def _find_call_end(self, form: ToolFormat) -> int:
        """Returns where the end mark begins in the held text, -1 if it has not come yet."""
        if not form.end:
            return -1
        while (end := self._held.find(form.end, self._looked)) >= 0:
            if not (form.is_json and self._is_in_json_string(end)):
                return end
        if not form.is_json:
            self._looked = max(self._looked, len(self._held) - len(form.end) + 1)
        return -1

    def _is_in_json_string(self, end: int) -> bool:
        """Returns whether `end` is within a JSON string of the held text; moves `_looked` forward."""
        while (found := _QUOTES.search(self._held, self._looked, end + 1)) and found.start() < end:
            self._quoted ^= found[0] == '"'
            self._looked = found.end()
        if self._quoted:
            self._looked = max(self._looked, end + 1)
        return self._quoted

    def _give_call(self, form: ToolFormat, body: str, n: int) -> None:
        """Adds the calls in `body`, or n held characters as text if there are none; drops a call that was cut off."""
        calls = [] if self._has_all_calls else form.parse_calls(body, self._turn.tools)
        if not calls and self._cut:
            self._drop_cut_call()
            return
        if not calls or (len(calls) > 1 and not self._turn.parallel_tool_calls):
            self._give_text(Text, n)
            return
        self._deltas += calls
        self.called = True
        self._drop_held(n)

    def _drop_cut_call(self) -> bool:
        """Drops the held text, a call that a limit has cut off. Returns False: there is no more to look at."""
        self._drop_held(len(self._held))
        return False

    # Parts of the held text.

    @property
    def _call_start(self) -> str:
        return "" if self._format is None or self._has_all_calls else self._format.start

    @property
    def _has_all_calls(self) -> bool:
        return self.called and not self._turn.parallel_tool_calls

    @property
    def _known_format(self) -> ToolFormat:
        assert self._format is not None
        return self._format

    def _length_before_mark(self, text: str, mark: str) -> int:
        return _length_without_space(text[: len(text) - partial_mark_length(text, (mark,))])

    def _skip_space(self) -> None:
        if self._skip:
            self._drop_held(len(self._held) - len(self._held.lstrip()))
            self._skip = not self._held

    def _give_text(self, kind: type[Text] | type[Reasoning], n: int) -> None:
        text, begin = self._held[:n], self._at
        logprobs = self._drop_held(n)
        if text:
            is_text = kind is Text
            self._deltas.append(Text(text, logprobs, self.tokens_of(begin, text)) if is_text else Reasoning(text))

    def _drop_held(self, n: int) -> tuple[TokenLogprob, ...]:
        """Forgets the first n held characters, and returns the log-probabilities of tokens that begin among them."""
        self._held, self._at = self._held[n:], self._at + n
        found: list[TokenLogprob] = []
        while self._logprobs and self._logprobs[0][0] < self._at:
            found += self._logprobs.popleft()[1]
        return tuple(found)


def _length_without_space(text: str) -> int:
    """Returns the length of a text without the white space at its end, of which at most `MOST_SPACE` is dropped."""
    return max(len(text.rstrip()), len(text) - MOST_SPACE)


def _may_begin_call(text: str) -> bool | None:
    """Returns whether a whole answer that begins like this may be a call; None if that cannot be said yet."""
    begun = re.sub(r"\s+", "", text[:_BEGINNING_CHARACTERS])
    if any(begun.startswith(beginning) for beginning in _CALL_BEGINNINGS):
        return True
    may_be = any(beginning.startswith(begun) for beginning in _CALL_BEGINNINGS)
    return None if may_be and len(text) < _BEGINNING_CHARACTERS else False
