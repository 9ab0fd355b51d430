"""The PyTorch decoder computes what MLX's does, for prompts read whole and in chunks and for steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.pairs import quick_pairs
from support.slow_cases import slow_but
from support.tiny import FAMILIES, LONGROPE, VOCAB
from support.torch_folders import LLAMA3, make_model, pack, random_ids, save

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")

from mlx_zip.cuda.kernels.packed import Packed, unpack  # noqa: E402
from mlx_zip.cuda.network.checkpoint import TensorFolder, read_tensor_folder  # noqa: E402
from mlx_zip.cuda.network.cpu_decoder import CpuDecoder  # noqa: E402
from mlx_zip.cuda.network.decoder import Decoder  # noqa: E402

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("llama", {"rope_scaling": LLAMA3}),
    "linear rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "yarn rope": ("llama", {"rope_scaling": YARN}),
    "yarn rope of all options": (
        "llama",
        {"rope_scaling": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "yarn rope of a given magnitude": ("llama", {"rope_scaling": {**YARN, "attention_factor": 1.3}}),
    "wide heads": ("llama", {"head_dim": 32}),
    "mistral window": ("mistral", {}),
    "phi3 plain rope": ("phi3", {"rope_scaling": None, "partial_rotary_factor": 0.5}),
    "phi3 short": ("phi3", {"original_max_position_embeddings": 128}),
    "phi3 switch": ("phi3", {}),
    "phi3 of a given magnitude": ("phi3", {"rope_scaling": {**LONGROPE, "attention_factor": 1.3}}),
    "phi3 window": ("phi3", {"sliding_window": 9, "original_max_position_embeddings": 128}),
    "qwen2": ("qwen2", {}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
}
IDS = random_ids(44)


class Reader:
    """One sequence in the PyTorch decoder: ids in, base logits out."""

    def __init__(self, folder: TensorFolder, capacity: int = 64) -> None:
        self.decoder = (Decoder if folder.kernels else CpuDecoder)(folder)
        self.table = dense(folder.tensors["model.embed_tokens.weight"]).to(folder.dtype)
        self.head = self.table if folder.decoder.tied else dense(folder.tensors["lm_head.weight"]).to(folder.dtype)
        self.kv, self.on_cpu = self.decoder.make_kv_cache(1, capacity), not folder.kernels
        self.log: list[int] = []

    def __call__(self, ids: Sequence[int]) -> np.ndarray:
        """Returns base logits [L, V] of the next ids; one id is a step."""
        begin, self.log = len(self.log), [*self.log, *ids]
        which = self.decoder.rope.frequency_set(len(self.log) - 1)
        if which != int(self.kv.frequency_set[0]):  # LongRoPE: the sequence is read again
            self.kv.trim_row(0, 0)
            self.kv.frequency_set[0] = which
            return self._read(0)[begin:]
        return self._step() if len(ids) == 1 else self._read(begin)

    def _read(self, begin: int) -> np.ndarray:
        at, end = torch.arange(begin, len(self.log))[None], len(self.log) if self.on_cpu else None
        h = self.table[torch.tensor(self.log[begin:])][None]
        return self._logits(self.decoder.prefill(h, at, at, self.kv, end)[0])

    def _step(self) -> np.ndarray:
        at = torch.tensor([len(self.log) - 1])
        return self._logits(self.decoder.step(self.table[self.log[-1:]], at, self.kv))

    def _logits(self, h: torch.Tensor) -> np.ndarray:
        return (h @ self.head.T)[:, :VOCAB].float().numpy()


def dense(weight: torch.Tensor | Packed) -> torch.Tensor:
    return unpack(weight, weight.scales.dtype) if isinstance(weight, Packed) else weight


def expected(model: Any, chunks: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns MLX's base logits [L, V] of ids that come in chunks."""
    cache = model.make_cache()
    found = [np.array(model(mx.array([list(chunk)]), cache=cache)[0, :, :VOCAB]) for chunk in chunks]
    return np.concatenate(found)


