"""Turns samples into the arrays of one training step: inputs, targets, entries, padded to recurring shapes.

Runs on the CPU, in numpy and the C codec. Equal entries of several samples are stored once per batch. With `--compile`,
most array sizes follow from the sample length and the number of entries, so that few combinations of shapes are traced:
4 instead of 10 in the test's run of 12 batches. Without `--compile`, there is less padding.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.engine.sampling.exclusions import find_excluded_ids
from mlx_zip.errors import CodecError, DataError, errors_as
from mlx_zip.files import exit_with_parent_process
from mlx_zip.training.prepare.shards import Sample, can_have_entries

CallFunction = Callable[..., Any]  # takes a function and its arguments, and returns the function's result
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SORTED_TOGETHER = 32  # samples of this many batches are sorted by length, so that each batch needs little padding
_PER_OCTAVE = 8  # number of fine padded sizes per doubling: at most 12.5 % padding


@dataclass(frozen=True)
class Padding:
    """Rules for the padded sizes of a batch's arrays. coarse: whether to use few sizes.

    A compiled step is traced and compiled again for every new combination of shapes. So compiled steps use few sizes,
    most of which follow from the length and the number of entries (`COARSE_PADDING`). Other steps use sizes close to
    the unpadded sizes (`FINE_PADDING`).
    """

    coarse: bool = False

    def padded_length(self, n: int) -> int:
        """Returns the padded number of positions per sample. n: positions of the longest sample."""
        return round_up_size(n, 32, 2) if self.coarse else round_up_size(n)

    def padded_entry_count(self, n: int) -> int:
        """Returns the padded number of distinct entries."""
        return round_up_size(n, 64, 2) if self.coarse else round_up_size(n, 32)

    def padded_exclusion_count(self, n: int) -> int:
        """Returns the padded number of pairs of a position and an excluded id."""
        return round_up_size(n, 64, 1) if self.coarse else round_up_size(n, 32)

    def padded_slot_count(self, n: int, length: int, codebook_size: int) -> int:
        """Returns the padded number of slots per sample. length: padded positions, which may each install an entry."""
        if not self.coarse:
            return round_up_size(n, 32)
        return max(round_up_size(n, 32, 2), min(length, round_up_size(codebook_size, 32, 2)))

    def padded_read_entry_count(self, n: int, entries: int) -> int:
        """Returns the padded number of entries that occur in inputs. entries: the padded number of all entries."""
        if not self.coarse:
            return round_up_size(n, 32)
        size = entries
        while size % 2 == 0 and size // 2 >= max(n, 32):
            size //= 2
        return size


def round_up_size(n: int, least: int = 8, per_octave: int = _PER_OCTAVE) -> int:
    """Rounds n up to one of `per_octave` evenly spaced sizes per doubling, and to at least `least`."""
    step = max(least, (1 << max(0, n - 1).bit_length()) // (2 * per_octave))
    return max(least, -(-n // step) * step)


FINE_PADDING, COARSE_PADDING = Padding(), Padding(coarse=True)


@dataclass(frozen=True)
class Batch:
    """The B samples of one step as arrays, with L positions each and the U distinct entries of their codebooks.

    inputs [B, L] int32: base ids, 0 in place of a hypertoken. entries [U, S] int32: each entry's base ids, padded.
    lengths [U] int32: number of base ids per entry, without padding. read [R] int32: the distinct entries that occur in
    the inputs, as indices into `entries`. input_rows [B, L] int32: index into `read` for a hypertoken, -1 for a base
    id. slots [B, K] int32: the entry in each slot of a sample, as an index into `entries`. index [B, L] int32, only for
    position mode `base_token_end`: positions.

    targets [B, L] int32: the id that each position should predict, a base id or vocab_size + slot. weights [B, L]
    float32: 1 where the loss counts, else 0. available [B, L] int32: number of slots that each position may predict.
    excluded_at, excluded [P] int32, only for canonical decoding: pairs of a position (row * L + column) and an id that
    cannot follow at this position. Without a codebook, `arrays` holds only inputs, targets and weights.

    samples: the samples' indices. ids, base_ids, n_bytes: sums over the samples, without padding. longest: number of
    inputs of the longest sample. installed: sum of the samples' numbers of entries. distinct: number of different
    entries. padding: rules for the arrays' sizes.
    """

    arrays: dict[str, NDArray[Any]]
    samples: tuple[int, ...]
    ids: int
    base_ids: int
    n_bytes: int
    longest: int
    distinct: int = 0
    installed: int = 0
    padding: Padding = FINE_PADDING


def sum_batch_counts(batches: Sequence[Batch]) -> dict[str, int]:
    """Returns sums over the batches: `ids`, `base_ids` and `n_bytes`, and `samples`, the number of samples."""
    sums = {name: sum(getattr(batch, name) for batch in batches) for name in ("ids", "base_ids", "n_bytes")}
    return {**sums, "samples": sum(len(batch.samples) for batch in batches)}


def make_batch(
    samples: Sequence[Sample],
    params: CodecParams,
    indices: Sequence[int] = (),
    *,
    availability: str = "causal",
    base_positions: bool = False,
    canonical: bool = False,
    padding: Padding = FINE_PADDING,
) -> Batch:
    """Returns the batch of some samples, which must have two ids or more each.

    indices: the samples' indices, for messages. availability: "causal" lets an entry be predicted from the position
    that installs the entry on, as in generation; "legacy" lets every position predict all of the sample's entries
    (arXiv 2506.01084 §2.4). base_positions: add `index`, positions counted in base ids. canonical: add the ids that the
    compressor would not have written (`engine.sampling.canonical`), only if availability is "causal". padding: rules
    for the arrays' sizes, which change losses only by rounding. Raises `DataError`, naming the sample, if a sample's
    ids do not fit its codebook, or if its number of base ids differs from the recorded number.
    """
    if params.policy != "freeze":
        raise DataError(f"training follows codebooks of policy freeze, not {params.policy}")
    books = _replay_samples(samples, params, indices or range(len(samples)), availability)
    longest = max(len(book.inputs) for book in books)
    length = padding.padded_length(longest)
    arrays = {
        "inputs": _pad_rows([np.where(book.slots_read < 0, book.inputs, 0) for book in books], length),
        "targets": _pad_rows([book.targets for book in books], length),
        "weights": _pad_rows([book.weights for book in books], length, np.float32),
    }
    batch = Batch(
        arrays,
        tuple(indices),
        ids=sum(len(book.targets) for book in books),
        base_ids=sum(sample.base_ids for sample in samples),
        n_bytes=sum(sample.n_bytes for sample in samples),
        longest=longest,
        padding=padding,
    )
    if can_have_entries(params):
        batch = _add_entry_arrays(batch, books, params, length)
    if base_positions:
        arrays["index"] = _pad_rows([book.index for book in books], length)
    if canonical and availability == "causal" and can_have_entries(params):
        arrays |= _make_excluded_pairs(books, length, padding)
    return batch


def _make_excluded_pairs(books: list[_ReplayedSample], length: int, padding: Padding) -> dict[str, NDArray[Any]]:
    """Returns `excluded_at` and `excluded` of a `Batch`. `excluded_at` is padded with the position after the last."""
    pairs = [book.excluded_pairs() for book in books]
    at = np.concatenate([i + row * length for row, (i, _) in enumerate(pairs)])
    more = padding.padded_exclusion_count(len(at)) - len(at)
    return {
        "excluded_at": np.pad(at, (0, more), constant_values=len(books) * length).astype(np.int32),
        "excluded": np.pad(np.concatenate([column for _, column in pairs]), (0, more)).astype(np.int32),
    }


def _replay_samples(
    samples: Sequence[Sample], params: CodecParams, indices: Sequence[int], availability: str
) -> list[_ReplayedSample]:
    """Replays each sample with its codebook. Raises `DataError`, with the sample's index, if a sample is damaged."""
    books = []
    for i, sample in zip(indices, samples, strict=True):
        again = "; delete its folder and prepare the data again"
        with errors_as(DataError, f"sample {i} is damaged", CodecError, DataError, end=again):
            books.append(_ReplayedSample(sample, params, availability))
    return books


