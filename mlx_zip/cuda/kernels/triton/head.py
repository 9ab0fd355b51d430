"""The Triton kernels of the joint head: one over blocks of ids, and one that reduces what the blocks found."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlx_zip.cuda.kernels.packed import Matrix, kernel_arguments_of
from mlx_zip.cuda.kernels.triton.products import dense_products, packed_products, products_with_many_vectors
from mlx_zip.cuda.kernels.triton.tuning import Sizes, TunedKernel, is_interpreted

IDS = 16  # ids per program
GROUP_ROWS = 16  # rows of x that share one reading of the base matrix
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the fields of a `HeadOutput`; arguments as in `head.joint_head`, which has checked them."""
    batch, (height, width), capacity = x.shape[0], base.shape, rows.shape[1]
    whole, low, high = height + capacity, triton.cdiv(boundary, IDS), triton.cdiv(capacity, IDS)
    blocks = low + high
    kind = {"device": x.device, "dtype": torch.float32}
    found = torch.empty((3, batch, blocks), **kind)  # maximum, sum of exponentials, best id (as its bits)
    out = torch.empty((batch, whole), **kind) if logits else None
    best, lse = torch.empty((batch,), dtype=torch.int64, device=x.device), torch.empty((batch,), **kind)
    if batch:
        matrix, scales, biases, bits, group = kernel_arguments_of(base)
        tails = triton.cdiv(height - boundary, IDS) if logits else 0
        kernel = many_vectors if batch > 1 else one_vector_packed if bits else one_vector_dense
        kernel.launch(
            (boundary, width, bits, group, x.dtype, matrix.dtype),
            (triton.cdiv(batch, GROUP_ROWS) * low + batch * (high + tails),),
            x, matrix, scales, biases, rows, installed.view(torch.uint8), out, found,
            batch, boundary, capacity, width, whole, low, high, max(tails, 1),
            BITS=bits, GROUP=group, STORE=out is not None, UPCAST=is_interpreted(), IDS=IDS,
        )  # fmt: skip
        lanes = min(LANES, triton.next_power_of_2(blocks))
        _join_head_blocks_kernel[(batch,)](found, best, lse, blocks, batch * blocks, BLOCK=lanes)
    return best, lse, out


