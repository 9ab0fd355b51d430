"""`RowChooser` chooses the next id of each row: penalties, constraints, samplers and log-probabilities.

MLX's counterpart is `mlx_zip.engine.mlx.choosing`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mlx_zip.cuda.kernels.head import HeadOutput
from mlx_zip.cuda.sampling import exclude_ids
from mlx_zip.cuda.transfers import Download, to_device
from mlx_zip.engine.request import Chosen, Request
from mlx_zip.engine.searching import Search, search_next_ids


class RowChooser:
    """Chooses an id for each row from the head's output, and holds the log-probabilities that requests asked for.

    requests: by row; a row without a request gets the best id. pad_id: an id that canonical decoding never excludes. If
    choosing for one row raises, that row gets an arbitrary id, and the exception becomes its request's `error`.
    """

    def __init__(self, requests: Mapping[int, Request], pad_id: int) -> None:
        self._requests, self._pad_id = requests, pad_id
        self._top_logprobs: dict[int, _TopLogprobs] = {}

    def __call__(self, head: HeadOutput) -> torch.Tensor:
        """Returns ids [B] int64 for the output of a head, which must have logits."""
        assert head.logits is not None
        ids, searches = head.best.clone(), dict[int, _ConstraintSearch]()
        for row, request in self._requests.items():
            if request.error is not None or request.takes_best_id:
                continue
            try:
                self._choose_id_of_row(row, request, head, ids, searches)
            except Exception as error:
                request.error = error
        search_next_ids(list(searches.values()))
        for row, one in searches.items():
            if one.token is not None:
                ids[row] = one.token
                self._record_logprobs(row, self._requests[row], one.logits, ids)
        return ids

    def _choose_id_of_row(
        self, row: int, request: Request, head: HeadOutput, ids: torch.Tensor, searches: dict[int, _ConstraintSearch]
    ) -> None:
        """Chooses the id of one row, or begins the search for it if the request has a constraint."""
        assert head.logits is not None
        logits = head.logits[row : row + 1].float()
        for penalty in request.penalties:
            logits = penalty(logits)
        if request.submission.constraint is not None:
            searches[row] = _ConstraintSearch(request, logits, self._pad_id)
            return
        logits = exclude_ids(logits, [request.excluded_ids()], self._pad_id)
        ids[row] = request.draws(logits.log_softmax(1))[0]
        self._record_logprobs(row, request, logits, ids)

    def _record_logprobs(self, row: int, request: Request, logits: torch.Tensor, ids: torch.Tensor) -> None:
        if (top := request.submission.top_logprobs) is not None:
            self._top_logprobs[row] = _TopLogprobs(logits.log_softmax(1), ids[row : row + 1], top)

    def chosen(self, row: int, id_: int) -> Chosen:
        """Returns the chosen id `id_` of a row, with log-probabilities if its request asked for them."""
        found = self._top_logprobs.get(row)
        return Chosen(id_) if found is None else found.wait(id_)


class _TopLogprobs:
    """Copies the log-probabilities of one row's best ids to the host, in the background.

    logprobs [1, W]; id_ [1]: the chosen id. top: number of best ids.
    """

    def __init__(self, logprobs: torch.Tensor, id_: torch.Tensor, top: int) -> None:
        values, ids = logprobs.topk(top, dim=1)
        own = logprobs.gather(1, id_[None])
        packed = torch.cat([own.double(), values.double(), ids.double()], 1)[0]
        self._top, self._download = top, Download(len(packed), packed.device, packed.dtype)
        self._download.start(packed)

    def wait(self, id_: int) -> Chosen:
        """Waits for the copy. Returns the chosen id and the best ids, each with its log-probability."""
        own, *rest = self._download.wait(1 + 2 * self._top)
        pairs = zip(map(int, rest[self._top :]), rest[: self._top], strict=True)
        return Chosen(id_, own, [pair for pair in pairs if pair[1] > -math.inf])


class _ConstraintSearch(Search):
    """The search for one row's next id in logits [1, W]. pad_id: an id that canonical decoding never excludes."""

    def __init__(self, request: Request, logits: torch.Tensor, pad_id: int) -> None:
        super().__init__(request, logits)
        self._pad_id = pad_id

    def score_open_ids(self, open_: np.ndarray, excluded: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = exclude_ids(self.mask_closed_ids(self.logits, open_), [excluded], self._pad_id)
        return logits, self.request.draws.draw_scores(logits.log_softmax(1))

    def mask_closed_ids(self, logits: torch.Tensor, open_: np.ndarray) -> torch.Tensor:
        return logits.masked_fill(to_device(~open_, logits.device)[None], -torch.inf)

    def copy_to_host(self, scores: Any) -> np.ndarray:
        return scores[0].to("cpu", copy=True).numpy()
