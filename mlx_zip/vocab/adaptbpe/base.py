"""Tokenizers to adapt, from the files they come in: tokenizer.json, merges.txt or vocab.bpe, tiktoken ranks.

All are byte pair encoding, byte-level but for a tokenizer.json with byte fallback (`characters`). A vocabulary may
hold more than its merges make (added tokens, names kept free): what no merge and no byte makes, and is no added token,
cannot be produced and is counted as `unreachable`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import DataError
from mlx_zip.vocab.adaptbpe.characters import check_blanks, of_characters
from mlx_zip.vocab.adaptbpe.encoder import PIECES, Encoder
from mlx_zip.vocab.adaptbpe.merges import BYTES, NO_ID, MergeList, live
from mlx_zip.vocab.adaptbpe.text import CHARACTERS, CUT_BY_NAME, PATTERNS, Front, pieces_of
from mlx_zip.vocab.first_stage import (
    BESIDE,
    BYTE_OF,
    AddedToken,
    Pair,
    TokenizerFile,
    open_tokenizer,
    read_stored,
    to_text,
    vocabulary_of,
)

FILE = "adapted.json"  # the name of an adapted tokenizer's file inside a model folder


@dataclass(frozen=True, eq=False)
class BaseVocabulary:
    """A tokenizer before it is adapted.

    ids: uint32 [256 + M], the id of each token of `merges`, `NO_ID` for an unfinished character. front: how text
    becomes pieces. unreachable: tokens of the vocabulary that nothing makes. source: the tokenizer.json, where it came
    as one. ignore_merges: a piece that is a token as a whole becomes that token, whatever the merges say; `encode` here
    goes by the merges.
    """

    name: str
    merges: MergeList
    ids: NDArray[np.uint32]
    front: Front
    unreachable: int = 0
    ignore_merges: bool = False
    source: dict[str, Any] | None = None

    @property
    def n_merges(self) -> int:
        """How many merges there are, letters apart."""
        return len(self.merges) - self.merges.letters

    @property
    def size(self) -> int:
        """The highest id and one."""
        return 1 + max(int(self.ids[self.ids != NO_ID].max()), *(token.id for token in self.front.added), 0)

    def encoder(self) -> Encoder:
        """The whole list by rank."""
        return Encoder(self.merges, pieces=self.front.encoder_pieces)

    def encode(self, text: str, encoder: Encoder | None = None) -> Uint32s:
        """Ids of a text, nothing added before or behind; with an `encoder()` that is kept, faster."""
        return encoded(encoder or self.encoder(), self.front, text, self.ids)


def encoded(encoder: Encoder, front: Front, text: str, ids: Uint32s) -> Uint32s:
    """Ids of a text: `ids` [tokens] of what the encoder makes of each stretch, and of the added tokens between."""
    found = [np.empty(0, np.uint32)]
    for part in front.parts(text):
        if isinstance(part, int):
            found.append(np.array([part], np.uint32))
        elif front.pieces not in PIECES:
            found.append(ids[encoder.encode_pieces(front.cut(part))[0]])
        else:
            found.append(ids[encoder.encode(part)])
    return np.concatenate(found)


def read_base(path: str | Path, pieces: str | None = None) -> BaseVocabulary:
    """Reads a tokenizer by its file's name. pieces: how its text is cut, where the file does not say.

    Raises `DataError` naming the file and, where one is at fault, merge or line.
    """
    file = open_tokenizer(path)
    try:
        if file.kind == "ranks":
            return _of_ranks(file, pieces)
        return _of_merges(file, pieces) if file.kind == "merges" else _of_tokenizer(file, pieces)
    except DataError as error:
        told = str(error)
        raise DataError(told if told.startswith(str(file.path)) else f"{file.path}: {told}") from error


# ---- merges.txt, vocab.bpe


def _of_merges(file: TokenizerFile, pieces: str | None) -> BaseVocabulary:
    """Ids are those of the vocabulary beside the list, whose other tokens are added ones; or GPT-2's."""
    merges = MergeList.of_bytes(file.pairs())
    renamed = (file.path.name.replace(*names) for names in BESIDE.items() if names[0] in file.path.name)
    beside = next(map(file.path.with_name, renamed), None)
    if beside is None or not beside.is_file():
        return BaseVocabulary(file.name, merges, _in_order(merges), Front(pieces or "gpt2"))
    vocabulary = _vocabulary(beside)
    names = vocabulary.keys() - set(map(to_text, merges.tokens))
    added = tuple(AddedToken(name, vocabulary[name]) for name in sorted(names, key=vocabulary.__getitem__))
    return BaseVocabulary(file.name, merges, _ids(merges, vocabulary), Front(pieces or "gpt2", added))


