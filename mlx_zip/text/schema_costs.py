"""Refuses schemas whose patterns would keep the grammar library busy for seconds at every step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_zip.errors import GenerationError

MOST_REPEATED = 20_000  # characters of a pattern, with everything written out that is repeated a given number of times
MOST_MULTIPLE = 10_000
_ITEMS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)


def check_costs(schema: Any) -> None:
    """Raises `GenerationError` for a pattern that repeats too much, and for a `multipleOf` that is too large."""
    for key, value in keywords(schema):
        patterns = [value] if key == "pattern" else list(value) if key == "patternProperties" else []
        if any(isinstance(pattern, str) and _length(pattern) > MOST_REPEATED for pattern in patterns):
            raise GenerationError(f"the schema cannot be followed: a {key} repeats too much")
        if key == "multipleOf" and isinstance(value, int | float) and abs(value) > MOST_MULTIPLE:
            raise GenerationError(f"the schema cannot be followed: multipleOf is above {MOST_MULTIPLE}")


def keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yields all keys and values in a schema, at any depth."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            yield from value.items()
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value


def _length(pattern: str) -> int:
    """Returns about how many characters a pattern has with its counted repetitions written out."""
    sums, last = [0], 0  # of the open groups, and what a repetition after the last item would repeat
    for item in _ITEMS.finditer(pattern):
        if item[1]:
            times = max(int(item[1][:9]), int((item[2] or "0")[:9]))
            sums[-1] += last * (times - 1) if times else 0
            last *= max(times, 1)
        elif item[0] == "(":
            sums.append(0)
        elif item[0] == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        else:
            last = 1
            sums[-1] += 1
    return sum(sums)
