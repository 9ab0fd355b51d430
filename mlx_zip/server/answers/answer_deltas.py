"""Turns an engine's events into the deltas (see `turn.Delta`) of an answer."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_zip.engine import Counted, Counts, Differing, Emitted, Event, Failed, Finished, Held, Progress, Started
from mlx_zip.errors import EngineStoppedError
from mlx_zip.server.answers.splitter import Splitter
from mlx_zip.server.answers.turn import (
    Delta,
    Done,
    LearnedEntries,
    PromptDifference,
    ShownToken,
    TokenLogprob,
    Turn,
    Waiting,
)
from mlx_zip.text.stream import TextPiece, TextStream
from mlx_zip.text.token_facts import TokenTexts
from mlx_zip.text.tokenizers import REPLACEMENT

log = logging.getLogger(__name__)
_LETTER, _DIGIT = re.compile(r"[^\W\d_]|[^\x00-\x7f]"), re.compile(r"[0-9]")


def mask_letters_and_digits(text: str) -> str:
    """Returns `text` with every letter and non-ASCII character replaced by x, and every digit by 0."""
    return _DIGIT.sub("0", _LETTER.sub("x", text))


class AnswerDeltas:
    """Turns the engine's events of one answer into deltas.

    prompt_ids: base ids of the prompt. tokens: texts of ids, for log-probabilities and shown tokens. hide: masks texts
    of prompts before they are reported. Attributes: `base_ids`, the answer's base ids so far, without the eos; `whole`,
    whether the answer has ended and a later prompt that holds its text may use `base_ids` for that text.

    Raises what `Splitter` raises.
    """

    def __init__(
        self,
        tokenizer: Any,
        turn: Turn,
        prompt_ids: Sequence[int],
        tokens: TokenTexts,
        hide: Callable[[str], str] = mask_letters_and_digits,
    ) -> None:
        self.turn, self._tokens, self._hide = turn, tokens, hide
        self._placed_tokens = PlacedTokens()
        self._splitter = Splitter(tokenizer, turn, prompt_ids, self._placed_tokens.take)
        self._stream = TextStream(tokenizer, stop=turn.stop)
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._ended: str | None = None  # why the text has ended, None before; the engine may still run
        self._steps = self._hypertokens = self._accepted = self._accepted_tokens = 0
        self._unfed_base_tokens = 0  # base tokens since the splitter was last fed
        self._texts: list[str] = []
        self._differs: PromptDifference | None = None
        self.base_ids: list[int] = []
        self.whole = False

    @property
    def text(self) -> str:
        """The answer's text so far, with reasoning and tool calls as the model wrote them."""
        return "".join(self._texts)

    def add_event(self, event: Event) -> list[Delta]:
        """Returns the deltas of an event; the answer's last delta is a `Done`. Raises the error of a `Failed`."""
        if isinstance(event, Emitted):
            return self._add_emitted(event)
        if isinstance(event, Started):
            self._differs = None if event.differing is None else self._make_prompt_difference(event.differing)
            return [Waiting(0, event.prompt_ids, event.prompt_tokens, event.cached_tokens)]
        if isinstance(event, Progress):
            return [Waiting(event.read, event.total)]
        if isinstance(event, Held):
            return [Waiting(0, 0, waits_for=event.engine)]
        if isinstance(event, Counted):
            return [event] if self._ended is None else []
        if isinstance(event, Failed):
            raise event.error
        return self._finish_answer(event)

    def _make_prompt_difference(self, found: Differing) -> PromptDifference:
        kept, now = (self._hide(self._tokens[ids][0]) for ids in (found.kept, found.now))
        log.info("the prompt differs from the best kept conversation at token %d: %r, was %r", found.at, now, kept)
        return PromptDifference(found.at, kept, now)

    def _add_emitted(self, event: Emitted) -> list[Delta]:
        """Returns the deltas of one emitted id, [] if the text has already ended."""
        if self._ended is not None:
            return []
        self._steps += 1
        self._hypertokens += len(event.base_ids) > 1
        piece = self._stream.feed(event.base_ids)
        if event.from_draft:
            self._accepted += 1
            self._accepted_tokens += len(piece.base_ids)
        self._unfed_base_tokens += len(piece.base_ids)
        base_ids = [i for i in piece.base_ids if i not in self._eos]
        self.base_ids += base_ids
        self._place_token(event, base_ids)
        self._ended = piece.finish_reason
        return [*self._feed_splitter(piece.text), *self._learned_deltas(event)]

    def _learned_deltas(self, event: Emitted) -> list[Delta]:
        """Returns the delta of the entries that an emitted id has installed, [] without `Turn.show`."""
        if not (self.turn.show and event.learned) or self._ended is not None:
            return []
        return [LearnedEntries(tuple(tuple(self._tokens[(i,)][0] for i in entry) for entry in event.learned))]

    def _place_token(self, event: Emitted, base_ids: Sequence[int]) -> None:
        """Notes which characters an emitted id stands for. base_ids: its base ids without the eos."""
        shown = self._shown_token(event, base_ids) if self.turn.show and base_ids else None
        logprob = None if event.logprob is None else self._token_logprob(event, event.logprob)
        self._placed_tokens.add(self._stream.characters, shown, logprob, is_text=bool(base_ids))

    def _shown_token(self, event: Emitted, base_ids: Sequence[int]) -> ShownToken:
        """Returns an emitted id as a token without text."""
        if event.origin is None:
            return ShownToken("", event.id, from_draft=event.from_draft)
        parts = tuple(self._tokens[(one,)][0] for one in base_ids)
        return ShownToken("", event.id, parts, event.origin.kind, event.origin.at, event.from_draft)

    def _token_logprob(self, event: Emitted, logprob: float) -> TokenLogprob:
        shown = tuple(i for i in event.base_ids if i not in self._eos)
        likely = tuple((*self._tokens[one.base_ids], one.logprob) for one in event.likely)
        return TokenLogprob(*(self._tokens[shown] if shown else ("", b"")), logprob, likely)

    def _feed_splitter(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._texts.append(text)
        count, self._unfed_base_tokens = self._unfed_base_tokens, 0
        return self._splitter.feed(text, count)

    @property
    def hit_stop_string(self) -> bool:
        """Whether a stop string has ended the text, so that the engine need not go on."""
        return self._stream.stopped_by is not None

    def _finish_answer(self, event: Finished) -> list[Delta]:
        """Returns the last deltas. Raises `EngineStoppedError` if the engine ended the request on its own."""
        if self._ended is None and event.reason == "cancelled":
            raise EngineStoppedError("the server is stopping, so this answer was not finished")
        reason, deltas = self._ended or event.reason, []
        if self._ended is None:
            piece: TextPiece = self._stream.finish(event.reason)
            self._placed_tokens.extend_last(self._stream.characters)
            deltas = self._feed_splitter(piece.text)
            if piece.finish_reason is not None:
                reason = piece.finish_reason
        self.whole = not self.hit_stop_string and not self.text.endswith(REPLACEMENT)
        deltas += self._splitter.finish(reason)
        counts = self._corrected_counts(event.counts)
        if self._splitter.called and reason == "stop":
            reason = "tool_calls"
        live: list[Delta] = [Counted(counts)] if self.turn.show else []
        ended = Done(reason, counts, self._stream.stopped_by, self._splitter.reasoning_tokens, self.turn.left_out)
        unshown = () if self.hit_stop_string else self._placed_tokens.logprobs_without_text()
        return [*deltas, *live, replace(ended, differs=self._differs, unshown=unshown)]

    def _corrected_counts(self, counts: Counts) -> Counts:
        if not self.hit_stop_string:
            return counts
        # the engine's own counts include ids that it emitted after the stop string
        return replace(
            counts,
            base_tokens=self._stream.base_tokens,
            steps=self._steps,
            hypertokens=self._hypertokens,
            accepted=self._accepted,
            accepted_tokens=self._accepted_tokens,
        )


# ---- the emitted ids that make up an answer's text


@dataclass(eq=False)
class _PlacedToken:
    """A token and its characters in the answer, `begin` to `end`. shown: the token without text, None to show none.

    logprob: the token's log-probability, None if there is none or a text already has it.
    """

    begin: int
    end: int
    shown: ShownToken | None
    logprob: TokenLogprob | None


class PlacedTokens:
    """Holds the tokens of one answer, and their log-probabilities, until `take` returns them for a piece of its text.

    Places are counted in characters from the answer's beginning, reasoning and tool calls included. A token whose
    characters are in two pieces of text is returned for both pieces, its log-probability for the first alone.
    """

    def __init__(self) -> None:
        self._waiting: deque[_PlacedToken] = deque()
        self._last: _PlacedToken | None = None  # the last token with text
        self._end = 0

    def add(
        self, characters: int, shown: ShownToken | None, logprob: TokenLogprob | None, is_text: bool = True
    ) -> None:
        """Adds an emitted id. characters: length of the answer with this id. is_text: False for an eos id alone."""
        if not is_text:
            self.extend_last(characters)
        if shown is None and logprob is None:
            return
        placed = _PlacedToken(self._end, characters, shown, logprob)
        self._end = characters
        self._waiting.append(placed)
        if is_text:
            self._last = placed

    def extend_last(self, characters: int) -> None:
        """Assigns the characters that replace incomplete UTF-8 at the answer's end to the last token.

        characters: length of the answer with these characters.
        """
        last, begin, self._end = self._last, self._end, characters
        if last is None or characters == begin:
            return
        if last not in self._waiting:
            last.begin = begin
            self._waiting.append(last)
        last.end = characters

    def take(self, begin: int, text: str) -> tuple[tuple[TokenLogprob, ...], tuple[ShownToken, ...]]:
        """Returns the log-probabilities of the tokens that begin in `text`, and all tokens of `text`.

        begin: index of the first character of `text`. Drops the tokens before it.
        """
        end, logprobs, tokens = begin + len(text), list[TokenLogprob](), list[ShownToken]()
        while self._waiting and (placed := self._waiting[0]).begin < end:
            if placed.logprob is not None and placed.begin >= begin:
                logprobs.append(placed.logprob)
            placed.logprob = None
            if placed.shown is not None and (placed.end > begin or placed.begin >= begin):
                tokens.append(replace(placed.shown, text=text[max(placed.begin - begin, 0) : placed.end - begin]))
                placed.shown = replace(placed.shown, continues=True)
            if placed.end > end:
                placed.begin = end
                break
            self._waiting.popleft()
        return tuple(logprobs), tuple(tokens)

    def logprobs_without_text(self) -> tuple[TokenLogprob, ...]:
        """Returns the log-probabilities of the last tokens that have added no text: an eos, part of a character."""
        at_end = (placed for placed in self._waiting if placed.begin >= self._end)
        return tuple(placed.logprob for placed in at_end if placed.logprob is not None)
