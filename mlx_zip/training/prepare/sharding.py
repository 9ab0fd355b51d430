"""Makes one shard of prepared data from one chunk of items; runs in worker processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.errors import DataError
from mlx_zip.files import exit_with_parent_process, write_json
from mlx_zip.text.sources import Item, Skipped, parse_item
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.training.prepare.encoding import EncodedRecord, RecordEncoder, compress_window, cut_training_windows
from mlx_zip.training.prepare.plan import PreparationPlan
from mlx_zip.training.prepare.shards import Sample, write_shard

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
