"""Dictionaries of phrases as files.

    line 1    a JSON object and a newline: format, version, sizes, settings, totals, units and `sha256`
    then      rows uint32 [n, 2], ids uint32 [n] unless `given_ids` is false, uses uint32 [units + n]; little-endian

The checksum covers the JSON object without its `sha256` (keys sorted, no blanks) and all bytes after line 1. No pickle
is read.

Version 1 is written for words, version 2 for a tokenizer's ids, with the fingerprint that packs use
(`first_stage.tokenizer_fingerprint`). Version 1 over ids had another kind of fingerprint, so the tokenizer of such a
file counts as unknown.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import CodecError, DataError
from mlx_zip.files import check_in, whole_file
from mlx_zip.vocab.multitok.settings import NO_ID, Pruning, Settings, Totals
from mlx_zip.vocab.multitok.units import Tokens, units_from_dict

FORMAT, VERSIONS = "mlx_zip multitok dictionary", {"words": 1, "tokens": 2}
_NUMBERS = ("window", "first_id", "limit")


@dataclass(frozen=True, eq=False)
class Stored:
    """What a dictionary's file holds; the fields are those of `Dictionary.of`."""

    settings: Settings
    rows: Uint32s
    ids: Uint32s | None
    uses: Uint32s
    totals: Totals = field(default_factory=Totals)
    pruning: Pruning | None = None


def write_stored(path: str | Path, stored: Stored) -> None:
    """Writes a dictionary's file; one that exists is replaced only by a complete one. Raises `OSError`."""
    settings, rows, ids = stored.settings, stored.rows, stored.ids
    units = settings.units.to_dict()
    header = {
        "format": FORMAT,
        "version": VERSIONS[units["kind"]],
        "runs": len(rows),
        "phrases": len(rows) if ids is None else int((ids != NO_ID).sum()),
        "given_ids": ids is not None,
        "settings": {**{name: getattr(settings, name) for name in _NUMBERS}, "unk_id": settings.unk_id},
        "totals": asdict(stored.totals),
        "pruning": asdict(stored.pruning) if stored.pruning else None,
        "units": units,
    }
    arrays = [rows, *([] if ids is None else [ids]), stored.uses]
    body = b"".join(array.astype("<u4").tobytes() for array in arrays)
    header["sha256"] = _digest(header, body)
    with whole_file(Path(path)) as partial:
        partial.write_bytes(json.dumps(header).encode() + b"\n" + body)


def read_stored(path: str | Path) -> Stored:
    """Reads a dictionary's file. Raises `DataError` naming the file if it is damaged or of another version."""
    check_in(Path(path))
    try:
        line, newline, body = Path(path).read_bytes().partition(b"\n")
        header = json.loads(line) if newline else None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DataError(f"{path} is no dictionary of `mlx_zip vocab multitok`")
    if header.get("version") not in VERSIONS.values():
        known = ", ".join(map(str, VERSIONS.values()))
        raise DataError(f"{path} has version {header.get('version')!r:.20}, this mlx_zip reads {known}: update mlx_zip")
    if header.pop("sha256", None) != _digest(header, body):
        raise DataError(f"{path} is damaged, its checksum does not match: train the dictionary again")
    try:
        return _from_header(header, np.frombuffer(body, "<u4").astype(np.uint32))
    except (CodecError, DataError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: {error}") from error


def _digest(header: dict[str, Any], body: bytes) -> str:
    """Returns the sha256 in hex of a file's header (without its field `sha256`) and of all bytes after line 1."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode() + b"\n" + body).hexdigest()


def _from_header(header: dict[str, Any], words: Uint32s) -> Stored:
    """Returns what a file holds. words: the numbers after line 1. Raises `CodecError`, `DataError` and others."""
    units = units_from_dict(header["units"])
    if isinstance(units, Tokens) and header["version"] < VERSIONS["tokens"]:
        units = Tokens(units.size)
    given = {name: header["settings"][name] for name in (*_NUMBERS, "unk_id")}
    settings = Settings(units, **given)
    n, with_ids = header["runs"], header["given_ids"]
    if type(n) is not int or n < 0 or len(words) != (2 + bool(with_ids)) * n + units.size + n:
        raise DataError(f"{len(words)} words do not hold {n} runs over {units.size} units")
    pruning = Pruning(**header["pruning"]) if header["pruning"] else None
    totals = Totals(*(int(header["totals"][name]) for name in ("samples", "units", "tokens")))
    ids = words[2 * n : 3 * n].copy() if with_ids else None
    rows, uses = words[: 2 * n].reshape(-1, 2), words[len(words) - units.size - n :]
    return Stored(settings, rows, ids, uses, totals, pruning)
