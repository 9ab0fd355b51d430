"""The base model that a caller names for a checkpoint, as a folder of unquantized weights."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mlx_zip.converters import hub, source
from mlx_zip.converters.gguf import convert_gguf
from mlx_zip.converters.hub import Place
from mlx_zip.converters.quantization import Recipe


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
    unpacked = out.with_name(f".{out.name}.partial-{os.getpid()}-base")
    try:
        convert_gguf(place, unpacked, "float32", Recipe(dequantize=True), progress)
        yield Place(unpacked, place.name, place.revision)
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
