"""`prepare`: turns files and data sets into shards of compressed samples with loss masks.

Each source's records are cut into chunks, and worker processes make one shard of each chunk. The result is the same for
any number of workers. After an interruption only the missing shards are made.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mlx_zip
from mlx_zip.errors import DataError, failure_reason
from mlx_zip.files import exit_with_parent_process, remove_unfinished_files, write_json
from mlx_zip.packs.entries import write_entries
from mlx_zip.progress import ProgressBar
from mlx_zip.text.sources import Item, Skipped, SourceReader, is_read_from_files, parse_item, source_files
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.training.prepare.encoding import EncodedRecord, RecordEncoder, compress_window, cut_training_windows
from mlx_zip.training.prepare.mixture import choose_next_sources, count_kept_samples
from mlx_zip.training.prepare.plan import PreparationPlan, PrepareOptions, make_preparation_plan, make_settings_record
from mlx_zip.training.prepare.shards import POOL_FILE, PreparedFolder, Sample, write_shard

SHARDS_PER_ROUND = 16  # number of shards whose sources are chosen at a time, from the shares reached so far
MOST_NOTES = 20  # maximum number of skipped records that a shard's record names
BYTES_PER_ID = 4  # rough guess, to estimate how much text fills a shard
_HOW_TO_GO_ON = "the shards written so far stay: run the same again to go on"
ShardRecords = list[list[dict[str, Any]]]  # for each source, the records of its shards in order


def prepare_data(options: PrepareOptions, workers: int = 1, progress: bool = False) -> dict[str, Any]:
    """Prepares data in `options.out` and returns the folder's index. Prints skipped invalid records on stderr.

    workers: number of processes. progress: show a bar if stderr is a terminal. If an earlier run with equal options was
    interrupted, its folder is completed; if it was finished, nothing is done.

    Raises `DataError`, naming file and line or the option, if the data cannot be prepared; then no index is written.
    """
    if workers < 1:
        raise DataError(f"workers must be 1 or more, got {workers}")
    plan, tokenizer = make_preparation_plan(options)
    settings = make_settings_record(plan, tokenizer)
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


# ---- one shard


@dataclass(frozen=True)
class Chunk:
    """The items of one shard. number: the shard's number. source: index of the items' source in the mixture.

    stored: bytes of files read up to the end of this chunk, over all sources, for the progress bar.
    """

    number: int
    source: int
    items: tuple[Item, ...]
    stored: int = 0

    @property
    def name(self) -> str:
        """The shard's name, with which the shard's file names begin."""
        return f"shard-{self.number:05d}"


def cut_chunks(items: Iterator[Item], samples: int, context: int, fill: bool | None) -> Iterator[tuple[Item, ...]]:
    """Yields groups of items, each with about `samples` windows. Equal items give equal groups.

    context: base ids per window. fill: see `fill_windows` in `PrepareOptions`.
    """
    group: list[Item] = []
    windows = 0.0
    for item in items:
        group.append(item)
        size = item.size / (BYTES_PER_ID * context)
        windows += size if (_looks_like_document(item) if fill is None else fill) else max(1.0, size)
        if windows >= samples:
            yield tuple(group)
            group, windows = [], 0.0
    if group:
        yield tuple(group)


def _looks_like_document(item: Item) -> bool:
    """Guesses without parsing whether an item is a document and not a conversation."""
    keys = ("messages", "prompt") if item.kind == "row" else (b'"messages"', b'"prompt"')
    return item.kind == "text" or not any(key in item.raw for key in keys)


class ShardMaker:
    """Makes the shards of a plan. tokenizer: the plan's tokenizer if it is loaded already, None to load it."""

    def __init__(self, plan: PreparationPlan, tokenizer: Any = None) -> None:
        self.plan, self.options = plan, plan.options
        tokenizer = tokenizer or load_tokenizer(plan.tokenizer, self.options.trust_remote_code)
        self.encoder = RecordEncoder(tokenizer, self.options.train_on)

    def make_shard(self, chunk: Chunk) -> dict[str, Any]:
        """Writes the arrays of a shard, then the shard's record, and returns the record.

        Invalid records of the chunk are skipped and counted. Other failures raise `DataError` or `OSError`.
        """
        columns, context = self.options.sources[chunk.source].columns, self.options.context
        results = self.encoder.encode([parse_item(item, columns) for item in chunk.items])
        encoded = [one for one in results if isinstance(one, EncodedRecord)]
        wrong = [f"{one.where}: {one.reason}" for one in results if isinstance(one, Skipped) and not one.empty]
        samples, starts = self._make_samples(encoded, chunk.number)
        learnable = [bool(sample.mask.any()) for sample in samples]
        kept = list(compress(samples, learnable))
        record = write_shard(self.options.out, chunk.name, kept, None if starts is None else starts[learnable]) | {
            "source": chunk.source,
            "records": len(results),
            "windowed": sum(len(one.ids) + len(one.lead) > context for one in encoded),
            "skipped": {
                "wrong": len(wrong),
                "empty": len(results) - len(encoded) - len(wrong),
                "unlearnable windows": len(samples) - len(kept),
            },
            "notes": wrong[:MOST_NOTES],
        }
        write_json(self.options.out / f"{chunk.name}.json", record)
        return record

    def _make_samples(
        self, encoded: Sequence[EncodedRecord], number: int
    ) -> tuple[list[Sample], NDArray[np.int32] | None]:
        """Returns the records' compressed windows, and `starts` for `write_shard`. number: the shard's number."""
        params, pool, draw = self.plan.params, self.plan.pool, self.options.start_draw
        windows = cut_training_windows(encoded, self.options.context, self.options.fill_windows, self.encoder.lead)
        if pool is None or draw is None:
            return [compress_window(params, window) for window in windows], None
        rng, samples, starts = np.random.default_rng([self.options.seed, number]), [], []
        for window in windows:
            starts.append(rng.choice(len(pool), draw, replace=False))
            entries = tuple(pool[row] for row in starts[-1].tolist())
            samples.append(compress_window(replace(params, start=entries), window))
        return samples, np.array(starts, np.int32).reshape(-1, draw)


# ---- worker processes

MakeShards = Callable[[Sequence[Chunk]], Iterator[dict[str, Any]]]


@contextmanager
def _start_shard_workers(plan: PreparationPlan, tokenizer: Any, workers: int) -> Iterator[MakeShards]:
    """Context manager: yields a function that makes shards of chunks in `workers` processes, and returns records.

    The caller holds the lock of the folder: after a signal, unfinished files in the folder are removed.
    """
    if workers == 1:
        maker = ShardMaker(plan, tokenizer)
        yield lambda chunks: map(maker.make_shard, chunks)
        return
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, start_worker, (plan,))
    try:
        yield lambda chunks: pool.map(make_shard_in_worker, chunks)
    except (KeyboardInterrupt, SystemExit):  # a signal: do not wait for the shards that are being made
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        pool.shutdown(cancel_futures=True)
        remove_unfinished_files(plan.options.out)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_maker: ShardMaker | None = None


def start_worker(plan: PreparationPlan) -> None:
    """Initializes a worker process: one tokenizer thread, silent exit on Ctrl-C, and exit when the parent exits.

    Files are written atomically, so an exit leaves at most temporary files.
    """
    global _maker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # ignored in a script's background job
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    exit_with_parent_process()
    _maker = ShardMaker(plan)


def make_shard_in_worker(chunk: Chunk) -> dict[str, Any]:
    """Runs `ShardMaker.make_shard` in a worker process."""
    if _maker is None:
        raise DataError("a worker process was not started as one")
    return _maker.make_shard(chunk)
