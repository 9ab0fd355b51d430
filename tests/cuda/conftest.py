"""What tests of the CUDA rooms share: visible skips, Triton's interpreter where no GPU is, guarded memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MISSING = [name for name in ("torch", "triton") if find_spec(name) is None]
WITHOUT_TRITON = {"test_on_a_cpu.py"}  # files that need PyTorch only
BORDER = 64  # elements before and after each guarded tensor
CANARY = 77  # in borders of integers

if not MISSING:
    import numpy as np
    import torch
    from triton.runtime import interpreter

    from mlx_zip.cuda.kernels.packed import Packed, dequantize
    from mlx_zip.cuda.kernels.triton.tuning import is_interpreted
    from support.card_tensor import held

    BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a float
    OUR_NAN = {  # no operation gives these, so a NaN that is written to a border is seen too
        torch.float16: 0x7E5A,
        torch.bfloat16: 0x7FD5,
        torch.float32: 0x7FC0ABCD,
        torch.float64: 0x7FF800000000ABCD,
    }
    torch.set_num_threads(1)  # the tensors are tiny, and threads that wait for each other take longer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips every test of this folder visibly where torch or triton is missing."""
    if MISSING:
        for item in items:
            enough = item.path.name in WITHOUT_TRITON and "torch" not in MISSING
            if item.path.is_relative_to(HERE) and not enough:
                item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(MISSING)}"))


@pytest.fixture(autouse=True)
def one_of_the_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives tuned kernels the sizes that the test's name chooses: all of them are tried, and none is measured."""
    if not MISSING:
        from mlx_zip.cuda.kernels.triton import tuning

        name = zlib.crc32(request.node.nodeid.encode())
        monkeypatch.setattr(tuning, "can_time_launches", lambda: False)
        monkeypatch.setattr(tuning, "default_sizes", lambda choices: choices[name % len(choices)])


@pytest.fixture
def few_programs(one_of_the_sizes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives tuned kernels the sizes with the most rows per program, so that fewer programs are interpreted."""
    from mlx_zip.cuda.kernels.triton import tuning

    monkeypatch.setattr(tuning, "default_sizes", lambda choices: max(choices, key=lambda one: one[0].get("LINES", 0)))


class Guard:
    """Memory with borders. Reads of a border fail in the interpreter and meet NaN elsewhere; `check` finds writes."""

    def __init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.whole: list[tuple[torch.Tensor, int]] = []
        self.empty_in_torch = torch.empty

    def empty(self, shape, dtype=None, device=None, other=0) -> torch.Tensor:
        """Returns a poisoned tensor between two borders, in place of `torch.empty`."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        size = torch.Size(shape).numel()
        dtype = dtype or torch.float32
        whole = self.empty_in_torch(size + 2 * BORDER, dtype=dtype, device=device or self.device)
        if dtype.is_floating_point:
            whole.view(BITS[dtype.itemsize]).fill_(OUR_NAN[dtype] + other)
        else:
            whole.fill_(True if dtype == torch.bool else CANARY)
        self.whole.append((held(whole), other))  # of a pretended card: its values
        return whole[BORDER : BORDER + size].view(shape)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a copy of values between two borders."""
        copy = self.empty(values.shape, values.dtype, other=1)  # its NaN is told from a result's
        copy.copy_(values)
        return copy

    def check_read(self, addresses: np.ndarray) -> None:
        """Fails if one of these addresses is in a border: on a GPU that is a read out of bounds."""
        spans = [(one.data_ptr(), one.nbytes, BORDER * one.itemsize) for one, _ in self.whole]
        borders = np.array(
            sorted((at, at + size) for begin, whole, size in spans for at in (begin, begin + whole - size)), np.uint64
        ).reshape(-1, 2)
        before = np.searchsorted(borders[:, 0], addresses, side="right").astype(np.int64) - 1
        inside = (before >= 0) & (addresses < borders[before.clip(0), 1]) if len(borders) else np.zeros(0, bool)
        assert not inside.any(), f"{inside.sum()} of {addresses.size} loads read beyond a tensor"

    def check(self) -> None:
        """Fails if a border was written to."""
        for whole, other in self.whole:
            for border in (whole[:BORDER], whole[-BORDER:]):
                floats = whole.is_floating_point()
                bits = border.view(BITS[whole.itemsize]) if floats else border
                wanted = OUR_NAN[whole.dtype] + other if floats else True if whole.dtype == torch.bool else CANARY
                assert (bits == wanted).all(), f"a border of {whole.shape} was overwritten"


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs the test on the card, or on a pretended one that takes its own tensors only, as a real one does."""
    if torch.cuda.is_available():
        yield
    else:
        from support.pretend_card import pretended_card

        with pretended_card(monkeypatch):
            yield


@pytest.fixture(autouse=True)
def random_numbers_of_its_name(request: pytest.FixtureRequest) -> None:
    """Seeds PyTorch by the test's name: a test has the same data on every run and machine."""
    if not MISSING:
        torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    """Makes every `torch.empty` of the test poisoned and guarded; called with a tensor, returns a guarded copy."""
    guard, load = Guard(), interpreter._interpreter.load

    def checked(pointers: np.ndarray, mask: np.ndarray, *others: object) -> np.ndarray:
        guard.check_read(pointers[mask.astype(bool)])
        return load(pointers, mask, *others)

    monkeypatch.setattr(torch, "empty", guard.empty)
    monkeypatch.setattr(interpreter._interpreter, "load", checked)
    yield guard
    guard.check()


@pytest.fixture
def close() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Returns a function that compares a result with a float64 one: nothing is NaN, errors below one rounding or so."""

    def compare(got: torch.Tensor, wanted: torch.Tensor, roundings: int = 1) -> None:
        assert wanted.dtype == torch.float64
        bfloat = 2**-7 if is_interpreted() else 2**-8  # the interpreter cuts bfloat16 off
        tolerance = {torch.float32: 2e-6, torch.bfloat16: bfloat, torch.float16: 2**-10}[got.dtype]
        tolerance *= roundings
        torch.testing.assert_close(got.double().cpu(), wanted.cpu(), rtol=tolerance, atol=tolerance)

    return compare


@pytest.fixture
def random_packed(guard: Guard) -> Callable[..., tuple[Packed, torch.Tensor]]:
    """Returns a function that makes a guarded packed matrix of random words, and the same matrix in float64."""

    def make(rows: int, width: int, bits: int, group: int, dtype: torch.dtype) -> tuple[Packed, torch.Tensor]:
        words = torch.randint(-(2**31), 2**31, (rows, width * bits // 32)).to(torch.int32)
        scales, biases = (torch.randn(rows, width // group) for _ in range(2))
        packed = Packed(guard(words), guard((scales / 2**bits).to(dtype)), guard(biases.to(dtype)), bits, group)
        return packed, dequantize(packed._replace(scales=packed.scales.double(), biases=packed.biases.double()))

    return make
