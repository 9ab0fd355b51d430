"""Matrix products with dense and packed weights, fused with norm, gate and residual; matrices joined by their rows.

Joining loses no precision. Packed parts of different bits or group sizes are repacked with the most bits and the
smallest group size among them, which hold the same values. If only some parts are packed, the joined matrix is dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from mlx_zip.cuda.kernels.packed import Matrix, Packed, unpack, unpack_levels, value_dtype
from mlx_zip.cuda.kernels.products import MAX_VECTORS, matvec, rms_norm, silu_gate


@dataclass(frozen=True)
class Linear:
    """The product x [N, D] -> x W' + bias [N, R] in x's dtype.

    weight: W [R, D], dense, `Packed` or `HalfMatrix`; bias [R] or None. for_cpu: whether the weight was prepared for
    PyTorch's own products on a CPU; no kernel takes such a weight.
    """

    weight: Matrix | HalfMatrix
    bias: torch.Tensor | None = None
    for_cpu: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product, computed by PyTorch; a packed matrix is unpacked for the call."""
        if isinstance(self.weight, HalfMatrix):
            return self.weight(x)
        weight = unpack(self.weight, x.dtype) if isinstance(self.weight, Packed) else self.weight
        return torch.nn.functional.linear(x, weight, self.bias)

    def prepare_for_cpu(self, dtype: torch.dtype) -> Linear:
        """Returns the product for vectors of `dtype` on a CPU; a float16 matrix (`HalfMatrix`) includes the bias."""
        weight = self.weight
        assert not isinstance(weight, HalfMatrix)
        dense = unpack(weight, torch.float32) if isinstance(weight, Packed) else weight.float()
        is_short = value_dtype(weight) != torch.float32
        if dtype == torch.float32 and has_float16_products() and _should_keep_float16(dense, is_short):
            return Linear(HalfMatrix(dense, self.bias), None, for_cpu=True)
        return Linear(dense.to(dtype), self.bias, for_cpu=True)


def fused_product(
    x: torch.Tensor,
    linear: Linear,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gate: bool = False,
) -> torch.Tensor:
    """Returns norm(x) W' + bias [N, R], gated if `gate` is True, plus the residual; in x's dtype.

    x [N, D]. norm: weight [D] and eps of an RMS norm of x. gate: the first half of W's rows gives a gate, the second
    half values, and the product becomes silu(gate) * values [N, R / 2]. residual: added to the result, of the same
    shape. With kernels, up to `MAX_VECTORS` rows of x take one launch.
    """
    if x.shape[0] <= MAX_VECTORS and not linear.for_cpu:
        assert not isinstance(linear.weight, HalfMatrix)
        return matvec(x, linear.weight, linear.bias, norm, residual, gate)
    if norm is not None:
        x = rms_norm(x, *norm)
    y = linear(x)
    if gate:
        y = silu_gate(y)
    return y if residual is None else y + residual


def join_by_rows(parts: Sequence[Linear]) -> Linear:
    """Returns one product whose rows are those of all parts, in order.

    Packed parts get the same packing without loss of precision. If only some parts are packed, all become dense.
    """
    if len(parts) == 1:
        return parts[0]
    packed = [part.weight for part in parts if isinstance(part.weight, Packed)]
    dense: list[Any] = [part.weight for part in parts if isinstance(part.weight, torch.Tensor)]
    if packed and dense:
        dtype = dense[0].dtype
        dense = [unpack(part.weight, dtype) if isinstance(part.weight, Packed) else part.weight for part in parts]
    weight = torch.cat(dense) if dense else _join_packed(packed)
    return Linear(weight, _join_biases(parts))


def _join_biases(parts: Sequence[Linear]) -> torch.Tensor | None:
    """Returns the biases of all parts, zeros for a part without bias; None if no part has a bias."""
    some = next((part.bias for part in parts if part.bias is not None), None)
    if some is None:
        return None
    return torch.cat([some.new_zeros(part.weight.shape[0]) if part.bias is None else part.bias for part in parts])


def _join_packed(parts: Sequence[Packed]) -> Packed:
    """Returns packed matrices as one, with the most bits and the smallest groups among them."""
    bits, group = max(part.bits for part in parts), min(part.group_size for part in parts)
    alike = [_narrow_groups(_widen_levels(part, bits), group) for part in parts]
    return Packed(
        torch.cat([part.words for part in alike]),
        torch.cat([part.scales for part in alike]),
        torch.cat([part.biases for part in alike]),
        bits,
        group,
    )


def _widen_levels(packed: Packed, bits: int) -> Packed:
    """Returns the same matrix with `bits` bits per level: widened from 4 to 8, or unchanged."""
    if packed.bits == bits:
        return packed
    return packed._replace(words=unpack_levels(packed).view(torch.int32), bits=bits)


def _narrow_groups(packed: Packed, group: int) -> Packed:
    """Returns the same matrix in smaller groups, which repeat scales and biases."""
    times = packed.group_size // group
    if times == 1:
        return packed
    scales, biases = (part.repeat_interleave(times, dim=1) for part in (packed.scales, packed.biases))
    return packed._replace(scales=scales, biases=biases, group_size=group)


# ---- on a CPU: weights are unpacked once, when a model is loaded
#
# A step multiplies each weight once, so the step takes as long as reading the weights from memory. A matrix stored in
# 16 bits or fewer is kept in float16, which halves that time; vectors and sums stay float32. A matrix stored in float32
# is kept in float32, unless float16 holds its values too.

HALF_ROUNDING = 2.0**-25  # maximum error when a number below float16's normal range is rounded
HALF_LARGEST = 65504.0  # the largest finite float16


class HalfMatrix:
    """The product with a matrix [R, D] kept in float16: x [N, D] float32 -> x W' + bias [N, R] float32."""

    def __init__(self, matrix: torch.Tensor, bias: torch.Tensor | None) -> None:
        """matrix [R, D] float32: rounded to float16. bias: [R] or None."""
        self.shape = tuple(matrix.shape)
        self._packed = torch.ops.quantized.linear_prepack_fp16(matrix.contiguous(), bias)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix that a product reads."""
        return 2 * self.shape[0] * self.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product."""
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)


def _should_keep_float16(matrix: torch.Tensor, is_short: bool) -> bool:
    """Returns whether to keep a matrix in float16. is_short: whether its file stores it in 16 bits or fewer."""
    if not matrix.numel() or matrix.abs().max() > HALF_LARGEST:
        return False
    return is_short or bool((matrix.half().float() - matrix).abs().max() <= HALF_ROUNDING)


@cache
def has_float16_products() -> bool:
    """Returns whether PyTorch multiplies float16 matrices with float32 vectors here: by FBGEMM, on x86 with AVX2."""
    return "fbgemm" in torch.backends.quantized.supported_engines


@cache
def has_bfloat16_units() -> bool:
    """Returns whether the processor has bfloat16 units; without them, bfloat16 is slower than float32."""
    found = getattr(torch.cpu, "get_capabilities", dict)()  # older versions lack it
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))
