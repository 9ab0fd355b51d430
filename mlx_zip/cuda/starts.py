"""What the codebook of a request begins with: the codec with its start entries, and the rows of a tuned pack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mlx_zip.codec import CodecParams
from mlx_zip.vocab.packs import PackLike
from mlx_zip.vocab.starts import start_of, with_starts
from mlx_zip.vocab.tuned import TunedStart, check_tuned

PackOrEntries = PackLike | TunedStart | Sequence[Any]


@dataclass(frozen=True, eq=False)
class Begin:
    """What a request begins with. params: the codec. rows: tuned rows [P, sides, D] on the device, None without.

    given: the pack or entries that this was made of; kept, so that its id stays its own.
    """

    params: CodecParams
    rows: torch.Tensor | None
    given: Any

    @property
    def entries(self) -> int:
        """The number of start entries."""
        return len(self.params.start or ())

    @property
    def tuned(self) -> int:
        """The number of start entries that have tuned rows: all or none."""
        return 0 if self.rows is None else len(self.rows)


def make_begin(
    params: CodecParams, pack: PackOrEntries, model: Callable[[], str], sides: int, like: torch.Tensor
) -> Begin:
    """Returns what a request with this pack begins with.

    params: the model's codec. model: returns the model's fingerprint. sides: 1 if an entry's input row and output row
    are one, else 2. like: a tensor [any, D] with the rows' width, dtype and device. Raises `CodecError` for an entry
    that does not fit, `ModelError` for rows of another model, `DataError`.
    """
    start = start_of(pack)
    own = with_starts(params, [start])[0]
    if not isinstance(start, TunedStart):
        return Begin(own, None, pack)
    check_tuned(start, model(), sides == 1, like.shape[1])
    parts = (start.rows.output, start.rows.input)[:sides]
    return Begin(own, torch.from_numpy(np.stack(parts, axis=1)).to(like.device, like.dtype), pack)
