"""Several machines in one run: what they must agree on, so that none goes on alone or waits for one that has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlx_zip.errors import MlxZipError, TrainingError

T = TypeVar("T")


def together(group: mx.distributed.Group, action: Callable[[], T]) -> T:
    """The action's result; when it fails on any machine it fails on all.

    Raises its own `MlxZipError`, or `TrainingError` where the others' was.
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
    """Each count, summed over the machines."""
    if group.size() == 1:
        return list(counts)
    total: Any = mx.distributed.all_sum(mx.array(counts, mx.int64), group=group)
    return total.tolist()


def from_first(group: mx.distributed.Group, tree: Any) -> Any:
    """A tree of arrays as the first machine has it; every machine gives one of the same names, shapes and dtypes.

    They are sent one by one in the order of their names: that of a dictionary is each machine's own.
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
    """Raises `TrainingError` on every machine when a hex digest is not the same on all."""
    own = mx.array(list(bytes.fromhex(digest)), mx.int32)
    differs = not mx.array_equal(from_first(group, {"digest": own})["digest"], own).item()
    if summed(group, int(differs))[0]:
        raise TrainingError(f"the machines of this run differ in {what}; give all the same")


def is_first() -> bool:
    """Whether this process is the machine that writes: the first of a run, or the only one."""
    return mx.distributed.init().rank() == 0
