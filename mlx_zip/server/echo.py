"""Prompts that come back with their answers, with log-probabilities if asked for, as in OpenAI's completions.

Who asks for this counts base tokens, also where the model read a hypertoken. So a hypertoken's log-probability stands
with its last base token, and 0 with those before it: the sum over the tokens from any one on is the log-probability of
all ids that stand for some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_zip.engine import Counts, PromptId
from mlx_zip.server.choices import Choice
from mlx_zip.server.core import Core
from mlx_zip.server.turn import Done, Turn
from mlx_zip.text.token_texts import TokenTexts

Likely = dict[str, float]


@dataclass(frozen=True)
class EchoedToken:
    """A base token of a prompt. logprob, likely: None where there is nothing before it that it could follow.

    likely: log-probabilities of the likeliest tokens at its place, by their texts.
    """

    text: str
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
        ends = len(self.text) - sum(len(one.text) for one in self.tokens)
        found = []
        for one in self.tokens:
            found.append(max(0, ends))
            ends += len(one.text)
        return found

    def unanswered(self) -> Choice:
        """Returns the choice of a request for no more than the echo."""
        choice = Choice()
        choice.done = Done("length", Counts(prompt_tokens=self.count))
        return choice


async def echo_of(core: Core, turn: Turn) -> Echo:
    """Returns a turn's prompt as it comes back. Raises what `Core.prompt_ids` and `Core.likely_prompt` raise."""
    prompt: Any = turn.prompt
    if turn.logprobs is None:
        ids = await core.prompt_ids(turn)
        return Echo(_text(core, prompt, ids), len(ids))
    read = await core.likely_prompt(turn)
    tokens = tuple(echoed_tokens(read, core.tokens))
    return Echo(_text(core, prompt, [i for one in read for i in one.base_ids]), len(tokens), tokens)


def echoed_tokens(read: Sequence[PromptId], texts: TokenTexts) -> Iterator[EchoedToken]:
    """Yields the base tokens of the ids that a prompt was read as."""
    for one in read:
        *before, last = (texts[(i,)][0] for i in one.base_ids)
        if one.logprob is None:
            yield from (EchoedToken(text) for text in (*before, last))
            continue
        yield from (EchoedToken(text, 0.0, {text: 0.0}) for text in before)
        likely = {last if other.base_ids == one.base_ids else texts[other.base_ids][0]: other for other in one.likely}
        yield EchoedToken(last, one.logprob, {text: other.logprob for text, other in likely.items()})


def _text(core: Core, prompt: str | Sequence[int], ids: Sequence[int]) -> str:
    """Returns the text of a prompt that was given as text or as base ids."""
    if isinstance(prompt, str):
        return prompt
    return core.engine.tokenizer.decode(list(ids), skip_special_tokens=False)
