"""An adapted tokenizer: encodes and decodes text, maps ids from and to its base tokenizer, reads and writes its file.

The file is JSON and holds all that is needed to encode and decode:

    format, version    "mlx_zip adapted vocabulary", 1
    base               of the base tokenizer: name, fingerprint of the merge list, number of merges, number of ids
    method, settings   how the merges were chosen
    rule               "replay" or "final": when virtual tokens are split in a new text (see `AdaptedVocabulary`)
    front              how text becomes pieces: pieces, added (tokens), normalizer, pre_tokenizer
    merges             "left right" in the spelling of byte-level vocabularies: letters, the first n, the promoted
    ranks              ranks of these merges in the base list
    first              number of letters plus n
    virtual            places in `merges` of the merges that became virtual, in order
    token_ids          base ids of the 256 bytes and of each merge's token; 2^32-1 for a token without an id
    letters            number of leading merges that make characters of bytes (byte fallback); not counted in n
    ids                base id of each id, rising: bytes, added tokens, tokens of merges that are not virtual
    sha256             sha256 in hex of the JSON text of all other fields (keys sorted, no blanks, ASCII)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.ids import Uint32s, as_ids
from mlx_zip.errors import DataError, errors_as
from mlx_zip.files import expand_home, read_json_object, write_json
from mlx_zip.vocab.adaptbpe.base_vocabulary import BaseVocabulary, encode_with_added_tokens
from mlx_zip.vocab.adaptbpe.learn import Swap, adapt_merges, most_frequent_merges
from mlx_zip.vocab.adaptbpe.merge_list import BYTES, NO_ID, BpeEncoder, MergeList, Schedule
from mlx_zip.vocab.adaptbpe.pieces import PieceSplitter
from mlx_zip.vocab.first_stage import bytes_to_spelled, parse_merges

FORMAT, VERSION = "mlx_zip adapted vocabulary", 1
METHODS = ("adapt", "first-k", "top-k")
RULES = ("replay", "final")
_TYPES = {
    "base": dict,
    "method": str,
    "settings": dict,
    "rule": str,
    "front": dict,
    "merges": list,
    "ranks": list,
    "first": int,
    "virtual": list,
    "token_ids": list,
    "letters": int,
    "ids": list,
}
_BASE_TYPES = {"name": str, "fingerprint": str, "merges": int, "ids": int}


@dataclass(frozen=True, eq=False)
class AdaptedVocabulary:
    """A merge list whose merges are either actual, with their tokens in the vocabulary, or virtual.

    merges: the first `first` merges of the base list, letters included, then the promoted merges in order. ranks: their
    ranks in the base list. virtual: places in `merges` of the merges that left the vocabulary. rule: "replay" repeats
    the swaps on a text (splits virtual[i], then applies promoted merge i); "final" applies all merges and splits
    virtual tokens at the end. token_ids uint32 [256 + len(merges)]: base ids, 2^32-1 for an unfinished character.
    Raises `DataError` if the fields contradict each other.
    """

    name: str
    fingerprint: str
    base_merges: int
    base_ids: int
    merges: MergeList
    ranks: NDArray[np.uint32]
    first: int
    virtual: tuple[int, ...]
    rule: str
    token_ids: NDArray[np.uint32]
    splitter: PieceSplitter
    method: str = "adapt"
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.merges)
        if self.method not in METHODS:
            raise DataError(f"method {self.method!r:.40} is none of {', '.join(METHODS)}")
        if self.rule not in RULES:
            raise DataError(f"rule {self.rule!r} is none of {', '.join(RULES)}")
        if type(self.first) is not int or not self.merges.letters <= self.first <= n:
            raise DataError(f"first {self.first} is not {self.merges.letters}..{n}")
        if self.ranks.shape != (n,) or self.token_ids.shape != (BYTES + n,):
            raise DataError(f"{n} merges need {n} ranks and {BYTES + n} token_ids")
        letters = self.merges.letters
        places = {place for place in self.virtual if type(place) is int and letters <= place < n}
        if len(places) != len(self.virtual):
            raise DataError(f"virtual must be different places, {letters}..{n - 1}")
        none = (np.flatnonzero(self.token_ids == NO_ID) - BYTES).tolist()
        if none != self.merges.unfinished:
            raise DataError("token_ids must have 2^32-1 where a character is unfinished, and nowhere else")
        if len(np.unique(self.token_ids)) != BYTES + n - max(0, len(none) - 1):
            raise DataError("token_ids gives one id to several tokens")
        if self.rule == "replay":
            self._check_swaps()

    def _check_swaps(self) -> None:
        """Raises `DataError` unless each swap splits a merge that exists before the swap and promotes one merge."""
        if len(self.virtual) != len(self.merges) - self.first:
            raise DataError("the rule replay needs a promoted merge for each virtual one")
        for swap, place in enumerate(self.virtual):
            if place >= self.first + swap:
                raise DataError(f"virtual {swap} is merge {place}, which does not exist yet at that swap")

    def __len__(self) -> int:
        """Number of ids."""
        return len(self.ids)

    @property
    def letters(self) -> int:
        """Number of tokens that are single characters of several bytes, in a vocabulary with byte fallback."""
        return self.merges.letters - len(self.merges.unfinished)

    @property
    def actual_merges(self) -> int:
        """Number n of merges in the vocabulary, letters not counted."""
        return len(self.merges) - self.merges.letters - len(self.virtual)

    def stats(self) -> dict[str, Any]:
        """Returns counts and settings for reports, by name."""
        return {
            "base": self.name,
            "base_ids": self.base_ids,
            "ids": len(self),
            "method": self.method,
            "rule": self.rule,
            "merges": self.actual_merges,
            "virtual": len(self.virtual),
            "promoted": len(self.merges) - self.first,
            "added_tokens": len(self.splitter.added),
            "letters": self.letters,
            "settings": self.settings,
            "fingerprint": self.fingerprint,
        }

    @cached_property
    def ids(self) -> Uint32s:
        """The base id of each adapted id, uint32 [number of ids], rising."""
        actual = np.ones(BYTES + len(self.merges), bool)
        actual[BYTES + np.array([*self.virtual, *self.merges.unfinished], np.intp)] = False
        added = np.array([token.id for token in self.splitter.added], np.uint32)
        return np.unique(np.concatenate([self.token_ids[actual], added]))

    @cached_property
    def schedule(self) -> Schedule:
        """The times at which merges are applied and their tokens are split, according to `rule`."""
        promoted = range(self.first, len(self.merges))
        form = Schedule.replay if self.rule == "replay" else Schedule.final
        return form(len(self.merges), self.first, self.virtual, promoted)

    @cached_property
    def encoder(self) -> BpeEncoder:
        """The encoder from bytes to tokens of `merges`; tokens are not ids yet."""
        return BpeEncoder(self.merges, self.schedule, self.splitter.encoder_pieces)

    @cached_property
    def _adapted_ids_by_base_id(self) -> Uint32s:
        known = self.token_ids[self.token_ids != NO_ID]
        table = np.full(int(max(self.ids.max(), known.max())) + 1, NO_ID, np.uint32)
        table[self.ids] = np.arange(len(self.ids), dtype=np.uint32)
        return table

    def encode(self, text: str) -> Uint32s:
        """Returns a text's ids, uint32, without special tokens. Raises `DataError` if it has a lone surrogate."""
        return self._adapted_ids_by_base_id[encode_with_added_tokens(self.encoder, self.splitter, text, self.token_ids)]

    def adapted_ids_of(self, base_ids: Any) -> Uint32s:
        """Returns the adapted ids of base ids, uint32. Raises `DataError` naming the base id if one was not kept."""
        base_ids = as_ids(base_ids)
        places = np.searchsorted(self.ids, base_ids)
        lost = np.flatnonzero(self.ids[np.minimum(places, len(self.ids) - 1)] != base_ids)
        if len(lost):
            raise DataError(f"base id {base_ids[lost[0]]} is not in the adapted vocabulary")
        return places.astype(np.uint32)

    def decode(self, ids: Any) -> bytes:
        """Returns the bytes of adapted ids, added tokens included. Raises `DataError` if an id is unknown."""
        ids = as_ids(ids)
        if len(ids) and int(ids.max()) >= len(self):
            raise DataError(f"id {int(ids.max())} is not below {len(self)}, the size of the adapted vocabulary")
        known = self._bytes_by_id
        return b"".join([known[i] for i in ids.tolist()])

    @cached_property
    def _bytes_by_id(self) -> list[bytes]:
        of = dict(zip(self.token_ids.tolist(), map(self.splitter.bytes_of_token, self.merges.tokens), strict=True))
        of |= {token.id: token.content.encode("utf-8") for token in self.splitter.added}
        return [of[i] for i in self.ids.tolist()]

    def save(self, path: str | Path) -> None:
        """Writes the file; an existing file is replaced only by a complete one. Raises `OSError` if writing fails."""
        tokens = list(map(bytes_to_spelled, self.merges.tokens))
        record = {
            "format": FORMAT,
            "version": VERSION,
            "base": {
                "name": self.name,
                "fingerprint": self.fingerprint,
                "merges": self.base_merges,
                "ids": self.base_ids,
            },
            "method": self.method,
            "settings": self.settings,
            "rule": self.rule,
            "front": self.splitter.to_record(),
            "merges": [f"{tokens[left]} {tokens[right]}" for left, right in self.merges.parts.tolist()],
            "ranks": self.ranks.tolist(),
            "first": self.first,
            "virtual": list(self.virtual),
            "token_ids": self.token_ids.tolist(),
            "letters": self.merges.letters,
            "ids": self.ids.tolist(),
        }
        write_json(Path(path), {**record, "sha256": _record_sha256(record)})

    def check_base(self, base: BaseVocabulary) -> None:
        """Raises `DataError` if this vocabulary was adapted from another tokenizer than `base`."""
        if base.merges.fingerprint != self.fingerprint:
            raise DataError(
                f"adapted from {self.name}, whose merges differ from those of {base.name}: adapt that tokenizer again"
            )
        known = not len(self.ranks) or int(self.ranks.max()) < len(base.merges)
        places = [*range(BYTES), *(BYTES + rank for rank in self.ranks.tolist())]
        if not known or not np.array_equal(base.ids[places], self.token_ids):
            raise DataError(
                f"adapted from {self.name}, whose ids differ from those of {base.name}: adapt that tokenizer again"
            )


