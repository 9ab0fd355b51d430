"""Keeps the machines of one run in step: none continues alone, or waits for one that has failed.

A run on several machines is one command on each, started by `mlx.launch`. Every collective operation here must be
reached by all machines in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_zip.errors import MachineError, MlxZipError, first_line

T = TypeVar("T")
Group = mx.distributed.Group
_BACKENDS = ("[ring]", "[jaccl]", "[mpi]", "[nccl]")  # how MLX's messages on communication begin


def machines() -> Group | None:
    """Returns the machines of this run, or None if this process is the only one.

    Raises `MachineError` if another machine of the run cannot be reached.
    """
    with lost_machines_as_errors():
        group = mx.distributed.init()
    return group if group.size() > 1 else None


def is_first(group: Group | None = None) -> bool:
    """Whether this process is the one that writes files and text: the first machine of a run, or the only one."""
    return (mx.distributed.init() if group is None else group).rank() == 0


@contextmanager
def lost_machines_as_errors() -> Iterator[None]:
    """Turns MLX's error about a lost connection into a `MachineError`."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not str(error).startswith(_BACKENDS):
            raise
        raise MachineError(
            f"another machine of this run has ended or cannot be reached: {first_line(error)}"
        ) from error


def together(group: Group | None, action: Callable[[], T]) -> T:
    """Runs an action on every machine and returns its result; a failure on one machine is an error on all.

    group: None for a single machine. Raises the action's `MlxZipError` where it failed, `MachineError` on the other
    machines.
    """
    if group is None:
        return action()
    try:
        result = action()
    except MlxZipError:
        summed(group, 1)
        raise
    if summed(group, 0)[0]:
        raise MachineError("another machine of this run could not go on; its own message says why")
    return result


def leave(group: Group | None) -> None:
    """Returns when all machines have come here, so that none ends while another still needs it."""
    from mlx_lm.generate import generation_stream  # importing it takes a second, so only when needed

    if group is not None:
        mx.synchronize(generation_stream)  # a step has begun that nobody will read; its sums must be over
        summed(group, 0)


def summed(group: Group, *counts: int) -> list[int]:
    """Returns each count summed over the machines."""
    if group.size() == 1:
        return list(counts)
    total: Any = mx.distributed.all_sum(mx.array(counts, mx.int64), group=group)
    return total.tolist()


def from_first(group: Group, tree: Any) -> Any:
    """Returns the first machine's tree of arrays, on every machine.

    tree: this machine's own, with the names, shapes and dtypes of the first one's. Arrays are sent in the order of
    their names, because dictionaries may be ordered differently on each machine.
    """
    if group.size() == 1:
        return tree
    sent = {}
    for name, array in sorted(tree_flatten(tree)):
        if isinstance(array, mx.array):
            array = mx.distributed.all_sum(array if group.rank() == 0 else mx.zeros_like(array), group=group)
            mx.eval(array)
        sent[name] = array
    return tree_unflatten(list(sent.items()))


def bytes_from_first(group: Group, data: bytes) -> bytes:
    """Returns the first machine's bytes on every machine. data: those, and anything on the others."""
    size = summed(group, len(data) if group.rank() == 0 else 0)[0]
    if size == 0:
        return b""
    own = mx.array(np.frombuffer(data, np.uint8) if group.rank() == 0 else np.zeros(size, np.uint8))
    return bytes(np.array(mx.distributed.all_sum(own, group=group)))


def smallest(group: Group, number: int) -> int:
    """Returns the smallest of the machines' numbers, each from 0 to below 2^63."""
    least: Any = mx.distributed.all_min(mx.array([number], mx.int64), group=group)
    return int(least.item())


def check_equal(group: Group, digest: str, what: str) -> None:
    """Raises `MachineError` on every machine unless all have one hex digest. what: its contents, for the message."""
    own = mx.array(list(bytes.fromhex(digest)), mx.int32)
    differs = not mx.array_equal(from_first(group, {"digest": own})["digest"], own).item()
    if summed(group, int(differs))[0]:
        raise MachineError(f"the machines of this run differ in {what}; give all the same")
