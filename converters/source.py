"""Finds the parts of a checkpoint, on disk or on the hub, and checks their files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.config import SELF_CONTAINED
from mlx_zip.converters.gguf.gguf_file import is_gguf
from mlx_zip.converters.tensors import (
    Tensors,
    list_some_names,
    read_folder_tensors,
    read_json_object_strictly,
    read_tensors,
)
from mlx_zip.errors import ConversionError, first_message_line
from mlx_zip.files import expand_home
from mlx_zip.models.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, UPSTREAM_ENCODERS
from mlx_zip.models.model_folder import UPSTREAM_CONFIG_NAME as CONFIG
from mlx_zip.named import resolve_model_name
from mlx_zip.packs.pack import IN_ADAPTER, IN_FOLDER
from mlx_zip.text import hub

ENCODER_FILES = (UPSTREAM_ENCODERS, "encoders.safetensors")  # the first that exists is read, as in zip2zip
META, PARTIAL = "meta.pt", "model.safetensors"
CONFIG_FILES = [CONFIG, "config.json", ADAPTER_CONFIG]
BASE_FILES = [*hub.TOKENIZER, *hub.CODE, *hub.WEIGHTS]
CHECKPOINT_FILES = [
    *BASE_FILES,
    *ENCODER_FILES,
    ADAPTER_WEIGHTS,
    META,
    "*/model*.safetensors",
    IN_FOLDER,
    IN_ADAPTER,
]
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")


@dataclass(frozen=True)
class ModelPlace:
    """A folder on disk and its origin. name: hub id, or the folder's name. revision: hub commit, None if local."""

    folder: Path
    name: str
    revision: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A published zip2zip checkpoint.

    base: the place of decoder, config.json and tokenizer; in format 2 equal to `place`. zip_config: the content of
    zip2zip_config.json. base_config: the content of the base's config.json. decoder, encoders: tensors by name.
    partial: tensors that replace tensors of the decoder, {} for none. adapter: the folder of a PEFT adapter, or None.
    meta: the path of meta.pt, or None.
    """

    place: ModelPlace
    base: ModelPlace
    zip_config: dict[str, Any]
    base_config: dict[str, Any]
    decoder: Tensors
    encoders: Tensors
    partial: Tensors
    adapter: Path | None
    meta: Path | None


def locate_model(path: str, revision: str | None) -> ModelPlace:
    """Returns the place of the model `path`: a local folder or file, or a hub id, whose config files are downloaded.

    For a GGUF file, and for a folder or repository that holds a GGUF file and no other model, the result's `folder` is
    the path of this file. Raises `ConversionError` if no model is found, or if `revision` is given for a local path.
    """
    place = locate_local_model(path)
    if place is None and not os.path.isfile(expand_home(path)):
        return _locate_on_hub(path, revision)
    if revision is not None:
        kind = "file" if place is None else "folder"
        raise ConversionError(f"{path} is a {kind}, so --revision {revision} does not apply")
    if place is None:
        file = expand_home(path)
        if not is_gguf(file):
            raise ConversionError(f"{path} is neither a folder nor a GGUF file")
        return ModelPlace(file, file.name)
    if _is_checkpoint(place):
        return place
    name = _find_only_gguf(path, [file.name for file in place.folder.iterdir() if file.is_file()])
    return place if name is None else ModelPlace(place.folder / name, name)


def locate_local_model(path: str | Path) -> ModelPlace | None:
    """Returns the place of the folder `path`, else of the bundled model named `path`, else None."""
    folder = resolve_model_name(path)
    return ModelPlace(folder, folder.resolve().name) if os.path.isdir(folder) else None


def download_to_cache(name: str, revision: str | None, patterns: list[str]) -> ModelPlace:
    """Returns the local copy of a hub repository's files that match `patterns`; downloads files not in the cache.

    name: the repository's hub id. revision: branch, tag or commit, None for the main branch. Raises `ConversionError`
    if `name` is not a hub id or the repository cannot be reached.
    """
    if not _REPOSITORY.fullmatch(name) or set(name) == {"."}:
        raise ConversionError(f"{name} is neither a folder nor a hub id")
    folder = hub.download_files(name, patterns, revision, ConversionError)
    return ModelPlace(folder, name, folder.name)


def list_hub_files(place: ModelPlace) -> list[str]:
    """Returns the names of all files of a hub repository at `place.revision`. Raises `ConversionError` if it fails."""
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(place.name, revision=place.revision)
    except hub.hub_error_types() as error:
        raise ConversionError(
            f"the hub does not list the files of {place.name}: {first_message_line(error)}"
        ) from error


def _is_checkpoint(place: ModelPlace) -> bool:
    return (place.folder / CONFIG).is_file() or (place.folder / ADAPTER_CONFIG).is_file() or is_converted_model(place)


def _locate_on_hub(name: str, revision: str | None) -> ModelPlace:
    """Returns the place of a hub repository, or of a GGUF file in the repository, which is downloaded.

    name: a hub id, or owner/name/FILE.gguf. For a hub id, returns the GGUF file if the repository has no other model.
    """
    repository, _, file = name.rpartition("/")
    if _is_named_gguf(file):
        if repository.count("/") != 1 or name.startswith((".", "/", "~")):
            raise ConversionError(f"{name}: no such file; on the hub, a GGUF file is owner/name/FILE.gguf")
        return _download_gguf(download_to_cache(repository, revision, [file]), file)
    place = download_to_cache(name, revision, CONFIG_FILES)
    if _is_checkpoint(place):
        return place
    found = _find_only_gguf(name, list_hub_files(place))
    return place if found is None else _download_gguf(download_to_cache(name, place.revision, [found]), found)


def _download_gguf(place: ModelPlace, file: str) -> ModelPlace:
    if not (place.folder / file).is_file():
        raise ConversionError(f"{place.name} has no file {file}")
    return ModelPlace(place.folder / file, f"{place.name}/{file}", place.revision)


def _is_named_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _find_only_gguf(where: str, names: list[str]) -> str | None:
    """Returns the only GGUF file among `names`; None if there is no GGUF file, or if there are safetensors files.

    where: name of the place, for messages. Raises `ConversionError` if there are several GGUF files.
    """
    found = sorted(filter(_is_named_gguf, names))
    if not found or any(name.endswith(".safetensors") for name in names):
        return None
    if len(found) > 1:
        raise ConversionError(
            f"{where} holds {len(found)} GGUF files; name one of them, {where}/FILE: {list_some_names(found, 40)}"
        )
    return found[0]


def download_all_files(place: ModelPlace) -> ModelPlace:
    """Returns the place of a checkpoint with all its files; downloads them at `place.revision` if it is on the hub."""
    if place.revision is None:
        return place
    return download_to_cache(place.name, place.revision, CHECKPOINT_FILES)


def is_converted_model(place: ModelPlace) -> bool:
    """Returns whether the folder is a model that mlx_zip wrote: its config.json has a zip2zip section."""
    config = place.folder / "config.json"
    return config.is_file() and "zip2zip" in read_json_object_strictly(config)


def check_needs_base(place: ModelPlace) -> None:
    """Raises `ConversionError` unless the place is a checkpoint that needs a base model, so that --base applies."""
    config = place.folder / CONFIG
    if not place.folder.is_dir() or is_converted_model(place) or not config.is_file():
        raise ConversionError(f"--base: {place.name} is no zip2zip checkpoint that needs a base model")
    if read_json_object_strictly(config).get("base_model_name_or_path") == SELF_CONTAINED:
        raise ConversionError(f"--base: {place.name} holds its own base model")


def open_checkpoint(place: ModelPlace, base: ModelPlace | None = None) -> Checkpoint:
    """Reads the configs of a checkpoint and its tensors, lazily.

    base: the base model's place, None for the one that the checkpoint names. Raises `ConversionError` if a file is
    missing or corrupt, or if the folder is not a zip2zip checkpoint.
    """
    folder = place.folder
    if not (folder / CONFIG).is_file():
        raise ConversionError(f"{place.name} has no {CONFIG}: {_describe_other_kind(folder)}")
    place = download_all_files(place)
    zip_config = read_json_object_strictly(folder / CONFIG)
    base = base or _locate_base_of_checkpoint(place, zip_config)
    base_config = _read_base_config(base)
    contained = base.folder == folder
    adapter = folder if not contained and (folder / ADAPTER_CONFIG).is_file() else None
    has_partial = not contained and adapter is None and (folder / PARTIAL).is_file()
    meta = folder / META
    return Checkpoint(
        place=place,
        base=base,
        zip_config=zip_config,
        base_config=base_config,
        decoder=read_folder_tensors(base.folder),
        encoders=_read_encoder_tensors(folder, zip_config),
        partial=read_tensors(folder / PARTIAL) if has_partial else {},
        adapter=adapter,
        meta=meta if meta.is_file() else None,
    )


def _describe_other_kind(folder: Path) -> str:
    if (folder / ADAPTER_CONFIG).is_file():
        return "it is a PEFT adapter; convert it on its own with --lora-only"
    if (folder / "config.json").is_file():
        return "it is a plain model; convert it with mlx_lm.convert"
    return "it is not a zip2zip checkpoint"


def _locate_base_of_checkpoint(place: ModelPlace, zip_config: dict[str, Any]) -> ModelPlace:
    """Returns the place of the base model that the checkpoint's config names.

    The name may be "." for the checkpoint itself, a folder relative to the checkpoint, any other folder, or a hub id,
    and is tried as each in this order.
    """
    name = zip_config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ConversionError(f"{CONFIG}: base_model_name_or_path must be a string, got {name!r}")
    if name == SELF_CONTAINED:
        return place
    if (relative := locate_local_model(place.folder / name)) is not None:
        return relative
    if (elsewhere := locate_local_model(name)) is not None:
        return elsewhere
    return download_to_cache(name, None, BASE_FILES)


def _read_base_config(base: ModelPlace) -> dict[str, Any]:
    if not (base.folder / "config.json").is_file():
        raise ConversionError(f"the base model {base.name} has no config.json")
    config = read_json_object_strictly(base.folder / "config.json")
    for key in ("quantization", "quantization_config"):
        if config.get(key):
            raise ConversionError(f"the base model {base.name} is quantized ({key}); use its full-precision original")
    return config


def _read_encoder_tensors(folder: Path, zip_config: dict[str, Any]) -> Tensors:
    """Returns the tensors of the encoder file; {} for an averaging encoder, which has no file.

    Raises `ConversionError` if the file is missing or invalid.
    """
    for name in ENCODER_FILES:
        if (folder / name).is_file():
            return read_tensors(folder / name)
    if zip_config.get("encoder_type") == "averaging":  # no parameters
        return {}
    raise ConversionError(f"no {' or '.join(ENCODER_FILES)} in {folder}")
