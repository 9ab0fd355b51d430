"""The Triton kernels of a layer's attention: rotation and cache write, attention over parts of the keys, and its sum.

The first kernel also applies head norms. Each program of the second serves all query heads of one key head, so that a
key is read once. The grid depends on shapes alone; the kernel divides the keys that a sequence has among the sequence's
programs. The third kernel combines the parts in order, so that equal inputs give equal bits.
"""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlx_zip.cuda.kernels.triton.tuning import is_interpreted


def launch_rope_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
    frequencies: torch.Tensor,
    scale: float,
    frequency_set: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Returns rotated queries and fills the caches; arguments as in `attention.rope_and_cache`, which has checked them.

    heads: number of query heads. The last six arguments are the fields of an `attention.Rotation`.
    """
    batch, length, _ = qkv.shape
    kv_heads, places, width = keys.shape[1:]
    sets, half = frequencies.shape
    out = torch.empty((batch, length, heads, width), dtype=qkv.dtype, device=qkv.device)
    if out.numel():
        _rope_and_cache_kernel[(batch * length, heads + 2 * kv_heads)](
            qkv, positions, slots, frequencies, frequency_set, q_norm, k_norm, keys, values, out, scale, eps,
            length, heads, kv_heads, places, width, sets, half,
            CHOOSE=frequency_set is not None, NORM=q_norm is not None, BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip
    return out


@triton.jit
def _rope_and_cache_kernel(
    qkv, positions, slots, frequencies, frequency_set, q_norm, k_norm, keys, values, out, scale, eps,
    length, heads, kv_heads, places, width, sets, half,
    CHOOSE: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    source = qkv + (at * (heads + 2 * kv_heads) + head) * width
    value = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    if head < heads + kv_heads:
        rotated = column < 2 * half
        partner = tl.where(column < half, column + half, column - half)
        other = tl.load(source + partner, mask=rotated, other=0.0).to(tl.float32)
        if NORM:
            factor = tl.rsqrt(tl.sum(value * value) / width + eps)
            weights = q_norm if head < heads else k_norm
            value *= factor * tl.load(weights + column, mask=inside, other=0.0).to(tl.float32)
            other *= factor * tl.load(weights + partner, mask=rotated, other=0.0).to(tl.float32)
        cos, sin = _cosine_and_sine(
            positions, frequencies, frequency_set, at, length, sets, half, column, partner, CHOOSE
        )
        value = tl.where(rotated, (value * cos + other * sin) * scale, value)
    if head < heads:
        tl.store(out + (at * heads + head) * width + column, value.to(out.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + at).to(tl.int64)
        lane = (head - heads) % kv_heads
        line = (((at // length) * kv_heads + lane) * places + slot) * width
        # a limit, because the interpreter refuses a mask made of a vector and a scalar condition
        end = tl.where(slot >= 0, tl.where(slot < places, width, 0), 0)
        if head < heads + kv_heads:
            tl.store(keys + line + column, value.to(keys.dtype.element_ty), mask=column < end)
        else:
            tl.store(values + line + column, value.to(values.dtype.element_ty), mask=column < end)


@triton.jit
def _cosine_and_sine(
    positions, frequencies, frequency_set, at, length, sets, half, column, partner, CHOOSE: tl.constexpr
):
    """Returns cosine and signed sine, [BLOCK] each: a column becomes column * cosine + partner * sine."""
    pair = tl.where(column < half, column, partner)
    end, row = half, at * 0
    if CHOOSE:
        row = tl.load(frequency_set + at // length).to(tl.int64)
        end = tl.where(row >= 0, tl.where(row < sets, half, 0), 0)
    rate = tl.load(frequencies + row * half + pair, mask=pair < end, other=float("nan"))
    angle = tl.load(positions + at).to(tl.float32) * rate
    sign = tl.where(column < half, -1.0, 1.0)
    return tl.cos(angle), sign * tl.sin(angle)


# ---- one query per sequence


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
