"""The Triton kernels that look up hyper embeddings and install the rows of new entries."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mlx_zip.cuda.kernels.packed import Matrix, kernel_arguments_of, value_dtype
from mlx_zip.cuda.kernels.triton.packed import load_row_values

BLOCK = 1024  # columns per program


def launch_hyper_embedding(ids: torch.Tensor, base: Matrix, rows: torch.Tensor, boundary: int) -> torch.Tensor:
    """Returns embeddings [B, L, D]; arguments as in `hyper_rows.hyper_embedding`, which has checked them."""
    (batch, length), width = ids.shape, base.shape[1]
    matrix, scales, biases, bits, group = kernel_arguments_of(base)
    out = torch.empty((batch, length, width), dtype=value_dtype(base), device=ids.device)
    if out.numel():
        grid = (batch * length, triton.cdiv(width, BLOCK))
        _hyper_embedding_kernel[grid](
            ids, matrix, scales, biases, rows, out, length, width, rows.shape[1], boundary,
            BITS=bits, GROUP=group, BLOCK=BLOCK,
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
        _install_rows_kernel[(count, triton.cdiv(width, BLOCK))](
            new, pool, tables[0], tables[-1], installed.view(torch.uint8), spans,
            count, width, capacity, spans.shape[1], SIDES=sides, BLOCK=BLOCK,
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
