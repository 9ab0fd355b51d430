"""The Triton kernel of rotary positions, head norms and cache write."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl


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
    """Returns rotated queries and fills the caches; arguments as in `rope.rope_and_cache`, which has checked them.

    heads: number of query heads. The last six arguments are the fields of a `rope.Rotation`.
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
