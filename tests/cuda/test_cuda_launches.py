"""The counter of launches and bytes counts, and a step of the PyTorch engine stays within its budget."""

from __future__ import annotations

import pkgutil
import sys
from contextlib import ExitStack
from importlib import import_module
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("mlx.core")

from torch.utils._python_dispatch import _get_current_dispatch_mode  # noqa: E402

from mlx_zip.bench.engines.shape_table import SHAPES, ZipOptions, config_with_hypertokens  # noqa: E402
from mlx_zip.cuda import kernels  # noqa: E402
from mlx_zip.cuda.kernels import products  # noqa: E402
from mlx_zip.cuda.kernels.attention import decode_attention  # noqa: E402
from mlx_zip.cuda.kernels.head import joint_head  # noqa: E402
from mlx_zip.cuda.kernels.hyper_rows import embed_entries, hyper_embedding  # noqa: E402
from mlx_zip.cuda.kernels.packed import Packed  # noqa: E402
from mlx_zip.cuda.kernels.products import rms_norm  # noqa: E402
from mlx_zip.cuda.model import open_model  # noqa: E402
from support.kernel_launches import (  # noqa: E402
    LaunchCounts,
    count_step_costs,
    counting_launches,
)
from support.shape_costs import count_shape_costs, extrapolate_to_layers  # noqa: E402
from support.torch_folders import make_model, save  # noqa: E402

F4 = 4  # bytes of a float32


def triton_everywhere():
    """Makes every dispatcher take its Triton form while launches are counted; the interpreter runs it here."""
    counting = lambda impl, *tensors: _get_current_dispatch_mode() is not None
    stack = ExitStack()
    for info in pkgutil.iter_modules(kernels.__path__):
        module = import_module(f"{kernels.__name__}.{info.name}")
        if hasattr(module, "should_use_triton"):
            stack.enter_context(patch.object(module, "should_use_triton", counting))
    return stack


# ---- the counter


def test_an_operation_counts_once_with_what_it_reads_and_writes():
    x, y = torch.ones(8, 4), torch.ones(4, 2)
    with counting_launches() as found:
        torch.mm(x, y)
    assert (found.count, found.bytes) == (1, F4 * (32 + 8 + 16))


def test_views_and_allocations_do_not_count():
    x = torch.ones(8, 4)
    with counting_launches() as found:
        x[2:].reshape(3, 8).view(torch.int32).transpose(0, 1).unsqueeze(0).expand(5, -1, -1)
        x.split(2)
        torch.empty(100)
        torch.empty_like(x)
    assert not found.names


def test_an_operation_made_of_others_counts_as_those():
    x, weight = torch.ones(2, 3, 4), torch.ones(5, 4)
    with counting_launches() as found:
        torch.nn.functional.linear(x, weight)  # a product and views
    assert found.count == 1


def test_what_writes_in_place_counts():
    x = torch.ones(6)
    with counting_launches() as found:
        x.add_(1)
        x[2:4] = 0
    assert found.count == 2


def test_rows_that_are_chosen_count_and_not_the_table():
    table, ids = torch.ones(1000, 4), torch.tensor([3, 5])
    with counting_launches() as found:
        table[ids]
    assert found.bytes == 2 * F4 * 8 + 8 * 2


def test_a_kernel_counts_once_and_nothing_inside_it_counts():
    x, weight = torch.ones(2, 8), torch.ones(8)
    with counting_launches() as found:
        rms_norm(x.clone(), weight, 1e-5, impl="reference")
    assert found.names == {"clone": 1, "products.reference_rms_norm": 1}
    assert found.sizes["products.reference_rms_norm"] == F4 * (16 + 8 + 16)


def test_a_kernels_rows_count_and_not_its_tables():
    table, rows, ids = torch.ones(100, 8), torch.ones(1, 50, 8), torch.tensor([[3, 120]])
    with counting_launches() as found:
        hyper_embedding(ids, table, rows, 100, "reference")
    assert (found.count, found.bytes) == (1, 2 * 8 + 2 * F4 * 16)


def test_a_head_reads_installed_rows_only():
    rows, installed = torch.ones(1, 50, 8), torch.zeros(1, 50, dtype=torch.bool)
    installed[0, :3] = True
    x, base = torch.ones(1, 8), torch.ones(100, 8)
    with counting_launches() as found:
        joint_head(x, base, rows, installed, 90, impl="reference")
    assert (found.count, found.bytes) == (2, F4 * (8 + 90 * 8 + 3 * 8) + 50 + 8)


