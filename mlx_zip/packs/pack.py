"""`Pack`: learned entries that a codebook begins with, and facts about them; read, written, merged and resolved here.

A pack's .npz file holds the arrays of `mlx_zip.packs.entries` (`entries`, `lengths`) and `about`, a JSON text: the
tokenizer's fingerprint, the texts that the entries were learned from, and their rates. A tuned pack also holds rows of
its entries for one model (`mlx_zip.packs.tuned`).

The entries of a model's own pack are in the model's config.json, because mlx-lm builds a model from config.json alone;
so they are kept when mlx-lm loads or converts the model, and on the hub. The tuned rows are in `pack.npz` beside
config.json, and fit that model only. A damaged pack raises an error, because the model's answers would change silently
without the pack.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import chain, zip_longest
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip import files
from mlx_zip.codec.arrays import read_npz
from mlx_zip.errors import CodecError, DataError, ModelError, failure_reason
from mlx_zip.packs.entries import Entry, checked_entries, pad_entries, read_entries
from mlx_zip.packs.tuned import PlainCodec, TunedRows, rows_from_arrays, rows_to_arrays

VERSION = 1
SUFFIX = ".npz"
IN_FOLDER = "pack.npz"  # in a model's folder: the model's own pack, tuned for it
IN_ADAPTER = "zip2zip_pack_rows.safetensors"  # beside an adapter: tuned rows for the merged model
ROWS = ("input_rows", "output_rows")


@dataclass(frozen=True, eq=False, repr=False)
class Pack(Sequence[Entry]):
    """Learned entries of base ids, best first; slot i of a codebook that begins with the pack holds entry i.

    A pack is an immutable sequence of its entries, which the codec takes as `start`. Packs of equal fingerprints are
    equal. tokenizer: fingerprint of the tokenizer whose ids the entries hold, None if unknown. about: other facts from
    the file, such as the texts the pack was learned from. rows: tuned rows of the entries in the same order, None for a
    pack that was not tuned. name: the file that the pack was read from, for messages. parts: the packs that this pack
    was merged from. Raises `DataError` if the number of rows is not that of the entries.
    """

    entries: tuple[Entry, ...]
    tokenizer: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    rows: TunedRows | None = None
    name: str | None = None
    parts: tuple[Pack, ...] = ()

    def __post_init__(self) -> None:
        if self.rows is not None and len(self.rows.output) != len(self.entries):
            raise DataError(f"there are {len(self.rows.output)} tuned rows for {len(self.entries)} entries")

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: Any) -> Any:
        return self.entries[index]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __eq__(self, other: object) -> bool:
        return self.fingerprint == other.fingerprint if isinstance(other, Pack) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pack:
        return self

    def __repr__(self) -> str:
        named = "" if self.name is None else f"{self.name}: "
        tokenizer = "unknown" if self.tokenizer is None else self.tokenizer[:12]
        tuned = "" if self.rows is None else ", tuned rows"
        return f"<Pack {named}{len(self.entries)} entries, merge size {self.merge_size}, tokenizer {tokenizer}{tuned}>"

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of entries, tokenizer and rows; equal for equal packs."""
        facts = [self.tokenizer, self.entries] + ([] if self.rows is None else [self.rows.fingerprint])
        return sha256(json.dumps(facts).encode()).hexdigest()

    @cached_property
    def tuned_fingerprint(self) -> str | None:
        """Hex digest of entries and rows, which a saved cache stores to name the pack; None for a pack without rows."""
        if self.rows is None:
            return None
        return sha256(json.dumps([self.entries, self.rows.fingerprint]).encode()).hexdigest()

    @property
    def by_name(self) -> dict[str, Pack]:
        """The packs that this pack was merged from, or this pack itself, by the names of their files."""
        return {one.name or f"pack {number}": one for number, one in enumerate(self.parts or (self,), start=1)}

    @property
    def merge_size(self) -> int:
        """Number of base ids of the longest entry; 2 for a pack without entries."""
        return max(map(len, self.entries), default=2)

    def plain_codec(self) -> PlainCodec:
        """Returns the codec of the plain model that the pack was tuned for. Raises `ModelError` if there is none."""
        if self.rows is None or self.rows.plain is None:
            kind = "has no rows" if self.rows is None else "was tuned for a zip2zip model"
            raise ModelError(
                f"the pack (--pack) {kind}, and a plain model has no hyper-encoder to make some: tune the pack for it "
                "(mlx_zip vocab pack tune)"
            )
        return self.rows.plain

    def check_tokenizer(self, fingerprint: str, name: str) -> None:
        """Raises `DataError` if the pack was learned with another tokenizer. name: the pack's name, for the message."""
        if self.tokenizer is not None and self.tokenizer != fingerprint:
            raise DataError(
                f"{name} was learned with another tokenizer ({self.tokenizer[:12]}, not {fingerprint[:12]}): its base "
                "ids mean something else here; learn a pack with this one"
            )

    def check_made_for(self, tokenizer: Any, name: str | None = None) -> None:
        """Raises `DataError` if the pack was learned with another tokenizer.

        tokenizer: one of transformers, or mlx-lm's wrapper of it. name: the pack's name, for the message. If `name` is
        None, each pack that this pack was merged from is checked under its own name. (A merged pack's tokenizer is
        unknown if that of any part is unknown.)
        """
        packs = self.by_name if name is None else {name: self}
        if any(pack.tokenizer is not None for pack in packs.values()):
            from mlx_zip.vocab.first_stage import tokenizer_fingerprint

            mark = tokenizer_fingerprint(tokenizer)
            for file, pack in packs.items():
                pack.check_tokenizer(mark, file)