def adapt_vocabulary(
    base: BaseVocabulary,
    words: Counter[bytes],
    n: int,
    *,
    method: str = "adapt",
    rule: str = "replay",
    progress: Callable[[Swap], Any] = lambda swap: None,
    **settings: Any,
) -> AdaptedVocabulary:
    """Adapts a tokenizer to texts: returns the vocabulary with n of its merges, chosen by `method`.

    words: the pieces of the texts and how often each occurs (see `count_words`). n: merges to keep; letters are kept in
    addition. method: "adapt" begins with the first n merges and swaps some (`settings`: see `adapt_merges`); "first-k"
    keeps the first n; "top-k" keeps the n whose tokens occur most often when all merges are applied, always with the
    rule "final". progress is called after each swap. Raises `DataError` if the method is unknown or a setting is out of
    range.
    """
    kept_merges = base.merges.letters + n
    if method not in METHODS:
        raise DataError(f"method {method!r} is none of {', '.join(METHODS)}")
    if method == "top-k":
        ranks, kept = list(range(len(base.merges))), set(most_frequent_merges(base.merges, words, kept_merges))
        first, virtual, rule = len(ranks), [rank for rank in ranks if rank not in kept], "final"
    else:
        chosen: dict[str, Any] = settings if method == "adapt" else {"max_swaps": 0}
        found = adapt_merges(base.merges, words, kept_merges, progress=progress, **chosen)
        ranks, first = [*range(kept_merges), *found.promoted], kept_merges
        place = {rank: i for i, rank in enumerate(ranks)}
        virtual = [place[rank] for rank in found.virtual]
    return AdaptedVocabulary(
        base.name,
        base.merges.fingerprint,
        base.n_merges,
        base.size,
        _select_merges(base.merges, ranks),
        np.array(ranks, np.uint32),
        first,
        tuple(virtual),
        rule,
        base.ids[[*range(BYTES), *(BYTES + rank for rank in ranks)]],
        base.splitter,
        method,
        {"n": n, **(settings if method == "adapt" else {})},
    )


