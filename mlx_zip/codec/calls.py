"""Functions of the C library that are called without cffi, because cffi would take longer than the functions' work.

`native/python.c` says what they do. All but `ids_of` return None instead of raising an error.
"""

from __future__ import annotations

from pathlib import Path

try:
    import mlx_zip.codec._native as native
except ModuleNotFoundError as error:
    if error.name != "mlx_zip.codec._native":
        raise
    sources = Path(__file__).parents[2]
    raise ImportError(
        f"{sources} has the sources of mlx_zip without its C extension: run `pip install -e .` there, "
        "or start Python in another folder"
    ) from error

if not hasattr(native.lib, "mlxzip_add_calls"):
    raise ImportError("mlx_zip's C extension is older than its Python code: run `pip install --no-deps -e .` again")
if native.lib.mlxzip_add_calls() != native.lib.MLXZIP_OK:
    raise MemoryError("the codec's functions could not be made: out of memory")

calls_for_one_id, words_of, ids_of = native.calls_for_one_id, native.words_of, native.ids_of
