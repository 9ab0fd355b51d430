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
    monkeypatch.setattr(torch, "empty", lambda size, **options: allocate(size, **options).fill_(77))
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
    download.start(torch.tensor([7, 8]))
    assert download.wait(2) == [7, 8]
    assert calls == ["pinned", "record on current", "wait"]


# ---- large tensors


@pytest.fixture
def caches():
    """Keys and values of one of three sequences, of 20 bytes for each head: a view that is not contiguous."""
    whole = torch.arange(2 * 2 * 3 * 4 * 7 * 2, dtype=torch.int32).view(2, 2, 3, 4, 7, 2)
    return whole.to(torch.bfloat16)[:, :, 1, :, :5]


SIZES = [3, 4, 20, 23, 60, 80, 200, 10_000]  # from parts of a row to the whole


@pytest.mark.parametrize("size", SIZES)
def test_a_large_tensor_comes_to_the_host_in_pieces(calls, caches, monkeypatch, size):
    monkeypatch.setattr(transfers, "PIECE_BYTES", size)
    host = transfers.StagingBuffers(CARD, caches.nbytes).download(caches)
    assert torch.equal(host, caches)
    assert host.is_contiguous()
    assert host.data_ptr() != caches.data_ptr()
    assert calls[:3] == ["pinned", "pinned", "device"]
    copies = calls[3:]
    assert copies.count("wait") == copies.count("record on current") >= caches.nbytes / size
    for at in range(1, len(copies)):
        ahead = copies[:at].count("record on current") - copies[:at].count("wait")
        assert ahead in (1, 2)  # a piece is on its way while the host copies the one before; no buffer is reused early


@pytest.mark.parametrize("size", SIZES)
def test_a_large_tensor_comes_to_the_device_in_pieces(calls, caches, monkeypatch, size):
    monkeypatch.setattr(transfers, "PIECE_BYTES", size)
    target = torch.zeros(2 * 2 * 3 * 4 * 9 * 2, dtype=torch.bfloat16).view(2, 2, 3, 4, 9, 2)
    calls.clear()
    transfers.StagingBuffers(CARD, caches.nbytes).upload(caches.contiguous(), target[:, :, 2, :, :5])
    assert torch.equal(target[:, :, 2, :, :5], caches)
    assert not target[:, :, :2].any()
    assert not target[..., 5:, :].any()
    assert calls == ["pinned", "pinned", *["wait", "record on current"] * (len(calls[2:]) // 2)]


def test_a_tensor_without_values_is_copied_too(calls):
    none = torch.zeros(0, dtype=torch.float32).view(2, 0, 3)
    assert transfers.StagingBuffers(CARD, 0).download(none).shape == (2, 0, 3)
    transfers.StagingBuffers(CARD, 0).upload(none, none)
