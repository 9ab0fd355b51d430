"""Generates text and measures base tokens per step, as generated and if the text were compressed canonically."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_zip.codec import Codebook, compress_next
from mlx_zip.engine.mlx import prompt_caches
from mlx_zip.engine.mlx.generate import stream_batch, stream_generate
from mlx_zip.engine.mlx.scoring import codec_of_model, scores_itself
from mlx_zip.engine.responses import GenerationResponse
from mlx_zip.errors import DataError
from mlx_zip.layout import has_hypertokens
from mlx_zip.models.rows.zip_state import find_zip_state
from mlx_zip.packs.pack import Pack
from mlx_zip.text.conversations import Conversation, Prompt

GRAM_LENGTH = 4


def check_batch_size(batch_size: int) -> None:
    """Raises `DataError` if `batch_size` is below 1."""
    if batch_size < 1:
        raise DataError(f"the batch size (--batch-size) must be at least 1, got {batch_size}")


@dataclass(frozen=True)
class RateSettings:
    """How text is generated.

    max_tokens: maximum number of base tokens per turn. temp, top_p, seed: see `stream_generate`; a batch uses `seed`
    plus the index of its first conversation. batch_size: conversations per model call. stop: strings that end a turn.
    keep_cache: see `measure_rates`. pack: the pack whose entries every codebook begins with, None for the model's own.
    """

    max_tokens: int = 256
    temp: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 16
    stop: tuple[str, ...] = ()
    keep_cache: bool = False
    pack: Pack | None = None

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)

    def record(self) -> dict[str, Any]:
        """Returns the settings by name, with the pack's number of entries as "start" in place of "pack"."""
        found = {**vars(self), "start": 0 if self.pack is None else len(self.pack)}
        del found["pack"]
        return found


@dataclass(frozen=True)
class GeneratedTurn:
    """One generated turn with its counts.

    prompt: number of base ids read before the turn. base_ids: generated base ids up to the end of the text. steps:
    number of generated ids. hypertokens: number of generated hypertokens. canonical: number of ids that the compressor
    makes of `base_ids` after the same context, None for a plain model. invalid: number of generated ids that were
    neither base ids nor entries of the codebook. grams: number of 4-grams of base ids. repeated: number of 4-grams that
    occurred earlier in the turn. finish_reason: see `TextStream`.
    """

    text: str
    prompt: int
    base_ids: tuple[int, ...]
    steps: int
    hypertokens: int
    canonical: int | None
    invalid: int
    grams: int
    repeated: int
    finish_reason: str | None


@dataclass
class _RunningTurn:
    """What a turn has generated so far. prompt: base ids of the prompt. tokens: generated ids.

    context: the codebook at the beginning of the turn, None for a new request.
    """

    prompt: list[int]
    context: Codebook | None = None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    base_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add_response(self, response: Any) -> None:
        self.text += response.text
        self.tokens.append(response.token)
        self.base_ids += response.base_ids
        self.finish_reason = response.finish_reason


def measure_rates(
    model: Any,
    tokenizer: Any,
    conversations: Sequence[Sequence[Prompt]],
    settings: RateSettings,
    progress: Callable[[int], None] = lambda turns: None,
) -> RatesResult:
    """Generates every turn of all conversations, which must have equally many turns, and returns the figures.

    By default each turn is a new request whose context is compressed canonically, and conversations run in batches. If
    `settings.keep_cache`, each turn continues from the common prefix of the previous turn's cache and the new prompt,
    as in a chat; conversations run one at a time, and the context holds the emitted ids. `keep_cache` has no effect on
    a plain model, which always reads base ids. progress: called with the number of turns just done.
    """
    begun, generated = time.perf_counter(), []
    together = 1 if _keeps_cache(model, settings) or not can_generate_batches(model) else settings.batch_size
    for first in range(0, len(conversations), together):
        rows = [Conversation(tokenizer, prompts) for prompts in conversations[first : first + together]]
        generated.append(_generate_conversations(model, tokenizer, rows, settings, settings.seed + first, progress))
    turns = [tuple(row[i] for rows in generated for row in rows) for i in range(len(conversations[0]))]
    return RatesResult(tuple(turns), time.perf_counter() - begun, settings)


