"""How likely the ids of a prompt are: from arrays of scores to the ids that an engine's front gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from mlx_zip.codec import Codebook, CodecParams
from mlx_zip.codec.ids import Uint32s
from mlx_zip.engine.interface import Likely, PromptId
from mlx_zip.evaluation.scored import Compressed, Scored, compress_parts
from mlx_zip.vocab.starts import with_starts
from mlx_zip.vocab.tuned import AnyStart


def read_as(params: CodecParams | None, base_ids: Uint32s, start: AnyStart | None) -> Compressed:
    """Returns base ids as a model reads them. The first one is read alone, so that all others have a probability.

    params: None for a model without hypertokens. start: see `Compressed`.
    """
    begun = None if params is None else with_starts(params, [start])[0]
    return compress_parts(begun, base_ids[:1], base_ids[1:], start=start)


def prompt_ids(params: CodecParams | None, row: Compressed, parts: Iterable[Scored]) -> Iterator[PromptId]:
    """Yields the ids of a row, each with its score.

    params: as in `read_as`. parts: the scores of its second to its last id.
    """
    book = None if params is None else Codebook(with_starts(params, [row.start])[0])

    def expanded(ids: np.ndarray) -> tuple[int, ...]:
        return tuple(map(int, ids if book is None else book.expand(ids)))

    ids = iter(row.ids[:, None])
    before = next(ids)
    yield PromptId(expanded(before))
    for scored in parts:
        for logprob, likely, logprobs in zip(
            scored.logprobs, scored.likely_ids.astype(np.uint32)[..., None], scored.likely_logprobs, strict=True
        ):
            if book is not None:
                book.push(before)
            before = next(ids)
            best = tuple(Likely(expanded(one), float(value)) for one, value in zip(likely, logprobs, strict=True))
            yield PromptId(expanded(before), float(logprob), best)
