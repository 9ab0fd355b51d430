"""Prompts that come back with their answers, with log-probabilities if asked for, as in OpenAI's completions.

Who asks for this counts base tokens, also where the model read a hypertoken. So a hypertoken's log-probability stands
with its last base token, and 0 with those before it: the sum over the tokens from any one on is the log-probability of
all ids that stand for some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlx_zip.engine import Counts, PromptId
from mlx_zip.server.core import Core
from mlx_zip.server.openai.choices import Choice
from mlx_zip.server.turn import Done, Turn
from mlx_zip.text.token_texts import TokenTexts, characters

Likely = dict[str, float]


@dataclass(frozen=True)
class EchoedToken:
    """A base token of a prompt. logprob, likely: None where there is nothing before it that it could follow.

    characters: how many begin in the token. likely: log-probabilities of the likeliest tokens at its place, by their
    texts.
    """

    text: str
    characters: int
    logprob: float | None = None
    likely: Likely | None = None


@dataclass(frozen=True)
class Echo:
    """A prompt that comes back. count: its base tokens. tokens: () unless log-probabilities were asked for."""

    text: str
    count: int
    tokens: tuple[EchoedToken, ...] = ()

    @property
    def offsets(self) -> list[int]:
        """Where each token begins in the text; a token before it, as bos is, begins with the text."""
        begin = len(self.text) - sum(one.characters for one in self.tokens)
        found = []
        for one in self.tokens:
            found.append(max(0, begin))
            begin += one.characters
        return found

    def unanswered(self) -> Choice:
        """Returns the choice of a request for no more than the echo."""
        choice = Choice()
        choice.done = Done("length", Counts(prompt_tokens=self.count))
        return choice


async def echo_of(core: Core, turn: Turn, ids: Sequence[int]) -> Echo:
    """Returns a turn's prompt, whose base ids are `ids`, as it comes back. Raises what `Core.likely_prompt` raises."""
    read = [] if turn.logprobs is None else await core.likely_prompt(turn, ids)
    return await core.aside(_echo, core, turn.prompt, ids, read)


def _echo(core: Core, prompt: str | Sequence[int], ids: Sequence[int], read: Sequence[PromptId]) -> Echo:
    """Returns a prompt as it comes back; for a long one this takes seconds.

    ids: its base ids. read: the ids that it was read as, [] unless log-probabilities were asked for.
    """
    text = prompt if isinstance(prompt, str) else core.tokens.decode(ids)
    return Echo(text, len(ids), tuple(echoed_tokens(read, core.tokens)))


def echoed_tokens(read: Sequence[PromptId], texts: TokenTexts) -> Iterator[EchoedToken]:
    """Yields the base tokens of the ids that a prompt was read as."""
    for one in read:
        *before, last = (texts[(i,)] for i in one.base_ids)
        if one.logprob is None:
            yield from (EchoedToken(text, characters(data)) for text, data in (*before, last))
            continue
        yield from (EchoedToken(text, characters(data), 0.0, {text: 0.0}) for text, data in before)
        yield EchoedToken(last[0], characters(last[1]), one.logprob, _likely(one, last[0], texts))


def _likely(read: PromptId, own: str, texts: TokenTexts) -> Likely:
    """Returns the log-probabilities of the likeliest ids at an id's place. own: the text that the id itself has there.

    No other id has that text, so that the id is the likeliest one if its text is: others that read like it are named by
    their bytes, as in OpenAI's completions. Of others with equal texts the likeliest one stays.
    """
    found: Likely = {}
    for other in read.likely:
        if other.base_ids == read.base_ids:
            found[own] = other.logprob
        else:
            text, data = texts[other.base_ids]
            found.setdefault(text if text != own else "bytes:" + "".join(f"\\x{b:02x}" for b in data), other.logprob)
    return found
