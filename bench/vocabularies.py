"""Published vocabularies as files: text to base ids through the library each one is made for.

Read are tiktoken ranks (NAME.tiktoken), SentencePiece models (NAME.model), the pair of files GPT-2 came in
(encoder.json and vocab.bpe, or vocab.json and merges.txt), BERT's list of word pieces (NAME.vocab.txt), each also with
.gz, and tokenizer.json, itself or in a folder.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.bundled import here_or_bundled
from mlx_zip.errors import DataError, InstallationError, missing_library
from mlx_zip.vocab.adaptbpe import text
from mlx_zip.vocab.first_stage import BESIDE, open_tokenizer, read_stored, vocabulary_of

_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a text is split before ranks apply; no rank file says so. By the name of the vocabulary. Source: its publisher.
PATTERNS = {name: text.PATTERNS[kind] for name, kind in text.CUT_BY_NAME.items()} | {"o200k": _O200K}
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
        return _fast(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    if plain.endswith(".tiktoken"):
        return _ranks(plain.removesuffix(".tiktoken"), path)
    if plain.endswith(".model"):
        return _sentencepiece(plain.removesuffix(".model"), path)
    for second, first in BESIDE.items():
        if plain.endswith(first):
            start = plain.removesuffix(first)
            other = path.with_name(start + second + path.name.removeprefix(plain))
            return _byte_pairs(start.strip(".-_") or path.parent.name, path, other)
    if plain.endswith(PIECES):
        return _word_pieces(plain.removesuffix(PIECES).strip(".-_") or path.parent.name, path)
    if plain.endswith("tokenizer.json"):
        return _fast(path)
    raise DataError(f"{path}: not the name of a vocabulary ({KINDS})")


def named_vocabulary(name: str) -> Vocabulary:
    """A vocabulary's file, a folder or a hub id; what is no file of a kind read here goes to transformers."""
    path = here_or_bundled(name)
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
    ranks = {token: rank for rank, token in enumerate(open_tokenizer(path).tokens())}
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
        model = sentencepiece.SentencePieceProcessor(model_proto=read_stored(path))
    except RuntimeError as error:
        raise DataError(f"{path}: no SentencePiece model") from error
    return Vocabulary(name, model.get_piece_size(), "sentencepiece", model.encode, model.id_to_piece)


def _byte_pairs(name: str, vocabulary: Path, merges: Path) -> Vocabulary:
    try:
        file = open_tokenizer(merges)
        return _of_tokenizer(name, file.library(vocabulary_of(json.loads(read_stored(vocabulary)))))
    except (ValueError, DataError) as error:
        raise DataError(f"{vocabulary} and {merges.name} are no byte-level vocabulary: {error}") from error


def _word_pieces(name: str, path: Path) -> Vocabulary:
    """BERT's: a piece a line. Its text is made lower case, as the list does not tell, unless its name says `cased`."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    try:
        pieces = read_stored(path).decode("utf-8").splitlines()
    except ValueError as error:
        raise DataError(f"{path}: no list of word pieces: {error}") from error
    if len(set(pieces)) < len(pieces) or UNKNOWN not in pieces:
        raise DataError(f"{path}: no list of word pieces: {UNKNOWN} must be one, and none twice")
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase="uncased" in name or "cased" not in name)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _of_tokenizer(name, tokenizer)


def _fast(path: Path) -> Vocabulary:
    file = open_tokenizer(path)
    return _of_tokenizer(path.name if path.is_dir() else file.name, file.library())


def _of_tokenizer(name: str, tokenizer: Any) -> Vocabulary:
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    return Vocabulary(name, size, "tokenizers", encode, lambda i: tokenizer.decode([i], skip_special_tokens=False))


def _missing(path: Path, library: str) -> InstallationError:
    return missing_library(path.name, library, extra="bench")