@triton.jit
def _store_logits_block(value, ids, row, block, blocks, end, whole, out, found, plane, STORE: tl.constexpr):
    """Stores one row's logits of a block, up to id `end`, and their maximum, sum of exponentials and best id."""
    if STORE:
        tl.store(out + row * whole + ids, value, mask=ids < end)
    top = tl.max(value, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    best = tl.min(tl.where(value == top, ids, 2147483647), axis=0)
    at = found + row * blocks + block
    tl.store(at, top)
    tl.store(at + plane, tl.sum(tl.exp(value - shift), axis=0))
    tl.store(at + 2 * plane, best.to(tl.float32, bitcast=True))


@triton.jit
def _store_logits_block_of_many(
    value, ids, rows, batch, block, blocks, end, whole, out, found, plane, STORE: tl.constexpr
):
    """Stores what `_store_logits_block` does, for several rows: value [16, IDS], rows [16]."""
    known = rows < batch
    if STORE:
        tl.store(out + rows[:, None] * whole + ids[None, :], value, mask=known[:, None] & (ids < end)[None, :])
    top = tl.max(value, axis=1)
    best = tl.min(tl.where(value == top[:, None], ids[None, :], 2147483647), axis=1)
    at = found + rows * blocks + block
    tl.store(at, top, mask=known)
    tl.store(at + plane, tl.sum(tl.exp(value - top[:, None]), axis=1), mask=known)
    tl.store(at + 2 * plane, best.to(tl.float32, bitcast=True), mask=known)


@triton.jit
def _store_hyper_logits(
    at, x, rows, installed, out, found, boundary, capacity, width, whole, low, high, plane,
    STORE: tl.constexpr, IDS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes block `at % high` of the hyper logits of row `at // high`; rows that are not installed are not read."""
    row = (at // high).to(tl.int64)
    slot = (at % high) * IDS + tl.arange(0, IDS)
    lines = row * capacity + slot
    wanted = tl.load(installed + lines, mask=slot < capacity, other=0) != 0
    seen = tl.where(wanted, lines, -1)
    value, _ = dense_products(x + row * width, x, rows, seen, width, False, IDS, COLUMNS, STAGES)
    value = tl.where(wanted, value, float("-inf"))
    end = boundary + capacity
    _store_logits_block(value, boundary + slot, row, low + at % high, low + high, end, whole, out, found, plane, STORE)


@triton.jit
def _store_tail_logits(at, tails, out, boundary, capacity, whole, IDS: tl.constexpr):
    """Stores -inf in block `at % tails` of row `at // tails`'s tail columns, which follow the hyper columns."""
    ids = boundary + capacity + (at % tails) * IDS + tl.arange(0, IDS)
    tl.store(
        out + (at // tails).to(tl.int64) * whole + ids, tl.full((IDS,), float("-inf"), tl.float32), mask=ids < whole
    )


@triton.jit
def _head_kernel_for_one_vector(
    x, matrix, scales, biases, rows, installed, out, found,
    batch, boundary, capacity, width, whole, low, high, tails, BITS: tl.constexpr, GROUP: tl.constexpr,
    STORE: tl.constexpr, UPCAST: tl.constexpr, IDS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    at, blocks = tl.program_id(0), low + high
    if at < low:
        ids = at * IDS + tl.arange(0, IDS)
        lines = tl.where(ids < boundary, ids, -1).to(tl.int64)
        if BITS == 0:
            value, _ = dense_products(x, x, matrix, lines, width, False, IDS, COLUMNS, STAGES)
        else:
            value, _ = packed_products(
                x, x, matrix, scales, biases, lines, width, BITS, GROUP, False, IDS, COLUMNS, STAGES
            )
        value = tl.where(ids < boundary, value, float("-inf"))
        _store_logits_block(value, ids, 0, at, blocks, boundary, whole, out, found, blocks, STORE)
    elif at < blocks:
        _store_hyper_logits(
            at - low, x, rows, installed, out, found, boundary, capacity, width, whole, low, high, blocks,
            STORE, IDS, COLUMNS, STAGES,
        )  # fmt: skip
    elif STORE:
        _store_tail_logits(at - blocks, tails, out, boundary, capacity, whole, IDS)


@triton.jit
def _head_kernel_for_many_vectors(
    x, matrix, scales, biases, rows, installed, out, found,
    batch, boundary, capacity, width, whole, low, high, tails, BITS: tl.constexpr, GROUP: tl.constexpr,
    STORE: tl.constexpr, UPCAST: tl.constexpr, IDS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    at, blocks = tl.program_id(0), low + high
    first = tl.cdiv(batch, 16) * low  # programs of the base matrix
    if at < first:
        row = (at // low).to(tl.int64) * 16
        ids = (at % low) * IDS + tl.arange(0, IDS)
        lines = tl.where(ids < boundary, ids, -1).to(tl.int64)
        value, _ = products_with_many_vectors(
            x + row * width, x, matrix, scales, biases, lines, batch - row, width,
            BITS, GROUP, False, IDS, COLUMNS, UPCAST, STAGES,
        )  # fmt: skip
        value = tl.where((ids < boundary)[None, :], value, float("-inf"))
        several = row + tl.arange(0, 16)
        _store_logits_block_of_many(
            value, ids, several, batch, at % low, blocks, boundary, whole, out, found, batch * blocks, STORE
        )
    elif at < first + batch * high:
        _store_hyper_logits(
            at - first, x, rows, installed, out, found, boundary, capacity, width, whole, low, high, batch * blocks,
            STORE, IDS, COLUMNS, STAGES,
        )  # fmt: skip
    elif STORE:
        _store_tail_logits(at - first - batch * high, tails, out, boundary, capacity, whole, IDS)


one_vector_dense, one_vector_packed, many_vectors = (
    TunedKernel(_head_kernel_for_one_vector, DENSE),
    TunedKernel(_head_kernel_for_one_vector, PACKED),
    TunedKernel(_head_kernel_for_many_vectors, MANY),
)


@triton.jit
def _join_head_blocks_kernel(found, best, lse, blocks, plane, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    chosen = tl.full((BLOCK,), 2147483647, tl.int32)
    for start in range(0, blocks, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        at = found + row * blocks + lane
        one = tl.load(at, mask=lane < blocks, other=float("-inf"))
        part = tl.load(at + plane, mask=lane < blocks, other=0.0)
        name = tl.load(at + 2 * plane, mask=lane < blocks, other=0.0).to(tl.int32, bitcast=True)
        both = tl.maximum(top, one)
        shift = tl.where(both == float("-inf"), 0.0, both)
        total = total * tl.exp(top - shift) + part * tl.exp(one - shift)
        chosen = tl.where(one > top, name, chosen)  # equal: keep the earlier round's id, which is lower
        top = both
    highest = tl.max(top, axis=0)
    tl.store(best + row, tl.min(tl.where(top == highest, chosen, 2147483647), axis=0).to(tl.int64))
    tl.store(lse + row, highest + tl.log(tl.sum(total * tl.exp(top - highest), axis=0)))
