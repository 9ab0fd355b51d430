"""Where a model's folder is, and its config.json; needs neither MLX nor mlx-lm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError, ModelError, first_line
from mlx_zip.files import check_in
from mlx_zip.models.register import MODEL_TYPE
from mlx_zip.named import KNOWN, here_or_bundled
from mlx_zip.packs.pack import IN_FOLDER
from mlx_zip.text import hub

UPSTREAM_CONFIG = "zip2zip_config.json"
_MODEL_FILES = (*hub.TOKENIZER, *hub.CODE, *hub.WEIGHTS, IN_FOLDER, "*.jsonl")


def model_folder(path_or_hf_repo: str | Path, revision: str | None = None) -> Path:
    """Returns the local folder of a model, given a folder, a name of `named.KNOWN` or a hub id, tried in that order.

    A model on the hub is downloaded first, and a model of `named.MADE` is made the first time. revision: the hub's
    branch, tag or commit. Raises `ModelError`, and `MlxZipError` for a model that cannot be made.
    """
    path, name = here_or_bundled(path_or_hf_repo), str(path_or_hf_repo)
    if os.path.isdir(path):  # unlike Path.is_dir, does not raise for a name that is no valid path
        if revision is not None:
            raise ModelError(f"{path_or_hf_repo} is a folder, so revision (--revision) {revision} does not apply")
        return _checked_folder(path)
    if os.path.isfile(path) and name.lower().endswith(".gguf"):
        raise ModelError(f"{name} is a GGUF file; convert it first: mlx_zip convert --hf-path {name}")
    if os.path.exists(path) or not hub.is_hub_id(name):
        raise ModelError(f"{name}: no such model folder, nor bundled ({', '.join(KNOWN)}), nor a hub id owner/name")
    _checked_folder(hub.download(name, ["*.json"], revision))  # refuses a wrong kind of model before gigabytes arrive
    return hub.download(name, _MODEL_FILES, revision)


def _checked_folder(folder: Path) -> Path:
    """Returns the folder. Raises `ModelError` if it has no config.json or is a zip2zip checkpoint not yet converted."""
    config = folder / "config.json"
    if (folder / UPSTREAM_CONFIG).exists() and (
        not config.exists() or read_config(folder).get("model_type") != MODEL_TYPE
    ):
        raise ModelError(
            f"{folder} is a zip2zip checkpoint as published; convert it first: mlx_zip convert --hf-path {folder}"
        )
    if not config.exists():
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Returns a folder's config.json. Raises `ModelError` if it cannot be read or names no model_type."""
    try:
        check_in(folder / "config.json")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, DataError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {first_line(error)}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder / 'config.json'} names no model_type")
    return config


def is_plain(name: str, revision: str | None = None) -> bool:
    """Returns whether a model's config says that it has no hypertokens. Raises `ModelError`."""
    return read_config(model_folder(name, revision))["model_type"] != MODEL_TYPE
