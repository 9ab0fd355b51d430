"""The fingerprint of a whole model. A pack records it with its tuned rows, and is refused by any other model.

Tuned rows fit one decoder, not just one embedding or head, so the fingerprint covers every tensor: its name, type and
shape, and a few of its values (no tensor is hashed whole).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_zip.hyper.fingerprint import host_bytes
from mlx_zip.hyper.row_kinds import Place, places, sample_values, unchanged


def model_fingerprint(model: nn.Module) -> str:
    """Returns a sha256, as hex, of the model's tensors as they are now. Quantizing, adapting or casting changes it."""
    tensors: list[tuple[str, mx.array]] = sorted(tree_flatten(model.parameters()))  # type: ignore[arg-type]
    some = [sample_values(value) for _, value in tensors]
    mx.eval(some)
    facts = [
        [name, str(value.dtype), value.shape, bytes(host_bytes(values)).hex()]
        for (name, value), values in zip(tensors, some, strict=True)
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


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

    def of(self, model: nn.Module) -> str:
        """Returns the fingerprint of the model as it is now."""
        if not self._found or not unchanged(self._places):
            self._places, self._found = list(places(model)), model_fingerprint(model)
        return self._found
