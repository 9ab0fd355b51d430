"""Tests of many cases of which a few are quick."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Returns the cases of a `parametrize`, all but `quick` marked slow. quick: some of the cases.

    A case that is a tuple has a value for each of several arguments.
    """
    cases = list(cases)
    gone = [case for case in quick if case not in cases]
    assert not gone, f"no longer among the cases: {gone}"
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
