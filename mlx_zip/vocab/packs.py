"""Codebook packs: learned entries that a codebook begins with, and what is known of them.

A pack is an .npz file of `mlx_zip.codec.pack` (`entries`, `lengths`), so every command that takes a starting codebook
takes a pack; beside the entries lies `about`, a JSON text: which tokenizer the ids are of, from what they were learned,
and how well they served there.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip import files
from mlx_zip.codec.pack import checked_entries, read_pack
from mlx_zip.errors import DataError

VERSION = 1
SUFFIX = ".npz"
Entry = tuple[int, ...]


@dataclass(frozen=True)
class Pack:
    """Entries, best first. tokenizer: its fingerprint, None when not known. about: what else the file tells."""

    entries: tuple[Entry, ...]
    tokenizer: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the entries and their tokenizer: equal packs, equal digest."""
        return sha256(json.dumps([self.tokenizer, self.entries]).encode()).hexdigest()

    @property
    def merge_size(self) -> int:
        """Base ids of the longest entry; 2 for a pack without entries."""
        return max(map(len, self.entries), default=2)

    def check_tokenizer(self, fingerprint: str, name: str) -> None:
        """Raises `DataError` when the pack is of another tokenizer; `name` is the pack's, for the message."""
        if self.tokenizer is not None and self.tokenizer != fingerprint:
            raise DataError(
                f"{name} was learned with another tokenizer ({self.tokenizer[:12]}, not {fingerprint[:12]}): its base "
                "ids mean something else here; learn a pack with this one"
            )


def load_pack(path: str | Path) -> Pack:
    """A pack; of a file that holds entries only, what is known. Raises `DataError` naming the file."""
    path = Path(path)
    entries = read_pack(path)
    if path.suffix != SUFFIX:
        return Pack(entries)
    about = _read_about(path)
    version = about.pop("version", VERSION)
    if version != VERSION:
        raise DataError(f"{path}: a pack of version {version!r}; this mlx_zip reads version {VERSION}")
    tokenizer, made = about.pop("tokenizer", None), about.pop("fingerprint", None)
    if not isinstance(tokenizer, str | None):
        raise DataError(f"{path}: its tokenizer is {tokenizer!r:.60}, not a fingerprint")
    pack = Pack(entries, tokenizer, about)
    if made is not None and made != pack.fingerprint:
        raise DataError(f"{path} is damaged: its entries are not those it was written with")
    return pack


def _read_about(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            text = arrays["about"].tobytes() if "about" in arrays.files else b"{}"
        about = json.loads(text)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read as a pack: {error}") from error
    if not isinstance(about, dict):
        raise DataError(f"{path}: what it says about itself is no JSON object")
    return about


def save_pack(path: str | Path, pack: Pack) -> None:
    """Writes a pack, whole or not at all.

    Raises `DataError` as `check_out` does and for entries that cannot be, `OSError` when the disk refuses.
    """
    path = Path(path)
    check_out(path)
    entries = checked_entries(path, pack.entries)
    rows = np.zeros((len(entries), pack.merge_size), np.uint32)
    for row, entry in zip(rows, entries, strict=True):
        row[: len(entry)] = entry
    told = {"version": VERSION, "tokenizer": pack.tokenizer, "fingerprint": pack.fingerprint, **pack.about}
    about = np.frombuffer(json.dumps(told).encode(), np.uint8)
    with files.whole_file(path) as partial, open(partial, "wb") as file:
        np.savez(file, entries=rows, lengths=np.array([len(e) for e in entries], np.int64), about=about)


def check_out(path: Path) -> None:
    """Raises `DataError` where no pack can be written: another suffix, no such folder."""
    files.check_out(path, "a pack", SUFFIX)


def merge_packs(packs: Sequence[Pack], size: int | None = None) -> Pack:
    """One pack of several: the best of each in turn, none twice, `size` at most.

    Its tokenizer is theirs, or not known if one's is not. Raises `DataError` when they are of different tokenizers.
    """
    known = {pack.tokenizer for pack in packs if pack.tokenizer is not None}
    if len(known) > 1:
        names = ", ".join(sorted(name[:12] for name in known))
        raise DataError(f"the packs are of different tokenizers ({names}) and cannot be merged")
    turns = chain.from_iterable(zip_longest(*(pack.entries for pack in packs)))
    entries = tuple(dict.fromkeys(entry for entry in turns if entry is not None))
    tokenizer = packs[0].tokenizer if all(pack.tokenizer is not None for pack in packs) else None
    return Pack(entries[:size], tokenizer, {"merged": [pack.fingerprint for pack in packs]})
