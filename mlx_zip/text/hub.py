"""Access to the hub: downloads files, recognizes hub ids, iterates over data sets, and reports failures in one line.

Downloads follow the usual environment: HF_ENDPOINT, HF_HUB_OFFLINE and the cache folders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from mlx_zip.errors import DataError, MlxZipError, ModelError, first_message_line, import_or_explain
from mlx_zip.files import check_regular_file

TOKENIZER = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")  # file patterns of a tokenizer
CODE = ("*.py",)  # of a tokenizer or model that runs code of its own
WEIGHTS = ("model*.safetensors",)

_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """Returns whether `name` has the form owner/name. A path with a leading dot, slash or tilde does not."""
    return _ID.fullmatch(name) is not None and not name.endswith((".", "/"))


def download_files(
    name: str,
    patterns: Sequence[str],
    revision: str | None = None,
    error: type[MlxZipError] = ModelError,
) -> Path:
    """Downloads the files of a hub repository that match `patterns` and returns their local folder, named by commit.

    Files in the cache are not fetched again. Raises `error` if the repository does not exist or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except hub_error_types() as cause:
        raise error(
            f"{name} is not a local folder, and the hub did not give it: {first_message_line(cause)}"
        ) from cause


def hub_error_types() -> tuple[type[Exception], ...]:
    """Returns the exception types that the hub client raises, including those of its HTTP library."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    return (OSError, HFValidationError, *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)))


# ---- rows of data sets, read with the `datasets` library from saved folders, parquet files or the hub

PARQUET = ".parquet"
_FAILURES = (ValueError, TypeError, LookupError, AttributeError, NotImplementedError)


def iterate_dataset_rows(
    name: str, subsets: tuple[str, ...] = (), split: str = "train", revision: str | None = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (place, row) for each row of a data set, in order; of several subsets, one row from each in turn.

    place: name of the data set, subset and row number, for messages. A data set on the hub is streamed, not stored.
    Raises `DataError` if the data set cannot be read, and `InstallationError` if the `datasets` library is missing.
    """
    library = import_or_explain("datasets", "a data set", "datasets", extra="data")
    with _explain_dataset_errors(name, library):
        opened = {
            subset: enumerate(_open_dataset(library, name, subset, split, revision)) for subset in subsets or (None,)
        }
        while opened:
            for subset, numbered in list(opened.items()):
                row = next(numbered, None)
                if row is None:
                    del opened[subset]
                    continue
                yield f"{name}{f' ({subset})' if subset else ''} row {row[0]}", row[1]


def _open_dataset(library: ModuleType, name: str, subset: str | None, split: str, revision: str | None) -> Any:
    """Returns an iterable of the rows of a data set. subset: None for the only or default subset."""
    folder = Path(name)
    _check_regular_files(folder)
    if folder.is_dir() and ((folder / "state.json").exists() or (folder / "dataset_dict.json").exists()):
        saved = library.load_from_disk(name)
        if not isinstance(saved, dict):
            return saved
        if split not in saved:
            raise DataError(f"{name} has no split {split!r}; it has {', '.join(saved)}")
        return saved[split]
    if name.endswith(PARQUET):
        return library.load_dataset("parquet", data_files=name, split="train", streaming=True)
    place = str(folder.resolve()) if folder.is_dir() else name  # the library finds no data set called "."
    return library.load_dataset(place, subset, split=split, revision=revision, streaming=True)


def _check_regular_files(folder: Path) -> None:
    """Raises `DataError` if a folder contains a device or pipe, because the library would read it without end."""
    for file in _walk_files(folder):
        check_regular_file(file)


def _walk_files(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder and its subfolders, without those that the library leaves out."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith((".", "__")))
        yield from (Path(root, one) for one in sorted(files) if not one.startswith("."))


def _find_file_not_utf8(folder: Path) -> Path | None:
    """Returns the first .txt file in a folder that is not UTF-8, None if there is none; the library names no file.

    Files that cannot be read are skipped.
    """
    for file in _walk_files(folder):
        if file.suffix != ".txt":
            continue
        try:
            with open(file, encoding="utf-8") as lines:
                for _ in lines:
                    pass
        except UnicodeDecodeError:
            return file
        except OSError:
            continue
    return None


@contextmanager
def _explain_dataset_errors(name: str, library: ModuleType) -> Iterator[None]:
    """Context manager: turns the library's errors (not found, bad files, lost connection) into a `DataError`."""
    try:
        yield
    except DataError:
        raise
    except UnicodeDecodeError as error:
        place = _find_file_not_utf8(Path(name)) or name
        raise DataError(f"{place} cannot be read: {' '.join(str(error).split())[:300]}") from error
    except (library.exceptions.DatasetsError, *hub_error_types(), *_FAILURES) as error:
        raise DataError(f"{name} cannot be read: {' '.join(str(error).split())[:300]}") from error
