"""OpenAI's completions API, which continues plain text, streamed and whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_zip.engine import Counts, PromptId
from mlx_zip.server.answers.turn import Delta, Done, Text, TokenLogprob, Turn, Waiting, vendor_json
from mlx_zip.server.core import Core
from mlx_zip.server.fields import MOST_TOKENS, BodyError, Many, NonEmptyText
from mlx_zip.server.http import (
    BodyRoute,
    json_response,
    run_unless_client_gone,
    stream_response,
)
from mlx_zip.server.openai.choices import (
    LEAST_LOGPROB,
    CompletionFields,
    completion_frames,
    gather_deltas,
    whole_completion,
)
from mlx_zip.text.token_facts import TokenTexts, count_characters

MOST_PROMPTS = 64
MOST_ECHOED = 1 << 19  # maximum log-probabilities of echoed prompts in one response
Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Texts = Annotated[Many[NonEmptyText], Field(min_length=1)]
Ids = Annotated[list[Id], Field(min_length=1, fail_fast=True)]  # no maximum here: the model's context bounds it


class CompletionBody(CompletionFields):
    """A request for completions. Each prompt is a text or base ids."""

    most_prompts = MOST_PROMPTS

    prompt: NonEmptyText | Texts | Ids | Annotated[Many[Ids], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool = False
    max_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    suffix: None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[Any]:
        """The prompts one by one, each a text or base ids."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)

    def turns(self, core: Core) -> list[Turn]:
        """Returns `n` turns for each prompt. Raises what `check` raises, and `BodyError` for invalid prompts."""
        self.check(core)
        if self.best_of not in (None, self.n):
            raise BodyError("all completions are returned, so this must be n", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise BodyError("0 needs echo: true", "max_tokens")
        if len(self.prompts) > MOST_PROMPTS:
            raise BodyError(f"there are {len(self.prompts)} prompts, and at most {MOST_PROMPTS} are allowed", "prompt")
        width = core.engine.info.vocab_size
        if any(not isinstance(prompt, str) and max(prompt) >= width for prompt in self.prompts):
            raise BodyError(f"an id is no base id of this model, which has {width}", "prompt")
        return [
            Turn(
                prompt=prompt,
                max_tokens=core.answer_max_tokens(self.max_tokens),
                sampling=self.sampling(choice),
                stop=self.stops,
                logprobs=self.logprobs,
                pack=self.pack,
            )
            for prompt in self.prompts
            for choice in range(self.n)
        ]


def completions_routes(core: Core) -> list[Route]:
    """Returns the route of completions."""

    async def completions(request: Request, asked: CompletionBody) -> Response:
        """Continues a text, as OpenAI's completions do."""
        turns = asked.turns(core)
        parts, head = _answer_parts(core, asked, turns), ("cmpl", "text_completion")
        if asked.stream:
            frames = completion_frames(core, asked, head, parts, partial(_chunk_fields, asked, [0] * len(turns)))
            return await stream_response(request, core, frames)
        gathered = await run_unless_client_gone(request, gather_deltas(parts, len(turns)))
        choices = [_text_choice_json(asked, i, one) for i, one in enumerate(gathered)]
        return json_response(whole_completion(core, asked, head, choices, gathered))

    return [BodyRoute(core, "/v1/completions", CompletionBody, completions)]


async def _answer_parts(
    core: Core, asked: CompletionBody, turns: Sequence[Turn]
) -> AsyncGenerator[tuple[int, Echo | Delta], None]:
    """Yields the echoes, if the request asks for them, and the deltas of all answers, as `Core.answers` does."""
    echoes = await _make_echoes(core, asked, turns)
    for index, echo in enumerate(echoes):
        yield index, echo
    if asked.max_tokens == 0:
        for index, echo in enumerate(echoes):
            yield index, Done("length", Counts(prompt_tokens=echo.count))
        return
    async with aclosing(core.answers(turns)) as answers:
        async for one in answers:
            yield one


async def _make_echoes(core: Core, asked: CompletionBody, turns: Sequence[Turn]) -> list[Echo]:
    """Returns the echo of each turn's prompt, [] if the request does not set `echo`.

    Raises `BodyError`, before any prompt is scored, if there would be more than `MOST_ECHOED` log-probabilities.
    """
    if not asked.echo:
        return []
    prompts = turns[:: asked.n]
    ids = [await core.prompt_ids(turn) for turn in prompts]
    if asked.logprobs is not None and sum(map(len, ids)) * asked.n * (1 + asked.logprobs) > MOST_ECHOED:
        raise BodyError(f"there are more than {MOST_ECHOED} log-probabilities; send fewer prompts at once", "prompt")
    found = [await _score_echo(core, turn, one) for turn, one in zip(prompts, ids, strict=True)]
    return [echo for echo in found for _ in range(asked.n)]


def _text_choice_json(
    asked: CompletionBody, index: int, parts: Sequence[Echo | Delta], begin: int = 0
) -> dict[str, Any]:
    """Returns a choice that has parts of an answer. begin: number of characters before these parts."""
    text = "".join(part.text for part in parts if isinstance(part, Echo | Text))
    tokens = [token for part in parts for token in _part_tokens(asked, part)]
    reason = next((part.reason for part in parts if isinstance(part, Done)), None)
    if isinstance(parts[0], Echo):
        begin = parts[0].begin
    logprobs = None if asked.logprobs is None else _text_logprobs_json(tokens, begin)
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}


