"""Published vocabularies as files: text to base ids through the library each one is made for.

Read are tiktoken ranks (NAME.tiktoken), SentencePiece models (NAME.model), the pair of files GPT-2 came in
(encoder.json and vocab.bpe, or vocab.json and merges.txt), BERT's list of word pieces (NAME.vocab.txt), each also with
.gz, and tokenizer.json, itself or in a folder.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import unicodedata
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError, InstallationError, bare_exceptions_as_value_errors

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a text is split before ranks apply; no rank file says so. By the name of the vocabulary. Source: its publisher.
PATTERNS = {"llama3": _CL100K, "cl100k": _CL100K, "qwen": _CL100K.replace("{1,3}", ""), "o200k": _O200K}
_PAIRS = {"encoder.json": "vocab.bpe", "vocab.json": "merges.txt"}
PIECES, UNKNOWN = "vocab.txt", "[UNK]"
ENDINGS = (".tiktoken", ".model", ".json", ".bpe", ".gz", PIECES)
KINDS = "NAME.tiktoken, NAME.model, encoder.json beside vocab.bpe, NAME.vocab.txt, or a folder with tokenizer.json"


@dataclass(frozen=True)
class Vocabulary:
    """encode: text -> base ids, all below `size`, nothing added. text_of: an id's text. library: what encodes."""

    name: str
    size: int
    library: str
    encode: Callable[[str], Sequence[int]]
    text_of: Callable[[int], str]

    def digit_ids(self) -> list[int]:
        """Ids whose text, blanks aside, is digits: what zip2zip++ keeps from merging."""
        texts = ((i, self.text_of(i).strip("▁ ")) for i in range(self.size))
        return [i for i, text in texts if text.isascii() and text.isdigit()]


def read_vocabulary(path: Path) -> Vocabulary:
    """Reads a vocabulary by its file name. Raises `DataError` naming the file, `InstallationError` naming the library.

    A rank file's name must hold one of `PATTERNS`: the ranks alone do not say how text is split.
    """
    plain = path.name.removesuffix(".gz")
    if path.is_dir():
        return _fast(path.name, path / "tokenizer.json")
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    if plain.endswith(".tiktoken"):
        return _ranks(plain.removesuffix(".tiktoken"), path)
    if plain.endswith(".model"):
        return _sentencepiece(plain.removesuffix(".model"), path)
    for first, second in _PAIRS.items():
        if plain.endswith(first):
            start = plain.removesuffix(first)
            other = path.with_name(start + second + path.name.removeprefix(plain))
            return _byte_pairs(start.strip(".-_") or path.parent.name, path, other)
    if plain.endswith(PIECES):
        return _word_pieces(plain.removesuffix(PIECES).strip(".-_") or path.parent.name, path)
    if plain.endswith("tokenizer.json"):
        return _fast(plain.removesuffix("tokenizer.json").strip(".-_") or path.parent.name, path)
    raise DataError(f"{path}: not the name of a vocabulary ({KINDS})")


def named_vocabulary(name: str) -> Vocabulary:
    """A vocabulary's file, a folder or a hub id; what is no file of a kind read here goes to transformers."""
    path = Path(name)
    if path.is_file() or (path / "tokenizer.json").is_file() or path.name.endswith(ENDINGS):
        return read_vocabulary(path)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(f"{name}: no tokenizer can be loaded: {str(error).splitlines()[0]}") from error
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    return Vocabulary(path.name, len(tokenizer), "transformers", encode, lambda i: tokenizer.decode([i]))


def _ranks(name: str, path: Path) -> Vocabulary:
    pattern = next((pattern for known, pattern in PATTERNS.items() if known in name), None)
    if pattern is None:
        raise DataError(f"{path}: how its text is split is unknown; the name must hold one of {', '.join(PATTERNS)}")
    try:
        import tiktoken
    except ImportError as error:
        raise _missing(path, "tiktoken") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_bytes(path).splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(f"{path}, line {number}: not a token in base64 and its rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise DataError(f"{path}: the ranks are not 0, 1, 2 and so on")
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    encode = encoding.encode_ordinary
    if "qwen" in name:  # its tokenizer composes characters first
        encode = lambda text: encoding.encode_ordinary(unicodedata.normalize("NFC", text))
    text_of = lambda i: encoding.decode_single_token_bytes(i).decode("utf-8", "replace")
    return Vocabulary(name, len(ranks), "tiktoken", encode, text_of)


def _sentencepiece(name: str, path: Path) -> Vocabulary:
    try:
        import sentencepiece
    except ImportError as error:
        raise _missing(path, "sentencepiece") from error
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=_bytes(path))
    except RuntimeError as error:
        raise DataError(f"{path}: no SentencePiece model") from error
    return Vocabulary(name, model.get_piece_size(), "sentencepiece", model.encode, model.id_to_piece)


def _byte_pairs(name: str, vocabulary: Path, merges: Path) -> Vocabulary:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    try:
        lines = [
            line for line in _bytes(merges).decode("utf-8").split("\n") if line and not line.startswith("#version")
        ]
        pairs = [(left, right) for left, right in (line.split(" ") for line in lines)]
        with bare_exceptions_as_value_errors():
            tokenizer = Tokenizer(models.BPE(json.loads(_bytes(vocabulary)), pairs))
    except (ValueError, TypeError) as error:
        raise DataError(f"{vocabulary} and {merges.name} are no byte-level vocabulary: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _of_tokenizer(name, tokenizer)


def _word_pieces(name: str, path: Path) -> Vocabulary:
    """BERT's: a piece a line. Its text is made lower case, as the list does not tell, unless its name says `cased`."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    try:
        pieces = _bytes(path).decode("utf-8").splitlines()
    except ValueError as error:
        raise DataError(f"{path}: no list of word pieces: {error}") from error
    if len(set(pieces)) < len(pieces) or UNKNOWN not in pieces:
        raise DataError(f"{path}: no list of word pieces: {UNKNOWN} must be one, and none twice")
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase="uncased" in name or "cased" not in name)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _of_tokenizer(name, tokenizer)


def _fast(name: str, path: Path) -> Vocabulary:
    from tokenizers import Tokenizer

    try:
        with bare_exceptions_as_value_errors():
            tokenizer = Tokenizer.from_str(_bytes(path).decode("utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: no tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _of_tokenizer(name, tokenizer)


def _of_tokenizer(name: str, tokenizer: Any) -> Vocabulary:
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    return Vocabulary(name, size, "tokenizers", encode, lambda i: tokenizer.decode([i], skip_special_tokens=False))


def _bytes(path: Path) -> bytes:
    try:
        stored = path.read_bytes()
        return gzip.decompress(stored) if path.name.endswith(".gz") else stored
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _missing(path: Path, library: str) -> InstallationError:
    return InstallationError(f"{path.name} needs {library}: pip install 'mlx_zip[bench]'")
