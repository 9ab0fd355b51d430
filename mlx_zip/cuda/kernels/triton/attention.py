"""The Triton kernels of a step's attention: one over parts of the keys, and one that combines the parts.

Each program of the first kernel serves all query heads of one key head, so that a key is read once. The grid depends on
shapes alone; the kernel divides the keys that a sequence has among the sequence's programs. Parts are combined in
order, so that equal inputs give equal bits.
"""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlx_zip.cuda.kernels.triton.tuning import is_interpreted


def launch_decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    window: int,
    scale: float,
    count: int,
    round_keys: int,
) -> torch.Tensor:
    """Returns attention [B, H, E]; arguments as in `attention.decode_attention`, which has checked them.

    count: number of parts that a sequence's keys are divided into. round_keys: keys per iteration of a program.
    """
    (batch, heads, width), (_, kv_heads, places, _) = q.shape, keys.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    kind = {"dtype": torch.float32, "device": q.device}
    partial = torch.empty((batch, heads, count, width), **kind)
    sums = torch.empty((2, batch, heads, count), **kind)  # highest score, and sum of the exponentials
    block, group = max(16, triton.next_power_of_2(width)), heads // kv_heads
    _attend_part_kernel[(batch * kv_heads, count)](
        q, keys, values, lengths, out, partial, sums, scale, window, kv_heads, places, width, group, batch * heads,
        PARTS=count, GROUP=max(16, triton.next_power_of_2(group)), KEYS=round_keys, BLOCK=block,
        UPCAST=is_interpreted(), num_warps=4, num_stages=3 if q.element_size() < 4 else 2,
    )  # fmt: skip
    if count > 1:
        _combine_parts_kernel[(batch * heads,)](
            partial, sums, lengths, out, window, heads, places, width, batch * heads,
            PARTS=count, LANES=triton.next_power_of_2(count), KEYS=round_keys, BLOCK=block,
        )  # fmt: skip
    return out


@triton.jit
def _range_of_keys(lengths, sequence, window, places, PARTS: tl.constexpr, KEYS: tl.constexpr):
    """Returns the first key that a sequence sees, the end of its keys, and the number of keys per part."""
    end = tl.minimum(tl.maximum(tl.load(lengths + sequence), 0), places).to(tl.int32)
    begin = tl.maximum(end - window, 0)
    each = tl.cdiv(tl.cdiv(end - begin, PARTS), KEYS) * KEYS
    return begin, end, each


@triton.jit
def _attend_part_kernel(
    q, keys, values, lengths, out, partial, sums, scale, window, kv_heads, places, width, group, plane,
    PARTS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end, each = _range_of_keys(lengths, pair // kv_heads, window, places, PARTS, KEYS)
    first = begin + part * each
    last = tl.minimum(first + each, end)
    if (first < last) | (PARTS == 1):
        member, column, lane = tl.arange(0, GROUP), tl.arange(0, BLOCK), tl.arange(0, KEYS)
        head = pair * group + member
        inside = (member < group)[:, None] & (column < width)[None, :]
        query = tl.load(q + head[:, None] * width + column[None, :], mask=inside, other=0.0)
        if UPCAST:
            query = query.to(tl.float32)
        top = tl.full((GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP,), tl.float32)
        value = tl.zeros((GROUP, BLOCK), tl.float32)
        for start in range(first, last, KEYS):
            place = start + lane
            seen = (place < last)[:, None] & (column < width)[None, :]
            at = (pair * places + place)[:, None] * width + column[None, :]
            k, v = tl.load(keys + at, mask=seen, other=0.0), tl.load(values + at, mask=seen, other=0.0)
            if UPCAST:
                k, v = k.to(tl.float32), v.to(tl.float32)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where((place < last)[None, :], scores, float("-inf"))
            both = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.exp(scores - both[:, None])
            fade = tl.exp(top - both)
            total = total * fade + tl.sum(weights, axis=1)
            value = value * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            top = both
        if PARTS == 1:
            value = value / tl.where(total == 0.0, 1.0, total)[:, None]
            at = out + head[:, None] * width + column[None, :]
            tl.store(at, value.to(out.dtype.element_ty), mask=inside)
        else:
            at = head * PARTS + part
            tl.store(partial + at[:, None] * width + column[None, :], value, mask=inside)
            tl.store(sums + at, top, mask=member < group)
            tl.store(sums + plane * PARTS + at, total, mask=member < group)


@triton.jit
def _combine_parts_kernel(
    partial, sums, lengths, out, window, heads, places, width, plane,
    PARTS: tl.constexpr, LANES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    begin, end, each = _range_of_keys(lengths, head // heads, window, places, PARTS, KEYS)
    part, column = tl.arange(0, LANES), tl.arange(0, BLOCK)
    used = part < tl.cdiv(end - begin, tl.maximum(each, 1))
    at = head * PARTS + part
    top = tl.load(sums + at, mask=used, other=float("-inf"))
    total = tl.load(sums + plane * PARTS + at, mask=used, other=0.0)
    highest = tl.max(top, axis=0)
    fade = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    inside = used[:, None] & (column < width)[None, :]
    value = tl.load(partial + at[:, None] * width + column[None, :], mask=inside, other=0.0)
    whole = tl.sum(total * fade, axis=0)
    value = tl.sum(value * fade[:, None], axis=0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + head * width + column, value.to(out.dtype.element_ty), mask=column < width)