def _part_tokens(asked: CompletionBody, part: Echo | Delta) -> Sequence[_TextToken]:
    match part:
        case Echo():
            return part.tokens
        case Text():
            return [_text_token(one) for one in part.logprobs]
        case Done() if asked.echo:  # an eos counts too: some clients drop the last token, others cut the prompt off
            return [_text_token(one) for one in part.unshown]
    return ()


def _text_token(one: TokenLogprob) -> _TextToken:
    likely = {text: value for text, _, value in one.likely}
    return _TextToken(one.text, count_characters(one.bytes), one.logprob, likely)


def _text_logprobs_json(tokens: Sequence[_TextToken], begin: int) -> dict[str, Any]:
    """Returns the log-probabilities of a text in OpenAI's form. begin: offset of the first token, in characters.

    A token such as bos that is before the text has the offset 0.
    """
    offsets = [max(0, at) for at in accumulate((one.characters for one in tokens), initial=begin)]
    return {
        "tokens": [one.text for one in tokens],
        "token_logprobs": [None if one.logprob is None else max(one.logprob, LEAST_LOGPROB) for one in tokens],
        "top_logprobs": [
            None if one.likely is None else {text: max(value, LEAST_LOGPROB) for text, value in one.likely.items()}
            for one in tokens
        ],
        "text_offset": offsets[:-1],
    }


def _chunk_fields(
    asked: CompletionBody, lengths: list[int], index: int, part: Echo | Delta
) -> dict[str, Any] | str | None:
    """Returns what `completion_frames` sends for a part of an answer. lengths: characters of each choice so far."""
    if isinstance(part, Waiting):
        return f"reading the prompt {part.read}/{part.total}" if part.total else "waiting"
    if not isinstance(part, Echo | Text | Done):
        return None
    choice = _text_choice_json(asked, index, [part], lengths[index])
    lengths[index] += len(choice["text"])
    if not isinstance(part, Done):
        return {"choices": [choice]}
    if not _part_tokens(asked, part):
        choice["logprobs"] = None
    return {"choices": [choice], "mlx_zip": vendor_json(part)}


# ---- echoes: prompts that are sent back with their answers, with log-probabilities if requested
#
# Clients that request log-probabilities of a prompt count base tokens, even where the model read a hypertoken. So the
# last base token of a hypertoken gets the hypertoken's log-probability, and its other base tokens get 0. The sum from
# any base token to the last one is then the log-probability of all ids that cover these base tokens.

_LogprobsByText = dict[str, float]


@dataclass(frozen=True)
class _TextToken:
    """A token of a text, which in an echoed prompt is a base token. characters: number of characters that begin in it.

    logprob, likely: None if nothing precedes the token. likely: text -> log-probability of the likeliest tokens at the
    token's place.
    """

    text: str
    characters: int
    logprob: float | None = None
    likely: _LogprobsByText | None = None


@dataclass(frozen=True)
class Echo:
    """A prompt to send back with its answer. count: number of base tokens. tokens: () without log-probabilities."""

    text: str
    count: int
    tokens: tuple[_TextToken, ...] = ()

    @property
    def begin(self) -> int:
        """Offset of the first token in the text, in characters; below 0 if tokens such as bos are before the text."""
        return len(self.text) - sum(one.characters for one in self.tokens)


async def _score_echo(core: Core, turn: Turn, ids: Sequence[int]) -> Echo:
    """Returns the echo of a turn's prompt. ids: base ids of the prompt. Raises what `Core.score_prompt` raises."""
    read = [] if turn.logprobs is None else await core.score_prompt(turn, ids)
    return await core.run_in_thread(_make_echo, core, turn.prompt, ids, read)


def _make_echo(core: Core, prompt: str | Sequence[int], ids: Sequence[int], read: Sequence[PromptId]) -> Echo:
    """Returns the echo of a prompt; takes seconds if the prompt is long.

    ids: base ids of the prompt. read: the ids as which the model read the prompt, [] without log-probabilities.
    """
    text = prompt if isinstance(prompt, str) else core.tokens.decode(ids)
    return Echo(text, len(ids), tuple(echoed_tokens(read, core.tokens)))


def echoed_tokens(read: Sequence[PromptId], texts: TokenTexts) -> Iterator[_TextToken]:
    """Yields the base tokens of `read`, the ids as which the model read a prompt. texts: texts of ids."""
    for one in read:
        *before, last = (texts[(i,)] for i in one.base_ids)
        if one.logprob is None:
            yield from (_TextToken(text, count_characters(data)) for text, data in (*before, last))
            continue
        yield from (_TextToken(text, count_characters(data), 0.0, {text: 0.0}) for text, data in before)
        yield _TextToken(last[0], count_characters(last[1]), one.logprob, _likeliest_by_text(one, last[0], texts))


def _likeliest_by_text(read: PromptId, own: str, texts: TokenTexts) -> _LogprobsByText:
    """Returns text -> log-probability of the likeliest ids at the place of `read`. own: text of the id `read`.

    The key `own` is for the id `read` alone: any other id with this text gets its bytes as key, as in OpenAI's
    completions. Of other ids with equal texts, only the likeliest is returned.
    """
    found: _LogprobsByText = {}
    for other in read.likely:
        if other.base_ids == read.base_ids:
            found[own] = other.logprob
        else:
            text, data = texts[other.base_ids]
            found.setdefault(text if text != own else "bytes:" + "".join(f"\\x{b:02x}" for b in data), other.logprob)
    return found
