"""`PatchText` turns text into patches: a tokenizer with its patch table. Reads and learns tokenizers.

`mlx_zip.vocab.first_stage` lists the kinds of tokenizer files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.errors import DataError
from mlx_zip.vocab.first_stage import BYTE_OF, TokenizerFile, open_tokenizer_file
from mlx_zip.vocab.hbpe.patch_table import PatchTable

END = "<|endofdocument|>"  # special token added to a tokenizer that has no token for the end


def read_token_bytes(path: str | Path) -> list[bytes]:
    """Reads a tokenizer's file and returns the bytes of each id; b"" for special tokens and ids without a token.

    Raises `DataError`, naming the file and the wrong token or line, if the file is invalid.
    """
    return open_tokenizer_file(path).tokens()


def read_text_encoder(path: str | Path) -> Callable[[str], Sequence[int]]:
    """Returns a function from text to the ids of the tokenizer in a file, without special tokens.

    Raises what `read_hf_tokenizer` raises.
    """
    return make_text_encoder(read_hf_tokenizer(path))


def make_text_encoder(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """Returns a function from text to the ids of a `tokenizers.Tokenizer`, without special tokens."""
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def read_hf_tokenizer(path: str | Path) -> Any:
    """Reads a tokenizer.json or a merge list -> `tokenizers.Tokenizer`.

    Raises `DataError` if the file is of another kind, because other kinds do not say how text is split.
    """
    return open_tokenizer_file(path).build_tokenizer()


def learn_tokenizer(texts: Iterable[str], size: int) -> Any:
    """Learns a byte-level BPE tokenizer of at most `size` tokens, the 256 bytes included -> `tokenizers.Tokenizer`.

    Raises `DataError` if the size is below 256.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if size < len(BYTE_OF):
        raise DataError(f"a byte-level tokenizer has 256 tokens or more, got {size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = list(texts)
    size = min(size, len(BYTE_OF) + sum(len(text.encode("utf-8")) for text in texts))  # the trainer allocates `size`
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=list(BYTE_OF), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_bytes_by_id(tokenizer: Any) -> list[bytes]:
    """Returns the bytes of each id of a `tokenizers.Tokenizer`; b"" for special tokens and ids without a token."""
    return TokenizerFile(Path("tokenizer.json"), "tokenizer", tokenizer.to_str().encode("utf-8")).tokens()


class PatchText:
    """A `tokenizers.Tokenizer` with the patch table of its tokens: turns text into patches.

    end: id of the first token without bytes, which ends a document. Raises `DataError` if the table was made for
    another tokenizer, or if every token has bytes.
    """

    def __init__(self, tokenizer: Any, table: PatchTable) -> None:
        table.check_tokens(token_bytes_by_id(tokenizer))
        if b"" not in table.tokens:
            raise DataError("the tokenizer has no token without bytes, such as a special token, to end a document with")
        self.tokenizer, self.table = tokenizer, table
        self.end = table.tokens.index(b"")
        self._encode = make_text_encoder(tokenizer)

    @classmethod
    def learn(cls, tokenizer: Any, patch_size: int, mode: str = "stop") -> PatchText:
        """Learns a tokenizer's patch table; adds the special token `END` if every token of the tokenizer has bytes."""
        if b"" not in token_bytes_by_id(tokenizer):
            tokenizer.add_special_tokens([END])
        return cls(tokenizer, PatchTable.learn(token_bytes_by_id(tokenizer), patch_size, mode))

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
