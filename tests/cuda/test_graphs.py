"""How pieces of work are captured and replayed, with a stand-in for CUDA that notes the order of calls."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from mlx_zip.cuda.graphs import WARM_UPS, CudaGraphs  # noqa: E402


class Cuda:
    """Stands in for what `CudaGraphs` uses of torch.cuda. calls: in order. keeps: tensors that capturing restores."""

    def __init__(self, *keeps: torch.Tensor) -> None:
        self.calls: list[str] = []
        self.keeps = keeps
        self.warmed: list[Stream] = []

    def graph_pool_handle(self):
        return "pool"

    def current_stream(self, device):
        return Stream(self, "current")

    def Stream(self, device):
        return Stream(self, "side")

    @contextmanager
    def device(self, device):
        self.calls.append(f"device {device}")
        yield

    @contextmanager
    def stream(self, stream):
        self.warmed.append(stream)
        self.calls.append(f"on {stream.name}")
        yield
        self.calls.append(f"off {stream.name}")

    def CUDAGraph(self):
        return self

    def replay(self):
        self.calls.append("replay")

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        assert (graph, pool, capture_error_mode) == (self, "pool", "thread_local")
        assert stream in self.warmed  # its libraries are set up
        before = [tensor.clone() for tensor in self.keeps]
        self.calls.append("capture")
        yield
        for tensor, value in zip(self.keeps, before, strict=True):
            tensor.copy_(value)  # capturing computes nothing


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other) -> None:
        self.cuda.calls.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def counter():
    return torch.zeros(2, dtype=torch.int64)


@pytest.fixture
def cuda(counter, monkeypatch):
    made = Cuda(counter)
    for name in ("graph_pool_handle", "current_stream", "Stream", "device", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


def test_a_piece_is_warmed_up_on_a_side_stream_captured_once_and_replayed(cuda, counter):
    graphs, runs = CudaGraphs(torch.device("cuda")), []

    def work():
        runs.append(counter.tolist())
        return counter.add_(1)

    results = [graphs.run("body", work, (counter,)) for _ in range(3)]
    assert all(result is results[0] for result in results)
    assert runs == [[0, 0]] * (WARM_UPS + 1)
    assert counter.tolist() == [0, 0]  # only replaying, which the stand-in does not do, would count
    assert cuda.calls == [
        "device cuda",
        "side waits for current",
        "on side",
        "off side",
        "current waits for side",
        "capture",
        "replay",
        "replay",
        "replay",
    ]


def test_pieces_of_other_keys_are_captured_too(cuda, counter):
    graphs = CudaGraphs(torch.device("cuda"))
    assert [graphs.run(("head", size), lambda size=size: size) for size in (1, 2, 1)] == [1, 2, 1]
    assert cuda.calls.count("capture") == 2
    assert cuda.calls.count("replay") == 3


def test_counters_have_their_values_after_a_piece_that_fails(cuda, counter):
    def fails():
        counter.add_(1)
        raise RuntimeError("out of memory")

    graphs = CudaGraphs(torch.device("cuda"))
    with pytest.raises(RuntimeError):
        graphs.run("body", fails, (counter,))
    assert counter.tolist() == [0, 0]
    assert graphs.run("body", lambda: 7) == 7


def test_on_a_cpu_a_piece_just_runs(counter):
    graphs = CudaGraphs(torch.device("cpu"))
    assert [graphs.run("body", lambda: int(counter.add_(1)[0]), (counter,)) for _ in range(2)] == [1, 2]
