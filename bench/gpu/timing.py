"""Times mlx_zip's engine on PyTorch: each kernel alone, at the sizes of a shape, and prefill and single steps.

Next to the kernels, controls are timed: PyTorch's own products of equal sizes, a copy, and a sum. Steps are timed at a
fixed context, without the rest of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, cycle
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.functional import linear

from mlx_zip.bench.engines.cuda_engines import ReplayedSteps, TorchEngine, installed_row_bytes, prefill_in_chunks
from mlx_zip.bench.engines.device_clock import DeviceClock, time_calls_on_device, wait_for_device
from mlx_zip.bench.engines.interface import compress_prompt_and_text
from mlx_zip.bench.engines.random_folder import random_folder
from mlx_zip.bench.engines.shape_table import GROUP_SIZE
from mlx_zip.codec import compress_next
from mlx_zip.codec.ids import as_ids
from mlx_zip.cuda.devices import tensor_bytes
from mlx_zip.cuda.kernels.attention import decode_attention
from mlx_zip.cuda.kernels.head import joint_head
from mlx_zip.cuda.kernels.hyper_rows import attend_in_entries, embed_entries, hyper_embedding, pool_places
from mlx_zip.cuda.kernels.packed import Packed
from mlx_zip.cuda.kernels.products import matvec

Work = Callable[[str | None], object]  # takes the kernel's argument `impl`
Made = TypeVar("Made")
SLOTS = 2048  # hyper rows
ENTRIES, PLACES = (1, 64), 3  # numbers of entries encoded at once; base ids per entry
PROMPT = 2048  # ids per call of the hyper embedding
CALLS = 20  # calls per trial: a single call is too short to time
TIMES_CACHE = 3  # the arguments that calls rotate through are at least this many times as large as the GPU's cache
TILES = 8  # layout parameter of PyTorch's 4-bit product; it hardly changes the speed on large matrices


class KernelCase(NamedTuple):
    """A kernel to time. work: calls the kernel. read: bytes that a call reads; it also writes its result.

    sets: number of argument sets, used in turn, so that none is cached.
    """

    name: str
    work: Work
    read: int
    sets: int = 1


def largest_cache_bytes(device: torch.device) -> int:
    """Returns the bytes of a GPU's L2 cache; 0 on a CPU, where timings are only rehearsals."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def make_rotating_arguments(make: Callable[[], Made], cache: int) -> list[Made]:
    made = [make()]
    while tensor_bytes(made) <= TIMES_CACHE * cache:
        made.append(make())
    return made


