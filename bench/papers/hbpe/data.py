"""The training data of `hbpe_model`: one text as first-stage ids, as bytes and as patches of every kind."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.errors import MlxZipError
from mlx_zip.models.hbpe import PlainModel
from mlx_zip.training.hbpe import Corpus, Uint32s, byte_entropies, windows
from mlx_zip.vocab.hbpe_patching import entropy_patches, number, space_patches
from mlx_zip.vocab.hbpe_table import PatchTable
from mlx_zip.vocab.hbpe_tokens import encoder_of, learn_tokenizer, read_tokens, tokens_of

from .patches import first_stage

BYTE_END = 256
ENTROPY_SAMPLE = 1 << 17  # least bytes of documents by which the threshold is chosen

Documents = list[bytes]
Material = tuple[Corpus, Corpus, PatchTable | None]  # to train on, to test on, the patches of both


@dataclass
class Data:
    """The text by document, and what the kinds make of it.

    context: first-stage tokens of a window; the windows of other units have about as many bytes. vocab_size: tokens of
    a first stage that is learned from the training text, unless `tokenizer` names one. byte_model: what `entropy`
    patches are cut by, once it is trained.
    """

    train: Documents
    test: Documents
    context: int
    vocab_size: int
    tokenizer: str | None = None
    byte_model: PlainModel | None = None
    tokens: list[bytes] = field(init=False)
    ids: tuple[Uint32s, Uint32s] = field(init=False)

    def __post_init__(self) -> None:
        tokens, encode = self._first_stage()
        self.tokens = [*tokens, b""]  # the last stands for the end of a document
        self.ids = self._windows(
            [[encode(document.decode()) for document in part] for part in self._parts()], len(tokens), self.context
        )

    @property
    def bytes_per_token(self) -> float:
        """Bytes per first-stage token of the training text, ends of documents counted."""
        return float(self._sizes(self.tokens)[self.ids[0]].mean())

    def of(self, kind: str, patch_size: int) -> Material:
        """Returns the text as one kind of model reads it.

        Raises `MlxZipError` for `entropy` without a model over bytes.
        """
        if kind == "bytes":
            length, sizes = round(self.context * self.bytes_per_token), np.array([*[1] * BYTE_END, 0])
            ids = self._windows([[list(document) for document in part] for part in self._parts()], BYTE_END, length)
            return Corpus(ids[0], sizes), Corpus(ids[1], sizes), None
        if kind in ("space", "entropy"):
            return self._cut(space_patches if kind == "space" else self._entropy_patches())
        table = None if kind == "plain" else PatchTable.learn(self.tokens, patch_size)
        return self._corpora(self.ids, self.tokens, table)

    def _cut(self, cut: Callable[[bytes], list[bytes]]) -> Material:
        """Returns the patches that `cut` makes, in windows of about as many bytes as all kinds have."""
        pieces = [[cut(document) for document in part] for part in self._parts()]
        ids, table = number([document for part in pieces for document in (*part, [b""])])
        first = len(self.train)
        patches, end = [ids[:first], ids[first + 1 : -1]], ids[-1][0]
        rate = sum(map(len, self.train)) / (sum(map(len, patches[0])) + first)
        context = max(1, round(self.context * self.bytes_per_token / rate))
        return self._corpora(self._windows(patches, end, context), table.tokens, table)

    def _entropy_patches(self) -> Callable[[bytes], list[bytes]]:
        """Cuts with a threshold that makes about as many patches as the first stage makes tokens."""
        model = self.byte_model
        if model is None:
            raise MlxZipError("--models entropy needs bytes too, because the model over bytes decides where to cut")
        length = round(self.context * self.bytes_per_token)
        foreseen = cache(lambda document: byte_entropies(model, document, length))
        enough = int(np.searchsorted(np.cumsum([len(document) for document in self.train]), ENTROPY_SAMPLE)) + 1
        some = np.concatenate([foreseen(document) for document in self.train[:enough]])
        threshold = float(np.quantile(some, 1 - 1 / self.bytes_per_token))
        return lambda document: entropy_patches(document, foreseen(document), threshold)

    def _first_stage(self) -> tuple[list[bytes], Callable[[str], Sequence[int]]]:
        if self.tokenizer is not None:
            return read_tokens(self.tokenizer), first_stage(self.tokenizer)
        tokenizer = learn_tokenizer((document.decode() for document in self.train), self.vocab_size)
        return tokens_of(tokenizer), encoder_of(tokenizer)

    def _parts(self) -> tuple[Documents, Documents]:
        return self.train, self.test

    def _windows(self, parts: Sequence[Any], end: int, length: int) -> tuple[Uint32s, Uint32s]:
        train, test = (windows(documents, end, length) for documents in parts)
        return train, test

    def _corpora(self, ids: tuple[Uint32s, Uint32s], tokens: Sequence[bytes], table: PatchTable | None) -> Material:
        sizes, rows = self._sizes(tokens), None if table is None else table.rows
        return Corpus(ids[0], sizes, rows), Corpus(ids[1], sizes, rows), table

    @staticmethod
    def _sizes(tokens: Sequence[bytes]) -> Any:
        return np.fromiter(map(len, tokens), np.int64, len(tokens))


def read_documents(path: str, separator: str | None, limit: int | None = None) -> Documents:
    """UTF-8 text by document, `separator` being a line that ends one. Raises `MlxZipError` naming the file."""
    try:
        stored = Path(path).read_bytes()
        text = (gzip.decompress(stored) if path.endswith(".gz") else stored)[:limit].decode("utf-8", "ignore")
    except (OSError, EOFError, zlib.error) as error:
        raise MlxZipError(f"{path} cannot be read: {error}") from error
    parts = [text] if separator is None else ("\n" + text).split(f"\n{separator}\n")
    documents = [part.strip("\n").encode("utf-8") for part in parts if part.strip()]
    if not documents:
        raise MlxZipError(f"{path} holds no text")
    return documents
