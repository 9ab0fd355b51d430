"""Tuned rows: what the entries of a pack were trained to, for one model.

A hyper-encoder makes rows of any entry, but it has not seen the pack's texts; rows that are trained on them serve
better, and a model without an encoder has no others. They are good for the model that they were tuned for alone, whose
fingerprint they bear.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.pack import Start
from mlx_zip.errors import DataError

DTYPES = ("float16", "float32")


@dataclass(frozen=True)
class PlainCodec:
    """What a model that is no zip2zip one needs besides a pack's entries: names as in `ZipConfig`.

    Raises `DataError` for fields of other types.
    """

    vocab_size: int
    disabled_ids: tuple[int, ...]
    pad_id: int
    position_mode: str = "compressed"

    def __post_init__(self) -> None:
        numbers = (self.vocab_size, self.pad_id, *self.disabled_ids)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise DataError(f"vocab_size, pad_id and disabled_ids must be integers from 0, got {numbers!r:.60}")
        if not isinstance(self.position_mode, str):
            raise DataError(f"position_mode must be a name, got {self.position_mode!r:.40}")


@dataclass(frozen=True, eq=False)
class TunedRows:
    """input, output [P, D] float16 or float32: the rows of a pack's entries in slot order.

    Where a model's embedding is its head and one encoder makes both, the two are one array. model: fingerprint of the
    model (`mlx_zip.hyper.model_fingerprint`). plain: None for a zip2zip model, which has a codec of its own. Raises
    `DataError` for arrays that are no such rows.
    """

    input: NDArray[Any]
    output: NDArray[Any]
    model: str
    plain: PlainCodec | None = None

    def __post_init__(self) -> None:
        for name, rows in (("input", self.input), ("output", self.output)):
            if rows.ndim != 2 or not rows.size or rows.dtype.name not in DTYPES or rows.shape != self.output.shape:
                raise DataError(f"{name} rows must be [P, D] of {' or '.join(DTYPES)}, not {rows.dtype} {rows.shape}")
            if not np.isfinite(rows).all():
                raise DataError(f"{name} rows hold values that are no numbers")

    @property
    def one(self) -> bool:
        """Whether input and output rows are one array; two with equal values are two."""
        return self.input is self.output

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the rows and of what they are for."""
        digest = sha256(json.dumps([self.model, self.plain and asdict(self.plain)], sort_keys=True).encode())
        for rows in (self.output,) if self.one else (self.input, self.output):
            digest.update(f"{rows.dtype} {rows.shape}".encode() + np.ascontiguousarray(rows).tobytes())
        return digest.hexdigest()

    def chosen(self, index: Sequence[int]) -> TunedRows:
        """The rows at an index, in its order."""
        at = np.array(index, np.int64)
        output = self.output[at]
        return TunedRows(output if self.one else self.input[at], output, self.model, self.plain)

    def same_model(self, other: TunedRows) -> bool:
        """Whether both are for one model."""
        return (self.model, self.plain, self.one) == (other.model, other.plain, other.one)


class TunedStart(Sequence[tuple[int, ...]]):
    """A starting codebook whose entries bring their rows; wherever entries may be given, this may. It never changes.

    pack: fingerprint of the pack that they are of, None when not known. Two are equal only if they are one: as keys
    they need no look at thousands of entries.
    """

    def __init__(self, entries: Start, rows: TunedRows, pack: str | None = None) -> None:
        if len(entries) != len(rows.output):
            raise DataError(f"there are {len(rows.output)} tuned rows for {len(entries)} entries")
        self.entries, self.rows, self.pack = entries, rows, pack

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of entries and rows."""
        return sha256(json.dumps([self.entries, self.rows.fingerprint]).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: Any) -> Any:
        return self.entries[index]

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self.entries)

    def __deepcopy__(self, memo: dict[int, Any]) -> TunedStart:
        return self


AnyStart = Start | TunedStart


def rows_to_arrays(rows: TunedRows) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The arrays of a pack file, and what its `about` says of them."""
    arrays = {"output_rows": rows.output} | ({} if rows.one else {"input_rows": rows.input})
    return arrays, {"model": rows.model, "plain": rows.plain and asdict(rows.plain)}


def rows_from_arrays(path: Any, arrays: Mapping[str, NDArray[Any]], about: Any) -> TunedRows:
    """The way back. Raises `DataError` naming the file."""
    try:
        plain = about["plain"]
        if plain is not None:
            plain = PlainCodec(**{**plain, "disabled_ids": tuple(plain["disabled_ids"])})
        if not isinstance(about["model"], str):
            raise DataError(f"the model of its rows is {about['model']!r:.40}, not a fingerprint")
        output = arrays["output_rows"]
        return TunedRows(arrays.get("input_rows", output), output, about["model"], plain)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: its tuned rows are not whole ({error!r:.80}); tune the pack again") from error
