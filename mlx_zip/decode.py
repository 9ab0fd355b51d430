"""The decode loop of zip2zip models: the next step's body runs before the host has seen the id that it reads.

A step needs its id on the host for one thing only: the codebook installs an entry, whose row the head must have. The
body needs no more than the id's embedding, which the device can look up by itself. So the body of the next step is
enqueued with the id still on the device; while it runs, the host reads the id, teaches the codebook, encodes the new
row, and enqueues head and sampler behind it. The device does not wait for the host, as in mlx-lm's `generate_step`,
whose order of random numbers this loop keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from mlx_lm.sample_utils import LogitsProcessor, Sampler

from mlx_zip.models.ahead import Ahead

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
    """Reads a prompt [n] of ids, n > 0, and emits up to `max_steps` ids, -1 for no limit.

    When an id is yielded, the cache holds the prompt and every emitted id, that one included: its step is under way.
    processors see the ids as the model does. after_call(cache): after every model call, to quantize KV caches, say.
    progress(ids of the prompt done, ids in all). ahead: whether bodies run before the host knows their ids; None: on a
    GPU. (The CPU backend keeps ten operations in flight at most, so there is nothing to gain.) Raises what the model
    raises; the cache is then as before the call.
    """
    ahead = mx.default_device() == mx.Device(mx.gpu) if ahead is None else ahead
    steps = _Steps(model, cache, sampler, processors, after_call, ahead)
    y, logprobs = steps.prefill(prompt, prefill_step_size, progress)
    n = 0
    while n != max_steps:
        token, following = steps.step(y)
        yield token, logprobs
        if n % CLEAR_EVERY == 0:
            mx.clear_cache()
        y, logprobs = following
        n += 1


class _Steps:
    """One request: what its steps share. `tokens`: ids so far, kept only where processors want them."""

    def __init__(
        self,
        model: Any,
        cache: list[Any],
        sampler: Sampler,
        processors: Sequence[LogitsProcessor],
        after_call: Callable[[list[Any]], None],
        ahead: bool,
    ) -> None:
        self.model, self.cache, self.after_call = model, cache, after_call
        self.ahead = Ahead(model, cache) if ahead else None
        self.sampler, self.processors = sampler, processors
        self.tokens = mx.zeros(0, mx.int32)

    def prefill(
        self, prompt: np.ndarray, chunk: int, progress: Callable[[int, int], None] | None
    ) -> tuple[mx.array, mx.array]:
        """All but the last id in chunks, then the last -> the first id [1], on its way, and its log-probabilities."""
        ids = mx.array(prompt.astype(np.int32))
        last = len(prompt) - 1
        report = progress or (lambda done, total: None)
        report(0, len(prompt))
        with mx.stream(generation_stream):
            for begin in range(0, last, chunk):
                end = min(begin + chunk, last)
                self.model(ids[None, begin:end], cache=self.cache)
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
        """Reads the id y [1] -> y on the host, and the next id with its log-probabilities, on their way.

        When something raises, the cache is as before.
        """
        before = self.cache[-1].offset
        try:
            with mx.stream(generation_stream):
                logits = self._logits(y[:, None])
                if self.processors:
                    self.tokens = mx.concatenate([self.tokens, y.astype(self.tokens.dtype)])
                return cast(int, y.item()), self._choose(logits[:, -1])
        except BaseException:
            self.model.forget(self.cache, before)
            raise

    def _logits(self, ids: mx.array) -> mx.array:
        h = None if self.ahead is None else self.ahead.run(ids)
        if self.ahead is None or h is None:
            return self.model(ids, cache=self.cache)
        mx.async_eval(h)
        return self.ahead.follow(h, ids)

    def _choose(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        for processor in self.processors:
            logits = processor(self.tokens, logits)
        self.after_call(self.cache)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        y = self.sampler(logprobs)
        mx.async_eval(y, logprobs, *self.model.session.pending_rows())
        return y, logprobs[0]
