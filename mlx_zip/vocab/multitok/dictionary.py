"""MultiTok's dictionary of phrases, learned from texts as in LZW (arXiv 2410.21548).

Units are words or a tokenizer's ids; a phrase is a run of two or more units. Where the paper's text, its pseudo-code
and the published code differ, `docs/reports/multitok.md` says which one is followed.

A dictionary's file:

    line 1    a JSON object and a newline: format, version, sizes, settings, totals, units and `sha256`
    then      rows uint32 [n, 2], ids uint32 [n] unless `given_ids` is false, uses uint32 [units + n]; little-endian

The checksum covers the JSON object without its `sha256` (keys sorted, no blanks) and all bytes after line 1. No pickle
is read.

Dictionaries of words are written as version 1, dictionaries of a tokenizer's ids as version 2, with the fingerprint
that packs use (`first_stage.tokenizer_fingerprint`).

MultiTok walks through a text as the codec does. But a dictionary has millions of phrases of any length, while the codec
has at most 2^20 entries of at most 16 ids. So `native/phrases.c` keeps a run as its prefix (a node) and one more unit:
in 12 bytes, plus cells of an index. The index is laid out like the codec's (tagged 32-bit cells, linear probing), with
as many bits for the slot as the table needs. The codec's index has a constant width, which makes it fast.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec._native import ffi, lib
from mlx_zip.codec.ids import Uint32s, as_ids
from mlx_zip.codec.params import raise_for_status
from mlx_zip.errors import CodecError, DataError, errors_as
from mlx_zip.files import atomic_file, check_regular_file
from mlx_zip.vocab.multitok.units import NO_ID, Pruning, Samples, Settings, Totals, units_from_dict

MATCHINGS = ("longest", "walk")
_FORMAT, _VERSIONS = "mlx_zip multitok dictionary", {"words": 1, "tokens": 2}
_NUMBERS = ("window", "first_id", "limit")


@dataclass(eq=False)
class Dictionary:
    """Units and phrases with their ids, and how often training used each.

    `train` learns; `encode` and `expand` do not change the dictionary; `prune` returns a smaller dictionary, which
    cannot learn. After an error the dictionary is unchanged, except after a `MemoryError` in `train`. Only one thread
    at a time may call `train`; several may call everything else. The C library releases the interpreter lock. Memory:
    `nbytes`.
    """

    settings: Settings
    totals: Totals = field(default_factory=Totals)
    pruning: Pruning | None = None
    _native: Any = None

    def __post_init__(self) -> None:
        if self._native is None:
            out = ffi.new("mlxzip_phrases **")
            raise_for_status(lib.mlxzip_phrases_new(self.settings.native(), out))
            self._native = ffi.gc(out[0], lib.mlxzip_phrases_free)
        self.given_ids: Uint32s | None = None  # None: consecutive ids from first_id on
        self._open = False  # whether the next call of train continues the last sample

    @classmethod
    def from_arrays(
        cls, settings: Settings, rows: Uint32s, ids: Uint32s | None = None, uses: Uint32s | None = None, **fields: Any
    ) -> Dictionary:
        """Returns a dictionary made from n runs of units, given as arrays.

        rows uint32 [n, 2]: the prefix of each run (a unit, or the number of units + an earlier row) and its last unit.
        ids uint32 [n]: rising, NO_ID for runs that are not phrases; None for consecutive ids, with which the dictionary
        can learn further. uses uint32 [units + n]: how often training emitted each unit and run; None: never. fields:
        the other fields of the class. Raises `CodecError` if a row is wrong or an array has another shape.
        """
        n = len(rows)
        shapes = {"rows": (rows, (n, 2)), "ids": (ids, (n,)), "uses": (uses, (settings.units.size + n,))}
        for name, (array, shape) in shapes.items():
            if array is not None and np.shape(array) != shape:
                raise CodecError(f"{name} of {n} phrases must be {list(shape)}, got {list(np.shape(array))}")
        out, bad = ffi.new("mlxzip_phrases **"), ffi.new("size_t *")
        status = lib.mlxzip_phrases_from(
            settings.native(), _uint32_pointer(rows), _uint32_pointer(ids), _uint32_pointer(uses), n, out, bad
        )
        if status == lib.MLXZIP_E_ARG:
            wrong = f"phrase {bad[0]} repeats an earlier one, or its prefix, last unit or id is out of order"
            raise CodecError(wrong if bad[0] < n else f"{n} phrases, more than {settings.limit}")
        raise_for_status(status)
        self = cls(settings, _native=ffi.gc(out[0], lib.mlxzip_phrases_free), **fields)
        self.given_ids = ids
        return self

    def with_unk_id(self, unk_id: int | None) -> Dictionary:
        """Returns a copy in which `unk_id` stands for unknown units; None makes them an error (see `Settings`)."""
        settings = replace(self.settings, unk_id=unk_id)
        totals = replace(self.totals)
        return self.from_arrays(settings, self.rows, self.given_ids, self.uses, totals=totals, pruning=self.pruning)

    # ---- contents

    @property
    def rows(self) -> Uint32s:
        """A copy of the runs in the order of learning, uint32 [n, 2]: prefix and last unit of each.

        The prefix is a node: a unit's number, or the number of units + i for the run of row i.
        """
        return _copy_uint32s(lib.mlxzip_phrases_rows(self._native), 2 * self.runs).reshape(-1, 2)

    @property
    def uses(self) -> Uint32s:
        """A copy of how often training emitted each unit, then each run, uint32 [units + n]."""
        return _copy_uint32s(lib.mlxzip_phrases_uses(self._native), self.settings.units.size + self.runs)

    @property
    def ids(self) -> Uint32s:
        """The id of each run, uint32 [n]; NO_ID for a run that is not a phrase."""
        if self.given_ids is not None:
            return self.given_ids
        first = self.settings.first_id + self.settings.units.size
        return np.arange(first, first + self.runs, dtype=np.uint32)

    @property
    def lengths(self) -> Uint32s:
        """Number of units in each node, uint32 [units + n]: 1 for each unit, then the length of each run."""
        out = np.empty(self.settings.units.size + self.runs, np.uint32)
        lib.mlxzip_phrases_lengths(self._native, _uint32_pointer(out))
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of memory in the C library: about 20 to 28 per run and 4 per unit."""
        return lib.mlxzip_phrases_bytes(self._native)

    @property
    def runs(self) -> int:
        """Number of runs: phrases, and prefixes of phrases that are not phrases themselves."""
        return lib.mlxzip_phrases_size(self._native)

    def __len__(self) -> int:
        """Number of phrases: runs of two or more units that have an id."""
        return self.runs if self.given_ids is None else int((self.given_ids != NO_ID).sum())

    @property
    def phrases(self) -> list[tuple[int, tuple[int, ...]]]:
        """All phrases as (id, units), in id order."""
        ids = self.ids[self.ids != NO_ID]
        runs = self.expand_all(Samples(ids, np.arange(1, len(ids) + 1, dtype=np.uint64)))
        return [(id, tuple(run)) for id, run in zip(ids.tolist(), runs.to_lists(), strict=True)]

    def __repr__(self) -> str:
        return f"<Dictionary: {self.settings.units.size} units, {len(self)} phrases>"

    # ---- units to ids and back

    def train(self, samples: Samples, over: bool = True) -> Samples:
        """Learns from samples of units and returns their ids (the paper's algorithm 1).

        over: whether the last sample ends here. False: the units after the last end begin a sample that the next call
        continues. How samples are split into calls does not change phrases and ids, but an id may be returned one call
        later. Raises `CodecError` if a unit is unknown, before anything is learned, or if the dictionary is pruned.
        """
        if self.given_ids is not None:
            raise CodecError("a pruned dictionary cannot learn: train a new one")
        n = len(samples.ids)
        continues = n > samples.ends[-1] if len(samples) else n > 0 or self._open
        if over and continues:
            samples = Samples(samples.ids, np.append(samples.ends, np.uint64(n)))
        emitted = self._call_native_on_samples(samples, lib.mlxzip_phrases_train, (), n + 1)
        self._open = bool(continues and not over)
        self.totals.add(samples, emitted)
        return emitted

    def encode_as_single_units(self, samples: Samples) -> Samples:
        """Returns the samples as ids of single units without learning from them; `totals` counts them."""
        emitted = self.encode_all(samples, window=1)
        self.totals.add(samples, emitted)
        return emitted

    def encode(self, units: Any, window: int = 0, matching: str = "longest") -> Uint32s:
        """Returns the ids of one sample of units (see `as_ids`), uint32.

        window: maximum units of a phrase; 0 for any number. matching: "longest" takes the longest phrase; "walk", as in
        the published code, stops at the first run that is not a phrase. The two differ only after pruning. Raises
        `CodecError` if a unit is unknown.
        """
        return self.encode_all(Samples.from_sequences([units]), window, matching).ids

    def encode_all(self, samples: Samples, window: int = 0, matching: str = "longest") -> Samples:
        """Returns the ids of each sample of units; see `encode`."""
        if matching not in MATCHINGS:
            raise CodecError(f"matching must be one of {', '.join(MATCHINGS)}, got {matching!r:.40}")
        if not 0 <= window <= NO_ID:
            raise CodecError(f"window must be from 0 to {NO_ID}, got {window}")
        how = (window, matching == "longest")
        return self._call_native_on_samples(samples, lib.mlxzip_phrases_encode, how, len(samples.ids))

    def _call_native_on_samples(self, samples: Samples, call: Any, how: tuple[Any, ...], room: int) -> Samples:
        """Returns the ids that a function of the C library writes for samples of units.

        how: further arguments of `call`. room: maximum number of ids. Raises `CodecError` if a unit is unknown.
        """
        ids, ends = np.empty(room, np.uint32), np.empty(len(samples), np.uint64)
        counts = ffi.new("size_t[2]")
        native, _buffers = _native_samples(samples)
        status = call(self._native, native, *how, _uint32_pointer(ids), _uint64_pointer(ends), counts, counts + 1)
        if status == lib.MLXZIP_E_ID:
            at, size = counts[1], self.settings.units.size
            raise CodecError(f"unit {samples.ids[at]} at index {at} is not below {size}: {_CURE}")
        raise_for_status(status)
        return Samples(ids[: counts[0]], ends)

    def expand(self, ids: Any) -> Uint32s:
        """Returns the units that ids stand for, uint32; `units.size` for an unk_id that is not the id of a unit.

        Raises `CodecError` naming the id if one is unknown.
        """
        return self.expand_all(Samples.from_sequences([ids])).ids

    def expand_all(self, ids: Samples) -> Samples:
        """Returns the units of each sample of ids; see `expand`."""
        counts, ends = ffi.new("size_t[2]"), np.empty(len(ids), np.uint64)
        native, _buffers = _native_samples(ids)
        out = np.empty(2 * len(ids.ids), np.uint32)
        for _ in range(2):
            status = lib.mlxzip_phrases_expand(
                self._native, native, _uint32_pointer(out), len(out), _uint64_pointer(ends), counts, counts + 1
            )
            if status != lib.MLXZIP_E_SPACE:
                break
            out = np.empty(counts[0], np.uint32)
        if status == lib.MLXZIP_E_ID:
            raise CodecError(f"id {ids.ids[counts[1]]} at index {counts[1]} is not in the dictionary")
        raise_for_status(status)
        return Samples(out[: counts[0]], ends)

    def number_units(self, sequences: Iterable[Any]) -> Samples:
        """Turns samples of words, or of a tokenizer's ids, into numbers of units; unknown ones become `units.size`.

        Raises `CodecError` naming the word or id if it is unknown and the dictionary has no unk_id.
        """
        units, numbered = self.settings.units, []
        for sequence in sequences:
            numbers = units.numbers(sequence)
            if self.settings.unk_id is None and len(unknown := np.flatnonzero(numbers >= units.size)):
                raise CodecError(
                    f"{units.unknown_unit_message(sequence, int(unknown[0]))}, at index {unknown[0]}: {_CURE}"
                )
            numbered.append(numbers)
        return Samples.from_sequences(numbered)

    # ---- reports and files

    def stats(self) -> dict[str, Any]:
        """Returns figures for reports, by name.

        The figures are totals of the training texts and their ratio (tokens per unit), phrases by use and by length,
        and bytes of memory.
        """
        n_units, phrases = self.settings.units.size, self.ids != NO_ID
        used, lengths = self.uses[n_units:][phrases], self.lengths[n_units:][phrases]
        by_length = np.bincount(lengths)
        return {
            "units": n_units,
            "phrases": len(self),
            "samples": self.totals.samples,
            "corpus_units": self.totals.units,
            "corpus_tokens": self.totals.tokens,
            "ratio": self.totals.ratio,
            "never_used": int((used == 0).sum()),
            "used_once": int((used == 1).sum()),
            "longest": int(lengths.max(initial=1)),
            "phrases_by_length": {int(n): int(by_length[n]) for n in np.flatnonzero(by_length)},
            "memory_bytes": self.nbytes,
        }

    def most_saving_phrases(self, n: int) -> list[tuple[int, int]]:
        """Returns the n phrases that saved most units in training, best first, as (id, uses).

        Each use of a phrase of k units saves k - 1 units. Phrases that saved none are left out.
        """
        n_units, phrases = self.settings.units.size, self.ids != NO_ID
        used = np.where(phrases, self.uses[n_units:], 0).astype(np.int64)
        saved = used * (self.lengths[n_units:].astype(np.int64) - 1)
        best = np.argsort(-saved, kind="stable")[:n]
        return [(int(self.ids[i]), int(used[i])) for i in best if saved[i]]

    def save(self, path: str | Path) -> None:
        """Writes the dictionary's file, see the module; an existing file is replaced only by a complete one.

        Raises `OSError` if writing fails, `CodecError` if a sample is open, because its end would be lost.
        """
        if self._open:
            raise CodecError("a sample is still open: end it with train(..., over=True) before saving the dictionary")
        settings, ids, units = self.settings, self.given_ids, self.settings.units.to_dict()
        header = {
            "format": _FORMAT,
            "version": _VERSIONS[units["kind"]],
            "runs": self.runs,
            "phrases": len(self),
            "given_ids": ids is not None,
            "settings": {**{name: getattr(settings, name) for name in _NUMBERS}, "unk_id": settings.unk_id},
            "totals": asdict(self.totals),
            "pruning": asdict(self.pruning) if self.pruning else None,
            "units": units,
        }
        arrays = [self.rows, *([] if ids is None else [ids]), self.uses]
        body = b"".join(array.astype("<u4").tobytes() for array in arrays)
        header["sha256"] = _dictionary_sha256(header, body)
        with atomic_file(Path(path)) as partial:
            partial.write_bytes(json.dumps(header).encode() + b"\n" + body)

    @classmethod
    def load(cls, path: str | Path) -> Dictionary:
        """Reads a dictionary that `save` wrote. Raises `DataError` naming the file and what is wrong with it."""
        header, body = _read_dictionary_file(path)
        with errors_as(DataError, str(path), CodecError, DataError, ValueError, TypeError, KeyError):
            return _parse_dictionary(header, body)


