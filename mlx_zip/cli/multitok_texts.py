"""What `mlx_zip vocab multitok` reads and writes beside dictionaries: samples of texts, and their ids."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError

BATCH = 1 << 18  # units in memory, and what completes their last sample


@dataclass
class Texts:
    """Samples of files as sequences of words, or of a tokenizer's ids; they can be read several times, and must be the
    same each time.

    separator: a line that ends a sample within a .txt file. lines: whether each line is one.
    """

    files: Sequence[str]
    separator: str | None
    lines: bool
    tokenizer: Any = None
    _seen: bytes = b""  # digest of what was read the first time

    def __iter__(self) -> Iterator[Sequence[Any]]:
        """Every sample, in order. Raises `DataError` naming file and line, or files that are not what they were."""
        split: Callable[[str], Sequence[Any]] = ids_of(self.tokenizer) if self.tokenizer else str.split
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
        from mlx_zip.cli.actions import progress
        from mlx_zip.text.sources import Reader, Skipped, Source, files_of, is_local, parse

        source = Source(tuple(self.files), separator=self.separator)
        local = all(map(is_local, self.files))
        total = sum(Path(file).stat().st_size for name in self.files for file in files_of(name)) if local else None
        reader, digest = Reader(source), sha256()
        with progress("Reading", "B", total, unit_scale=True) as bar:
            for item in reader:
                record = parse(item)
                if isinstance(record, Skipped):
                    if not record.empty:
                        raise DataError(f"{record.where}: {record.reason}")
                elif record.text is None:
                    raise DataError(f"{record.where}: a conversation has no text of its own")
                else:
                    text = (record.prompt or "") + record.text
                    digest.update(b"%d " % len(text) + text.encode("utf-8"))
                    yield text, not record.continues
                bar.update(reader.stored - bar.n)
        if self._seen not in (b"", digest.digest()):
            raise self.changed()
        self._seen = digest.digest()

    def changed(self) -> DataError:
        """What to raise where another reading gave something else."""
        return DataError(f"{', '.join(self.files)}: changed while the command read it; run it again")

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
    from mlx_zip.text.tokenizers import load_tokenizer, tokenizer_folder
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint
    from mlx_zip.vocab.multitok import Tokens

    tokenizer = load_tokenizer(tokenizer_folder(name))
    return tokenizer, Tokens(1 + max(tokenizer.get_vocab().values()), tokenizer_fingerprint(tokenizer))


def ids_of(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """Text to ids, nothing added; quicker of a tokenizer that has the `tokenizers` library's."""
    if not getattr(tokenizer, "is_fast", False):
        return lambda text: tokenizer.encode(text, add_special_tokens=False)
    library = tokenizer.backend_tokenizer
    library.no_truncation()
    library.no_padding()
    return lambda text: library.encode(text, add_special_tokens=False).ids


def same_units(units: Any, args: argparse.Namespace) -> Any:
    """The tokenizer whose ids a dictionary is of, None for words. Raises `DataError` for another one."""
    from mlx_zip.vocab.multitok import Words

    if isinstance(units, Words) != (args.tokenizer is None):
        said = "words: leave --tokenizer out" if args.tokenizer else "a tokenizer's ids: name it with --tokenizer"
        raise DataError(f"{args.dictionary} was trained on {said}")
    tokenizer, own = tokens_of(args.tokenizer)
    if own is not None and not own.may_be(units):
        raise DataError(f"{args.dictionary} was trained on the ids of another tokenizer than {args.tokenizer}")
    return tokenizer


@contextlib.contextmanager
def written(path: Path | None) -> Iterator[Callable[[Any], None]]:
    """A function that writes samples of ids, a list a line, to a file that appears whole; or does nothing."""
    from mlx_zip.files import whole_file

    if path is None:
        yield lambda samples: None
        return
    try:
        with whole_file(path) as partial, open(partial, "w", encoding="ascii") as file:
            yield lambda samples: file.writelines(f"{json.dumps(ids)}\n" for ids in samples.lists())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
