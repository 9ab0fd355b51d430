"""Checks of a model's folder without loading its weights, so that hours of measuring do not end in an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip import chosen_packs
from mlx_zip.chosen_packs import Packs
from mlx_zip.codec import Codebook, compress_next
from mlx_zip.config import ZipConfig
from mlx_zip.errors import DataError, GenerationError, ModelError, reason
from mlx_zip.evaluation.windows import Windows
from mlx_zip.loading import codebook_changes, read_config
from mlx_zip.models import ModelArgs
from mlx_zip.register import MODEL_TYPE
from mlx_zip.text.conversations import Conversation, Prompt

LARGEST_CODEBOOK = 1 << 20


def check_codebook_size(size: int | None) -> None:
    """Raises `DataError` for a --codebook-size that no model can have; None: each model's own."""
    if size is not None and not 0 <= size <= LARGEST_CODEBOOK:
        raise DataError(f"--codebook-size must be from 0 to {LARGEST_CODEBOOK}, got {size}")


def check_model(folder: Path, codebook_size: int | None, packs: Packs | None) -> None:
    """Raises `ModelError`, `ConfigError` or `GenerationError` if a model's config or weights cannot be read.

    codebook_size, packs: those asked for; they must fit a zip2zip model's config.
    """
    section = _zip_config(folder, codebook_size)
    if section is not None and packs is not None:
        chosen_packs.check_codec(packs, section)
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no weights (model*.safetensors)")
    for file in files:
        try:
            mx.load(str(file))  # reads the header only
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {reason(error)}") from error


def _zip_config(folder: Path, codebook_size: int | None) -> ZipConfig | None:
    """Returns the config of a zip2zip model with the codebook size asked for (None: its own); None for a plain model.

    Raises `ModelError` or `ConfigError`.
    """
    config = read_config(folder)
    if config["model_type"] != MODEL_TYPE:
        return None
    changed = {**config, **codebook_changes(config, codebook_size, None)}
    return ModelArgs.from_dict(changed).zip_config


def check_windows(folder: Path, windows: Windows) -> None:
    """Raises `DataError` if a window of the text has more base ids than the model in the folder has positions."""
    positions = read_config(folder).get("max_position_embeddings")
    longest = max(len(window.base_ids) for window in windows.windows)
    if isinstance(positions, int) and longest > positions:
        raise DataError(f"windows of {longest} base ids (--context) do not fit the model's {positions} positions")


def check_prompts(
    folder: Path,
    tokenizer: Any,
    conversations: Sequence[Sequence[Prompt]],
    codebook_size: int | None,
    packs: Packs | None,
) -> None:
    """Raises `GenerationError` naming the first conversation whose first prompt a model cannot answer.

    The chat template must render the prompt, and the prompt must leave room in the model's context. Later turns are not
    checked, because their length depends on the answers. codebook_size, packs: as in `check_model`.
    """
    context = read_config(folder).get("max_position_embeddings")
    for number, prompts in enumerate(conversations, start=1):
        try:
            base_ids = Conversation(tokenizer, prompts).next_prompt()
        except GenerationError as error:
            raise GenerationError(f"prompt {number}: {error}") from error
        if isinstance(context, int) and len(base_ids) >= context:
            used = _positions(folder, base_ids, codebook_size, packs)
            if used >= context:
                raise GenerationError(
                    f"prompt {number} takes {used} positions, {folder.name}'s context has {context} and generation "
                    "needs at least one: shorten it (--opening, or the text in --prompts)"
                )


def _positions(folder: Path, base_ids: Sequence[int], codebook_size: int | None, packs: Packs | None) -> int:
    """Returns how many positions the base ids of a new request take; a lower bound for a plain model with a pack."""
    section = _zip_config(folder, codebook_size)
    if section is None:
        longest = 1 if packs is None else max(map(len, packs.merged.entries), default=1)
        return -(-len(base_ids) // longest)
    if section.position_mode == "base_token_end":
        return len(base_ids)
    params = section.codec_params
    params = params if packs is None else replace(params, start=packs.merged.entries)
    return len(compress_next(Codebook(params), np.array(base_ids, np.uint32)))
