"""Bits per byte: a figure that compares models with different vocabularies.

For a text of B UTF-8 bytes, with p the model's probability of each id of the text (zip2zip, section 3.4):

    bits per byte = -sum(log2 p) / B          byte-perplexity = 2 ** (bits per byte) = (product of p) ** (-1 / B)

A text has many segmentations into hypertokens. Only the canonical segmentation is scored, so a zip2zip model's figure
is an upper bound: the text's total probability, over all segmentations, is higher.

Texts are scored in windows of base ids, and every model of a comparison scores the same windows. Before each window the
model reads one unscored id (bos, or eos if the tokenizer has no bos), so that every byte of the text is predicted. Each
window begins with a new codebook.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.ids import Uint32s
from mlx_zip.engine.mlx.scoring import compress_row, context_limit, score_rows, scores_itself
from mlx_zip.engine.scored import Compressed, Scored
from mlx_zip.errors import DataError
from mlx_zip.layout import has_hypertokens
from mlx_zip.packs.pack import Pack
from mlx_zip.text.documents import Document
from mlx_zip.text.token_facts import encode_with_bytes


@dataclass(frozen=True)
class ScoredWindow:
    """A piece of text that is scored on its own.

    base_ids: uint32 [n]. scored: bool [n], False for an eos between documents. n_bytes: UTF-8 bytes of the text.
    """

    base_ids: Uint32s
    scored: NDArray[np.bool_]
    n_bytes: int


@dataclass(frozen=True)
class Windows:
    """All windows of some documents. prefix: the id that a model reads before each window.

    altered: number of documents whose base ids decode to a text that differs from the document.
    """

    windows: tuple[ScoredWindow, ...]
    prefix: int
    altered: int

    @property
    def longest(self) -> int:
        """Number of base ids in the longest window."""
        return max(len(window.base_ids) for window in self.windows)

    def same_as(self, other: Windows) -> bool:
        """Returns whether two sets of windows have equal prefixes and equal base ids."""
        both = zip(self.windows, other.windows, strict=False)
        same_ids = all(np.array_equal(mine.base_ids, theirs.base_ids) for mine, theirs in both)
        return self.prefix == other.prefix and len(self.windows) == len(other.windows) and same_ids


def cut_scored_windows(
    tokenizer: Any, documents: Sequence[Document], context: int, fill_windows: bool = False
) -> Windows:
    """Encodes documents and cuts them into windows of at most `context` base ids.

    Each document begins a new window, unless `fill_windows`: then the documents are joined with an eos between them,
    and only the last window may be shorter. The windows' bytes add up to the text's, even if a window ends inside a
    character. Raises `DataError` if `context` is below 1, a document has no ids or a needed bos or eos is missing.
    """
    if context < 1:
        raise DataError(f"the context (--context) must be at least 1 base id, got {context}")
    streams = [_encode_scored_document(tokenizer, document) for document in documents]
    pairs = zip(documents, streams, strict=True)
    altered = sum(_decode_ids(tokenizer, stream[0]) != document.text for document, stream in pairs)
    streams = [_join_with_eos(tokenizer, streams)] if fill_windows else streams
    windows = tuple(window for stream in streams for window in _cut_stream(*stream, context))
    return Windows(windows, choose_prefix_id(tokenizer), altered)


def choose_prefix_id(tokenizer: Any) -> int:
    """Returns the id to read before a text: bos, else eos, else the lowest eos id. Raises `DataError` without any."""
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id, min(tokenizer.eos_token_ids, default=None)):
        if token_id is not None:
            return int(token_id)
    raise DataError("the tokenizer has neither a bos nor an eos token, so the first id of a window has no context")


_Stream = tuple[Uint32s, NDArray[np.bool_], NDArray[np.int64]]  # ids, scored, bytes per id


def _encode_scored_document(tokenizer: Any, document: Document) -> _Stream:
    """Returns a document as base ids, all scored, with the bytes per id. Raises `DataError` if there are no ids."""
    ids, n_bytes = encode_with_bytes(tokenizer, document.text)
    if not len(ids):
        raise DataError(f"{document.source}: the tokenizer makes no token of its {document.n_bytes} bytes")
    return ids, np.ones(len(ids), np.bool_), n_bytes


def _join_with_eos(tokenizer: Any, streams: Sequence[_Stream]) -> _Stream:
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no eos token to stand between packed documents (--fill-windows)")
    eos = np.array([tokenizer.eos_token_id], np.uint32), np.zeros(1, np.bool_), np.zeros(1, np.int64)
    ids, scored, n_bytes = zip(*[part for stream in streams for part in (eos, stream)][1:], strict=True)
    return np.concatenate(ids), np.concatenate(scored), np.concatenate(n_bytes)


def _cut_stream(
    ids: Uint32s, scored: NDArray[np.bool_], n_bytes: NDArray[np.int64], context: int
) -> Iterator[ScoredWindow]:
    for begin in range(0, len(ids), context):
        part = slice(begin, begin + context)
        yield ScoredWindow(ids[part], scored[part], int(n_bytes[part].sum()))


def _decode_ids(tokenizer: Any, ids: Uint32s) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass(frozen=True)
class BitsResult:
    """The result of scoring n windows with one model.

    bits: negative log2-probability of each window's text, float64 [n]. n_bytes: UTF-8 bytes of each window's text,
    int64 [n]. base_ids, ids, hypertokens: counts over all windows, without the unscored id before each window.
    hyper_mass: mean over ids of the total probability of all hypertokens. seconds: time of compression and scoring.
    peak_bytes: peak memory, as the engine measures it. availability: see `score_rows`; None for a plain model.
    """

    bits: NDArray[np.float64]
    n_bytes: NDArray[np.int64]
    base_ids: int
    ids: int
    hypertokens: int
    hyper_mass: float
    seconds: float
    peak_bytes: int
    availability: str | None

    @property
    def bits_per_byte(self) -> float:
        """Bits of all windows divided by bytes of all windows."""
        return float(self.bits.sum() / self.n_bytes.sum())

    @cached_property
    def standard_error(self) -> float | None:
        """Standard error of bits_per_byte over windows (see `ratio_standard_error`); None for a single window."""
        return ratio_standard_error(self.bits, self.n_bytes)

    def record(self) -> dict[str, Any]:
        """Returns the figures by name, for a report; *_per_s: per second of compression and scoring."""
        return {
            "bits_per_byte": self.bits_per_byte,
            "bits_per_byte_standard_error": self.standard_error,
            "byte_perplexity": 2.0**self.bits_per_byte,
            "windows": len(self.bits),
            "bytes": int(self.n_bytes.sum()),
            "base_ids": self.base_ids,
            "ids": self.ids,
            "compression_rate": self.ids / self.base_ids,  # 1 without hypertokens, lower is better (zip2zip, A.1)
            "base_ids_per_id": self.base_ids / self.ids,
            "hyper_share": self.hypertokens / self.ids,
            "hyper_mass": self.hyper_mass,
            "availability": self.availability,
            "seconds": self.seconds,
            "bytes_per_s": float(self.n_bytes.sum()) / self.seconds,
            "ids_per_s": self.ids / self.seconds,
            "peak_bytes": self.peak_bytes,
        }


def measure_bits(
    model: Any,
    windows: Windows,
    batch_size: int = 8,
    availability: str = "causal",
    pack: Pack | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> BitsResult:
    """Scores every window with a zip2zip or a plain mlx-lm model and returns the figures.

    batch_size: windows per model call. availability: see `score_rows`. pack: see `compress_row`. progress: called with
    the number of windows just scored. Raises `DataError` if a window has more base ids than the model has positions.
    """
    check_context_fits("windows", windows.longest, context_limit(model))
    prefix = np.array([windows.prefix], np.uint32)
    if not scores_itself(model):
        mx.reset_peak_memory()
    begun = time.perf_counter()
    rows = [compress_row(model, prefix, window.base_ids, pack=pack) for window in windows.windows]
    scored = score_rows(model, rows, batch_size, availability, progress)
    seconds = time.perf_counter() - begun
    bits = [count_window_bits(*parts) for parts in zip(windows.windows, rows, scored, strict=True)]
    ids = sum(len(row.ids) - 1 for row in rows)
    return BitsResult(
        bits=np.array(bits),
        n_bytes=np.array([window.n_bytes for window in windows.windows], np.int64),
        base_ids=sum(len(window.base_ids) for window in windows.windows),
        ids=ids,
        hypertokens=int(sum((row.spans > 1).sum() for row in rows)),
        hyper_mass=float(sum(part.hyper_mass.sum() for part in scored) / ids),
        seconds=seconds,
        peak_bytes=model.peak_bytes() if scores_itself(model) else mx.get_peak_memory(),
        availability=availability if has_hypertokens(model) else None,
    )


def check_context_fits(what: str, base_ids: int, limit: int | None) -> None:
    """Raises `DataError` if windows or requests (`what`) of `base_ids` base ids exceed a model's `limit` positions.

    A window of n base ids takes n positions: the prefix and all base ids but the last, which is predicted but not read.
    limit: None for a model without a limit in its config.
    """
    if limit is not None and base_ids > limit:
        raise DataError(f"{what} of {base_ids} base ids (--context) do not fit the model's {limit} positions")


def count_window_bits(window: ScoredWindow, row: Compressed, scored: Scored) -> float:
    """Returns the bits of a window's text: the sum over the window's ids, without an eos between documents.

    row: the prefix and the window's base ids, compressed. scored: the model's predictions for `row`.
    """
    starts = row.ends[:-1] - row.spans[0]  # index in the window of the first base id of each id after the prefix
    counted = np.logical_or.reduceat(window.scored, starts)
    return float(-scored.logprobs[counted].sum() / math.log(2))


def ratio_standard_error(values: NDArray[np.float64], weights: NDArray[np.int64]) -> float | None:
    """Returns the standard error of sum(values) / sum(weights) over n pairs, by linearisation; None for n < 2."""
    n = len(values)
    if n < 2:
        return None
    residuals = values - values.sum() / weights.sum() * weights
    return float(math.sqrt(n / (n - 1) * np.square(residuals).sum()) / weights.sum())


def compare_bits(model: BitsResult, baseline: BitsResult) -> dict[str, float | None]:
    """Returns a model's bits per byte minus the baseline's: absolute, with standard error over windows, and relative.

    Raises `DataError` if the two results were not measured on the same windows.
    """
    if not np.array_equal(model.n_bytes, baseline.n_bytes):
        raise DataError("the two models were not measured on the same windows")
    difference = model.bits_per_byte - baseline.bits_per_byte
    return {
        "bits_per_byte_difference": difference,
        "bits_per_byte_difference_standard_error": ratio_standard_error(model.bits - baseline.bits, model.n_bytes),
        "bits_per_byte_relative": difference / baseline.bits_per_byte,
    }
