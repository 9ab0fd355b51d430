"""Documents for evaluation, read from files and data sets up to a limit in bytes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError
from mlx_zip.text.sources import Record, Skipped, Source, SourceReader, parse_item


@dataclass(frozen=True)
class Document:
    """One text that is not empty. source: file and line of the text."""

    text: str
    source: str

    @property
    def n_bytes(self) -> int:
        """Length of the text in UTF-8 bytes."""
        return len(self.text.encode("utf-8"))


@dataclass(frozen=True)
class Corpus:
    """The documents of an evaluation. empty: number of records without text, which were skipped.

    cut: whether reading ended at the limit in bytes.
    """

    files: tuple[str, ...]
    documents: tuple[Document, ...]
    empty: int
    cut: bool

    @property
    def n_bytes(self) -> int:
        """Length of all documents together in UTF-8 bytes."""
        return sum(document.n_bytes for document in self.documents)

    def record(self) -> dict[str, Any]:
        """Returns facts for a report, by name. sha256: hash of all documents, each followed by a zero byte."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(document.text.encode("utf-8") + b"\0")
        return {
            "files": list(self.files),
            "documents": len(self.documents),
            "empty_documents": self.empty,
            "cut_by_limit": self.cut,
            "bytes": self.n_bytes,
            "sha256": digest.hexdigest(),
        }


def read_corpus(
    files: Sequence[str | Path],
    separator: str | None = None,
    limit_bytes: int | None = None,
    columns: Mapping[str, str] | None = None,
) -> Corpus:
    """Reads the documents of text files, JSON lines and data sets; see `mlx_zip.text.sources.Source`.

    Prompt and completion of a record are joined to one text. separator: line that ends a document in a text file, None
    if each file is one document. limit_bytes: maximum bytes of text, None for all; the last document is cut after the
    last whole character that fits. columns: see `Source`.

    Raises `DataError`, naming file and line, if a record is invalid (training would skip it) or a conversation.
    """
    if limit_bytes is not None and limit_bytes < 1:
        raise DataError(f"limit_bytes (--limit-bytes) must be at least 1, got {limit_bytes}")
    names = tuple(map(str, files))
    source = Source(names, separator=separator, columns=columns or {})
    documents: list[Document] = []
    empty, room, cut = 0, math.inf if limit_bytes is None else limit_bytes, False
    for document in _iterate_documents(source, room):
        if not document.text:
            empty += 1
        elif document.n_bytes <= room:
            documents.append(document)
            room -= document.n_bytes
        else:
            kept = document.text.encode("utf-8")[: int(room)].decode("utf-8", "ignore")
            documents += [Document(kept, document.source)] if kept else []
            cut = True
            break
    if not documents:
        raise DataError(f"{', '.join(names)}: no text to read")
    return Corpus(names, tuple(documents), empty, cut)


def _iterate_documents(source: Source, enough: float) -> Iterator[Document]:
    """Yields each record as a document, with empty text if it has none.

    enough: number of bytes after which a document that is read in parts is yielded early, without its later parts.
    """
    parts, n_bytes = [], 0
    for item in SourceReader(source):
        record = parse_item(item, source.columns)
        parts.append(_text_or_raise(record))
        n_bytes += item.size
        if isinstance(record, Skipped) or not record.continues or n_bytes > enough:
            yield Document("".join(parts), record.where)
            parts, n_bytes = [], 0


def _text_or_raise(record: Record | Skipped) -> str:
    if isinstance(record, Skipped):
        if record.empty:
            return ""
        raise DataError(f"{record.where}: {record.reason}")
    if record.text is None:
        raise DataError(
            f"{record.where}: a conversation has no text of its own: only evaluate --prompts reads its messages"
        )
    return (record.prompt or "") + record.text
