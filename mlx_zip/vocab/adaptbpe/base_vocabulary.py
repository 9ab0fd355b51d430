"""Reads tokenizers to adapt: tokenizer.json, merges.txt or vocab.bpe, tiktoken ranks.

All are byte pair encoding on bytes, except a tokenizer.json with byte fallback. A vocabulary may hold tokens that are
neither a byte, nor an added token, nor the result of a merge. Such tokens are never emitted; `unreachable` counts them.

Tokenizers with byte fallback (such as Llama 2's, from SentencePiece) are expressed as byte-level merges. Their base
symbols are characters. A character of several bytes that is a token is called a letter: extra merges at the front of
the list make each letter from its bytes, and they do not count as merges. A character that is not a token stays as
bytes, which are all tokens. A letter of three bytes needs a merge of its first two; if only these two occur, they are
split again at the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import DataError, errors_as
from mlx_zip.vocab.adaptbpe.merge_list import (
    BYTES,
    NO_ID,
    PIECES,
    BpeEncoder,
    MergeList,
    drop_dead_merges,
    is_valid_utf8,
)
from mlx_zip.vocab.adaptbpe.pieces import BLANK, CHARACTERS, CUT_BY_NAME, PATTERNS, PieceSplitter, piece_rule_of
from mlx_zip.vocab.first_stage import (
    BYTE_OF,
    IDS_FILE_OF,
    AddedToken,
    Pair,
    TokenizerFile,
    bytes_to_spelled,
    checked_vocabulary,
    open_tokenizer_file,
    read_uncompressed,
)

FILE = "adapted.json"  # the name of an adapted tokenizer's file inside a model folder
_REPLACE = json.dumps({"type": "Replace", "pattern": {"String": BLANK}, "content": " "})
_BLANK_DECODERS = (_REPLACE, '"Metaspace"')


@dataclass(frozen=True, eq=False)
class BaseVocabulary:
    """A tokenizer before it is adapted.

    ids: uint32 [256 + M], the id of each token of `merges`, `NO_ID` for an unfinished character. splitter: splits text
    into pieces. unreachable: number of tokens that no merge makes. source: the content of the tokenizer.json, None for
    other files. ignore_merges: whether the tokenizer turns a piece that is a token into that token without using
    merges; `BaseVocabulary.encode` always uses the merges.
    """

    name: str
    merges: MergeList
    ids: NDArray[np.uint32]
    splitter: PieceSplitter
    unreachable: int = 0
    ignore_merges: bool = False
    source: dict[str, Any] | None = None

    @property
    def n_merges(self) -> int:
        """Number of merges, letters not counted."""
        return len(self.merges) - self.merges.letters

    @property
    def size(self) -> int:
        """The highest id plus one."""
        return 1 + max(int(self.ids[self.ids != NO_ID].max()), *(token.id for token in self.splitter.added), 0)

    def encoder(self) -> BpeEncoder:
        """Returns an encoder that applies all merges by rank."""
        return BpeEncoder(self.merges, pieces=self.splitter.encoder_pieces)

    def encode(self, text: str, encoder: BpeEncoder | None = None) -> Uint32s:
        """Returns the ids of a text, uint32, without special tokens.

        encoder: a result of `encoder()`, which makes repeated calls faster; None makes a new one.
        """
        return encode_with_added_tokens(encoder or self.encoder(), self.splitter, text, self.ids)


def encode_with_added_tokens(encoder: BpeEncoder, splitter: PieceSplitter, text: str, ids: Uint32s) -> Uint32s:
    """Returns the ids of a text, uint32.

    Added tokens get their ids in `splitter`; a token of the encoder becomes `ids[token]`. Between added tokens, the
    encoder splits the text if it knows the tokenizer's splitting rule; otherwise `splitter` splits the text.
    """
    found = [np.empty(0, np.uint32)]
    for part in splitter.normalized_parts(text):
        if isinstance(part, int):
            found.append(np.array([part], np.uint32))
        elif splitter.pieces not in PIECES:
            found.append(ids[encoder.encode_pieces(splitter.split_part(part))[0]])
        else:
            found.append(ids[encoder.encode(part)])
    return np.concatenate(found)


def read_base_vocabulary(path: str | Path | TokenizerFile, pieces: str | None = None) -> BaseVocabulary:
    """Reads a tokenizer to adapt; the name of its file decides the format.

    pieces: how text is split, a key of `PIECES`, for files that do not say so; None takes the format's default. Raises
    `DataError`, naming the file and the wrong merge or line, if the file is invalid.
    """
    file = path if isinstance(path, TokenizerFile) else open_tokenizer_file(path)
    try:
        if file.kind == "ranks":
            return _base_from_tiktoken(file, pieces)
        return _base_from_merge_list(file, pieces) if file.kind == "merges" else _base_from_tokenizer_json(file, pieces)
    except DataError as error:
        message = str(error)
        raise DataError(message if message.startswith(str(file.path)) else f"{file.path}: {message}") from error


# ---- merges.txt, vocab.bpe


def _base_from_merge_list(file: TokenizerFile, pieces: str | None) -> BaseVocabulary:
    """Returns the base vocabulary of a merge list.

    If a vocabulary file lies next to the merge list, the ids are taken from it, and its remaining tokens become added
    tokens. Otherwise the ids are GPT-2's.
    """
    merges = MergeList.from_byte_pairs(file.pairs())
    renamed = (file.path.name.replace(*names) for names in IDS_FILE_OF.items() if names[0] in file.path.name)
    ids_file = next(map(file.path.with_name, renamed), None)
    if ids_file is None or not ids_file.is_file():
        return BaseVocabulary(file.name, merges, _ids_in_gpt2_order(merges), PieceSplitter(pieces or "gpt2"))
    vocabulary = _read_token_ids(ids_file)
    names = vocabulary.keys() - set(map(bytes_to_spelled, merges.tokens))
    added = tuple(AddedToken(name, vocabulary[name]) for name in sorted(names, key=vocabulary.__getitem__))
    return BaseVocabulary(
        file.name, merges, _ids_of_merge_tokens(merges, vocabulary), PieceSplitter(pieces or "gpt2", added)
    )


def _read_token_ids(path: Path) -> dict[str, int]:
    """Reads the ids of a merge list from a file: spelled tokens -> ids. Raises `DataError` if the file is invalid."""
    with errors_as(DataError, f"{path.name} in the same folder is not valid JSON", ValueError):
        return checked_vocabulary(json.loads(read_uncompressed(path)))


def _ids_in_gpt2_order(merges: MergeList) -> Uint32s:
    """Returns the ids of a merge list's tokens in GPT-2's order: printable bytes, other bytes, merges."""
    ids = np.arange(BYTES + len(merges), dtype=np.uint32)
    ids[list(BYTE_OF.values())] = np.arange(BYTES)
    return ids


# ---- tokenizer.json


def _base_from_tokenizer_json(file: TokenizerFile, pieces: str | None) -> BaseVocabulary:
    """Returns the base vocabulary of a tokenizer.json. Raises `DataError` if its settings cannot be adapted."""
    file.merges()
    data, model = file.json, file.model
    for setting in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(setting):
            raise DataError(f"{setting} {model[setting]!r} is neither byte-level BPE nor has byte fallback alone")
    if _was_adapted(file.path, model):
        raise DataError(f"was adapted already (the folder has an {FILE}): adapt the base of this model instead")
    pieces = CHARACTERS if model.get("byte_fallback") else pieces or piece_rule_of(data.get("pre_tokenizer"))
    if pieces is None:
        raise DataError("the pre_tokenizer is not byte-level, and without byte fallback nothing else can be adapted")
    vocabulary, added = file.vocabulary(), file.added()
    if one := next((token for token in data.get("added_tokens") or () if token.get("single_word")), None):
        raise DataError(f"added token {one['content']!r} has single_word set, which is not supported here")
    if pieces == CHARACTERS:
        _check_space_handling(data)
        merges, ids = _merges_with_byte_fallback(vocabulary, file.merges(), {token.content for token in added})
    else:
        merges = MergeList.from_byte_pairs(drop_dead_merges(file.pairs()))
        ids = _ids_of_merge_tokens(merges, vocabulary)
    reached = {int(i) for i in ids} | {token.id for token in added}
    own = data.get("pre_tokenizer") if pieces not in PIECES else None
    splitter = PieceSplitter(pieces, added, data.get("normalizer"), own)
    unreachable = len(set(vocabulary.values()) - reached)
    return BaseVocabulary(file.name, merges, ids, splitter, unreachable, bool(model.get("ignore_merges")), data)


def _was_adapted(path: Path, model: Mapping[str, Any]) -> bool:
    """Returns whether a tokenizer.json was written for the adapted tokenizer in the same folder.

    path: the tokenizer.json. model: its field `model`. A base tokenizer has more ids and more merges than the adapted
    tokenizer in its folder.
    """
    try:
        adapted = json.loads(path.with_name(FILE).read_text(encoding="utf-8"))
        same_ids = len(adapted["ids"]) == len(model["vocab"])
        return bool(adapted["virtual"]) and same_ids and len(model["merges"]) < adapted["base"]["merges"]
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _ids_of_merge_tokens(merges: MergeList, vocabulary: Mapping[str, int]) -> Uint32s:
    """Returns the ids of a merge list's tokens, uint32. Raises `DataError` if `vocabulary` lacks a token."""
    found = [vocabulary.get(bytes_to_spelled(token)) for token in merges.tokens]
    missing = [token for token, i in zip(merges.tokens, found, strict=True) if i is None]
    if missing:
        kind = "byte" if len(missing[0]) == 1 else "merged token"
        raise DataError(f"{kind} {missing[0]!r} is not in the vocabulary, so not every text can be encoded")
    return np.array(found, np.uint32)


