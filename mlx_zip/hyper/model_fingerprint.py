"""The fingerprint of a whole model. A pack records it with its tuned rows, and is refused by any other model.

Tuned rows fit one decoder, not just one embedding or head, so the fingerprint covers every tensor: its name, type and
shape, and a few of its values (no tensor is hashed whole).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_zip.hyper.fingerprint import host_bytes
from mlx_zip.hyper.row_kinds import Place, places, sample_values, unchanged


class Sampled(NamedTuple):
    """What a fingerprint covers of one tensor: its name, type, shape and a few values, which are lazy at first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: mx.array


def sampled(model: nn.Module) -> list[Sampled]:
    """Returns what a fingerprint covers of each tensor of the model, sorted by name; nothing is read yet."""
    tensors: list[tuple[str, mx.array]] = sorted(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    return [Sampled(name, str(value.dtype), value.shape, sample_values(value)) for name, value in tensors]


def fingerprint_of(tensors: Sequence[Sampled]) -> str:
    """Returns a sha256, as hex, of what `sampled` returned."""
    mx.eval([one.values for one in tensors])
    facts = [[one.name, one.dtype, one.shape, bytes(host_bytes(one.values)).hex()] for one in tensors]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def model_fingerprint(model: nn.Module) -> str:
    """Returns a sha256, as hex, of the model's tensors as they are now. Quantizing, adapting or casting changes it."""
    return fingerprint_of(sampled(model))


def name_of(model: nn.Module) -> str:
    """Returns the fingerprint of any loaded model: its own if it keeps one, else `model_fingerprint`."""
    own: str | None = getattr(model, "fingerprint", None)
    return model_fingerprint(model) if own is None else own


class ModelName:
    """Keeps a model's fingerprint: computed when first asked for, and again after a tensor was replaced."""

    def __init__(self) -> None:
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelName:
        return ModelName()  # a copy of the model has weights of its own

    def forget(self) -> None:
        """Forgets the fingerprint. Call it when weights have changed in place."""
        self._places: list[Place] = []
        self._found = ""

    def keep(self, model: nn.Module, found: str) -> None:
        """Keeps a fingerprint that was computed elsewhere, until one of the model's tensors is replaced."""
        self._places, self._found = list(places(model)), found

    def of(self, model: nn.Module) -> str:
        """Returns the fingerprint of the model as it is now."""
        if not self._found or not unchanged(self._places):
            self.keep(model, model_fingerprint(model))
        return self._found
