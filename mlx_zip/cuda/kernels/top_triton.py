"""The Triton kernels that find the highest of many logits: in chunks, and among what the chunks found.

A logit and its id are one whole number of 64 bits, whose order is that of the logits, and among equal logits that of
falling ids.
"""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 1024  # numbers that are put in order at a time


def launch(logits: torch.Tensor, count: int, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the `top` highest of the first `count` columns of logits [B, W] float32, and their ids, both [B, top].

    The lowest of equal ids comes first. `top` is 1 to `count`, and at most half of `CHUNK`.
    """
    batch, whole = logits.shape
    chunks, lanes = triton.cdiv(count, CHUNK), max(2, triton.next_power_of_2(top))  # Triton 3.6 has no `topk` of one
    keys = torch.empty((batch, chunks * lanes), dtype=torch.int64, device=logits.device)
    values = torch.empty((batch, top), dtype=torch.float32, device=logits.device)
    ids = torch.empty((batch, top), dtype=torch.int64, device=logits.device)
    if batch:
        _chunks[(chunks, batch)](logits, keys, count, whole, LANES=lanes, CHUNK=CHUNK)
        _join[(batch,)](keys, values, ids, chunks * lanes, top, LANES=lanes, CHUNK=CHUNK)
    return values, ids


@triton.jit
def _chunks(logits, keys, count, whole, LANES: tl.constexpr, CHUNK: tl.constexpr):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * whole + ids, mask=ids < count, other=0.0) + 0.0  # -0.0 becomes 0.0
    bits = value.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    key = tl.where(ids < count, key, -0x8000000000000000)
    at = keys + (row * tl.num_programs(0) + chunk) * LANES + tl.arange(0, LANES)
    tl.store(at, tl.topk(key, LANES))


@triton.jit
def _join(keys, values, ids, count, top, LANES: tl.constexpr, CHUNK: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    best = tl.full((LANES,), -0x8000000000000000, tl.int64)
    for start in range(0, count, CHUNK):
        at = start + tl.arange(0, CHUNK)
        some = tl.load(keys + row * count + at, mask=at < count, other=-0x8000000000000000)
        both = tl.join(best, tl.topk(some, LANES))
        best = tl.topk(tl.reshape(both, (2 * LANES,)), LANES)
    order = (best >> 32).to(tl.int32)
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    tl.store(values + row * top + lane, bits.to(tl.float32, bitcast=True), mask=lane < top)
    tl.store(ids + row * top + lane, 0x7FFFFFFF - (best & 0x7FFFFFFF), mask=lane < top)
