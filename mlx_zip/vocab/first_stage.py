"""The tokenizer that a vocabulary is learned over: the file it comes in, its tokens, and how it is known again.

    kind         file                                     ids                       merges       a text is cut
    "tokenizer"  tokenizer.json, or the folder it is in   its own                   its own      as it says
    "merges"     vocab.bpe, merges.txt                    GPT-2's: bytes, merges    its lines    as GPT-2 cuts it
    "ranks"      NAME.tiktoken                            ranks                     by rank      not said
    "hex"        any other .json: a list of tokens        places in the list        none         not said

Each may be compressed (.gz), and the name of a bundled model stands for its folder. Tokens are byte strings; the first
two kinds spell them in letters, one per byte (`BYTE_OF`).

A tokenizer is known again by one of two digests. `tokenizer_fingerprint` is over all that gives a text its ids, of a
tokenizer that transformers has loaded: packs, MultiTok's dictionaries of ids and prepared data hold it. `fingerprint`
is over the bytes of each id alone, which is all that a patch table holds of its first stage. (An adapted vocabulary
holds merges, and knows its base by those: `MergeList.fingerprint`.)
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

from mlx_zip.bundled import here_or_bundled
from mlx_zip.errors import DataError, bare_exceptions_as_value_errors
from mlx_zip.files import check_in

KINDS = (
    "a folder with tokenizer.json, tokenizer.json, vocab.bpe or merges.txt, NAME.tiktoken, or a .json list of tokens "
    "in hex"
)
BESIDE = {"vocab.bpe": "encoder.json", "merges.txt": "vocab.json"}  # where the ids of a merge list lie, if anywhere
MAX_TOKENS = 1 << 24
Pair = tuple[bytes, bytes]

_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
BYTE_OF = {chr(byte): byte for byte in _PRINTED}  # in GPT-2's order of ids; the other bytes are the letters from 256 on
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTED)))}
CHAR_OF = {byte: char for char, byte in BYTE_OF.items()}

_PROBE = "Hello, wörld!  def f(x):\n\treturn 12345 # \u4f60\u597d \U0001f600"


def to_bytes(text: str) -> bytes:
    """Bytes of a token as byte-level vocabularies spell them. Raises `KeyError` for a character of no byte."""
    return bytes([BYTE_OF[char] for char in text])


def to_text(token: bytes) -> str:
    """A token's bytes as byte-level vocabularies spell them."""
    return "".join([CHAR_OF[byte] for byte in token])


