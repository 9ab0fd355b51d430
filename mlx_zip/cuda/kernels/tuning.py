"""Block sizes of kernels: measured once per shape on a GPU, the first of the list elsewhere."""

# Triton may be missing.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton

Sizes = tuple[Mapping[str, int], int]  # constants of the kernel, and warps of a program


def is_interpreted() -> bool:
    """Returns whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def tuned(choices: Sequence[Sizes], key: Sequence[str]) -> Callable[[Any], Any]:
    """Returns a decorator of a jitted kernel that passes it the fastest of these sizes.

    key: names of arguments; sizes are measured once for each set of their values, at the first launch, which therefore
    must not be inside of a graph's capture. A kernel must not read what it writes.
    """
    configs = [triton.Config(dict(sizes), num_warps=warps) for sizes, warps in choices]
    measured = torch.cuda.is_available() and not is_interpreted()
    return triton.autotune(configs=configs if measured else configs[:1], key=list(key))
