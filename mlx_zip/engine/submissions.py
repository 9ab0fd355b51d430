"""Checks what is submitted to an engine, in the caller's thread: only Python and NumPy, no MLX arrays."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from mlx_zip.codec import Codebook, CodecParams, compress
from mlx_zip.codec.ids import Uint32s, as_ids
from mlx_zip.engine.interface import EngineInfo, Submission
from mlx_zip.engine.options import ServeOptions
from mlx_zip.engine.sampling.options import Sampling
from mlx_zip.errors import CodecError, DataError, GenerationError, MlxZipError, PromptTooLongError
from mlx_zip.files import expand_home
from mlx_zip.packs.pack import Pack, as_pack

PACKS_KEPT = 16  # most recently used packs that need not be read and checked again
UNLIMITED_IDS = 2048  # number of answer ids that KV cache is reserved for if a request has no limit


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model that checks of submissions need. Any thread may use them.

    vocab_size: number of base ids. width: columns of the logits, None if unknown. context: maximum number of positions,
    None without a limit. by_base: whether positions count base tokens. params: the codec, None for a model without
    hypertokens. model, tokenizer: fingerprints of the weights and of the tokenizer. kv_bytes_per_id: bytes that one id
    takes in the KV caches. sides_are_one: whether an entry has one hyper row for input and output. row_width: numbers
    per hyper row.
    """

    vocab_size: int
    width: int | None
    context: int | None
    by_base: bool
    params: CodecParams | None
    model: str
    tokenizer: str
    kv_bytes_per_id: int
    sides_are_one: bool = False
    row_width: int = 0

    def check_tuned_rows(self, pack: Pack) -> None:
        """Raises `ModelError` if the pack's rows were tuned for another model."""
        if pack.rows is not None:
            pack.rows.check_model(self.model, self.sides_are_one, self.row_width)


def make_engine_info(name: str, facts: ModelFacts, options: ServeOptions) -> EngineInfo:
    """Returns a model's facts for fronts. name: what the model was opened by."""
    both = hashlib.sha256(f"{facts.model} {facts.tokenizer}".encode()).hexdigest()
    sizes = (0, 0) if facts.params is None else (facts.params.merge_size, facts.params.codebook_size)
    bounds = [bound for bound in (max_base_tokens(facts), options.max_prompt_tokens) if bound is not None]
    most = options.max_running + options.max_waiting
    return EngineInfo(name, facts.vocab_size, facts.context, *sizes, both, min(bounds, default=None), most)


@dataclass(frozen=True)
class Checked:
    """A submission that passed all checks.

    base_ids: the prompt. start: pack that the codebook begins with, None for the model's own. kv_bytes: bytes of KV
    cache to reserve for the request. prediction: base ids that the answer will probably begin with.
    """

    submission: Submission
    base_ids: Uint32s
    sampling: Sampling
    start: Pack | None = None
    kv_bytes: int = 0
    prediction: Uint32s = field(default_factory=lambda: np.zeros(0, np.uint32))

    @property
    def pack_key(self) -> str:
        """The fingerprint of `start` under which sessions are looked up, "" for the model's own pack."""
        return "" if self.start is None else self.start.fingerprint


