"""The fingerprint of a model's folder, equal to the one that MLX computes of the loaded model.

Packs with tuned rows name their model by it (`mlx_zip.hyper.model_fingerprint`): each tensor's name, type and shape,
and a few of its values. It is computed from the files, so it does not depend on the dtype that this engine runs in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from mlx_zip.cuda.checkpoint import list_tensors

SAMPLES = 64  # as in mlx_zip.hyper.row_kinds
HEAD = "lm_head."
Fact = tuple[str, str, tuple[int, ...], str]  # name, MLX's name of the type, shape, values in hex


def folder_fingerprint(folder: Path, tied: bool) -> str:
    """Returns a sha256, as hex, of a folder's tensors. tied: whether the head is the embedding. Raises `ModelError`."""
    return fingerprint_of(fact for fact in _facts(folder) if not (tied and fact[0].startswith(HEAD)))


def fingerprint_of(facts: Iterable[Fact]) -> str:
    """Returns a sha256, as hex, of facts about tensors in any order."""
    return hashlib.sha256(json.dumps(sorted(facts)).encode()).hexdigest()


def _facts(folder: Path) -> Iterable[Fact]:
    """Yields the facts of every tensor that MLX would hold as a parameter. Only samples of the values are read."""
    names: dict[str, list[str]] = {}
    for name, entry in list_tensors(folder).items():
        if "rotary_emb.inv_freq" not in name:
            names.setdefault(entry.file, []).append(name)
    for file, inside in names.items():
        with safe_open(str(folder / file), framework="pt", device="cpu") as tensors:
            for name in inside:
                yield _fact(name, tensors.get_tensor(name))


def _fact(name: str, tensor: torch.Tensor) -> Fact:
    """Returns what a fingerprint covers of one tensor."""
    size = tensor.numel()
    at = np.linspace(0, size - 1, min(SAMPLES, size)).astype(np.int64)
    values = tensor.reshape(-1)[torch.from_numpy(at)].contiguous().view(torch.uint8).numpy()
    dtype = str(tensor.dtype).replace("torch.", "mlx.core.")
    return name, dtype, tuple(tensor.shape), values.tobytes().hex()
