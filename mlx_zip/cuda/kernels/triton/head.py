"""The Triton kernels of the joint head: one over blocks of ids, and one that reduces what the blocks found."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlx_zip.cuda.kernels.packed import Matrix, kernel_arguments_of
from mlx_zip.cuda.kernels.triton.products import (
    MOST_VECTORS,
    dense_products,
    products_with_many_vectors,
    products_with_one_vector,
)
from mlx_zip.cuda.kernels.triton.tuning import Sizes, TunedKernel, is_interpreted

IDS = 16  # ids per program
LANES = 1024  # blocks per round of the reduction


def _head_sizes(*choices: tuple[int, int, int]) -> list[Sizes]:
    """Returns sizes made from (columns per iteration, iterations in flight, warps)."""
    return [({"COLUMNS": c[0], "STAGES": c[1]}, c[2]) for c in choices]


DENSE = _head_sizes((512, 1, 8), (512, 1, 4), (256, 1, 4), (1024, 1, 8), (256, 3, 4), (512, 3, 8))
PACKED = _head_sizes((512, 3, 2), (512, 2, 2), (1024, 2, 4), (512, 1, 4), (512, 3, 4), (1024, 3, 8))
MANY = _head_sizes((128, 4, 4), (256, 3, 4), (256, 3, 8), (64, 5, 4))


def launch_joint_head(
    x: torch.Tensor,
    base: Matrix,
    rows: torch.Tensor,
    installed: torch.Tensor,
    boundary: int,
    logits: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the fields of a `HeadOutput`; arguments as in `head.joint_head`, which has checked them."""
    batch, (height, width), capacity = x.shape[0], base.shape, rows.shape[1]
    whole, low, high = height + capacity, triton.cdiv(boundary, IDS), triton.cdiv(capacity, IDS)
    blocks = low + high
    found = torch.empty((2, batch, blocks), dtype=torch.float32, device=x.device)  # maximum, best id (as its bits)
    out = torch.empty((batch, whole), dtype=torch.float32, device=x.device) if logits else None
    best = torch.empty((batch,), dtype=torch.int64, device=x.device)
    if batch:
        matrix, scales, biases, bits, group = kernel_arguments_of(base)
        tails = triton.cdiv(height - boundary, IDS) if logits else 0
        shared = MOST_VECTORS if batch > 1 else 1  # rows of x that share one reading of the base matrix
        kernel = many_vectors if batch > 1 else one_vector_packed if bits else one_vector_dense
        kernel.launch(
            (boundary, width, bits, group, x.dtype, matrix.dtype),
            (triton.cdiv(batch, shared) * low + batch * (high + tails),),
            x, matrix, scales, biases, rows, installed.view(torch.uint8), out, found,
            batch, boundary, capacity, width, whole, low, high, max(tails, 1),
            BITS=bits, GROUP=group, STORE=out is not None, UPCAST=is_interpreted(), IDS=IDS, ROWS=shared,
        )  # fmt: skip
        lanes = min(LANES, triton.next_power_of_2(blocks))
        _join_head_blocks_kernel[(batch,)](found, best, blocks, batch * blocks, BLOCK=lanes)
    return best, out


@triton.jit
def _store_logits_block(value, ids, rows, batch, block, blocks, end, whole, out, found, STORE: tl.constexpr):
    """Stores a block of logits [rows, ids], up to id `end`, and each row's maximum and best id; rows below `batch`."""
    known = rows < batch
    if STORE:
        tl.store(out + rows[:, None] * whole + ids[None, :], value, mask=known[:, None] & (ids < end)[None, :])
    top = tl.max(value, axis=1)
    best = tl.min(tl.where(value == top[:, None], ids[None, :], 2147483647), axis=1)
    at = found + rows * blocks + block
    tl.store(at, top, mask=known)
    tl.store(at + batch * blocks, best.to(tl.float32, bitcast=True), mask=known)


