"""The tokenizer that a vocabulary is learned over: its file, its tokens, and fingerprints to recognize it by.

    kind         file                                     ids                       merges       text is split
    "tokenizer"  tokenizer.json, or its folder            in the file               in the file  as the file says
    "merges"     vocab.bpe, merges.txt                    GPT-2's: bytes, merges    its lines    as in GPT-2
    "ranks"      NAME.tiktoken                            ranks                     by rank      not said
    "hex"        any other .json: a list of tokens        places in the list        none         not said

Each file may be compressed (.gz); the name of a bundled model means its folder. Tokens are byte strings; files of the
first two kinds spell each byte of a token as one letter (`BYTE_OF`).

There are two fingerprints. `tokenizer_fingerprint` covers everything that decides which ids a text gets, and needs a
tokenizer that transformers has loaded; packs, MultiTok's dictionaries of ids and prepared data record it.
`tokens_fingerprint` covers only the bytes of each id; patch tables record it. (Adapted vocabularies record
`MergeList.fingerprint`, which covers the merges of their base.)
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError, bare_exceptions_as_value_errors, errors_as
from mlx_zip.files import check_regular_file
from mlx_zip.named import resolve_model_name

KINDS = (
    "a folder with tokenizer.json, tokenizer.json, vocab.bpe or merges.txt, NAME.tiktoken, or a .json list of tokens "
    "in hex"
)
IDS_FILE_OF = {"vocab.bpe": "encoder.json", "merges.txt": "vocab.json"}  # merge list -> file of its ids
MAX_TOKENS = 1 << 24
Pair = tuple[bytes, bytes]

_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
BYTE_OF = {chr(byte): byte for byte in _PRINTED}  # in GPT-2's order of ids; the other bytes are the letters from 256 on
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTED)))}
CHAR_OF = {byte: char for char, byte in BYTE_OF.items()}

PROBE = "Hello, wörld!  def f(x):\n\treturn 12345 # \u4f60\u597d \U0001f600"


def spelled_to_bytes(text: str) -> bytes:
    """Returns the bytes of a token that is spelled with one letter per byte. Raises `KeyError` for other characters."""
    return bytes([BYTE_OF[char] for char in text])


def bytes_to_spelled(token: bytes) -> str:
    """Returns a token's bytes spelled with one letter per byte, as in byte-level vocabularies."""
    return "".join([CHAR_OF[byte] for byte in token])


@dataclass(frozen=True)
class AddedToken:
    """A token that is looked for in a text before the text is split.

    content: the token's text. special: whether the token controls the model and stands for no text. lstrip, rstrip:
    whether white space to its left or right is part of it. normalized: True looks for the token in the normalized text,
    False in the text as given. Raises `DataError` if a field has a wrong type, the text is empty or the id is outside
    0..2^31-1.
    """

    content: str
    id: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False

    def __post_init__(self) -> None:
        flags = (self.special, self.lstrip, self.rstrip, self.normalized)
        if type(self.content) is not str or type(self.id) is not int or {*map(type, flags)} != {bool}:
            raise DataError(f"added token {self.content!r:.80} with id {self.id!r:.80} has a field of a wrong type")
        if not self.content or not 0 <= self.id < 1 << 31:
            raise DataError(f"added token {self.content!r:.80}, id {self.id}, is empty or its id not 0..2^31-1")

    @property
    def pattern(self) -> str:
        """A regular expression for the token and the white space that is part of it; its one group is the content."""
        return (r"\s*" if self.lstrip else "") + f"({re.escape(self.content)})" + (r"\s*" if self.rstrip else "")


# ---- files


