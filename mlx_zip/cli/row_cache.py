"""`mlx_zip rows`: shows or deletes stored hyper rows. Also the flags --row-cache and --row-cache-bytes."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

from mlx_zip.errors import GenerationError, errors_as
from mlx_zip.progress import pluralize

ENVIRONMENT = "MLX_ZIP_ROW_CACHE"
OFF = "off"
_SIZE = re.compile(r"(\d+)([KMG]?)B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `mlx_zip rows`."""
    parser.add_argument(
        "action",
        metavar="ACTION",
        choices=("show", "purge"),
        help="show: print the number of files and bytes in the folder; purge: delete the stored rows, then the folder "
        "if it is empty",
    )
    parser.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        help=f"folder of stored rows, as given to --row-cache (default: ${ENVIRONMENT})",
    )


def run(args: argparse.Namespace) -> int:
    """Prints how many files and bytes are in the folder or were deleted; returns 0.

    Raises `GenerationError` if no folder is given or the folder cannot be used.
    """
    from mlx_zip.models.rows.row_files import list_row_files, sum_disk_usage
    from mlx_zip.models.rows.row_folder import purge_row_folder

    folder = cache_folder_from_flag(args.folder)
    if folder is None:
        raise GenerationError(f"no folder: give the DIR of --row-cache, or set {ENVIRONMENT}")
    with errors_as(GenerationError, str(folder), OSError):
        if args.action == "purge":
            (count, size), done = purge_row_folder(folder), "removed: "
        else:
            files, done = list_row_files(folder), ""
            count, size = len(files), sum_disk_usage(files)
    print(f"{done}{pluralize(count, 'file')}, {size} bytes")
    return 0


def add_row_cache_flags(add: Any) -> None:
    """Declares --row-cache and --row-cache-bytes."""
    add(
        "--row-cache",
        metavar="DIR|off",
        help="folder that keeps encoded hypertoken rows for later runs, or off for none; it holds pieces of your texts "
        f"and only you can read it (default: ${ENVIRONMENT}, else off)",
    )
    add(
        "--row-cache-bytes",
        type=parse_size,
        metavar="N",
        help="maximum size of the --row-cache folder on disk, for example 500M or 2G (default: 1 GiB)",
    )


def open_row_cache(args: argparse.Namespace) -> Any:
    """Returns the `RowStore` set by flags; it keeps rows in memory, and on disk if --row-cache names a folder."""
    from mlx_zip.models.rows.row_store import FOLDER_BYTES, RowStore

    return RowStore(cache_folder_from_flag(args.row_cache), folder_bytes=args.row_cache_bytes or FOLDER_BYTES)


def cache_folder_from_flag(given: str | None, variable: str = ENVIRONMENT) -> Path | None:
    """Returns the folder to keep files in, None for "off". given: a flag's value, None for that of `variable`."""
    from mlx_zip.files import expand_home

    name = os.environ.get(variable, OFF) if given is None else given
    return None if name in (OFF, "") else expand_home(name)


def parse_size(text: str) -> int:
    """Returns a size such as "500M" as a number of bytes; K, M and G are powers of 1000."""
    match = _SIZE.fullmatch(text)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes, for example 500M or 2G")
    return int(match[1]) * _UNITS[match[2].upper()]
