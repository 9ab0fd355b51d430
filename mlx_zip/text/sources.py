"""Reads records from files and data sets in order, each with its place (file and line) for messages.

Reading has two halves, so that the costly half can run in other processes: `SourceReader` splits sources into items
without parsing; `parse_item` turns an item into a record, or returns the reason why the item is skipped.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mlx_zip.errors import DataError, failure_reason
from mlx_zip.files import check_regular_file
from mlx_zip.text import hub

TEXT, JSONL = (".txt", ".text", ".md", ".rst"), (".jsonl", ".ndjson")
CODE = (
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".m", ".mm", ".metal", ".cu", ".cuh", ".rs", ".go"),
    *(".java", ".kt", ".scala", ".swift", ".js", ".jsx", ".mjs", ".ts", ".tsx", ".rb", ".php", ".pl", ".lua", ".r"),
    *(".jl", ".hs", ".ml", ".ex", ".exs", ".erl", ".clj", ".cs", ".fs", ".dart", ".zig", ".nim", ".sql", ".sh"),
)
DATA = (*JSONL, ".csv", ".tsv", ".arrow", hub.PARQUET)  # endings of the files in a data set's folder
KEYS = ("text", "messages", "prompt", "completion", "tools")
LONGEST = 1 << 22  # bytes after which a document is cut at the next line into separately tokenized items
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Source:
    """Files and data sets that are read one after the other, as one stream of records.

    data: .txt, .jsonl and source-code files, each also with .gz; .parquet files; folders of source-code files; folders
    and hub names of data sets. share: weight of this source in a mixture. separator: line that ends a document in a
    .txt file, None if each file is one document. columns: key in `KEYS` -> name of the column in the records. subsets,
    split, revision: of a data set; several subsets are read in turn, one row from each. Raises `DataError` if a value
    is invalid.
    """

    data: tuple[str, ...]
    share: float = 1.0
    separator: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    subsets: tuple[str, ...] = ()
    split: str = "train"
    revision: str | None = None

    def __post_init__(self) -> None:
        if not self.data or not all(isinstance(name, str) and name for name in self.data):
            raise DataError(f"a source names no data: {self.data!r}")
        share = self.share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= sys.float_info.max:
            raise DataError(f"{self.data[0]}: share must be a number above 0, got {share!r}")
        separator = self.separator
        if separator is not None and (not isinstance(separator, str) or not separator or "\n" in separator):
            raise DataError(f"separator {separator!r} must be one line of text")
        for name in ("split", "revision"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise DataError(f"{name} must be a name, got {value!r}")
        if unknown := sorted(map(str, self.columns.keys() - set(KEYS))):
            raise DataError(f"columns: {', '.join(unknown)} is none of {', '.join(KEYS)}")
        if wrong := [name for name in self.columns.values() if not isinstance(name, str)]:
            raise DataError(f"columns: {wrong[0]!r} is no name of a column")

    def check(self) -> None:
        """Raises `DataError` if a file is missing or of a kind that cannot be read."""
        for name in self.data:
            source_kind(name)


@dataclass(frozen=True)
class Item:
    """One record as it was read, not yet parsed. where: file and line, or data set and row, of the record.

    kind: what `raw` holds: "text" (UTF-8 bytes), "json" (the bytes of a line) or "row" (a mapping). continues: whether
    the next item belongs to the same document.
    """

    where: str
    kind: str
    raw: Any
    continues: bool = False

    @property
    def size(self) -> int:
        """Approximate number of bytes of the record's text."""
        return sum(len(str(v)) for v in self.raw.values()) if self.kind == "row" else len(self.raw)


@dataclass(frozen=True)
class Record:
    """One document or conversation: either `messages`, or `text`.

    where, continues: see `Item`. prompt: text before `text` that a model reads but is not trained to write. tools:
    the conversation's tools for the chat template.
    """

    where: str
    text: str | None = None
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    tools: Any = None
    continues: bool = False


@dataclass(frozen=True)
class Skipped:
    """An item that is skipped, and the reason. empty: whether the item has no text, which is not an error."""

    where: str
    reason: str
    empty: bool = False


