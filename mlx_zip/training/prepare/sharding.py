"""Makes one shard of prepared data from one chunk of items; runs in worker processes."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.errors import DataError
from mlx_zip.files import exit_with_parent_process, write_json
from mlx_zip.text.sources import Item, Record, Skipped, parse_item
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.training.prepare.encoding import EncodedRecord, RecordEncoder, compress_window, cut_training_windows
from mlx_zip.training.prepare.plan import PreparationPlan
from mlx_zip.training.prepare.shards import ShardWriter

MOST_NOTES = 20  # maximum number of skipped records that a shard's record names
BYTES_PER_ID = 4  # rough guess, to estimate how much text fills a shard


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


@dataclass
class RecordTally:
    """Counts of a chunk's records. skipped: kind -> number of skipped records. notes: reasons for the first ones.

    records: number of all records. windowed: number of records that are longer than the context.
    """

    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    records: int = 0
    windowed: int = 0

    def count_skipped(self, skipped: Skipped) -> None:
        """Counts a skipped record. Adds the reason to `notes` if the record is invalid and `notes` is not full."""
        self.skipped["empty" if skipped.empty else "wrong"] += 1
        if not skipped.empty and len(self.notes) < MOST_NOTES:
            self.notes.append(f"{skipped.where}: {skipped.reason}")


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
        tally = RecordTally()
        encoded_records = self._encode_records(chunk, tally)
        writer = ShardWriter(self.options.out, chunk.name, self.plan.entries_per_sample)
        samples = self._add_samples(writer, encoded_records, chunk.number, tally)
        empty = {"name": chunk.name, "samples": 0, "ids": 0, "base_ids": 0, "bytes": 0}
        record = (writer.close() if samples else empty) | {
            "source": chunk.source,
            "records": tally.records,
            "windowed": tally.windowed,
            "skipped": dict(tally.skipped),
            "notes": tally.notes,
        }
        write_json(shard_record_path(self.options.out, chunk.name), record)
        return record

    def _encode_records(self, chunk: Chunk, tally: RecordTally) -> list[EncodedRecord]:
        columns = self.options.sources[chunk.source].columns
        parsed = [parse_item(item, columns) for item in chunk.items]
        results = iter(self.encoder.encode([record for record in parsed if isinstance(record, Record)]))
        found = [next(results) if isinstance(record, Record) else record for record in parsed]
        encoded_records = []
        for encoded in found:
            tally.records += 1
            if isinstance(encoded, Skipped):
                tally.count_skipped(encoded)
            else:
                tally.windowed += len(encoded.ids) + len(encoded.lead) > self.options.context
                encoded_records.append(encoded)
        return encoded_records

    def _add_samples(
        self, writer: ShardWriter, encoded_records: list[EncodedRecord], number: int, tally: RecordTally
    ) -> int:
        """Adds the records' compressed windows to shard `number`; returns the number of samples added."""
        plan, rng, samples = self.plan, np.random.default_rng([self.options.seed, number]), 0
        fill = self.options.fill_windows
        for window in cut_training_windows(encoded_records, self.options.context, fill, self.encoder.lead):
            params, rows = plan.params, None
            if plan.pool is not None:
                rows = rng.choice(len(plan.pool), plan.entries_per_sample, replace=False).astype(np.int32)
                params = replace(params, start=tuple(map(plan.pool.__getitem__, rows.tolist())))
            ids, mask = compress_window(params, window)
            if not mask.any():
                tally.skipped["unlearnable windows"] += 1
                continue
            writer.add(ids, mask, len(window.ids), window.n_bytes, rows)
            samples += 1
        return samples


def shard_record_path(folder: Path, name: str) -> Path:
    """Returns the path of a shard's record. The file exists from the end of the shard until the index is written."""
    return folder / f"{name}.json"


# ---- worker processes

_maker: ShardMaker | None = None


def start_worker(plan: PreparationPlan) -> None:
    """Initializes a worker process: one tokenizer thread, silent exit on Ctrl-C, and exit when the parent exits.

    No file is left incomplete by an exit, because files are written atomically.
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
