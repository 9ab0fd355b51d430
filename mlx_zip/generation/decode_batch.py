"""The decode loop of several sequences together, one id per sequence and step.

As in `mlx_zip.generation.decode`, a step begins before the host has read its ids where that gains something: on a GPU
the body is enqueued first (`mlx_zip.models.ahead`), a plain model's whole step is, and while a step runs the caller
handles the ids before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import LogitsProcessor, Sampler

from mlx_zip.device import on_gpu
from mlx_zip.generation.canonical import CanonicalDecoding, without_in_rows
from mlx_zip.generation.decode import read_again
from mlx_zip.generation.sampling import BasePenalties
from mlx_zip.layout import is_zip
from mlx_zip.models.ahead import Ahead
from mlx_zip.models.batching import filter_cache, merge_caches
from mlx_zip.state import submitting


class BatchLoop:
    """Reads B prompts and emits their ids, until all sequences have been passed to `end`.

    Iterating yields (ids [B] as numbers, row -> logprobs [W] of the sequences that have not ended). Sequences that have
    ended leave the batch, so that the others' steps cost less; their number in `ids` is the pad id.

    ids [B, L]: the prompts, left-padded, for `cache`. cache: [] for a plain model whose prompts are read one by one,
    because not all of its caches take left padding (sliding windows, states). processors: logits processors per
    sequence; the ids that they get are those that the sequence has read. chunk: ids of the prompts per model call.
    ahead: as in `decode_steps`.

    When ids are yielded, the next step has begun, which reads them, also those of a sequence that ends with them.
    """

    def __init__(
        self,
        model: Any,
        cache: list[Any],
        ids: np.ndarray,
        *,
        sampler: Sampler,
        processors: Sequence[Sequence[LogitsProcessor]],
        prompts: Sequence[Sequence[int]],
        pad_id: int,
        chunk: int,
        ahead: bool | None = None,
    ) -> None:
        self.model, self.cache, self.ids, self.chunk = model, cache, ids, chunk
        self.sampler, self.processors, self.pad_id = sampler, processors, pad_id
        self._read = [list(prompt) for prompt in prompts]
        self._rows = list(range(len(prompts)))  # the sequences in the batch
        self._ended: set[int] = set()
        self._zip = is_zip(model)
        self._ahead = Ahead(model, cache) if self._zip and (on_gpu() if ahead is None else ahead) else None

    def end(self, row: int) -> None:
        """Ends a sequence: it leaves the batch before the next step."""
        self._ended.add(row)

    def __iter__(self) -> Iterator[tuple[list[int], dict[int, mx.array]]]:
        with mx.stream(generation_stream):
            y, logprobs = self._choose(self._prefill())
        with submitting(self.cache[-1]) if self._zip and self._ahead is None else nullcontext():
            while self.open_rows():
                y, logprobs = self._leave(y, logprobs)
                tokens, following = self._step(y)
                yield self._in_all_rows(tokens), {row: logprobs[at] for at, row in enumerate(self._rows)}
                y, logprobs = following

    def _in_all_rows(self, tokens: Sequence[int]) -> list[int]:
        """Returns ids by sequence, with the pad id for those that have left."""
        found = dict(zip(self._rows, tokens, strict=True))
        return [found.get(row, self.pad_id) for row in range(len(self.processors))]

    def _leave(self, y: mx.array, logprobs: mx.array) -> tuple[mx.array, mx.array]:
        """Takes sequences that have ended out of the batch; returns y and logprobs of the others.

        y is computed at once: the body then belongs to another graph, so that reading the ids does not wait for it.
        """
        stay = [at for at, row in enumerate(self._rows) if row not in self._ended]
        if len(stay) == len(self._rows):
            return y, logprobs
        with mx.stream(generation_stream):
            filter_cache(self.cache, stay)
            self._rows = [self._rows[at] for at in stay]
            for at, row in enumerate(self._rows):
                for processor in self.processors[row]:
                    if isinstance(processor, BasePenalties):
                        processor.bind(self.cache[-1], at)
            y, logprobs = (x[mx.array(stay)] for x in (y, logprobs))
            mx.async_eval(y)
        return y, logprobs

    def _prefill(self) -> mx.array:
        """Reads the prompts, and returns the logits [B, W] after their last ids."""
        if self.cache:
            return self._logits_after(self.ids, self.cache, **self._factors(self.ids))
        caches = [make_prompt_cache(self.model) for _ in self._read]
        alone = zip(self._read, caches, strict=True)
        logits = [self._logits_after(np.array([prompt], np.int32), cache) for prompt, cache in alone]
        self.cache = merge_caches(self.model, caches)
        return mx.concatenate(logits)

    def _logits_after(self, ids: np.ndarray, cache: list[Any], **factors: bool) -> mx.array:
        """Reads ids [B, L], the last column alone, and returns the logits [B, W] after it. factors: see `_factors`."""
        last = ids.shape[1] - 1
        for begin in range(0, last, self.chunk):
            self.model(mx.array(ids[:, begin : min(begin + self.chunk, last)]), cache=cache, **factors)
            mx.eval([entry.state for entry in cache])
        return self.model(mx.array(ids[:, last:]), cache=cache)[:, -1]

    def _factors(self, ids: np.ndarray) -> dict[str, bool]:
        """Returns further arguments of the calls that read ids [B, L] next; see `read_again`."""
        return read_again(self.model, self.cache, ids, self.chunk) if self._zip else {}

    def _step(self, y: mx.array) -> tuple[list[int], tuple[mx.array, mx.array]]:
        """Runs the step that reads y [B]; returns y as numbers, and the next y with its logprobs, still computed.

        If something raises, the cache of a zip2zip model is as before.
        """
        before = self.cache[-1].offset if self._zip else 0
        try:
            return self._run(y)
        except BaseException:
            if self._zip:
                self.model.forget(self.cache, before)
            raise

    def _run(self, y: mx.array) -> tuple[list[int], tuple[mx.array, mx.array]]:
        """Does what `_step` does, but leaves the cache uneven if something raises."""
        with mx.stream(generation_stream):
            h = None if self._ahead is None else self._ahead.run(y)
            if h is not None:
                mx.async_eval(h)
            logits = None if self._zip else self.model(y[:, None], cache=self.cache)[:, -1]
            tokens: list[int] = y.tolist()  # type: ignore[assignment]
            if self._zip:
                self.model.row_source.settle_submitted()
            if logits is None and h is not None and self._ahead is not None:
                logits = self._ahead.follow(h, y)[:, -1]
            elif logits is None:
                self._factors(np.array(tokens)[:, None])
                logits = self.model(y[:, None], cache=self.cache)[:, -1]
            for row, token in zip(self._rows, tokens, strict=True):
                self._read[row].append(token)
            return tokens, self._choose(logits)

    def open_rows(self) -> list[int]:
        """Returns the sequences that have not ended."""
        return [row for row in range(len(self.processors)) if row not in self._ended]

    def _choose(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the ids y [B] that are chosen from logits [B, W], and their logprobs, and starts computing both."""
        # from `end` on, all columns are -inf
        end = self.model.layout.hyper_id(max(map(len, self.cache[-1].books))) if self._zip else None
        logits = self._processed(logits, end)
        logprobs = logits - mx.logsumexp(logits[:, :end], axis=-1, keepdims=True)
        y = self.sampler(logprobs)
        mx.async_eval(y, logprobs, *(self.model.row_source.submit_rows() if self._zip else ()))
        return y, logprobs

    def _processed(self, logits: mx.array, end: int | None) -> mx.array:
        """Returns logits [B, W] after the processors of the sequences in the batch."""
        chains = [self.processors[row] for row in self._rows]
        if not any(chains):
            return logits
        if all(len(chain) <= 1 and all(isinstance(one, CanonicalDecoding) for one in chain) for chain in chains):
            excluded = [chain[0].excluded() if chain else [] for chain in chains]
            return without_in_rows(logits, excluded, self.pad_id, end)
        rows = []
        for at, (row, chain) in enumerate(zip(self._rows, chains, strict=True)):
            one = logits[at : at + 1]
            for processor in chain:
                one = processor(mx.array(self._read[row]), one)
            rows.append(one)
        return mx.concatenate(rows)