# ---- what arguments named `pack` accept

PackLike = Pack | str | PathLike  # a pack, or the path of a pack file
PackOrEntries = PackLike | Sequence[Sequence[int]]  # a request may also begin with entries, each a sequence of base ids


def as_pack(pack: PackLike) -> Pack:
    """Returns `pack` if it is a `Pack`, else reads the pack file at that path.

    Raises `DataError` if the file is not a pack, or `pack` is neither a `Pack` nor a path.
    """
    if isinstance(pack, Pack):
        return pack
    if isinstance(pack, str | PathLike):
        return load_pack(pack)
    raise DataError(f"pack must be the path of a pack file or a Pack (mlx_zip.load_pack), not {type(pack).__name__}")


def resolve_pack(pack: PackOrEntries) -> Pack:
    """Returns the pack that a request begins with.

    Raises `DataError` if a file is not a pack, `CodecError` if `pack` is neither a pack nor a sequence of entries.
    """
    if isinstance(pack, PackLike):
        return as_pack(pack)
    try:
        return Pack(tuple(tuple(int(x) if isinstance(x, np.integer) else x for x in entry) for entry in pack))
    except TypeError as error:
        raise CodecError("a pack must be a sequence of entries, each a sequence of base ids") from error


def split_packs(pack: Any, batch: int) -> list[Pack | None]:
    """Returns what each of `batch` sequences begins with, given one pack for all of them or a list of one pack each.

    A pack may be anything that `resolve_pack` takes, or None for the model's own. Raises `ModelError` for other values
    and if the list does not have one pack per sequence, `DataError` if a file is not a pack.
    """
    if pack is None or _is_one_pack(pack):
        return [None if pack is None else resolve_pack(pack)] * batch
    if len(pack) != batch:
        raise ModelError(f"there are {len(pack)} packs for {batch} sequence(s)")
    found = {
        id(one): resolve_pack(one) for one in pack if one is not None
    }  # a pack that several sequences share is read once
    return [found.get(id(one)) for one in pack]


def _is_one_pack(pack: Any) -> bool:
    """Returns whether `pack` is one pack, not a list of packs. Raises `ModelError` if it is neither."""
    if isinstance(pack, PackLike):
        return True
    if not isinstance(pack, Sequence | np.ndarray):
        raise ModelError(
            f"pack must be a path, a Pack, entries of base ids, or a list of one pack per sequence, "
            f"not {type(pack).__name__}"
        )
    return len(pack) == 0 or any(_is_entry(item) for item in pack)


