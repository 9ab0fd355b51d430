"""Text to patches and back: a first-stage tokenizer with the patch table of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.errors import DataError
from mlx_zip.vocab.hbpe.table import PatchTable
from mlx_zip.vocab.hbpe.tokens import encoder_of, tokens_of

END = "<|endofdocument|>"  # added to a tokenizer without a token for the end


class PatchText:
    """A `tokenizers.Tokenizer` with the patch table of its tokens: turns text into patches.

    end: id of the first token without bytes, which ends a document. Raises `DataError` if the table was made for
    another tokenizer, or if every token has bytes.
    """

    def __init__(self, tokenizer: Any, table: PatchTable) -> None:
        table.check_tokens(tokens_of(tokenizer))
        if b"" not in table.tokens:
            raise DataError("the tokenizer has no token without bytes, such as a special token, to end a document with")
        self.tokenizer, self.table = tokenizer, table
        self.end = table.tokens.index(b"")
        self._encode = encoder_of(tokenizer)

    @classmethod
    def learn(cls, tokenizer: Any, patch_size: int, mode: str = "stop") -> PatchText:
        """Learns a tokenizer's patch table; adds the special token `END` if every token of the tokenizer has bytes."""
        if b"" not in tokens_of(tokenizer):
            tokenizer.add_special_tokens([END])
        return cls(tokenizer, PatchTable.learn(tokens_of(tokenizer), patch_size, mode))

    @cached_property
    def unit_bytes(self) -> NDArray[np.int64]:
        """Number of bytes of each token, int64 [V]."""
        return np.fromiter(map(len, self.table.tokens), np.int64, len(self.table))

    def ids(self, text: str) -> Sequence[int]:
        """Returns the first-stage ids of a text, without special tokens."""
        return self._encode(text)

    def patches(self, text: str) -> list[list[int]]:
        """Returns the patches of a text, each up to its end mark."""
        ids = list(self.ids(text))
        rows, lengths = self.table.rows[ids].tolist(), self.table.lengths[ids].tolist()
        return [row[:n] for row, n in zip(rows, lengths, strict=True)]
