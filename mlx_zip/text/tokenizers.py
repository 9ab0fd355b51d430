"""One loader of tokenizers: a folder, a tokenizer.json, a bundled model's name or a hub id, to a `Tokenizer`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_zip.bundled import here_or_bundled
from mlx_zip.errors import DataError, bare_exceptions_as_value_errors
from mlx_zip.text import hub
from mlx_zip.text.tokenizer import Tokenizer
from mlx_zip.vocab.adaptbpe.plain import follow_folder


def load_tokenizer(name: str | Path, trust_remote_code: bool = False) -> Tokenizer:
    """Loads the tokenizer of a name as `tokenizer_folder` finds it; an adapted model's tokenizer gives its exact ids.

    Raises `DataError`.
    """
    from transformers import AutoTokenizer

    folder = tokenizer_folder(name, trust_remote_code)
    try:
        with quiet_transformers(), bare_exceptions_as_value_errors():
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
            follow_folder(getattr(tokenizer, "backend_tokenizer", None), folder)
            return Tokenizer(tokenizer)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        first = " ".join(str(error).split())[:300]
        raise DataError(f"the tokenizer in {folder} cannot be loaded: {first}") from error


def tokenizer_folder(name: str | Path, trust_remote_code: bool = False) -> Path:
    """Returns the folder of a tokenizer: `name` itself, the folder of a tokenizer.json, a bundled model's, or the
    downloaded one of a hub id, of which only the tokenizer's files are fetched.

    Raises `DataError`.
    """
    path = here_or_bundled(name)
    if path.name == "tokenizer.json" and path.is_file():
        return path.parent
    if path.is_dir():
        return path
    if path.exists() or not hub.is_hub_id(str(name)):
        raise DataError(f"{name}: no folder with a tokenizer, no tokenizer.json, and no hub id of the form owner/name")
    patterns = (*hub.TOKENIZER, *(hub.CODE if trust_remote_code else ()))
    return hub.download(str(name), patterns, error=DataError)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences what transformers warns of while it loads a tokenizer: our model type and the spelling of its rope."""
    logger = logging.getLogger("transformers.configuration_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
            yield
    finally:
        logger.setLevel(level)
