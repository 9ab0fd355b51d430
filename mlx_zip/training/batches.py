"""Samples to the arrays of one step: shared entries, availability, targets, padded to shapes that recur.

All of it runs on the host, in numpy and the C codec; nothing is learnt here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.canonical import excluded_behind
from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.errors import CodecError, DataError
from mlx_zip.training.shards import Sample, grows

BUCKETS_PER_OCTAVE = 8  # padded sizes: at most 12.5 % too long, and few enough for compiled steps to recur
SORTED_TOGETHER = 32  # batches whose samples are sorted by length before they are cut, so that little is padding


@dataclass(frozen=True)
class Batch:
    """One step's samples as arrays; `arrays` holds what `Samples` names, and:

    targets [B, L] int32: the column each position should predict, base id or vocab_size + slot. weights [B, L]
    float32: 1 where the loss counts. available [B, L] int32: how many slots are open there. excluded_at, excluded [P]
    int32, of a canonical model: a position, counted through all rows, and a column that its target cannot be.
    A codec without codebook gives inputs, targets and weights alone. samples: their indices. ids, base_ids, n_bytes:
    of the real part. longest: ids of the longest sample. distinct, installed: entries before and after sharing.
    """

    arrays: dict[str, NDArray[Any]]
    samples: tuple[int, ...]
    ids: int
    base_ids: int
    n_bytes: int
    longest: int
    distinct: int = 0
    installed: int = 0


def make_batch(
    samples: Sequence[Sample],
    params: CodecParams,
    indices: Sequence[int] = (),
    *,
    availability: str = "causal",
    base_positions: bool = False,
    canonical: bool = False,
) -> Batch:
    """The arrays of some samples of two ids or more.

    availability: "causal" opens an entry from the position that created it, as generation does; "legacy" opens the
    sample's whole codebook everywhere (arXiv 2506.01084 §2.4). base_positions: positions count base ids. canonical:
    say what the compressor would not have written (`mlx_zip.canonical`); "legacy" knows no such thing. Raises
    `DataError` naming a sample that its codebook cannot read, or that stands for other text than was prepared.
    """
    if params.policy != "freeze":
        raise DataError(f"training follows codebooks of policy freeze, not {params.policy}")
    books = _follow(samples, params, indices or range(len(samples)), availability)
    longest = max(len(book.inputs) for book in books)
    length = bucket(longest)
    arrays = {
        "inputs": _pad([np.where(book.slots_read < 0, book.inputs, 0) for book in books], length),
        "targets": _pad([book.targets for book in books], length),
        "weights": _pad([book.weights for book in books], length, np.float32),
    }
    batch = Batch(
        arrays,
        tuple(indices),
        ids=sum(len(book.targets) for book in books),
        base_ids=sum(sample.base_ids for sample in samples),
        n_bytes=sum(sample.n_bytes for sample in samples),
        longest=longest,
    )
    if grows(params):
        batch = _with_entries(batch, books, params, length)
    if base_positions:
        arrays["index"] = _pad([book.index for book in books], length)
    if canonical and availability == "causal" and grows(params):
        arrays |= _excluded(books, params, length)
    return batch


def _excluded(books: list[_Followed], params: CodecParams, length: int) -> dict[str, NDArray[Any]]:
    """Positions and columns; padded with the position after the last one."""
    pairs = [book.excluded(params) for book in books]
    at = np.concatenate([i + row * length for row, (i, _) in enumerate(pairs)])
    more = bucket(len(at), least=32) - len(at)
    return {
        "excluded_at": np.pad(at, (0, more), constant_values=len(books) * length).astype(np.int32),
        "excluded": np.pad(np.concatenate([column for _, column in pairs]), (0, more)).astype(np.int32),
    }


def _follow(
    samples: Sequence[Sample], params: CodecParams, indices: Sequence[int], availability: str
) -> list[_Followed]:
    books = []
    for i, sample in zip(indices, samples, strict=True):
        try:
            books.append(_Followed(sample, params, availability))
        except (CodecError, DataError) as error:
            raise DataError(f"sample {i} is damaged: {error}; delete its folder and prepare the data again") from error
    return books


def _with_entries(batch: Batch, books: list[_Followed], params: CodecParams, length: int) -> Batch:
    entries, lengths, where = _distinct([book.entries for book in books])
    more = bucket(len(entries), least=32) - len(entries)  # padding entries, one base id long: means over them exist
    batch.arrays.update(
        available=_pad([book.available for book in books], length),
        entries=np.pad(entries, ((0, more), (0, 0)), constant_values=params.fill).astype(np.int32),
        lengths=np.pad(lengths, (0, more), constant_values=1).astype(np.int32),
        slots=_pad(where, bucket(max(map(len, where)), least=32)),
        **_read_entries([book.slots_read for book in books], where, length),
    )
    return replace(batch, distinct=len(entries), installed=sum(map(len, where)))


class _Followed:
    """One sample, followed by its codebook as generation would."""

    def __init__(self, sample: Sample, params: CodecParams, availability: str) -> None:
        params = sample.params(params)
        book = Codebook(params)
        before = len(book)
        ids = sample.ids.astype(np.int64)
        new = book.push(sample.ids[:-1])
        self.inputs, self.targets, self.weights = ids[:-1], ids[1:], sample.mask[1:].astype(np.float32)
        self.entries = book.rows(0, len(book))
        hyper = (self.inputs >= params.vocab_size) & ~np.isin(self.inputs, params.disabled_ids)
        self.slots_read = np.where(hyper, self.inputs - params.vocab_size, -1)
        self.available = np.full(len(self.inputs), len(book), np.int64)
        if availability == "causal":
            installed = np.zeros(len(self.inputs), np.int64)
            installed[new.at] = 1
            self.available = before + np.cumsum(installed)
        closed = (self.targets >= params.vocab_size + self.available) & ~np.isin(self.targets, params.disabled_ids)
        if closed.any():
            at = int(np.argmax(closed))
            raise DataError(f"id {self.targets[at]} at {at + 1} has no entry where it is to be predicted")
        spans = book.spans(sample.ids)
        if (base_ids := int(spans.sum())) != sample.base_ids:
            raise DataError(f"its ids stand for {base_ids} base ids, not for {sample.base_ids} as recorded")
        self.index = np.cumsum(spans[:-1]) - 1
        self.start, self.ids = params.start, sample.ids

    def excluded(self, params: CodecParams) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Pairs of a position whose loss counts and a column that is no canonical target there; each [pairs]."""
        found = excluded_behind(Codebook(replace(params, start=self.start)), self.ids[:-1])
        at, column = np.unique(np.stack(found), axis=1)
        broken = at[self.targets[at] == column]  # a text's parts that were compressed one by one meet here
        kept = (self.weights[at] > 0) & ~np.isin(at, broken)
        return at[kept], column[kept]


