"""Reads prompt caches from files, as `mlx_lm.cache_prompt` and `save_prompt_cache` write them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import QuantizedKVCache, load_prompt_cache

from mlx_zip.errors import GenerationError, MlxZipError


@dataclass(frozen=True)
class SavedCache:
    """A prompt cache from a file, and what the file says of its model.

    cache: as `stream_generate` takes it. model: name of the model that made the cache, None if the file does not say.
    tokenizer_config: arguments with which that model's tokenizer was loaded. positions: settings that keys depend on,
    as `mlx_zip cache-prompt` notes them; None if the file does not say.
    """

    file: str
    cache: list[Any]
    model: str | None
    tokenizer_config: dict[str, Any]
    positions: str | None = None

    def model_for(self, name: str | None) -> str:
        """Returns the name of the model to load. name: the model asked for, None for the one that the file names.

        Raises `GenerationError` if they differ, or neither is known.
        """
        if not name and self.model is None:
            raise GenerationError(f"--prompt-cache-file {self.file} does not name its model; give it with --model")
        if name is not None and self.model is not None and name != self.model:
            raise GenerationError(f"--model {name} is not the model that made the prompt cache ({self.model})")
        return name or self.model or ""

    def check_positions(self, positions: str) -> None:
        """Raises `GenerationError` if the loaded model's positions are set otherwise than when the cache was made."""
        if self.positions not in (None, positions):
            raise GenerationError(
                f"--prompt-cache-file {self.file} was made with another position mode, rotary setting or attention "
                "window than config.json has now; make it again with mlx_zip cache-prompt"
            )

    def check_kv_bits(self, bits: int | None, group_size: int) -> None:
        """Raises `GenerationError` if the cache is quantized otherwise than asked for. bits: None for any."""
        if bits is not None and isinstance(self.cache[0], QuantizedKVCache):
            saved = (self.cache[0].bits, self.cache[0].group_size)
            if saved != (bits, group_size):
                raise GenerationError(f"--kv-bits, --kv-group-size: the saved cache has {saved[0]} and {saved[1]}")


def read_prompt_cache(file: str) -> SavedCache:
    """Returns the prompt cache in a file. Raises `GenerationError` for a file that is no prompt cache."""
    if not Path(file).is_file():
        raise GenerationError(f"--prompt-cache-file {file}: no such file")
    try:
        cache, metadata = load_prompt_cache(file, return_metadata=True)
        metadata = dict(metadata)
        tokenizer_config = json.loads(metadata.get("tokenizer_config", "{}"))
    except MlxZipError:
        raise
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise GenerationError(f"--prompt-cache-file {file} is not a saved prompt cache: {error}") from error
    return SavedCache(file, cache, metadata.get("model"), tokenizer_config, metadata.get("positions"))
