"""Reads published tokenizer files of several libraries as `tokenizers.Tokenizer` objects.

    file                                              rule for splitting text    source of the ids
    tokenizer.json                                    in the file                the file
    vocab.bpe, merges.txt                             GPT-2's                    encoder.json or vocab.json in the same
                                                                                 folder, else GPT-2's
    NAME.tiktoken                                     by NAME (`PATTERNS`)       the ranks in the file
    NAME.model (SentencePiece: BPE or unigram)        in the file                the file
    NAME.vocab.txt, vocab.txt (BERT's word pieces)    BERT's                     line numbers

Each file may be compressed (.gz).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError, bare_exceptions_as_value_errors
from mlx_zip.text.sentencepiece_file import read_sentencepiece_model
from mlx_zip.vocab.adaptbpe import pieces as text
from mlx_zip.vocab.first_stage import (
    IDS_FILE_OF,
    TokenizerFile,
    bytes_to_spelled,
    checked_vocabulary,
    name_without_gz,
    open_tokenizer_file,
    read_uncompressed,
)

LOWER, UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Name of a vocabulary -> pattern that splits a text before merges apply. Rank files (.tiktoken) lack the pattern.
# Source: the publishers of the vocabularies.
PATTERNS = {name: text.PATTERNS[kind] for name, kind in text.CUT_BY_NAME.items()} | {"o200k": _O200K}
COMPOSED = "qwen"  # part of the names of vocabularies whose tokenizer first normalizes text to NFC
PIECES, UNKNOWN = "vocab.txt", "[UNK]"
KINDS = (
    "tokenizer.json, NAME.tiktoken, NAME.model (SentencePiece), encoder.json with vocab.bpe, vocab.json with "
    "merges.txt, or NAME.vocab.txt (BERT); each also with .gz"
)


def is_tokenizer_file(path: Path) -> bool:
    """Returns whether a file's name is one of `KINDS`."""
    return name_without_gz(path).endswith(
        ("tokenizer.json", ".tiktoken", ".model", *IDS_FILE_OF, *IDS_FILE_OF.values(), PIECES)
    )


def short_tokenizer_name(path: Path) -> str:
    """Returns a short name for a tokenizer file: the file's name without ending, or the folder's name if that is ""."""
    plain = name_without_gz(path)
    for ending in ("tokenizer.json", ".tiktoken", ".model", *IDS_FILE_OF, *IDS_FILE_OF.values(), PIECES):
        plain = plain.removesuffix(ending)
    return plain.strip(".-_") or path.absolute().parent.name


def read_tokenizer_file(path: Path) -> Any:
    """Returns the `tokenizers.Tokenizer` of a file named as in `KINDS`. Raises `DataError` if it cannot be read."""
    try:
        with bare_exceptions_as_value_errors():
            return _read_by_kind(path)
    except DataError:
        raise
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read as a tokenizer: {error}") from error


def _read_by_kind(path: Path) -> Any:
    """Returns the `tokenizers.Tokenizer` of a file. The file's name decides how it is read."""
    plain = name_without_gz(path)
    if not is_tokenizer_file(path):
        raise DataError(f"{path}: not the name of a tokenizer file ({KINDS})")
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if plain.endswith(".tiktoken"):
        return _read_tiktoken(path)
    if plain.endswith(".model"):
        return read_sentencepiece_model(path).build_tokenizer()
    if plain.endswith(PIECES):
        return _read_word_pieces(path)
    if plain.endswith(tuple(IDS_FILE_OF.values())):
        return _read_byte_pairs(path, _paired_file(path, {ids: merges for merges, ids in IDS_FILE_OF.items()}))
    if plain.endswith(tuple(IDS_FILE_OF)):
        vocabulary = _paired_file(path, IDS_FILE_OF)
        return (
            _read_byte_pairs(vocabulary, path) if vocabulary.is_file() else open_tokenizer_file(path).build_tokenizer()
        )
    file = open_tokenizer_file(path)
    if file.kind != "tokenizer":
        raise DataError(f"{path}: no tokenizer.json but a list of tokens, which does not say how a text is split")
    return file.build_tokenizer()


def find_gpt2_merges(folder: Path) -> Path | None:
    """Returns the path of a merge list in `folder` whose vocabulary lies beside it (GPT-2's two files), else None."""
    for merges in IDS_FILE_OF:
        for path in sorted([*folder.glob(f"*{merges}"), *folder.glob(f"*{merges}.gz")]):
            if _paired_file(path, IDS_FILE_OF).is_file():
                return path
    return None


def tiktoken_split_pattern(path: Path) -> str:
    """Returns the pattern by which a .tiktoken file's text is split. Raises `DataError` if the name is unknown."""
    pattern = next((pattern for known, pattern in PATTERNS.items() if known in short_tokenizer_name(path)), None)
    if pattern is None:
        raise DataError(f"{path}: how its text is split is unknown; the name must hold one of {', '.join(PATTERNS)}")
    return pattern


def _paired_file(path: Path, endings: dict[str, str]) -> Path:
    """Returns the path of the other file of a pair, for example vocab.json for merges.txt; .gz if only that exists.

    endings: ending of `path` -> ending of the other file's name.
    """
    plain = name_without_gz(path)
    own = next(ending for ending in endings if plain.endswith(ending))
    other = path.with_name(plain.removesuffix(own) + endings[own])
    packed = other.with_name(other.name + ".gz")
    return packed if packed.is_file() and not other.is_file() else other


def _read_tiktoken(path: Path) -> Any:
    """Returns the tokenizer of a .tiktoken file, which lists tokens by rank."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pattern = tiktoken_split_pattern(path)
    vocabulary = {bytes_to_spelled(token): rank for rank, token in enumerate(open_tokenizer_file(path).tokens())}
    merges = [
        (token[:i], token[i:])
        for token in vocabulary
        for i in range(1, len(token))
        if token[:i] in vocabulary and token[i:] in vocabulary
    ]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    if COMPOSED in path.name:
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_byte_pairs(vocabulary: Path, merges: Path) -> Any:
    try:
        file = TokenizerFile(merges, "merges", read_uncompressed(merges))
        return file.build_tokenizer(checked_vocabulary(json.loads(read_uncompressed(vocabulary))))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{vocabulary} and {merges.name} are no byte-level vocabulary: {error}") from error


def _read_word_pieces(path: Path) -> Any:
    """Returns the tokenizer of a list of BERT's word pieces, one per line.

    Text is lowercased unless the file's name contains `cased` but not `uncased`; the list itself does not tell.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    try:
        pieces = read_uncompressed(path).decode("utf-8").splitlines()
    except ValueError as error:
        raise DataError(f"{path}: no list of word pieces: {error}") from error
    if len(set(pieces)) < len(pieces) or UNKNOWN not in pieces:
        raise DataError(f"{path}: no list of word pieces: {UNKNOWN} must be one, and none twice")
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token=UNKNOWN))
    name = short_tokenizer_name(path)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase="uncased" in name or "cased" not in name)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def well_known_special_tokens(tokenizer: Any) -> dict[str, str]:
    """Returns name in transformers (such as eos_token) -> special token, for well-known tokens of the vocabulary."""
    known = {
        "bos_token": ("<s>", "<|endoftext|>", "[CLS]"),
        "eos_token": ("</s>", "<|endoftext|>", "[SEP]"),
        "unk_token": ("<unk>", UNKNOWN),
        "pad_token": ("<pad>", "[PAD]"),
    }
    has = lambda token: tokenizer.token_to_id(token) is not None
    found = {name: next(filter(has, tokens), None) for name, tokens in known.items()}
    return {name: token for name, token in found.items() if token is not None}
