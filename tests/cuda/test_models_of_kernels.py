"""Whole models of Triton kernels compute what the plain references compute.

On a machine with a CUDA card the kernels run there, steps in CUDA graphs, and the references on the CPU; elsewhere the
kernels run in Triton's interpreter. These tests need neither MLX nor files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlx_zip.bench.engines.cuda_engines import generate_greedily  # noqa: E402
from mlx_zip.bench.engines.random_folder import RandomFolder, random_folder  # noqa: E402
from mlx_zip.cuda.batch import Batch  # noqa: E402
from mlx_zip.cuda.graphs import CudaGraphs  # noqa: E402
from mlx_zip.cuda.kernels.dispatch import force_implementation  # noqa: E402
from mlx_zip.cuda.model import CudaModel  # noqa: E402
from mlx_zip.cuda.network.decoder import Decoder, KVCache  # noqa: E402
from mlx_zip.cuda.network.decoder_config import LONG  # noqa: E402
from support.slow_cases import slow_but  # noqa: E402

ON_GPU = torch.cuda.is_available()
pytestmark = [] if ON_GPU else pytest.mark.usefixtures("few_programs")
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
LAYERS, WIDTH, INNER, HEAD = (2, 256, 512, 64) if ON_GPU else (1, 32, 32, 8)  # the interpreter is slow
VOCAB, ROWS, SLOTS = (300, 310, 40) if ON_GPU else (40, 44, 6)
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + 0.01 * i for i in range(HEAD // 2)],
    "long_factor": [1.0 + 2.0 * i for i in range(HEAD // 2)],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "head_dim": HEAD},
    "mistral": {"num_key_value_heads": 1, "head_dim": HEAD, "sliding_window": 7, "attention_bias": True},
    "phi3": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 4096},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": HEAD, "tie_word_embeddings": True},
}

CASES = [("llama", 4), ("mistral", 8), ("phi3", None), ("qwen2", None), ("qwen3", 8)]
if ON_GPU:
    CASES = [(family, bits) for family in FAMILIES for bits in (None, 4, 8)]


def config_of(family: str) -> dict[str, Any]:
    """Returns config.json of a small converted model."""
    encoder = {"hidden_size": WIDTH, "num_heads": 4, "num_hidden_layers": 1, "position_encoding": "learnable"}
    codec = {"initial_vocab_size": VOCAB, "max_codebook_size": SLOTS, "max_subtokens": 3, "disabled_ids": [0]}
    section = {"base_model_type": family, "encoder_type": "transformer", "encoder": encoder, "compression": codec}
    return {
        "model_type": "zip2zip",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": WIDTH // HEAD,
        "vocab_size": ROWS,
        "max_position_embeddings": 8192,
        **FAMILIES[family],
        "zip2zip": {**section, "pad_token_id": 0},
    }


def folder_of(family: str, device: str | torch.device, bits: int | None, dtype: torch.dtype) -> RandomFolder:
    """Returns random weights, the same on every device."""
    return random_folder(config_of(family), device, dtype, bits, group=32, made_on="cpu")


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Runs kernels on the device; on a card they are the default."""
    with nullcontext() if ON_GPU else force_implementation("triton"):
        yield


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    assert found.isfinite().all()
    return float((found.double().cpu() - exact.double()).norm() / exact.double().norm())


# ---- the decoder


