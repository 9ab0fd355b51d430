"""Reads any tokenizer file as a vocabulary, which encodes text to base ids and decodes ids; without chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.named import resolve_model_name
from mlx_zip.text.formats import find_gpt2_merges, is_tokenizer_file, read_tokenizer_file, short_tokenizer_name
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.vocab.adaptbpe.tokenizer_json import make_tokenizer_exact_in_folder


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer reduced to functions between text and ids.

    encode: text -> base ids, all below `size`, without special tokens. decode: ids -> text. text_of: one id -> text.
    special_ids: ids of special tokens, such as bos. library: name of the library that encodes.
    """

    name: str
    size: int
    library: str
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    text_of: Callable[[int], str]
    special_ids: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        return f"Vocabulary({self.name!r}, size={self.size})"


def read_vocabulary(name: str | Path) -> Vocabulary:
    """Returns the vocabulary of a tokenizer file (`formats.KINDS`), a folder, a bundled model's name or a hub id.

    For an adapted model's folder, ids equal those of `AdaptedVocabulary.encode`. Raises `DataError` if reading fails.
    """
    path = resolve_model_name(name)
    file = path
    if path.is_dir():
        file = path / "tokenizer.json" if (path / "tokenizer.json").is_file() else find_gpt2_merges(path) or path
    if not (file.is_file() or is_tokenizer_file(file)):
        return _read_with_transformers(str(name))
    tokenizer = read_tokenizer_file(file)
    make_tokenizer_exact_in_folder(tokenizer, file.parent)
    is_sentencepiece = file.name.removesuffix(".gz").endswith(".model")
    tokenizer.encode_special_tokens = is_sentencepiece  # as in SentencePiece, "<s>" in a text is text
    decode = lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)
    return Vocabulary(
        path.name if path.is_dir() else short_tokenizer_name(file),
        1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1),
        "tokenizers",
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        decode,
        tokenizer.id_to_token if is_sentencepiece else lambda i: decode([i]),
        frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special),
    )


def _read_with_transformers(name: str) -> Vocabulary:
    tokenizer: Any = load_tokenizer(name)
    decode = lambda ids: tokenizer.decode(list(ids))
    return Vocabulary(
        Path(name).name,
        len(tokenizer),
        "transformers",
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        decode,
        lambda i: decode([i]),
        frozenset(tokenizer.all_special_ids),
    )
