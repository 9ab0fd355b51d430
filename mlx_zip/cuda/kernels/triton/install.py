"""The Triton kernel that installs the rows of new entries."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK = 1024  # columns of a program


def launch_install_rows(
    new: torch.Tensor, pool: torch.Tensor, tables: Sequence[torch.Tensor], installed: torch.Tensor, spans: torch.Tensor
) -> None:
    """Installs the rows; arguments as in `install.install_rows`, which has checked them."""
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