# ---- tiktoken ranks


def _base_from_tiktoken(file: TokenizerFile, pieces: str | None) -> BaseVocabulary:
    """Returns the base vocabulary of a .tiktoken file, whose merges are found from the ranks of its tokens."""
    pieces = pieces or next((kind for known, kind in CUT_BY_NAME.items() if known in file.name), None)
    if pieces is None:
        raise DataError(f"the file does not say how text is cut: choose one of {', '.join(PATTERNS)} with --pieces")
    ranks = file.ranks()
    if missing := [byte for byte in range(BYTES) if bytes([byte]) not in ranks]:
        raise DataError(f"lacks the byte {missing[0]}")
    longer = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    pairs = [pair for token in longer if (pair := _parent_tokens(token, ranks)) is not None]
    made = {left + right for left, right in pairs}
    while lost := [pair for pair in pairs if any(len(part) > 1 and part not in made for part in pair)]:
        gone = set(lost)
        pairs = [pair for pair in pairs if pair not in gone]
        made -= {left + right for left, right in lost}
    merges = MergeList.from_byte_pairs(pairs)
    ids = np.array([ranks[token] for token in merges.tokens], np.uint32)
    return BaseVocabulary(file.name, merges, ids, PieceSplitter(pieces), len(ranks) - len(ids))


