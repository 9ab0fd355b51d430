"""Settings, totals and pruning of a dictionary of phrases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_zip.codec._native import ffi, lib
from mlx_zip.errors import CodecError
from mlx_zip.vocab.multitok.units import Samples, Units

MAX_PHRASES: int = lib.MLXZIP_MAX_PHRASES
NO_ID = (1 << 32) - 1  # id of a run that is only the beginning of phrases
PRUNINGS = ("published", "single", "parent", "reencode")


@dataclass(frozen=True)
class Settings:
    """The settings that a dictionary is trained with.

    units: `Words` or `Tokens`. window: maximum units of a phrase; 0: any number (the paper's Max). first_id: id of unit
    0; units take consecutive ids from there, then phrases do. limit: maximum number of phrases. unk_id: id emitted for
    an unknown unit, which is part of no phrase; it is a unit's id or below first_id. None: an unknown unit is an error.
    Raises `CodecError` naming the field.
    """

    units: Units
    window: int = 0
    first_id: int = 1
    limit: int = MAX_PHRASES
    unk_id: int | None = None

    def __post_init__(self) -> None:
        room = NO_ID - self.units.size
        if not 1 <= self.units.size <= 1 << 31:
            raise CodecError(f"{self.units.size} units are not within 1..2^31")
        bounds = {"window": NO_ID, "first_id": room, "limit": MAX_PHRASES}
        if self.unk_id is not None:
            bounds["unk_id"] = self.first_id + self.units.size - 1
        for name, most in bounds.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value <= most:
                raise CodecError(f"{name} must be an integer within 0..{most}, got {value!r:.40}")
        object.__setattr__(self, "limit", min(self.limit, room - self.first_id))

    def native(self) -> Any:
        """Returns the settings as the C library's struct."""
        unk = self.unk_id is not None
        return ffi.new(
            "mlxzip_phrases_spec *",
            {
                "units": self.units.size,
                "first_id": self.first_id,
                "window": self.window,
                "limit": self.limit,
                "has_unk": unk,
                "unk_id": self.unk_id if unk else 0,
            },
        )


@dataclass
class Totals:
    """Totals of encoded texts: finished samples, units in them, tokens that these became."""

    samples: int = 0
    units: int = 0
    tokens: int = 0

    @property
    def ratio(self) -> float:
        """Tokens per unit, the paper's r (definition 1); 1 without units."""
        return self.tokens / self.units if self.units else 1.0

    def add(self, units: Samples, ids: Samples) -> None:
        """Adds samples of units, and the ids that they were encoded to, to the totals."""
        self.samples += len(units)
        self.units += len(units.ids)
        self.tokens += len(ids.ids)


@dataclass(frozen=True)
class Pruning:
    """How a dictionary was pruned: phrases used at most `at_most` times were removed, in one of the modes `PRUNINGS`.

    Raises `CodecError` naming the field.
    """

    at_most: int = 1
    mode: str = "reencode"

    def __post_init__(self) -> None:
        if self.mode not in PRUNINGS:
            raise CodecError(f"mode must be one of {', '.join(PRUNINGS)}, got {self.mode!r:.40}")
        if type(self.at_most) is not int or self.at_most < 0:
            raise CodecError(f"at_most must be an integer of 0 or more, got {self.at_most!r:.40}")


def leading(samples: int, percent: float) -> int:
    """Returns `percent` percent of `samples`, rounded down. Raises `CodecError` outside 0..100 percent."""
    if not 0 <= percent <= 100:
        raise CodecError(f"a fraction must be within 0..100 percent, got {percent}")
    return int(samples * percent / 100)
