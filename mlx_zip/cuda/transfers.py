"""Arrays on their way between host and device: through pinned memory, without waiting where it can be."""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns an array on a device, copied in stream order: the host waits for nothing that the device does."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)  # PyTorch keeps the pinned memory until it has been read


def ids_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns an array of integers as int64 on a device, as `to_device` does."""
    return to_device(np.asarray(array).astype(np.int64), device)


class Upload:
    """An int64 tensor [n] on the device, at one address, that the host fills. On a CPU the two are one."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_card = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=on_card)
        self.device = torch.zeros(size, dtype=torch.int64, device=device) if on_card else self._host
        self._done = torch.cuda.Event() if on_card else None

    def send(self, values: np.ndarray) -> None:
        """Fills the tensor with values [n], in stream order. Waits only if the values sent before have not left."""
        if self._done is not None:
            self._done.synchronize()
        self._host.copy_(torch.from_numpy(values))
        if self._done is not None:
            self.device.copy_(self._host, non_blocking=True)
            self._done.record(torch.cuda.current_stream(self.device.device))


class Download:
    """Up to `size` int64 values on their way to the host."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_card = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=on_card)
        self._done = torch.cuda.Event() if on_card else None

    def begin(self, values: torch.Tensor) -> None:
        """Starts to copy values [n]; what is computed later does not delay them."""
        self._host[: len(values)].copy_(values, non_blocking=True)
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(values.device))

    def wait(self, count: int) -> list[int]:
        """Returns the first `count` values, as soon as they are there."""
        if self._done is not None:
            self._done.synchronize()
        return self._host[:count].tolist()
