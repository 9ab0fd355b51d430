"""How one request draws its ids: mlx-lm's samplers, with random numbers of the request's own.

mlx-lm's samplers draw from MLX's random state, which all requests would share. Here each request has a state of its
own, which begins at the request's seed and is split once per draw, as MLX splits its state. So a seed gives the ids
that it gives in `stream_generate`, alone and in company.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from mlx_zip.sampling_options import Sampling

Draw = Callable[[mx.array], mx.array]


class Draws:
    """One request's sampler: called with log-probabilities [1, W], returns the chosen id [1].

    special_ids: ids that XTC never excludes. state: random state to go on from if the options have no seed. After the
    first draw `state` is the state that the next draw begins with.
    """

    def __init__(self, options: Sampling, special_ids: Sequence[int], state: mx.array | None = None) -> None:
        self.options, self.special_ids = options, list(special_ids)
        self.greedy = options.temp == 0
        self.state = state if options.seed is None and not self.greedy else None

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Returns the chosen id [1] of log-probabilities [1, W]."""
        if self.greedy:
            return mx.argmax(logprobs, axis=-1)
        return _drawn(self._cut(logprobs), self.options.temp, self._next_key())

    def scores(self, logprobs: mx.array) -> mx.array:
        """Returns scores [1, W] of log-probabilities [1, W]: the id of the highest score is drawn.

        If that id turns out to be impossible, the next highest score has the id that is drawn from the others. A seed
        gives other ids here than in `__call__`.
        """
        if self.greedy:
            return logprobs
        return _scored(self._cut(logprobs), self.options.temp, self._next_key())

    def _cut(self, logprobs: mx.array) -> mx.array:
        """Returns logprobs [1, W] with -inf for the ids that top-p, min-p, XTC and top-k leave out."""
        options = self.options
        if 0 < options.top_p < 1:
            logprobs = apply_top_p(logprobs, options.top_p)
        if options.min_p:
            logprobs = apply_min_p(logprobs, options.min_p, options.min_tokens_to_keep)
        if options.xtc_probability > 0:
            logprobs = self._without_top_choices(logprobs, self._next_key())
        if options.top_k > 0:
            logprobs = apply_top_k(logprobs, options.top_k)
        return logprobs

    def _next_key(self) -> mx.array:
        """Returns the key of the next draw and moves the request's state on."""
        if self.state is None:
            seed = self.options.seed
            self.state = mx.random.key(secrets.randbits(64) if seed is None else int(seed))
        both = mx.random.split(self.state)
        self.state = both[0]
        return both[1]

    def _without_top_choices(self, logprobs: mx.array, key: mx.array) -> mx.array:
        """Returns logprobs [1, W] after XTC: with its probability, all likely ids but the least likely are at -inf.

        Likely is what has more than XTC's threshold of the probability.
        """
        options, probabilities = self.options, mx.softmax(logprobs, -1)
        likely = mx.where(probabilities > options.xtc_threshold, probabilities, mx.inf)
        excluded = probabilities > likely.min(axis=-1, keepdims=True)
        if self.special_ids:
            excluded[..., self.special_ids] = False
        keep = mx.random.uniform(0, 1, key=key) > options.xtc_probability
        return mx.where(keep, logprobs, mx.where(excluded, -mx.inf, logprobs))


@mx.compile
def _drawn(logprobs: mx.array, temp: float, key: mx.array) -> mx.array:
    """Returns ids [1] drawn from log-probabilities [1, W] at this temperature."""
    return mx.random.categorical(logprobs * (1.0 / temp), key=key)


@mx.compile
def _scored(logprobs: mx.array, temp: float, key: mx.array) -> mx.array:
    """Returns scores [1, W] whose highest is a draw at this temperature (Gumbel's trick)."""
    return logprobs * (1.0 / temp) + mx.random.gumbel(logprobs.shape, key=key)
