"""What `mlx_zip vocab multitok` reads and writes beside dictionaries: samples of texts, and their ids."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError

BATCH = 1 << 18  # units in memory, and what completes their last sample


@dataclass
class Texts:
    """Samples of files as sequences of words, or of a tokenizer's ids; they can be read several times.

    separator: a line that ends a sample within a .txt file. lines: whether each line is one.
    """

    files: Sequence[str]
    separator: str | None
    lines: bool
    tokenizer: Any = None

    def __iter__(self) -> Iterator[Sequence[Any]]:
        """Every sample, in order. Raises `DataError` naming file and line."""
        split: Callable[[str], Sequence[Any]] = self.tokenizer.encode if self.tokenizer else str.split
        held: list[str] = []
        for text, over in self._documents():
            if self.lines:
                yield from (split(line) for line in text.splitlines() if line.strip())
                continue
            held.append(text)
            if over:
                yield split("".join(held))
                held = []

    def _documents(self) -> Iterator[tuple[str, bool]]:
        """Texts, and whether each ends there; one bar per reading."""
        from tqdm import tqdm

        from mlx_zip.training.sources import Reader, Skipped, Source, kind_of, parse

        source = Source(tuple(self.files), separator=self.separator)
        local = all(kind_of(name) != "data set" for name in self.files)
        total = sum(Path(name).stat().st_size for name in self.files) if local else None
        reader = Reader(source)
        bar = tqdm(total=total, unit="B", unit_scale=True, desc="Reading", file=sys.stderr, disable=None, leave=False)
        with bar:
            for item in reader:
                record = parse(item)
                if isinstance(record, Skipped):
                    if not record.empty:
                        raise DataError(f"{record.where}: {record.reason}")
                elif record.text is None:
                    raise DataError(f"{record.where}: a conversation has no text of its own")
                else:
                    yield (record.prompt or "") + record.text, not record.continues
                bar.update(reader.stored - bar.n)

    def batches(self) -> Iterator[list[Sequence[Any]]]:
        """Samples by the batch."""
        held, size = [], 0
        for sample in self:
            held.append(sample)
            size += len(sample)
            if size >= BATCH:
                yield held
                held, size = [], 0
        if held:
            yield held


def tokens_of(name: str | None) -> tuple[Any, Any]:
    """The tokenizer and its `Tokens`, or None twice."""
    if name is None:
        return None, None
    from mlx_zip.bundled import here_or_bundled
    from mlx_zip.cli.compression import read_vocabulary
    from mlx_zip.vocab.multitok import Tokens

    vocabulary = read_vocabulary(str(here_or_bundled(name)))
    return vocabulary, Tokens(vocabulary.size, fingerprint(vocabulary))


def fingerprint(vocabulary: Any) -> str:
    """Digest of what each id of a tokenizer stands for: hex SHA-256 over its texts, and the ids of a probe text.

    The probe tells apart what alone is no text: bytes of longer characters.
    """
    texts = [vocabulary.decode([i]) for i in range(vocabulary.size)]
    probe = list(vocabulary.encode(" ".join(map(chr, (*range(33, 0x600), *range(0x4E00, 0x5000), 0x1F600)))))
    return hashlib.sha256(json.dumps([texts, probe]).encode()).hexdigest()


def same_units(units: Any, args: argparse.Namespace) -> Any:
    """The tokenizer whose ids a dictionary is of, None for words. Raises `DataError` for another one."""
    from mlx_zip.vocab.multitok import Words

    if isinstance(units, Words) != (args.tokenizer is None):
        said = "words: leave --tokenizer out" if args.tokenizer else "a tokenizer's ids: name it with --tokenizer"
        raise DataError(f"{args.dictionary} was trained on {said}")
    tokenizer, own = tokens_of(args.tokenizer)
    if own is not None and own != units:
        raise DataError(f"{args.dictionary} was trained on the ids of another tokenizer than {args.tokenizer}")
    return tokenizer


def check_writable(path: str | None, flag: str = "") -> None:
    """Raises `DataError` where no file can be written: a folder, or no such folder. Told before the work, not after."""
    if path is None:
        return
    name, folder = f"{flag} {path}".strip(), Path(path).absolute().parent
    if not folder.is_dir():
        raise DataError(f"{name}: there is no folder {folder}")
    if Path(path).is_dir():
        raise DataError(f"{name} is a folder, not a file")
    if not os.access(folder, os.W_OK):
        raise DataError(f"{name}: nothing can be written to {folder}")


@contextlib.contextmanager
def written(path: str | None) -> Iterator[Callable[[Any], None]]:
    """A function that writes samples of ids, a list a line, to a file that appears whole; or does nothing."""
    from mlx_zip.files import whole_file

    if path is None:
        yield lambda samples: None
        return
    try:
        with whole_file(Path(path)) as partial, open(partial, "w", encoding="ascii") as file:
            yield lambda samples: file.writelines(f"{json.dumps(ids)}\n" for ids in samples.lists())
    except OSError as error:
        raise DataError(f"--encoded {path}: {error.strerror or error}") from error
