"""The tokens of a first-stage tokenizer as byte strings, and its ids of a text.

Files of all kinds that `mlx_zip.vocab.first_stage` lists can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError
from mlx_zip.vocab.first_stage import BYTE_OF, TokenizerFile, open_tokenizer


def read_tokens(path: str | Path) -> list[bytes]:
    """Reads a tokenizer's file and returns the bytes of each id; b"" for special tokens and ids without a token.

    Raises `DataError` naming the file, and the wrong token or line.
    """
    return open_tokenizer(path).tokens()


def text_encoder(path: str | Path) -> Callable[[str], Sequence[int]]:
    """Returns a function from text to the ids of the tokenizer in a file, without special tokens.

    Errors as in `read_tokenizer`.
    """
    return encoder_of(read_tokenizer(path))


def encoder_of(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """Returns a function from text to the ids of a `tokenizers.Tokenizer`, without special tokens."""
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def read_tokenizer(path: str | Path) -> Any:
    """Reads a tokenizer.json or a merge list -> `tokenizers.Tokenizer`.

    Raises `DataError` for the other kinds of files, which do not say how text is split.
    """
    return open_tokenizer(path).library()


def learn_tokenizer(texts: Iterable[str], size: int) -> Any:
    """Learns a byte-level BPE tokenizer of at most `size` tokens, the 256 bytes included -> `tokenizers.Tokenizer`.

    Raises `DataError` for a size below 256.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if size < len(BYTE_OF):
        raise DataError(f"a byte-level tokenizer has 256 tokens or more, got {size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = list(texts)
    size = min(size, len(BYTE_OF) + sum(len(text.encode("utf-8")) for text in texts))  # the trainer allocates so many
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=list(BYTE_OF), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokens_of(tokenizer: Any) -> list[bytes]:
    """Returns the bytes of each id of a `tokenizers.Tokenizer`; b"" for special tokens and ids without a token."""
    return TokenizerFile(Path("tokenizer.json"), "tokenizer", tokenizer.to_str().encode("utf-8")).tokens()
