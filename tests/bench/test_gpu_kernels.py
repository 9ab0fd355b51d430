"""The kernels that are timed alone: what their calls rotate through, and the controls beside them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from mlx_zip.bench.gpu import timing as kernels  # noqa: E402
from mlx_zip.cuda.devices import tensor_bytes  # noqa: E402
from support.kernel_launches import counting_launches  # noqa: E402
from support.tiny_bench import SHAPE  # noqa: E402

CPU, CACHE = torch.device("cpu"), 40_000
CONFIG = {**SHAPE, "vocab_size": 192, "hidden_size": 64, "intermediate_size": 128}


@pytest.fixture
def found(monkeypatch):
    """The cases by name; `seen` notes the matrices, or keys and values, that a case's calls are given."""
    cases, seen = {}, {}
    for name in ("matvec", "joint_head", "decode_attention", "linear"):
        call = getattr(kernels, name)
        noted = lambda *args, call=call, **kw: (
            seen.setdefault("now", []).append(args[1:-1] or args[1:]) or call(*args, **kw)
        )
        monkeypatch.setattr(kernels, name, noted)
    for case in kernels.kernel_cases(CONFIG, CPU, torch.float32, 8, 8, CACHE):
        seen.pop("now", None)
        for _ in range(2 * case.sets):
            case.work("reference")
        cases[case.name] = (case, seen.get("now", []))
    return cases


PIECES = ("joint head", "norm, gate and up", "down and residual")
LARGE = [f"{name}, {kind}" for name in PIECES for kind in ("dense", "8 bit", "4 bit")]


@pytest.mark.parametrize("name", [*LARGE, "attention over 8 keys", "control, torch linear of down and residual"])
def test_calls_rotate_through_more_than_three_caches(found, name):
    case, given = found[name]
    matrices = {id(one[0]): one[:2] if name.startswith("attention") else one[0] for one in given}
    assert len(matrices) == case.sets > 1
    assert tensor_bytes(list(matrices.values())) > 3 * CACHE
    assert [id(one[0]) for one in given[: case.sets]] == [id(one[0]) for one in given[case.sets :]]


def test_a_trial_has_as_many_calls_as_there_are_matrices(found):
    case, _ = found["down and residual, 4 bit"]
    done = []
    line = kernels.time_kernel(
        case._replace(work=lambda impl: done.append(impl) or torch.ones(1)), CPU, 1, 1.0, False, 2
    )
    assert (line["calls"], line["sets"]) == (case.sets, case.sets)
    assert case.sets > 2


def test_a_call_moves_the_bytes_that_the_counter_of_launches_counts():
    cases = [*kernels.kernel_cases(CONFIG, CPU, torch.float32, 8, 8, 0), *kernels.memory_control_cases(CPU, 16)]
    for case in cases:
        with counting_launches() as counted:
            out = case.work("reference")
        assert case.read + tensor_bytes(out) == counted.bytes, case.name


def test_controls_stand_behind_the_products_that_they_are_compared_with(found):
    names = list(found)
    for name in PIECES:
        assert names.index(f"control, torch linear of {name}") == names.index(f"{name}, dense") + 1
    assert not any("int4" in name for name in names)  # PyTorch has none on a CPU


def test_a_control_computes_what_the_kernel_without_its_extras_computes():
    case = next(
        one for one in kernels.kernel_cases(CONFIG, CPU, torch.float32, 8, 8, 0) if one.name.startswith("control")
    )
    assert case.work(None).shape == (1, CONFIG["vocab_size"])


def test_the_arguments_of_pytorchs_4_bit_product_have_the_shapes_that_it_takes_on_a_card():
    with FakeTensorMode():
        card = torch.device("cuda")
        matrix = kernels.random_torch_int4_matrix(64, 128, card)
        out = kernels.torch_int4_product(torch.empty((1, 128), dtype=torch.bfloat16, device=card), *matrix)
    assert (out.shape, out.dtype) == ((1, 64), torch.bfloat16)


def test_a_copy_and_a_sum_of_the_memory_are_controls_too():
    copy, total = kernels.memory_control_cases(CPU, 16)
    lines = [kernels.time_kernel(one, CPU, 1, 1.0, False, 1) for one in (copy, total)]
    assert [line["bytes"] // (4 * 16**2) for line in lines] == [2, 1]
