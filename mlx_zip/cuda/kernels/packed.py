"""Matrices in MLX's affine packing (4 or 8 bits per weight, a scale and a bias per group of columns), and unpacking."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mlx_zip.cuda.kernels.dispatch import check_shape, should_use_triton


class Packed(NamedTuple):
    """A quantized matrix [R, D] as `mx.quantize` packs it: value = scale * level + bias.

    words [R, D * bits / 32] int32 (the bits of MLX's uint32): the lowest bits are the first column. scales and biases
    [R, D / group_size].
    """

    words: torch.Tensor
    scales: torch.Tensor
    biases: torch.Tensor
    bits: int
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.words.shape[0], self.words.shape[1] * 32 // self.bits

    def check(self) -> None:
        """Raises ValueError if the parts do not fit together."""
        if self.bits not in (4, 8):
            raise ValueError(f"{self.bits} bits: only 4 and 8 are supported")
        check_shape("words", self.words, None, None)
        if self.words.dtype != torch.int32:
            raise ValueError(f"words are {self.words.dtype}, expected int32 (view uint32 as int32)")
        height, width = self.shape
        if width % self.group_size or self.group_size % (32 // self.bits):
            raise ValueError(f"{width} columns are not made of groups of {self.group_size}")
        check_shape("scales", self.scales, height, width // self.group_size)
        check_shape("biases", self.biases, height, width // self.group_size)


Matrix = torch.Tensor | Packed  # [R, D], dense or packed


def check_matrix(name: str, matrix: Matrix) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of a dense or packed matrix. Raises ValueError if the matrix is malformed."""
    if isinstance(matrix, Packed):
        matrix.check()
        return matrix.words, matrix.scales, matrix.biases
    check_shape(name, matrix, None, None)
    return (matrix,)


def kernel_arguments_of(matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int, int]:
    """Returns a matrix as kernel arguments: values or words, scales, biases, bits (0 if dense) and group size."""
    if isinstance(matrix, Packed):
        return matrix.words, matrix.scales, matrix.biases, matrix.bits, matrix.group_size
    return matrix, None, None, 0, 1


def unpack(packed: Packed, dtype: torch.dtype, impl: str | None = None) -> torch.Tensor:
    """Returns the matrix [R, D] in `dtype`, for products with many rows; values are float32, rounded once."""
    packed.check()
    if should_use_triton(impl, packed.words, packed.scales, packed.biases):
        from mlx_zip.cuda.kernels.triton.packed import launch_unpack

        return launch_unpack(packed.shape, *kernel_arguments_of(packed), dtype)
    return reference_unpack(packed, dtype)


def reference_unpack(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Returns what `unpack` returns, in plain PyTorch; computes in float64 if the scales are float64."""
    return dequantize(packed).to(dtype)


def dequantize(packed: Packed) -> torch.Tensor:
    """Returns the matrix [R, D], unpacked in plain PyTorch: float64 if the scales are float64, else float32."""
    exact = torch.promote_types(packed.scales.dtype, torch.float32)
    grouped = unpack_levels(packed).view(*packed.scales.shape, packed.group_size).to(exact)
    scales, biases = packed.scales[..., None].to(exact), packed.biases[..., None].to(exact)
    return torch.addcmul(biases, grouped, scales).view(packed.shape)


def unpack_levels(packed: Packed) -> torch.Tensor:
    """Returns the quantized levels [R, D], uint8."""
    levels = packed.words.view(torch.uint8)
    if packed.bits == 4:  # the low half of a byte is the earlier column
        levels = torch.stack([levels & 15, levels >> 4], dim=-1)
    return levels.view(packed.shape)


def to_dense_matrix(matrix: Matrix) -> torch.Tensor:
    """Returns the matrix [R, D]; `dequantize` unpacks a packed one."""
    return dequantize(matrix) if isinstance(matrix, Packed) else matrix


def value_dtype(matrix: Matrix) -> torch.dtype:
    """Returns the dtype of the matrix's values, or of its scales if the matrix is packed."""
    return matrix.scales.dtype if isinstance(matrix, Packed) else matrix.dtype


def look_up_rows(matrix: Matrix, ids: torch.Tensor) -> torch.Tensor:
    """Returns rows [*ids.shape, D] of the matrix in its values' dtype; only these rows are unpacked."""
    if not isinstance(matrix, Packed):
        return matrix[ids]
    flat = ids.reshape(-1)
    chosen = matrix._replace(words=matrix.words[flat], scales=matrix.scales[flat], biases=matrix.biases[flat])
    return dequantize(chosen).to(matrix.scales.dtype).view(*ids.shape, -1)
