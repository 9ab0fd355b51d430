"""What MLX generates greedily: the measure for the PyTorch engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.codec.codebook import compress_next
from support.steps import decode_steps


def greedy(model: Any, base_ids: Sequence[int], steps: int, pack: Any = None, chunk: int = 64) -> list[int]:
    """Returns the first `steps` ids that a zip2zip model emits after a prompt of base ids."""
    cache = model.make_cache(pack=pack)
    book = cache[-1].books[0]
    made = decode_steps(
        model,
        compress_next(book, np.array(base_ids)),
        cache,
        max_steps=steps,
        sampler=lambda logprobs: mx.argmax(logprobs, axis=-1),
        prefill_step_size=chunk,
    )
    return [token for token, _ in made]
