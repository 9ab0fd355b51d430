"""Fingerprints of weights: of the two sides that make hyper rows, input and output, and of a whole model.

A side's fingerprint is computed while its tensors are written to a file (`SideFingerprints`), so that loading a model
hashes nothing. Sides with equal fingerprints make equal rows of equal entries. A pack with tuned rows records the
fingerprint of a whole model, and any other model refuses the pack: tuned rows fit one decoder, not just one embedding
or head. So a model's fingerprint covers every tensor: its name, type and shape, and a few of its values (no tensor is
hashed whole).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_zip.config import SIDES, ZipConfig
from mlx_zip.packs.tuned import fingerprint_tensors, sampled_places

_EMBEDDING, _HEAD = "model.embed_tokens.", "lm_head."


class SideFingerprints:
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

        Each covers the side's name, the tensors of its encoder and matrix, the tensors' quantization, the encoder's
        options, merge size and pad id. quantization: config.json's section of that name, empty if there is none.
        """
        tied_matrices = not any(name.startswith(_HEAD) for name in self.digests)
        prefixes = {
            "input": (SIDES[0], _EMBEDDING),
            "output": (config.encoder.prefix_of(SIDES[1]), _EMBEDDING if tied_matrices else _HEAD),
        }
        return {side: self._side_fingerprint(side, prefixes[side], config, quantization) for side in prefixes}

    def _side_fingerprint(
        self, side: str, prefixes: tuple[str, str], config: ZipConfig, quantization: Mapping[str, Any]
    ) -> str:
        """Returns one side's fingerprint. prefixes: how the tensor names of its encoder and of its matrix begin."""

        def under(names: Iterable[str]) -> list[str]:
            return sorted(name for name in names if f"{name}.".startswith(prefixes))

        facts = {
            "side": side,
            "tensors": [[_name_within_side(n, prefixes), self.digests[n]] for n in under(self.digests)],
            "quantization": [[_name_within_side(n, prefixes), quantization[n]] for n in under(quantization)],
            "quantization_default": {k: v for k, v in quantization.items() if not isinstance(v, dict)},
            "encoder": [config.encoder.kind, config.encoder.to_dict()],
            "merge_size": config.merge_size,
            "pad_id": config.pad_id,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _name_within_side(name: str, prefixes: tuple[str, str]) -> str:
    """Returns a tensor's name as encoder.x or matrix.x, so that both sides use the same names."""
    encoder, matrix = prefixes
    dotted = f"{name}."
    if dotted.startswith(encoder):
        return f"encoder.{dotted.removeprefix(encoder)}"
    return f"matrix.{dotted.removeprefix(matrix)}"


# ---- a whole model


class SampledTensor(NamedTuple):
    """What a fingerprint covers of one tensor: its name, type, shape and a few values, which are not yet computed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: mx.array


def sample_tensors(model: nn.Module) -> list[SampledTensor]:
    """Returns what a fingerprint covers of each tensor of the model, sorted by name; nothing is read yet."""
    tensors = sorted(named_arrays(model.parameters()))
    return [SampledTensor(name, str(value.dtype), value.shape, sample_values(value)) for name, value in tensors]


def fingerprint_samples(tensors: Sequence[SampledTensor]) -> str:
    """Returns a sha256, as hex, of what `sample_tensors` returned."""
    mx.eval([one.values for one in tensors])
    return fingerprint_tensors((one.name, one.dtype, one.shape, bytes(host_bytes(one.values)).hex()) for one in tensors)


def compute_model_fingerprint(model: nn.Module) -> str:
    """Returns a sha256, as hex, of the model's tensors as they are now. Quantizing, adapting or casting changes it."""
    return fingerprint_samples(sample_tensors(model))


def fingerprint_of_model(model: nn.Module) -> str:
    """Returns the fingerprint of any loaded model: its attribute `fingerprint`, or computes it if there is none."""
    own: str | None = getattr(model, "fingerprint", None)
    return compute_model_fingerprint(model) if own is None else own


class KeptFingerprint:
    """Caches a model's fingerprint; computes it on first use, and again after a tensor was replaced."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forgets the fingerprint. Call this when weights have changed in place."""
        self._places: list[TensorPlace] = []
        self._found = ""

    def set(self, model: nn.Module, fingerprint: str) -> None:
        """Keeps a fingerprint that was computed elsewhere, until one of the model's tensors is replaced."""
        self._places, self._found = list(tensor_places(model)), fingerprint

    def of_model(self, model: nn.Module) -> str:
        """Returns the fingerprint of the model as it is now."""
        if not self._found or not are_unchanged(self._places):
            self.set(model, compute_model_fingerprint(model))
        return self._found


# ---- tensors that may be replaced

TensorPlace = tuple[Any, Any, Any]  # a container, a key in it, and the value that was there


def are_unchanged(places: Sequence[TensorPlace]) -> bool:
    """Returns whether every place still holds the same object. Called at every model call, so it must be fast."""
    for node, key, value in places:  # noqa: SIM110 - twice as quick as all()
        if node[key] is not value:
            return False
    return True


def tensor_places(node: Any) -> Iterator[TensorPlace]:
    """Yields a `TensorPlace` for every array and every container (module, dict, list) inside a module."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        if isinstance(value, mx.array | dict | list):
            yield node, key, value
        if isinstance(value, dict | list):
            yield from tensor_places(value)


# ---- values


def named_arrays(tree: Any) -> list[tuple[str, mx.array]]:
    """Returns (name, array) of every array in a tree, such as a module's parameters or its gradients."""
    found: Any = tree_flatten(tree)
    return found


def host_bytes(array: mx.array) -> memoryview:
    """Returns the array's bytes in row order, little endian."""
    if array.dtype == mx.bfloat16:  # numpy has no such type
        array = array.view(mx.uint16)
    host = np.ascontiguousarray(np.array(array, copy=False))
    return host.reshape(-1).view(np.uint8).data


def sample_values(array: mx.array) -> mx.array:
    """Returns the values of an array that a fingerprint covers (`sampled_places`)."""
    return array.reshape(-1)[mx.array(sampled_places(array.size))]