def pack(rows, width, bits=8, group=32):
    words = torch.zeros(rows, width * bits // 32, dtype=torch.int32)
    scales, biases = torch.ones(2, rows, width // group)
    return Packed(words, scales, biases, bits, group)


def test_a_packed_tables_rows_count_as_they_are_packed():
    table, rows, ids = pack(100, 64), torch.ones(1, 50, 64), torch.tensor([[3, 120, 99]])
    row = 64 + 2 * F4 * 2
    with counting_launches() as found:
        hyper_embedding(ids, table, rows, 100, "reference")
        embed_entries(ids, table, None, "reference")
    assert found.sizes["hyper_rows.reference_hyper_embedding"] == 3 * 8 + 2 * row + F4 * 64 + 3 * F4 * 64
    assert found.sizes["hyper_rows.reference_embed_entries"] == 3 * 8 + 3 * row + 3 * F4 * 64


@pytest.mark.parametrize("places", [32, 300])
def test_attention_launches_as_often_as_its_triton_form_and_reads_what_a_sequence_has(places):
    q, lengths = torch.ones(2, 4, 16), torch.tensor([3, 20])
    keys, values = torch.ones(2, 2, places, 16), torch.ones(2, 2, places, 16)
    counts = []
    for impl in ("reference", "triton"):
        with counting_launches() as found:
            decode_attention(q, keys, values, lengths, impl=impl)
        counts.append(found.count)
        if impl == "reference":
            assert found.bytes == F4 * (2 * 128 + 23 * 2 * 2 * 16)
    assert counts[0] == counts[1] == (2 if places > 64 else 1)


def test_attention_with_a_window_reads_the_last_keys_only():
    keys, lengths = torch.ones(2, 2, 32, 16), torch.tensor([3, 20])
    with counting_launches() as found:
        decode_attention(torch.ones(2, 4, 16), keys, keys.clone(), lengths, 5, impl="reference")
    assert found.sizes["attention.reference_decode_attention"] == F4 * (2 * 128 + (3 + 5) * 2 * 2 * 16)


def test_a_kernel_that_another_one_calls_is_part_of_that_one(monkeypatch):
    def reference(gate_up):
        return products.reference_rms_norm(gate_up, torch.ones(8), 1e-5)

    reference.__module__ = products.__name__
    monkeypatch.setattr(products, "reference_silu_gate", reference)
    x = torch.ones(2, 8)
    with counting_launches() as found:
        products.silu_gate(x, impl="reference")
    assert found.names == {"products.reference_silu_gate": 1}


def test_launches_are_counted_where_triton_is_not_installed(monkeypatch):
    monkeypatch.delitem(sys.modules, "triton")
    x, weight = torch.ones(2, 8), torch.ones(8)
    with counting_launches() as found:
        rms_norm(x + 1, weight, 1e-5, impl="reference")
    assert found.names == {"add": 1, "products.reference_rms_norm": 1}


def test_what_runs_after_the_count_is_not_counted():
    with counting_launches() as found:
        pass
    rms_norm(torch.ones(2, 8), torch.ones(8), 1e-5)
    assert not found.names


# ---- a step


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return save(make_model("llama", encoder="transformer"), folder / "llama")


@pytest.mark.slow
def test_a_step_launches_as_many_triton_kernels_as_are_counted_without_them(tiny, few_programs):
    counts = count_step_costs(open_model(tiny, "cpu", kernels=True))
    with triton_everywhere():
        real = count_step_costs(open_model(tiny, "cpu", kernels=True))
    assert (real.warm.count, real.cold.count) == (counts.warm.count, counts.cold.count)


# ---- the budget: phi-3.5-mini in bfloat16, counted at full width with one and two layers, and extrapolated to 32

PER_LAYER, ADDED = 7, 4  # launches
EXTRA_BYTES = 0.015  # of the weights that a step reads


@pytest.fixture(scope="module")
def phi():
    """Costs of a step of `torch-base` and of `torch-zip`, warm and cold, at the shape of phi-3.5-mini."""
    plain = SHAPES["phi-3.5-mini"]
    return count_shape_costs(plain, torch.bfloat16), count_shape_costs(
        config_with_hypertokens(plain, ZipOptions()), torch.bfloat16
    )


@pytest.mark.slow
def test_a_step_without_hypertokens_reads_the_weights_once(phi):
    weights = 2 * (32 * (4 * 3072**2 + 3 * 3072 * 8192) + 3072 * 32064)
    assert phi[0].warm.bytes == pytest.approx(weights, rel=0.006)


@pytest.mark.slow
def test_a_layer_of_a_step_launches_no_more_than_the_budget(phi):
    for costs in phi:
        assert costs.warm.count <= PER_LAYER * 32 + 16


@pytest.mark.slow
def test_the_page_of_cards_computes_with_the_launches_that_are_counted(phi):
    assert phi[0].warm.count == 234  # docs/reports/nvidia.md


@pytest.mark.slow
def test_a_warm_step_with_hypertokens_adds_few_launches_and_few_bytes(phi):
    base, zipped = phi
    assert 0 < zipped.warm.count - base.warm.count <= ADDED
    assert 2048 * 3072 * 2 < zipped.warm.bytes - base.warm.bytes <= EXTRA_BYTES * base.warm.bytes


@pytest.mark.slow
def test_a_cold_step_also_reads_both_encoders(phi):
    encoders = 2 * 2 * 2 * 12 * 3072**2  # bytes of two untied encoders of two layers
    base, zipped = phi
    assert zipped.cold.bytes - zipped.warm.bytes == pytest.approx(encoders, rel=0.02)
    assert zipped.cold.bytes < 1.13 * base.warm.bytes
    assert zipped.cold.count - zipped.warm.count < 64


def test_a_shape_is_extrapolated_by_its_layers():
    one, two = LaunchCounts(), LaunchCounts()
    for found, times in ((one, 1), (two, 2)):
        found.add("product", 4 * times, 100 * times)
        found.add("head", 1, 30)
    found = extrapolate_to_layers(one, two, 5)
    assert (found.names, found.sizes) == ({"product": 20, "head": 1}, {"product": 500, "head": 30})
