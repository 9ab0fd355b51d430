"""Checkpoints on the model hub: which files of theirs are fetched, upload, and the card of a converted model."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from mlx_zip.errors import ConversionError, first_line
from mlx_zip.named import here_or_bundled
from mlx_zip.packs.pack import IN_ADAPTER, IN_FOLDER
from mlx_zip.text import hub

CONFIGS = ["zip2zip_config.json", "config.json", "adapter_config.json"]
BASE = [*hub.TOKENIZER, *hub.CODE, *hub.WEIGHTS]
CHECKPOINT = [
    *BASE,
    "zip2zip_encoders.safetensors",
    "encoders.safetensors",
    "adapter_model.safetensors",
    "meta.pt",
    "*/model*.safetensors",
    IN_FOLDER,
    IN_ADAPTER,
]
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")


@dataclass(frozen=True)
class Place:
    """A folder on disk and where it came from. name: hub id, or the local folder's name; revision: hub commit."""

    folder: Path
    name: str
    revision: str | None = None


def local(path: str | Path) -> Place | None:
    """Returns the folder at `path`, or else the bundled model of that name, or None if there is neither."""
    folder = here_or_bundled(path)
    return Place(folder, folder.resolve().name) if os.path.isdir(folder) else None


def fetch(name: str, revision: str | None, patterns: list[str]) -> Place:
    """Returns the local copy of a hub repository's files that match `patterns`; downloads those not in the cache.

    name: the repository's hub id. revision: branch, tag or commit, None for the main branch.
    Raises `ConversionError` when `name` is neither a folder nor a repository that can be reached.
    """
    if not _REPOSITORY.fullmatch(name) or set(name) == {"."}:
        raise ConversionError(f"{name} is neither a folder nor a hub id")
    folder = hub.download(name, patterns, revision, ConversionError)
    return Place(folder, name, folder.name)


def list_files(place: Place) -> list[str]:
    """Returns the names of all files of a hub repository at the place's commit. Raises `ConversionError`."""
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(place.name, revision=place.revision)
    except hub.hub_errors() as error:
        raise ConversionError(f"the hub does not list the files of {place.name}: {first_line(error)}") from error


def upload(folder: Path, repository: str) -> None:
    """Creates the repository if needed and uploads the folder to it in one commit.

    Raises `ConversionError` when the hub refuses or cannot be reached; the folder stays as it is.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Add model converted by mlx_zip")
    except hub.hub_errors() as error:
        raise ConversionError(
            f"{folder} is converted, but could not be uploaded to {repository}: {first_line(error)}"
        ) from error


def check_repository(name: str) -> None:
    """Raises `ConversionError` when a repository to upload to cannot have this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConversionError(f"--upload-repo {name!r} is not a hub id: {first_line(error)}") from error
    if not name:
        raise ConversionError("--upload-repo is empty; name a hub id, owner/name")


def model_card(source: Place, base: Place, version: str) -> str:
    """Returns the text of README.md for a converted model. source: the checkpoint. base: its base model."""
    names = dict.fromkeys(place.name for place in (source, base) if place.revision)
    based_on = "".join(f"- {name}\n" for name in names)
    return (
        "---\nlibrary_name: mlx\npipeline_tag: text-generation\ntags:\n- mlx\n- mlx_zip\n- zip2zip\n"
        + (f"base_model:\n{based_on}" if based_on else "")
        + f"---\n\n# {source.name}, converted for mlx_zip\n\n"
        "A zip2zip model: while it reads and writes, recurring token runs become hypertokens, so the same text takes\n"
        "fewer steps. This folder was made by `mlx_zip convert` "
        f"{version}; what it was made from is recorded in the `zip2zip`\nsection of `config.json`.\n\n"
        "```bash\npip install .  # in a clone of mlx_zip\n"
        'mlx_zip generate --model <this folder or repository> --prompt "Hello"\n```\n\n'
        "It runs with mlx_zip; `mlx_lm.generate`, `chat` and `server` cannot turn hypertokens into text.\n"
        "The licence is that of the models above.\n"
    )
