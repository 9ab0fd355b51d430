"""The cost of one more hypertoken per step: a step reads every row of the head, so each row adds bytes to read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from mlx_zip.config import SIDES
from mlx_zip.errors import ModelError

EMBEDDING, HEAD = "model.embed_tokens.", "lm_head."


def step_bytes(arrays: Mapping[str, mx.array]) -> int:
    """Returns the bytes of a model's tensors that a step reads without hypertokens. arrays: the tensors by name.

    A step reads all weights but the encoders'; of an embedding that is not also the head it reads one row, which is not
    counted. KV caches and hyper rows depend on the text and are not counted either.
    """
    untied = any(name.startswith(HEAD) for name in arrays)
    unread = (*SIDES, EMBEDDING) if untied else SIDES
    return sum(value.nbytes for name, value in arrays.items() if not name.startswith(unread))


def head_cost(folder: Path) -> float:
    """Returns the bytes of one hypertoken's output row, as a share of the bytes that a step reads without hypertokens.

    What `step_bytes` leaves out makes the result an upper bound. Only headers of the folder's weight files are read.
    Raises `ModelError` when they cannot be read.
    """
    arrays: dict[str, mx.array] = {}
    try:
        for file in sorted(folder.glob("model*.safetensors")):
            arrays |= mx.load(str(file))  # type: ignore[arg-type]  # lazy: only names, types and shapes are read
        norm = arrays["model.norm.weight"]  # as wide as a row, and never quantized
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: cannot read the sizes of its weights: {error}") from error
    return norm.nbytes / step_bytes(arrays)
