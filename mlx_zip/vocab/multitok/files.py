"""Dictionaries of phrases as files.

    line 1    a JSON object that ends with a newline: format, version, sizes, settings, totals, units and `sha256`
    then      rows uint32 [n, 2], ids uint32 [n] unless `given_ids` is false, uses uint32 [units + n]; little-endian

The checksum is over the object without it (keys sorted, no blanks) and all bytes behind the line. No pickle is read.

The version is 1 where units are words, 2 where they are a tokenizer's ids: its fingerprint is the one that packs have
(`first_stage.tokenizer_fingerprint`). In files of version 1 over ids it was another; they are read as those of a
tokenizer that is not known.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import CodecError, DataError
from mlx_zip.files import check_in, whole_file
from mlx_zip.vocab.multitok.dictionary import Dictionary
from mlx_zip.vocab.multitok.settings import Pruning, Settings, Totals
from mlx_zip.vocab.multitok.units import Tokens, units_from_dict

FORMAT, VERSIONS = "mlx_zip multitok dictionary", {"words": 1, "tokens": 2}
_NUMBERS = ("window", "first_id", "limit")


def write_dictionary(path: str | Path, dictionary: Dictionary) -> None:
    """Writes the file, whole or not at all. Raises `OSError`."""
    settings, rows, ids = dictionary.settings, dictionary.rows, dictionary.given_ids
    units = settings.units.to_dict()
    header = {
        "format": FORMAT,
        "version": VERSIONS[units["kind"]],
        "runs": len(rows),
        "phrases": len(dictionary),
        "given_ids": ids is not None,
        "settings": {**{name: getattr(settings, name) for name in _NUMBERS}, "unk_id": settings.unk_id},
        "totals": asdict(dictionary.totals),
        "pruning": asdict(dictionary.pruning) if dictionary.pruning else None,
        "units": units,
    }
    arrays = [rows, *([] if ids is None else [ids]), dictionary.uses]
    body = b"".join(array.astype("<u4").tobytes() for array in arrays)
    header["sha256"] = _digest(header, body)
    with whole_file(Path(path)) as partial:
        partial.write_bytes(json.dumps(header).encode() + b"\n" + body)


def read_dictionary(path: str | Path) -> Dictionary:
    """Reads the file. Raises `DataError` naming it, and what is missing, damaged or of another version."""
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
        raise DataError(f"{path} is of version {header.get('version')!r:.20}, read are {known}: update mlx_zip")
    if header.pop("sha256", None) != _digest(header, body):
        raise DataError(f"{path} is damaged, its checksum is another: train the dictionary again")
    try:
        return _made(header, np.frombuffer(body, "<u4").astype(np.uint32))
    except (CodecError, DataError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: {error}") from error


def _digest(header: dict[str, Any], body: bytes) -> str:
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode() + b"\n" + body).hexdigest()


def _made(header: dict[str, Any], words: Uint32s) -> Dictionary:
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
    return Dictionary.of(settings, rows, ids, uses, totals=totals, pruning=pruning)