class SourceReader:
    """Iterates over the items of a source, in order. Raises `DataError` if a file or data set cannot be read."""

    def __init__(self, source: Source) -> None:
        source.check()
        self.source, self._finished_bytes = source, 0
        self._file: BinaryIO | None = None

    @property
    def stored(self) -> int:
        """Number of bytes read from files so far, compressed bytes for compressed files."""
        return self._finished_bytes + (self._file.tell() if self._file is not None else 0)

    def __iter__(self) -> Iterator[Item]:
        for name in self.source.data:
            if source_kind(name) == "data set":
                rows = hub.iterate_dataset_rows(name, self.source.subsets, self.source.split, self.source.revision)
                yield from (Item(where, "row", row) for where, row in rows)
            elif source_kind(name) == "json":
                lines = enumerate(self._read_lines(name), start=1)
                yield from (Item(f"{name}:{n}", "json", line) for n, line in lines if line.strip())
            else:
                for file in source_files(name):
                    yield from _split_documents(file, self._read_lines(file), self.source.separator)

    def _read_lines(self, name: str) -> Iterator[bytes]:
        """Yields the lines of a file, compressed or not, with their newlines and without a byte-order mark."""
        try:
            with open(name, "rb") as file:
                self._file = file
                lines: Any = gzip.GzipFile(fileobj=file) if name.endswith(".gz") else file
                for n, line in enumerate(lines):
                    yield line.removeprefix(_BOM) if n == 0 else line
                self._finished_bytes += file.tell()
                self._file = None
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        finally:
            self._file = None


def _split_documents(name: str, lines: Iterator[bytes], separator: str | None) -> Iterator[Item]:
    """Yields the documents of a text file as items; a document longer than `LONGEST` bytes is yielded in parts.

    name: the file's name, for `Item.where`. separator: line between two documents, None if the file is one document.
    Neither the separator nor the newlines around the separator belong to a document.
    """
    end = None if separator is None else separator.encode("utf-8")
    pending: list[bytes] = []  # lines of the incomplete item, which begins at line `first`
    size, first = 0, 1
    for n, line in enumerate(lines, start=1):
        if end is not None and line.rstrip(b"\r\n") == end:
            yield Item(f"{name}:{first}", "text", b"".join(pending).strip(b"\r\n"))
            pending, size, first = [], 0, n + 1
            continue
        if size >= LONGEST:
            yield Item(f"{name}:{first}", "text", b"".join(pending), continues=True)
            pending, size, first = [], 0, n
        pending.append(line)
        size += len(line)
    rest = b"".join(pending)
    if end is None or rest.strip():
        yield Item(f"{name}:{first}", "text", rest if end is None else rest.strip(b"\r\n"))


def source_kind(name: str) -> str:
    """Returns how a file, folder or data set is read: "text", "json", "folder" or "data set".

    "folder": a folder of source code (`CODE`) without records of a data set; each code or text file is a document.
    Raises `DataError` if a file is missing or `name` cannot be any of these.
    """
    plain = name.removesuffix(".gz")
    path = Path(name)
    if path.is_dir():
        return "folder" if _holds_only_code(_visible_files(path)) else "data set"
    check_regular_file(path)
    if plain.endswith(TEXT + CODE + JSONL):
        if not path.is_file():
            raise DataError(f"{name}: no such file")
        return "json" if plain.endswith(JSONL) else "text"
    if path.is_file() and name.endswith(hub.PARQUET):
        return "data set"
    if path.exists():
        kinds = ", ".join(TEXT[:1] + JSONL[:1] + CODE[:1])
        raise DataError(
            f"{name}: a data file is named {kinds} or another source file's suffix (or with .gz) or .parquet"
        )
    if name.endswith(hub.PARQUET) or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise DataError(f"{name}: no such file or folder, and no name of a data set of the form owner/name")
    return "data set"


def source_files(name: str) -> list[str]:
    """Returns the files that are read for `name`, in order; for a data set, [] or the .parquet file `name`.

    Raises `DataError` as `source_kind` does.
    """
    kind = source_kind(name)
    if kind == "folder":
        files = [file for file in _visible_files(Path(name)) if file.endswith(TEXT + CODE)]
        for file in files:
            check_regular_file(Path(file))
        return files
    return [name] if kind != "data set" or Path(name).is_file() else []