class Checks:
    """Checks submissions for one model. May be used from any thread.

    max_prompt_tokens: maximum base tokens of a prompt. max_kv_bytes: maximum bytes of all KV caches. None: no bound.
    """

    def __init__(self, facts: ModelFacts, max_prompt_tokens: int | None, max_kv_bytes: int | None) -> None:
        self.facts, self.max_prompt_tokens, self.max_kv_bytes = facts, max_prompt_tokens, max_kv_bytes
        self._read_pack_file = lru_cache(PACKS_KEPT)(lambda path, changed, size: as_pack(path))
        self._check_pack = lru_cache(PACKS_KEPT)(partial(_raise_unless_pack_fits, facts))

    def check(self, submission: Submission) -> Checked:
        """Returns the checked submission.

        Raises `GenerationError`, with the reason, if the request cannot be met, `PromptTooLongError` if the prompt is
        too long.
        """
        sampling = Sampling.from_options(submission.sampling)
        sampling.check_kept_ids_below(self.facts.width)
        sampling.check_biases(self.facts.vocab_size)
        _check_token_limits(submission, self.facts.width)
        base_ids = self._checked_prompt(submission.base_ids)
        prediction = self._checked_prediction(submission.prediction)
        start = self._checked_pack(submission.pack)
        self._check_context(base_ids, start)
        kv_bytes = self._kv_bytes_to_reserve(len(base_ids), submission.max_tokens)
        return Checked(submission, base_ids, sampling, start, kv_bytes, prediction)

    def check_pack(self, pack: Any) -> None:
        """Raises `GenerationError` if requests cannot begin with `pack`."""
        self._checked_pack(pack)

    def count_prompt_ids(self, base_ids: Sequence[int], pack: Any) -> int:
        """Returns how many ids a prompt is compressed to, beginning with `pack`. Raises as `check_pack` does."""
        start, ids, params = self._checked_pack(pack), as_ids(base_ids), self.facts.params
        return len(ids) if params is None else len(compress(params.with_start(start), ids)[0])

    def _checked_pack(self, pack: Any) -> Pack | None:
        """Reads and checks a pack, and returns it; None if `pack` is None.

        Raises `GenerationError` if the pack cannot be read or is not for this model.
        """
        if pack is None:
            return None
        if self.facts.params is None:
            raise GenerationError("pack: this model has no hypertokens, so nothing could use a pack")
        try:
            return self._check_pack(self._read_pack(pack))
        except GenerationError:
            raise
        except (MlxZipError, OSError) as error:
            raise GenerationError(f"pack: {error}") from error

    def _read_pack(self, pack: Any) -> Pack:
        """Returns the pack. Reads a file only if it is new or has changed. Raises `DataError` if it cannot be read."""
        if not isinstance(pack, str | os.PathLike):
            return as_pack(pack)
        path = expand_home(pack)
        try:
            facts = os.stat(path)
        except OSError as error:
            raise DataError(f"{path}: no such pack file") from error
        return self._read_pack_file(os.fspath(pack), facts.st_mtime_ns, facts.st_size)

    def _checked_prompt(self, ids: Sequence[int]) -> Uint32s:
        """Returns the prompt as an array. Raises `GenerationError` if it is empty or too long, or an id is invalid."""
        base_ids = self._as_base_ids(ids, "prompt")
        if not len(base_ids):
            raise GenerationError("the prompt is empty; give at least one id")
        bound = self.max_prompt_tokens
        if bound is not None and len(base_ids) > bound:
            raise PromptTooLongError.of(len(base_ids), bound, f"at most {bound} are allowed here")
        return base_ids

    def _checked_prediction(self, ids: Sequence[int]) -> Uint32s:
        """Returns a prediction as an array. Raises `GenerationError` if it is too long or has an invalid base id."""
        base_ids, most = self._as_base_ids(ids, "prediction"), max_base_tokens(self.facts)
        if most is not None and len(base_ids) > most:
            raise prediction_too_long_error(most)
        return base_ids

    def _as_base_ids(self, ids: Sequence[int], what: str) -> Uint32s:
        """Returns ids as an array. Raises `GenerationError` for an invalid base id. what: "prompt" or "prediction"."""
        try:
            base_ids = as_ids(ids)
        except (CodecError, TypeError, ValueError) as error:
            raise GenerationError(f"the {what}: {error}") from error
        check_base_ids(base_ids, self.facts.vocab_size, what)
        return base_ids

    def _check_context(self, base_ids: Uint32s, start: Any) -> None:
        """Raises `PromptTooLongError` if the prompt leaves no position of the context for an answer."""
        context, params = self.facts.context, self.facts.params
        if context is None or len(base_ids) < context:
            return
        if params is None or self.facts.by_base:
            raise context_exceeded_error(len(base_ids), context - 1, context)
        params = params.with_start(start)
        ids, _ = compress(params, base_ids)
        if len(ids) >= context:
            raise context_exceeded_error(
                len(base_ids), push_and_count_tokens(Codebook(params), ids[: context - 1]), context
            )

    def _kv_bytes_to_reserve(self, prompt: int, max_tokens: int) -> int:
        """Returns the bytes of KV cache to reserve for a request, 0 if KV caches have no bound. prompt: base tokens.

        Raises `GenerationError` if the request may need more than the bound.
        """
        per_id, bound, context = self.facts.kv_bytes_per_id, self.max_kv_bytes, self.facts.context
        if bound is None:
            return 0
        least = prompt + max(max_tokens, 1)
        if context is not None:
            least = min(least, max(context, prompt))
        if least * per_id > bound:
            raise GenerationError(
                f"{prompt} prompt tokens and max_tokens {max_tokens} may need {least * per_id} bytes of KV cache, and "
                f"there are {bound}: ask for fewer"
            )
        return min(bound, per_id * (least if max_tokens > 0 else prompt + UNLIMITED_IDS))


