"""What a model emits after ids as they are, below the text, for one request or several; and a cache's refill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.codec.ids import as_ids
from mlx_zip.engine.interface import Emitted, Submission
from mlx_zip.engine.mlx.generate import CallersRun, SharedDraws
from mlx_zip.engine.mlx.group import Reading
from mlx_zip.engine.mlx.prompt_caches import count_cached_ids
from mlx_zip.engine.mlx.served import PREFILL_STEP_SIZE, Served
from mlx_zip.engine.options import RunOptions
from mlx_zip.engine.request import Inline, Request
from mlx_zip.engine.sampling.options import Sampling
from mlx_zip.engine.scheduler import Scheduler
from mlx_zip.engine.sessions.store import Checkout, NoSessions
from mlx_zip.engine.submissions import Checked
from mlx_zip.models.longrope_refill import plan_rope_factors
from mlx_zip.models.rows.zip_state import find_zip_state

_TOKENIZER: Any = SimpleNamespace(eos_token_ids=(), encode=lambda text: [])


def decode_steps(
    model: Any,
    prompt: Any,
    cache: list[Any],
    *,
    sampler: Any,
    max_steps: int | None = None,
    processors: Sequence[Any] = (),
    progress: Any = None,
    **run: Any,
) -> Iterator[tuple[int, mx.array]]:
    """Yields up to `max_steps` emitted ids with their log-probabilities. run: fields of `RunOptions`."""
    options = RunOptions(**run)
    made = stream_ids(model, prompt, cache, sampler=sampler, processors=processors, progress=progress, run=options)
    try:
        yield from islice(made, max_steps)
    finally:
        made.close()  # type: ignore[attr-defined]


def stream_ids(
    model: Any,
    ids: np.ndarray,
    cache: list[Any],
    *,
    sampler: Any,
    processors: Sequence[Any] = (),
    progress: Any = None,
    run: RunOptions | None = None,
) -> Iterator[tuple[int, mx.array]]:
    """Has a model read ids [n], hypertokens included, and yields (id, log-probabilities [W]) per emitted id.

    Like `stream_generate`, but without text, and it ends only when the context is full.
    """
    served = Served(model, None, run or RunOptions(prefill_step_size=PREFILL_STEP_SIZE))
    held = Checkout(cache, count_cached_ids(cache), 0, "")
    own = CallersRun(served, Inline(SharedDraws(sampler, False), tuple(processors), True, True, ids, held))
    own.add(_expand_next_ids(ids, cache), Sampling(), -1, ())
    for _, event, logprobs in own.events(progress):
        if isinstance(event, Emitted):
            yield event.id, logprobs
            if event.last:
                return


def _expand_next_ids(ids: np.ndarray, cache: list[Any]) -> Sequence[int]:
    """Returns the base ids of ids [n] that `cache` reads next. Raises `CodecError` if its codebook lacks an id."""
    state = find_zip_state(cache)
    if state is None:
        return ids.tolist()
    book = state.books[0].copy()
    begin = book.mark()
    book.push(ids)
    return book.base_ids(begin).tolist()


class Together:
    """Requests that take their steps together, greedily, each from ids as they are.

    ids: what each has emitted. processors, sampling: further logits processors of each, and options of all.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Any],
        ahead: bool,
        chunk: int = 64,
        processors: Sequence[Sequence[Any]] | None = None,
        **sampling: Any,
    ) -> None:
        self.ids: list[list[int]] = [[] for _ in prompts]
        served = Served(model, _TOKENIZER, RunOptions(prefill_step_size=chunk, ahead=ahead))
        reading = partial(Reading, served)
        self.scheduler = Scheduler(served, NoSessions(), len(prompts), None, lambda request: None, reading, raises=True)
        self.requests = []
        for row, prompt in enumerate(prompts):
            own = Inline(ids=prompt, processors=tuple(() if processors is None else processors[row]))
            submission = Submission(prompt.tolist(), keep=False)
            checked = Checked(submission, as_ids(prompt), Sampling(**sampling))
            self.requests.append(Request(checked, self._taker(row), own))
            self.scheduler.add_request(self.requests[-1])

    def _taker(self, row: int) -> Callable[[Any], None]:
        return lambda event: self.ids[row].append(event.id) if isinstance(event, Emitted) else None

    @property
    def cache(self) -> list[Any]:
        """The cache of the requests, which are in one group now."""
        [group] = self.scheduler.groups
        return group.cache

    def run(self, steps: int, end: Iterable[tuple[int, int]] = ()) -> list[list[int]]:
        """Runs until all that go on have emitted `steps` ids; returns the first of them. end: (ids, row) that ends."""
        ends = {row: count for count, row in end}
        while any(len(ids) < ends.get(row, steps) for row, ids in enumerate(self.ids)):
            self.scheduler.run_round()
            for request in self.requests:
                if request.error is not None:
                    raise request.error
            for row, count in ends.items():
                if len(self.ids[row]) >= count:
                    self.requests[row].cancelled = True
        return [ids[: ends.get(row, steps)] for row, ids in enumerate(self.ids)]


def read_again(model: Any, cache: list[Any], ids: np.ndarray, chunk: int) -> dict[str, bool]:
    """Makes a cache ready for calls that read ids [B, L] next, in chunks; returns further arguments of the calls."""
    factors, refill = plan_rope_factors(model, cache, ids)
    if refill is not None:
        while refill.ids_left:
            refill.read_next(chunk)
            mx.eval([entry.state for entry in refill.filled])
        refill.install_refilled_caches()
    return factors