def _distinct(books: list[tuple[NDArray[Any], NDArray[Any]]]) -> tuple[NDArray[Any], NDArray[Any], list[NDArray[Any]]]:
    """Each distinct entry once, as base_ids [U, S] and lengths [U], and per sample which of them its slots hold.

    Entries of equal base ids are one entry, whichever samples installed them: their rows are equal too.
    """
    rows = np.concatenate([ids for ids, _ in books]).astype(np.uint32)
    lengths = np.concatenate([n for _, n in books]).astype(np.uint32)
    keys = np.ascontiguousarray(np.column_stack([rows, lengths])).view(np.dtype((np.void, 4 * (rows.shape[1] + 1))))
    _, first, inverse = np.unique(keys.reshape(-1), return_index=True, return_inverse=True)
    where = np.split(inverse.reshape(-1), np.cumsum([len(n) for _, n in books])[:-1])
    return rows[first], lengths[first], where


def _read_entries(
    slots: list[NDArray[np.int64]], where: list[NDArray[np.int64]], length: int
) -> dict[str, NDArray[Any]]:
    """Which entries the inputs read, and where each hypertoken finds its row among them."""
    entry = [np.where(s < 0, -1, w[np.maximum(s, 0)] if len(w) else -1) for s, w in zip(slots, where, strict=True)]
    read = np.unique(np.concatenate(entry))
    read = read[read >= 0]
    rows = [np.where(e < 0, -1, np.searchsorted(read, e)) for e in entry]
    return {"read": _pad([read], bucket(len(read), least=32))[0], "input_rows": _pad(rows, length, fill=-1)}


def bucket(n: int, least: int = 8) -> int:
    """The padded size for n: a multiple of an eighth of the power of two below it, at least `least`."""
    step = max(least, (1 << max(0, n - 1).bit_length()) // (2 * BUCKETS_PER_OCTAVE))
    return max(least, -(-n // step) * step)


def _pad(rows: Sequence[NDArray[Any]], length: int, dtype: Any = np.int32, fill: int = 0) -> NDArray[Any]:
    out = np.full((len(rows), length), fill, dtype)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out


def batch_order(
    lengths: NDArray[np.int64], batch_size: int, seed: int, epoch: int, starts: NDArray[np.int64] | None = None
) -> list[NDArray[np.int64]]:
    """The batches of one epoch as arrays of sample indices; a function of its arguments alone.

    Samples are shuffled, sorted within runs of batches by `starts` and by length, cut, and the batches shuffled again.
    Samples of fewer than two ids predict nothing and are left out, as are those that do not fill a batch. starts: of
    every sample, entries of its starting codebook; those of a batch are then of a size, but where two sizes meet.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(np.flatnonzero(lengths >= 2))
    run = batch_size * SORTED_TOGETHER
    starts = np.zeros_like(lengths) if starts is None else starts
    ordered = [part[np.lexsort((lengths[part], starts[part]))] for part in _cut(order, run)]
    batches = [batch for part in ordered for batch in _cut(part, batch_size) if len(batch) == batch_size]
    return [batches[i] for i in rng.permutation(len(batches))]


def _cut(values: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    return (values[i : i + size] for i in range(0, len(values), size))
