"""Checks of a model's folder without loading its weights, so that hours of measuring do not end in an error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_zip import chosen_packs
from mlx_zip.chosen_packs import Packs
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
    config = read_config(folder)
    if config["model_type"] == MODEL_TYPE:
        changed = {**config, **codebook_changes(config, codebook_size, None)}
        section = ModelArgs.from_dict(changed).zip_config
        if packs is not None:
            chosen_packs.check_codec(packs, section)
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no weights (model*.safetensors)")
    for file in files:
        try:
            mx.load(str(file))  # reads the header only
        except (OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {reason(error)}") from error


def check_windows(folder: Path, windows: Windows) -> None:
    """Raises `DataError` if a window of the text has more base ids than the model in the folder has positions."""
    positions = read_config(folder).get("max_position_embeddings")
    longest = max(len(window.base_ids) for window in windows.windows)
    if isinstance(positions, int) and longest > positions:
        raise DataError(f"windows of {longest} base ids (--context) do not fit the model's {positions} positions")


def check_prompts(tokenizer: Any, conversations: Sequence[Sequence[Prompt]]) -> None:
    """Raises `GenerationError` for the first prompt of a conversation that the chat template cannot render."""
    for number, prompts in enumerate(conversations, start=1):
        try:
            Conversation(tokenizer, prompts).next_prompt()
        except GenerationError as error:
            raise GenerationError(f"prompt {number}: {error}") from error