_CURE = "train the dictionary with it among its units, or give an unk_id (--unk-id) to stand for such units"


def _native_samples(samples: Samples) -> tuple[Any, Any]:
    """Returns samples as the C library's struct, and the buffers that must live as long as the struct."""
    ids, ends = as_ids(samples.ids), np.ascontiguousarray(samples.ends, np.uint64)
    native = ffi.new("mlxzip_samples *")
    buffers = _uint32_pointer(ids), _uint64_pointer(ends)
    (native.at, native.ends), native.n, native.n_ends = buffers, len(ids), len(ends)
    return native, buffers


def _uint32_pointer(array: NDArray[Any] | None) -> Any:
    return ffi.NULL if array is None else ffi.from_buffer("uint32_t[]", np.ascontiguousarray(array, np.uint32))


def _uint64_pointer(array: NDArray[np.uint64]) -> Any:
    return ffi.from_buffer("uint64_t[]", array)


def _copy_uint32s(pointer: Any, n: int) -> Uint32s:
    return np.frombuffer(bytes(ffi.buffer(pointer, 4 * n)) if n else b"", np.uint32)


def _read_dictionary_file(path: str | Path) -> tuple[dict[str, Any], bytes]:
    """Reads a dictionary's file -> (the object of line 1, the bytes after it).

    Raises `DataError` naming the file if it is damaged or of another version.
    """
    check_regular_file(Path(path))
    try:
        line, newline, body = Path(path).read_bytes().partition(b"\n")
        header = json.loads(line) if newline else None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise DataError(f"{path} is no dictionary of `mlx_zip vocab multitok`")
    if header.get("version") not in _VERSIONS.values():
        known = ", ".join(map(str, _VERSIONS.values()))
        raise DataError(f"{path} has version {header.get('version')!r:.20}, this mlx_zip reads {known}: update mlx_zip")
    if header.pop("sha256", None) != _dictionary_sha256(header, body):
        raise DataError(f"{path} is damaged, its checksum does not match: train the dictionary again")
    return header, body


