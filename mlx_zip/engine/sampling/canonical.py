"""Canonical decoding: forbids ids that the compressor would never write next, unless together they hold most of the
probability.

`mlx_zip.engine.sampling.exclusions`, which needs no MLX, finds these ids and says why they are forbidden.

If these ids hold most of the probability, the model has begun to spell something out and is sure of the next part: for
example "didn" and then "'t", where "didn't" is an entry. If the next part were forbidden, the word would break. So
nothing is forbidden then: an id that is not canonical does less harm (measured in docs/reports/stories.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from mlx_zip.engine.sampling.exclusions import MAX_EXCLUDED_SHARE, CanonicalIds


class CanonicalDecoding(CanonicalIds):
    """A logits processor for one sequence that sets ids that are not canonical to -inf, as `exclude_ids` does.

    Call it once after the prompt and once after each emitted id, as `CanonicalIds` says.
    """

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Returns logits [1, W]. The last id is taken from the codebook; `tokens` is not used."""
        return exclude_ids(logits, [self.excluded()])


def exclude_ids(
    logits: mx.array, excluded: Sequence[Sequence[int]], never: int = 0, end: int | None = None
) -> mx.array:
    """Returns logits [B, W] with each row's excluded ids at -inf, unless they have over half the row's probability.

    Gives the result of `restore_likely_ids` in fewer operations. The half is `MAX_EXCLUDED_SHARE`. excluded: the ids of
    each row. never: an id that no row excludes, used as padding. end: all columns from `end` on are -inf; None if not
    known.
    """
    if not any(excluded):
        return logits
    lists = [list(set(ids)) for ids in excluded]
    width = max(map(len, lists))
    ids = mx.array([[*row, *[never] * (width - len(row))] for row in lists])
    chosen, whole = mx.take_along_axis(logits, ids, axis=-1), logits if end is None else logits[:, :end]
    if all(len(row) == width for row in lists):
        return mx.put_along_axis(logits, ids, _exclude_unless_likely(chosen, *_log_sum_exps(chosen, whole)), axis=-1)
    real = mx.array([[True] * len(row) + [False] * (width - len(row)) for row in lists])
    closed = _exclude_unless_likely(chosen, *_log_sum_exps(mx.where(real, chosen, -mx.inf), whole))
    return mx.put_along_axis(logits, ids, mx.where(real, closed, chosen), axis=-1)


def _log_sum_exps(chosen: mx.array, logits: mx.array) -> list[mx.array]:
    """Returns the logsumexp [B, 1] of some logits [B, K] and of all [B, W], in float32."""
    return [mx.logsumexp(x.astype(mx.float32), axis=-1, keepdims=True) for x in (chosen, logits)]


@mx.compile
def _exclude_unless_likely(chosen: mx.array, share: mx.array, whole: mx.array) -> mx.array:
    """Returns `chosen` logits if together they have over half the probability, else -inf.

    share, whole [B, 1]: logsumexps of the chosen and of all logits.
    """
    return mx.where(share - whole > math.log(MAX_EXCLUDED_SHARE), chosen, -mx.inf)


def restore_likely_ids(canonical: mx.array, logits: mx.array) -> mx.array:
    """Returns `canonical`; in rows where the excluded ids together have over half the probability, `logits`.

    logits [..., W]: the model's. canonical [..., W]: these logits with the excluded ids at -inf.
    """
    before, left = (mx.logsumexp(x.astype(mx.float32), axis=-1, keepdims=True) for x in (logits, canonical))
    return mx.where(left >= before + math.log(1 - MAX_EXCLUDED_SHARE), canonical, logits)