@dataclass(frozen=True)
class AddedToken:
    """A token found in the text before anything else: its text, its id, whether it is special, and what blanks it
    takes along to its left and right. normalized: it is looked for in the normalized text.

    Raises `DataError` for fields of other types, an empty text or an id that is none.
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
        """A regular expression for it."""
        return (r"\s*" if self.lstrip else "") + f"({re.escape(self.content)})" + (r"\s*" if self.rstrip else "")


# ---- files


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer's file, read and not yet looked into. kind: see the module; data: its bytes, no longer compressed.

    What is wrong with the content is a `DataError` of the method that meets it, and names the file; that there is none
    is told at once.
    """

    path: Path
    kind: str
    data: bytes

    def __post_init__(self) -> None:
        if not self.data:
            raise DataError(f"{self.path}: is empty")

    @property
    def name(self) -> str:
        """What to call it: the file's name without what all such files are called, or its folder's."""
        plain = _plain(self.path).removesuffix(".tiktoken")
        for ending in ("tokenizer.json", *BESIDE):
            plain = plain.removesuffix(ending)
        return plain.strip(".-_") or self.path.absolute().parent.name

    @cached_property
    def json(self) -> Any:
        """Its content, of the kinds that are JSON."""
        try:
            return json.loads(self.data)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.path}: not valid JSON: {error}") from error

    @property
    def model(self) -> dict[str, Any]:
        """The part of a tokenizer.json that has the vocabulary; empty where there is none."""
        model = self.json.get("model") if isinstance(self.json, dict) else None
        return model if isinstance(model, dict) else {}

    def pairs(self) -> list[Pair]:
        """The merges of a merge list or a tokenizer.json, lowest rank first."""
        merges = self.merges()
        try:
            return pairs_of(merges)
        except DataError as error:
            raise DataError(f"{self.path}: {error}") from error

    def merges(self) -> list[Any]:
        """Those as the file spells them."""
        if self.kind == "merges":
            return _merge_lines(self.path, self.data)
        found = self.model.get("merges")
        if not isinstance(found, list) or "vocab" not in self.model:
            raise DataError(f"{self.path}: is no tokenizer.json of a BPE model")
        return found

    def vocabulary(self) -> dict[str, int]:
        """Spelled tokens -> ids of a tokenizer.json; without those that are added alone."""
        try:
            return vocabulary_of(self.model.get("vocab"))
        except DataError as error:
            raise DataError(f"{self.path}: {error}") from error

    def added(self) -> tuple[AddedToken, ...]:
        """The added tokens of a tokenizer.json."""
        try:
            return tuple(map(_added, self.json.get("added_tokens") or ()))
        except (DataError, TypeError) as error:
            raise DataError(f"{self.path}: added_tokens: {error}") from error

    def ranks(self) -> dict[bytes, int]:
        """Tokens -> ranks of a rank file, no rank twice."""
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
        """The bytes of each id; special tokens, and ids without a token, stand for no bytes.

        A merge list is read on its own, whatever lies beside it.
        """
        found = {
            "tokenizer": self._spelled,
            "merges": self._merged,
            "ranks": self._ranked,
            "hex": self._listed,
        }[self.kind]()
        if not any(found):
            raise DataError(f"{self.path}: has no token that stands for a byte")
        return found

    def _spelled(self) -> list[bytes]:
        if not _byte_level(self.json):
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
                tokens[i] = to_bytes(content)
            except KeyError as error:
                raise DataError(
                    f"{self.path}: token {content!r:.40} has {error}, which is no byte-level letter"
                ) from error
        return tokens

    def _merged(self) -> list[bytes]:
        return [*(bytes([byte]) for byte in BYTE_OF.values()), *(left + right for left, right in self.pairs())]

    def _ranked(self) -> list[bytes]:
        ranks = self.ranks()
        if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
            raise DataError(f"{self.path}: the ranks are not 0, 1, 2 and so on")
        return sorted(ranks, key=ranks.__getitem__)

    def _listed(self) -> list[bytes]:
        try:
            return [bytes.fromhex(token) for token in self.json]
        except (TypeError, ValueError) as error:
            raise DataError(f"{self.path}: not a list of tokens in hex: {error}") from error

    def library(self, vocabulary: Mapping[str, int] | None = None) -> Any:
        """The `tokenizers.Tokenizer` of a tokenizer.json or a merge list, which cuts no text off and fills none up.

        vocabulary: the ids of a merge list, GPT-2's if None. Raises `DataError` for kinds that do not say how a text
        is cut.
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
                        vocabulary = {to_text(token): i for i, token in enumerate(self.tokens())}
                    pairs = [(to_text(left), to_text(right)) for left, right in self.pairs()]
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


def open_tokenizer(name: str | Path) -> TokenizerFile:
    """A tokenizer's file by its name, a folder's or a bundled model's. Raises `DataError` naming it."""
    path = here_or_bundled(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    plain, data = _plain(path), read_stored(path)
    if plain.endswith(".tiktoken"):
        return TokenizerFile(path, "ranks", data)
    if plain.endswith((".bpe", ".txt")):
        return TokenizerFile(path, "merges", data)
    if not plain.endswith(".json"):
        raise DataError(f"{path}: tokens are read from {KINDS}")
    return TokenizerFile(path, "hex" if data.lstrip().startswith(b"[") else "tokenizer", data)


def read_stored(path: Path) -> bytes:
    """The bytes of a file; of one whose name ends with .gz, what it holds. Raises `DataError` naming it."""
    check_in(path)
    try:
        stored = path.read_bytes()
        return gzip.decompress(stored) if path.name.endswith(".gz") else stored
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def pairs_of(merges: Iterable[Any]) -> list[Pair]:
    """Merges as files spell them, "a b" or ["a", "b"], as bytes. Raises `DataError` naming the merge."""
    pairs = []
    for number, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        try:
            left, right = map(to_bytes, parts)
        except (KeyError, ValueError, TypeError):
            raise DataError(f"merge {number} {merge!r:.80} is not two byte-level tokens") from None
        pairs.append((left, right))
    return pairs


def vocabulary_of(data: Any) -> dict[str, int]:
    """Tokens -> ids as a file gives them. Raises `DataError` unless ids are integers from 0, none twice."""
    if not isinstance(data, dict) or not all(type(i) is int and 0 <= i < 1 << 31 for i in data.values()):
        raise DataError("the vocabulary does not map tokens to ids, each an integer from 0")
    if len(set(data.values())) != len(data):
        raise DataError("the vocabulary gives one id to several tokens")
    return data


def _plain(path: Path) -> str:
    return path.name.removesuffix(".gz")


def _merge_lines(path: Path, data: bytes) -> list[str]:
    try:
        return [line for line in data.decode("utf-8").split("\n") if line and not line.startswith("#version")]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no list of merges: not valid UTF-8 at byte {error.start}") from error


def _added(token: Any) -> AddedToken:
    if not isinstance(token, dict) or not isinstance(token.get("content"), str) or type(token.get("id")) is not int:
        raise DataError(f"{token!r:.80} has no content or no id")
    flags = {name: bool(token.get(name)) for name in ("special", "lstrip", "rstrip", "normalized")}
    return AddedToken(token["content"], token["id"], **flags)


def _byte_level(state: Any) -> bool:
    """Whether a ByteLevel part spells bytes as letters: in the pre-tokenizer, the decoder or a sequence there."""
    parts = [state.get("pre_tokenizer"), state.get("decoder")] if isinstance(state, dict) else []
    for part in list(parts):
        if isinstance(part, dict):
            parts += part.get("pretokenizers") or part.get("decoders") or []
    return any(isinstance(part, dict) and part.get("type") == "ByteLevel" for part in parts)


# ---- fingerprints


def fingerprint(tokens: Sequence[bytes]) -> str:
    """sha256 in hex over the bytes of all tokens by id, each behind its length: equal for equal vocabularies."""
    digest = sha256(len(tokens).to_bytes(8, "little"))
    for token in tokens:
        digest.update(len(token).to_bytes(8, "little") + token)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 in hex over all tokens, the special ids and what a probe text becomes: equal tokenizers, equal digest.

    tokenizer: one of transformers, or mlx-lm's wrapper of it.
    """
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    facts = [sorted(tokenizer.get_vocab().items()), special, tokenizer.encode(_PROBE, add_special_tokens=False)]
    return sha256(json.dumps(facts).encode("utf-8")).hexdigest()
