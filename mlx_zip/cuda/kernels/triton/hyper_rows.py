"""The Triton kernels of hyper rows: pieces of the hyper-encoders, the look-up of embeddings, rows of new entries."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mlx_zip.cuda.kernels.packed import Matrix, kernel_arguments_of, value_dtype
from mlx_zip.cuda.kernels.triton.packed import load_row_values

BLOCK = 512  # columns per program of a piece of an encoder
TABLE_BLOCK = 1024  # columns per program that looks up or installs rows
PLACES = 16  # places of an attention program: the smallest size that `tl.dot` takes


def launch_embed_entries(entries: torch.Tensor, matrix: Matrix, places: torch.Tensor | None) -> torch.Tensor:
    """Returns rows [N, S, D]; arguments as in `hyper_rows.embed_entries`, which has checked them."""
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
    """Returns attention [N, S, D]; arguments as in `hyper_rows.attend_in_entries`, which has checked them."""
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
    """Returns pooled rows [N, D]; arguments as in `hyper_rows.pool_places`, which has checked them."""
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


# ---- tables of rows, and embeddings of ids


def launch_hyper_embedding(ids: torch.Tensor, base: Matrix, rows: torch.Tensor, boundary: int) -> torch.Tensor:
    """Returns embeddings [B, L, D]; arguments as in `hyper_rows.hyper_embedding`, which has checked them."""
    (batch, length), width = ids.shape, base.shape[1]
    matrix, scales, biases, bits, group = kernel_arguments_of(base)
    out = torch.empty((batch, length, width), dtype=value_dtype(base), device=ids.device)
    if out.numel():
        grid = (batch * length, triton.cdiv(width, TABLE_BLOCK))
        _hyper_embedding_kernel[grid](
            ids, matrix, scales, biases, rows, out, length, width, rows.shape[1], boundary,
            BITS=bits, GROUP=group, BLOCK=TABLE_BLOCK,
        )  # fmt: skip
    return out


@triton.jit
def _hyper_embedding_kernel(
    ids, matrix, scales, biases, rows, out, length, width, capacity, boundary,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    one = tl.load(ids + at).to(tl.int64)
    is_base = (one >= 0) & (one < boundary)
    is_hyper = (one >= boundary) & (one < boundary + capacity)
    slot = (at // length) * capacity + one - boundary
    # column limits, because the interpreter refuses a mask made of a vector and a scalar condition
    low = load_row_values(matrix, scales, biases, one, width, columns, tl.where(is_base, width, 0), BITS, GROUP)
    high = tl.load(rows + slot * width + columns, mask=columns < tl.where(is_hyper, width, 0), other=float("nan"))
    value = tl.where(is_hyper, high.to(tl.float32), low)
    tl.store(out + at * width + columns, value.to(out.dtype.element_ty), mask=inside)


def launch_install_rows(
    new: torch.Tensor, pool: torch.Tensor, tables: Sequence[torch.Tensor], installed: torch.Tensor, spans: torch.Tensor
) -> None:
    """Installs the rows; arguments as in `hyper_rows.install_rows`, which has checked them."""
    count, (_, sides, width), capacity = new.shape[1], pool.shape, installed.shape[1]
    if count:
        _install_rows_kernel[(count, triton.cdiv(width, TABLE_BLOCK))](
            new, pool, tables[0], tables[-1], installed.view(torch.uint8), spans,
            count, width, capacity, spans.shape[1], SIDES=sides, BLOCK=TABLE_BLOCK,
        )  # fmt: skip


@triton.jit
def _install_rows_kernel(
    new, pool, outputs, inputs, installed, spans, count, width, capacity, columns,
    SIDES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at, block = tl.program_id(0), tl.program_id(1)
    sequence, slot = tl.load(new + at), tl.load(new + count + at)
    place, span = tl.load(new + 2 * count + at), tl.load(new + 3 * count + at)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    line, source = (sequence * capacity + slot) * width + column, place * SIDES * width + column
    tl.store(outputs + line, tl.load(pool + source, mask=inside), mask=inside)
    if SIDES == 2:
        tl.store(inputs + line, tl.load(pool + source + width, mask=inside), mask=inside)
    if block == 0:
        tl.store(installed + sequence * capacity + slot, 1)
        tl.store(spans + sequence * columns + columns - capacity + slot, span)
