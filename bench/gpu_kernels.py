"""Times each kernel of mlx_zip's engine on PyTorch alone, at the sizes of a shape: the roofline's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from typing import Any

import torch

from mlx_zip.cuda.kernels.attention import decode_attention
from mlx_zip.cuda.kernels.embedding import hyper_embedding
from mlx_zip.cuda.kernels.encoder import entry_rows, pool, small_attention
from mlx_zip.cuda.kernels.head import joint_head
from mlx_zip.cuda.kernels.matvec import matvec
from mlx_zip.cuda.kernels.packed import Packed
from mlx_zip.cuda.launches import counted
from mlx_zip.cuda.random_folder import random_folder

from .device_clock import timed
from .shape_table import GROUP_SIZE

Work = Callable[[str | None], object]  # called with impl
SLOTS = 2048  # hyper rows
ENTRIES, PLACES = (1, 64), 3  # entries that are encoded at once, and base ids of each
PROMPT = 2048  # ids of the hyper embedding's call
CALLS = 20  # calls of a trial: one alone is too short for a clock


def cases(
    config: Mapping[str, Any], device: torch.device, dtype: torch.dtype, context: int, slots: int = SLOTS
) -> Iterator[tuple[str, Work]]:
    """Yields (name, work) of every kernel at the sizes of config.json; context: keys that a sequence has."""
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or width // heads
    make = {bits: random_folder(dict(config), device, dtype, bits, GROUP_SIZE) for bits in (None, 8, 4)}
    random = lambda *shape: torch.randn(shape, device=device).to(dtype)
    x, rows = random(1, width), random(1, slots, width)
    installed = torch.ones((1, slots), dtype=torch.bool, device=device)
    norm = (random(width), 1e-5)
    for bits, folder in make.items():
        matrix = folder.take("lm_head.weight", vocab, width)
        kind = f"{bits} bit" if isinstance(matrix, Packed) else "dense"
        yield f"joint head, {kind}", lambda impl, m=matrix: joint_head(x, m, rows, installed, vocab, impl=impl)
        gate_up = folder.take("gate_up.weight", 2 * inner, width)
        yield f"norm, gate and up, {kind}", lambda impl, m=gate_up: matvec(x, m, norm=norm, gate=True, impl=impl)
        down, wide = folder.take("down.weight", width, inner), random(1, inner)
        yield (
            f"down and residual, {kind}",
            lambda impl, m=down, y=wide: matvec(y, m, residual=x, impl=impl),
        )
    table = random(vocab, width)
    # each call reads other rows, because those of one call would stay in the cache of a large GPU
    ids = cycle([torch.randint(0, vocab + slots, (1, PROMPT), device=device) for _ in range(CALLS)])
    yield f"hyper embedding, {PROMPT} ids", lambda impl: hyper_embedding(next(ids), table, rows, vocab, impl=impl)
    keys, values = random(1, kv_heads, context + 64, size), random(1, kv_heads, context + 64, size)
    q, lengths = random(1, heads, size), torch.tensor([context], device=device)
    yield (
        f"attention over {context} keys",
        lambda impl: decode_attention(q, keys, values, lengths, impl=impl),
    )
    for count in ENTRIES:
        yield from encoder_cases(count, table, heads, random)


def encoder_cases(count: int, table: torch.Tensor, heads: int, random: Callable[..., torch.Tensor]) -> Iterator[Any]:
    """Yields (name, work) of the encoders' pieces for `count` entries."""
    device, width = table.device, table.shape[1]
    entries = torch.randint(0, len(table), (count, PLACES), device=device)
    lengths = torch.full((count,), PLACES, device=device)
    places, qkv, x = random(PLACES, width), random(count, PLACES, 3 * width), random(count, PLACES, width)
    yield f"encoder rows, {count} entries", lambda impl: entry_rows(entries, table, places, impl=impl)
    yield (
        f"encoder attention, {count} entries",
        lambda impl: small_attention(qkv, lengths, heads, "both", impl=impl),
    )
    yield f"encoder pooling, {count} entries", lambda impl: pool(x, lengths, "real", impl=impl)


def time_kernel(
    work: Work, device: torch.device, trials: int, bandwidth: float, reference: bool, calls: int = CALLS
) -> dict[str, Any]:
    """Returns a kernel's time per call, the bytes of a call, and the share of the read bandwidth that it reaches.

    The calls of a trial run one after the other, and each writes memory of its own. What they read may come from the
    device's cache if it fits there, as small pieces do: shares above 1 are possible. reference: the plain reference is
    timed too.
    """
    with counted() as found:
        work("reference")
    us = _us(lambda: work(None), device, trials, calls)
    rate = found.bytes / (us * 1e-6)
    other = _us(lambda: work("reference"), device, trials, calls) if reference else None
    return {
        "us": round(us, 3),
        "bytes": found.bytes,
        "gb_per_s": round(rate / 1e9, 2),
        "share_of_read": round(rate / bandwidth, 4),
        "reference_us": None if other is None else round(other, 3),
    }


def _us(work: Callable[[], object], device: torch.device, trials: int, calls: int) -> float:
    """Returns the median time of a call in microseconds."""

    def several(trial: int) -> None:
        _ = [work() for _ in range(calls)]  # a list, so that no result's memory is used again

    ms = timed(_captured(several, device), device, trials, 2).record()["device_ms"]["median"]
    return 1e3 * ms / calls


def _captured(work: Callable[[int], None], device: torch.device) -> Callable[[int], object]:
    """Returns the work as a CUDA graph, so that the time between launches does not count; on a CPU the work itself."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work(0)  # compiles and tunes
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(0)
    return lambda trial: graph.replay()