def _is_entry(item: Any) -> bool:
    return isinstance(item, Sequence | np.ndarray) and len(item) > 0 and isinstance(item[0], int | np.integer)


Tuned = Pack | str | None  # a pack with tuned rows; its `tuned_fingerprint`, after loading a saved state; or none


def tuned_fingerprint(begun: Any) -> str | None:
    """Returns the fingerprint of the tuned rows that a sequence began with, or None if it began without tuned rows.

    begun: the pack or entries that the sequence began with, or the fingerprint itself.
    """
    if isinstance(begun, Pack):
        return begun.tuned_fingerprint
    return begun if isinstance(begun, str) else None


# ---- files


def load_pack(path: str | PathLike[str]) -> Pack:
    """Reads a pack from a .npz, .json or .npy file. Raises `DataError` naming a file that is missing or not a pack."""
    path = files.expand_home(path)
    entries = read_entries(path)
    if path.suffix != SUFFIX:
        return Pack(entries, name=str(path))
    about, arrays = _read_about_and_rows(path)
    version = about.pop("version", VERSION)
    if type(version) is not int or version != VERSION:
        raise DataError(f"{path}: a pack of version {version!r}; this mlx_zip reads version {VERSION}")
    tokenizer, made = about.pop("tokenizer", None), about.pop("fingerprint", None)
    if not isinstance(tokenizer, str | None):
        raise DataError(f"{path}: its tokenizer is {tokenizer!r:.60}, not a fingerprint")
    rows = rows_from_arrays(path, arrays, about.pop("rows", None)) if arrays or "rows" in about else None
    if rows is not None and len(rows.output) != len(entries):
        raise DataError(f"{path} is damaged: {len(rows.output)} rows for {len(entries)} entries")
    pack = Pack(entries, tokenizer, about, rows, str(path))
    if made is not None and made != pack.fingerprint:
        raise DataError(f"{path} is damaged: its fingerprint does not match its entries and rows")
    return pack


def pack_in_folder(folder: Path, start: Sequence[Entry] | None) -> Pack | None:
    """Reads the pack in a model's folder; returns None if there is none.

    start: the start entries in the model's config.json. Raises `DataError` if the pack cannot be read, `ModelError` if
    its entries are not `start`.
    """
    path = folder / IN_FOLDER
    if not os.path.lexists(path):  # a broken link is an error, not a missing pack
        return None
    try:
        pack = load_pack(path)
    except DataError as error:
        raise DataError(f"{error}; delete it to begin without tuned rows") from error
    if pack.entries != (start or ()):
        raise ModelError(
            f"{path} is not the pack that config.json says the model begins with; delete it to begin without tuned rows"
        )
    return pack


def use_pack_in_folder(
    folder: Path, start: Sequence[Entry] | None, tokenizer: Callable[[], Any], take: Callable[[Pack], None]
) -> None:
    """Makes requests begin with the pack in a model's folder, if there is one: calls `take` with the pack.

    start: as in `pack_in_folder`. tokenizer: returns the model's tokenizer. Raises `DataError` if the pack cannot be
    read or belongs to another tokenizer, `ModelError` if its entries are not `start`, or if `take` refuses its rows.
    """
    pack = pack_in_folder(folder, start)
    if pack is None:
        return
    if pack.tokenizer is not None:
        pack.check_made_for(tokenizer(), pack.name)
    try:
        take(pack)
    except ModelError as error:
        raise ModelError(f"{pack.name}: {error}, or delete it to begin without tuned rows") from error


