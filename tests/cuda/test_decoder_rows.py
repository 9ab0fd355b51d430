"""Several sequences in one PyTorch decoder: each computes what it computes alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tiny import tiny_config
from support.torch_folders import make_model, save

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

from mlx_zip.bench.engines.random_folder import random_folder  # noqa: E402
from mlx_zip.cuda.network.checkpoint import read_tensor_folder  # noqa: E402
from mlx_zip.cuda.network.cpu_decoder import CpuDecoder  # noqa: E402
from mlx_zip.cuda.network.decoder import Decoder, KVCache  # noqa: E402
from mlx_zip.cuda.network.decoder_config import LONG, SHORT  # noqa: E402
from support.kernel_launches import counting_launches  # noqa: E402

FAMILIES = ["llama", "mistral", "phi3", "qwen3"]
ROOM = 60  # slots of a sequence


both = pytest.mark.parametrize("kernels", [False, True], ids=["cpu", "references"])


def open_decoder(folder: Path, family: str = "llama", kernels: bool = True) -> Decoder:
    read = read_tensor_folder(save(make_model(family), folder / family), "cpu", kernels=kernels)
    return Decoder(read) if kernels else CpuDecoder(read)


def embeddings(decoder: Decoder, seed: int) -> torch.Tensor:
    """Returns random embeddings [1, 50, D]."""
    return torch.randn((1, 50, decoder.config.width), generator=torch.Generator().manual_seed(seed))


def read(decoder: Decoder, h: torch.Tensor, kv: KVCache) -> torch.Tensor:
    """Reads h [1, L, D] as the next ids of a lone sequence."""
    at = int(kv.lengths[0]) + torch.arange(h.shape[1])[None]
    kv.frequency_set.fill_(decoder.rope.frequency_set(49))
    return decoder.prefill(h, at, at, kv, int(at[0, -1]) + 1 if isinstance(decoder, CpuDecoder) else None)


def alone(decoder: Decoder, h: torch.Tensor) -> torch.Tensor:
    """Returns the outputs [50, D] of h [1, 50, D], read in one call."""
    return read(decoder, h, decoder.make_kv_cache(1, ROOM))[0]


@both
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_different_lengths_step_together_as_each_does_alone(family, kernels, tmp_path):
    decoder, lengths = open_decoder(tmp_path, family, kernels), [3, 40, 17]
    kv, inputs = decoder.make_kv_cache(3, ROOM), [embeddings(decoder, seed) for seed in range(3)]
    for row, length in enumerate(lengths):
        read(decoder, inputs[row][:, :length], kv.slice_rows(row, row + 1))
    for step in range(6):
        at = torch.tensor([length + step for length in lengths])
        h = torch.cat([inputs[row][:, at[row]] for row in range(3)])
        out = decoder.step(h, at, kv)
        expected = torch.stack([alone(decoder, inputs[row])[at[row]] for row in range(3)])
        torch.testing.assert_close(out, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_read_together_with_padding_at_the_end(family, tmp_path):
    decoder, counts, begins = open_decoder(tmp_path, family), [10, 4], [5, 21]
    kv, inputs = decoder.make_kv_cache(2, ROOM), [embeddings(decoder, seed) for seed in range(2)]
    for row, begin in enumerate(begins):
        read(decoder, inputs[row][:, :begin], kv.slice_rows(row, row + 1))
    h, slots = torch.full((2, 10, decoder.config.width), 9.0), torch.full((2, 10), -1)
    for row, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        h[row, :count] = inputs[row][0, begin : begin + count]
        slots[row, :count] = torch.arange(begin, begin + count)
    out = decoder.prefill(h, slots.clamp(min=0), slots, kv)
    assert kv.lengths.tolist() == [15, 25]
    for row, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        expected = alone(decoder, inputs[row])[begin : begin + count]
        torch.testing.assert_close(out[row, :count], expected, atol=2e-4, rtol=2e-4)


@both
def test_a_row_that_takes_no_part_in_a_step_goes_on_as_before(kernels, tmp_path):
    decoder = open_decoder(tmp_path, kernels=kernels)
    kv, inputs = decoder.make_kv_cache(2, ROOM), [embeddings(decoder, seed) for seed in range(2)]
    for row in range(2):
        read(decoder, inputs[row][:, :5], kv.slice_rows(row, row + 1))
    decoder.step(inputs[0][0, 5:7] + 1, torch.tensor([5, 5]), kv, active=torch.tensor([1, 0]))
    assert kv.lengths.tolist() == [6, 5]
    out = read(decoder, inputs[1][:, 5:9], kv.slice_rows(1, 2))
    torch.testing.assert_close(out[0], alone(decoder, inputs[1])[5:9], atol=2e-4, rtol=2e-4)


@both
def test_rows_of_short_and_long_factors_step_together(kernels, tmp_path):
    decoder = open_decoder(tmp_path, "phi3", kernels)
    assert decoder.rope.long_from == 32
    assert [decoder.rope.frequency_set(last) for last in (0, 31, 32, 500)] == [SHORT, SHORT, LONG, LONG]
    kv, h = decoder.make_kv_cache(2, ROOM), embeddings(decoder, 0)[:, :20]
    at = torch.arange(20)[None]
    for row in (SHORT, LONG):
        kv.frequency_set[row] = row
        decoder.prefill(h, at, at, kv.slice_rows(row, row + 1), 20)
    both = decoder.step(h[:, 0].repeat(2, 1), torch.tensor([20, 20]), kv)
    for row in (SHORT, LONG):
        lone = decoder.make_kv_cache(1, ROOM)
        lone.frequency_set.fill_(row)
        decoder.prefill(h, at, at, lone, 20)
        torch.testing.assert_close(both[row], decoder.step(h[:, 0], torch.tensor([20]), lone)[0], atol=2e-4, rtol=2e-4)
    assert (both[SHORT] - both[LONG]).abs().max() > 0.01


@both
def test_positions_need_not_be_slots(kernels, tmp_path):
    """As in the position mode base_token_end: only differences between positions count, and windows count slots."""
    decoder = open_decoder(tmp_path, "mistral", kernels)
    h, slots = embeddings(decoder, 0), torch.arange(50)[None]
    positions = torch.cumsum(torch.arange(50)[None] % 3 + 1, 1)
    whole = decoder.prefill(h, positions, slots, decoder.make_kv_cache(1, ROOM), 50)
    kv = decoder.make_kv_cache(1, ROOM)
    decoder.prefill(h[:, :30], positions[:, :30] + 7, slots[:, :30], kv, 30)
    for at in range(30, 50):
        out = decoder.step(h[:, at], positions[:, at] + 7, kv)
        torch.testing.assert_close(out, whole[:, at], atol=2e-4, rtol=2e-4)
    assert (whole - decoder.prefill(h, slots, slots, decoder.make_kv_cache(1, ROOM), 50)).abs().max() > 0.01


@both
def test_a_trimmed_saved_or_copied_row_goes_on_as_it_would_have(kernels, tmp_path):
    decoder = open_decoder(tmp_path, kernels=kernels)
    h = embeddings(decoder, 3)
    expected = alone(decoder, h)[20:24]
    kv = decoder.make_kv_cache(4, ROOM)
    first = kv.slice_rows(0, 1)
    read(decoder, h[:, :20], first)
    read(decoder, embeddings(decoder, 4)[:, :9], first)
    kv.trim_row(0, 20)
    kv.copy_row(0, 2)
    kv.load_row(3, *kv.save_row(0, 20))
    assert kv.lengths.tolist() == [20, 0, 20, 20]
    for row in (0, 2, 3):
        out = read(decoder, h[:, 20:24], kv.slice_rows(row, row + 1))[0]
        torch.testing.assert_close(out, expected, atol=2e-4, rtol=2e-4)


def test_a_step_past_the_capacity_writes_nothing(tmp_path):
    decoder = open_decoder(tmp_path)
    kv, h = decoder.make_kv_cache(2, 4), embeddings(decoder, 0)
    read(decoder, h[:, :4], kv.slice_rows(0, 1))
    before = kv.whole.clone()
    decoder.step(h[0, :2], torch.tensor([4, 0]), kv, active=torch.tensor([1, 0]))
    assert torch.equal(kv.whole[:, :, 0], before[:, :, 0])


@both
def test_a_prompt_of_one_id_is_read(kernels, tmp_path):
    decoder = open_decoder(tmp_path, kernels=kernels)
    h, kv = embeddings(decoder, 0), decoder.make_kv_cache(1, ROOM)
    out = torch.cat([read(decoder, h[:, :1], kv), read(decoder, h[:, 1:2], kv)], dim=1)
    torch.testing.assert_close(out[0], alone(decoder, h)[:2], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_made_of_kernels_that_a_graph_can_hold(family, bits, rows):
    decoder = Decoder(random_folder(tiny_config(family), "cpu", torch.float32, bits, group=32))
    kv, h, ones = (
        decoder.make_kv_cache(rows, 80),
        torch.ones((rows, decoder.config.width)),
        torch.ones(rows, dtype=torch.int64),
    )
    with counting_launches() as found:
        decoder.step(h, ones, kv, active=ones)
    assert found.names == {
        "products.reference_matvec": 4 * 2,  # of two layers
        "attention.reference_rope_and_cache": 2,
        "attention.reference_decode_attention": 2
        * (2 if decoder.layers[0].window is None else 1),  # a short window is one part
        "products.reference_rms_norm": 1,
        "add": 1,
        "add_": 1,
    }


@both
def test_more_rows_than_a_product_takes_step_as_each_does_alone(kernels, tmp_path):
    decoder = open_decoder(tmp_path, kernels=kernels)
    kv, h = decoder.make_kv_cache(20, 4), embeddings(decoder, 0)[0, :20]
    at = torch.zeros(20, dtype=torch.int64)
    out = decoder.step(h, at, kv)
    expected = [alone(decoder, h[None, row : row + 1])[0] for row in range(20)]
    torch.testing.assert_close(out, torch.stack(expected), atol=2e-4, rtol=2e-4)
