"""What a row more of the head costs: a step reads every row that it has, as it reads every weight."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from mlx_zip.config import SIDES
from mlx_zip.errors import ModelError

EMBEDDING, HEAD = "model.embed_tokens.", "lm_head."


def head_cost(folder: Path) -> float:
    """Bytes of one hypertoken's output row over the bytes that a step of the model reads without any.

    A step reads all weights but the encoders', and of an embedding that is not the head one row; KV caches, which
    depend on the text, are left out, so that this is an upper bound. Of the folder's weights only the headers are read.
    Raises `ModelError` when they cannot be.
    """
    arrays: dict[str, mx.array] = {}
    try:
        for file in sorted(folder.glob("model*.safetensors")):
            arrays |= mx.load(str(file))  # type: ignore[arg-type]  # lazy: only names, types and shapes are looked at
        norm = arrays["model.norm.weight"]  # as wide as a row, and never quantized
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: what a step reads cannot be told from its weights: {error}") from error
    untied = any(name.startswith(HEAD) for name in arrays)
    unread = (*SIDES, EMBEDDING) if untied else SIDES
    return norm.nbytes / sum(value.nbytes for name, value in arrays.items() if not name.startswith(unread))