def count_words(splitter: PieceSplitter, texts: Iterable[str]) -> Counter[bytes]:
    """Counts the pieces that texts are split into before merging; added tokens are left out."""
    counts: Counter[bytes] = Counter()
    for text in texts:
        for part in splitter.normalized_parts(text):
            if not isinstance(part, int):
                counts.update(splitter.split_part(part))
    return counts


def _select_merges(merges: MergeList, ranks: Sequence[int]) -> MergeList:
    """Returns a merge list of the merges with these ranks, in this order; `ranks` begins with the letters."""
    new = np.zeros(BYTES + len(merges), np.uint32)
    new[:BYTES] = np.arange(BYTES)
    new[BYTES + np.array(ranks, np.intp)] = BYTES + np.arange(len(ranks))
    return MergeList(new[merges.parts[np.array(ranks, np.intp)]].reshape(-1, 2), merges.letters)


def read_adapted_vocabulary(path: str | Path) -> AdaptedVocabulary:
    """Reads a file that `AdaptedVocabulary.save` wrote. Raises `DataError` naming the file and what is wrong in it."""
    path = expand_home(path)
    record = read_json_object(path)
    faults = (DataError, ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)
    with errors_as(DataError, str(path), *faults):
        return _parse_adapted_vocabulary(record)


