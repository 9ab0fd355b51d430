"""Copies arrays between host and device through pinned memory, without waiting where possible."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import torch

PIECE_BYTES = 16 << 20  # maximum size of the pieces in which large tensors are copied


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns an array on a device, copied in stream order; the host does not wait for the device."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)  # PyTorch keeps the pinned memory until the copy is done


def ids_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns an array of integers as an int64 tensor on a device; copies as `to_device` does."""
    return to_device(np.asarray(array).astype(np.int64), device)


class Upload:
    """An int64 tensor [size] at a fixed address on the device, which the host fills with `send`."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_card = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=on_card)
        self.device = torch.zeros(size, dtype=torch.int64, device=device) if on_card else self._host
        self._done = torch.cuda.Event() if on_card else None

    def send(self, values: np.ndarray) -> None:
        """Copies values [size] into the tensor, in stream order. Waits only until the previous copy is done."""
        if self._done is not None:
            self._done.synchronize()
        self._host.copy_(torch.from_numpy(values))
        if self._done is not None:
            self.device.copy_(self._host, non_blocking=True)
            self._done.record(torch.cuda.current_stream(self.device.device))


class Download:
    """Copies up to `size` values of type `dtype` from the device to the host, in the background."""

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype = torch.int64) -> None:
        on_card = device.type == "cuda"
        self._host = torch.zeros(size, dtype=dtype, pin_memory=on_card)
        self._done = torch.cuda.Event() if on_card else None

    def start(self, values: torch.Tensor) -> None:
        """Starts to copy values [n]; work that is queued later does not delay the copy."""
        self._host[: len(values)].copy_(values, non_blocking=True)
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(values.device))

    def wait(self, count: int) -> list[Any]:
        """Waits for the copy and returns its first `count` values."""
        if self._done is not None:
            self._done.synchronize()
        return self._host[:count].tolist()


# ---- large tensors


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy of a tensor on the host. Waits for the device."""
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True)
    return StagingBuffers(tensor.device, tensor.nbytes).download(tensor)


def copy_to_device(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies a host tensor into `target`, of the same shape and dtype on a device, in stream order."""
    if target.device.type != "cuda":
        target.copy_(source)
    else:
        StagingBuffers(target.device, source.nbytes).upload(source, target)


class StagingBuffers:
    """Two pinned buffers through which a tensor is copied in pieces, so that no second whole copy is needed.

    While the device copies to or from one buffer, the host copies to or from the other. size: bytes of the tensor.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._buffers = [_PinnedBuffer(device, min(size, PIECE_BYTES)) for _ in range(2)]

    def download(self, source: torch.Tensor) -> torch.Tensor:
        """Returns a copy, on the host, of a tensor on the device."""
        host, last = torch.empty(source.shape, dtype=source.dtype), None
        for piece, target, buffer in zip(
            _split_tensor_into_pieces(source), _split_tensor_into_pieces(host), cycle(self._buffers), strict=False
        ):
            staged = buffer.view_as(piece).copy_(piece, non_blocking=True)
            buffer.record_use()
            if last is not None:
                _copy_when_arrived(*last)
            last = buffer, staged, target
        if last is not None:
            _copy_when_arrived(*last)
        return host

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies a host tensor into `target` on the device. Does not wait for the last two pieces."""
        for piece, place, buffer in zip(
            _split_tensor_into_pieces(source), _split_tensor_into_pieces(target), cycle(self._buffers), strict=False
        ):
            buffer.wait()
            place.copy_(buffer.view_as(piece).copy_(piece), non_blocking=True)
            buffer.record_use()


class _PinnedBuffer:
    """Pinned memory, and an event that completes when the device has read or written the memory."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._device, self._done = device, torch.cuda.Event()

    def view_as(self, piece: torch.Tensor) -> torch.Tensor:
        """Returns the memory as a tensor of a piece's shape and dtype."""
        return self._memory[: piece.nbytes].view(piece.dtype).view(piece.shape)

    def record_use(self) -> None:
        """Records the event after the device work queued so far, such as a copy from or to the memory."""
        self._done.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Waits for the recorded event."""
        self._done.synchronize()


def _copy_when_arrived(buffer: _PinnedBuffer, staged: torch.Tensor, target: torch.Tensor) -> None:
    buffer.wait()
    target.copy_(staged)


def _split_tensor_into_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields views of at most `PIECE_BYTES` bytes, in the same order for all tensors of one shape and dtype."""
    if tensor.nbytes <= PIECE_BYTES or not tensor.dim():
        yield tensor
        return
    if (count := PIECE_BYTES // tensor[0].nbytes) > 0:
        yield from tensor.split(count)
        return
    for item in tensor:
        yield from _split_tensor_into_pieces(item)
