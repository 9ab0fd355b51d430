"""Times pushes onto a full codebook, by policy: freeze then installs nothing, the others one entry per id.

All policies read the same base ids, each as it compresses them; the ids that fill the table are read before the clock
starts. `push_one` calls `Codebook.push` once per id, as generation does; `push` passes all ids in one call.
Times are processor time, which other work on the machine changes less than wall-clock time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from mlx_zip.codec import Codebook, CodecParams, compress
from mlx_zip.codec.ids import Uint32s
from mlx_zip.codec.params import POLICIES
from mlx_zip.errors import MlxZipError

from .record import summary


def measure_policies(params: CodecParams, base_ids: Uint32s, trials: int) -> Iterator[dict[str, Any]]:
    """Yields one record per operation and policy, in ns per id; trials of the policies alternate.

    Raises `MlxZipError` if the base ids are too few to fill the table.
    """
    filled = {policy: _fill_table(replace(params, policy=policy), base_ids) for policy in POLICIES}
    for what, read in (("push_one", _push_each), ("push", _push_all)):
        samples: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        for trial in range(trials + 1):
            for policy, (book, ids) in filled.items():
                taken = _ns_per_id(read, book.copy(), ids)
                samples[policy] += [taken] * (trial > 0)  # the first is a warm-up
        for policy, (_, ids) in filled.items():
            ratio = median(samples[policy]) / median(samples["freeze"])
            yield {
                "what": f"{what}, table full",
                "policy": policy,
                "unit": "processor ns per id",
                "ids": len(ids),
                "ours": summary(samples[policy]),
                "of_freeze": round(ratio, 3),
            }


def _fill_table(params: CodecParams, base_ids: Uint32s) -> tuple[Codebook, Uint32s]:
    """Returns a codebook whose table is full, and the compressed ids that come after those that filled it."""
    ids, book = compress(params, base_ids)[0], Codebook(params)
    new = book.push(ids)
    growing = params.codebook_size - len(params.start or ())
    if len(book) < params.codebook_size or new.at[growing - 1] + 1 == len(ids):
        raise MlxZipError(f"{len(base_ids)} base ids do not fill a codebook of {params.codebook_size}: raise --length")
    book.rewind(int(new.at[growing - 1]) + 1)
    return book, ids[book.mark() :]


def _push_each(book: Codebook, ids: Any) -> None:
    """Pushes compressed ids one by one."""
    for one in ids:
        book.push(one)


def _push_all(book: Codebook, ids: Uint32s) -> None:
    """Pushes compressed ids in one call."""
    book.push(ids)


def _ns_per_id(read: Callable[[Codebook, Any], None], book: Codebook, ids: Uint32s) -> float:
    """Returns the processor ns per id of reading ids into a codebook by `read`: `_push_each` or `_push_all`."""
    fed = ids.tolist() if read is _push_each else ids
    started = time.process_time_ns()
    read(book, fed)
    return (time.process_time_ns() - started) / len(ids)