def _keeps_cache(model: Any, settings: RateSettings) -> bool:
    """Returns whether turns continue from the previous turn's cache. Raises `DataError` if the engine has no cache."""
    if settings.keep_cache and scores_itself(model):
        raise DataError("keep_cache (--keep-cache) needs a model on MLX (--engine mlx)")
    return settings.keep_cache and has_hypertokens(model)


def can_generate_batches(model: Any) -> bool:
    """Returns whether several prompts can be generated in one batch."""
    return (
        scores_itself(model)
        or has_hypertokens(model)
        or all(type(entry) is KVCache for entry in make_prompt_cache(model))
    )


def _generate_conversations(
    model: Any, tokenizer: Any, rows: Sequence[Conversation], settings: RateSettings, seed: int, progress: Callable
) -> list[list[GeneratedTurn]]:
    """Generates conversations in one batch; returns the turns, indexed by [conversation][turn]."""
    cache = model.make_cache(pack=settings.pack) if _keeps_cache(model, settings) else None
    generated: list[list[GeneratedTurn]] = [[] for _ in rows]
    for number in range(len(rows[0].prompts)):
        turns = [_RunningTurn(row.next_prompt()) for row in rows]
        for i, response in _stream_turn(model, tokenizer, turns, cache, settings, seed + (number << 32)):
            turns[i].add_response(response)
        for row, turn, done in zip(rows, turns, generated, strict=True):
            done.append(_count_turn(model, turn, settings.pack))
            row.answer(turn.text, turn.base_ids)
        progress(len(rows))
    return generated


def _stream_turn(
    model: Any,
    tokenizer: Any,
    turns: Sequence[_RunningTurn],
    cache: list[Any] | None,
    settings: RateSettings,
    seed: int,
) -> Iterator[tuple[int, Any]]:
    """Generates one turn of each conversation; yields (index of the conversation, response).

    cache: the cache from which a single conversation continues; None for new requests.
    """
    options: dict[str, Any] = {name: getattr(settings, name) for name in ("max_tokens", "temp", "top_p", "stop")}
    options["seed"] = seed
    if cache is None and has_hypertokens(model):
        options["pack"] = settings.pack
    if cache is None:
        yield from stream_responses(model, tokenizer, [turn.prompt for turn in turns], **options)
        return
    prompt = turns[0].prompt
    kept_ids, kept_base_ids = prompt_caches.reusable_prefix(cache, prompt)
    prompt_caches.trim_cache_to(cache, kept_ids)
    prompt, turns[0].context = prompt[kept_base_ids:], _copy_codebook(cache)
    yield from ((0, r) for r in stream_generate(model, tokenizer, prompt, prompt_cache=cache, **options))


def stream_responses(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], **options: Any
) -> Iterator[tuple[int, GenerationResponse]]:
    """Yields (index of the prompt, response) for new requests. Several prompts need `can_generate_batches(model)`.

    options: keyword arguments of `stream_generate`.
    """
    if scores_itself(model):
        yield from model.stream(tokenizer, prompts, **options)
    elif len(prompts) > 1:
        yield from stream_batch(model, tokenizer, prompts, **options)
    else:
        yield from ((0, one) for one in stream_generate(model, tokenizer, prompts[0], **options))


def _copy_codebook(cache: Sequence[Any]) -> Codebook:
    state = find_zip_state(cache)
    assert state is not None
    return state.books[0].copy()


