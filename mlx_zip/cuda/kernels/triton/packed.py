"""The Triton kernel that unpacks a packed matrix, and a device function that reads columns of one row."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

WORDS = 512  # words per program


def launch_unpack(
    shape: tuple[int, int],
    words: torch.Tensor,
    scales: torch.Tensor | None,
    biases: torch.Tensor | None,
    bits: int,
    group: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns the matrix of `shape` [R, D] in `dtype`; other arguments as `kernel_arguments_of` returns them."""
    out = torch.empty(shape, dtype=dtype, device=words.device)
    if count := words.numel():
        _unpack_kernel[(triton.cdiv(count, WORDS),)](
            words, scales, biases, out, count, BITS=bits, GROUP=group, WORDS=WORDS
        )  # fmt: skip
    return out


@triton.jit
def _unpack_kernel(
    words, scales, biases, out, count, BITS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    PER: tl.constexpr = 32 // BITS  # weights in a word
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = word < count
    packed = tl.load(words + word, mask=inside, other=0)
    group = word * PER // GROUP
    scale = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(biases + group, mask=inside, other=0.0).to(tl.float32)
    place = tl.arange(0, PER)
    level = ((packed[:, None] >> (place * BITS)[None, :]) & ((1 << BITS) - 1)).to(tl.float32)
    value = level * scale[:, None] + bias[:, None]
    at = out + word[:, None] * PER + place[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def load_row_values(matrix, scales, biases, line, width, column, end, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Returns the values of row `line` (int64) at `column`, float32; NaN for columns from `end` on."""
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
