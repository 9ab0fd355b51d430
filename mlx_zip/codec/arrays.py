"""Reads .npy and .npz files of unknown origin: no pickle is executed, and a damaged file raises `DataError`."""

from __future__ import annotations

import lzma
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.errors import DataError
from mlx_zip.files import check_regular_file

_MAGIC = (b"PK\x03\x04", b"PK\x05\x06", b"\x93NUMPY")  # first bytes of an archive, an empty archive, an array
_DAMAGE = (  # RuntimeError: encrypted archive or unknown compression; MemoryError: huge shape in a damaged header
    OSError,
    ValueError,
    EOFError,
    OverflowError,
    RuntimeError,
    MemoryError,
    TypeError,
    TokenError,
    SyntaxError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


def read_npz(path: Path, what: str, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
    """Returns the arrays of a .npz file by name.

    what: the expected kind of file, for the message. names: arrays to read if the file has them, None for all. Raises
    `DataError` naming the file if it cannot be read.
    """
    with _read_errors_as_data_errors(path, what):
        _check_npy_or_npz(path)
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"{path} cannot be read as {what}: it is not an archive of arrays")
        with archive:
            found = {name: archive[name] for name in archive.files if names is None or name in names}
    if other := [name for name, array in found.items() if not isinstance(array, np.ndarray)]:
        raise DataError(f"{path} cannot be read as {what}: {other[0]!r:.40} in it is not an array")
    return found


def read_npy(path: Path, what: str) -> NDArray[Any]:
    """Returns the array of a .npy file. Parameters and errors are those of `read_npz`."""
    with _read_errors_as_data_errors(path, what):
        _check_npy_or_npz(path)
        array = np.load(path, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        array.close()
        raise DataError(f"{path} cannot be read as {what}: it is an archive of arrays, whose name ends with .npz")
    return array


def _check_npy_or_npz(path: Path) -> None:
    """Raises `ValueError` for a file that begins neither as .npz nor as .npy; NumPy would take it for a pickle."""
    with open(path, "rb") as file:
        if not file.read(6).startswith(_MAGIC):
            raise ValueError("it is neither a .npz nor a .npy file")


@contextmanager
def _read_errors_as_data_errors(path: Path, what: str) -> Iterator[None]:
    """Context manager: turns any error of reading a damaged file into a `DataError` that names the file.

    what: the expected kind of file, for the message.
    """
    try:
        check_regular_file(path)
        yield
    except DataError:
        raise
    except _DAMAGE as error:
        reason = getattr(error, "strerror", None) or str(error)
        reason = "it holds Python objects, not numbers" if "allow_pickle" in reason else reason
        raise DataError(f"{path} cannot be read as {what}: {reason}") from error
