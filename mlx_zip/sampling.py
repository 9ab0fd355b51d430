"""How the next id is chosen: mlx-lm's samplers, and mlx-lm's penalties applied to base tokens.

If ids were penalised, a penalised word could come back inside a hypertoken. So penalties and biases look at base
tokens: the context is what the ids read so far expand to, and a hypertoken gets the penalties of all its base ids.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, TypedDict

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import LogitsProcessor, Sampler, make_logits_processors, make_sampler

from mlx_zip.entry_sums import EntrySums
from mlx_zip.errors import GenerationError
from mlx_zip.state import ZipState

MOST_BIAS = 1e3  # a hypertoken's bias is the sum over its base ids, up to 16, and float16 ends at 65504


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments, for type checkers."""

    temp: float
    top_p: float
    min_p: float
    min_tokens_to_keep: int
    top_k: int
    xtc_probability: float
    xtc_threshold: float
    seed: int | None
    repetition_penalty: float | None
    repetition_context_size: int
    presence_penalty: float | None
    presence_context_size: int
    frequency_penalty: float | None
    frequency_context_size: int
    logit_bias: Mapping[int, float] | None


@dataclass(frozen=True)
class Sampling:
    """Sampling options, named and defaulted as in mlx-lm 0.32; `temp` 0 is greedy.

    Penalties look at the last `*_context_size` base tokens. logit_bias: base id -> number added to its logit. Raises
    `GenerationError` naming the option that is out of range.
    """

    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any], others: Iterable[str] = ()) -> Sampling:
        """Returns the options given by name. others: option names that the caller takes itself, for error messages.

        Raises `GenerationError` naming an unknown option and the one that was probably meant.
        """
        names = {field.name for field in fields(cls)}
        if unknown := sorted(options.keys() - names):
            known = sorted({*names, *others})
            meant = get_close_matches(unknown[0], known, 1, 0.5) or get_close_matches(unknown[0][:4], known, 1, 0.5)
            hint = f"did you mean {meant[0]}?" if meant else f"the options are {', '.join(known)}"
            raise GenerationError(f"there is no option {unknown[0]!r}; {hint}")
        return cls(**options)

    def __post_init__(self) -> None:
        for name in ("temp", "top_p", "min_p", "xtc_probability", "xtc_threshold"):
            self._check(name, "a finite number", _is_finite(getattr(self, name)))
        self._check("temp", "0, or from 1e-30 to 1e30", self.temp == 0 or 1e-30 <= self.temp <= 1e30)
        # a smaller one is 0 in float32, which leaves out every id
        self._check("top_p", "0, or from 1e-30 to 1", self.top_p == 0 or 1e-30 <= self.top_p <= 1)
        self._check("min_p", "from 0 to 1", 0 <= self.min_p <= 1)
        self._check("min_tokens_to_keep", "an integer >= 1", _is_integer(self.min_tokens_to_keep, 1))
        self._check("top_k", "an integer >= 0", _is_integer(self.top_k, 0))
        self._check("xtc_probability", "from 0 to 1", 0 <= self.xtc_probability <= 1)
        self._check("xtc_threshold", "from 0 to 0.5", 0 <= self.xtc_threshold <= 0.5)
        self._check("seed", "an integer from 0 to 2^64-1", self.seed is None or _is_integer(self.seed, 0, 2**64 - 1))
        for kind in ("repetition", "presence", "frequency"):
            size, penalty = f"{kind}_context_size", getattr(self, f"{kind}_penalty")
            self._check(size, "an integer from 1 to 2^31-1", _is_integer(getattr(self, size), 1, 2**31 - 1))
            self._check(f"{kind}_penalty", "a finite number", penalty is None or _is_finite(penalty))
        self._check("repetition_penalty", "above 0", self.repetition_penalty is None or self.repetition_penalty > 0)
        biases = self.logit_bias or {}
        fits = isinstance(biases, Mapping) and all(_is_number(bias) and bias <= MOST_BIAS for bias in biases.values())
        self._check("logit_bias", f"a map of base ids to numbers up to {MOST_BIAS:g}", fits)

    def _check(self, name: str, rule: str, holds: bool) -> None:
        """Raises `GenerationError` saying that the option must follow the rule, unless `holds`."""
        if not holds:
            flag = "--" + name.replace("_", "-")
            raise GenerationError(f"{name} ({flag}) must be {rule}, got {getattr(self, name)!r}")

    def sampler_options(self) -> list[str]:
        """Returns the names of the sampler's options that are not at their defaults."""
        names = ("temp", "top_p", "min_p", "min_tokens_to_keep", "top_k", "xtc_probability", "xtc_threshold")
        return [name for name in names if getattr(self, name) != getattr(Sampling, name)]

    def make_sampler(self, width: int | None, special_ids: Sequence[int]) -> Sampler:
        """Returns a function from log-probabilities [B, W] to ids [B].

        width: W if known, to check options against. special_ids: ids that XTC never excludes. Raises `GenerationError`.
        """
        self.check_width(width)
        return make_sampler(
            self.temp,
            self.top_p,
            self.min_p,
            self.min_tokens_to_keep,
            self.top_k,
            self.xtc_probability,
            self.xtc_threshold,
            list(special_ids),
        )

    def check_width(self, width: int | None) -> None:
        """Raises `GenerationError` for options that ask for more than the `width` columns of the logits, if known."""
        if width is not None:
            self._check("top_k", f"below the {width} columns of the logits", self.top_k < width)
            self._check("min_tokens_to_keep", f"below the {width} columns", self.min_tokens_to_keep < width)

    def check_biases(self, base_ids: int | None) -> None:
        """Raises `GenerationError` for a bias on what is no base id, and for biases that rule out every base id.

        base_ids: number of base ids, if known.
        """
        wrong = [i for i in self.logit_bias or {} if not _is_integer(i, 0) or (base_ids is not None and i >= base_ids)]
        if wrong:
            raise GenerationError(f"logit_bias (--logit-bias): {wrong[0]!r} is not a base id (0 to {base_ids} - 1)")
        if base_ids is not None and [*(self.logit_bias or {}).values()].count(-math.inf) == base_ids:
            raise GenerationError("logit_bias (--logit-bias) rules out every base id, so nothing could be chosen")

    def make_processors(self, base_ids: int | None, state: ZipState | None, row: int = 0) -> list[LogitsProcessor]:
        """Returns logits processors, called with (ids, logits [1, W]), that apply penalties and biases to a sequence.

        base_ids: number of base ids, if known. state, row: the sequence's `ZipState` and its row there; without a state
        the processors are mlx-lm's own. Raises `GenerationError` for a bias on an id that is not a base id.
        """
        self.check_biases(base_ids)
        if state is not None:
            return [BasePenalties(self, state, row)] if self._has_penalties else []
        return make_logits_processors(
            dict(self.logit_bias or {}),
            self.repetition_penalty,
            self.repetition_context_size,
            self.presence_penalty,
            self.presence_context_size,
            self.frequency_penalty,
            self.frequency_context_size,
        )

    @property
    def _has_penalties(self) -> bool:
        """Whether any penalty or bias is set."""
        return bool(self.logit_bias or self.repetition_penalty or self.presence_penalty or self.frequency_penalty)


