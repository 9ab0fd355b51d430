"""The launches of each kernel of `mlx_zip.cuda.kernels`, and the bytes that it reads and writes, by a call's arguments.

A kernel that is not named here reads each of its tensors and writes its result, once. Those named here read or write
parts of them: chosen rows, the filled part of a cache, installed entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mlx_zip.cuda.kernels.packed import Packed
from mlx_zip.cuda.kernels.parts import part_count

Arguments = Mapping[str, Any]


def bytes_of(values: Any) -> int:
    """Returns the bytes of all tensors in nested lists and tuples (`Packed` too), each counted once."""
    found = {id(one): one for one in tree_leaves(values) if isinstance(one, torch.Tensor)}
    return sum(one.numel() * one.element_size() for one in found.values())


def _rows(matrix: torch.Tensor | Packed, count: int) -> int:
    """Returns the bytes of this many rows of a matrix, dense or packed."""
    return count * bytes_of(matrix) // matrix.shape[0]


def _embedding(args: Arguments, out: Any) -> int:
    """A base id's row comes from the base table, a hypertoken's from the installed rows."""
    ids, base = args["ids"], args["base"]
    low = int((ids < args["boundary"]).sum())
    rows = (ids.numel() - low) * args["rows"].shape[2] * args["rows"].element_size()
    return bytes_of(ids) + _rows(base, low) + rows + bytes_of(out)


def _entry_rows(args: Arguments, out: Any) -> int:
    """A row of the matrix and one of the places for each id of each entry."""
    entries, places = args["entries"], args["places"]
    read = _rows(args["matrix"], entries.numel()) + (0 if places is None else bytes_of(places[: entries.shape[1]]))
    return bytes_of(entries) + read + bytes_of(out)


def _head(args: Arguments, out: Any) -> int:
    """The base matrix's rows below the boundary, and the installed rows."""
    base, rows, installed = args["base"], args["rows"], args["installed"]
    entries = int(installed.sum()) * rows.shape[2] * rows.element_size()
    low = _rows(base, args["boundary"])
    return bytes_of(args["x"]) + low + entries + bytes_of(installed) + bytes_of(out)


def _rope(args: Arguments, out: Any) -> int:
    """Queries, keys and values are read; queries go to the result, keys and values into the caches."""
    others = [args[name] for name in ("positions", "slots", "rotation")]
    return 2 * bytes_of(args["qkv"]) + bytes_of(others)


def _attention(args: Arguments, out: Any) -> int:
    """The filled part of the caches; a sliding window limits it."""
    keys = args["keys"]
    lengths = args["lengths"].clamp(max=min(keys.shape[2], args["window"]))
    one = 2 * keys.shape[1] * keys.shape[3] * keys.element_size()
    return bytes_of(args["q"]) + int(lengths.sum()) * one + bytes_of(out)


def _attention_launches(args: Arguments) -> int:
    """Two where the keys are divided among programs, whose parts are combined then."""
    batch, kv_heads, places, _ = args["keys"].shape
    return 2 if part_count(batch * kv_heads, min(places, args["window"])) > 1 else 1


def _install(args: Arguments, out: Any) -> int:
    """A row of each side is read and written for each entry, with its flag and its span."""
    new, pool = args["new"], args["pool"]
    row = pool.shape[1] * pool.shape[2] * pool.element_size()
    return bytes_of(new) + new.shape[1] * (2 * row + 1 + 8)


# launches of a kernel's Triton form where they are not one
KERNEL_LAUNCHES: dict[str, Callable[[Arguments], int]] = {
    # blocks of ids, and what joins their findings; twice again for the highest logits
    "head.reference": lambda args: 4 if args.get("top") else 2,
    "attention.reference": _attention_launches,
}
KERNEL_BYTES: dict[str, Callable[[Arguments, Any], int]] = {
    "embedding.reference": _embedding,
    "encoder.reference_rows": _entry_rows,
    "head.reference": _head,
    "rope.reference": _rope,
    "attention.reference": _attention,
    "install.reference": _install,
}
