"""The training data of `hbpe_model`: one text as first-stage ids, as bytes, and as patches of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from mlx_zip.errors import MlxZipError
from mlx_zip.models.patch_model import PlainModel
from mlx_zip.text.documents import read_corpus
from mlx_zip.training.patch_training import PatchCorpus, Uint32s, cut_patch_windows
from mlx_zip.vocab.hbpe.patch_table import PatchTable
from mlx_zip.vocab.hbpe.patch_text import learn_tokenizer, make_text_encoder, read_token_bytes, token_bytes_by_id

from .patches import byte_entropies, entropy_patches, number_patches, space_patches, text_to_ids_function

BYTE_END = 256
ENTROPY_SAMPLE = 1 << 17  # minimum bytes of training documents for choosing the entropy threshold

Documents = list[bytes]
# training windows, test windows, the table of their patches
Material = tuple[PatchCorpus, PatchCorpus, PatchTable | None]


@dataclass
class PatchTrainingData:
    """Training and test documents, and the windows that each kind of model reads from them.

    context: first-stage tokens per window; windows of other units hold about as many bytes. tokenizer: path of the
    first-stage tokenizer; None learns one of `vocab_size` tokens from the training documents. byte_model: the trained
    byte model that cuts `entropy` patches, None before its training. tokens: bytes of each first-stage id. ids:
    training and test windows of first-stage ids.
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
        self.tokens = [*tokens, b""]  # the last token marks the end of a document
        self.ids = self._cut_windows(
            [[encode(document.decode()) for document in part] for part in (self.train, self.test)],
            len(tokens),
            self.context,
        )

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes per first-stage token of the training windows; the end mark of a document counts 0 bytes."""
        return float(self._token_byte_counts(self.tokens)[self.ids[0]].mean())

    def windows_for_kind(self, kind: str, patch_size: int) -> Material:
        """Returns training windows, test windows and table of patches for one of the `KINDS` in `hbpe_model.py`.

        The table is None for `plain` and `bytes`. patch_size: most symbols in a patch of `patches` and `equal`, else
        ignored. Raises `MlxZipError` if `kind` is `entropy` and `byte_model` is None.
        """
        if kind == "bytes":
            length, sizes = round(self.context * self.bytes_per_token), np.array([*[1] * BYTE_END, 0])
            ids = self._cut_windows(
                [[list(document) for document in part] for part in (self.train, self.test)], BYTE_END, length
            )
            return PatchCorpus(ids[0], sizes), PatchCorpus(ids[1], sizes), None
        if kind in ("space", "entropy"):
            return self._cut_into_patches(space_patches if kind == "space" else self._entropy_patch_cutter())
        table = None if kind == "plain" else PatchTable.learn(self.tokens, patch_size)
        return self._make_material(self.ids, self.tokens, table)

    def _cut_into_patches(self, cut: Callable[[bytes], list[bytes]]) -> Material:
        """Returns windows of the patches into which `cut` divides each document, and the table of these patches.

        A window holds about as many bytes as a window of first-stage tokens.
        """
        pieces = [[cut(document) for document in part] for part in (self.train, self.test)]
        # The empty patch marks the end of a document; to get its id, it is added as a document after each part.
        ids, table = number_patches([document for part in pieces for document in (*part, [b""])])
        first = len(self.train)
        patches, end = [ids[:first], ids[first + 1 : -1]], ids[-1][0]
        rate = sum(map(len, self.train)) / (sum(map(len, patches[0])) + first)
        context = max(1, round(self.context * self.bytes_per_token / rate))
        return self._make_material(self._cut_windows(patches, end, context), table.tokens, table)

    def _entropy_patch_cutter(self) -> Callable[[bytes], list[bytes]]:
        """Returns a function that cuts a document where the byte model finds the next byte hard to predict.

        The entropy threshold is chosen on training documents so that there are about as many patches as first-stage
        tokens. Raises `MlxZipError` if the byte model has not been trained.
        """
        model = self.byte_model
        if model is None:
            raise MlxZipError("--models entropy needs bytes too, because the model over bytes decides where to cut")
        length = round(self.context * self.bytes_per_token)
        entropies_of = cache(lambda document: byte_entropies(model, document, length))
        n_sampled = int(np.searchsorted(np.cumsum([len(document) for document in self.train]), ENTROPY_SAMPLE)) + 1
        sampled = np.concatenate([entropies_of(document) for document in self.train[:n_sampled]])
        threshold = float(np.quantile(sampled, 1 - 1 / self.bytes_per_token))
        return lambda document: entropy_patches(document, entropies_of(document), threshold)

    def _first_stage(self) -> tuple[list[bytes], Callable[[str], Sequence[int]]]:
        """Returns the bytes of each first-stage token, by id, and a function from text to first-stage ids."""
        if self.tokenizer is not None:
            return read_token_bytes(self.tokenizer), text_to_ids_function(self.tokenizer)
        tokenizer = learn_tokenizer((document.decode() for document in self.train), self.vocab_size)
        return token_bytes_by_id(tokenizer), make_text_encoder(tokenizer)

    def _cut_windows(self, parts: Sequence[Any], end: int, length: int) -> tuple[Uint32s, Uint32s]:
        """Returns training and test windows of `length` ids, [W, length]; the id `end` follows each document.

        parts: the ids of every training document, and those of every test document.
        """
        train, test = (cut_patch_windows(documents, end, length) for documents in parts)
        return train, test

    def _make_material(
        self, ids: tuple[Uint32s, Uint32s], tokens: Sequence[bytes], table: PatchTable | None
    ) -> Material:
        sizes, rows = self._token_byte_counts(tokens), None if table is None else table.rows
        return PatchCorpus(ids[0], sizes, rows), PatchCorpus(ids[1], sizes, rows), table

    @staticmethod
    def _token_byte_counts(tokens: Sequence[bytes]) -> Any:
        return np.fromiter(map(len, tokens), np.int64, len(tokens))


def read_documents(path: str, separator: str | None, limit: int | None = None) -> Documents:
    """Returns the bytes of each document of a text file, without empty lines around it; see `read_corpus`."""
    return [document.text.strip("\n").encode() for document in read_corpus([path], separator, limit).documents]
