"""A model with its hypertokens switched off: the same weights, used as a plain model's."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_zip.models.layers import Positions
from mlx_zip.models.zip_model import Model


class WithoutHypertokens(nn.Module):
    """The decoder of a model with hypertokens: `model(ids, cache=cache) -> logits` as in mlx-lm, over base ids only.

    The weights are the model's own arrays, not copies. A model with LongRoPE is used up to the position where its long
    factors begin, because keys in a plain KV cache cannot be computed again.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.layers = model, model.model.layers
        config, limits = (
            model.args.config,
            [model.args.config.get("max_position_embeddings"), model.traits.long_context],
        )
        context = min((limit for limit in limits if limit is not None), default=None)
        self.args = SimpleNamespace(
            **{**config, "max_position_embeddings": context, "vocab_size": model.layout.vocab_size}
        )

    @property
    def fingerprint(self) -> str:
        """The fingerprint of a model that is used in this way; it differs from that of the model with hypertokens."""
        return f"{self.model.fingerprint} base ids only"

    def make_cache(self) -> list[Any]:
        """Returns the cache of a new request: one KV cache per layer."""
        return self.model.make_cache()[:-1]

    def __call__(self, ids: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Returns logits [B, L, V] for base ids [B, L]. cache: from `make_cache`, updated in place."""
        cache, model = self.make_cache() if cache is None else cache, self.model
        h = model.scaled(model.model.embed_tokens(ids))
        h = model.run_layers(h, cache, Positions(start=cache[0].offset))
        for other in cache[1:]:
            other.offset = cache[
                0
            ].offset  # in a batch an array, which would become a long chain of sums if nobody read it
        return model.base_logits(h)[..., : model.layout.vocab_size]