def _count_turn(model: Any, turn: _RunningTurn, pack: Pack | None) -> GeneratedTurn:
    """Returns the counts of a finished turn. pack: None for the model's own."""
    grams, repeated = count_repeated_grams(turn.base_ids)
    canonical, invalid, hypertokens = None, 0, 0
    if has_hypertokens(model):
        book = Codebook(codec_of_model(model, pack)) if turn.context is None else turn.context
        canonical = count_canonical_steps(book, turn.prompt, turn.base_ids)
        invalid = count_invalid_ids(book, turn.tokens)
        hypertokens = sum(model.layout.is_hyper(token) for token in turn.tokens)
    return GeneratedTurn(
        text=turn.text,
        prompt=len(turn.prompt),
        base_ids=tuple(turn.base_ids),
        steps=len(turn.tokens),
        hypertokens=hypertokens,
        canonical=canonical,
        invalid=invalid,
        grams=grams,
        repeated=repeated,
        finish_reason=turn.finish_reason,
    )


def count_canonical_steps(book: Codebook, prompt: Sequence[int], base_ids: Sequence[int]) -> int:
    """Returns the number of ids that the compressor makes of base ids after a prompt.

    prompt: base ids. book: codebook of a prefix of the prompt (possibly empty); changed: the rest is pushed to it.
    """
    book.push(compress_next(book, np.array(prompt[book.base_length :], np.uint32)))
    return len(book.compress(np.array(base_ids, np.uint32)))


def count_invalid_ids(book: Codebook, tokens: Sequence[int]) -> int:
    """Returns how many generated ids were neither base ids nor entries of the codebook when they were generated.

    book: the codebook before the first id of `tokens`; not changed. An invalid id creates no entry.
    """
    book, invalid = book.copy(), 0
    for token in tokens:
        if 0 <= token < book.params.vocab_size + len(book):
            book.push(token)
        else:
            invalid += 1
    return invalid


def count_repeated_grams(base_ids: Sequence[int]) -> tuple[int, int]:
    """Returns the number of 4-grams of base ids in a text, and the number of 4-grams that occurred earlier in it."""
    grams = Counter(tuple(base_ids[i : i + GRAM_LENGTH]) for i in range(len(base_ids) - GRAM_LENGTH + 1))
    return grams.total(), grams.total() - len(grams)


@dataclass(frozen=True)
class RatesResult:
    """The result of generating conversations with one model.

    turns: indexed by [turn][conversation]. seconds: time for all turns, prompts included.
    """

    turns: tuple[tuple[GeneratedTurn, ...], ...]
    seconds: float
    settings: RateSettings

    def record(self) -> dict[str, Any]:
        """Returns the figures and texts of the last turn, and the figures of every turn under "turns"."""
        by_turn = [summarize_turns(generated) for generated in self.turns]
        base_tokens = sum(turn["base_tokens"] for turn in by_turn)
        return {
            **by_turn[-1],
            "turns": by_turn,
            "settings": self.settings.record(),
            "seconds": self.seconds,
            "base_tokens_per_s": base_tokens / self.seconds,
            "texts": [turn.text for turn in self.turns[-1]],
        }


def summarize_turns(generated: Sequence[GeneratedTurn]) -> dict[str, Any]:
    """Returns totals over turns and ratios of totals, by name. canonical_* and of_canonical: None for a plain model.

    of_canonical: number of ids that the compressor makes of the same texts, divided by the number of generated ids.
    """
    base_tokens = sum(len(turn.base_ids) for turn in generated)
    steps = sum(turn.steps for turn in generated)
    canonical = sum(turn.canonical or 0 for turn in generated) if generated[0].canonical is not None else None
    grams = sum(turn.grams for turn in generated)
    return {
        "stories": len(generated),
        "prompt_base_tokens": sum(turn.prompt for turn in generated),
        "base_tokens": base_tokens,
        "steps": steps,
        "base_tokens_per_step": base_tokens / steps,
        "canonical_steps": canonical,
        "canonical_base_tokens_per_step": None if canonical is None else base_tokens / canonical,
        "of_canonical": None if canonical is None else canonical / steps,
        "hyper_share": sum(turn.hypertokens for turn in generated) / steps,
        "invalid_ids": sum(turn.invalid for turn in generated),
        "repeated_4grams": sum(turn.repeated for turn in generated) / grams if grams else None,
        "ended": sum(turn.finish_reason == "stop" for turn in generated) / len(generated),
    }