def as_logit_bias(biases: Mapping[str, Any]) -> dict[int, float]:
    """Returns a JSON map from base ids to numbers as `Sampling.logit_bias`.

    Raises `GenerationError` for a key that is no base id, and for a value that is no number.
    """
    for key, value in biases.items():
        if not key.isdecimal() or isinstance(value, bool) or not isinstance(value, int | float):
            raise GenerationError(f"--logit-bias: {key!r}: {value!r} is not a base id with a number")
    try:
        return {int(key): float(value) for key, value in biases.items()}
    except (ValueError, OverflowError) as error:  # digits beyond what Python converts
        raise GenerationError(f"--logit-bias: a number is too long: {error}") from error


def base_ids_only(model: Any) -> LogitsProcessor:
    """Returns a logits processor that forbids hypertokens, for mlx-lm's own `stream_generate` and `generate`.

    mlx-lm turns ids into text without the codebook, so a hypertoken has no text there. With this processor
    (`logits_processors=[base_ids_only(model)]`) the text is right and no step is saved.
    """
    allowed = mx.arange(model.layout.width) < model.layout.vocab_size
    return lambda tokens, logits: mx.where(allowed[: logits.shape[-1]], logits, -mx.inf)


class BasePenalties:
    """A logits processor that applies mlx-lm's penalties to a sequence with hypertokens.

    A base id is penalised as in mlx-lm. A hypertoken gets the sum of its base ids' biases, presence and frequency
    penalties, and the repetition penalty r once for each of its k base ids that were seen (a factor r^k). Logits of
    -inf stay -inf.

    A call touches only columns that have a penalty or a bias, and computes those of entries anew only if they changed.
    """

    def __init__(self, sampling: Sampling, state: ZipState, row: int) -> None:
        self.sampling, self.state, self.row = sampling, state, row
        # Terms over base ids, [V + 1]: bias, 1 where the repetition penalty applies, and what is subtracted. The last
        # element is 0 and stands for the padding of entries.
        size = state.books[row].params.vocab_size + 1
        self._bias, self._seen, self._taken = (np.zeros(size, np.float32) for _ in range(3))
        self._terms = self._bias, self._seen, self._taken
        for base_id, value in (sampling.logit_bias or {}).items():
            self._bias[base_id] = value
        self._biased, self._context = np.flatnonzero(self._bias), np.zeros(0, np.int64)
        self._changed = np.zeros(size, bool)  # base ids whose terms have changed since the last call
        options = (
            sampling.logit_bias,
            sampling.repetition_penalty,
            sampling.presence_penalty or sampling.frequency_penalty,
        )
        self._used = [index for index, option in enumerate(options) if option]  # which of the terms may not be 0
        self._sums = EntrySums([self._terms[i] for i in self._used], state.books[row].params.merge_size)

    def bind(self, state: ZipState, row: int) -> None:
        """Makes the processor follow the same sequence in another state, or in another row, from now on."""
        self.state, self.row = state, row

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Returns logits [1, W] after penalties. The ids are taken from the codebook's log; `tokens` is not used."""
        columns, (bias, seen, taken) = self._column_terms()
        if not len(columns):
            return logits
        at = mx.array(columns)
        factor = (self.sampling.repetition_penalty or 1.0) ** mx.array(seen)
        chosen = mx.take(logits, at, axis=1).astype(mx.float32) + mx.array(bias)
        chosen = mx.where(chosen < 0, chosen * factor, chosen / factor) - mx.array(taken)
        return mx.put_along_axis(logits, at[None], chosen, axis=1)  # in the dtype of the logits

    def _column_terms(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the columns [N] in which any of the three terms is not 0, and the terms there, [N] each."""
        changed = self._update_context()
        self._changed[changed] = True
        sums = self._sums.update(self.state.books[self.row], self._changed)
        self._changed[changed] = False
        context = self._context
        others = (self._bias[context] == 0) & ((self._seen[context] != 0) | (self._taken[context] != 0))
        base_ids = np.concatenate([self._biased, context[others]])
        slots = np.flatnonzero(sums.any(axis=0))
        columns = np.concatenate([base_ids, len(self._bias) - 1 + slots])
        terms = [np.zeros(len(columns), np.float32)] * 3
        for index, of in zip(self._used, sums, strict=True):
            terms[index] = np.concatenate([self._terms[index][base_ids], of[slots]])
        return columns, terms

    def _update_context(self) -> np.ndarray:
        """Computes the terms for the context of now and returns the base ids whose terms have changed."""
        repeated, present, counted = self._contexts()
        context = np.unique(np.concatenate([repeated, present, counted]))
        both = np.concatenate([self._context, context])
        seen, taken = self._seen[both], self._taken[both]
        self._seen[both] = self._taken[both] = 0
        self._seen[repeated] = 1
        if self.sampling.presence_penalty:
            self._taken[present] += self.sampling.presence_penalty
        if self.sampling.frequency_penalty:
            np.add.at(self._taken, counted, self.sampling.frequency_penalty)
        self._context = context
        return both[(seen != self._seen[both]) | (taken != self._taken[both])]

    def _contexts(self) -> list[np.ndarray]:
        """Returns the last base tokens that were read, as many as each penalty looks at; none for one that is off."""
        options, book = self.sampling, self.state.books[self.row]
        counts = [
            options.repetition_context_size if options.repetition_penalty else 0,
            options.presence_context_size if options.presence_penalty else 0,
            options.frequency_context_size if options.frequency_penalty else 0,
        ]
        last = book.base_ids(max(0, book.mark() - max(counts)))  # the last n ids have at least n base tokens
        last = last[last < len(self._bias) - 1]  # a batch's ended row reads a pad id, which may be no base id
        return [last[max(0, len(last) - count) :] for count in counts]


def _is_number(value: Any) -> bool:
    """Returns whether value is an int or a float."""
    return isinstance(value, int | float)


def _is_finite(value: Any) -> bool:
    """Returns whether value is an int or a float, and neither infinite nor NaN."""
    return _is_number(value) and -sys.float_info.max <= value <= sys.float_info.max


def _is_integer(value: Any, low: int, high: float = math.inf) -> bool:
    """Returns whether value is an integer from low to high."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
