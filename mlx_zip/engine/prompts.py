"""`Reading`: reads one request's prompt in chunks, so that other requests take their steps in between."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from mlx_zip.engine.group import Group
from mlx_zip.engine.interface import Progress
from mlx_zip.engine.job import Job
from mlx_zip.engine.served import Served


class Reading:
    """A request whose prompt is being read."""

    def __init__(self, served: Served, job: Job) -> None:
        self.served, self.job = served, job
        self._ids = mx.array(np.asarray(job.prompt_ids).astype(np.int32))
        self._done = 0

    @property
    def left(self) -> int:
        """How many ids of the prompt are still to be read."""
        return len(self._ids) - self._done

    def read(self, at_most: int) -> tuple[int, Group | None]:
        """Reads up to `at_most` ids, and the prompt's last id alone. Returns the ids read, and the group at the end.

        Raises what the model raises, and what the request's own processors raise.
        """
        job, last = self.job, len(self._ids) - 1
        begin, end = self._done, min(self._done + at_most, last)
        with mx.stream(generation_stream):
            if begin < end:
                self._call(begin, end)
            group = self._group(last) if end == last else None
        self._done = end if group is None else last + 1
        job.send(Progress(self._done, last + 1))
        return max(1, self._done - begin), group

    def _call(self, begin: int, end: int) -> None:
        """Reads the ids from `begin` up to `end`."""
        served, cache = self.served, self.job.cache
        assert cache is not None
        served.model(self._ids[None, begin:end], cache=cache)
        served.quantize(cache)
        mx.eval([entry.state for entry in (cache[:-1] if served.hyper else cache)])
        self.job.note_read(self.job.prompt_ids[begin:end])
        mx.clear_cache()

    def _group(self, last: int) -> Group:
        """Reads the last id and returns the group of this request alone, with its first id chosen."""
        job, served = self.job, self.served
        assert job.cache is not None
        logits = served.model(self._ids[None, last:], cache=job.cache)[:, -1]
        job.note_read(job.prompt_ids[last:])
        served.quantize(job.cache)
        group = Group(served, [job], job.cache, logits)
        group.choose()
        if job.error is not None:
            raise job.error
        return group
