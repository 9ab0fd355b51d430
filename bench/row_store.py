"""Times the row store, in memory and on disk: opening it, looking up rows and storing rows. Also measures its memory.

Rows and their entries are random: to the store a row is only bytes, so no model is needed. Rows chosen at random from
all stored rows are looked up twice: right after opening, and once more. The files stay in the system's cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.arguments import check_flags_at_least
from mlx_zip.errors import MlxZipError
from mlx_zip.models.rows.row_files import RowSet, list_row_files, sum_file_sizes
from mlx_zip.models.rows.row_folder import RowFolder
from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.progress import ProgressBar

from .machine import resident_bytes
from .recording import load_before_bench, print_record, summarize_samples

MERGE_SIZE = 4  # base ids per entry
CHUNK = 8192  # rows stored in one call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench rows`."""
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="number of rows to store on disk (default: 1000000)"
    )
    parser.add_argument("--width", type=int, default=256, help="number of float32 values per row (default: 256)")
    parser.add_argument("--batch", type=int, default=1024, help="number of rows to look up in one call (default: 1024)")
    parser.add_argument(
        "--memory-bytes",
        type=int,
        default=8 << 20,
        help="maximum bytes of rows that the store keeps in memory (default: 8388608, 8 MiB)",
    )
    parser.add_argument("--trials", type=int, default=9, help="number of timed runs per measurement (default: 9)")
    parser.add_argument(
        "--folder",
        help="existing folder to make the store in; only the store is deleted at the end (default: temporary folder)",
    )


def run(args: argparse.Namespace) -> int:
    """Measures the store and prints one JSON line. Raises `MlxZipError` if a flag cannot be used."""
    check_flags_at_least(args, 1, "rows", "width", "batch", "memory_bytes", "trials")
    if args.folder is not None and not Path(args.folder).is_dir():
        raise MlxZipError(f"--folder {args.folder} is not an existing folder")
    load_before_bench()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print_record(measure_row_store(Path(folder), args) | {"trials": args.trials})
    return 0


def measure_row_store(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Fills a store in the folder and returns the record: times in ms or in us per row, sizes in bytes."""
    rows = RowSet(bytes(32), MERGE_SIZE, 4 * args.width, mx.float32)
    disk_limit = 2 * args.rows * (rows.row_bytes + 64) + (1 << 20)
    fill_s = fill_store(folder, rows, args, disk_limit)
    rng = np.random.default_rng(1)
    wanted = [rng.integers(0, args.rows, args.batch) for _ in range(args.trials)]
    opened, first, again, single = [], [], [], []
    with ProgressBar(args.trials, "trial", "Looking up") as count:
        for chosen in wanted:
            begun = time.perf_counter()
            disk = RowFolder(folder, disk_limit)
            disk.find_rows(rows, made_up_entries(chosen[:1]))
            opened.append(1000 * (time.perf_counter() - begun))
            first.append(
                time_us_per_row(
                    lambda disk=disk, chosen=chosen: disk.find_rows(rows, made_up_entries(chosen)), args.batch
                )
            )
            again.append(
                time_us_per_row(
                    lambda disk=disk, chosen=chosen: disk.find_rows(rows, made_up_entries(chosen)), args.batch
                )
            )
            one = made_up_entries(chosen[:1])
            single.append(time_us_per_row(lambda disk=disk, one=one: disk.find_rows(rows, one), 1))
            disk.close()
            count()
    return {
        "bench": "rows",
        "rows": args.rows,
        "row_bytes": rows.row_bytes,
        "batch": args.batch,
        "disk_bytes": sum_file_sizes(list_row_files(folder)),
        "fill_us_per_row": round(fill_s / args.rows * 1e6, 3),
        "open_ms": summarize_samples(opened),
        "lookup_first_us_per_row": summarize_samples(first),
        "lookup_us_per_row": summarize_samples(again),
        "lookup_of_one_us": summarize_samples(single),
        **time_model_lookups(folder, rows, args, disk_limit, wanted),
    }


def time_model_lookups(
    folder: Path, rows: RowSet, args: argparse.Namespace, disk_limit: int, wanted: list[np.ndarray]
) -> dict[str, Any]:
    """Times look-ups as a model makes them: rows as arrays on the device, from disk and then from memory.

    Also measures the store's memory. wanted: for each trial, the numbers of the rows to look up [batch].
    """
    lengths = np.full(args.batch, MERGE_SIZE)
    from_disk, from_memory, before = [], [], resident_bytes()
    with RowStore(folder, memory_bytes=args.memory_bytes, folder_bytes=disk_limit) as store:
        for chosen in wanted:
            keys = made_up_entries(chosen)
            take: Callable[[], Any] = lambda keys=keys: mx.eval(
                store.find_or_encode_rows(rows, keys, lengths, refuse_to_encode)
            )
            from_disk.append(time_us_per_row(take, args.batch))
            from_memory.append(time_us_per_row(take, args.batch))
        return {
            "store_from_disk_us_per_row": summarize_samples(from_disk),
            "store_from_memory_us_per_row": summarize_samples(from_memory),
            "store_memory_bytes": store.nbytes,
            "store_memory_bound_bytes": args.memory_bytes,
            "rss_growth_bytes": resident_bytes() - before,  # includes mapped pages of the files that were read
        }


def fill_store(folder: Path, rows: RowSet, args: argparse.Namespace, disk_limit: int) -> float:
    data = np.random.default_rng(0).integers(0, 256, (CHUNK, rows.row_bytes), np.uint8)
    disk, begun = RowFolder(folder, disk_limit), time.perf_counter()
    with ProgressBar(args.rows, "row", "Storing") as count:
        for first in range(0, args.rows, CHUNK):
            keys = made_up_entries(np.arange(first, min(first + CHUNK, args.rows)))
            disk.add(rows, keys, data[: len(keys)])
            count(len(keys))
        disk.close()
    return time.perf_counter() - begun


def made_up_entries(numbers: np.ndarray) -> np.ndarray:
    n = numbers.astype(np.uint32)
    return np.stack([n % 50_021, n // 50_021, n * np.uint32(2_654_435_761) >> 16, n % 7], axis=1).astype(np.uint32)


def time_us_per_row(act: Callable[[], Any], count: int) -> float:
    begun = time.perf_counter()
    act()
    return (time.perf_counter() - begun) / count * 1e6


def refuse_to_encode(base_ids: Any, lengths: Any) -> mx.array:
    raise AssertionError("a stored row was not found")
