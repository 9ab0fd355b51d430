"""Names for the rows that a model makes now, so that a row store never mixes rows of different weights.

A name covers the fingerprint in config.json, which the converter or the trainer wrote. Other tools quantize, fuse or
adapt a model without changing that fingerprint, and a program may change weights in memory. So a name also covers the
type, the quantization and a few values of every tensor that rows depend on (no tensor is hashed whole), and is made
anew when a tensor is replaced.
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
from mlx_zip.hyper.single import SingleEncoder, is_supported
from mlx_zip.hyper.store import RowKind

FORMAT = 1  # raise it when a change makes encoders compute other rows
SAMPLES = 64  # how many values of a tensor the name covers
_QUANTIZATION = ("bits", "group_size", "mode")

Place = tuple[Any, Any, Any]  # a container, a key in it, and the value that was there


@dataclass(frozen=True)
class _Known:
    """A kind of rows, the modules that it was made for, and their tensors at that time."""

    kind: RowKind
    encoder: nn.Module
    matrix: nn.Module
    places: list[Place]

    def is_current(self) -> bool:
        """Returns whether no tensor has been replaced since the kind was made."""
        return unchanged(self.places)


class RowKinds:
    """The kinds of a model's rows, one per side, and its encoders for single entries.

    recorded: the fingerprints in the model's config, by side. A side without one gets a random name, and its rows are
    not kept on disk. pad_id: the base id that pads entries of fewer than `merge_size` base ids.
    """

    def __init__(self, recorded: Any, merge_size: int, pad_id: int) -> None:
        self._recorded: Mapping[str, Any] = recorded if isinstance(recorded, Mapping) else {}
        self._merge_size, self._pad_id = merge_size, pad_id
        self._known: dict[str, _Known] = {}
        self._singles: dict[str, tuple[_Known, SingleEncoder | None]] = {}
        self._changed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> RowKinds:
        """Returns kinds for a copied model, which never equal the original's: the copy's weights may be changed."""
        twin = RowKinds(self._recorded, self._merge_size, self._pad_id)
        twin.forget()
        return twin

    def forget(self) -> None:
        """Makes both sides use new kinds, which no other model has. Call it when weights have changed."""
        self._known.clear()
        self._singles.clear()
        self._changed = True

    def kind(self, side: str, encoder: nn.Module, matrix: nn.Module) -> RowKind:
        """Returns the kind of the rows that `encoder` makes from rows of `matrix` now; side: "input" or "output"."""
        known = self._known.get(side)
        if known is not None and known.encoder is encoder and known.matrix is matrix and known.is_current():
            return known.kind
        if known is not None:  # a tensor was replaced, perhaps by one with equal samples
            self.forget()
        kind = self._make(side, encoder, matrix)
        self._known[side] = _Known(kind, encoder, matrix, [*places(encoder), *places(matrix)])
        return kind

    def single(self, side: str, encoder: nn.Module, matrix: nn.Module) -> SingleEncoder | None:
        """Returns the side's encoder for single entries, made from its weights of now; None if it cannot be made."""
        self.kind(side, encoder, matrix)
        known, made = self._known[side], self._singles.get(side)
        if made is None or made[0] is not known:
            supported = is_supported(encoder)
            single = SingleEncoder(encoder, matrix, self._merge_size, self._pad_id) if supported else None
            made = self._singles[side] = known, single
        return made[1]

    def _make(self, side: str, encoder: nn.Module, matrix: nn.Module) -> RowKind:
        """Returns a new kind; its rows may be kept on disk if the config has a fingerprint that still applies."""
        entry = np.zeros((1, self._merge_size), np.uint32)
        row = encode_entries(encoder, matrix, entry, np.array([self._merge_size]))  # for its shape and type
        recorded = self._recorded.get(side)
        durable = isinstance(recorded, str) and bool(recorded) and not self._changed
        facts = [
            FORMAT,
            side,
            recorded if durable else os.urandom(16).hex(),
            str(row.dtype),
            row.shape[-1],
            str(mx.default_device().type),
            _tensor_facts(encoder),
            _tensor_facts(matrix),
        ]
        digest = hashlib.sha256(json.dumps(facts).encode()).digest()
        return RowKind(RowSet(digest, self._merge_size, row.shape[-1] * row.dtype.size), row.dtype, durable)


def unchanged(places: Sequence[Place]) -> bool:
    """Returns whether every place still holds the same object. This is asked at every model call, so it is quick."""
    for node, key, value in places:  # noqa: SIM110 - twice as quick as all()
        if node[key] is not value:
            return False
    return True


def places(node: Any) -> Iterator[Place]:
    """Yields a `Place` for every array and every container (module, dict, list) inside a module."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        if isinstance(value, mx.array | dict | list):
            yield node, key, value
        if isinstance(value, dict | list):
            yield from places(value)


def _tensor_facts(module: nn.Module) -> list[Any]:
    """Returns what a name covers of a module: its tensors' names, types, shapes, sampled values and quantization."""
    found = list(places(module))
    tensors = [(key, value, sample_values(value)) for _, key, value in found if isinstance(value, mx.array)]
    mx.eval([some for _, _, some in tensors])
    modules = [module, *(value for _, _, value in found if isinstance(value, nn.Module))]
    return [
        [[str(key), str(value.dtype), value.shape, bytes(host_bytes(some)).hex()] for key, value, some in tensors],
        [[type(node).__name__, *(str(getattr(node, name, None)) for name in _QUANTIZATION)] for node in modules],
    ]


def sample_values(array: mx.array) -> mx.array:
    """Returns up to `SAMPLES` values of an array, evenly spaced."""
    flat = array.reshape(-1)
    return flat[mx.array(np.linspace(0, flat.size - 1, min(SAMPLES, flat.size)).astype(np.int64))]
