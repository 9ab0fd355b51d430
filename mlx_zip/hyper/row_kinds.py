"""Names for the rows that a model makes now: the fingerprint in its config, and a few values of its weights.

The fingerprint in config.json was written by the converter or the trainer. Other tools quantize, fuse or adapt a model
without changing it, and a program may change weights in memory. So a name also covers the type, the quantization and a
few values of every tensor that rows depend on (nothing is hashed whole), and is made anew when a tensor is replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_zip.hyper.fingerprint import host_bytes
from mlx_zip.hyper.row_files import RowSet
from mlx_zip.hyper.rows import encode_entries
from mlx_zip.hyper.store import RowKind

FORMAT = 1  # to be raised when encoders compute rows in another way
SAMPLES = 64  # values of a tensor that its name covers
_QUANTIZATION = ("bits", "group_size", "mode")

Place = tuple[Any, Any, Any]  # a container, a key in it, and the value that was there


@dataclass(frozen=True)
class _Known:
    """A kind, and the modules that it was made for."""

    kind: RowKind
    encoder: nn.Module
    matrix: nn.Module
    places: list[Place]

    def holds(self) -> bool:
        """Whether no tensor has been replaced since."""
        return hold(self.places)


class RowKinds:
    """The kinds of a model's rows, by side. recorded: the fingerprints in its config; without them none is durable."""

    def __init__(self, recorded: Any, merge_size: int) -> None:
        self._recorded: Mapping[str, Any] = recorded if isinstance(recorded, Mapping) else {}
        self._merge_size = merge_size
        self._known: dict[str, _Known] = {}
        self._changed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> RowKinds:
        """Kinds of a copied model, never those of the original: its weights may change before they are read."""
        twin = RowKinds(self._recorded, self._merge_size)
        twin.forget()
        return twin

    def forget(self) -> None:
        """Gives both sides new kinds, which only this model has, because its weights have changed."""
        self._known.clear()
        self._changed = True

    def kind(self, side: str, encoder: nn.Module, matrix: nn.Module) -> RowKind:
        """The kind of rows that `encoder` makes of rows of `matrix`; side: "input" or "output"."""
        known = self._known.get(side)
        if known is not None and known.encoder is encoder and known.matrix is matrix and known.holds():
            return known.kind
        if known is not None:  # a tensor was replaced, perhaps by one with equal samples
            self.forget()
        kind = self._make(side, encoder, matrix)
        self._known[side] = _Known(kind, encoder, matrix, [*places(encoder), *places(matrix)])
        return kind

    def _make(self, side: str, encoder: nn.Module, matrix: nn.Module) -> RowKind:
        some = np.zeros((1, self._merge_size), np.uint32)
        row = encode_entries(
            encoder, matrix, some, np.array([self._merge_size])
        )  # for its shape and type: never evaluated
        recorded = self._recorded.get(side)
        durable = isinstance(recorded, str) and bool(recorded) and not self._changed
        facts = [
            FORMAT,
            side,
            recorded if durable else os.urandom(16).hex(),
            str(row.dtype),
            row.shape[-1],
            str(mx.default_device().type),
            _facts(encoder),
            _facts(matrix),
        ]
        digest = hashlib.sha256(json.dumps(facts).encode()).digest()
        return RowKind(RowSet(digest, self._merge_size, row.shape[-1] * row.dtype.size), row.dtype, durable)


def hold(places: Sequence[Place]) -> bool:
    """Whether every place still holds the same value. Asked at every call, so it must be quick."""
    for node, key, value in places:  # noqa: SIM110 - twice as quick as all()
        if node[key] is not value:
            return False
    return True


def places(node: Any) -> Iterator[Place]:
    """Every array and module below a module, with its place."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        if isinstance(value, mx.array | dict | list):
            yield node, key, value
        if isinstance(value, dict | list):
            yield from places(value)


def _facts(module: nn.Module) -> list[Any]:
    """Names, types, shapes and sampled values of a module's tensors, and their quantization."""
    found = list(places(module))
    tensors = [(key, value, sample(value)) for _, key, value in found if isinstance(value, mx.array)]
    mx.eval([sample for _, _, sample in tensors])
    modules = [module, *(value for _, _, value in found if isinstance(value, nn.Module))]
    return [
        [[str(key), str(value.dtype), value.shape, bytes(host_bytes(some)).hex()] for key, value, some in tensors],
        [[type(node).__name__, *(str(getattr(node, name, None)) for name in _QUANTIZATION)] for node in modules],
    ]


def sample(array: mx.array) -> mx.array:
    """Up to `SAMPLES` values, evenly spaced over the tensor."""
    flat = array.reshape(-1)
    return flat[mx.array(np.linspace(0, flat.size - 1, min(SAMPLES, flat.size)).astype(np.int64))]
