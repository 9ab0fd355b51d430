"""Finds the parts of a checkpoint, on disk or on the hub, and checks their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.config import SELF_CONTAINED
from mlx_zip.converters import hub
from mlx_zip.converters.hub import Place
from mlx_zip.converters.tensors import Table, read_header, read_model_files, read_object
from mlx_zip.errors import ConversionError

ENCODER_FILES = ("zip2zip_encoders.safetensors", "encoders.safetensors")  # the first that exists, as upstream
CONFIG, ADAPTER_CONFIG, META = "zip2zip_config.json", "adapter_config.json", "meta.pt"
PARTIAL = "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A published zip2zip checkpoint.

    base: the place of decoder, config.json and tokenizer; the checkpoint itself in format 2. zip_config, base_config:
    the parsed JSON. decoder, encoders, partial: tensors by name; partial overrides the decoder. adapter: the PEFT
    folder or None. meta: its meta.pt or None.
    """

    place: Place
    base: Place
    zip_config: dict[str, Any]
    base_config: dict[str, Any]
    decoder: Table
    encoders: Table
    partial: Table
    adapter: Path | None
    meta: Path | None


def locate(path: str, revision: str | None) -> Place:
    """Returns the folder at `path`, or downloads the configuration files of that hub repository."""
    if (place := hub.local(path)) is None:
        return hub.fetch(path, revision, hub.CONFIGS)
    if revision is not None:
        raise ConversionError(f"{path} is a folder, so --revision {revision} does not apply")
    return place


def complete(place: Place) -> Place:
    """Downloads the rest of a hub repository, at the commit whose configuration was downloaded."""
    if place.revision is None:
        return place
    return hub.fetch(place.name, place.revision, hub.CHECKPOINT)


def is_converted(place: Place) -> bool:
    """Returns whether the folder is a converted model."""
    config = place.folder / "config.json"
    return config.is_file() and "zip2zip" in read_object(config)


def open_checkpoint(place: Place) -> Checkpoint:
    """Reads the configs and all headers of a checkpoint.

    Raises `ConversionError` for a missing or corrupt file, and for a folder of another kind.
    """
    folder = place.folder
    if not (folder / CONFIG).is_file():
        raise ConversionError(f"{place.name} has no {CONFIG}: {_other_kind(folder)}")
    place = complete(place)
    zip_config = read_object(folder / CONFIG)
    base = _base(place, zip_config)
    base_config = _base_config(base)
    contained = base.folder == folder
    adapter = folder if not contained and (folder / ADAPTER_CONFIG).is_file() else None
    has_partial = not contained and adapter is None and (folder / PARTIAL).is_file()
    meta = folder / META
    return Checkpoint(
        place=place,
        base=base,
        zip_config=zip_config,
        base_config=base_config,
        decoder=read_model_files(base.folder),
        encoders=_encoders(folder, zip_config),
        partial=read_header(folder / PARTIAL) if has_partial else {},
        adapter=adapter,
        meta=meta if meta.is_file() else None,
    )


def _other_kind(folder: Path) -> str:
    if (folder / ADAPTER_CONFIG).is_file():
        return "it is a PEFT adapter; convert it on its own with --lora-only"
    if (folder / "config.json").is_file():
        return "it is a plain model; convert it with mlx_lm.convert"
    return "it is not a zip2zip checkpoint"


def _base(place: Place, zip_config: dict[str, Any]) -> Place:
    """Finds the base model: ".", a folder relative to the config, any other folder, or a hub id, in this order."""
    name = zip_config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ConversionError(f"{CONFIG}: base_model_name_or_path must be a string, got {name!r}")
    if name == SELF_CONTAINED:
        return place
    if (beside := hub.local(place.folder / name)) is not None:
        return beside
    if (elsewhere := hub.local(name)) is not None:
        return elsewhere
    return hub.fetch(name, None, hub.BASE)


def _base_config(base: Place) -> dict[str, Any]:
    if not (base.folder / "config.json").is_file():
        raise ConversionError(f"the base model {base.name} has no config.json")
    config = read_object(base.folder / "config.json")
    for key in ("quantization", "quantization_config"):
        if config.get(key):
            raise ConversionError(f"the base model {base.name} is quantized ({key}); use its full-precision original")
    return config


def _encoders(folder: Path, zip_config: dict[str, Any]) -> Table:
    for name in ENCODER_FILES:
        if (folder / name).is_file():
            return read_header(folder / name)
    if zip_config.get("encoder_type") == "averaging":  # it has no parameters
        return {}
    raise ConversionError(f"no {' or '.join(ENCODER_FILES)} in {folder}")


def check_converted(place: Place) -> None:
    """Raises `ConversionError` if a converted model cannot be converted again."""
    if (place.folder / "adapters").is_dir():
        raise ConversionError(f"{place.name} keeps an adapter, which would be lost; convert its original instead")