def whole(ids: Sequence[int]) -> list[Sequence[int]]:
    return [ids]


def in_chunks(ids: Sequence[int]) -> list[Sequence[int]]:
    return [ids[:7], ids[7:24], ids[24:]]


def then_steps(ids: Sequence[int]) -> list[Sequence[int]]:
    return [ids[:20], *([one] for one in ids[20:])]


WAYS = [whole, in_chunks, then_steps]


def check(model: Any, folder: Path, way: Callable[[Sequence[int]], list[Sequence[int]]], kernels: bool) -> None:
    reader = Reader(read_tensor_folder(folder, "cpu", kernels=kernels))
    found = np.concatenate([reader(chunk) for chunk in way(IDS)])
    np.testing.assert_allclose(found, expected(model, way(IDS)), atol=2e-4, rtol=2e-4)


CELLS = [(case, way, kernels) for case in CASES for way in WAYS for kernels in (False, True)]
QUICK = [(case, WAYS[(i + kernels) % 3], kernels) for i, case in enumerate(CASES) for kernels in (False, True)]


@pytest.mark.parametrize(("case", "way", "kernels"), slow_but(CELLS, *QUICK))
def test_a_decoder_agrees_with_mlx(case, way, kernels, tmp_path):
    family, changes = CASES[case]
    model = make_model(family, **changes)
    check(model, save(model, tmp_path / "model", shards=2), way, kernels)


@quick_pairs(
    {
        "kernels": {"cpu": False, "references": True},
        "bits": [4, 8],
        "family": [name for name in FAMILIES if not name.startswith("gemma")],
        "way": WAYS,
    }
)
def test_a_decoder_packed_by_mlx_agrees_with_mlx(kernels, bits, family, way, tmp_path):
    model = make_model(family, intermediate_size=96)
    own = {"layers.1.mlp.down_proj": False, "layers.0.self_attn.o_proj": {"bits": 8, "group_size": 32}}
    record = pack(model, bits, 32, own)
    check(model, save(model, tmp_path / "model", quantization=record), way, kernels)


@cache
def bundled(name: str) -> Any:
    """MLX's model, loaded once: what a sequence owns is in its cache."""
    from mlx_zip.models.loading import load

    return load(name)[0]


BUNDLED = [(name, way) for name in ("stories", "stories-base") for way in WAYS]


@pytest.mark.parametrize(("name", "way"), slow_but(BUNDLED, ("stories", then_steps), ("stories-base", in_chunks)))
def test_a_bundled_model_agrees_with_mlx(name, way):
    model = bundled(name)
    ids = random_ids(len(IDS), below=2048)
    reader = Reader(read_tensor_folder(name, "cpu"))
    found = np.concatenate([reader(chunk) for chunk in way(ids)])
    np.testing.assert_allclose(found, of_bundled(model, way(ids)), atol=2e-4, rtol=2e-4)


def of_bundled(model: Any, chunks: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns MLX's base logits [L, 40] of ids that come in chunks, from a model with or without hypertokens."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    found = [np.array(model(mx.array([list(chunk)]), cache=cache)[0, :, :VOCAB]) for chunk in chunks]
    return np.concatenate(found)


HALVES = [("bfloat16", True), ("float16", True), ("bfloat16", False)]


@pytest.mark.parametrize(("dtype", "kernels"), slow_but(HALVES, *HALVES[1:]), ids=str)
def test_a_bundled_model_in_half_the_precision_is_near_mlx_s_float32(dtype, kernels):
    ids = random_ids(len(IDS), below=2048)
    exact = of_bundled(bundled("stories"), then_steps(ids))
    reader = Reader(read_tensor_folder("stories", "cpu", dtype, kernels=kernels))
    found = np.concatenate([reader(chunk) for chunk in then_steps(ids)])
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert error < 1e-2
