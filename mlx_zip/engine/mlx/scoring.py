"""Log-probabilities of ids under a model, in batches and bounded memory. All evaluations score rows with this module.

Rows of a batch are padded on the right. Padding does not change the scores before it, because models are causal and pad
ids never merge in a codebook. A model on another library than MLX scores rows with its method `score_row`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.codec.ids import Uint32s
from mlx_zip.config import AVAILABILITY
from mlx_zip.engine.sampling.canonical import restore_likely_ids
from mlx_zip.engine.sampling.exclusions import find_excluded_ids
from mlx_zip.engine.scored import LOGITS, Compressed, Scored, compress_parts
from mlx_zip.errors import CodecError, DataError, ModelError
from mlx_zip.layout import decoder_config, has_hypertokens
from mlx_zip.packs.pack import Pack


def scores_itself(model: Any) -> bool:
    """Returns whether a model is on another library than MLX, as `mlx_zip.cuda.evaluation_model.EvaluatedModel` is."""
    return hasattr(model, "score_row")


def context_limit(model: Any) -> int | None:
    """Returns the model's maximum number of positions, None if its config does not name one."""
    return decoder_config(model).get("max_position_embeddings")


def compress_row(model: Any, *parts: Uint32s, pack: Pack | None = None) -> Compressed:
    """Compresses parts of base ids for a model, see `compress_parts`.

    pack: pack to use in place of the model's own; ignored for a plain model. Raises `DataError` if the model lacks an
    id.
    """
    limit = model.layout.vocab_size if has_hypertokens(model) else decoder_config(model).get("vocab_size")
    for part in parts:
        if limit is not None and len(part) and part.max() >= limit:
            raise DataError(
                f"the tokenizer makes id {part.max()}, the model has base ids 0 to {limit - 1}: "
                "tokenizer and model do not belong together"
            )
    return (
        compress_parts(codec_of_model(model, pack), *parts, pack=pack)
        if has_hypertokens(model)
        else compress_parts(None, *parts)
    )


def codec_of_model(model: Any, pack: Pack | None = None) -> CodecParams:
    """Returns a zip2zip model's codec parameters, beginning with the entries of `pack` if given, else the model's.

    Raises `DataError` if the pack does not fit the model.
    """
    params = model.config.codec_params
    return params if pack is None else _codec_with_pack(params, pack)


@lru_cache(maxsize=4)
def _codec_with_pack(params: CodecParams, pack: Pack) -> CodecParams:
    """Returns codec parameters that begin with the entries of `pack`. Cached, because checking entries takes time."""
    try:
        return params.with_start(pack)
    except CodecError as error:
        raise DataError(f"the pack (--pack) does not fit the model: {error}") from error


def score_rows(
    model: Any,
    rows: Sequence[Compressed],
    batch_size: int = 8,
    availability: str = "causal",
    progress: Callable[[int], None] = lambda rows: None,
) -> list[Scored]:
    """Scores rows of at least 2 ids each, and returns one result per row. The scores do not depend on `batch_size`.

    availability: "causal": a hypertoken has probability only after the id that created its entry, as in generation.
    "legacy": all hypertokens of a row have probability at all positions of the row, as in upstream's own evaluation;
    the scores are then not comparable with causal ones, and each batch is one model call, however much memory that
    takes. progress: called with the number of rows just scored.

    If the model's config sets `canonical`, ids are forbidden as in decoding (`engine.sampling.canonical`). Raises
    `ModelError` if a probability is zero or not a number.
    """
    if batch_size < 1:
        raise ModelError(f"the batch size (--batch-size) must be at least 1, got {batch_size}")
    if availability not in AVAILABILITY:
        raise ModelError(f"availability {availability!r} is not one of {', '.join(AVAILABILITY)}")
    results: dict[int, Scored] = {}
    for batch in _batch_by_length(model, rows, batch_size):
        scored = _score_batch(model, [rows[i] for i in batch], availability)
        for i, result in zip(batch, scored, strict=True):
            _check_scores_finite(rows[i], result, i)
            results[i] = result
        progress(len(batch))
    return [results[i] for i in range(len(rows))]


def _check_scores_finite(row: Compressed, result: Scored, i: int) -> None:
    """Raises `ModelError` if a log-probability is not finite. i: the row's index, for the message."""
    bad = np.flatnonzero(~np.isfinite(result.logprobs))
    if len(bad):
        at = int(bad[0])
        raise ModelError(
            f"row {i}: the model gives id {row.ids[at + 1]} at index {at + 1} the log-probability {result.logprobs[at]}"
        )


def _batch_by_length(model: Any, rows: Sequence[Compressed], batch_size: int) -> list[list[int]]:
    """Returns lists of row indices, one list per batch; rows of a batch have similar lengths.

    The longest rows come first, so that running out of memory happens at once.
    """
    by_length = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    size = 1 if scores_itself(model) or _depends_on_base_length(model) else batch_size
    return [by_length[begin : begin + size] for begin in range(0, len(rows), size)]


def _depends_on_base_length(model: Any) -> bool:
    """Returns whether LongRoPE's factors depend on each row's base tokens; if so, rows cannot share a model call."""
    return has_hypertokens(model) and model.traits.long_context is not None and model.config.by_base


def score_in_parts(model: Any, row: Compressed, top: int, at_most: int) -> Iterator[Scored]:
    """Scores one row with a model on MLX, as `score_rows` does. Yields the scores of up to `at_most` ids per call.

    top: number of likeliest ids to report per position.
    """
    for part in _score_calls(model, [row], "causal", top, at_most):
        yield Scored(*(array[0] for array in part))


