"""Functions of the C library that are called without cffi, because cffi's calls would take longer than their work.

`native/python.c` says what they do. All return None instead of raising an error.
"""

from __future__ import annotations

import mlx_zip.codec._native as native

if not hasattr(native.lib, "mlxzip_add_python_calls"):
    raise ImportError("mlx_zip's C extension is older than its Python code: run `pip install --no-deps -e .` again")
if native.lib.mlxzip_add_python_calls() != native.lib.MLXZIP_OK:
    raise MemoryError("the codec's functions could not be made: out of memory")

calls_for_one_id, words_of = native.calls_for_one_id, native.words_of
