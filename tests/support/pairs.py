"""Tests of all combinations of some values, of which a few are quick."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest


def quick_pairs(
    axes: Mapping[str, Iterable[Any] | Mapping[str, Any]], quick: Iterable[tuple[int, ...]] = ()
) -> pytest.MarkDecorator:
    """Returns a `parametrize` of all combinations; every two values of two axes meet in a quick one, the rest is slow.

    axes: the values of an argument, or of several whose names are joined by commas, as in a `parametrize`; in a map
    they have names. The first axis comes first in a test's name, which is the one that a `parametrize` for each axis
    gives. quick: the quick combinations in place of those, each by the numbers of its values.
    """
    values = {name: list(of.values() if isinstance(of, Mapping) else of) for name, of in axes.items()}
    ids = {name: list(of) if isinstance(of, Mapping) else _ids(name, values[name]) for name, of in axes.items()}
    cells = list(product(*(range(len(one)) for one in values.values())))
    chosen = set(quick) or _covering(cells)
    assert chosen <= set(cells), f"no combinations: {chosen - set(cells)}"
    params = [
        pytest.param(
            *(part for (name, of), i in zip(values.items(), cell, strict=True) for part in _parts(name, of[i])),
            id="-".join(of[i] for of, i in zip(ids.values(), cell, strict=True)),
            marks=() if cell in chosen else pytest.mark.slow,
        )
        for cell in cells
    ]
    return pytest.mark.parametrize(",".join(axes), params)


def _covering(cells: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Returns few cells in which every pair of numbers at two places occurs: each time the one with most new pairs."""
    pairs = {cell: set(combinations(enumerate(cell), 2)) for cell in cells}
    missing, chosen = set().union(*pairs.values()), set()
    while missing:
        best = max(cells, key=lambda cell: len(pairs[cell] & missing))
        missing -= pairs[best]
        chosen.add(best)
    return chosen


def _parts(name: str, value: Any) -> tuple[Any, ...]:
    """The value of each argument."""
    return tuple(value) if "," in name else (value,)


def _ids(name: str, values: list[Any]) -> list[str]:
    """The names that pytest gives values."""
    names = name.replace(" ", "").split(",")
    return [
        "-".join(_id(one, part, i) for one, part in zip(names, _parts(name, value), strict=True))
        for i, value in enumerate(values)
    ]


def _id(name: str, value: Any, i: int) -> str:
    if value is None or isinstance(value, str | int | float):
        return str(value)
    return getattr(value, "__name__", f"{name}{i}")
