"""The parameters of a codec. The side that compresses ids and the side that reads them must use equal parameters.

The policy decides what a full codebook does; `native/mlxzip.h` has the exact rules. All state follows from the id log.
An id stands for what its slot held when the id was read, before the id installed anything: that is what the slot held
when the model chose the id. Under `lru` and `use-count`, the compressor writes what upstream's does until the table is
full, and then what `Codebook.compress` does. (Upstream's compressor is one entry ahead of the reader; in a full table,
the id of that entry would still stand for another entry at the reader.) The order of eviction is a linked list with an
undo record per id, not a heap, so pushing an id onto a full table takes little longer under these two policies than
under `freeze`. Canonical decoding, training, data preparation, learning packs and `mlx_zip export` refuse `lru` and
`use-count` for now, because they assume that entries stay.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import sha256
from itertools import chain
from typing import Any

import numpy as np

from mlx_zip.codec._native import ffi, lib
from mlx_zip.errors import CodecError, ModelError

MAX_VOCAB, MAX_ID = 1 << 31, (1 << 32) - 1
MAX_CODEBOOK: int = lib.MLXZIP_MAX_CODEBOOK
MAX_MERGE: int = lib.MLXZIP_MAX_MERGE
POLICIES = ("freeze", "lru", "use-count")  # as numbered in `native/mlxzip.h`


def _require_integer(name: str, value: Any, low: int, high: int) -> int:
    """Returns `value` as an int. Raises `CodecError` with `name` unless `value` is an integer within low..high."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise CodecError(f"{name} must be an integer, not {value!r}")
    if not low <= value <= high:
        raise CodecError(f"{name} {value} is outside {low}..{high}")
    return int(value)


def _require_integers(name: str, values: Iterable[Any], low: int, high: int) -> tuple[int, ...]:
    """Returns the values as a tuple of ints. Raises `CodecError` as `_require_integer` does.

    A tuple of ints is checked fast and returned as it is, because start entries hold thousands of ids.
    """
    values = tuple(values)
    if values and set(map(type, values)) == {int} and low <= min(values) and max(values) <= high:
        return values
    return tuple(_require_integer(name, x, low, high) for x in values)