def _read_about_and_rows(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Reads the facts (`about`) in a pack's .npz file, and its arrays of tuned rows by name."""
    arrays = read_npz(path, "a pack", ("about", *ROWS))
    text = arrays.pop("about").tobytes() if "about" in arrays else b"{}"
    try:
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as a pack: {failure_reason(error)}") from error
    if not isinstance(about, dict):
        raise DataError(f"{path}: `about` in it is not a JSON object")
    return about, arrays


def save_pack(path: str | Path, pack: Pack) -> None:
    """Writes a pack to a .npz file; a file that exists is replaced only by a complete one.

    Raises `DataError` as `files.check_writable` does and for invalid entries, `OSError` if the disk is full.
    """
    path = Path(path)
    files.check_writable(path, "a pack", SUFFIX)
    entries = checked_entries(path, pack.entries)
    ids, lengths = pad_entries(entries, pack.merge_size)
    facts = {**pack.about, "version": VERSION, "tokenizer": pack.tokenizer, "fingerprint": pack.fingerprint}
    rows: dict[str, Any] = {}
    if pack.rows is not None:
        rows, facts["rows"] = rows_to_arrays(pack.rows)
    about = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    with files.atomic_file(path) as partial, open(partial, "wb") as file:
        np.savez(file, entries=ids, lengths=lengths, about=about, **rows)


# ---- merging


def merge_packs(packs: Sequence[Pack], size: int | None = None, drop_rows: bool = False) -> Pack:
    """Merges packs: takes the best remaining entry of each pack in turn, no entry twice, `size` at most (None: all).

    If the tokenizer of one pack is unknown, so is that of the result. Tuned rows are kept unless `drop_rows`. Raises
    `DataError` if there are no packs, `size` is below 1, or the packs have different tokenizers; and, unless
    `drop_rows`, if some packs are tuned and others are not, or packs are tuned for different models.
    """
    if not packs or (size is not None and size < 1):
        raise DataError(f"there must be packs to merge and room for an entry, got {len(packs)} packs, size {size}")
    known = {pack.tokenizer for pack in packs if pack.tokenizer is not None}
    if len(known) > 1:
        names = ", ".join(sorted(name[:12] for name in known))
        raise DataError(f"the packs are of different tokenizers ({names}) and cannot be merged")
    if not drop_rows:
        _check_tuned_for_one_model(packs)
    in_turn = chain.from_iterable(zip_longest(*(enumerate(pack.entries) for pack in packs)))  # None: a pack has ended
    places: dict[Entry, tuple[int, int]] = {}  # entry -> (number of its pack, its slot there)
    for number, slot_and_entry in enumerate(in_turn):
        if slot_and_entry is not None:
            slot, entry = slot_and_entry
            places.setdefault(entry, (number % len(packs), slot))
    entries = tuple(places)[:size]
    tokenizer = packs[0].tokenizer if all(pack.tokenizer is not None for pack in packs) else None
    about = {"merged": [pack.fingerprint for pack in packs]}
    rows = None if drop_rows else _merged_rows(packs, [places[entry] for entry in entries])
    return Pack(entries, tokenizer, about, rows, parts=tuple(packs))


def _check_tuned_for_one_model(packs: Sequence[Pack]) -> None:
    """Raises `DataError` unless no pack has tuned rows, or all have them for the same model."""
    rows = [pack.rows for pack in packs]
    if all(one is None for one in rows):
        return
    first = rows[0]
    if first is None or not all(one is not None and one.is_for_same_model(first) for one in rows):
        raise DataError(
            "the packs are not all tuned for the same model, so their rows cannot be merged: merge them without rows "
            "(vocab pack merge --drop-rows), then tune the result"
        )


def _merged_rows(packs: Sequence[Pack], places: Sequence[tuple[int, int]]) -> TunedRows | None:
    """Returns the tuned rows of entries, each given as (number of its pack, slot); None for packs without rows."""
    rows = [pack.rows for pack in packs if pack.rows is not None]
    if not rows:
        return None
    first = np.cumsum([0, *(len(pack.entries) for pack in packs)])
    output = np.concatenate([one.output for one in rows])
    joined = output if rows[0].sides_are_one else np.concatenate([one.input for one in rows])
    whole = TunedRows(joined, output, rows[0].model, rows[0].plain)
    return whole.select([int(first[pack]) + slot for pack, slot in places])
