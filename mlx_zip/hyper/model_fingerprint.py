"""The name of a whole model: what rows that were tuned for it are bound to.

Tuned rows are good for one decoder as it computes, not for a matrix alone, so every tensor counts: its name, type and
shape, and a few of its values (nothing is hashed whole).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_zip.hyper.fingerprint import host_bytes
from mlx_zip.hyper.row_kinds import Place, hold, places, sample


def model_fingerprint(model: nn.Module) -> str:
    """Hex digest over a model as it was loaded; quantized, adapted or cast it is another model."""
    tensors: list[tuple[str, mx.array]] = sorted(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    some = [sample(value) for _, value in tensors]
    mx.eval(some)
    facts = [
        [name, str(value.dtype), value.shape, bytes(host_bytes(values)).hex()]
        for (name, value), values in zip(tensors, some, strict=True)
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class ModelName:
    """A model's fingerprint, made when it is first asked for, and again when a tensor was exchanged for another."""

    def __init__(self) -> None:
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelName:
        return ModelName()  # a copied model's weights are its own

    def forget(self) -> None:
        """The weights have changed."""
        self._places: list[Place] = []
        self._found = ""

    def of(self, model: nn.Module) -> str:
        """The fingerprint."""
        if not self._found or not hold(self._places):
            self._places, self._found = list(places(model)), model_fingerprint(model)
        return self._found
