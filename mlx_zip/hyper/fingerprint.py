"""Fingerprints of a model's input side and output side: equal fingerprints mean equal rows for equal entries.

They are computed while the tensors are written to a file, so that loading a model hashes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.config import SIDES, ZipConfig

_EMBEDDING, _HEAD = "model.embed_tokens.", "lm_head."


class Fingerprints:
    """Collects digests of the tensors that rows depend on: the encoders, the embedding and the head."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    def add(self, name: str, array: mx.array, data: memoryview) -> None:
        """Adds a tensor that is being written, if rows depend on it. data: the tensor's bytes in the file."""
        if name.startswith((*SIDES, _EMBEDDING, _HEAD)):
            head = f"{array.dtype} {list(array.shape)} "
            self.digests[name] = hashlib.sha256(head.encode() + hashlib.sha256(data).digest()).hexdigest()

    def sides(self, config: ZipConfig, quantization: Mapping[str, Any]) -> dict[str, str]:
        """Returns the fingerprints of the tensors added so far, {"input": hex, "output": hex}, each a sha256.

        Each covers the side, the tensors of its encoder and matrix, their quantization, encoder options, merge size and
        pad id. quantization: config.json's section of that name, empty for none.
        """
        tied_encoders = config.encoder.tie_encoders
        tied_matrices = not any(name.startswith(_HEAD) for name in self.digests)
        places = {
            "input": (SIDES[0], _EMBEDDING),
            "output": (SIDES[0 if tied_encoders else 1], _EMBEDDING if tied_matrices else _HEAD),
        }
        return {side: self._side_fingerprint(side, places[side], config, quantization) for side in places}

    def _side_fingerprint(
        self, side: str, prefixes: tuple[str, str], config: ZipConfig, quantization: Mapping[str, Any]
    ) -> str:
        """Returns one side's fingerprint; prefixes: how the names of its encoder's and its matrix's tensors begin."""

        def under(names: Iterable[str]) -> list[str]:
            return sorted(name for name in names if f"{name}.".startswith(prefixes))

        facts = {
            "side": side,
            "tensors": [[_side_name(n, prefixes), self.digests[n]] for n in under(self.digests)],
            "quantization": [[_side_name(n, prefixes), quantization[n]] for n in under(quantization)],
            "quantization_default": {k: v for k, v in quantization.items() if not isinstance(v, dict)},
            "encoder": [config.encoder.kind, config.encoder.to_dict()],
            "merge_size": config.merge_size,
            "pad_id": config.pad_id,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _side_name(name: str, prefixes: tuple[str, str]) -> str:
    """Returns a tensor's name as encoder.x or matrix.x, so that both sides use the same names."""
    encoder, matrix = prefixes
    dotted = f"{name}."
    if dotted.startswith(encoder):
        return f"encoder.{dotted.removeprefix(encoder)}"
    return f"matrix.{dotted.removeprefix(matrix)}"


def host_bytes(array: mx.array) -> memoryview:
    """Returns the array's bytes in row order, little endian."""
    if array.dtype == mx.bfloat16:  # numpy has no such type
        array = array.view(mx.uint16)
    host = np.ascontiguousarray(np.array(array, copy=False))
    return host.reshape(-1).view(np.uint8).data
