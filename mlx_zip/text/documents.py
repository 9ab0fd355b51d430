"""The texts an evaluation reads, as training does: documents of files and data sets, up to a limit in bytes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError
from mlx_zip.text.sources import Reader, Record, Skipped, Source, parse


@dataclass(frozen=True)
class Document:
    """text: not empty. source: the file and line it came from."""

    text: str
    source: str

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes."""
        return len(self.text.encode("utf-8"))


@dataclass(frozen=True)
class Corpus:
    """What is evaluated. empty: records without text, which were skipped. cut: whether the limit ended the reading."""

    files: tuple[str, ...]
    documents: tuple[Document, ...]
    empty: int
    cut: bool

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return sum(document.n_bytes for document in self.documents)

    def record(self) -> dict[str, Any]:
        """What a report says of it; sha256 over each document's bytes and a zero byte."""
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
    """The documents of text files, JSON lines and data sets; see `mlx_zip.text.sources.Source`.

    A record with a prompt and a completion is one text. separator: a line that ends a document of a text file.
    limit_bytes: stop after so many bytes of text; the last document is cut before the character that would exceed it.
    columns: what a record calls our keys, as in `Source`.
    Unlike in training a record that cannot be read is not skipped: raises `DataError` naming file and line, also for
    conversations, which have no text of their own.
    """
    if limit_bytes is not None and limit_bytes < 1:
        raise DataError(f"limit_bytes (--limit-bytes) must be at least 1, got {limit_bytes}")
    names = tuple(map(str, files))
    source = Source(names, separator=separator, columns=columns or {})
    documents: list[Document] = []
    empty, room, cut = 0, math.inf if limit_bytes is None else limit_bytes, False
    for document in _documents(source, room):
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
        raise DataError(f"{', '.join(names)}: no text to evaluate")
    return Corpus(names, tuple(documents), empty, cut)


def _documents(source: Source, enough: float) -> Iterator[Document]:
    """Records as documents, empty ones too; of one that comes in parts no more than just above `enough` bytes."""
    held, n_bytes = [], 0
    for item in Reader(source):
        record = parse(item, source.columns)
        held.append(_text(record))
        n_bytes += item.size
        if isinstance(record, Skipped) or not record.continues or n_bytes > enough:
            yield Document("".join(held), record.where)
            held, n_bytes = [], 0


def _text(record: Record | Skipped) -> str:
    if isinstance(record, Skipped):
        if record.empty:
            return ""
        raise DataError(f"{record.where}: {record.reason}")
    if record.text is None:
        raise DataError(f"{record.where}: a conversation has no text of its own; use its messages with --prompts")
    return (record.prompt or "") + record.text
