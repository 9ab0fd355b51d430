"""The row store: opening it, looking rows up, putting rows in; in memory and on disk, and its limits.

Rows are random and their entries made up, as no model is needed: a row is bytes to the store. On disk the rows looked
up are spread over all that are stored, once after opening (first touch) and again; files stay in the system's cache.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.bench.memory import _rss_bytes
from mlx_zip.bench.record import summary, surroundings
from mlx_zip.hyper import RowStore
from mlx_zip.hyper.row_files import RowSet, files_in, total_bytes
from mlx_zip.hyper.row_folder import RowFolder
from mlx_zip.hyper.store import RowKind

MERGE_SIZE = 4
CHUNK = 8192  # rows put in at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench rows`."""
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows stored on disk (default: 1000000)")
    parser.add_argument("--width", type=int, default=256, help="values per row, float32 (default: 256)")
    parser.add_argument("--batch", type=int, default=1024, help="rows looked up at once (default: 1024)")
    parser.add_argument("--memory-bytes", type=int, default=8 << 20, help="bound in memory (default: 8 MiB)")
    parser.add_argument("--trials", type=int, default=9, help="timed calls per measurement (default: 9)")
    parser.add_argument("--folder", help="where to make the store, which is removed at the end (default: temporary)")


def run(args: argparse.Namespace) -> int:
    """Prints one JSON line."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print(json.dumps(measure(Path(folder), args) | surroundings("mlx")), flush=True)
    return 0


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The record: times in milliseconds or microseconds per row, sizes in bytes."""
    rows = RowSet(bytes(32), MERGE_SIZE, 4 * args.width)
    bound = 2 * args.rows * (rows.row_bytes + 64) + (1 << 20)
    fill_s = _fill(folder, rows, args, bound)
    rng = np.random.default_rng(1)
    wanted = [rng.integers(0, args.rows, args.batch) for _ in range(args.trials)]
    opened, first, again, single = [], [], [], []
    for chosen in wanted:
        begun = time.perf_counter()
        disk = RowFolder(folder, bound)
        disk.find(rows, _keys(chosen[:1]))
        opened.append(1000 * (time.perf_counter() - begun))
        first.append(_micros(lambda disk=disk, chosen=chosen: disk.find(rows, _keys(chosen)), args.batch))
        again.append(_micros(lambda disk=disk, chosen=chosen: disk.find(rows, _keys(chosen)), args.batch))
        one = _keys(chosen[:1])
        single.append(_micros(lambda disk=disk, one=one: disk.find(rows, one), 1))
        disk.close()
    return {
        "bench": "rows",
        "rows": args.rows,
        "row_bytes": rows.row_bytes,
        "batch": args.batch,
        "disk_bytes": total_bytes(files_in(folder)),
        "fill_us_per_row": round(fill_s / args.rows * 1e6, 3),
        "open_ms": summary(opened),
        "lookup_first_us_per_row": summary(first),
        "lookup_us_per_row": summary(again),
        "lookup_of_one_us": summary(single),
        **_through_store(folder, args, bound, wanted),
    }


def _through_store(folder: Path, args: argparse.Namespace, bound: int, wanted: list[np.ndarray]) -> dict[str, Any]:
    """What a model sees: rows as an array on the device, through memory and disk; and the memory that it costs."""
    kind = RowKind(RowSet(bytes(32), MERGE_SIZE, 4 * args.width), mx.float32, True)
    lengths = np.full(args.batch, MERGE_SIZE)
    from_disk, from_memory, before = [], [], _rss_bytes()
    with RowStore(folder, memory_bytes=args.memory_bytes, folder_bytes=bound) as store:
        for chosen in wanted:
            keys = _keys(chosen)
            take: Callable[[], Any] = lambda keys=keys: mx.eval(store.rows(kind, keys, lengths, _never))
            from_disk.append(_micros(take, args.batch))
            from_memory.append(_micros(take, args.batch))
        return {
            "store_from_disk_us_per_row": summary(from_disk),
            "store_from_memory_us_per_row": summary(from_memory),
            "store_memory_bytes": store.nbytes,
            "store_memory_bound_bytes": args.memory_bytes,
            "rss_growth_bytes": _rss_bytes() - before,  # mapped pages of the files that were read are among it
        }


def _fill(folder: Path, rows: RowSet, args: argparse.Namespace, bound: int) -> float:
    """Stores rows 0..N-1; seconds."""
    data = np.random.default_rng(0).integers(0, 256, (CHUNK, rows.row_bytes), np.uint8)
    disk, begun = RowFolder(folder, bound), time.perf_counter()
    for first in range(0, args.rows, CHUNK):
        keys = _keys(np.arange(first, min(first + CHUNK, args.rows)))
        disk.add(rows, keys, data[: len(keys)])
    disk.close()
    return time.perf_counter() - begun


def _keys(numbers: np.ndarray) -> np.ndarray:
    """A made-up entry per number: [N, MERGE_SIZE] uint32, all different."""
    n = numbers.astype(np.uint32)
    return np.stack([n % 50_021, n // 50_021, n * np.uint32(2_654_435_761) >> 16, n % 7], axis=1).astype(np.uint32)


def _micros(act: Callable[[], Any], count: int) -> float:
    begun = time.perf_counter()
    act()
    return (time.perf_counter() - begun) / count * 1e6


def _never(base_ids: Any, lengths: Any) -> mx.array:
    raise AssertionError("a stored row was not found")
