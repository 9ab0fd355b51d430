"""The options of sampling, checked, with mlx-lm's names and defaults. Needs neither MLX nor PyTorch."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, TypedDict

from mlx_zip.errors import GenerationError

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
    """Sampling options, with the names and defaults of mlx-lm 0.32; `temp` 0 is greedy.

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
    def from_options(cls, options: Mapping[str, Any], others: Iterable[str] = ()) -> Sampling:
        """Returns the options given by name. others: further options of the caller, which error messages may suggest.

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
            self._raise_unless_valid(name, "a finite number", _is_finite(getattr(self, name)))
        self._raise_unless_valid("temp", "0, or from 1e-30 to 1e30", self.temp == 0 or 1e-30 <= self.temp <= 1e30)
        # a smaller top_p is 0 in float32, which leaves out every id
        self._raise_unless_valid("top_p", "0, or from 1e-30 to 1", self.top_p == 0 or 1e-30 <= self.top_p <= 1)
        self._raise_unless_valid("min_p", "from 0 to 1", 0 <= self.min_p <= 1)
        self._raise_unless_valid("min_tokens_to_keep", "an integer >= 1", _is_integer(self.min_tokens_to_keep, 1))
        self._raise_unless_valid("top_k", "an integer >= 0", _is_integer(self.top_k, 0))
        self._raise_unless_valid("xtc_probability", "from 0 to 1", 0 <= self.xtc_probability <= 1)
        self._raise_unless_valid("xtc_threshold", "from 0 to 0.5", 0 <= self.xtc_threshold <= 0.5)
        self._raise_unless_valid(
            "seed", "an integer from 0 to 2^64-1", self.seed is None or _is_integer(self.seed, 0, 2**64 - 1)
        )
        for kind in ("repetition", "presence", "frequency"):
            size, penalty = f"{kind}_context_size", getattr(self, f"{kind}_penalty")
            self._raise_unless_valid(
                size, "an integer from 1 to 2^31-1", _is_integer(getattr(self, size), 1, 2**31 - 1)
            )
            self._raise_unless_valid(f"{kind}_penalty", "a finite number", penalty is None or _is_finite(penalty))
        self._raise_unless_valid(
            "repetition_penalty", "above 0", self.repetition_penalty is None or self.repetition_penalty > 0
        )
        biases = self.logit_bias or {}
        fits = isinstance(biases, Mapping) and all(_is_number(bias) and bias <= MOST_BIAS for bias in biases.values())
        self._raise_unless_valid("logit_bias", f"a map of base ids to numbers up to {MOST_BIAS:g}", fits)

    def _raise_unless_valid(self, name: str, rule: str, holds: bool) -> None:
        if not holds:
            flag = "--" + name.replace("_", "-")
            raise GenerationError(f"{name} ({flag}) must be {rule}, got {getattr(self, name)!r}")

    def changed_sampler_options(self) -> list[str]:
        """Returns the names of the sampler's options that are not at their defaults."""
        names = ("temp", "top_p", "min_p", "min_tokens_to_keep", "top_k", "xtc_probability", "xtc_threshold")
        return [name for name in names if getattr(self, name) != getattr(Sampling, name)]

    def check_kept_ids_below(self, width: int | None) -> None:
        """Raises `GenerationError` if `top_k` or `min_tokens_to_keep` is not below `width`.

        width: number of columns of the logits, None if not known.
        """
        if width is not None:
            self._raise_unless_valid("top_k", f"below the {width} columns of the logits", self.top_k < width)
            self._raise_unless_valid(
                "min_tokens_to_keep", f"below the {width} columns", self.min_tokens_to_keep < width
            )

    def check_biases(self, base_ids: int | None) -> None:
        """Raises `GenerationError` if a biased id is not a base id, or if the biases rule out every base id.

        base_ids: number of base ids, None if not known.
        """
        wrong = [i for i in self.logit_bias or {} if not _is_integer(i, 0) or (base_ids is not None and i >= base_ids)]
        if wrong:
            raise GenerationError(f"logit_bias (--logit-bias): {wrong[0]!r} is not a base id (0 to {base_ids} - 1)")
        if base_ids is not None and [*(self.logit_bias or {}).values()].count(-math.inf) == base_ids:
            raise GenerationError("logit_bias (--logit-bias) rules out every base id, so nothing could be chosen")

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty or bias is set."""
        return bool(self.logit_bias or self.repetition_penalty or self.presence_penalty or self.frequency_penalty)


def parse_logit_bias(biases: Mapping[str, Any]) -> dict[int, float]:
    """Converts a JSON map from base ids to numbers to `Sampling.logit_bias`.

    Raises `GenerationError` if a key is not a base id or a value is not a number.
    """
    for key, value in biases.items():
        if not key.isdecimal() or isinstance(value, bool) or not isinstance(value, int | float):
            raise GenerationError(f"--logit-bias: {key!r}: {value!r} is not a base id with a number")
    try:
        return {int(key): float(value) for key, value in biases.items()}
    except (ValueError, OverflowError) as error:  # digits beyond what Python converts
        raise GenerationError(f"--logit-bias: a number is too long: {error}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and -sys.float_info.max <= value <= sys.float_info.max


def _is_integer(value: Any, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