def outputs(decoder: Decoder, device: torch.device, graph: bool) -> torch.Tensor:
    """Returns outputs [2, 9, D]: two sequences that are read in two calls, and then take three steps together."""
    kv, width = decoder.make_kv_cache(2, 80), decoder.config.width
    h = torch.randn((2, 9, width), generator=torch.Generator().manual_seed(1)).to(device, decoder.dtype)
    if decoder.rope.long_from is not None:
        kv.frequency_set[1] = LONG
    found = []
    for row, begin, end in ((0, 0, 6), (1, 0, 2), (1, 2, 6)):
        at = torch.arange(begin, end, device=device)[None]
        found.append(decoder.prefill(h[row : row + 1, begin:end], at, at, kv.slice_rows(row, row + 1))[0])
    read = torch.cat(found).view(2, 6, width)
    x, at = (
        torch.empty((2, width), device=device, dtype=decoder.dtype),
        torch.empty(2, device=device, dtype=torch.int64),
    )
    step, stepped = (Replayed(decoder, x, at, kv) if graph else lambda: decoder.step(x, at, kv)), []
    for i in range(6, 9):
        x.copy_(h[:, i])
        at.fill_(i)
        stepped.append(step().clone())
    return torch.cat([read, torch.stack(stepped, dim=1)], dim=1)


class Replayed:
    """A decoder's step, captured in a CUDA graph at the first call and then replayed."""

    def __init__(self, decoder: Decoder, x: torch.Tensor, at: torch.Tensor, kv: KVCache) -> None:
        self.work, self.graphs, self.kv = (lambda: decoder.step(x, at, kv)), CudaGraphs(DEVICE), kv

    def __call__(self) -> torch.Tensor:
        return self.graphs.run("step", self.work, (self.kv.lengths,))


@pytest.mark.parametrize(("family", "bits"), slow_but(CASES, ("mistral", 8)))
def test_a_decoder_of_kernels_computes_what_references_do(family, bits):
    with force_implementation("reference"):
        wanted = outputs(Decoder(folder_of(family, "cpu", bits, torch.float32)), torch.device("cpu"), graph=False)
    found = outputs(Decoder(folder_of(family, DEVICE, bits, torch.float32)), DEVICE, graph=True)
    assert relative(found, wanted) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "dtype"), [(None, torch.bfloat16), (4, torch.bfloat16), (8, torch.float16)])
def test_a_decoder_of_kernels_in_half_the_precision_is_near_the_references(bits, dtype):
    with force_implementation("reference"):
        wanted = outputs(Decoder(folder_of("qwen3", "cpu", bits, dtype)), torch.device("cpu"), graph=False)
    found = outputs(Decoder(folder_of("qwen3", DEVICE, bits, dtype)), DEVICE, graph=True)
    assert relative(found, wanted) < (2e-2 if dtype == torch.bfloat16 else 3e-3)


# ---- the whole model


def emitted(family: str, device: str | torch.device, bits: int | None, count: int) -> list[int]:
    """Returns the ids that a model writes after a prompt with repeats."""
    folder = folder_of(family, device, bits, torch.float32)
    model = CudaModel(folder, folder.zip)
    prompt = [7, 8, 9, 7, 8, 9, 7, 8, 9, 20, 21, 7, 8, 20, 21]
    return [one for one, _ in generate_greedily(model, prompt, count)]


@pytest.mark.parametrize(("family", "bits"), slow_but([("llama", None), ("qwen3", 4), ("phi3", 8)], ("llama", None)))
def test_a_model_of_kernels_writes_the_ids_that_references_write(family, bits):
    count = 60 if ON_GPU else 3
    with force_implementation("reference"):
        wanted = emitted(family, "cpu", bits, count)
    assert emitted(family, DEVICE, bits, count) == wanted


@pytest.mark.slow
def test_several_sequences_on_kernels_write_what_each_writes_alone():
    folder = folder_of("llama", DEVICE, None, torch.float32)
    model, prompts, steps = CudaModel(folder, folder.zip), [[7, 8, 9, 7, 8, 9], [30, 31]], 20 if ON_GPU else 2

    def written(rows: list[list[int]]) -> list[list[int]]:
        batch = Batch(model, 4, 64)
        for prompt in rows:
            batch.read(batch.add(), prompt)
        found = []
        for _ in range(steps):
            batch.choose_ids()
            batch.start_body()
            found.append(batch.wait_for_ids())
            assert not batch.update_codebooks(found[-1])
        return [list(one) for one in zip(*found, strict=True)]

    assert written(prompts) == [written([prompt])[0] for prompt in prompts]
