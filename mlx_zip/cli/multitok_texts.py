"""The texts that `mlx_zip vocab multitok` reads, the ids that it writes, and the rates that it reports."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from mlx_zip.cli.actions import TOKENIZER
from mlx_zip.errors import DataError

BATCH = 1 << 18  # a batch ends with the sample that brings it to so many units
DATA = ".txt, .jsonl or source files (or with .gz), .parquet files, folders or hub names of data sets"
TRAINED = {"samples": "samples", "units": "corpus_units", "tokens": "corpus_tokens", "ratio": "ratio"}


def add_text_flags(add: Any) -> None:
    """Declares the flags of `train` and `encode` that name texts and say what their units and samples are."""
    add(
        "--tokenizer",
        metavar="NAME",
        help=f"the units are this tokenizer's ids: {TOKENIZER} (default: words between blanks)",
    )
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help=f"texts: {DATA}; each record and each .txt file is a sample",
    )
    add("--separator", metavar="LINE", help="line that ends a sample within a .txt file")
    add("--lines", action="store_true", help="each line of a text is a sample")
    add("--window", type=int, metavar="N", help="maximum number of units in a phrase; 0: no maximum (default: 0)")
    add("--unk-id", type=int, metavar="ID", help="id of units that the dictionary does not have (default: an error)")


def texts_of(args: argparse.Namespace, files: Sequence[str], tokenizer: Any = None) -> Texts:
    """Returns the samples of files, cut as the flags say."""
    return Texts(files, args.separator, args.lines, tokenizer)


def rate(totals: Any) -> dict[str, Any]:
    """Returns a record of a `multitok.Totals`; ratio is tokens per unit."""
    return {"samples": totals.samples, "units": totals.units, "tokens": totals.tokens, "ratio": totals.ratio}


def rate_line(record: dict[str, Any]) -> str:
    """Returns the record of `rate` as text."""
    counts = f"{record['samples']} samples: {record['units']} units -> {record['tokens']} tokens"
    return f"{counts} ({record['ratio']:.3f} per unit)"


@dataclass
class Texts:
    """Samples of files as sequences of words or of a tokenizer's ids; iterating again reads the files again.

    separator: line that ends a sample within a .txt file. lines: whether each line is a sample.
    """

    files: Sequence[str]
    separator: str | None
    lines: bool
    tokenizer: Any = None
    _seen: bytes = b""  # digest of what was read the first time

    def __iter__(self) -> Iterator[Sequence[Any]]:
        """Yields every sample, in order. Raises `DataError` naming file and line, or files that have changed since."""
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
        """Yields parts of texts, and whether a text ends with the part; shows a progress bar."""
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
        """Returns the error to raise if a second reading differs from the first."""
        return DataError(f"{', '.join(self.files)}: changed while the command read it; run it again")

    def batches(self) -> Iterator[list[Sequence[Any]]]:
        """Yields samples in lists of about `BATCH` units."""
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
    """Returns the tokenizer of a name and its `Tokens`; (None, None) for None."""
    if name is None:
        return None, None
    from mlx_zip.text.tokenizers import load_tokenizer
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint
    from mlx_zip.vocab.multitok import Tokens

    tokenizer = load_tokenizer(name)
    return tokenizer, Tokens(1 + max(tokenizer.get_vocab().values()), tokenizer_fingerprint(tokenizer))


def ids_of(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """Returns a function from text to ids without special tokens; it uses the `tokenizers` library where it can."""
    if not getattr(tokenizer, "is_fast", False):
        return lambda text: tokenizer.encode(text, add_special_tokens=False)
    library = tokenizer.backend_tokenizer
    library.no_truncation()
    library.no_padding()
    return lambda text: library.encode(text, add_special_tokens=False).ids


def same_units(units: Any, args: argparse.Namespace) -> Any:
    """Returns --tokenizer, or None for a dictionary of words. Raises `DataError` if the dictionary has other units."""
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
    """Gives a function that writes samples of ids, one list per line, to a file that appears when all is written.

    Without a path the function does nothing.
    """
    from mlx_zip.files import whole_file

    if path is None:
        yield lambda samples: None
        return
    try:
        with whole_file(path) as partial, open(partial, "w", encoding="ascii") as file:
            yield lambda samples: file.writelines(f"{json.dumps(ids)}\n" for ids in samples.lists())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
