"""The patches of a whole vocabulary as one table, in which a text's patches are looked up by its first-stage ids.

A table file is a .npz archive without pickle. `version` is checked first; `checksum` covers all other fields:

    version      1
    patch_size   S
    mode         "stop" or "full"
    merges       uint16 [V', 2]
    rows         uint16 [V, S]: the patch of each id, padded with the end mark
    fingerprint  sha256 in hex of the tokens' bytes (`first_stage.tokens_fingerprint`)
    checksum     sha256 in hex
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.arrays import read_npz
from mlx_zip.codec.ids import as_ids
from mlx_zip.errors import CodecError, DataError, errors_as
from mlx_zip.files import atomic_file
from mlx_zip.vocab.first_stage import tokens_fingerprint
from mlx_zip.vocab.hbpe.patch_merges import MARK, PatchMerges, check_patch_mode, learn_merges

VERSION = 1
SUFFIX = ".npz"
_FIELDS = ("version", "patch_size", "mode", "merges", "rows", "fingerprint", "checksum")

Uint16s = NDArray[np.uint16]


class PatchTable:
    """The patches of V tokens: rows uint16 [V, S], padded with the end mark; lengths int32 [V], end mark included.

    A patch is the symbols up to the first end mark of its row. Raises `CodecError` if a row is not a patch.
    """

    def __init__(self, merges: PatchMerges, rows: Uint16s, mode: str = "stop") -> None:
        check_patch_mode(mode)
        size = merges.patch_size
        if rows.dtype != np.uint16 or rows.ndim != 2 or rows.shape[1] != size:
            raise CodecError(f"rows must be uint16 [V, {size}], got {rows.dtype} {rows.shape}")
        marked = rows == MARK
        if len(bad := np.flatnonzero((rows.max(axis=1, initial=0) >= merges.symbols) | ~marked.any(axis=1))):
            raise CodecError(
                f"the patch of id {bad[0]} has no end mark, or a symbol that is not below {merges.symbols}"
            )
        self.merges, self.rows, self.mode = merges, rows, mode
        self.lengths = (marked.argmax(axis=1) + 1).astype(np.int32)
        if (np.arange(size) >= self.lengths[:, None])[~marked].any():
            raise CodecError("a patch has symbols after its end mark")

    @classmethod
    def build(cls, merges: PatchMerges, tokens: Sequence[bytes], mode: str = "stop") -> PatchTable:
        """Returns the table of a vocabulary. tokens: the bytes of each id. mode: see `PatchMerges.encode_all`.

        Raises `CodecError` naming the token if one takes more than S symbols.
        """
        rows = np.full((len(tokens), merges.patch_size), MARK, np.uint16)
        for i, patch in enumerate(merges.encode_all(tokens, mode)):
            if len(patch) > merges.patch_size:
                raise CodecError(
                    f"token {i} {tokens[i][:20]!r} takes {len(patch)} symbols, more than {merges.patch_size}: "
                    "learn the merges from these tokens"
                )
            rows[i, : len(patch)] = patch
        return cls(merges, rows, mode)

    @classmethod
    def learn(cls, tokens: Sequence[bytes], patch_size: int, mode: str = "stop") -> PatchTable:
        """Learns merges from a vocabulary and returns the vocabulary's table. tokens: the bytes of each id.

        Raises what `learn_merges` raises.
        """
        return cls.build(learn_merges(tokens, patch_size).merges, tokens, mode)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def patch_size(self) -> int:
        """S, the maximum number of symbols in a patch, end mark included."""
        return self.merges.patch_size

    def encode(self, ids: Any) -> Uint16s:
        """Returns the patches of first-stage ids (see `as_ids`), uint16 [n, S].

        Raises `CodecError` if the table lacks an id.
        """
        ids = as_ids(ids)
        if len(bad := np.flatnonzero(ids >= len(self.rows))):
            raise CodecError(f"id {ids[bad[0]]} at index {bad[0]} is not below {len(self.rows)}: another tokenizer's?")
        return self.rows[ids]

    def decode(self, patches: Any) -> bytes:
        """Returns the bytes of n patches [n, S]; a patch without end mark has S symbols.

        Raises what `PatchMerges.decode` raises.
        """
        return b"".join(self.merges.decode(patch) for patch in np.asarray(patches).tolist())

    @cached_property
    def tokens(self) -> tuple[bytes, ...]:
        """The bytes of each id."""
        return tuple(self.merges.decode(row) for row in self.rows.tolist())

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the first-stage tokenizer (`first_stage.tokens_fingerprint`)."""
        return tokens_fingerprint(self.tokens)

    def stats(self) -> dict[str, Any]:
        """Returns figures and merges for reports, by name."""
        return {
            "tokens": len(self),
            "patch_size": self.patch_size,
            "mode": self.mode,
            "merges": [list(pair) for pair in self.merges.pairs],
            "symbols": self.merges.symbols,
            "table_bytes": self.rows.nbytes,
            "longest_token_bytes": max(map(len, self.tokens), default=0),
            "patch_lengths": dict(sorted(Counter(self.lengths.tolist()).items())),
            "fingerprint": self.fingerprint,
        }

    def check_tokens(self, tokens: Sequence[bytes]) -> None:
        """Raises `DataError` unless the table was made for a tokenizer with these tokens."""
        if tokens_fingerprint(tokens) != self.fingerprint:
            raise DataError(
                f"the table was made for another tokenizer ({len(self)} tokens, fingerprint {self.fingerprint[:12]}) "
                f"than the one given ({len(tokens)} tokens, {tokens_fingerprint(tokens)[:12]})"
            )

    def save(self, path: str | Path) -> None:
        """Writes the table to a .npz file; an existing file is replaced only by a complete one.

        Raises `DataError` if the suffix is not .npz, `OSError` if writing fails.
        """
        path = _check_table_path(path)
        fields = {
            "version": np.array(VERSION),
            "patch_size": np.array(self.patch_size),
            "mode": np.array(self.mode),
            "merges": np.array(self.merges.pairs, np.uint16).reshape(-1, 2),
            "rows": self.rows,
            "fingerprint": np.array(self.fingerprint),
        }
        with atomic_file(path) as partial, open(partial, "wb") as file:
            np.savez_compressed(file, checksum=np.array(_table_checksum(fields)), **fields)

    @classmethod
    def load(cls, path: str | Path) -> PatchTable:
        """Reads a table that `save` wrote. Raises `DataError` naming the file and what is wrong with it."""
        path = _check_table_path(path)
        fields = _read_table_fields(path)
        with errors_as(DataError, f"{path} is not a patch table", CodecError, TypeError, ValueError):
            if fields["merges"].dtype != np.uint16:
                raise CodecError(f"merges must be uint16, got {fields['merges'].dtype}")
            pairs = tuple(map(tuple, fields["merges"].tolist()))
            table = cls(PatchMerges(int(fields["patch_size"]), pairs), fields["rows"], str(fields["mode"]))
        if str(fields["fingerprint"]) != table.fingerprint:
            raise DataError(f"{path}: its fingerprint does not match its tokens; make the table again")
        return table


