"""Text <-> base ids: prompts to ids, and emitted base ids to text as it may be shown.

The tokenizer is mlx-lm's `TokenizerWrapper`; its streaming detokenizer does the bytes. Here a sequence's end is found:
an eos, a stop string (matched on text, wherever token borders lie) or the token limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mlx_zip.errors import GenerationError


def encode_prompt(tokenizer: Any, prompt: Any, continues: bool = False) -> list[int]:
    """A prompt to base ids: text, a list of chat messages ({"role", "content"}), or base ids as they are.

    Text gets the tokenizer's special tokens unless it already begins with the bos token or `continues` a cached
    conversation. Raises `GenerationError` for an empty prompt, text that is not valid Unicode, messages that the chat
    template refuses, and messages that are to continue a cache.
    """
    if isinstance(prompt, str):
        ids = _encode_text(tokenizer, prompt, continues)
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        if continues:  # a template writes a whole conversation, with its beginning
            raise GenerationError("chat messages cannot continue a cache: give the text or the ids of the next turn")
        text = render_chat(tokenizer, prompt, add_generation_prompt=True)
        ids = _encode_text(tokenizer, text, continues=True)  # the template writes its own special tokens
    else:
        ids = _plain_ids(prompt)
    if not ids:
        raise GenerationError("the prompt is empty: give at least one token")
    return list(ids)


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Chat messages to text; `options` go to the chat template.

    Raises `GenerationError` with the template's words, or when what it makes is not valid Unicode.
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except (TemplateError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        # no template, or what its code raises for options that it cannot take
        raise GenerationError(f"the chat template cannot render the messages: {error}") from error
    check_unicode("what the chat template makes of the messages", text)
    return text


def check_unicode(what: str, text: str) -> None:
    """Raises `GenerationError` for half of a surrogate pair, as the command line has for a byte that is no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GenerationError(f"{what} is not valid Unicode at character {error.start}") from error


def _encode_text(tokenizer: Any, text: str, continues: bool) -> list[int]:
    check_unicode("the prompt", text)
    if not text:
        return []
    bos = tokenizer.bos_token
    special = not continues and (bos is None or not text.startswith(bos))
    return tokenizer.encode(text, add_special_tokens=special)


def _plain_ids(prompt: Any) -> list[int]:
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise GenerationError("a prompt is a string, a list of chat messages or a flat list of base ids")
    return list(ids)


class StopMatcher:
    """Cuts text before the stop string that is completed first, and holds back what may become one.

    The result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = tuple(stops)
        if not all(self.stops):
            raise GenerationError("a stop string (--stop) is empty")
        self.matched = False
        self._held = ""

    def feed(self, text: str) -> str:
        """Takes the next piece, gives what may be shown; `matched` tells whether a stop string ended the text."""
        if not self.stops:
            return text
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            self.matched, self._held = True, ""
            return text[: min(ends)[1]]
        shown = len(text) - self._open_prefix(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _open_prefix(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self.stops), default=1) - 1
        tails = range(min(longest, len(text)), 0, -1)
        return next((n for n in tails if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)


class Piece(NamedTuple):
    """text: what may now be shown. base_ids: the ids that count, eos included. finish_reason: see `TextStream`."""

    text: str
    base_ids: tuple[int, ...]
    finish_reason: str | None


class TextStream:
    """The text of one generated sequence, fed with expansions (the base ids of one emitted id).

    Ends with finish_reason "stop" at an eos, even inside an expansion, or at a stop string, and with "length" after
    `max_tokens` base tokens (None: no limit), also inside an expansion. Ids without a token give no text.
    """

    def __init__(self, tokenizer: Any, max_tokens: int | None = None, stop: Iterable[str] = ()) -> None:
        self._detokenizer = tokenizer.detokenizer
        self._tokens = len(tokenizer)  # embeddings may have more rows than there are tokens
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._max_tokens = max_tokens
        self._stops = StopMatcher(stop)
        self._taken = 0  # characters
        self.base_tokens = 0

    def feed(self, expansion: Sequence[int], last: bool = False) -> Piece:
        """Takes one emitted id's base ids; `last` says that no more can follow (the context is full)."""
        text = ""
        for n, base_id in enumerate(expansion, start=1):
            self.base_tokens += 1
            if base_id in self._eos:
                return self._close(text, tuple(expansion[:n]), "stop")
            text += self._stops.feed(self._segment(base_id))
            if self._stops.matched:
                return Piece(text, tuple(expansion[:n]), "stop")
            if self.base_tokens == self._max_tokens or (last and n == len(expansion)):
                return self._close(text, tuple(expansion[:n]), "length")
        return Piece(text, tuple(expansion), None)

    def _segment(self, base_id: int) -> str:
        if base_id >= self._tokens:
            return ""
        self._detokenizer.add_token(base_id)
        return self._new_text()

    def _new_text(self) -> str:
        """What the detokenizer has beyond what it gave before.

        Its text may shrink for a while: behind a byte-fallback decoder, one byte of a next character turns the
        characters just before it, bytes too, into replacements.
        """
        text = self._detokenizer.text
        new, self._taken = text[self._taken :], max(self._taken, len(text))
        return new

    def _close(self, text: str, counted: tuple[int, ...], reason: str) -> Piece:
        self._detokenizer.finalize()
        text += self._stops.feed(self._new_text())
        if self._stops.matched:
            return Piece(text, counted, "stop")
        return Piece(text + self._stops.flush(), counted, reason)
