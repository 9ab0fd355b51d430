"""Windows of base ids, the units of scoring; every model of a comparison scores the same windows.

A model reads one unscored id before each window, bos, or eos if the tokenizer has no bos, so that every byte of the
text is predicted. Each window has a fresh codebook.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import DataError
from mlx_zip.text.documents import Document
from mlx_zip.text.token_facts import encode_with_bytes


@dataclass(frozen=True)
class Window:
    """A piece of text that is scored on its own.

    base_ids: uint32 [n]. scored: bool [n], False for an eos between documents. n_bytes: UTF-8 bytes of its text.
    """

    base_ids: Uint32s
    scored: NDArray[np.bool_]
    n_bytes: int


@dataclass(frozen=True)
class Windows:
    """All windows of some documents. prefix: the id that a model reads before each window.

    altered: number of documents whose base ids decode to another text.
    """

    windows: tuple[Window, ...]
    prefix: int
    altered: int

    def same_as(self, other: Windows) -> bool:
        """Returns whether two sets of windows hold the same text, cut in the same places."""
        return self.prefix == other.prefix and all_equal(self.windows, other.windows)


def all_equal(a: Sequence[Window], b: Sequence[Window]) -> bool:
    """Returns whether two lists of windows hold the same base ids."""
    return len(a) == len(b) and all(np.array_equal(x.base_ids, y.base_ids) for x, y in zip(a, b, strict=True))


def cut_windows(tokenizer: Any, documents: Sequence[Document], context: int, fill_windows: bool = False) -> Windows:
    """Encodes documents and cuts them into windows of at most `context` base ids.

    Each document begins a new window, unless `fill_windows`: then documents follow one another with an eos between two,
    and only the last window is shorter. The windows' bytes add up to the text's, even if a window ends inside a
    character. Raises `DataError`.
    """
    if context < 1:
        raise DataError(f"the context (--context) must be at least 1 base id, got {context}")
    streams = [_encoded(tokenizer, document) for document in documents]
    pairs = zip(documents, streams, strict=True)
    altered = sum(_decoded(tokenizer, stream[0]) != document.text for document, stream in pairs)
    streams = [_packed(tokenizer, streams)] if fill_windows else streams
    windows = tuple(window for stream in streams for window in _cut(*stream, context))
    return Windows(windows, prefix_id(tokenizer), altered)


def prefix_id(tokenizer: Any) -> int:
    """Returns the id that stands before a text: bos, else eos, else the model's own eos. Raises `DataError`."""
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id, min(tokenizer.eos_token_ids, default=None)):
        if token_id is not None:
            return int(token_id)
    raise DataError("the tokenizer has neither a bos nor an eos token, so the first id of a window has no context")


Stream = tuple[Uint32s, NDArray[np.bool_], NDArray[np.int64]]  # ids, scored, bytes per id


def _encoded(tokenizer: Any, document: Document) -> Stream:
    """Returns a document as base ids, all scored, with the bytes of each. Raises `DataError` if it gives no id."""
    ids, n_bytes = encode_with_bytes(tokenizer, document.text)
    if not len(ids):
        raise DataError(f"{document.source}: the tokenizer makes no token of its {document.n_bytes} bytes")
    return ids, np.ones(len(ids), np.bool_), n_bytes


def _packed(tokenizer: Any, streams: Sequence[Stream]) -> Stream:
    """Returns all documents as one stream, with an unscored eos between two. Raises `DataError`."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no eos token to stand between packed documents (--fill-windows)")
    eos = np.array([tokenizer.eos_token_id], np.uint32), np.zeros(1, np.bool_), np.zeros(1, np.int64)
    ids, scored, n_bytes = zip(*[part for stream in streams for part in (eos, stream)][1:], strict=True)
    return np.concatenate(ids), np.concatenate(scored), np.concatenate(n_bytes)


def _cut(ids: Uint32s, scored: NDArray[np.bool_], n_bytes: NDArray[np.int64], context: int) -> Iterator[Window]:
    """Yields a stream (see `Stream`) as windows of `context` base ids; the last one may be shorter."""
    for begin in range(0, len(ids), context):
        part = slice(begin, begin + context)
        yield Window(ids[part], scored[part], int(n_bytes[part].sum()))


def _decoded(tokenizer: Any, ids: Uint32s) -> str:
    """Returns the text of base ids, special tokens included."""
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
