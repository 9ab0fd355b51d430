"""`Reading`: reads one request's prompt in chunks, so that other requests take their steps in between.

It also reads a request's context again, in such chunks, when LongRoPE's factors change with the ids that come next:
those of a prompt that goes on from a session, or the one id of a step in the middle of an answer.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from mlx_zip.engine.group import Group
from mlx_zip.engine.interface import Progress
from mlx_zip.engine.job import Job
from mlx_zip.engine.served import Served
from mlx_zip.models.refill import Refill, factors_for


class Reading:
    """A request whose cache reads its `next_ids`."""

    def __init__(self, served: Served, job: Job) -> None:
        self.served, self.job = served, job
        self._next = job.next_ids
        self._ids = mx.array(self._next.astype(np.int32))
        self._done = 0
        self._refill: Refill | None = None
        self._factors: dict[str, bool] = {}
        if served.long_context is not None:
            self._factors, self._refill = factors_for(served.model, job.cache, self._next[None])
        self._again = 0 if self._refill is None else self._refill.total

    @property
    def left(self) -> int:
        """How many ids are still to be read, again or for the first time."""
        return len(self._ids) - self._done + (0 if self._refill is None else self._refill.left)

    def read(self, at_most: int) -> tuple[int, Group | None]:
        """Reads up to `at_most` ids, and the last id alone. Returns the ids read, and the group at the end.

        Raises what the model raises, and what the request's own processors raise.
        """
        left, last, group = self.left, len(self._ids) - 1, None
        with mx.stream(generation_stream):
            if self._refill is not None:
                self._read_again(self._refill, at_most)
            else:
                begin, end = self._done, min(self._done + at_most, last)
                if begin < end:
                    self._call(begin, end)
                group = self._group(last) if end == last else None
                self._done = end if group is None else last + 1
        total = self._again + last + 1
        self.job.send(Progress(total - self.left, total))
        return max(1, left - self.left), group

    def _read_again(self, refill: Refill, at_most: int) -> None:
        """Reads up to `at_most` ids of the context again. The request's cache is as before until all have been read."""
        refill.read(at_most)
        mx.eval([entry.state for entry in refill.filled])
        mx.clear_cache()
        if not refill.left:
            refill.finish()
            self._refill = None

    def _call(self, begin: int, end: int) -> None:
        """Reads the ids from `begin` up to `end`."""
        served, cache = self.served, self.job.cache
        assert cache is not None
        served.model(self._ids[None, begin:end], cache=cache, **self._factors)
        served.quantize(cache)
        mx.eval([entry.state for entry in (cache[:-1] if served.hyper else cache)])
        self.job.note_read(self._next[begin:end])
        mx.clear_cache()

    def _group(self, last: int) -> Group:
        """Reads the last id and returns the group of this request alone, with its next id chosen."""
        job, served = self.job, self.served
        assert job.cache is not None
        logits = served.model(self._ids[None, last:], cache=job.cache)[:, -1]
        job.note_read(self._next[last:])
        served.quantize(job.cache)
        group = Group(served, [job], job.cache, logits)
        group.choose()
        if job.error is not None:
            raise job.error
        return group
