"""Launches of every kernel with the types and shapes of real models, on tensors of zeros in the host's memory.

What is compiled depends on types, on constants, and on which numbers are 1 or multiples of 16; so matrices may have few
rows here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from mlx_zip.cuda.kernels.activations import rms_norm, silu_gate
from mlx_zip.cuda.kernels.attention import decode_attention
from mlx_zip.cuda.kernels.encoder import MASKS, POOLS, attend_in_entries, embed_entries, pool_places
from mlx_zip.cuda.kernels.head import joint_head
from mlx_zip.cuda.kernels.hyper_rows import hyper_embedding, install_rows
from mlx_zip.cuda.kernels.matvec import matvec
from mlx_zip.cuda.kernels.packed import Matrix, Packed, unpack
from mlx_zip.cuda.kernels.rope import Rotation, rope_and_cache

WIDTH, ROWS, SLOTS = 3072, 512, 64
HALF, FULL = torch.bfloat16, torch.float32
HEADS = {  # query heads, key heads, width of a head
    "phi-3.5-mini": (32, 32, 96),
    "phi-3-medium": (40, 10, 128),
    "llama-3.2-1b": (32, 8, 64),
    "llama-3-8b": (32, 8, 128),
    "qwen2-7b": (28, 4, 128),
}
ENCODERS = {"phi-3.5-mini": (32, 96), "llama-3.2-1b": (32, 64), "res_latent_attn of llama-3.2-1b": (16, 64)}


def zeros(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    """Returns zeros; values do not matter here, but alignment and sizes do."""
    return torch.zeros(shape, dtype=dtype)


def matrices(dtype: torch.dtype = HALF, group: int = 64) -> Iterator[Matrix]:
    """Yields a dense matrix and two packed ones [ROWS, WIDTH]."""
    yield zeros(ROWS, WIDTH, dtype=dtype)
    for bits in (4, 8):
        words, scales = zeros(ROWS, WIDTH * bits // 32, dtype=torch.int32), zeros(ROWS, WIDTH // group, dtype=dtype)
        yield Packed(words, scales, scales.clone(), bits, group)


def step(batches: tuple[int, ...] = (1, 4)) -> None:
    """Launches the kernels of a step in bfloat16."""
    for matrix, batch in product(matrices(), batches):
        products(batch, matrix, most=True)
        heads(batch, matrix, ROWS - 3)
        rows_of(batch, matrix)
    for name, dtype in (("phi-3.5-mini", HALF), ("llama-3.2-1b", HALF), ("llama-3.2-1b", FULL)):
        attention(1, 4096, dtype, *HEADS[name])


def one_vector() -> None:
    """Launches products with one vector in bfloat16, without and with a norm."""
    for matrix in matrices():
        for norm in (None, (zeros(WIDTH), 1e-5)):
            matvec(zeros(1, WIDTH), matrix, norm=norm, impl="triton")


def every() -> None:
    """Launches every kernel in every form; float16 is compiled as bfloat16 is, but for products with a norm."""
    for dtype in (HALF, FULL):
        for matrix, batch in product(matrices(dtype), (1, 2, 8, 16) if dtype == HALF else (1, 2)):
            products(batch, matrix, dtype)
            heads(batch, matrix, ROWS - 3, dtype)
            heads(batch, matrix, ROWS, dtype, logits=True)
            rows_of(batch, matrix, dtype)
        for shape, batch, capacity in product(HEADS.values(), (1, 2, 8), (48, 768, 4096)):
            attention(batch, capacity, dtype, *shape)
        for shape, count in product(ENCODERS.values(), (1, 64)):
            encoder(count, 3, dtype, *shape)
        for width, count in product((2048, 3072, 5120), (1, 64)):
            rms_norm(zeros(count, width, dtype=dtype), zeros(width, dtype=dtype), 1e-5, impl="triton")
            silu_gate(zeros(count, 2 * width, dtype=dtype), impl="triton")
    for matrix in matrices(torch.float16):
        products(4, matrix, torch.float16)
    for matrix in (*matrices(), *matrices(group=32), *matrices(group=128)):
        if isinstance(matrix, Packed):
            unpack(matrix, HALF, impl="triton")


def products(batch: int, matrix: Matrix, dtype: torch.dtype = HALF, most: bool = False) -> None:
    """Launches the products of a layer and of an encoder. most: only those that another one does not contain."""
    x, norm, more = zeros(batch, WIDTH, dtype=dtype), (zeros(WIDTH, dtype=dtype), 1e-5), zeros(batch, ROWS, dtype=dtype)
    bias = zeros(ROWS, dtype=dtype)
    matvec(x, matrix, bias, norm, impl="triton")
    matvec(x, matrix, norm=norm, gate=True, impl="triton")
    matvec(x, matrix, residual=more, impl="triton")
    if not most:
        matvec(x, matrix, norm=norm, impl="triton")
        matvec(x, matrix, impl="triton")


def heads(
    batch: int,
    matrix: Matrix,
    boundary: int,
    dtype: torch.dtype = HALF,
    logits: bool = False,
) -> None:
    """Launches the joint head."""
    rows, installed = zeros(batch, SLOTS, WIDTH, dtype=dtype), zeros(batch, SLOTS, dtype=torch.bool)
    joint_head(zeros(batch, WIDTH, dtype=dtype), matrix, rows, installed, boundary, logits, impl="triton")


def rows_of(batch: int, matrix: Matrix, dtype: torch.dtype = HALF) -> None:
    """Launches what takes single rows out of a matrix."""
    ids, rows = zeros(batch, 1, dtype=torch.int64), zeros(batch, SLOTS, WIDTH, dtype=dtype)
    hyper_embedding(ids, matrix, rows, ROWS - 3, impl="triton")
    embed_entries(ids, matrix, zeros(1, WIDTH, dtype=dtype), impl="triton")
    embed_entries(ids, matrix, None, impl="triton")
    new, installed = zeros(4, batch, dtype=torch.int64), zeros(batch, SLOTS, dtype=torch.bool)
    for tables in ([rows], [rows, rows.clone()]):
        pool, spans = zeros(5, len(tables), WIDTH, dtype=dtype), zeros(batch, SLOTS, dtype=torch.int64)
        install_rows(new, pool, tables, installed, spans, impl="triton")


def attention(batch: int, capacity: int, dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> None:
    """Launches rope, with and without norms and LongRoPE, and attention."""
    keys, values = (zeros(batch, kv_heads, capacity, width, dtype=dtype) for _ in "kv")
    at, norm = zeros(batch, 1, dtype=torch.int64), zeros(width, dtype=dtype)
    frequencies, qkv = zeros(2, width // 2, dtype=FULL), zeros(batch, 1, (heads + 2 * kv_heads) * width, dtype=dtype)
    for rotation in (
        Rotation(frequencies, 1.0, at[:, 0], norm, norm, 1e-5),
        Rotation(frequencies, 1.0, at[:, 0]),
        Rotation(frequencies),
    ):
        q = rope_and_cache(qkv, at, at, rotation, keys, values, impl="triton")
    for window in (None, 128):
        decode_attention(q[:, 0], keys, values, at[:, 0], window, impl="triton")


def encoder(count: int, places: int, dtype: torch.dtype, heads: int, width: int) -> None:
    """Launches the pieces of the hyper-encoders."""
    lengths = zeros(count, dtype=torch.int64)
    for mask in MASKS:
        attend_in_entries(zeros(count, places, 3 * heads * width, dtype=dtype), lengths, heads, mask, impl="triton")
    for kind in POOLS:
        pool_places(zeros(count, places, heads * width, dtype=dtype), lengths, kind, impl="triton")
