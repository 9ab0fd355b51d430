"""Chooses the next id of each row of a batch: penalties, constraints, samplers and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mlx_zip.cuda.canonical import without
from mlx_zip.cuda.kernels.head import Head
from mlx_zip.cuda.transfers import to_device
from mlx_zip.engine.job import Chosen, Job
from mlx_zip.engine.searching import Search, search


def is_plain(job: Job) -> bool:
    """Returns whether a request takes the best id whatever it is, and asks for nothing else."""
    asked = job.submission.constraint is not None or job.submission.top_logprobs is not None
    return job.draws.greedy and not (asked or job.penalties or job.canonical is not None)


class Choosing:
    """What a batch calls with the head's output; afterwards it has the log-probabilities that were asked for.

    jobs: by row; rows without one get the best id. pad_id: an id that canonical decoding never excludes. A row whose
    own work raises gets the exception as its job's `error`, and any id.
    """

    def __init__(self, jobs: Mapping[int, Job], pad_id: int) -> None:
        self._jobs, self._pad_id = jobs, pad_id
        self._likely: dict[int, _Likely] = {}

    def __call__(self, head: Head) -> torch.Tensor:
        """Returns ids [B] int64 for a head with logits."""
        assert head.logits is not None
        ids, searches = head.best.clone(), dict[int, _Search]()
        for row, job in self._jobs.items():
            if job.error is not None or is_plain(job):
                continue
            try:
                self._row(row, job, head, ids, searches)
            except Exception as error:
                job.error = error
        search(list(searches.values()))
        for row, one in searches.items():
            if one.token is not None:
                ids[row] = one.token
                self._note(row, self._jobs[row], one.logits, ids)
        return ids

    def _row(self, row: int, job: Job, head: Head, ids: torch.Tensor, searches: dict[int, _Search]) -> None:
        """Chooses the id of one row, or begins the search for it if the request has a constraint."""
        assert head.logits is not None
        logits, excluded = head.logits[row : row + 1].float(), []
        for penalty in job.penalties:
            logits = penalty(logits)
        if job.canonical is not None:
            excluded = job.canonical.excluded()
        if job.submission.constraint is not None:
            searches[row] = _Search(job, logits, excluded, self._pad_id)
            return
        logits = _without(logits, excluded, self._pad_id)
        ids[row] = job.draws(logits.log_softmax(1))[0]
        self._note(row, job, logits, ids)

    def _note(self, row: int, job: Job, logits: torch.Tensor, ids: torch.Tensor) -> None:
        """Keeps the log-probabilities of a row, if the request asks for them."""
        if (top := job.submission.top_logprobs) is not None:
            self._likely[row] = _Likely(logits.log_softmax(1), ids[row : row + 1], top)

    def read(self, row: int, id_: int) -> Chosen:
        """Returns what was chosen for a row, of which the host has the id by now."""
        found = self._likely.get(row)
        return Chosen(id_) if found is None else found.read(id_)


class _Likely:
    """The log-probabilities of one row's best ids, on their way to the host. logprobs [1, W]; id_ [1]: the chosen one.

    top: how many ids were asked for.
    """

    def __init__(self, logprobs: torch.Tensor, id_: torch.Tensor, top: int) -> None:
        values, ids = logprobs.topk(top, dim=1)
        own = logprobs.gather(1, id_[None])
        floats, on_card = torch.cat([own, values], 1)[0].double(), logprobs.is_cuda
        packed = torch.cat([floats, ids[0].double()])
        self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=on_card)
        self._host.copy_(packed, non_blocking=True)
        self._done = torch.cuda.Event() if on_card else None
        self._top = top
        if self._done is not None:
            self._done.record()

    def read(self, id_: int) -> Chosen:
        """Returns the chosen id with its log-probability and the best ids with theirs."""
        if self._done is not None:
            self._done.synchronize()
        own, *rest = self._host.tolist()
        pairs = zip(map(int, rest[self._top :]), rest[: self._top], strict=True)
        return Chosen(id_, own, [pair for pair in pairs if pair[1] > -math.inf])


class _Search(Search):
    """The search for one row's next id in logits [1, W]. pad_id: an id that canonical decoding never excludes."""

    def __init__(self, job: Job, logits: torch.Tensor, excluded: list[int], pad_id: int) -> None:
        super().__init__(job, logits, excluded)
        self._pad_id = pad_id

    def score(self, open_: np.ndarray, excluded: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = _without(self.close(self.logits, open_), excluded, self._pad_id)
        return logits, self.job.draws.scores(logits.log_softmax(1))

    def close(self, logits: torch.Tensor, open_: np.ndarray) -> torch.Tensor:
        return logits.masked_fill(to_device(~open_, logits.device)[None], -torch.inf)

    def on_host(self, scores: Any) -> np.ndarray:
        return scores[0].to("cpu", copy=True).numpy()


def _without(logits: torch.Tensor, excluded: list[int], pad_id: int) -> torch.Tensor:
    """Returns logits [1, W] after canonical decoding."""
    return without(logits, logits.logsumexp(1), [excluded], pad_id) if excluded else logits