def _vocabulary(path: Path) -> dict[str, int]:
    try:
        return vocabulary_of(json.loads(read_stored(path)))
    except ValueError as error:
        raise DataError(f"{path.name} beside it is not valid JSON: {error}") from error


def _in_order(merges: MergeList) -> Uint32s:
    """GPT-2's ids: the bytes that stand for themselves, the other bytes, the merges."""
    ids = np.arange(BYTES + len(merges), dtype=np.uint32)
    ids[list(BYTE_OF.values())] = np.arange(BYTES)
    return ids


# ---- tokenizer.json


def _of_tokenizer(file: TokenizerFile, pieces: str | None) -> BaseVocabulary:
    file.merges()
    data, model = file.json, file.model
    for setting in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(setting):
            raise DataError(f"{setting} {model[setting]!r} is neither byte-level BPE nor has byte fallback alone")
    if _was_adapted(file.path, model):
        raise DataError(f"was adapted already, by the {FILE} beside it: adapt the base of this model instead")
    pieces = CHARACTERS if model.get("byte_fallback") else pieces or pieces_of(data.get("pre_tokenizer"))
    if pieces is None:
        raise DataError("the pre_tokenizer is not byte-level, and without byte fallback nothing else can be adapted")
    vocabulary, added = file.vocabulary(), file.added()
    if one := next((token for token in data.get("added_tokens") or () if token.get("single_word")), None):
        raise DataError(f"added token {one['content']!r} is one of single words, which are not read here")
    if pieces == CHARACTERS:
        check_blanks(data)
        merges, ids = of_characters(vocabulary, file.merges(), {token.content for token in added})
    else:
        merges = MergeList.of_bytes(live(file.pairs()))
        ids = _ids(merges, vocabulary)
    reached = {int(i) for i in ids} | {token.id for token in added}
    own = data.get("pre_tokenizer") if pieces not in PIECES else None
    front = Front(pieces, added, data.get("normalizer"), own)
    unreachable = len(set(vocabulary.values()) - reached)
    return BaseVocabulary(file.name, merges, ids, front, unreachable, bool(model.get("ignore_merges")), data)


def _was_adapted(path: Path, model: Mapping[str, Any]) -> bool:
    """Whether the file beside it says what this tokenizer.json cannot. A base may have one beside it too: that has
    other ids than its own, and fewer merges.
    """
    try:
        beside = json.loads(path.with_name(FILE).read_text(encoding="utf-8"))
        same_ids = len(beside["ids"]) == len(model["vocab"])
        return bool(beside["virtual"]) and same_ids and len(model["merges"]) < beside["base"]["merges"]
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _ids(merges: MergeList, vocabulary: Mapping[str, int]) -> Uint32s:
    found = [vocabulary.get(to_text(token)) for token in merges.tokens]
    missing = [token for token, i in zip(merges.tokens, found, strict=True) if i is None]
    if missing:
        kind = "byte" if len(missing[0]) == 1 else "merged token"
        raise DataError(f"{kind} {missing[0]!r} is not in the vocabulary, so not every text can be encoded")
    return np.array(found, np.uint32)


# ---- tiktoken ranks


def _of_ranks(file: TokenizerFile, pieces: str | None) -> BaseVocabulary:
    pieces = pieces or next((kind for known, kind in CUT_BY_NAME.items() if known in file.name), None)
    if pieces is None:
        raise DataError(f"how its text is cut is not in the file: name one of {', '.join(PATTERNS)} with --pieces")
    ranks = file.ranks()
    if missing := [byte for byte in range(BYTES) if bytes([byte]) not in ranks]:
        raise DataError(f"lacks the byte {missing[0]}")
    longer = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    pairs = [pair for token in longer if (pair := _parents(token, ranks)) is not None]
    made = {left + right for left, right in pairs}
    while lost := [pair for pair in pairs if any(len(part) > 1 and part not in made for part in pair)]:
        gone = set(lost)
        pairs = [pair for pair in pairs if pair not in gone]
        made -= {left + right for left, right in lost}
    merges = MergeList.of_bytes(pairs)
    ids = np.array([ranks[token] for token in merges.tokens], np.uint32)
    return BaseVocabulary(file.name, merges, ids, Front(pieces), len(ranks) - len(ids))


def _parents(token: bytes, ranks: Mapping[bytes, int]) -> Pair | None:
    """The two tokens that a token is made of when its bytes are merged by rank; None where that ends otherwise."""
    parts, own = [token[i : i + 1] for i in range(len(token))], ranks[token]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], own), i) for i in range(len(parts) - 1))
        if rank >= own:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