def _score_batch(model: Any, rows: Sequence[Compressed], availability: str) -> list[Scored]:
    """Scores rows as one batch, in as many model calls as the memory requires. availability: see `score_rows`."""
    if scores_itself(model):
        return [model.score_row(row, availability == "causal") for row in rows]
    arrays = [np.concatenate(part, axis=1) for part in zip(*_score_calls(model, rows, availability), strict=True)]
    # position t scores id t + 1, so a row of n ids has n - 1 scores
    return [Scored(*(array[b, : len(row.ids) - 1] for array in arrays)) for b, row in enumerate(rows)]


def _score_calls(
    model: Any, rows: Sequence[Compressed], availability: str, top: int = 0, at_most: int = LOGITS
) -> Iterator[tuple[NDArray[Any], ...]]:
    """Yields the fields of `Scored`, each [B, L, ...], per model call. top, at_most: as in `score_in_parts`."""
    lengths = [len(row.ids) for row in rows]
    pad_id = model.config.pad_id if has_hypertokens(model) else 0
    ids = np.full((len(rows), max(lengths)), pad_id, np.int32)
    for row, compressed in zip(ids, rows, strict=True):
        row[: len(compressed.ids)] = compressed.ids
    if has_hypertokens(model):  # the codebook of each row begins with the row's pack
        cache = model.make_cache(left_padding=[0] * len(rows), pack=[row.pack for row in rows])
        options = {"causal": availability == "causal"}
    else:
        cache, options = make_prompt_cache(model), {}
    row, at, excluded = _excluded_ids(model, rows)
    for begin, end in _columns_per_call(model, rows, ids.shape, availability, at_most):
        logits = model(mx.array(ids[:, begin:end]), cache=cache, **options)
        # canonical: forbid ids that the compressor would never write, unless they together have over half the
        # probability
        if len(here := np.flatnonzero((begin <= at) & (at < end))):
            canonical = mx.array(logits)
            canonical[mx.array(row[here]), mx.array(at[here] - begin), mx.array(excluded[here])] = -mx.inf
            logits = restore_likely_ids(canonical, logits)
        yield _read_scores(model, logits, ids[:, begin + 1 : end + 1], top)


def _excluded_ids(model: Any, rows: Sequence[Compressed]) -> tuple[NDArray[np.int64], ...]:
    """Returns the ids that canonical decoding forbids, as three arrays: row, index in the row, id forbidden next.

    The arrays are empty if the model's config does not set `canonical`.
    """
    if not has_hypertokens(model) or not model.config.canonical:
        return (np.zeros(0, np.int64),) * 3
    found = [find_excluded_ids(Codebook(codec_of_model(model, row.pack)), row.ids[:-1], row.breaks) for row in rows]
    which = np.repeat(np.arange(len(rows)), [len(at) for at, _ in found])
    return which, np.concatenate([at for at, _ in found]), np.concatenate([ids for _, ids in found])


def _columns_per_call(
    model: Any, rows: Sequence[Compressed], shape: tuple[int, ...], availability: str, at_most: int
) -> list[tuple[int, int]]:
    """Returns the columns (begin, end) that each model call reads, so few that the logits fit into memory.

    shape: shape of the padded batch. at_most: maximum number of columns per call. No call has columns both before and
    after LongRoPE's border, because columns before it must be read with the short factors, as in generation.
    """
    batch, end = shape[0], shape[1] - 1
    if availability == "legacy":
        return [(0, end)]
    width = model.layout.width if has_hypertokens(model) else decoder_config(model).get("vocab_size", 1 << 17)
    step = min(at_most, max(1, LOGITS // (batch * width)))
    border = min(end, _first_long_column(model, rows))
    starts = [*range(0, border, step), *range(border, end, step)]
    return list(pairwise([*starts, end]))


def _first_long_column(model: Any, rows: Sequence[Compressed]) -> int:
    """Returns the first column that is read with LongRoPE's long factors, 0 if the model has no LongRoPE."""
    context = model.traits.long_context if has_hypertokens(model) else None
    if context is None:
        return 0
    return int(np.searchsorted(rows[0].ends, context + 1)) if _depends_on_base_length(model) else context


def _read_scores(model: Any, logits: mx.array, targets: NDArray[np.int32], top: int) -> tuple[NDArray[Any], ...]:
    """Returns the fields of `Scored`, each [B, L, ...].

    logits: [B, L, W]. targets: next ids [B, L], which are scored. top: number of likeliest ids to report per position.
    """
    logits = logits.astype(mx.float32)
    wanted = mx.array(targets)
    total = mx.logsumexp(logits, axis=-1)
    chosen = mx.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0] - total
    greedy = mx.argmax(logits, axis=-1) == wanted
    mass = mx.zeros(total.shape)
    if has_hypertokens(model) and model.layout.codebook_size:
        hyper = logits[..., model.layout.vocab_size : model.layout.end]
        mass = mx.exp(mx.logsumexp(hyper, axis=-1) - total)
    best = _likeliest_ids(logits, top) if top else mx.zeros((*total.shape, 0), mx.uint32)
    likely = mx.take_along_axis(logits, best, axis=-1) - total[..., None]
    mx.eval(chosen, greedy, mass, best, likely)
    types = (np.float64, np.bool_, np.float64, np.int64, np.float64)
    return tuple(
        np.array(array).astype(kind) for array, kind in zip((chosen, greedy, mass, best, likely), types, strict=True)
    )


def _likeliest_ids(logits: mx.array, top: int) -> mx.array:
    """Returns the indices [..., top] of the largest logits [..., W], largest first, in a fraction of a sort's time."""
    some = mx.argpartition(-logits, kth=top - 1, axis=-1)[..., :top]
    order = mx.argsort(-mx.take_along_axis(logits, some, axis=-1), axis=-1)
    return mx.take_along_axis(some, order, axis=-1)
