"""What the codebook of a request begins with: the codec with its start entries, and the rows of a tuned pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mlx_zip.codec import CodecParams
from mlx_zip.errors import CodecError, ModelError
from mlx_zip.vocab.packs import PackLike, as_pack
from mlx_zip.vocab.tuned import TunedStart

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
    def tuned(self) -> int:
        """The number of start entries that have tuned rows."""
        return 0 if self.rows is None else len(self.rows)


def entries_of(pack: PackOrEntries) -> Any:
    """Returns a pack's entries, as a `TunedStart` if it has tuned rows; entries are returned as given.

    Raises `DataError` for a file that is no pack.
    """
    return as_pack(pack).start if isinstance(pack, PackLike) else pack


def make_begin(params: CodecParams, pack: PackOrEntries, model: Any, sides: int, width: int, to: torch.Tensor) -> Begin:
    """Returns what a request with this pack begins with.

    params: the model's codec. model: called for the model's fingerprint. to: a tensor of the rows' dtype and device.
    Raises `CodecError` for an entry that does not fit, `ModelError` for rows of another model, `DataError`.
    """
    start = entries_of(pack)
    try:
        own = replace(params, start=tuple(map(tuple, start)))
    except TypeError as error:  # something that is not a sequence where one belongs
        raise CodecError("a pack must be a sequence of entries, each a sequence of base ids") from error
    if not isinstance(start, TunedStart):
        return Begin(own, None, pack)
    check_rows(start, model(), sides == 1, width)
    return Begin(own, _tuned_rows(start, sides).to(to.device, to.dtype), pack)


def _tuned_rows(start: TunedStart, sides: int) -> torch.Tensor:
    """Returns a pack's rows [P, sides, D]: outputs, then inputs."""
    parts = (start.rows.output, start.rows.input)[:sides]
    return torch.from_numpy(np.stack(parts, axis=1))


def check_rows(start: TunedStart, model: str, one: bool, width: int) -> None:
    """Raises `ModelError` unless a pack's rows were tuned for the model with this fingerprint and fit it.

    one: whether the model has one row per entry, used as input row and as output row. width: values per row.
    """
    rows = start.rows
    if rows.model != model:
        raise ModelError(
            f"the pack's rows were tuned for another model ({rows.model[:12]}) than this one ({model[:12]}): use the "
            "pack with that model, or tune it for this one (mlx_zip vocab pack tune)"
        )
    if rows.one != one:
        wanted = "one array" if one else "two arrays"
        raise ModelError(f"the pack's input and output rows must be {wanted} for this model: tune the pack again")
    if (found := rows.output.shape[1]) != width:
        raise ModelError(f"the pack's rows have {found} values, the model's have {width}: tune the pack again")