def kernel_cases(
    config: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    context: int,
    slots: int = SLOTS,
    cache: int | None = None,
) -> Iterator[KernelCase]:
    """Yields every kernel at the sizes of config.json, and the controls.

    context: keys per sequence. slots: number of hyper rows. cache: bytes of the GPU's cache; None asks the device.
    """
    cache = largest_cache_bytes(device) if cache is None else cache
    random = lambda *shape: torch.randn(shape, device=device).to(dtype)
    for bits in (None, 8, 4):
        yield from product_cases(config, device, dtype, bits, slots, cache, random)
    width, vocab = config["hidden_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or width // heads
    table, rows = random(vocab, width), random(1, slots, width)
    # each call reads different rows, because the rows of one call would stay in the cache of a large GPU
    drawn = [torch.randint(0, vocab + slots, (1, PROMPT), device=device) for _ in range(CALLS)]
    ids = cycle(drawn)
    yield KernelCase(
        f"hyper embedding, {PROMPT} ids",
        lambda impl: hyper_embedding(next(ids), table, rows, vocab, impl=impl),
        tensor_bytes(drawn[0]) + PROMPT * row_bytes(table),
    )
    both = make_rotating_arguments(
        lambda: (random(1, kv_heads, context + 64, size), random(1, kv_heads, context + 64, size)), cache
    )
    q, lengths, turns = random(1, heads, size), torch.tensor([context], device=device), cycle(both)
    yield KernelCase(
        f"attention over {context} keys",
        lambda impl: decode_attention(q, *next(turns), lengths, impl=impl),
        tensor_bytes(q) + 2 * context * kv_heads * row_bytes(both[0][0][0, 0]),
        len(both),
    )
    for entries in ENTRIES:
        yield from encoder_cases(entries, table, heads, random)


def product_cases(
    config: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    bits: int | None,
    slots: int,
    cache: int,
    random: Callable[..., torch.Tensor],
) -> Iterator[KernelCase]:
    """Yields the products with matrices of `bits` bits (None: dense), each followed by its controls."""
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    folder, numbers = random_folder(dict(config), device, dtype, bits, GROUP_SIZE), count()
    x, wide, rows, norm = random(1, width), random(1, inner), random(1, slots, width), (random(width), 1e-5)
    installed = torch.ones((1, slots), dtype=torch.bool, device=device)
    # name: rows and columns of the matrix, call, what it reads besides the matrix
    pieces: dict[str, tuple[int, int, Callable[[Any, str | None], object], list[Any]]] = {
        "joint head": (
            *(vocab, width, lambda m, impl: joint_head(x, m, rows, installed, vocab, impl=impl)),
            [x, rows, installed],
        ),
        "norm, gate and up": (
            *(2 * inner, width, lambda m, impl: matvec(x, m, norm=norm, gate=True, impl=impl)),
            [x, norm[0]],
        ),
        "down and residual": (width, inner, lambda m, impl: matvec(wide, m, residual=x, impl=impl), [wide, x]),
    }
    for name, (height, columns, call, others) in pieces.items():
        take = lambda h=height, c=columns: folder.take_weight(f"{next(numbers)}.weight", h, c)
        made = make_rotating_arguments(take, cache)
        kind = f"{bits} bit" if isinstance(made[0], Packed) else "dense"
        turns: Iterator[Any] = cycle(made)
        read = tensor_bytes([made[0], others])
        yield KernelCase(f"{name}, {kind}", lambda impl, c=call, t=turns: c(next(t), impl), read, len(made))
        vector = x if columns == width else wide
        if not isinstance(made[0], Packed):
            plain = lambda impl, v=vector, t=turns: linear(v, next(t))
            read = tensor_bytes([made[0], vector])
            yield KernelCase(f"control, torch linear of {name}", plain, read, len(made))
        elif bits == 4 and has_torch_int4_product(device):
            packed = make_rotating_arguments(lambda h=height, c=columns: random_torch_int4_matrix(h, c, device), cache)
            fours = cycle(packed)
            theirs = lambda impl, v=vector, t=fours: torch_int4_product(v, *next(t))
            read = tensor_bytes([packed[0], vector])
            yield KernelCase(f"control, torch int4 product of {name}", theirs, read, len(packed))


def has_torch_int4_product(device: torch.device) -> bool:
    known = all(hasattr(torch.ops.aten, name) for name in ("_weight_int4pack_mm", "_convert_weight_to_int4pack"))
    built = torch.version.cuda is not None and device.type == "cuda"
    return known and built and torch.cuda.get_device_capability(device) >= (8, 0)


def random_torch_int4_matrix(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a random matrix [rows, columns] in PyTorch's 4-bit packing, and its bfloat16 scales and zeros."""
    pairs = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    scales = torch.rand((columns // GROUP_SIZE, rows, 2), device=device).to(torch.bfloat16)
    return torch.ops.aten._convert_weight_to_int4pack(pairs, TILES), scales


def torch_int4_product(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._weight_int4pack_mm(x, packed, GROUP_SIZE, scales)


def memory_control_cases(device: torch.device, side: int) -> Iterator[KernelCase]:
    """Yields a copy and a sum of a float32 matrix [side, side]: memory accesses unlike the yardstick's product."""
    source = torch.rand((side, side), device=device)
    target = torch.empty_like(source)
    yield KernelCase("control, copy", lambda impl: target.copy_(source), tensor_bytes(source))
    yield KernelCase("control, sum", lambda impl: source.sum(), tensor_bytes(source))


def encoder_cases(
    entries: int, table: torch.Tensor, heads: int, random: Callable[..., torch.Tensor]
) -> Iterator[KernelCase]:
    """Yields the encoders' kernels for a batch of `entries` entries.

    Each call of the first kernel gathers different rows. The others read cached input, as after a preceding kernel.
    """
    device, width = table.device, table.shape[1]
    drawn = [torch.randint(0, len(table), (entries, PLACES), device=device) for _ in range(CALLS)]
    ids = cycle(drawn)
    lengths = torch.full((entries,), PLACES, device=device)
    places, qkv, x = random(PLACES, width), random(entries, PLACES, 3 * width), random(entries, PLACES, width)
    yield KernelCase(
        f"encoder rows, {entries} entries",
        lambda impl: embed_entries(next(ids), table, places, impl=impl),
        tensor_bytes([drawn[0], places]) + drawn[0].numel() * row_bytes(table),
    )
    yield KernelCase(
        f"encoder attention, {entries} entries",
        lambda impl: attend_in_entries(qkv, lengths, heads, "both", impl=impl),
        tensor_bytes([qkv, lengths]),
    )
    yield KernelCase(
        f"encoder pooling, {entries} entries",
        lambda impl: pool_places(x, lengths, "real", impl=impl),
        tensor_bytes([x, lengths]),
    )


def row_bytes(matrix: torch.Tensor) -> int:
    return matrix.shape[1] * matrix.element_size()


def time_kernel(
    case: KernelCase, device: torch.device, trials: int, bandwidth: float, reference: bool, calls: int = CALLS
) -> dict[str, Any]:
    """Returns a kernel's time per call, bytes per call, and the share of the read bandwidth that it reaches.

    The calls of a trial run one after the other, each with its own output memory. Small kernels read from the device's
    cache, so their share may exceed 1. reference: time the plain reference too. calls: calls per trial, at least; as
    many as the case's argument sets if these are more.
    """
    work, calls = case.work, max(calls, case.sets)
    moved = case.read + tensor_bytes(work("reference"))
    us = time_call_us(lambda: work(None), device, trials, calls)
    rate = moved / (us * 1e-6)
    other = time_call_us(lambda: work("reference"), device, trials, calls) if reference else None
    return {
        "us": round(us, 3),
        "bytes": moved,
        "sets": case.sets,
        "calls": calls,
        "gb_per_s": round(rate / 1e9, 2),
        "share_of_read": round(rate / bandwidth, 4),
        "reference_us": None if other is None else round(other, 3),
    }


def time_call_us(work: Callable[[], object], device: torch.device, trials: int, calls: int) -> float:
    def several(trial: int) -> None:
        _ = [work() for _ in range(calls)]  # a list, so that no result's memory is reused

    ms = time_calls_on_device(capture_cuda_graph(several, device), device, trials, 2).record()["device_ms"]["median"]
    return 1e3 * ms / calls


def capture_cuda_graph(work: Callable[[int], None], device: torch.device) -> Callable[[int], object]:
    """Returns the work as a CUDA graph, which hides the gaps between launches; on a CPU, the work itself."""
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


# ---- prefill and steps


def time_steps(
    engine: TorchEngine, text: Sequence[int], context: int, tokens: int, trials: int, rows: str
) -> dict[str, Any]:
    """Returns times of prefill (per trial) and of steps in ms, with all samples, and the bytes that a step reads.

    text: base ids, of which a trial reads `context` and writes `tokens` more. The first trial is a warm-up. rows:
    "warm" keeps the rows of earlier trials, "cold" drops them.
    """
    prompt, continuation = text[:context], text[context : context + tokens]
    for trial in range(-1, trials):
        if rows == "cold":
            engine.forget_encoded_rows()
        if trial <= 0:  # the clocks of the warm-up are dropped
            prefill, steps = DeviceClock(engine.model.device), DeviceClock(engine.model.device)
        prompt_ids, sizes = time_one_trial(engine, prompt, continuation, prefill, steps)
    return {
        "prefill": {"ids": prompt_ids, **prefill.record()},
        "step": {"tokens_per_step": tokens * trials / len(steps.host_ms), **steps.record()},
        "bytes": sizes,
    }


def time_one_trial(
    engine: TorchEngine,
    prompt: Sequence[int],
    continuation: Sequence[int],
    prefill: DeviceClock,
    steps: DeviceClock,
) -> tuple[int, dict[str, int]]:
    """Adds the times of a prefill and of its steps to the clocks.

    Returns the number of the prompt's ids, and the bytes that an average step reads: weights, kv, rows.
    """
    batch, device = engine.ready(len(prompt) + len(continuation) + 1), engine.model.device
    forced = compress_prompt_and_text(batch.book(0), prompt, continuation)[1]
    ids = compress_next(batch.book(0), as_ids(prompt))
    wait_for_device(device)
    prefill.lap()
    prefill_in_chunks(batch, 0, ids)
    wait_for_device(device)
    prefill.lap()
    steps.lap()
    for _ in ReplayedSteps(batch, len(continuation), forced):
        steps.lap()
    prefill.stop()
    steps.stop()
    kv = round(engine.kv_bytes * (len(ids) + len(forced) / 2))
    return len(ids), {"weights": engine.weight_bytes, "kv": kv, "rows": installed_row_bytes(batch)}
