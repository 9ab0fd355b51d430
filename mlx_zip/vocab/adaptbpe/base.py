"""Tokenizers to adapt, from the files they come in: tokenizer.json, merges.txt or vocab.bpe, tiktoken ranks.

All are byte pair encoding, byte-level but for a tokenizer.json with byte fallback (`characters`). A vocabulary may
hold more than its merges make (added tokens, names kept free): what no merge and no byte makes, and is no added token,
cannot be produced and is counted as `unreachable`.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import zlib
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
from mlx_zip.vocab.adaptbpe.merges import BYTES, NO_ID, MergeList, Pair, live
from mlx_zip.vocab.adaptbpe.text import BYTE_OF, CHARACTERS, PATTERNS, AddedToken, Front, pieces_of, to_bytes, to_text

FILE = "adapted.json"  # the name of an adapted tokenizer's file inside a model folder
KINDS = "tokenizer.json or its folder, merges.txt, vocab.bpe or NAME.tiktoken, also with .gz"
_OF_RANKS = {"llama3": "cl100k", "cl100k": "cl100k", "qwen": "digits"}  # no rank file says how its text is cut
_BESIDE = {"vocab.bpe": "encoder.json", "merges.txt": "vocab.json"}


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
    path = Path(path).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    plain, data = path.name.removesuffix(".gz"), _bytes(path)
    try:
        if plain.endswith(".tiktoken"):
            return _of_ranks(plain.removesuffix(".tiktoken"), data, pieces)
        if plain.endswith(".json"):
            return _of_tokenizer(path, json.loads(data), pieces)
        return _of_merges(path, data, pieces)
    except (DataError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error


# ---- merges.txt, vocab.bpe


def _of_merges(path: Path, data: bytes, pieces: str | None) -> BaseVocabulary:
    lines = data.decode("utf-8").split("\n")
    merges = MergeList.of_bytes(pair_of(line) for line in lines if line and not line.startswith("#version"))
    renamed = (path.name.replace(*names) for names in _BESIDE.items() if names[0] in path.name)
    beside = next(map(path.with_name, renamed), None)
    if beside is None or not beside.is_file():
        return BaseVocabulary(_name(path), merges, _in_order(merges), Front(pieces or "gpt2"))
    vocabulary = _vocabulary(json.loads(_bytes(beside)))
    names = vocabulary.keys() - set(map(to_text, merges.tokens))
    added = tuple(AddedToken(name, vocabulary[name]) for name in sorted(names, key=vocabulary.__getitem__))
    return BaseVocabulary(_name(path), merges, _ids(merges, vocabulary), Front(pieces or "gpt2", added))


def _in_order(merges: MergeList) -> Uint32s:
    """GPT-2's ids: the bytes that stand for themselves, the other bytes, the merges."""
    ids = np.arange(BYTES + len(merges), dtype=np.uint32)
    ids[list(BYTE_OF.values())] = np.arange(BYTES)
    return ids


