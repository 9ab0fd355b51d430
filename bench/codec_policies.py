"""What a push costs once the table is full, by policy: freeze installs nothing then, the others one entry per id.

The same base ids for all, as each policy compresses them; the first ids of each are read beforehand, until its table is
full. `push_one` is a call of `Codebook.push` with one id, as a step of generation makes it; `push` one call for all.
Processor time, so that what else the machine does counts less.
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
    """One record per policy and operation, ns per id; trials of the policies alternate.

    Raises `MlxZipError` where the base ids do not fill the table.
    """
    full = {policy: _full(replace(params, policy=policy), base_ids) for policy in POLICIES}
    for what, read in (("push_one", _one_by_one), ("push", _whole)):
        samples: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        for trial in range(trials + 1):
            for policy, (book, ids) in full.items():
                taken = _ns_per_id(read, book.copy(), ids)
                samples[policy] += [taken] * (trial > 0)  # the first is a warm-up
        for policy, (_, ids) in full.items():
            over = median(samples[policy]) / median(samples["freeze"])
            yield {
                "what": f"{what}, table full",
                "policy": policy,
                "unit": "processor ns per id",
                "ids": len(ids),
                "ours": summary(samples[policy]),
                "of_freeze": round(over, 3),
            }


def _full(params: CodecParams, base_ids: Uint32s) -> tuple[Codebook, Uint32s]:
    """A codebook whose table is full, and the ids that follow."""
    ids, book = compress(params, base_ids)[0], Codebook(params)
    new = book.push(ids)
    growing = params.codebook_size - len(params.start or ())
    if len(book) < params.codebook_size or new.at[growing - 1] + 1 == len(ids):
        raise MlxZipError(f"{len(base_ids)} base ids do not fill a codebook of {params.codebook_size}: raise --length")
    book.rewind(int(new.at[growing - 1]) + 1)
    return book, ids[book.mark() :]


def _one_by_one(book: Codebook, ids: Any) -> None:
    for one in ids:
        book.push(one)


def _whole(book: Codebook, ids: Uint32s) -> None:
    book.push(ids)


def _ns_per_id(read: Callable[[Codebook, Any], None], book: Codebook, ids: Uint32s) -> float:
    fed = ids.tolist() if read is _one_by_one else ids
    started = time.process_time_ns()
    read(book, fed)
    return (time.process_time_ns() - started) / len(ids)
