"""Makes one shard of prepared data from one chunk of items; worker processes run this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.codec import CodecParams
from mlx_zip.errors import DataError
from mlx_zip.files import write_json
from mlx_zip.packs.entries import Entry
from mlx_zip.text.sources import Item, Record, Skipped, parse_item
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.training.prepare.encoding import Encoder, Piece, compress_window, cut
from mlx_zip.training.prepare.shards import ShardWriter

NOTED = 20  # skipped records that a shard names; the others are counted
BYTES_PER_ID = 4  # rough guess, to estimate how much text fills a shard


@dataclass(frozen=True)
class Plan:
    """What all shards of a `prepare` run share; fields as in `PrepareOptions`.

    tokenizer: its file or folder. params: the codec. columns: for each source, the names of its records' columns.
    pool: entries that each sample's starting codebook is drawn from; start_draw: how many are drawn, 0 without a pool.
    """

    out: Path
    tokenizer: Path
    params: CodecParams
    context: int
    fill_windows: bool | None
    train_on: str
    columns: tuple[Mapping[str, str], ...]
    seed: int = 0
    pool: tuple[Entry, ...] | None = None
    start_draw: int = 0
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Chunk:
    """The items that become one shard. number: the shard's number. source: index of their source in the mixture.

    stored: bytes of all files that had been read when the chunk was complete, for the progress bar.
    """

    number: int
    source: int
    items: tuple[Item, ...]
    stored: int = 0

    @property
    def name(self) -> str:
        """The shard's name, which its files begin with."""
        return f"shard-{self.number:05d}"


@dataclass
class Tally:
    """Counts of a chunk's records. skipped: how many of each kind. notes: why the first `NOTED` were skipped.

    records: all records. windowed: those longer than the context.
    """

    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    records: int = 0
    windowed: int = 0

    def skip(self, skipped: Skipped) -> None:
        """Counts a record that was skipped, and notes why."""
        self.skipped["empty" if skipped.empty else "wrong"] += 1
        if not skipped.empty and len(self.notes) < NOTED:
            self.notes.append(f"{skipped.where}: {skipped.reason}")


def cut_chunks(items: Iterator[Item], samples: int, context: int, fill: bool | None) -> Iterator[tuple[Item, ...]]:
    """Yields groups of items that give about `samples` windows each. Equal items give equal groups.

    context: base ids per window. fill: as `fill_windows` in `PrepareOptions`.
    """
    group: list[Item] = []
    windows = 0.0
    for item in items:
        group.append(item)
        size = item.size / (BYTES_PER_ID * context)
        windows += size if (_is_document(item) if fill is None else fill) else max(1.0, size)
        if windows >= samples:
            yield tuple(group)
            group, windows = [], 0.0
    if group:
        yield tuple(group)


def _is_document(item: Item) -> bool:
    """Guesses, before an item is parsed, whether it is a document and not a conversation."""
    keys = ("messages", "prompt") if item.kind == "row" else (b'"messages"', b'"prompt"')
    return item.kind == "text" or not any(key in item.raw for key in keys)


class ShardMaker:
    """Makes the shards of a plan. tokenizer: the plan's, if it is loaded already."""

    def __init__(self, plan: Plan, tokenizer: Any = None) -> None:
        self.plan = plan
        self.encoder = Encoder(tokenizer or load_tokenizer(plan.tokenizer, plan.trust_remote_code), plan.train_on)

    def make(self, chunk: Chunk) -> dict[str, Any]:
        """Writes the arrays of a shard, then its record, and returns the record.

        Invalid records are skipped and counted; other failures raise `DataError` or `OSError`.
        """
        tally = Tally()
        pieces = self._pieces(chunk, tally)
        writer = ShardWriter(self.plan.out, chunk.name, self.plan.start_draw)
        samples = self._add_samples(writer, pieces, chunk.number, tally)
        empty = {"name": chunk.name, "samples": 0, "ids": 0, "base_ids": 0, "bytes": 0}
        record = (writer.close() if samples else empty) | {
            "source": chunk.source,
            "records": tally.records,
            "windowed": tally.windowed,
            "skipped": dict(tally.skipped),
            "notes": tally.notes,
        }
        write_json(record_file(self.plan.out, chunk.name), record)
        return record

    def _pieces(self, chunk: Chunk, tally: Tally) -> list[Piece]:
        """Returns the encoded records of a chunk, and counts all of them in `tally`."""
        parsed = [parse_item(item, self.plan.columns[chunk.source]) for item in chunk.items]
        encoded = iter(self.encoder.encode([record for record in parsed if isinstance(record, Record)]))
        found = [next(encoded) if isinstance(record, Record) else record for record in parsed]
        pieces = []
        for piece in found:
            tally.records += 1
            if isinstance(piece, Skipped):
                tally.skip(piece)
            else:
                tally.windowed += len(piece.ids) + len(piece.lead) > self.plan.context
                pieces.append(piece)
        return pieces

    def _add_samples(self, writer: ShardWriter, pieces: list[Piece], number: int, tally: Tally) -> int:
        """Cuts pieces into windows, compresses and adds them to shard `number`; returns how many samples were added."""
        plan, rng, samples = self.plan, np.random.default_rng([self.plan.seed, number]), 0
        for window in cut(pieces, plan.context, plan.fill_windows, self.encoder.lead):
            params, rows = plan.params, None
            if plan.pool is not None:
                rows = rng.choice(len(plan.pool), plan.start_draw, replace=False).astype(np.int32)
                params = replace(params, start=tuple(map(plan.pool.__getitem__, rows.tolist())))
            ids, mask = compress_window(params, window)
            if not mask.any():
                tally.skipped["unlearnable windows"] += 1
                continue
            writer.add(ids, mask, len(window.ids), window.n_bytes, rows)
            samples += 1
        return samples


def record_file(folder: Path, name: str) -> Path:
    """Returns the path of a finished shard's record, which exists until the index is written."""
    return folder / f"{name}.json"


# ---- worker processes

_maker: ShardMaker | None = None


def start_worker(plan: Plan) -> None:
    """Prepares a worker process: one tokenizer thread; it exits silently on Ctrl-C, and when its parent exits.

    Nothing is lost by that, because every file is written whole or not at all.
    """
    import multiprocessing
    import os
    import signal
    import threading

    global _maker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # ignored in the background of a script, as its parent does
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    _maker = ShardMaker(plan)


def make_in_worker(chunk: Chunk) -> dict[str, Any]:
    """Runs `ShardMaker.make` in a worker process."""
    if _maker is None:
        raise DataError("a worker process was not started as one")
    return _maker.make(chunk)
