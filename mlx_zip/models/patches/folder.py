"""Folders of trained patch models. A folder has all that generation needs:

    config.json        model_type, version, sizes, context length of the training, sha256 of the weights, source
    model.safetensors  weights, float32
    table.npz          the patches of the first stage's tokens (`PatchTable`)
    tokenizer.json     the first stage; one of its tokens has no bytes and ends a document

mlx-lm cannot read these folders; `mlx_zip vocab hbpe` does. The files are checked against each other when read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

import mlx_zip
from mlx_zip.errors import ConfigError, DataError, ModelError
from mlx_zip.files import at_home, whole_folder, write_json
from mlx_zip.models.patches.model import PatchConfig, PatchModel
from mlx_zip.vocab.hbpe.table import PatchTable
from mlx_zip.vocab.hbpe.text import PatchText, read_tokenizer

MODEL_TYPE, VERSION = "hbpe", 1
CONFIG, WEIGHTS, TABLE, TOKENIZER = "config.json", "model.safetensors", "table.npz", "tokenizer.json"


@dataclass(frozen=True)
class SavedPatchModel:
    """The content of a folder.

    text: converts text to patches and back. context: patches per training window. source: a record of the training's
    texts and steps.
    """

    model: PatchModel
    text: PatchText
    context: int
    source: Mapping[str, Any]


def save_patch_model(folder: Path, saved: SavedPatchModel) -> None:
    """Writes the folder completely or not at all, replacing an older one. Raises `ModelError` when writing fails."""
    named: Any = tree_flatten(saved.model.parameters())
    try:
        with whole_folder(folder) as partial:
            mx.save_safetensors(str(partial / WEIGHTS), dict(named))
            saved.text.table.save(partial / TABLE)
            (partial / TOKENIZER).write_text(saved.text.tokenizer.to_str(), encoding="utf-8")
            write_json(
                partial / CONFIG,
                {
                    "model_type": MODEL_TYPE,
                    "version": VERSION,
                    "sizes": saved.model.config.to_dict(),
                    "context": saved.context,
                    "weights_sha256": _digest(partial / WEIGHTS),
                    "source": saved.source,
                    "mlx_zip": mlx_zip.__version__,
                },
            )
    except (OSError, RuntimeError) as error:
        raise ModelError(f"cannot write {folder}: {error}") from error


def load_patch_model(folder: str | Path) -> SavedPatchModel:
    """Returns the model that `save_patch_model` wrote to a folder.

    Raises `ConfigError`, `DataError` or `ModelError` naming the file that is missing, damaged or of another model.
    """
    folder = at_home(folder)
    config = _config(folder / CONFIG)
    try:
        sizes = PatchConfig.from_dict(config["sizes"])
    except ConfigError as error:
        raise ConfigError(f"{folder / CONFIG}: {error}") from error
    tokenizer, table = read_tokenizer(folder / TOKENIZER), PatchTable.load(folder / TABLE)
    try:
        text = PatchText(tokenizer, table)
    except DataError as error:
        raise DataError(f"{folder}: {error}") from error
    merges = text.table.merges
    if (merges.symbols, merges.patch_size) != (sizes.symbols, sizes.patch_size):
        raise ConfigError(
            f"{folder / CONFIG} describes patches of {sizes.patch_size} out of {sizes.symbols} symbols, "
            f"but {TABLE} has patches of {merges.patch_size} out of {merges.symbols}"
        )
    model = PatchModel(sizes)
    _load_weights(model, folder / WEIGHTS, config["weights_sha256"])
    return SavedPatchModel(model, text, config["context"], config["source"])


def _config(path: Path) -> dict[str, Any]:
    """Returns a patch model's config.json, its keys and types checked. Raises `ConfigError`."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != MODEL_TYPE:
        raise ConfigError(f"{path} is not the config of a patch model: its model_type is {kind!r}, not {MODEL_TYPE!r}")
    if (version := config.get("version")) != VERSION or isinstance(version, bool):
        raise ConfigError(f"{path} has version {version!r}, this mlx_zip reads {VERSION}")
    kinds = {"sizes": dict, "context": int, "weights_sha256": str, "source": dict}
    if wrong := [name for name, kind in kinds.items() if type(config.get(name)) is not kind]:
        raise ConfigError(f"{path}: {', '.join(wrong)} missing or of another type")
    if config["context"] < 1:
        raise ConfigError(f"{path}: context must be at least 1, got {config['context']}")
    return config


def _load_weights(model: PatchModel, path: Path, digest: str) -> None:
    """Loads a weights file into a model. Raises `ModelError` unless it has this sha256 and exactly the model's tensors.

    digest: the sha256 as hex, from config.json.
    """
    try:
        if _digest(path) != digest:
            raise ModelError(f"{path} is damaged, or not the file that {CONFIG} in the folder was written with")
        weights: Any = mx.load(str(path))
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    named: Any = tree_flatten(model.parameters())
    wanted = {name: value.shape for name, value in named}
    if found := wanted.items() ^ {name: value.shape for name, value in weights.items()}.items():
        raise ModelError(f"{path} does not hold the weights that {CONFIG} describes: {sorted(found)[0][0]}")
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())


def _digest(path: Path) -> str:
    """Returns the sha256 of a file as hex."""
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()