@dataclass(frozen=True)
class TokenizerFile:
    """The content of a tokenizer's file, not parsed yet. kind: see the module. data: its bytes, uncompressed.

    Raises `DataError` if the file is empty. Every method raises `DataError`, naming the file, if the content that the
    method parses is invalid.
    """

    path: Path
    kind: str
    data: bytes

    def __post_init__(self) -> None:
        if not self.data:
            raise DataError(f"{self.path}: is empty")

    @property
    def name(self) -> str:
        """A name to show: the file's name without endings such as tokenizer.json, else the folder's name."""
        plain = name_without_gz(self.path).removesuffix(".tiktoken")
        for ending in ("tokenizer.json", *IDS_FILE_OF):
            plain = plain.removesuffix(ending)
        return plain.strip(".-_") or self.path.absolute().parent.name

    @cached_property
    def json(self) -> Any:
        """The parsed content of a JSON file, which the kinds "tokenizer" and "hex" are."""
        with errors_as(DataError, f"{self.path}: not valid JSON", ValueError, RecursionError):
            return json.loads(self.data)

    @property
    def model(self) -> dict[str, Any]:
        """The field `model` of a tokenizer.json, which holds vocabulary and merges; empty if the file has none."""
        model = self.json.get("model") if isinstance(self.json, dict) else None
        return model if isinstance(model, dict) else {}

    def pairs(self) -> list[Pair]:
        """Returns the merges of a merge list or a tokenizer.json as pairs of byte strings, lowest rank first."""
        merges = self.merges()
        with errors_as(DataError, str(self.path), DataError):
            return parse_merges(merges)

    def merges(self) -> list[Any]:
        """Returns the merges of a merge list or a tokenizer.json as the file spells them, lowest rank first."""
        if self.kind == "merges":
            return _lines_with_merges(self.path, self.data)
        found = self.model.get("merges")
        if not isinstance(found, list) or "vocab" not in self.model:
            raise DataError(f"{self.path}: is no tokenizer.json of a BPE model")
        return found

    def vocabulary(self) -> dict[str, int]:
        """Returns the vocabulary of a tokenizer.json as spelled tokens -> ids; added tokens are in `added`."""
        with errors_as(DataError, str(self.path), DataError):
            return checked_vocabulary(self.model.get("vocab"))

    def added(self) -> tuple[AddedToken, ...]:
        """Returns the added tokens of a tokenizer.json, in the file's order."""
        with errors_as(DataError, f"{self.path}: added_tokens", DataError, TypeError):
            return tuple(map(_parse_added_token, self.json.get("added_tokens") or ()))

    def ranks(self) -> dict[bytes, int]:
        """Returns the tokens of a .tiktoken file and their ranks, which are all different."""
        ranks: dict[bytes, int] = {}
        for number, line in enumerate(self.data.splitlines(), 1):
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise DataError(f"{self.path}: line {number} is not a token in base64 and its rank") from error
        if len(set(ranks.values())) != len(ranks):
            raise DataError(f"{self.path}: gives one rank to several tokens")
        return ranks

    def tokens(self) -> list[bytes]:
        """Returns the bytes of each id; b"" for a special token or an id without a token.

        A merge list gets GPT-2's ids, even if a file with other ids lies next to it.
        """
        found = {
            "tokenizer": self._tokens_of_tokenizer_json,
            "merges": self._tokens_of_merge_list,
            "ranks": self._tokens_of_tiktoken,
            "hex": self._tokens_of_hex,
        }[self.kind]()
        if not any(found):
            raise DataError(f"{self.path}: has no token that stands for a byte")
        return found

    def _tokens_of_tokenizer_json(self) -> list[bytes]:
        if not _is_byte_level(self.json):
            raise DataError(f"{self.path} is no byte-level tokenizer.json: give its tokens as a .json list in hex")
        vocabulary, added = self.vocabulary(), {token.content: token for token in self.added()}
        ids = vocabulary | {content: token.id for content, token in added.items()}
        if (highest := max(ids.values(), default=-1)) >= MAX_TOKENS:
            raise DataError(f"{self.path}: id {highest} is not below {MAX_TOKENS}")
        tokens = [b""] * (highest + 1)
        for content, i in ids.items():
            if content in added:
                tokens[i] = b"" if added[content].special else content.encode("utf-8")
                continue
            try:
                tokens[i] = spelled_to_bytes(content)
            except KeyError as error:
                raise DataError(
                    f"{self.path}: token {content!r:.40} has {error}, which is no byte-level letter"
                ) from error
        return tokens

    def _tokens_of_merge_list(self) -> list[bytes]:
        """Returns `tokens` of a merge list: bytes in GPT-2's order, then the results of the merges."""
        return [*(bytes([byte]) for byte in BYTE_OF.values()), *(left + right for left, right in self.pairs())]

    def _tokens_of_tiktoken(self) -> list[bytes]:
        ranks = self.ranks()
        if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
            raise DataError(f"{self.path}: the ranks are not 0, 1, 2 and so on")
        return sorted(ranks, key=ranks.__getitem__)

    def _tokens_of_hex(self) -> list[bytes]:
        with errors_as(DataError, f"{self.path}: not a list of tokens in hex", TypeError, ValueError):
            return [bytes.fromhex(token) for token in self.json]

    def build_tokenizer(self, vocabulary: Mapping[str, int] | None = None) -> Any:
        """Returns the `tokenizers.Tokenizer` of a tokenizer.json or a merge list, without truncation and padding.

        vocabulary: the ids of a merge list, by spelled token; None for GPT-2's. Raises `DataError` if the file is of
        another kind, because other kinds do not say how text is split.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        try:
            with bare_exceptions_as_value_errors():
                if self.kind == "tokenizer":
                    tokenizer = Tokenizer.from_str(self.data.decode("utf-8"))
                    tokenizer.no_truncation()
                    tokenizer.no_padding()
                elif self.kind == "merges":
                    if vocabulary is None:
                        vocabulary = {bytes_to_spelled(token): i for i, token in enumerate(self.tokens())}
                    pairs = [(bytes_to_spelled(left), bytes_to_spelled(right)) for left, right in self.pairs()]
                    tokenizer = Tokenizer(models.BPE(dict(vocabulary), pairs))
                    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
                    tokenizer.decoder = decoders.ByteLevel()
                else:
                    raise DataError(
                        f"{self.path} does not say how a text is split: give a tokenizer.json or a merge list"
                    )
        except ValueError as error:
            what = "tokenizer.json" if self.kind == "tokenizer" else "list of merges of this vocabulary"
            raise DataError(f"{self.path} is no {what}: {error}") from error
        return tokenizer


def open_tokenizer_file(name: str | Path) -> TokenizerFile:
    """Reads the tokenizer in a file, a folder or a bundled model; the file's name decides its kind.

    Raises `DataError` naming the file if it cannot be read or its kind is unknown.
    """
    path = resolve_model_name(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    plain, data = name_without_gz(path), read_uncompressed(path)
    if plain.endswith(".tiktoken"):
        return TokenizerFile(path, "ranks", data)
    if plain.endswith((".bpe", ".txt")):
        return TokenizerFile(path, "merges", data)
    if not plain.endswith(".json"):
        raise DataError(f"{path}: tokens are read from {KINDS}")
    return TokenizerFile(path, "hex" if data.lstrip().startswith(b"[") else "tokenizer", data)


def read_uncompressed(path: Path) -> bytes:
    """Returns the bytes of a file, uncompressed if its name ends with .gz. Raises `DataError` if it cannot be read."""
    check_regular_file(path)
    with errors_as(DataError, f"{path} cannot be read", OSError, EOFError, zlib.error):
        stored = path.read_bytes()
        return gzip.decompress(stored) if path.name.endswith(".gz") else stored


def parse_merges(merges: Iterable[Any]) -> list[Pair]:
    """Returns merges as pairs of byte strings. merges: spelled "a b" or ["a", "b"], as in tokenizer files.

    Raises `DataError` naming the merge if one is not two byte-level tokens.
    """
    pairs = []
    for number, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        try:
            left, right = map(spelled_to_bytes, parts)
        except (KeyError, ValueError, TypeError):
            raise DataError(f"merge {number} {merge!r:.80} is not two byte-level tokens") from None
        pairs.append((left, right))
    return pairs


def checked_vocabulary(data: Any) -> dict[str, int]:
    """Returns `data`, a vocabulary from a file, if it maps tokens to different integers from 0.

    Raises `DataError` otherwise.
    """
    if not isinstance(data, dict) or not all(type(i) is int and 0 <= i < 1 << 31 for i in data.values()):
        raise DataError("the vocabulary does not map tokens to ids, each an integer from 0")
    if len(set(data.values())) != len(data):
        raise DataError("the vocabulary gives one id to several tokens")
    return data


def name_without_gz(path: Path) -> str:
    """Returns a file's name without .gz."""
    return path.name.removesuffix(".gz")


