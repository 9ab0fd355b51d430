"""The Triton kernels of the hyper-encoders' pieces."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlx_zip.cuda.kernels.packed import Matrix, kernel_arguments_of, value_dtype
from mlx_zip.cuda.kernels.triton.packed import load_row_values

BLOCK = 512  # columns per program
PLACES = 16  # places of an attention program: the smallest size that `tl.dot` takes


def launch_embed_entries(entries: torch.Tensor, matrix: Matrix, places: torch.Tensor | None) -> torch.Tensor:
    """Returns rows [N, S, D]; arguments as in `encoder.embed_entries`, which has checked them."""
    (count, length), (height, width) = entries.shape, matrix.shape
    values, scales, biases, bits, group = kernel_arguments_of(matrix)
    out = torch.empty((count, length, width), dtype=value_dtype(matrix), device=entries.device)
    if out.numel():
        _embed_entries_kernel[(count * length, triton.cdiv(width, BLOCK))](
            entries, values, scales, biases, places, out, length, height, width,
            BITS=bits, GROUP=group, ADD=places is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return out


@triton.jit
def _embed_entries_kernel(
    entries, matrix, scales, biases, places, out, length, height, width,
    BITS: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    line = tl.load(entries + at).to(tl.int64)
    # a column limit, because the interpreter refuses a mask made of a vector and a scalar condition
    end = tl.where(line >= 0, tl.where(line < height, width, 0), 0)
    value = load_row_values(matrix, scales, biases, line, width, column, end, BITS, GROUP)
    if ADD:
        value += tl.load(places + (at % length) * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + at * width + column, value.to(out.dtype.element_ty), mask=column < width)


def launch_attend_in_entries(qkv: torch.Tensor, lengths: torch.Tensor, heads: int, mask: str) -> torch.Tensor:
    """Returns attention [N, S, D]; arguments as in `encoder.attend_in_entries`, which has checked them."""
    count, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    out = torch.empty((count, length, width), dtype=qkv.dtype, device=qkv.device)
    if out.numel():
        each = width // heads
        block = max(16, triton.next_power_of_2(each))
        _attend_in_entries_kernel[(count, heads)](
            qkv, lengths, out, length, width, each, each**-0.5, MASK=mask, PLACES=PLACES, BLOCK=block
        )
    return out


@triton.jit
def _attend_in_entries_kernel(
    qkv, lengths, out, length, width, each, scale, MASK: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr
):
    entry, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, column = tl.arange(0, PLACES), tl.arange(0, BLOCK)
    inside = (place < length)[:, None] & (column < each)[None, :]
    at = qkv + (entry * length + place[:, None]) * 3 * width + head * each + column[None, :]
    # float32, because a bfloat16 product is wrong in the interpreter; the matrices are small
    q = tl.load(at, mask=inside, other=0.0).to(tl.float32) * scale
    k = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(at + 2 * width, mask=inside, other=0.0).to(tl.float32)
    real = place < tl.load(lengths + entry)
    seen = real[None, :] & (place >= 0)[:, None]
    if MASK == "both":
        seen = seen & real[:, None]
    if MASK == "causal":
        seen = seen & (place[:, None] >= place[None, :])
    scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
    top = tl.max(scores, axis=1)
    weights = tl.exp(scores - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weights, axis=1)
    value = tl.dot(weights, v, input_precision="ieee") / tl.where(total == 0.0, 1.0, total)[:, None]
    to = out + (entry * length + place[:, None]) * width + head * each + column[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=inside)


def launch_pool_places(x: torch.Tensor, lengths: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns pooled rows [N, D]; arguments as in `encoder.pool_places`, which has checked them."""
    count, length, width = x.shape
    out = torch.empty((count, width), dtype=x.dtype, device=x.device)
    if out.numel():
        _pool_places_kernel[(count, triton.cdiv(width, BLOCK))](x, lengths, out, length, width, KIND=kind, BLOCK=BLOCK)
    return out


@triton.jit
def _pool_places_kernel(x, lengths, out, length, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    end = length
    start = 0
    if KIND != "all":
        end = tl.load(lengths + entry).to(tl.int32)
    if KIND == "last":
        start = end - 1
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(start, end):
        total += tl.load(x + (entry * length + place) * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + entry * width + column, (total / (end - start)).to(out.dtype.element_ty), mask=inside)