@dataclass(frozen=True)
class CodecParams:
    """Sizes, disabled ids, start entries and policy of a codec; immutable, hashable, comparable.

    vocab_size: number of base ids, 1..2^31, and the id of slot 0. codebook_size: number of slots, 0..2^20. merge_size:
    maximum base ids of an entry, 1..16. disabled_ids: ids below 2^32 that never merge; stored sorted, with the pad id,
    as in zip2zip-compression 0.3.4. A disabled id is never read as a hypertoken, even if a slot has that id.
    pad_id: pads short rows (0 if None). start: entries that exist before the first id and take slots 0, 1, ...; each
    has 2..merge_size base ids, none disabled; no two are equal; at most codebook_size of them.
    policy: what happens when an entry is to be installed and the table is full. `freeze`: stop adding entries, as
    zip2zip-compression does. `lru`: evict the least recently used entry. `use-count`: evict the least often used entry,
    among equals the least recently used. Start entries and the entry being read are never evicted (`native/mlxzip.h`).

    Raises `CodecError` naming the wrong field.
    """

    vocab_size: int
    codebook_size: int
    merge_size: int
    disabled_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    start: tuple[tuple[int, ...], ...] | None = None
    policy: str = "freeze"

    def __init__(
        self,
        vocab_size: int,
        codebook_size: int,
        merge_size: int,
        disabled_ids: Iterable[int] = (),
        pad_id: int | None = None,
        start: Iterable[Sequence[int]] | None = None,
        policy: str = "freeze",
    ) -> None:
        put = object.__setattr__
        put(self, "vocab_size", _require_integer("vocab_size", vocab_size, 1, MAX_VOCAB))
        put(self, "codebook_size", _require_integer("codebook_size", codebook_size, 0, MAX_CODEBOOK))
        put(self, "merge_size", _require_integer("merge_size", merge_size, 1, MAX_MERGE))
        disabled = set(_require_integers("disabled id", disabled_ids, 0, MAX_ID))
        if pad_id is not None:
            pad_id = _require_integer("pad_id", pad_id, 0, MAX_ID)
            disabled.add(pad_id)
        put(self, "pad_id", pad_id)
        put(self, "disabled_ids", tuple(sorted(disabled)))
        put(self, "start", self._checked_start_entries(start))
        if policy not in POLICIES:
            raise CodecError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
        put(self, "policy", policy)

    def _checked_start_entries(self, start: Iterable[Sequence[int]] | None) -> tuple[tuple[int, ...], ...] | None:
        """Returns the start entries as tuples of ints, None if there are none. Raises `CodecError` if one is wrong."""
        if start is None:
            return None
        entries = tuple(map(tuple, start))
        given = tuple(chain.from_iterable(entries))
        ids = _require_integers("start entry id", given, 0, MAX_ID)
        if ids is not given:  # numpy's integers, for example
            entries = tuple(tuple(map(int, entry)) for entry in entries)
        if len(entries) > self.codebook_size:
            raise CodecError(f"{len(entries)} start entries do not fit in codebook_size {self.codebook_size}")
        self._check_start_entries(entries)
        return entries or None

    def _check_start_entries(self, entries: tuple[tuple[int, ...], ...]) -> None:
        """Raises `CodecError` naming a start entry that is too short or long, repeated, or holds a disabled id."""
        disabled, seen = set(self.disabled_ids), set(entries)
        ids = set(chain.from_iterable(seen))
        lengths = set(map(len, seen)) <= set(range(2, self.merge_size + 1))
        if len(seen) == len(entries) and lengths and ids.isdisjoint(disabled) and max(ids, default=0) < self.vocab_size:
            return
        seen.clear()  # something is wrong: find the entry
        for slot, entry in enumerate(entries):
            if not 2 <= len(entry) <= self.merge_size:
                raise CodecError(f"start entry {slot} has {len(entry)} ids, not 2..{self.merge_size}")
            if not disabled.isdisjoint(entry) or max(entry) >= self.vocab_size:
                raise CodecError(f"start entry {slot} {entry} holds an id that is disabled or not a base id")
            if entry in seen:
                raise CodecError(f"start entry {slot} {entry} occurs twice")
            seen.add(entry)

    def with_start(self, start: Iterable[Sequence[int]] | None) -> CodecParams:
        """Returns these parameters with other start entries. For None, returns them unchanged. Raises `CodecError`."""
        return self if start is None else replace(self, start=start)

    def is_equal_except_start(self, other: CodecParams) -> bool:
        """Returns whether both are equal except for their start entries. Every step calls this, so it must be fast."""
        names = ("vocab_size", "codebook_size", "merge_size", "disabled_ids", "pad_id", "policy")
        return self is other or all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def fill(self) -> int:
        """The id that pads short rows: the pad id, or 0 if there is no pad id."""
        return 0 if self.pad_id is None else self.pad_id

    @cached_property
    def native(self) -> Any:
        """The C library's parameter object. It never changes, so codebooks and threads share it."""
        start = self.start or ()
        lengths = np.fromiter(map(len, start), np.uint8, len(start))
        rows = np.zeros((len(start), self.merge_size), np.uint32)
        rows[np.arange(self.merge_size) < lengths[:, None]] = np.fromiter(chain.from_iterable(start), np.uint32)
        disabled = np.array(self.disabled_ids, np.uint32)
        spec = ffi.new("mlxzip_spec *")
        spec.vocab_size, spec.codebook_size, spec.merge_size = self.vocab_size, self.codebook_size, self.merge_size
        spec.has_pad, spec.pad_id = self.pad_id is not None, self.fill
        spec.policy = POLICIES.index(self.policy)
        spec.disabled, spec.n_disabled = ffi.from_buffer("uint32_t[]", disabled), len(disabled)
        spec.start, spec.n_start = ffi.from_buffer("uint32_t[]", rows), len(rows)
        spec.start_lengths = ffi.from_buffer("uint8_t[]", lengths)
        out = ffi.new("mlxzip_params **")
        raise_for_status(lib.mlxzip_params_new(spec, out))
        return ffi.gc(out[0], lib.mlxzip_params_free)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of all fields, start entries included: equal for equal parameters, on every machine."""
        return sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Returns the saved form of a codebook without ids, as `native/mlxzip.h` defines it."""
        out = ffi.new("mlxzip_codebook **")
        raise_for_status(lib.mlxzip_new(self.native, out))
        return serialize_codebook(ffi.gc(out[0], lib.mlxzip_free))

    @classmethod
    def from_bytes(cls, data: bytes) -> CodecParams:
        """Returns the parameters of any saved codebook. Raises `CodecError` if `data` is not a saved codebook."""
        view, out = ffi.from_buffer("uint8_t[]", data), ffi.new("mlxzip_params **")
        raise_for_status(lib.mlxzip_params_from_bytes(view, len(view), out))
        native, spec = ffi.gc(out[0], lib.mlxzip_params_free), ffi.new("mlxzip_spec *")
        lib.mlxzip_params_spec(native, spec)
        width = spec.merge_size
        start = [
            tuple(spec.start[slot * width : slot * width + spec.start_lengths[slot]]) for slot in range(spec.n_start)
        ]
        params = cls(
            spec.vocab_size,
            spec.codebook_size,
            width,
            ffi.unpack(spec.disabled, spec.n_disabled) if spec.n_disabled else (),
            spec.pad_id if spec.has_pad else None,
            start or None,
            POLICIES[spec.policy],
        )
        params.__dict__["native"] = native
        return params

    def __reduce__(self) -> tuple[Any, ...]:
        return CodecParams, tuple(getattr(self, field.name) for field in fields(self))


