"""How the next ids of a batch are chosen: mlx-lm's sampling rules in PyTorch, for one request at a time.

`RowChooser` applies each row's penalties, constraint and sampler, as `mlx_zip.engine.mlx.choosing` does on MLX. Each
request has its own random generator, so that a seed gives the same ids whether the request runs alone or in a batch.
The random generators of MLX, a GPU and a CPU differ, so the ids for one seed differ between them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mlx_zip.cuda.kernels.head import HeadOutput
from mlx_zip.cuda.transfers import Download, to_device
from mlx_zip.engine.request import Chosen, Request
from mlx_zip.engine.sampling.exclusions import MAX_EXCLUDED_SHARE
from mlx_zip.engine.sampling.options import Sampling
from mlx_zip.engine.sampling.penalties import PenaltyTerms
from mlx_zip.engine.searching import Search, search_next_ids


class RequestSampler:
    """One request's sampler: called with log-probabilities [1, W], returns the chosen id [1] int64.

    special_ids: ids that XTC never excludes. device: of the log-probabilities. state: random state to continue from if
    the options have no seed; ignored if it is from another type of device.
    """

    def __init__(
        self,
        options: Sampling,
        special_ids: Sequence[int],
        device: torch.device,
        state: torch.Tensor | None = None,
    ) -> None:
        self.options, self._device = options, device
        self._special = np.array(list(special_ids), np.int64)
        self.greedy = options.temp == 0
        self._generator_in_use: torch.Generator | None = None
        self._resumed_state = state if options.seed is None and not self.greedy else None

    @property
    def state(self) -> torch.Tensor | None:
        """The random state before the next draw, a uint8 tensor on the host; None before the first draw."""
        return self._resumed_state if self._generator_in_use is None else self._generator_in_use.get_state()

    def __call__(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Returns the chosen id [1] for log-probabilities [1, W]; among equal best scores, the lowest id."""
        return self.draw_scores(logprobs).argmax(1)  # PyTorch returns the lowest of equal ones

    def draw_scores(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Returns scores [1, W] for log-probabilities [1, W]; the id of the highest score is a sample (Gumbel's trick).

        If that id is refused, the id of the next highest score is a sample of the remaining ids.
        """
        if self.greedy:
            return logprobs
        kept = self.filter_logprobs(logprobs)
        noise = torch.empty_like(kept).exponential_(generator=self._random_generator()).log_().neg_()
        return kept * (1.0 / self.options.temp) + noise

    def filter_logprobs(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Returns logprobs [1, W] with -inf for the ids that top-p, min-p, XTC and top-k leave out, in that order."""
        options = self.options
        if 0 < options.top_p < 1:
            logprobs = _apply_top_p(logprobs, options.top_p)
        if options.min_p:
            logprobs = _apply_min_p(logprobs, options.min_p, options.min_tokens_to_keep)
        if options.xtc_probability > 0:
            logprobs = self._apply_xtc(logprobs)
        if options.top_k > 0:
            logprobs = _keep_only_ids(logprobs, logprobs.topk(options.top_k, dim=1).indices)
        return logprobs

    def _apply_xtc(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Returns logprobs [1, W] after XTC: with `xtc_probability`, all likely ids but the least likely get -inf.

        An id is likely if its probability is above `xtc_threshold`.
        """
        options, probabilities = self.options, logprobs.softmax(1)
        likely = torch.where(probabilities > options.xtc_threshold, probabilities, torch.inf)
        excluded = probabilities > likely.amin(1, keepdim=True)
        excluded.index_fill_(1, to_device(self._special, logprobs.device), False)
        drawn = torch.rand((1, 1), device=logprobs.device, generator=self._random_generator())
        return logprobs.masked_fill(excluded & (drawn <= options.xtc_probability), -torch.inf)

    def _random_generator(self) -> torch.Generator:
        if self._generator_in_use is None:
            made, seed = torch.Generator(self._device), self.options.seed
            before = self._resumed_state
            if before is not None and before.shape == made.get_state().shape:
                made.set_state(before)
            else:
                number = secrets.randbits(63) if seed is None else int(seed)
                made.manual_seed(number if number < 2**63 else number - 2**64)
            self._generator_in_use = made
        return self._generator_in_use


def _apply_top_p(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Returns logprobs [1, W] with -inf for all but the likeliest ids that together have probability `top_p`."""
    ordered = logprobs.sort(dim=1, descending=True).values
    probabilities = ordered.exp()
    above = probabilities.cumsum(1) - probabilities
    kept = (above < top_p * probabilities.sum(1, keepdim=True)).sum(1, keepdim=True).clamp_(min=1)
    return logprobs.masked_fill(logprobs < ordered.gather(1, kept - 1), -torch.inf)


def _apply_min_p(logprobs: torch.Tensor, min_p: float, least: int) -> torch.Tensor:
    """Returns logprobs [1, W] with -inf for ids below `min_p` times the highest probability; keeps the best `least`."""
    removed = logprobs < logprobs.amax(1, keepdim=True) + math.log(min_p)
    if least > 1:
        removed.scatter_(1, logprobs.topk(least, dim=1).indices, False)
    return logprobs.masked_fill(removed, -torch.inf)


def _keep_only_ids(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logprobs, -torch.inf).scatter_(1, ids, logprobs.gather(1, ids))


class BaseTokenPenalties(PenaltyTerms):
    """mlx-lm's penalties for one sequence, counted over base tokens (see `PenaltyTerms`). Keeps logits of -inf."""

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns logits [1, W] float32 after penalties for the ids in the codebook's log."""
        columns, terms = self.nonzero_columns()
        if not len(columns):
            return logits
        at = to_device(columns, logits.device)
        bias, seen, taken = (to_device(term, logits.device) for term in terms)
        factor = (self.sampling.repetition_penalty or 1.0) ** seen
        chosen = logits[:, at] + bias
        chosen = torch.where(chosen < 0, chosen * factor, chosen / factor) - taken
        return logits.index_copy(1, at, chosen)


# ---- canonical decoding: forbids ids that the compressor would never write (`mlx_zip.engine.sampling.exclusions`)


def exclude_ids(logits: torch.Tensor, excluded: Sequence[Sequence[int]], never: int) -> torch.Tensor:
    """Sets each row's excluded ids to -inf, unless together they hold over half the probability; returns `logits`.

    logits [B, W], changed in place. never: an id that is excluded in no row.
    """
    if not any(excluded):
        return logits
    lists = [list(dict.fromkeys(ids)) for ids in excluded]
    width = max(map(len, lists))
    padded = np.array([[*row, *[never] * (width - len(row))] for row in lists], np.int64)
    ids = to_device(padded, logits.device)
    chosen, real = logits.gather(1, ids), ids != never
    share = torch.where(real, chosen, -torch.inf).logsumexp(1) - logits.float().logsumexp(1)
    closed = real & (share <= math.log(MAX_EXCLUDED_SHARE))[:, None]
    return logits.scatter_(1, ids, torch.where(closed, -torch.inf, chosen))


# ---- the ids of a batch


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
