"""Describes the extension module `mlx_zip.codec._native` to cffi; `setup.py` has it built."""

from __future__ import annotations

import os
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
SOURCES = ["params.c", "compress.c", "codebook.c", "read.c", "bytes.c"]


def contract() -> str:
    """The part of `mlxzip.h` between its markers, which is plain enough for cffi."""
    header = (HERE / "mlxzip.h").read_text(encoding="utf-8")
    return header.split("/* BEGIN CFFI */")[1].split("/* END CFFI */")[0]


ffi = FFI()
ffi.cdef(contract())
ffi.set_source(
    "mlx_zip.codec._native",
    '#include "mlxzip.h"',
    sources=[os.path.relpath(HERE / name) for name in SOURCES],
    include_dirs=[os.path.relpath(HERE)],
    depends=[os.path.relpath(path) for path in sorted(HERE.glob("*.h"))],
    extra_compile_args=["-O3", "-std=c11"],
)