def is_read_from_files(name: str) -> bool:
    """Returns whether `name` is read from files, so that the size is known, and not from a data set."""
    return source_kind(name) != "data set"


def _holds_only_code(files: list[str]) -> bool:
    return any(file.endswith(CODE) for file in files) and not any(map(_holds_records, files))


def _holds_records(file: str) -> bool:
    """Guesses whether a file holds records of a data set, from its name, or for .json from the first bytes."""
    plain = file.removesuffix(".gz")
    if plain.endswith((*DATA, "/dataset_dict.json", "/dataset_info.json")):
        return True
    if not plain.endswith(".json"):
        return False
    try:
        with gzip.open(file) if file.endswith(".gz") else open(file, "rb") as stream:
            begin = stream.read(1 << 16).removeprefix(_BOM).split()
    except (OSError, EOFError, zlib.error):
        return False
    return b"".join(begin[:2]).startswith(b"[{")


def _visible_files(folder: Path) -> list[str]:
    """Returns the sorted files in a folder and its subfolders, without hidden files and folders and __NAME folders."""
    found: list[str] = []
    for root, folders, files in os.walk(folder):
        folders[:] = [one for one in folders if not one.startswith((".", "__"))]
        found += [os.path.join(root, one) for one in files if not one.startswith(".")]
    return sorted(found)


def parse_item(item: Item, columns: Mapping[str, str] | None = None) -> Record | Skipped:
    """Returns the record in an item, or `Skipped` with the reason. columns: see `Source`."""
    try:
        if item.kind == "text":
            return _record_from_text(item, item.raw.decode("utf-8"))
        fields = item.raw if item.kind == "row" else json.loads(item.raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Skipped(item.where, f"not valid UTF-8 at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return Skipped(item.where, f"not valid JSON: {failure_reason(error)}")
    if not isinstance(fields, Mapping):
        return Skipped(item.where, f"not a JSON object but {type(fields).__name__}")
    return _record_from_fields(item, {key: fields.get((columns or {}).get(key, key)) for key in KEYS}, columns or {})


def _record_from_fields(item: Item, fields: dict[str, Any], columns: Mapping[str, str]) -> Record | Skipped:
    if fields["messages"] is not None:
        return _record_from_messages(item, fields["messages"], fields["tools"])
    if fields["prompt"] is not None and fields["completion"] is not None:
        if not isinstance(fields["prompt"], str):
            return Skipped(item.where, f"prompt is {type(fields['prompt']).__name__}, not text")
        return _record_from_text(item, fields["completion"], fields["prompt"])
    if fields["text"] is None:
        text, messages, prompt, completion = (columns.get(key, key) for key in KEYS[:4])
        return Skipped(item.where, f"has neither {text} nor {messages} nor {prompt} and {completion}")
    return _record_from_text(item, fields["text"])


def _record_from_text(item: Item, text: Any, prompt: str | None = None) -> Record | Skipped:
    if not isinstance(text, str):
        return Skipped(item.where, f"{'text' if prompt is None else 'completion'} is {type(text).__name__}, not text")
    if not text.strip() and not item.continues:
        return Skipped(item.where, "no text", empty=True)
    if reason := _invalid_unicode_reason((prompt or "") + text):
        return Skipped(item.where, reason)
    return Record(item.where, text, prompt, continues=item.continues)


def _record_from_messages(item: Item, messages: Any, tools: Any) -> Record | Skipped:
    if not isinstance(messages, list):
        return Skipped(item.where, f"messages is {type(messages).__name__}, not a list")
    for k, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return Skipped(item.where, f"message {k} is no object with a role")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            return Skipped(item.where, f"content of message {k} is {type(content).__name__}, not text")
        if reason := _invalid_unicode_reason(content or ""):
            return Skipped(item.where, reason)
    if not any((message.get("content") or "").strip() for message in messages):
        return Skipped(item.where, "no text", empty=True)
    kept = tuple({key: value for key, value in message.items() if value is not None} for message in messages)
    return Record(item.where, messages=kept, tools=tools or None)


def _invalid_unicode_reason(text: str) -> str | None:
    """Returns the reason why a text is not valid Unicode, None if it is valid.

    JSON can contain half of a surrogate pair, which UTF-8 cannot encode.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"not valid Unicode at character {error.start}"
    return None