def serialize_codebook(book: Any) -> bytes:
    """Returns a codebook of the C library in the saved form that `native/mlxzip.h` defines."""
    size = ffi.new("size_t *")
    lib.mlxzip_to_bytes(book, ffi.NULL, 0, size)
    data = bytearray(size[0])
    raise_for_status(lib.mlxzip_to_bytes(book, ffi.from_buffer("uint8_t[]", data), len(data), size))
    return bytes(data)


def raise_for_status(status: int) -> None:
    """Raises the exception for a status of the C library that is not about a single id; does nothing for MLXZIP_OK."""
    if status == lib.MLXZIP_E_MEMORY:
        raise MemoryError("the codec is out of memory")
    if status == lib.MLXZIP_E_FORMAT:
        raise CodecError("these bytes are no saved codebook, or a damaged one: save it again")
    if status != lib.MLXZIP_OK:
        raise CodecError(f"the codec refused an argument (status {status})")


# ---- as JSON, for files that hold a codebook's log


def params_to_json(codecs: Sequence[CodecParams]) -> str:
    """Returns the codecs of all sequences as JSON: one object if they are equal, else a list of one per sequence."""
    codec_fields = [{f.name: getattr(codec, f.name) for f in fields(codec)} for codec in codecs]
    for one in codec_fields:
        if one["policy"] == "freeze":
            del one["policy"]  # older versions had no other policy and did not save it
    shared = all(codec is codecs[0] or codec == codecs[0] for codec in codecs)
    return json.dumps(codec_fields[0] if shared else codec_fields, sort_keys=True)


def params_from_json(text: str) -> CodecParams | list[CodecParams]:
    """Returns the codecs that `params_to_json` wrote, one or a list. Raises `ModelError` if `text` is damaged."""
    try:
        found = json.loads(text)
        return (
            [_params_from_fields(given) for given in found] if isinstance(found, list) else _params_from_fields(found)
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"saved cache: its codec parameters cannot be read: {error}") from error


def _params_from_fields(given: dict[str, Any]) -> CodecParams:
    start = given["start"] and tuple(tuple(entry) for entry in given["start"])
    return CodecParams(**{**given, "disabled_ids": tuple(given["disabled_ids"]), "start": start})