def _parent_tokens(token: bytes, ranks: Mapping[bytes, int]) -> Pair | None:
    """Returns the two tokens that the last merge joins when a token's bytes are merged by rank.

    Returns None if merging by rank does not make the token.
    """
    parts, own = [token[i : i + 1] for i in range(len(token))], ranks[token]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], own), i) for i in range(len(parts) - 1))
        if rank >= own:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _check_space_handling(data: Mapping[str, Any]) -> None:
    """Raises `DataError` if a parsed tokenizer.json treats blanks in a way that is not supported.

    The decoder must turn `BLANK` into a blank; the pre-tokenizer must treat the beginning of a text like other places.
    """
    steps = json.dumps(data.get("decoder"))
    if not any(form in steps for form in _BLANK_DECODERS):
        raise DataError(f"the decoder does not turn {BLANK!r} into a blank, as it must with byte fallback")
    if '"prepend_scheme": "first"' in json.dumps(data.get("pre_tokenizer")):
        raise DataError(
            "the pre_tokenizer treats the beginning of a text apart (prepend_scheme first), which is not supported here"
        )


def _merges_with_byte_fallback(
    vocabulary: Mapping[str, int], merges: Any, added: Set[str]
) -> tuple[MergeList, Uint32s]:
    """Expresses a vocabulary with byte fallback as merges of bytes -> (merges, the id of each token uint32 [256 + M]).

    The list begins with merges that join the UTF-8 bytes of each one-character token. The first bytes of a character
    that such a merge makes are not a token and get the id `NO_ID`. vocabulary: tokens -> ids. merges: in the form of a
    tokenizer.json. added: names of added tokens, which are left out. Raises `DataError` if a merge is malformed or the
    vocabulary lacks a complete token.
    """
    names = vocabulary.keys() - added
    letters: dict[bytes, Pair] = {}
    for data in sorted(name.encode("utf-8", "surrogatepass") for name in names if len(name) == 1):
        letters |= {data[: n + 1]: (data[:n], data[n : n + 1]) for n in range(1, len(data))}
    made = MergeList.from_byte_pairs(drop_dead_merges([*letters.values(), *map(_merge_as_bytes, merges)]), len(letters))
    own = {byte: chr(byte) for byte in range(128) if chr(byte) in names}
    spelled = [own.get(byte, f"<0x{byte:02X}>") for byte in range(BYTES)]
    spelled += [token.decode() if is_valid_utf8(token) else "" for token in made.tokens[BYTES:]]
    unfinished = {BYTES + rank for rank in made.unfinished}
    found = [NO_ID if token in unfinished else vocabulary.get(name) for token, name in enumerate(spelled)]
    if None in found:
        raise DataError(f"{spelled[found.index(None)]!r} is not in the vocabulary, so not every text can be encoded")
    return made, np.array(found, np.uint32)


def _merge_as_bytes(merge: Any) -> Pair:
    """Returns a merge of a tokenizer.json as a pair of byte strings. Raises `DataError` if it is not two tokens."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) and p for p in parts):
        raise DataError(f"merge {merge!r:.80} is not two tokens")
    left, right = (part.encode("utf-8") for part in parts)
    return left, right
