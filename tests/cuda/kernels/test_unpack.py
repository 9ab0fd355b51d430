"""Unpacked matrices have the values that their levels, scales and biases say."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mlx_zip.cuda.kernels.packed import Packed, dequantize, unpack  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_a_card")


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width", "group"), [(1, 32, 32), (7, 64, 64), (33, 384, 128), (129, 96, 32)])
def test_unpacked_values_match_float64(rows, width, group, dtype, bits, impl, guard, close):
    shape = rows, width // group
    words = torch.randint(-(2**31), 2**31 - 1, (rows, width * bits // 32), dtype=torch.int32)
    scales, biases = (torch.randn(shape).to(dtype) for _ in range(2))
    found = unpack(Packed(guard(words), guard(scales), guard(biases), bits, group), dtype, impl)
    assert found.dtype == dtype
    close(found, dequantize(Packed(words, scales.double(), biases.double(), bits, group)), roundings=4)


def test_a_packed_matrix_whose_parts_do_not_fit_is_refused():
    words, scales = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 1)
    with pytest.raises(ValueError, match="scales has shape"):
        unpack(Packed(words, scales, scales, 4, 32), torch.float32)
