"""Text to patches and back: a first-stage tokenizer and the table of its tokens, which belong together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.errors import DataError
from mlx_zip.vocab.hbpe_table import PatchTable
from mlx_zip.vocab.hbpe_tokens import encoder_of, tokens_of

END = "<|endofdocument|>"  # what a tokenizer gets that has no token without bytes


class PatchText:
    """A `tokenizers.Tokenizer` and the patches of its tokens; one token stands for no bytes and ends a document.

    Raises `DataError` when the table was made for another tokenizer, or no token can end a document.
    """

    def __init__(self, tokenizer: Any, table: PatchTable) -> None:
        table.check_tokens(tokens_of(tokenizer))
        if b"" not in table.tokens:
            raise DataError("the tokenizer has no token without bytes to end a document with, a special one, say")
        self.tokenizer, self.table = tokenizer, table
        self.end = table.tokens.index(b"")
        self._encode = encoder_of(tokenizer)

    @classmethod
    def learn(cls, tokenizer: Any, patch_size: int, mode: str = "stop") -> PatchText:
        """Learns the table of a tokenizer, which gets a token for the end of a document if it has none (`END`)."""
        if b"" not in tokens_of(tokenizer):
            tokenizer.add_special_tokens([END])
        return cls(tokenizer, PatchTable.learn(tokens_of(tokenizer), patch_size, mode))

    @cached_property
    def unit_bytes(self) -> NDArray[np.int64]:
        """How many bytes each token has, [V]."""
        return np.fromiter(map(len, self.table.tokens), np.int64, len(self.table))

    def ids(self, text: str) -> Sequence[int]:
        """First-stage ids of a text, nothing added."""
        return self._encode(text)

    def patches(self, text: str) -> list[list[int]]:
        """The patches of a text, each up to its mark."""
        ids = list(self.ids(text))
        rows, lengths = self.table.rows[ids].tolist(), self.table.lengths[ids].tolist()
        return [row[:n] for row, n in zip(rows, lengths, strict=True)]