@triton.jit
def _store_logits_block_of_row(value, ids, row, batch, block, blocks, end, whole, out, found, STORE: tl.constexpr):
    """Stores what `_store_logits_block` does, for logits [ids] of one row, without the registers of a second axis."""
    if STORE:
        tl.store(out + row * whole + ids, value, mask=ids < end)
    top = tl.max(value, axis=0)
    best = tl.min(tl.where(value == top, ids, 2147483647), axis=0)
    at = found + row * blocks + block
    tl.store(at, top)
    tl.store(at + batch * blocks, best.to(tl.float32, bitcast=True))


@triton.jit
def _head_kernel(
    x, matrix, scales, biases, rows, installed, out, found,
    batch, boundary, capacity, width, whole, low, high, tails, BITS: tl.constexpr, GROUP: tl.constexpr,
    STORE: tl.constexpr, UPCAST: tl.constexpr, IDS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes one block of ids: of the base matrix for `ROWS` rows of x, or of one row's hyper or tail columns."""
    at, lane = tl.program_id(0), tl.arange(0, IDS)
    first = tl.cdiv(batch, ROWS) * low  # programs of the base matrix
    if at < first:
        row, ids = (at // low).to(tl.int64) * ROWS, (at % low) * IDS + lane
        lines = tl.where(ids < boundary, ids, -1).to(tl.int64)
        if ROWS > 1:
            value, _ = products_with_many_vectors(
                x + row * width, x, matrix, scales, biases, lines, batch - row, width,
                BITS, GROUP, False, IDS, COLUMNS, UPCAST, STAGES,
            )  # fmt: skip
        else:
            value, _ = products_with_one_vector(
                x, x, matrix, scales, biases, lines, width, BITS, GROUP, False, IDS, COLUMNS, STAGES
            )
        value = tl.where((ids < boundary)[None, :], value, float("-inf"))
        several = row + tl.arange(0, ROWS)
        _store_logits_block(value, ids, several, batch, at % low, low + high, boundary, whole, out, found, STORE)
    elif at < first + batch * high:  # hyper rows; those that are not installed are not read
        row, block = ((at - first) // high).to(tl.int64), (at - first) % high
        slot = block * IDS + lane
        lines = row * capacity + slot
        wanted = tl.load(installed + lines, mask=slot < capacity, other=0) != 0
        seen = tl.where(wanted, lines, -1)
        value, _ = dense_products(x + row * width, x, rows, seen, width, False, IDS, COLUMNS, STAGES)
        value = tl.where(wanted, value, float("-inf"))
        end = boundary + capacity
        _store_logits_block_of_row(
            value, boundary + slot, row, batch, low + block, low + high, end, whole, out, found, STORE
        )
    elif STORE:  # the tail
        row, block = (at - first - batch * high) // tails, (at - first - batch * high) % tails
        ids = boundary + capacity + block * IDS + lane
        tl.store(out + row.to(tl.int64) * whole + ids, tl.full((IDS,), float("-inf"), tl.float32), mask=ids < whole)


one_vector_dense, one_vector_packed, many_vectors = (
    TunedKernel(_head_kernel, sizes) for sizes in (DENSE, PACKED, MANY)
)


@triton.jit
def _join_head_blocks_kernel(found, best, blocks, plane, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    chosen = tl.full((BLOCK,), 2147483647, tl.int32)
    for start in range(0, blocks, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        at = found + row * blocks + lane
        one = tl.load(at, mask=lane < blocks, other=float("-inf"))
        name = tl.load(at + plane, mask=lane < blocks, other=0.0).to(tl.int32, bitcast=True)
        chosen = tl.where(one > top, name, chosen)  # equal: keep the earlier round's id, which is lower
        top = tl.maximum(top, one)
    highest = tl.max(top, axis=0)
    tl.store(best + row, tl.min(tl.where(top == highest, chosen, 2147483647), axis=0).to(tl.int64))
