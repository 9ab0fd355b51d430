"""`prepare`: turns files and data sets into shards of compressed samples with loss masks.

The result is the same for any number of workers. After an interruption only the missing shards are made.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mlx_zip
from mlx_zip.errors import DataError, failure_reason
from mlx_zip.packs.entries import write_entries
from mlx_zip.progress import ProgressBar
from mlx_zip.text.sources import SourceReader, is_read_from_files, source_files
from mlx_zip.training.prepare.mixture import choose_next_sources, count_kept_samples
from mlx_zip.training.prepare.plan import PreparationPlan, PrepareOptions, make_preparation_plan
from mlx_zip.training.prepare.prepared_folder import POOL_FILE, PreparedFolder
from mlx_zip.training.prepare.sharding import (
    Chunk,
    ShardMaker,
    cut_chunks,
    make_shard_in_worker,
    start_worker,
)

SHARDS_PER_ROUND = 16  # number of shards whose sources are chosen at a time, from the shares reached so far
ShardRecords = list[list[dict[str, Any]]]  # for each source, the records of its shards in order


def prepare_data(options: PrepareOptions, workers: int = 1, progress: bool = False) -> dict[str, Any]:
    """Prepares data in `options.out` and returns the folder's index. Prints skipped invalid records on stderr.

    workers: number of processes. progress: show a bar if stderr is a terminal. If an earlier run with equal options was
    interrupted, its folder is completed; if it was finished, nothing is done.

    Raises `DataError`, naming file and line or the option, if the data cannot be prepared; then no index is written.
    """
    if workers < 1:
        raise DataError(f"workers must be 1 or more, got {workers}")
    plan, tokenizer, settings = make_preparation_plan(options)
    folder = PreparedFolder(options.out)
    try:
        with folder.open(settings) as index:
            if index is not None:
                return index
            try:
                if plan.pool is not None:
                    write_entries(options.out / POOL_FILE, plan.pool, plan.params.merge_size, plan.params.pad_id)
                run = _Preparation(plan, folder, progress)
                with _start_shard_workers(plan, tokenizer, workers) as make:
                    run.make_shards(make)
                return folder.close(run.make_index(settings))
            except (DataError, OSError):
                folder.discard_without_samples()
                raise
    except BrokenProcessPool as error:
        raise DataError(f"a worker process was killed, by lack of memory perhaps; {_HOW_TO_GO_ON}") from error
    except OSError as error:  # errors in reading were turned into `DataError`
        go_on = f"; {_HOW_TO_GO_ON}" if any(options.out.glob("shard-*.json")) else ""
        raise DataError(f"{options.out} cannot be written: {failure_reason(error)}{go_on}") from error


_HOW_TO_GO_ON = "the shards written so far stay: run the same again to go on"
MakeShards = Callable[[Sequence[Chunk]], Iterator[dict[str, Any]]]


@contextmanager
def _start_shard_workers(plan: PreparationPlan, tokenizer: Any, workers: int) -> Iterator[MakeShards]:
    """Context manager: yields a function that makes shards of chunks in `workers` processes, and returns records."""
    if workers == 1:
        maker = ShardMaker(plan, tokenizer)
        yield lambda chunks: map(maker.make_shard, chunks)
        return
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, start_worker, (plan,))
    try:
        yield lambda chunks: pool.map(make_shard_in_worker, chunks)
    finally:
        pool.shutdown(cancel_futures=True)


class _Preparation:
    """One run of `prepare`: readers of the sources, and records and base ids per sample of finished shards."""

    def __init__(self, plan: PreparationPlan, folder: PreparedFolder, progress: bool) -> None:
        options = plan.options
        self.options, self.folder = options, folder
        self.start, self.with_pool = plan.params.start, plan.pool is not None
        self.shares = [source.share for source in options.sources]
        self.readers = [SourceReader(source) for source in options.sources]
        self.chunks = [
            cut_chunks(iter(r), options.shard_samples, options.context, options.fill_windows) for r in self.readers
        ]
        self.records: ShardRecords = [[] for _ in options.sources]
        self.counts: list[list[NDArray[np.int64]]] = [[] for _ in options.sources]
        self.skipped: Counter[str] = Counter()
        names = [name for source in options.sources for name in source.data]
        local = all(map(is_read_from_files, names))
        total = sum(Path(file).stat().st_size for name in names for file in source_files(name)) if local else None
        self.bar = ProgressBar(total, "byte", "Preparing", shown=progress)

    def make_shards(self, make: MakeShards) -> None:
        """Reads the sources and makes shards, until a source has ended or there are enough samples."""
        number, ended = 0, False
        with self.bar:
            while not ended and not self._has_enough_samples():
                base_ids = [[record["base_ids"] for record in done] for done in self.records]
                chunks = []
                for source in choose_next_sources(self.shares, base_ids, SHARDS_PER_ROUND):
                    items = next(self.chunks[source], None)
                    if items is None:
                        ended = True
                        continue
                    chunks.append(Chunk(number, source, items, sum(reader.stored for reader in self.readers)))
                    number += 1
                earlier = {chunk.number: self.folder.record(chunk.name) for chunk in chunks}
                made = make([chunk for chunk in chunks if earlier[chunk.number] is None])
                for chunk in chunks:
                    record = earlier[chunk.number]
                    self._add_record(record or next(made), chunk, is_new=record is None)

    def _add_record(self, record: dict[str, Any], chunk: Chunk, is_new: bool) -> None:
        """Adds a finished shard, and reports skipped input records of a new shard.

        Raises `DataError` if more wrong input records were skipped than `max_skipped` allows.
        """
        notes = record["notes"]
        more = record["skipped"].get("wrong", 0) - len(notes)
        for note in [*notes, *([f"{more} more wrong records after these"] if more else [])] if is_new else ():
            self.bar.clear()
            print(f"skipped {note}", file=sys.stderr)
        self.records[chunk.source].append(record)
        self.counts[chunk.source].append(self.folder.base_ids(record))
        self.skipped.update(record["skipped"])
        if self.skipped["wrong"] > self.options.max_skipped:
            first = next(r["notes"][0] for done in self.records for r in done if r["notes"])
            raise DataError(
                f"{self.skipped['wrong']} wrong records, more than max_skipped (--max-skipped) "
                f"{self.options.max_skipped}; the first: {first}"
            )
        self.bar.show_figures(f"{sum(r['base_ids'] for done in self.records for r in done):,} base ids")
        self.bar.set_done(chunk.stored)

    def _has_enough_samples(self) -> bool:
        """Returns whether every source has a finished shard and the number of samples to keep reaches the limit."""
        limit = self.options.limit
        return limit is not None and all(self.records) and sum(self._count_kept_samples(None)) >= limit

    def _count_kept_samples(self, limit: int | None) -> list[int]:
        base_ids = [np.concatenate([*each, np.empty(0, np.int64)]) for each in self.counts]
        return count_kept_samples(self.shares, base_ids, limit)

    def make_index(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Chooses the samples to keep and returns the index, without writing it."""
        kept = self._count_kept_samples(self.options.limit)
        if not all(kept):
            poorest = min(range(len(kept)), key=lambda s: sum(record["base_ids"] for record in self.records[s]))
            poor = self.options.sources[poorest].data[0]
            counts = ", ".join(f"{n} {kind}" for kind, n in sorted(self.skipped.items()) if n) or "no record in it"
            self.folder.discard()
            if all(sum(record["samples"] for record in done) for done in self.records):
                lost = self.options.sources[kept.index(0)].data[0]
                raise DataError(f"{lost}: its share next to the others' is too small for a single sample of it")
            raise DataError(f"{poor} gives no sample to train on ({counts})")
        shards = sorted(self._cut_shards(kept), key=lambda record: record["name"])
        totals = {key: sum(record[key] for record in shards) for key in ("samples", "ids", "base_ids", "bytes")}
        records = [record for done in self.records for record in done]
        return {
            "codec": settings["codec"] | ({} if self.start is None else {"start": self.start}),
            "context": self.options.context,
            "tokenizer": settings["tokenizer"],
            "shards": shards,
            "pool": POOL_FILE if self.with_pool else None,
            "skipped": {kind: self.skipped[kind] for kind in ("wrong", "empty", "unlearnable windows")},
            "windowed": sum(record["windowed"] for record in records),
            "records": sum(record["records"] for record in records),
            "totals": totals,
            "sources": self._make_source_records(shards),
            "settings": settings,
            "mlx_zip": mlx_zip.__version__,
        }

    def _cut_shards(self, kept: Sequence[int]) -> Iterator[dict[str, Any]]:
        for done, left in zip(self.records, kept, strict=True):
            for record in done:
                n = min(left, record["samples"])
                left -= n
                if n:
                    yield self.folder.keep_first_samples(record, n, self.with_pool)

    def _make_source_records(self, shards: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        whole = sum(record["base_ids"] for record in shards)
        found = []
        for s, source in enumerate(self.options.sources):
            own = [record for record in shards if record["source"] == s]
            base_ids = sum(record["base_ids"] for record in own)
            samples = sum(record["samples"] for record in own)
            found.append({"data": source.data, "samples": samples, "base_ids": base_ids, "share": base_ids / whole})
        return found
