"""The decode loop of zip2zip models: the device begins a step before the host has read the step's id.

A step needs its id on the host for one thing only: the id may install an entry in the codebook, and the head needs that
entry's row. The decoder's body only needs the id's embedding, which the device can look up by itself. So the body is
enqueued with the id still on the device. While the body runs, the host reads the id, pushes it to the codebook, encodes
the new row, and enqueues head and sampler after the body. Thus the device does not wait for the host, as in mlx-lm's
`generate_step`. Random numbers are drawn in the same order as there.

On MLX's CPU backend, which keeps ten operations in flight, bodies that run ahead gain little, and their input rows
would have to be encoded. There the new output row and then each layer are submitted as soon as they are built, so the
device computes while Python builds the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import LogitsProcessor, Sampler

from mlx_zip.device import on_gpu
from mlx_zip.models.ahead import Ahead
from mlx_zip.models.refill import factors_for
from mlx_zip.state import submitting

CLEAR_EVERY = 256  # steps between two releases of unused buffers, as in mlx-lm
Step = tuple[int, mx.array]  # an emitted id, and the log-probabilities [W] that it was chosen from


def decode_steps(
    model: Any,
    prompt: np.ndarray,
    cache: list[Any],
    *,
    max_steps: int,
    sampler: Sampler,
    processors: Sequence[LogitsProcessor] = (),
    prefill_step_size: int,
    after_call: Callable[[list[Any]], None] = lambda cache: None,
    progress: Callable[[int, int], None] | None = None,
    ahead: bool | None = None,
) -> Iterator[Step]:
    """Reads a prompt [n] of ids, n > 0, and yields up to `max_steps` emitted ids with their log-probabilities.

    max_steps: -1 for no limit. processors: logits processors; the ids that they get include hypertokens. after_call:
    called with the cache after every model call, for example to quantize KV caches. progress: called with the number of
    prompt ids read so far and of all, and with ids of the context when that is read again for LongRoPE's other factors.
    ahead: whether a step's body runs before the host has read the step's id; None means on a GPU only. (The CPU backend
    keeps ten operations in flight at most, so there is nothing to gain.)

    When an id is yielded, the cache holds the prompt and every emitted id, that one included, because the next step has
    begun. Raises what the model raises; the cache is then as before the model call that failed.
    """
    ahead = on_gpu() if ahead is None else ahead
    report = progress or (lambda done, total: None)
    steps = _Steps(model, cache, sampler, processors, after_call, ahead, prefill_step_size, report)
    y, logprobs = steps.prefill(prompt)
    n = 0
    with nullcontext() if ahead else submitting(cache[-1]):
        while n != max_steps:
            token, following = steps.step(y)
            yield token, logprobs
            if n % CLEAR_EVERY == 0:
                mx.clear_cache()
            y, logprobs = following
            n += 1


def read_again(
    model: Any,
    cache: list[Any],
    ids: np.ndarray,
    chunk: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, bool]:
    """Makes a cache ready for calls that read ids [B, L] next: fills it again, `chunk` ids at a time, if it must be.

    It must if LongRoPE's factors change with these ids. report: called with the number of ids read again, and of all.
    Returns further arguments of these calls: which factors to use, {} for a model without LongRoPE. Raises `CodecError`
    for ids that the model would not take.
    """
    factors, refill = factors_for(model, cache, ids)
    if refill is not None:
        while refill.left:
            refill.read(chunk)
            mx.eval([entry.state for entry in refill.filled])
            report(refill.done, refill.total)
            mx.clear_cache()
        refill.finish()
    return factors


class _Steps:
    """What the steps of one request share. tokens: all ids so far; emitted ids are added only if there are processors.

    chunk: ids of the prompt per call. report: as `progress` of `decode_steps`.

    In the methods, y [1] is the id to be read next, perhaps not yet read by the host, and logprobs [1, W] or [W] are
    the log-probabilities that it was chosen from.
    """

    def __init__(
        self,
        model: Any,
        cache: list[Any],
        sampler: Sampler,
        processors: Sequence[LogitsProcessor],
        after_call: Callable[[list[Any]], None],
        ahead: bool,
        chunk: int,
        report: Callable[[int, int], None],
    ) -> None:
        self.model, self.cache, self.after_call = model, cache, after_call
        self.ahead = Ahead(model, cache) if ahead else None
        self.sampler, self.processors = sampler, processors
        self.tokens = mx.zeros(0, mx.int32)
        self.chunk, self.report = chunk, report

    def prefill(self, prompt: np.ndarray) -> tuple[mx.array, mx.array]:
        """Reads a prompt, the last id alone, and returns the first emitted id y and its logprobs."""
        ids = mx.array(prompt.astype(np.int32))
        last = len(prompt) - 1
        chunk, report = self.chunk, self.report
        with mx.stream(generation_stream):
            factors = read_again(self.model, self.cache, prompt[None], chunk, report)
            report(0, len(prompt))
            for begin in range(0, last, chunk):
                end = min(begin + chunk, last)
                self.model(ids[None, begin:end], cache=self.cache, **factors)
                self.after_call(self.cache)
                mx.eval([entry.state for entry in self.cache[:-1]])
                report(end, len(prompt))
                mx.clear_cache()
            logits = self.model(ids[None, last:], cache=self.cache)
            self.tokens = ids
            y, logprobs = self._choose(logits[:, -1])
            mx.eval(y)
        report(len(prompt), len(prompt))
        return y, logprobs

    def step(self, y: mx.array) -> tuple[int, tuple[mx.array, mx.array]]:
        """Runs the step that reads y; returns y as a number, and the next y with its logprobs, still being computed.

        If something raises, the cache is as before.
        """
        before = self.cache[-1].offset
        try:
            with mx.stream(generation_stream):
                logits = self._logits(y)
                if self.processors:
                    self.tokens = mx.concatenate([self.tokens, y.astype(self.tokens.dtype)])
                token = cast(int, y.item())
                self.model.row_source.settle_submitted()
                return token, self._choose(logits[:, -1])
        except BaseException:
            self.model.forget(self.cache, before)
            raise

    def _logits(self, y: mx.array) -> mx.array:
        """Returns logits [1, 1, W] of one id, y [1]; enqueues the body first where `ahead` allows it."""
        h = None if self.ahead is None else self.ahead.run(y)
        if self.ahead is None or h is None:
            if self.model.traits.long_context is not None:
                read_again(self.model, self.cache, np.array([[y.item()]]), self.chunk, self.report)
            return self.model(y[:, None], cache=self.cache)
        mx.async_eval(h)
        return self.ahead.follow(h, y)

    def _choose(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Returns the id y [1] that is chosen from logits [1, W], and its logprobs [W], and starts computing both."""
        for processor in self.processors:
            logits = processor(self.tokens, logits)
        self.after_call(self.cache)
        end = self.model.layout.hyper_id(len(self.cache[-1].books[0]))  # from here on, all columns are -inf
        logprobs = logits - mx.logsumexp(logits[:, :end], keepdims=True)
        y = self.sampler(logprobs)
        mx.async_eval(y, logprobs, *self.model.row_source.submit_rows())
        return y, logprobs[0]
