"""Describes the extension module `mlx_zip.codec._native` to cffi; `setup.py` has it built."""

from __future__ import annotations

import os
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
SOURCES = [
    "params.c",
    "compress.c",
    "turns.c",
    "codebook.c",
    "read.c",
    "bytes.c",  # the codec
    "rows.c",
    "phrases.c",
    "phrases_encode.c",
    "pieces.c",
    "bpe.c",
    "patches.c",
    "lookup.c",
    "python.c",
]
HEADERS = ["mlxzip.h", "rows.h", "phrases.h", "bpe.h", "patches.h", "lookup.h", "python.h"]


def contract() -> str:
    """Returns the parts of the headers between their CFFI markers, which cffi can parse."""
    headers = [(HERE / name).read_text(encoding="utf-8") for name in HEADERS]
    return "".join(text.split("/* BEGIN CFFI */")[1].split("/* END CFFI */")[0] for text in headers)


ffi = FFI()
ffi.cdef(contract())
ffi.set_source(
    "mlx_zip.codec._native",
    "".join(f'#include "{name}"\n' for name in HEADERS),
    sources=[os.path.relpath(HERE / name) for name in SOURCES],
    include_dirs=[os.path.relpath(HERE)],
    depends=[os.path.relpath(path) for path in sorted(HERE.glob("*.h"))],
    extra_compile_args=["-O3", "-std=c11"],
)