def _lines_with_merges(path: Path, data: bytes) -> list[str]:
    """Returns the lines of a merge list that are merges. Raises `DataError` naming the file if it is not UTF-8."""
    try:
        return [line for line in data.decode("utf-8").split("\n") if line and not line.startswith("#version")]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no list of merges: not valid UTF-8 at byte {error.start}") from error


def _parse_added_token(token: Any) -> AddedToken:
    if not isinstance(token, dict) or not isinstance(token.get("content"), str) or type(token.get("id")) is not int:
        raise DataError(f"{token!r:.80} has no content or no id")
    flags = {name: bool(token.get(name)) for name in ("special", "lstrip", "rstrip", "normalized")}
    return AddedToken(token["content"], token["id"], **flags)


def _is_byte_level(state: Any) -> bool:
    """Returns whether a parsed tokenizer.json is byte-level: its pre-tokenizer or decoder has a ByteLevel step."""
    parts = [state.get("pre_tokenizer"), state.get("decoder")] if isinstance(state, dict) else []
    for part in list(parts):
        if isinstance(part, dict):
            parts += part.get("pretokenizers") or part.get("decoders") or []
    return any(isinstance(part, dict) and part.get("type") == "ByteLevel" for part in parts)


# ---- fingerprints


def tokens_fingerprint(tokens: Sequence[bytes]) -> str:
    """Returns the sha256 in hex of all tokens in the order of ids, each preceded by its length."""
    digest = sha256(len(tokens).to_bytes(8, "little"))
    for token in tokens:
        digest.update(len(token).to_bytes(8, "little") + token)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Returns the sha256 in hex of a tokenizer's vocabulary, its special ids and its ids for a probe text.

    Equal tokenizers have equal fingerprints. tokenizer: a tokenizer of transformers, or mlx-lm's wrapper of one.
    """
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    facts = [sorted(tokenizer.get_vocab().items()), special, tokenizer.encode(PROBE, add_special_tokens=False)]
    return sha256(json.dumps(facts).encode("utf-8")).hexdigest()