def pair_of(merge: Any) -> Pair:
    """A merge as its file spells it: "a b" or ["a", "b"]."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    try:
        left, right = map(to_bytes, parts)
    except (KeyError, ValueError, TypeError):
        raise DataError(f"merge {merge!r:.80} is not two byte-level tokens") from None
    return left, right


# ---- tokenizer.json


def _of_tokenizer(path: Path, data: Any, pieces: str | None) -> BaseVocabulary:
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("merges"), list) or "vocab" not in model:
        raise DataError("is no tokenizer.json of a BPE model")
    for setting in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(setting):
            raise DataError(f"{setting} {model[setting]!r} is neither byte-level BPE nor has byte fallback alone")
    if _was_adapted(path, model):
        raise DataError(f"was adapted already, by the {FILE} beside it: adapt the base of this model instead")
    pieces = CHARACTERS if model.get("byte_fallback") else pieces or pieces_of(data.get("pre_tokenizer"))
    if pieces is None:
        raise DataError("the pre_tokenizer is not byte-level, and without byte fallback nothing else can be adapted")
    vocabulary, added = _vocabulary(model["vocab"]), tuple(map(_added, data.get("added_tokens") or []))
    if pieces == CHARACTERS:
        check_blanks(data)
        merges, ids = of_characters(vocabulary, model["merges"], {token.content for token in added})
    else:
        merges = MergeList.of_bytes(live([pair_of(merge) for merge in model["merges"]]))
        ids = _ids(merges, vocabulary)
    reached = {int(i) for i in ids} | {token.id for token in added}
    own = data.get("pre_tokenizer") if pieces not in PIECES else None
    front = Front(pieces, added, data.get("normalizer"), own)
    unreachable = len(set(vocabulary.values()) - reached)
    return BaseVocabulary(_name(path), merges, ids, front, unreachable, bool(model.get("ignore_merges")), data)


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


def _vocabulary(data: Any) -> dict[str, int]:
    if not isinstance(data, dict) or not all(type(i) is int and 0 <= i < 1 << 31 for i in data.values()):
        raise DataError("the vocabulary does not map tokens to ids")
    if len(set(data.values())) != len(data):
        raise DataError("the vocabulary gives one id to several tokens")
    return data


def _added(token: Any) -> AddedToken:
    if not isinstance(token, dict) or not isinstance(token.get("content"), str) or type(token.get("id")) is not int:
        raise DataError(f"added token {token!r:.80} has no content or no id")
    if token.get("single_word"):
        raise DataError(f"added token {token['content']!r} is one of single words, which are not read here")
    flags = {name: bool(token.get(name)) for name in ("special", "lstrip", "rstrip", "normalized")}
    return AddedToken(token["content"], token["id"], **flags)


def _ids(merges: MergeList, vocabulary: Mapping[str, int]) -> Uint32s:
    found = [vocabulary.get(to_text(token)) for token in merges.tokens]
    missing = [token for token, i in zip(merges.tokens, found, strict=True) if i is None]
    if missing:
        kind = "byte" if len(missing[0]) == 1 else "merged token"
        raise DataError(f"{kind} {missing[0]!r} is not in the vocabulary, so not every text can be encoded")
    return np.array(found, np.uint32)


# ---- tiktoken ranks


def _of_ranks(name: str, data: bytes, pieces: str | None) -> BaseVocabulary:
    pieces = pieces or next((kind for known, kind in _OF_RANKS.items() if known in name), None)
    if pieces is None:
        raise DataError(f"how its text is cut is not in the file: name one of {', '.join(PATTERNS)} with --pieces")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(f"line {number} is not a token in base64 and its rank") from None
    missing = [byte for byte in range(BYTES) if bytes([byte]) not in ranks]
    if missing or len(set(ranks.values())) != len(ranks):
        raise DataError(f"lacks the byte {missing[0]}" if missing else "gives one rank to several tokens")
    longer = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    pairs = [pair for token in longer if (pair := _parents(token, ranks)) is not None]
    made = {left + right for left, right in pairs}
    while lost := [pair for pair in pairs if any(len(part) > 1 and part not in made for part in pair)]:
        pairs = [pair for pair in pairs if pair not in set(lost)]
        made -= {left + right for left, right in lost}
    merges = MergeList.of_bytes(pairs)
    ids = np.array([ranks[token] for token in merges.tokens], np.uint32)
    return BaseVocabulary(name, merges, ids, Front(pieces), len(ranks) - len(ids))


def _parents(token: bytes, ranks: Mapping[bytes, int]) -> Pair | None:
    """The two tokens that a token is made of when its bytes are merged by rank; None where that ends otherwise."""
    parts, own = [token[i : i + 1] for i in range(len(token))], ranks[token]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], own), i) for i in range(len(parts) - 1))
        if rank >= own:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _name(path: Path) -> str:
    """What to call a tokenizer: its file's name without what all such files are called, or its folder's."""
    plain = path.name.removesuffix(".gz")
    for ending in ("tokenizer.json", *_BESIDE):
        plain = plain.removesuffix(ending)
    return plain.strip(".-_") or path.absolute().parent.name


def _bytes(path: Path) -> bytes:
    try:
        stored = path.read_bytes()
        return gzip.decompress(stored) if path.name.endswith(".gz") else stored
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