def _dictionary_sha256(header: dict[str, Any], body: bytes) -> str:
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode() + b"\n" + body).hexdigest()


def _parse_dictionary(header: dict[str, Any], body: bytes) -> Dictionary:
    """Returns the dictionary in a file. body: the bytes after line 1. Raises `CodecError`, `DataError` and others."""
    words = np.frombuffer(body, "<u4").astype(np.uint32)
    units = units_from_dict(header["units"])
    if header["version"] != _VERSIONS[header["units"]["kind"]]:
        kind = header["units"]["kind"]
        raise DataError(f"version {header['version']} is not that of a dictionary of {kind}: train it again")
    given = {name: header["settings"][name] for name in (*_NUMBERS, "unk_id")}
    settings = Settings(units, **given)
    n, with_ids = header["runs"], header["given_ids"]
    if type(n) is not int or n < 0 or len(words) != (2 + bool(with_ids)) * n + units.size + n:
        raise DataError(f"{len(words)} words do not hold {n} runs over {units.size} units")
    pruning = Pruning(**header["pruning"]) if header["pruning"] else None
    totals = Totals(*(int(header["totals"][name]) for name in ("samples", "units", "tokens")))
    ids = words[2 * n : 3 * n].copy() if with_ids else None
    rows, uses = words[: 2 * n].reshape(-1, 2), words[len(words) - units.size - n :]
    return Dictionary.from_arrays(settings, rows, ids, uses, totals=totals, pruning=pruning)
