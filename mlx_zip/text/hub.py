"""The model hub: which files are fetched, what is a hub id, and one line when it fails.

Downloads follow the usual environment: HF_ENDPOINT, HF_HUB_OFFLINE and the cache folders.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mlx_zip.errors import MlxZipError, ModelError, first_line

TOKENIZER = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")  # file patterns of a tokenizer
CODE = ("*.py",)  # of a tokenizer or model that runs code of its own
WEIGHTS = ("model*.safetensors",)

_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """Returns whether a name has the form owner/name; a path with a leading dot, slash or tilde has not."""
    return _ID.fullmatch(name) is not None and not name.endswith((".", "/"))


def download(
    name: str,
    patterns: Sequence[str],
    revision: str | None = None,
    error: type[MlxZipError] = ModelError,
) -> Path:
    """Downloads the files of a hub repository that match `patterns` and returns their local folder, named by commit.

    Files in the cache are not fetched again. Raises `error` when the repository does not exist or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except hub_errors() as cause:
        raise error(f"{name} is not a local folder, and the hub did not give it: {first_line(cause)}") from cause


def hub_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that the hub client raises, those of the HTTP library that it uses included."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    return (OSError, HFValidationError, *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)))