def _check_table_path(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix != SUFFIX:
        raise DataError(f"{path}: a patch table is a {SUFFIX} file")
    return path


def _read_table_fields(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the fields of a table file after checking version and checksum. Raises `DataError` if they are wrong."""
    fields = read_npz(path, "a patch table")
    version = fields["version"].tolist() if "version" in fields else None
    if version != VERSION:
        raise DataError(f"{path} is a patch table of version {version!r:.40}; this mlx_zip reads version {VERSION}")
    if fields.keys() != set(_FIELDS):
        raise DataError(f"{path} must hold {', '.join(_FIELDS)}; it holds {', '.join(sorted(fields))}")
    if str(fields.pop("checksum")) != _table_checksum(fields):
        raise DataError(f"{path} is damaged: its checksum does not match; make the table again")
    return fields


def _table_checksum(fields: dict[str, NDArray[Any]]) -> str:
    """Returns the sha256 in hex of all fields in order of their names.

    Covers the value of a scalar, and dtype, shape and content of an array.
    """
    digest = sha256()
    for name, array in sorted(fields.items()):
        content = array.tobytes() if array.ndim else str(array).encode()
        kind = f"{array.dtype.str} {array.shape}" if array.ndim else ""
        digest.update(f"{name} {kind} {len(content)}\n".encode() + content)
    return digest.hexdigest()
