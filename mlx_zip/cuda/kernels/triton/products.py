"""The Triton kernels of a decoder's products with one vector per sequence, of the RMS norm, and of silu(gate) * up.

A product reads its matrix once, so memory bandwidth bounds its time. Each program computes a few whole rows, at least
two. A few rows leave enough programs for every multiprocessor, and whole rows need no second reduction. The pieces that
multiply rows of a dense or packed matrix with one vector or up to 16 also serve the joint head.
"""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mlx_zip.cuda.kernels.packed import Matrix, kernel_arguments_of
from mlx_zip.cuda.kernels.triton.tuning import Sizes, TunedKernel, is_interpreted

MOST_VECTORS = 16  # of `products_with_many_vectors`
BLOCK = 1024  # columns per program of silu(gate) * up


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
    """Returns the products; arguments as in `products.matvec`, which has checked them."""
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


# ---- products of rows of a matrix, pieces of kernels


@triton.jit
def load_normed(x, norm, columns, inside, NORM: tl.constexpr):
    """Returns x, and x times the norm's weights, at `columns`, float32; 0 where `inside` is false."""
    plain = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    value = plain
    if NORM:
        value = plain * tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
    return plain, value


@triton.jit
def dense_products(
    x, norm, matrix, lines, width, NORM: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Returns the products [LINES] of dense rows `lines` (int64) with one vector, and the sum of x's squares.

    The vector is x, or x times the norm's weights if NORM is set.
    """
    total = tl.zeros((LINES, COLUMNS), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for start in tl.range(0, width, COLUMNS, num_stages=STAGES):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < width
        at = matrix + lines[:, None] * width + columns[None, :]
        seen = inside[None, :] & (lines >= 0)[:, None]
        weight = tl.load(at, mask=seen, other=0.0, eviction_policy="evict_first").to(tl.float32)
        plain, value = load_normed(x, norm, columns, inside, NORM)
        total += weight * value[None, :]
        squares += plain * plain
    return tl.sum(total, axis=1), tl.sum(squares, axis=0)


@triton.jit
def one_plus_levels(packed, BITS: tl.constexpr):
    """Returns 1 + level / 2**BITS, float32 [A, B, 32 / BITS], of words [A, B, 1].

    A level is shifted into the fraction bits of a float: three operations per weight, fewer than a conversion takes.
    """
    place = tl.arange(0, 32 // BITS) * BITS
    up = tl.maximum(23 - BITS - place, 0)[None, None, :]
    down = tl.maximum(place - (23 - BITS), 0)[None, None, :]
    moved = (packed << up) >> down
    mask: tl.constexpr = ((1 << BITS) - 1) << (23 - BITS)
    return ((moved & mask) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def packed_products(
    x, norm, words, scales, biases, lines, width, BITS: tl.constexpr, GROUP: tl.constexpr,
    NORM: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Returns what `dense_products` returns, for packed rows `lines` (int64).

    All values have the layout [words, lines] in which the words are loaded, and x is loaded again for each level of a
    word. So no value moves between threads, and sums are chains of fused multiply-adds. The bits of a level, which
    begin at bit b, are used as a float without a shift: that float is level * 2**(b - 149), and x is scaled to match.
    This takes two operations per weight; shifting and converting each level would take many more.
    """
    PER: tl.constexpr = 32 // BITS  # weights in a word
    WORDS: tl.constexpr = COLUMNS // PER
    LOW: tl.constexpr = 23 // BITS  # levels of a word that lie within a float's fraction; the others are shifted there
    DOWN: tl.constexpr = 32 - LOW * BITS
    scaled, shifted = tl.zeros((WORDS, LINES), tl.float32), tl.zeros((WORDS, LINES), tl.float32)
    squares = tl.zeros((WORDS, 1), tl.float32)
    line = lines[None, :]
    for start in tl.range(0, width // PER, WORDS, num_stages=STAGES):
        word = (start + tl.arange(0, WORDS))[:, None]
        inside = word < width // PER
        seen = inside & (line >= 0)
        packed = tl.load(words + line * (width // PER) + word, mask=seen, other=0, eviction_policy="evict_first")
        group = line * (width // GROUP) + word * PER // GROUP
        scale = tl.load(scales + group, mask=seen, other=0.0).to(tl.float32)
        bias = tl.load(biases + group, mask=seen, other=0.0).to(tl.float32)
        moved = packed >> DOWN
        found = tl.zeros((WORDS, LINES), tl.float32)
        total = tl.zeros((WORDS, 1), tl.float32)
        for number in tl.static_range(PER):
            plain, value = load_normed(x, norm, word * PER + number, inside, NORM)
            if number < LOW:
                level = packed & (((1 << BITS) - 1) << (number * BITS))
                factor = value * (2.0 ** (64 - number * BITS))
            else:
                level = moved & (((1 << BITS) - 1) << (number * BITS - DOWN))
                factor = value * (2.0 ** (64 - number * BITS + DOWN))
            found += level.to(tl.float32, bitcast=True) * factor
            total += value
            squares += plain * plain
        scaled += scale * found
        shifted += bias * total
    whole = scaled * 38685626227668133590597632.0 + shifted  # 2**(149 - 64)
    return tl.sum(whole, axis=0), tl.sum(squares)


@triton.jit
def products_with_one_vector(
    x, norm, matrix, scales, biases, lines, width, BITS: tl.constexpr, GROUP: tl.constexpr,
    NORM: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Returns products [1, LINES] and sums of squares [1] as `dense_products` does, for a dense or packed matrix."""
    if BITS == 0:
        value, squares = dense_products(x, norm, matrix, lines, width, NORM, LINES, COLUMNS, STAGES)
    else:
        value, squares = packed_products(
            x, norm, matrix, scales, biases, lines, width, BITS, GROUP, NORM, LINES, COLUMNS, STAGES
        )
    return value[None, :], tl.zeros((1,), tl.float32) + squares


@triton.jit
def products_with_many_vectors(
    x, norm, matrix, scales, biases, lines, batch, width, BITS: tl.constexpr, GROUP: tl.constexpr,
    NORM: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Returns products [16, LINES] and sums of squares [16] as `dense_products` does, for up to 16 vectors x.

    Operands of the matrix units have x's dtype. They are TF32 if x is float16 and multiplied by a norm's weights,
    because those products may exceed float16. UPCAST: whether all operands are made float32, as the interpreter needs.
    """
    TF32: tl.constexpr = NORM and x.dtype.element_ty == tl.float16
    vector = tl.arange(0, 16)
    total = tl.zeros((16, LINES), tl.float32)
    squares = tl.zeros((16, COLUMNS), tl.float32)
    for start in tl.range(0, width, COLUMNS, num_stages=STAGES):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < width
        at = vector[:, None].to(tl.int64) * width + columns[None, :]
        plain = tl.load(x + at, mask=(vector < batch)[:, None] & inside[None, :], other=0.0)
        value = plain
        if NORM:
            factor = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
            value = plain.to(tl.float32) * factor[None, :]
            if not TF32:
                value = value.to(plain.dtype)
            squares += plain.to(tl.float32) * plain.to(tl.float32)
        if BITS == 0:
            seen = inside[None, :] & (lines >= 0)[:, None]
            at = matrix + lines[:, None] * width + columns[None, :]
            weight = tl.load(at, mask=seen, other=0.0, eviction_policy="evict_first")
        else:
            weight = unpack_weights(matrix, scales, biases, lines, start, width, BITS, GROUP, LINES, COLUMNS)
        weight = weight.to(x.dtype.element_ty)
        if UPCAST or TF32:
            value, weight = value.to(tl.float32), weight.to(tl.float32)
        total += tl.dot(value, tl.trans(weight), input_precision="tf32" if TF32 else "ieee")
    return total, tl.sum(squares, axis=1)


@triton.jit
def unpack_weights(
    words, scales, biases, lines, start, width, BITS: tl.constexpr, GROUP: tl.constexpr,
    LINES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns the weights [LINES, COLUMNS] float32 of rows `lines`, from column `start` on."""
    PER: tl.constexpr = 32 // BITS
    TIMES: tl.constexpr = 1 << BITS
    word = start // PER + tl.arange(0, COLUMNS // PER)
    seen = (word < width // PER)[None, :] & (lines >= 0)[:, None]
    at = words + lines[:, None] * (width // PER) + word[None, :]
    packed = tl.load(at, mask=seen, other=0, eviction_policy="evict_first")
    group = lines[:, None] * (width // GROUP) + (word * PER // GROUP)[None, :]
    scale = tl.load(scales + group, mask=seen, other=0.0).to(tl.float32) * TIMES
    bias = tl.load(biases + group, mask=seen, other=0.0).to(tl.float32)
    weight = (one_plus_levels(packed[:, :, None], BITS) - 1.0) * scale[:, :, None] + bias[:, :, None]
    return tl.reshape(weight, (LINES, COLUMNS))


# ---- norm and gate alone


def launch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None) -> torch.Tensor:
    """Returns the norm; arguments as in `products.rms_norm`, which has checked them."""
    count, width = x.shape
    out = torch.empty((count, width), dtype=x.dtype, device=x.device) if out is None else out
    if x.numel():
        _rms_norm_kernel[(count,)](x, weight, out, width, eps, BLOCK=triton.next_power_of_2(width))
    return out


@triton.jit
def _rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    normed = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + columns, (normed * factor).to(out.dtype.element_ty), mask=inside)


def launch_silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up; the argument as in `products.silu_gate`, which has checked it."""
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((count, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _silu_gate_kernel[(count, triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK=BLOCK)
    return out


@triton.jit
def _silu_gate_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), mask=inside)
