"""Compares the numbers of two runs that should be the same run.

On a CPU they are equal, bit for bit. GPUs add up gradients of gathered rows with atomic additions, whose order changes
from run to run, so there the last digits differ, and an optimizer like AdamW enlarges differences of tiny gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

RTOL = 1e-3  # of losses and gradient norms, on a GPU
SHARE = 0.01  # how large a difference of weights may be, as a share of the weights' norm, on a GPU


def is_exact() -> bool:
    """Whether a repeated run gives the same bits on the default device."""
    return mx.default_device() == mx.cpu


def assert_same_losses(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """found, expected: numbers, or equally long tuples of them."""
    if is_exact():
        assert found == expected
    else:
        np.testing.assert_allclose(np.array(found, np.float64), np.array(expected, np.float64), rtol=RTOL)


def assert_same_weights(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """found, expected: weights by name."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if is_exact():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        else:
            off = np.linalg.norm(np.asarray(found[name], np.float64) - value)
            assert off <= SHARE * np.linalg.norm(np.asarray(value, np.float64)), name
