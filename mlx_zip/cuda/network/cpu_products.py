"""Products with weights on a CPU, by PyTorch's own operations. Weights are unpacked once, when a model is loaded.

A step multiplies each weight once, so it lasts as long as it takes to read the weights from memory. A matrix that its
folder stores in 16 bits or fewer is kept in float16, which halves that time; vectors and sums stay float32. A matrix
stored in float32 is kept as it is, unless 16 bits hold its values too.
"""

from __future__ import annotations

from functools import cache

import torch

from mlx_zip.cuda.kernels.packed import Packed, unpack

LOST = 2.0**-25  # at most lost when a number below float16's normal range is rounded
LARGEST = 65504.0  # of float16


class Half:
    """A matrix [R, D] kept in float16, and a bias [R]: x [N, D] float32 -> x W' + bias [N, R] float32."""

    def __init__(self, matrix: torch.Tensor, bias: torch.Tensor | None) -> None:
        """matrix [R, D] float32: rounded to float16."""
        self.shape = tuple(matrix.shape)
        self._packed = torch.ops.quantized.linear_prepack_fp16(matrix.contiguous(), bias)

    @property
    def nbytes(self) -> int:
        """Bytes that a product of few vectors reads."""
        return 2 * self.shape[0] * self.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product."""
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)


def kept(
    weight: torch.Tensor | Packed, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor | Half, torch.Tensor | None]:
    """Returns a matrix [R, D] as products of vectors of `dtype` take it, and the bias that is still to be added."""
    short = (weight.scales if isinstance(weight, Packed) else weight).dtype != torch.float32
    dense = unpack(weight, torch.float32) if isinstance(weight, Packed) else weight.float()
    if dtype == torch.float32 and has_half() and _fits(dense, short):
        return Half(dense, bias), None
    return dense.to(dtype), bias


def _fits(matrix: torch.Tensor, short: bool) -> bool:
    """Returns whether to keep a matrix in float16. short: whether its folder has it in 16 bits or fewer."""
    if not matrix.numel() or matrix.abs().max() > LARGEST:
        return False
    return short or bool((matrix.half().float() - matrix).abs().max() <= LOST)


@cache
def has_half() -> bool:
    """Returns whether PyTorch multiplies float16 matrices with float32 vectors here: by FBGEMM, on x86 with AVX2."""
    return "fbgemm" in torch.backends.quantized.supported_engines


@cache
def multiplies_bfloat16() -> bool:
    """Returns whether the processor has units for products in bfloat16, which are slower than float32 without them."""
    found = getattr(torch.cpu, "get_capabilities", dict)()  # which older versions lack
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))
