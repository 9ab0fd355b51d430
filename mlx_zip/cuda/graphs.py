"""CUDA graphs: each piece of a step is captured once and then replayed with one call. On a CPU, pieces run uncaptured.

A piece is captured for 1, 2, 4, 8, ... sequences. Per step, the host sends a few integers through pinned memory and
waits only for the chosen ids. Work that a graph cannot hold runs after the ids are known: a sequence whose LongRoPE
factors switch is read again from its log, and the body runs again for a sequence whose id installs the entry that this
id stands for (LZW's KwKwK). A sequence that does not step stays in the batch with unchanged counters. The body writes a
key behind the end of that sequence, which the sequence's next id overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import TypeVar

import torch

WARM_UPS = 2  # calls before a capture, which compile and tune kernels and set up libraries
Result = TypeVar("Result")
_capturing = Lock()  # a capture begins with a wait for the whole GPU, which would break another thread's capture


class CudaGraphs:
    """Captured pieces of work on one device, by key.

    A piece reads and writes tensors at fixed addresses, and reads nothing on the host. Running a piece twice gives the
    same result, except in the tensors passed to `run` as `keep`. All graphs share one memory pool. No graph overwrites
    another graph's results, because all graphs are replayed on one stream and `CudaGraphs` holds their results.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._captures = device, device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        # for warm-ups and captures: cuBLAS allocates a workspace per stream, which must not happen during a capture
        self._side = torch.cuda.Stream(device) if self._captures else None
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, object]] = {}

    def run(self, key: Hashable, work: Callable[[], Result], keep: Sequence[torch.Tensor] = ()) -> Result:
        """Runs a piece of work on the current stream and returns its result; on a GPU, the same tensors in every call.

        key: names the piece; equal keys mean equal work on the same tensors. keep: small tensors that the work reads
        and changes, such as counters; their values are restored after each warm-up run.
        """
        if not self._captures:
            return work()
        if key not in self._captured:
            with torch.cuda.device(self._device):
                self._run_warm_up(work, keep)
                self._captured[key] = self._capture(work)
        graph, result = self._captured[key]
        graph.replay()
        return result  # type: ignore[return-value]

    def _run_warm_up(self, work: Callable[[], object], keep: Sequence[torch.Tensor]) -> None:
        """Runs the work on a side stream, as a capture requires, and restores the values of `keep` after each run."""
        current, side = torch.cuda.current_stream(self._device), self._side
        assert side is not None
        side.wait_stream(current)
        with torch.cuda.stream(side):
            before = [tensor.clone() for tensor in keep]
            for _ in range(WARM_UPS):
                try:
                    work()
                finally:
                    for tensor, value in zip(keep, before, strict=True):
                        tensor.copy_(value)
        current.wait_stream(side)

    def _capture(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Returns the graph captured from `work` and the result tensors, whose values the capture does not compute."""
        graph = torch.cuda.CUDAGraph()
        with _capturing, torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
            result = work()
        return graph, result


def graph_batch_size(count: int, most: int) -> int:
    """Returns the number of sequences of the graph to use for `count`: 1, 2, 4, 8, ..., at most `most`."""
    return min(most, 1 << max(0, count - 1).bit_length())