def _parse_adapted_vocabulary(record: dict[str, Any]) -> AdaptedVocabulary:
    """Returns the vocabulary in a parsed file. Its errors become `DataError` in the caller."""
    if record.get("format") != FORMAT:
        raise DataError("is no adapted vocabulary (mlx_zip vocab adapt learn writes one)")
    if record.get("version") != VERSION:
        raise DataError(f"version {record.get('version')} is not {VERSION}, the one read here")
    if record.pop("sha256") != _record_sha256(record):
        raise DataError("is damaged, its checksum does not match: adapt again")
    _check_field_types(record, _TYPES)
    _check_field_types(base := record["base"], _BASE_TYPES, "base.")
    if low := [name for name in ("merges", "ids") if base[name] < 0]:
        raise DataError(f"base.{low[0]} is {base[low[0]]}, below 0")
    vocabulary = AdaptedVocabulary(
        base["name"],
        base["fingerprint"],
        base["merges"],
        base["ids"],
        MergeList.from_byte_pairs(parse_merges(record["merges"]), record["letters"]),
        as_ids(record["ranks"]),
        record["first"],
        tuple(record["virtual"]),
        record["rule"],
        as_ids(record["token_ids"]),
        PieceSplitter.from_record(record["front"]),
        record["method"],
        record["settings"],
    )
    if vocabulary.ids.tolist() != record["ids"]:
        raise DataError("ids are not those of the bytes, added tokens and actual merges")
    return vocabulary


def _check_field_types(record: Mapping[str, Any], types: Mapping[str, type], inside: str = "") -> None:
    """Raises `DataError` if a field does not have its type in `types`. inside: prefix of the names in messages."""
    for name, kind in types.items():
        if type(record[name]) is not kind:
            raise DataError(f"{inside}{name} is {record[name]!r:.80}, not of the type {kind.__name__}")


def _record_sha256(record: Mapping[str, Any]) -> str:
    return sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
