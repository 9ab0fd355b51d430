"""The tokens of a first-stage tokenizer as byte strings, by id; and its ids of a text. Read is every kind of file that
`mlx_zip.vocab.first_stage` tells apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mlx_zip.vocab.first_stage import open_tokenizer


def read_tokens(path: str | Path) -> list[bytes]:
    """The bytes of each id; special tokens, and ids without a token, stand for no bytes.

    Raises `DataError` naming the file, and the token or line at fault.
    """
    return open_tokenizer(path).tokens()


def text_encoder(path: str | Path) -> Callable[[str], Sequence[int]]:
    """Text to first-stage ids, nothing added; of a tokenizer.json or a merge list.

    Raises `DataError` for the other kinds, which do not say how a text is split.
    """
    tokenizer = open_tokenizer(path).library()
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
