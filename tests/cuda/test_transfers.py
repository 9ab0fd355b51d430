"""Arrays between host and device in the order that a card needs, with a stand-in for its memory and its events."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mlx_zip.cuda import transfers  # noqa: E402


@pytest.fixture
def calls(monkeypatch):
    """What is asked of a card, in order; its memory is the host's here."""
    noted, zeros = [], torch.zeros

    def allocate(size, dtype, device="cpu", pin_memory=False):
        noted.append("pinned" if pin_memory else "device")
        return zeros(size, dtype=dtype)

    class Event:
        def record(self, stream):
            noted.append(f"record on {stream}")

        def synchronize(self):
            noted.append("wait")

    monkeypatch.setattr(torch, "zeros", allocate)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    return noted


CARD = SimpleNamespace(type="cuda")


def test_pinned_memory_is_filled_again_only_after_the_device_has_read_it(calls):
    upload = transfers.Upload(2, CARD)
    address = upload.device.data_ptr()
    for values in ([3, 4], [5, 6]):
        upload.send(np.array(values))
        assert upload.device.tolist() == values
    assert upload.device.data_ptr() == address
    assert calls == ["pinned", "device", *["wait", "record on current"] * 2]


def test_ids_are_read_on_the_host_only_after_their_copy_is_done(calls):
    download = transfers.Download(3, CARD)
    download.begin(torch.tensor([7, 8]))
    assert download.wait(2) == [7, 8]
    assert calls == ["pinned", "record on current", "wait"]
