"""Tuned rows: the embedding and output rows of a pack's entries, trained for one model.

A hyper-encoder makes rows for any entry, but was not trained on the pack's texts, so tuned rows predict better. A model
without a hyper-encoder has no rows but tuned ones. Tuned rows hold the fingerprint of their model and fit no other one.

When a request begins, tuned rows are put into its row tables, and are then read like encoded rows. The row store, which
knows entries by their base ids alone, never holds them. A plain model with a tuned pack runs as a zip2zip model whose
codebook is full from the start and whose encoder takes the mean, so no other code treats this model specially. A plain
model refuses a pack that was not tuned for it, because the entries would have untrained rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.config import EncoderConfig, ZipConfig
from mlx_zip.errors import DataError, ModelError

DTYPES = ("float16", "float32")


@dataclass(frozen=True)
class PlainCodec:
    """The codec settings in a pack for a plain model, which has none itself; fields are named as in `ZipConfig`.

    Raises `DataError` if a field has a wrong type.
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

    def config(self, entries: Sequence[Sequence[int]], width: int) -> ZipConfig:
        """Returns the config of a plain model of width `width` that begins with these tuned entries.

        The codebook is exactly as large as the pack, so no entry is ever added. The encoder is named but never used,
        because every entry has a tuned row. Raises `ConfigError` if settings and entries do not fit together.
        """
        return ZipConfig(
            vocab_size=self.vocab_size,
            codebook_size=len(entries),
            merge_size=max(map(len, entries)),
            disabled_ids=self.disabled_ids,
            pad_id=self.pad_id,
            position_mode=self.position_mode,
            format_version=2,
            encoder=EncoderConfig("averaging", width, tie_encoders=True),
            base_model=".",
            start=tuple(map(tuple, entries)),
        )


@dataclass(frozen=True, eq=False)
class TunedRows:
    """The rows of a pack's entries in slot order: input and output, each [P, D] float16 or float32.

    For a model with tied embeddings and one encoder, input and output are one array. model: fingerprint of the model
    (`mlx_zip.models.rows.fingerprints`). plain: the codec of a plain model, None for a zip2zip model. Raises
    `DataError` for arrays of other shapes or dtypes, or with values that are not finite.
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
                raise DataError(f"{name} rows hold values that are not finite")

    @property
    def sides_are_one(self) -> bool:
        """Whether input and output rows are the same array object."""
        return self.input is self.output

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the rows, the model's fingerprint and the plain model's codec."""
        digest = sha256(json.dumps([self.model, self.plain and asdict(self.plain)], sort_keys=True).encode())
        for rows in (self.output,) if self.sides_are_one else (self.input, self.output):
            digest.update(f"{rows.dtype} {rows.shape}".encode() + np.ascontiguousarray(rows).tobytes())
        return digest.hexdigest()

    def select(self, index: Sequence[int]) -> TunedRows:
        """Returns the tuned rows of these slots only, in the order given."""
        at = np.array(index, np.int64)
        output = self.output[at]
        return TunedRows(output if self.sides_are_one else self.input[at], output, self.model, self.plain)

    def is_for_same_model(self, other: TunedRows) -> bool:
        """Returns whether both are tuned for the same model."""
        return (self.model, self.plain, self.sides_are_one) == (other.model, other.plain, other.sides_are_one)

    def check_model(self, model: str, sides_are_one: bool, width: int) -> None:
        """Raises `ModelError` unless the rows were tuned for the model with this fingerprint and fit it.

        sides_are_one: whether the model has one row per entry, used as input row and as output row. width: values per
        row.
        """
        if self.model != model:
            raise ModelError(
                f"the pack's rows were tuned for another model ({self.model[:12]}) than this one ({model[:12]}): use "
                "the pack with that model, or tune it for this one (mlx_zip vocab pack tune)"
            )
        if self.sides_are_one != sides_are_one:
            wanted = "one array" if sides_are_one else "two arrays"
            raise ModelError(f"the pack's input and output rows must be {wanted} for this model: tune the pack again")
        if (found := self.output.shape[1]) != width:
            raise ModelError(f"the pack's rows have {found} values, the model's have {width}: tune the pack again")


def rows_to_arrays(rows: TunedRows) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Returns tuned rows as a pack's file holds them: arrays by name, and the field `rows` of `about`."""
    arrays = {"output_rows": rows.output} | ({} if rows.sides_are_one else {"input_rows": rows.input})
    return arrays, {"model": rows.model, "plain": rows.plain and asdict(rows.plain)}


def rows_from_arrays(path: Any, arrays: Mapping[str, NDArray[Any]], about: Any) -> TunedRows:
    """Returns the tuned rows that `rows_to_arrays` turned into `arrays` and `about`. path: the file, for messages.

    Raises `DataError` if something is missing or wrong.
    """
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
        raise DataError(f"{path}: its tuned rows are incomplete ({error!r:.80}); tune the pack again") from error


# ---- the fingerprint of the model that rows were tuned for; both engines compute it, each from its own tensors

SAMPLES_PER_TENSOR = 64  # values per tensor in fingerprints that hash no tensor whole
TensorFact = tuple[str, str, Sequence[int], str]  # name, MLX's name of the type, shape, sampled values in hex


def sampled_places(size: int) -> NDArray[np.int64]:
    """Returns the indices of up to `SAMPLES_PER_TENSOR` of a tensor's `size` values, evenly spaced."""
    return np.linspace(0, size - 1, min(SAMPLES_PER_TENSOR, size)).astype(np.int64)


def fingerprint_tensors(facts: Iterable[TensorFact]) -> str:
    """Returns a sha256, as hex, of what a fingerprint covers of each tensor of a model, in any order."""
    return sha256(json.dumps(sorted(facts)).encode()).hexdigest()
