"""Keeps the machines of one run in step: none continues alone, or waits for one that has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlx_zip.errors import MlxZipError, TrainingError

T = TypeVar("T")


def together(group: mx.distributed.Group, action: Callable[[], T]) -> T:
    """Runs an action on every machine and returns its result; a failure on one machine is an error on all.

    Raises the action's `MlxZipError` where it failed, `TrainingError` on the other machines.
    """
    try:
        result = action()
    except MlxZipError:
        summed(group, 1)
        raise
    if summed(group, 0)[0]:
        raise TrainingError("another machine of this run could not go on; its own message says why")
    return result


def summed(group: mx.distributed.Group, *counts: int) -> list[int]:
    """Returns each count summed over the machines."""
    if group.size() == 1:
        return list(counts)
    total: Any = mx.distributed.all_sum(mx.array(counts, mx.int64), group=group)
    return total.tolist()


def from_first(group: mx.distributed.Group, tree: Any) -> Any:
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


def check_equal(group: mx.distributed.Group, digest: str, what: str) -> None:
    """Raises `TrainingError` on every machine unless all have one hex digest. what: its contents, for the message."""
    own = mx.array(list(bytes.fromhex(digest)), mx.int32)
    differs = not mx.array_equal(from_first(group, {"digest": own})["digest"], own).item()
    if summed(group, int(differs))[0]:
        raise TrainingError(f"the machines of this run differ in {what}; give all the same")


def is_first() -> bool:
    """Whether this process is the one that writes files: the first machine of a run, or the only one."""
    return mx.distributed.init().rank() == 0
