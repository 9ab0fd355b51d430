"""Pieces of Triton kernels: products of rows of a matrix, dense or packed, with one vector or up to 16."""

# Triton may be missing, and its decorators are not typed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

MOST_VECTORS = 16  # of `products_with_many_vectors`


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
