"""One loader of tokenizers: any published format, a model's folder, a bundled model's name or a hub id."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError, bare_exceptions_as_value_errors, first_line
from mlx_zip.named import KNOWN, here_or_bundled
from mlx_zip.text import hub
from mlx_zip.text.formats import KINDS, is_tokenizer_file, pair_in, read_library, special_names
from mlx_zip.text.tokenizer import Tokenizer
from mlx_zip.vocab.adaptbpe.plain import follow_folder
from mlx_zip.vocab.first_stage import open_tokenizer

_SETTINGS = ("tokenizer.json", "tokenizer_config.json", "config.json")  # a folder for transformers has one of these


def load_tokenizer(name: str | Path, trust_remote_code: bool = False) -> Tokenizer:
    """Returns the tokenizer of a folder, a tokenizer file (`formats.KINDS`), a bundled model's name or a hub id.

    An adapted model's folder gives the adapted vocabulary's exact ids. A tokenizer.json is read together with the
    settings and the chat template in its folder. Raises `DataError`.
    """
    file = _lone_file(here_or_bundled(name))
    if file is not None:
        return Tokenizer(_wrapped(read_library(file)))
    from transformers import AutoTokenizer

    folder = tokenizer_folder(name, trust_remote_code)
    try:
        with quiet_transformers(), bare_exceptions_as_value_errors():
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
            follow_folder(getattr(tokenizer, "backend_tokenizer", None), folder)
            return Tokenizer(tokenizer)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, RecursionError) as error:
        reason = damaged_json(folder) or _lacking(folder) or first_line(error)[:300]
        raise DataError(f"the tokenizer in {folder} cannot be loaded: {reason}") from error


def damaged_json(folder: Path) -> str | None:
    """Returns which JSON file of a model's folder holds no object, and why; None if each that is there holds one.

    The libraries that load a model do not say which file they could not read.
    """
    for name in _SETTINGS:
        file = folder / name
        try:
            if file.is_file() and not isinstance(json.loads(file.read_bytes()), dict):
                return f"{name} holds no JSON object"
        except (OSError, ValueError, RecursionError) as error:
            return f"{name} is not valid JSON: {first_line(error)}"
    return None


def _lacking(folder: Path) -> str | None:
    """Returns that a folder has no tokenizer file, and which there can be; None if it has one."""
    if any(is_tokenizer_file(file) for file in folder.iterdir()):
        return None
    return f"it has no tokenizer file ({KINDS})"


def tokenizer_folder(name: str | Path, trust_remote_code: bool = False) -> Path:
    """Returns the folder of a tokenizer; of a hub id only the tokenizer's files are downloaded.

    name: a folder, a tokenizer.json, a bundled model's name or a hub id. Raises `DataError`, without asking the hub if
    the name is no hub id.
    """
    path = here_or_bundled(name)
    if path.name == "tokenizer.json" and path.is_file():
        return path.parent
    if path.is_dir():
        return path
    if path.exists() or names_a_file(str(name)):
        raise DataError(
            f"{name}: no folder with a tokenizer, no tokenizer file ({KINDS}), not bundled ({', '.join(KNOWN)}), and "
            "no hub id of the form owner/name"
        )
    patterns = (*hub.TOKENIZER, *(hub.CODE if trust_remote_code else ()))
    return hub.download(str(name), patterns, error=DataError)


def names_a_file(name: str) -> bool:
    """Returns whether a name can only be a local path, because it has not the form of a hub id."""
    return not hub.is_hub_id(name)


def token_bytes(name: str | Path) -> list[bytes]:
    """Returns the bytes of each id of a byte-level tokenizer; b"" for special ids and ids without a token.

    name: as of `load_tokenizer`, or a .json list of tokens in hex. Raises `DataError`.
    """
    path = here_or_bundled(name)
    if path.is_dir() or not path.exists():
        path = tokenizer_folder(name)
        path = path / "tokenizer.json" if (path / "tokenizer.json").is_file() else pair_in(path) or path
    return open_tokenizer(path).tokens()


def _lone_file(path: Path) -> Path | None:
    """Returns the tokenizer file to read without transformers' settings, None if transformers should read `path`.

    That file is `path` itself, unless it is a tokenizer.json, or one of GPT-2's two files in a folder without settings.
    """
    if path.is_dir():
        return None if any((path / name).is_file() for name in _SETTINGS) else pair_in(path)
    return path if is_tokenizer_file(path) and path.is_file() and path.name != "tokenizer.json" else None


def _wrapped(library: Any) -> Any:
    """Returns a `tokenizers.Tokenizer` as a transformers tokenizer, with the special tokens of its vocabulary."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=library, **special_names(library))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' warnings about our model type and its rope settings while a tokenizer is loaded."""
    logger = logging.getLogger("transformers.configuration_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
            yield
    finally:
        logger.setLevel(level)
