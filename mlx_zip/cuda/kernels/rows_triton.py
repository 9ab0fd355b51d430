"""A piece of Triton kernels: columns of one row of a matrix, dense or packed."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_values(matrix, scales, biases, line, width, column, end, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Returns columns of row `line` (int64) in float32, NaN for those from `end` on."""
    inside = column < end
    if BITS == 0:
        value = tl.load(matrix + line * width + column, mask=inside, other=float("nan")).to(tl.float32)
    else:
        PER: tl.constexpr = 32 // BITS
        word = tl.load(matrix + line * (width // PER) + column // PER, mask=inside, other=0)
        level = ((word >> (column % PER * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
        group = line * (width // GROUP) + column // GROUP
        scale = tl.load(scales + group, mask=inside, other=float("nan")).to(tl.float32)
        value = level * scale + tl.load(biases + group, mask=inside, other=float("nan")).to(tl.float32)
    return value
