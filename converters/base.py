"""The base model that a caller names for a checkpoint, as a folder of unquantized weights."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_zip.converters import hub, output, source
from mlx_zip.converters.gguf import convert_gguf
from mlx_zip.converters.hub import Place
from mlx_zip.converters.quantization import Recipe
from mlx_zip.converters.tensors import read_object
from mlx_zip.converters.tokenizer_files import FILES
from mlx_zip.files import write_json


@contextlib.contextmanager
def base_folder(base: str | None, out: Path, progress: bool) -> Iterator[Place | None]:
    """Gives the place of the base model that the caller names, None for None.

    base: a folder, a hub id or a GGUF file. The weights of a GGUF file are unpacked to float32 in a temporary folder
    next to `out`, which is removed after the block. Raises `ConversionError`.
    """
    if base is None:
        yield None
        return
    place = source.locate(base, None)
    if not place.folder.is_file():
        yield place if place.revision is None else hub.fetch(place.name, place.revision, hub.BASE)
        return
    packed, unpacked = (out.with_name(f".{out.name}.partial-{os.getpid()}-{kind}") for kind in ("packed", "base"))
    try:
        convert_gguf(place, packed, "float32", Recipe(), progress)
        _unpack(packed, unpacked)
        shutil.rmtree(packed)
        yield Place(unpacked, place.name, place.revision)
    finally:
        for folder in (packed, unpacked):
            shutil.rmtree(folder, ignore_errors=True)


def _unpack(packed: Path, out: Path) -> None:
    """Writes a converted plain model as the new folder `out`, without quantization, tensor by tensor.

    `convert_gguf` would read the same values, but needs the library gguf for them.
    """
    config = read_object(packed / "config.json")
    section = config.pop("quantization", {})
    config.pop("quantization_config", None)
    with output.new_folder(out) as folder:
        weights = _dense(packed, section)
        output.write_model(folder, weights, sum(array.size for array in weights.values()), lambda *_: None)
        write_json(folder / "config.json", config)
        for file in (file for pattern in FILES for file in packed.glob(pattern)):
            shutil.copyfile(file, folder / file.name)


def _dense(folder: Path, section: dict[str, Any]) -> dict[str, mx.array]:
    """Returns a model's tensors, the packed ones unpacked lazily. section: the config's `quantization`."""
    found: dict[str, mx.array] = {}
    for file in folder.glob("model*.safetensors"):
        found |= mx.load(str(file))  # type: ignore[arg-type]
    for path in [name.removesuffix(".scales") for name in found if name.endswith(".scales")]:
        how = {**section, **section.get(path, {})}
        parts = (found[f"{path}.weight"], found.pop(f"{path}.scales"), found.pop(f"{path}.biases"))
        found[f"{path}.weight"] = mx.dequantize(*parts, group_size=how["group_size"], bits=how["bits"])
    return found