def _raise_unless_pack_fits(facts: ModelFacts, pack: Pack) -> Pack:
    """Returns the pack. Raises `MlxZipError` if it is for another tokenizer, codec or model."""
    assert facts.params is not None
    pack.check_tokenizer(facts.tokenizer, pack.name or "the pack")
    facts.check_tuned_rows(pack)
    facts.params.with_start(pack)
    return pack


def check_base_ids(ids: Sequence[int] | Uint32s, vocab_size: int, what: str = "prompt") -> None:
    """Raises `GenerationError` if an id is not a base id. what: what the ids belong to, for the message."""
    values = np.asarray(ids, object if isinstance(ids, list) else None)
    wrong = np.flatnonzero((values < 0) | (values >= vocab_size))
    if len(wrong):
        at = wrong[0]
        raise GenerationError(f"{what} id {values[at]} at index {at} is not a base id (0 to {vocab_size - 1})")


def max_base_tokens(facts: ModelFacts) -> int | None:
    """Returns the upper bound on the base tokens of a prompt or an answer, None without a limit."""
    per_position = 1 if facts.by_base or facts.params is None else max(1, facts.params.merge_size)
    return None if facts.context is None else (facts.context - 1) * per_position


def prediction_too_long_error(most: int) -> GenerationError:
    """Returns the error for a prediction longer than any answer. most: maximum base tokens of an answer."""
    return GenerationError(f"prediction: it has more than the {most} base tokens that an answer can have; shorten it")


def context_exceeded_error(tokens: int, most: int, context: int) -> PromptTooLongError:
    """Returns the error for a prompt that leaves no position for an answer.

    tokens: base tokens of the prompt. most: how many base tokens fit. context: the model's maximum number of positions.
    """
    return PromptTooLongError.of(tokens, most, f"the model's context has {context} positions")


def push_and_count_tokens(book: Codebook, ids: Uint32s) -> int:
    """Pushes ids to a codebook and returns how many base tokens the codebook then holds."""
    book.push(ids)
    return book.base_length


def _check_token_limits(submission: Submission, width: int | None) -> None:
    """Raises `GenerationError` for an invalid `max_tokens` or `top_logprobs`."""
    check_max_tokens(submission.max_tokens)
    top = submission.top_logprobs
    if top is not None and (not _is_integer(top) or top < 0 or (width is not None and top >= width)):
        raise GenerationError(f"top_logprobs must be an integer from 0 to below the vocabulary's size, got {top!r:.80}")


def check_max_tokens(value: Any, name: str = "max_tokens") -> None:
    """Raises `GenerationError` if `value` is an invalid limit on tokens. name: the option's name, for the message."""
    if not _is_integer(value) or value == 0 or value < -1:
        raise GenerationError(f"{name} must be an integer of at least 1, or -1 for no limit, got {value!r:.80}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
