"""The Triton kernels of the joint head: one over blocks of ids, and one that reduces what the blocks found."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlx_zip.cuda.kernels.packed import Packed

IDS = 16  # ids per program
COLUMNS = 512  # columns of the matrix per round


def launch(
    x: torch.Tensor,
    base: torch.Tensor | Packed,
    rows: torch.Tensor,
    installed: torch.Tensor,
    boundary: int,
    logits: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns (best, lse, logits or None); arguments as in `head.joint_head`, which has checked them."""
    batch, (height, width), capacity = x.shape[0], base.shape, rows.shape[1]
    whole = height + capacity
    low, high = triton.cdiv(boundary, IDS), triton.cdiv(capacity, IDS)
    blocks = low + high
    kind = {"device": x.device, "dtype": torch.float32}
    found = torch.empty((3, batch, blocks), **kind)  # maximum, sum of exponentials, best id (as its bits)
    out = torch.empty((batch, whole), **kind) if logits else None
    best = torch.empty((batch,), dtype=torch.int64, device=x.device)
    lse = torch.empty((batch,), **kind)
    if batch:
        bits, group = (base.bits, base.group_size) if isinstance(base, Packed) else (0, 1)
        matrix, scales, biases = base[:3] if isinstance(base, Packed) else (base, None, None)
        tails = triton.cdiv(height - boundary, IDS) if logits else 0
        _blocks[(blocks + tails, batch)](
            x, matrix, scales, biases, rows, installed.view(torch.uint8), out, found,
            boundary, capacity, width, whole, low, high, batch * blocks,
            BITS=bits, GROUP=group, STORE=logits, IDS=IDS, COLUMNS=COLUMNS,
        )  # fmt: skip
        _reduce[(batch,)](found, best, lse, blocks, batch * blocks, BLOCK=min(1024, triton.next_power_of_2(blocks)))
    return best, lse, out


@triton.jit
def _dense(x, matrix, lines, wanted, width, IDS: tl.constexpr, COLUMNS: tl.constexpr):
    total = tl.zeros((IDS, COLUMNS), tl.float32)
    for start in range(0, width, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < width
        value = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
        at = lines[:, None] * width + columns[None, :]
        weight = tl.load(matrix + at, mask=wanted[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += weight * value[None, :]
    return tl.sum(total, axis=1)


@triton.jit
def _packed(
    x, words, scales, biases, lines, wanted, width,
    BITS: tl.constexpr, GROUP: tl.constexpr, IDS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = 32 // BITS  # weights in a word
    WORDS: tl.constexpr = COLUMNS // PER
    total = tl.zeros((IDS, WORDS), tl.float32)
    for start in range(0, width // PER, WORDS):
        word = start + tl.arange(0, WORDS)
        inside = wanted[:, None] & (word < width // PER)[None, :]
        packed = tl.load(words + lines[:, None] * (width // PER) + word[None, :], mask=inside, other=0)
        group = lines[:, None] * (width // GROUP) + (word * PER // GROUP)[None, :]
        scale = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(biases + group, mask=inside, other=0.0).to(tl.float32)
        for place in tl.static_range(PER):
            value = tl.load(x + word * PER + place, mask=word < width // PER, other=0.0).to(tl.float32)
            level = ((packed >> (place * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
            total += (level * scale + bias) * value[None, :]
    return tl.sum(total, axis=1)


@triton.jit
def _blocks(
    x, matrix, scales, biases, rows, installed, out, found,
    boundary, capacity, width, whole, low, high, plane,
    BITS: tl.constexpr, GROUP: tl.constexpr, STORE: tl.constexpr, IDS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, IDS)
    if block < low:
        ids = block * IDS + lane
        end = boundary
        wanted = ids < boundary
        if BITS == 0:
            value = _dense(x + row * width, matrix, ids.to(tl.int64), wanted, width, IDS, COLUMNS)
        else:
            lines = ids.to(tl.int64)
            value = _packed(x + row * width, matrix, scales, biases, lines, wanted, width, BITS, GROUP, IDS, COLUMNS)
    elif block < low + high:
        slot = (block - low) * IDS + lane
        ids = boundary + slot
        end = boundary + capacity
        lines = row * capacity + slot
        wanted = tl.load(installed + lines, mask=slot < capacity, other=0) != 0
        value = _dense(x + row * width, rows, lines, wanted, width, IDS, COLUMNS)
    else:
        ids = boundary + capacity + (block - low - high) * IDS + lane
        end = whole
        wanted = ids < 0
        value = tl.zeros((IDS,), tl.float32)
    value = tl.where(wanted, value, float("-inf"))
    if STORE:
        tl.store(out + row * whole + ids, value, mask=ids < end)
    if block < low + high:
        top = tl.max(value, axis=0)
        shift = tl.where(top == float("-inf"), 0.0, top)
        best = tl.min(tl.where(value == top, ids, 2147483647), axis=0)
        at = found + row * (low + high) + block
        tl.store(at, top)
        tl.store(at + plane, tl.sum(tl.exp(value - shift), axis=0))
        tl.store(at + 2 * plane, best.to(tl.float32, bitcast=True))


@triton.jit
def _reduce(found, best, lse, blocks, plane, BLOCK: tl.constexpr):
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
        chosen = tl.where(one > top, name, chosen)  # earlier rounds hold lower ids
        top = both
    highest = tl.max(top, axis=0)
    tl.store(best + row, tl.min(tl.where(top == highest, chosen, 2147483647), axis=0).to(tl.int64))
    tl.store(lse + row, highest + tl.log(tl.sum(total * tl.exp(top - highest), axis=0)))