def _add_entry_arrays(batch: Batch, books: list[_ReplayedSample], params: CodecParams, length: int) -> Batch:
    entries, lengths, held = _find_distinct_entries([book.entries for book in books])
    padding, most = batch.padding, max(map(len, held))
    more = padding.padded_entry_count(len(entries)) - len(entries)  # padding has length 1, so that no mean divides by 0
    batch.arrays.update(
        available=_pad_rows([book.available for book in books], length),
        entries=np.pad(entries, ((0, more), (0, 0)), constant_values=params.fill).astype(np.int32),
        lengths=np.pad(lengths, (0, more), constant_values=1).astype(np.int32),
        slots=_pad_rows(held, padding.padded_slot_count(most, length, params.codebook_size)),
        **_index_read_entries([book.slots_read for book in books], held, length, padding, len(entries) + more),
    )
    return replace(batch, distinct=len(entries), installed=sum(map(len, held)))


class _ReplayedSample:
    """One sample of n ids, replayed with its codebook as in generation, which gives n - 1 positions.

    inputs, targets, weights, index, available [n - 1]: see `Batch`. slots_read [n - 1]: slot of a hypertoken in the
    inputs, -1 for a base id. entries: base ids and lengths of the sample's entries, in slot order.
    """

    def __init__(self, sample: Sample, params: CodecParams, availability: str) -> None:
        params = sample.params(params)
        book = Codebook(params)
        before = len(book)
        ids = sample.ids.astype(np.int64)
        new = book.push(sample.ids[:-1])
        self.inputs, self.targets, self.weights = ids[:-1], ids[1:], sample.mask[1:].astype(np.float32)
        self.entries = book.padded_entries(0, len(book))
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
            raise DataError(f"id {self.targets[at]} at {at + 1} has no entry yet where it is to be predicted")
        spans = book.spans(sample.ids)
        if (base_ids := int(spans.sum())) != sample.base_ids:
            raise DataError(f"its ids stand for {base_ids} base ids, not for {sample.base_ids} as recorded")
        self.index = np.cumsum(spans[:-1]) - 1
        self.params, self.ids = params, sample.ids

    def excluded_pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns pairs as two arrays: positions whose loss counts, and ids that the compressor would not write."""
        at, column = find_excluded_ids(Codebook(self.params), self.ids[:-1])
        width = self.params.vocab_size + self.params.codebook_size
        at, column = np.divmod(np.unique(at * width + column), width)
        broken = at[self.targets[at] == column]  # separately compressed parts of a text meet here
        kept = (self.weights[at] > 0) & ~np.isin(at, broken)
        return at[kept], column[kept]


def _find_distinct_entries(
    books: list[tuple[NDArray[Any], NDArray[Any]]],
) -> tuple[NDArray[Any], NDArray[Any], list[NDArray[Any]]]:
    """Returns the U distinct entries of all samples, base ids [U, S] and lengths [U], and `held`.

    books: base ids and lengths of each sample's entries. held: for each sample an array that maps a slot to the index
    of its entry in [0, U). Entries with equal base ids have equal rows, even in different samples.
    """
    rows = np.concatenate([ids for ids, _ in books]).astype(np.uint32)
    lengths = np.concatenate([n for _, n in books]).astype(np.uint32)
    keys = np.ascontiguousarray(np.column_stack([rows, lengths])).view(np.dtype((np.void, 4 * (rows.shape[1] + 1))))
    _, first, inverse = np.unique(keys.reshape(-1), return_index=True, return_inverse=True)
    held = np.split(inverse.reshape(-1), np.cumsum([len(n) for _, n in books])[:-1])
    return rows[first], lengths[first], held


def _index_read_entries(
    slots: list[NDArray[np.int64]], held: list[NDArray[np.int64]], length: int, padding: Padding, entries: int
) -> dict[str, NDArray[Any]]:
    """Returns `read`, the distinct entries that occur in inputs, and `input_rows`, each input's index in `read` or -1.

    slots: for each sample the slot of each input, -1 for a base id. held: from `_find_distinct_entries`. `read` is
    sorted and padded, `input_rows` is padded to `length`. entries: padded number of all entries.
    """
    entry = [np.where(s < 0, -1, h[np.maximum(s, 0)] if len(h) else -1) for s, h in zip(slots, held, strict=True)]
    read = np.unique(np.concatenate(entry))
    read = read[read >= 0]
    rows = [np.where(e < 0, -1, np.searchsorted(read, e)) for e in entry]
    return {
        "read": _pad_rows([read], padding.padded_read_entry_count(len(read), entries))[0],
        "input_rows": _pad_rows(rows, length, fill=-1),
    }


def _pad_rows(rows: Sequence[NDArray[Any]], length: int, dtype: Any = np.int32, fill: int = 0) -> NDArray[Any]:
    out = np.full((len(rows), length), fill, dtype)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out


def order_batches(
    lengths: NDArray[np.int64], batch_size: int, seed: int, epoch: int, starts: NDArray[np.int64] | None = None
) -> list[NDArray[np.int64]]:
    """Returns the batches of one epoch, each an array of sample indices. Equal arguments give equal batches.

    lengths: number of ids per sample. starts: number of entries in every sample's starting codebook; None: no entries.
    Shuffles the samples, sorts groups of samples by `starts` and length, cuts the groups into batches, which then need
    little padding, and shuffles the batches. Leaves out samples of fewer than two ids, which predict nothing, and
    samples at the end of a group that do not fill a batch.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(np.flatnonzero(lengths >= 2))
    run = batch_size * _SORTED_TOGETHER
    starts = np.zeros_like(lengths) if starts is None else starts
    ordered = [part[np.lexsort((lengths[part], starts[part]))] for part in _split_into_groups(order, run)]
    batches = [batch for part in ordered for batch in _split_into_groups(part, batch_size) if len(batch) == batch_size]
    return [batches[i] for i in rng.permutation(len(batches))]


def _split_into_groups(values: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    return (values[i : i + size] for i in range(0, len(values), size))


# ---- worker processes


def call_in_this_process(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Calls a function in this process."""
    return function(*args, **named)


@contextmanager
def start_batch_workers(count: int) -> Iterator[CallFunction]:
    """Context manager: yields a function that runs a given function in a worker process and returns its result.

    count: number of worker processes; 0 to run in this process. Worker processes are used because making batches in a
    thread would slow down the thread that launches GPU kernels. Call the yielded function only from threads that have
    called `block_stop_signals`: then the worker processes, which the first call starts, survive a stop signal from the
    terminal. A call raises `BrokenProcessPool` if a worker process was killed.
    """
    if not count:
        yield call_in_this_process
        return
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start_batch_worker) as pool:
        yield lambda function, *args, **named: pool.submit(function, *args, **named).result()


def block_stop_signals() -> None:
    """Blocks stop signals in this thread and in processes that the thread starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _start_batch_worker() -> None:
    os.setsid()  # leaves the terminal's process group, which gets the signals
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # discards a pending signal
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the pool ends its processes with SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    exit_with_parent_process()
