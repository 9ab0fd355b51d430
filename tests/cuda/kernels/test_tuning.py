"""The sizes of kernels are measured once per key on a GPU, for which clocks and a kernel stand in here."""

from __future__ import annotations

import ast
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from triton.compiler.errors import (  # noqa: E402
    CompilationError,
    CompileTimeAssertionFailure,
    UnsupportedLanguageConstruct,
)
from triton.runtime.errors import OutOfResources, PTXASError  # noqa: E402

from mlx_zip.cuda.kernels.triton import tuning  # noqa: E402

CHOICES = [({"COLUMNS": 512}, 4), ({"COLUMNS": 1024}, 8), ({"COLUMNS": 2048}, 8)]
TIMES = {512: 3.0, 1024: 1.0, 2048: 2.0}


class Kernel:
    """Takes a time of its own for each size and notes its launches. refused: sizes that raise `error`."""

    def __init__(self, *refused: int) -> None:
        self.now, self.launched, self.compiled, self.refused = 0.0, [], [], refused
        self.error: Exception = OutOfResources(300_000, 232_448, "shared memory")
        self.waits = 0  # for one event; a wait for the whole card would break what another thread captures

    def __getitem__(self, grid):
        def launch(*args, COLUMNS, num_warps):
            if COLUMNS in self.refused:
                raise self.error
            self.launched.append((grid, args, COLUMNS, num_warps))
            self.now += TIMES[COLUMNS]

        return launch

    def warmup(self, *args, grid, COLUMNS, num_warps):
        self.compiled.append(COLUMNS)


@pytest.fixture
def kernel(request, monkeypatch):
    made = Kernel(*getattr(request, "param", ()))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = made.now

        def synchronize(self):
            made.waits += 1

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(tuning, "can_time_launches", lambda: True)
    monkeypatch.setattr(tuning, "_compile_in_parallel", nullcontext)
    monkeypatch.setattr(tuning, "FLUSHED", 1)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: zeros(size, dtype=dtype))
    return made


def test_the_fastest_size_is_found_at_the_first_launch_of_a_key_and_taken_from_then_on(kernel):
    tuned = tuning.TunedKernel(kernel, CHOICES)
    tuned.launch("a", (7,), "x")
    assert kernel.compiled == [512, 1024, 2048]
    assert len(kernel.launched) == 3 + 3 * tuning.ROUNDS + 1
    assert kernel.waits == 1
    for _ in range(2):
        tuned.launch("a", (7,), "x")
    assert kernel.launched[-3:] == [((7,), ("x",), 1024, 8)] * 3
    assert len(kernel.launched) == 3 + 3 * tuning.ROUNDS + 3
    tuned.launch("b", (7,), "x")
    assert len(kernel.launched) == 2 * (3 + 3 * tuning.ROUNDS) + 4


@pytest.mark.parametrize("kernel", [(1024,)], indirect=True)
def test_sizes_that_the_gpu_has_no_room_for_are_left_out(kernel):
    tuning.TunedKernel(kernel, CHOICES).launch("a", (7,))
    assert kernel.launched[-1][2] == 2048


def compiling(kind):
    return kind("def kernel(): pass", ast.parse("kernel()").body[0], "no such operation")


@pytest.mark.parametrize("kernel", [(1024,)], indirect=True)
@pytest.mark.parametrize(
    "error",
    [
        OutOfResources(300_000, 232_448, "shared memory"),
        PTXASError("too many registers"),
        compiling(CompilationError),
        compiling(CompileTimeAssertionFailure),
        compiling(UnsupportedLanguageConstruct),
        RuntimeError("PassManager::run failed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_sizes_that_do_not_compile_or_fit_are_left_out_and_the_log_names_them(kernel, caplog, error):
    kernel.error = error
    tuning.TunedKernel(kernel, CHOICES).launch("a", (7,))
    assert kernel.launched[-1][2] == 2048
    said = [record.getMessage() for record in caplog.records if record.name == tuning.__name__]
    assert len(said) == 1
    assert said[0].startswith(f"sizes COLUMNS=1024 with 8 warps are left out: {type(error).__name__}: ")


@pytest.mark.parametrize("kernel", [(1024,)], indirect=True)
@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), ValueError("no pointer")])
def test_an_error_that_is_not_of_the_sizes_is_raised(kernel, error):
    kernel.error = error
    with pytest.raises(type(error), match=str(error)):
        tuning.TunedKernel(kernel, CHOICES).launch("a", (7,))


@pytest.mark.parametrize("kernel", [(512, 1024, 2048)], indirect=True)
def test_the_error_of_a_kernel_without_any_size_that_fits_is_raised(kernel):
    with pytest.raises(OutOfResources):
        tuning.TunedKernel(kernel, CHOICES).launch("a", (7,))


def test_nothing_is_measured_while_a_graph_is_captured_nor_kept_for_later(kernel, monkeypatch):
    tuned = tuning.TunedKernel(kernel, CHOICES)
    monkeypatch.setattr(tuning, "can_time_launches", lambda: False)
    monkeypatch.setattr(tuning, "default_sizes", lambda choices: choices[0])
    tuned.launch("a", (7,))
    assert [launched[2] for launched in kernel.launched] == [512]
    monkeypatch.setattr(tuning, "can_time_launches", lambda: True)
    tuned.launch("a", (7,))
    assert kernel.launched[-1][2] == 1024
