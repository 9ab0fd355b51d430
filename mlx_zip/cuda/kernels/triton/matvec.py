"""The Triton kernel of products with one vector per sequence.

A product reads its matrix once, so memory bandwidth bounds its time. Each program computes a few whole rows, at least
two. A few rows leave enough programs for every multiprocessor, and whole rows need no second reduction.
"""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlx_zip.cuda.kernels.packed import Matrix, kernel_arguments_of
from mlx_zip.cuda.kernels.triton.products import MOST_VECTORS, products_with_many_vectors, products_with_one_vector
from mlx_zip.cuda.kernels.triton.tuning import Sizes, TunedKernel, is_interpreted


def _matvec_sizes(*choices: tuple[int, int, int, int]) -> list[Sizes]:
    """Returns sizes made from (rows, columns per iteration, iterations in flight, warps)."""
    return [({"LINES": c[0], "COLUMNS": c[1], "STAGES": c[2]}, c[3]) for c in choices]


DENSE = _matvec_sizes(
    (4, 1024, 1, 4), (2, 2048, 1, 4), (2, 1024, 1, 2), (4, 2048, 1, 8), (8, 512, 1, 4), (4, 1024, 3, 4), (8, 512, 3, 4)
)
PACKED = _matvec_sizes(
    (8, 512, 3, 2), (8, 1024, 3, 4), (8, 1024, 2, 4), (4, 1024, 4, 4), (4, 2048, 3, 4), (4, 1024, 1, 4), (8, 2048, 3, 8)
)
MANY = _matvec_sizes((16, 128, 4, 4), (16, 256, 3, 4), (16, 256, 3, 8), (32, 128, 4, 4), (32, 64, 5, 4), (64, 64, 4, 4))


def launch_matvec(
    x: torch.Tensor,
    weight: Matrix,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    residual: torch.Tensor | None,
    gate: bool,
) -> torch.Tensor:
    """Returns the products; arguments as in `matvec.matvec`, which has checked them."""
    (batch, width), rows = x.shape, weight.shape[0] // (2 if gate else 1)
    out = torch.empty((batch, rows), dtype=x.dtype, device=x.device)
    if out.numel():
        matrix, scales, biases, bits, group = kernel_arguments_of(weight)
        factors, eps = norm or (None, 0.0)

        def grid(sizes: dict[str, int]) -> tuple[int]:
            return (triton.cdiv(rows, sizes["LINES"] // (2 if gate else 1)),)

        kernel = many_vectors if batch > 1 else one_vector_packed if bits else one_vector_dense
        key = (rows, width, bits, group, norm is None, gate, x.dtype, matrix.dtype)
        kernel.launch(
            key, grid, x, factors, matrix, scales, biases, bias, residual, out, batch, rows, width, eps,
            BITS=bits, GROUP=group, NORM=norm is not None, BIAS=bias is not None, ADD=residual is not None,
            GATE=gate, UPCAST=is_interpreted(), VECTORS=MOST_VECTORS if batch > 1 else 1,
        )  # fmt: skip
    return out


@triton.jit
def _rows_of_program(rows, GATE: tl.constexpr, LINES: tl.constexpr):
    """Returns this program's rows of the matrix [LINES] int64, -1 after the last; gate and value rows alternate."""
    lane = tl.arange(0, LINES)
    if GATE:
        row = tl.program_id(0) * (LINES // 2) + lane // 2
        lines = tl.where(row < rows, row + (lane % 2) * rows, -1)
    else:
        row = tl.program_id(0) * LINES + lane
        lines = tl.where(row < rows, row, -1)
    return lines.to(tl.int64)


@triton.jit
def _store_products(
    value, squares, lines, bias, residual, out, batch, rows, width, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr,
    VECTORS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Stores products [VECTORS, LINES] after norm, bias, gate and residual; squares [VECTORS]: sums of x's squares."""
    if NORM:
        value *= tl.rsqrt(squares / width + eps)[:, None]
    if BIAS:
        value += tl.load(bias + lines, mask=lines >= 0, other=0.0).to(tl.float32)[None, :]
    HEIGHT: tl.constexpr = LINES // 2 if GATE else LINES
    if GATE:
        first, second = tl.split(tl.reshape(value, (VECTORS, HEIGHT, 2)))
        value = first / (1.0 + tl.exp(-first)) * second
    vector, row = tl.arange(0, VECTORS), tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    inside = (vector < batch)[:, None] & (row < rows)[None, :]
    at = vector[:, None].to(tl.int64) * rows + row[None, :]
    if ADD:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _matvec_kernel(
    x, norm, matrix, scales, biases, bias, residual, out, batch, rows, width, eps,
    BITS: tl.constexpr, GROUP: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    GATE: tl.constexpr, UPCAST: tl.constexpr, VECTORS: tl.constexpr,
    LINES: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    lines = _rows_of_program(rows, GATE, LINES)
    if VECTORS > 1:
        value, squares = products_with_many_vectors(
            x, norm, matrix, scales, biases, lines, batch, width, BITS, GROUP, NORM, LINES, COLUMNS, UPCAST, STAGES
        )
    else:
        value, squares = products_with_one_vector(
            x, norm, matrix, scales, biases, lines, width, BITS, GROUP, NORM, LINES, COLUMNS, STAGES
        )
    _store_products(
        value, squares, lines, bias, residual, out, batch, rows, width, eps, NORM, BIAS, ADD, GATE, VECTORS, LINES
    )


one_vector_dense, one_vector_packed, many_vectors = (
    TunedKernel(_matvec_kernel, sizes) for sizes in (DENSE, PACKED, MANY)
)
