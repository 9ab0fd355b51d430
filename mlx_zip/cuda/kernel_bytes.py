"""The launches of each kernel of `mlx_zip.cuda.kernels`, and the bytes that it reads and writes, by a call's arguments.

A kernel that is not named here reads each of its tensors and writes its result, once. Those named here read or write
parts of them: chosen rows, the filled part of a cache, installed entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

Arguments = Mapping[str, Any]


def bytes_of(values: Any) -> int:
    """Returns the bytes of all tensors in nested lists and tuples (`Packed` too), each counted once."""
    found = {id(one): one for one in tree_leaves(values) if isinstance(one, torch.Tensor)}
    return sum(one.numel() * one.element_size() for one in found.values())


def _embedding(args: Arguments, out: Any) -> int:
    return bytes_of(args["ids"]) + 2 * bytes_of(out)


def _entry_rows(args: Arguments, out: Any) -> int:
    places = args["places"]
    width = args["entries"].shape[1]
    return bytes_of(args["entries"]) + 2 * bytes_of(out) + (0 if places is None else bytes_of(places[:width]))


def _head(args: Arguments, out: Any) -> int:
    """The base matrix's rows below the boundary, and the installed rows."""
    base, rows, installed = args["base"], args["rows"], args["installed"]
    share = args["boundary"] / base.shape[0]
    entries = int(installed.sum()) * rows.shape[2] * rows.element_size()
    return bytes_of(args["x"]) + int(share * bytes_of(base)) + entries + bytes_of(installed) + bytes_of(out)


def _rope(args: Arguments, out: Any) -> int:
    """Queries, keys and values are read; queries go to the result, keys and values into the caches."""
    others = [args[name] for name in ("positions", "slots", "rotation")]
    return 2 * bytes_of(args["qkv"]) + bytes_of(others)


def _attention(args: Arguments, out: Any) -> int:
    """The filled part of the caches; a sliding window limits it."""
    keys, lengths = args["keys"], args["lengths"].clamp(max=args["keys"].shape[2])
    if args.get("window") is not None:
        lengths = lengths.clamp(max=args["window"])
    one = 2 * keys.shape[1] * keys.shape[3] * keys.element_size()
    return bytes_of(args["q"]) + int(lengths.sum()) * one + bytes_of(out)


def _attention_launches(args: Arguments) -> int:
    """Two where the keys are divided among programs, whose parts are combined then."""
    keys = min(args["keys"].shape[2], args["window"])
    pairs = args["keys"].shape[0] * args["keys"].shape[1]
    return 2 if min(-(-keys // 64), 1024 // pairs) > 1 else 1


# launches of a kernel's Triton form where they are not one
KERNEL_LAUNCHES: dict[str, Callable[[Arguments], int]] = {
    "head.reference": lambda args: 2,  # blocks of ids, and what joins their findings
    "attention.reference": _attention_launches,
}
KERNEL_BYTES: dict[str, Callable[[Arguments, Any], int]] = {
    "embedding.reference": _embedding,
    "encoder.reference_rows": _entry_rows,
    "head.reference": _head,
    "rope.reference": _rope,
    "attention.reference": _attention,
}
