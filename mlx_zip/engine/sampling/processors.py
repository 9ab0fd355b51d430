"""How the next id is chosen on MLX: mlx-lm's samplers, and mlx-lm's penalties applied to base tokens.

If ids were penalised, a penalised word could come back inside a hypertoken. So penalties and biases look at base
tokens: the context is what the ids read so far expand to, and a hypertoken gets the penalties of all its base ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor, Sampler
from mlx_lm.sample_utils import make_logits_processors as mlx_lm_processors
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler

from mlx_zip.engine.sampling.options import Sampling
from mlx_zip.engine.sampling.penalties import PenaltyTerms
from mlx_zip.models.rows.zip_state import ZipState


def make_sampler(options: Sampling, width: int | None, special_ids: Sequence[int]) -> Sampler:
    """Returns a function from log-probabilities [B, W] to ids [B].

    width: W, None if not known. special_ids: ids that XTC never excludes. Raises `GenerationError` as
    `Sampling.check_kept_ids_below` does.
    """
    options.check_kept_ids_below(width)
    return mlx_lm_sampler(
        options.temp,
        options.top_p,
        options.min_p,
        options.min_tokens_to_keep,
        options.top_k,
        options.xtc_probability,
        options.xtc_threshold,
        list(special_ids),
    )


def make_penalty_processors(options: Sampling, base_ids: int | None, state: ZipState | None) -> list[LogitsProcessor]:
    """Returns logits processors, called with (ids, logits [1, W]), that apply penalties and biases to a sequence.

    base_ids: number of base ids, if known. state: the `ZipState` of this sequence alone; without a state the
    processors are mlx-lm's own. Raises `GenerationError` for a bias on an id that is not a base id.
    """
    options.check_biases(base_ids)
    if state is not None:
        return [BaseTokenPenalties(options, state, 0)] if options.has_penalties else []
    return mlx_lm_processors(
        dict(options.logit_bias or {}),
        options.repetition_penalty,
        options.repetition_context_size,
        options.presence_penalty,
        options.presence_context_size,
        options.frequency_penalty,
        options.frequency_context_size,
    )


def base_ids_only(model: Any) -> LogitsProcessor:
    """Returns a logits processor that forbids hypertokens, for mlx-lm's own `stream_generate` and `generate`.

    With this processor (`logits_processors=[base_ids_only(model)]`) every step emits one base id, so no step is saved.
    """
    allowed = mx.arange(model.layout.width) < model.layout.vocab_size
    return lambda tokens, logits: mx.where(allowed[: logits.shape[-1]], logits, -mx.inf)


class BaseTokenPenalties(PenaltyTerms):
    """A logits processor that applies mlx-lm's penalties to a sequence with hypertokens (see `PenaltyTerms`).

    Logits of -inf stay -inf.
    """

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Returns logits [1, W] after penalties. The ids are taken from the codebook's log; `tokens` is not used."""
        columns, (bias, seen, taken) = self.nonzero_columns()
        if not len(columns):
            return logits
        at = mx.array(columns)
        factor = (self.sampling.repetition_penalty or 1.0) ** mx.array(seen)
        chosen = mx.take(logits, at, axis=1).astype(mx.float32) + mx.array(bias)
        chosen = mx.where(chosen < 0, chosen * factor, chosen / factor) - mx.array(taken)
        return mx.put_along_axis(logits, at[None], chosen, axis=1)  # in the dtype of the logits
