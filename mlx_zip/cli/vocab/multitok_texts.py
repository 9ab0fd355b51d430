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

from mlx_zip.cli.actions import TOKENIZER_HELP, add_data_flag
from mlx_zip.errors import DataError, errors_as
from mlx_zip.progress import ProgressBar, pluralize

BATCH = 1 << 18  # number of units at which a batch of samples is full
DICTIONARY = "dictionary, as written by `mlx_zip vocab multitok train`"
TRAINED = {"samples": "samples", "units": "corpus_units", "tokens": "corpus_tokens", "ratio": "ratio"}


def add_text_flags(add: Any, unk_id: str) -> None:
    """Declares the flags of `train` and `encode` that name texts and define their units and samples.

    unk_id: the default of --unk-id, for its help line.
    """
    add(
        "--tokenizer",
        metavar="NAME",
        help=f"tokenizer whose ids are the units: {TOKENIZER_HELP} (default: the units are words between blanks)",
    )
    add_data_flag(add, "texts to read", "; each record and each .txt file is one sample", required=True)
    add("--separator", metavar="LINE", help="line that ends a sample in a .txt file (default: a file is one sample)")
    add("--lines", action="store_true", help="take each line of a text as one sample (default: off)")
    add("--window", type=int, metavar="N", help="maximum number of units in a phrase; 0: no maximum (default: 0)")
    add(
        "--unk-id",
        type=int,
        metavar="ID",
        help=f"id that stands for every unit that the dictionary does not have (default: {unk_id})",
    )


def make_sample_texts(args: argparse.Namespace, files: Sequence[str], tokenizer: Any = None) -> Texts:
    """Returns the samples in `files`, split as --separator and --lines say. tokenizer: None for samples of words."""
    return Texts(files, args.separator, args.lines, tokenizer)


def tokens_per_unit_record(totals: Any) -> dict[str, Any]:
    """Returns the counts of a `multitok.Totals` as a record; `ratio` is tokens divided by units."""
    return {"samples": totals.samples, "units": totals.units, "tokens": totals.tokens, "ratio": totals.ratio}


def format_tokens_per_unit(record: dict[str, Any]) -> str:
    """Returns one line of text with the counts of `record`, which is from `tokens_per_unit_record`."""
    names = ("sample", "unit", "token")
    samples, units, tokens = (pluralize(record[f"{name}s"], name) for name in names)
    return f"{samples}: {units} -> {tokens} ({record['ratio']:.3f} per unit)"


@dataclass
class Texts:
    """The samples in files, as sequences of words or of a tokenizer's ids; each iteration reads the files again.

    separator: line that ends a sample in a .txt file; None: a file is one sample. lines: whether each line is one
    sample. tokenizer: tokenizer that encodes the samples, None for words.
    """

    files: Sequence[str]
    separator: str | None
    lines: bool
    tokenizer: Any = None
    _seen: bytes = b""  # digest of the texts at the first reading

    def __iter__(self) -> Iterator[Sequence[Any]]:
        """Yields every sample, in order. Raises `DataError` if a record is invalid or the files have changed."""
        split: Callable[[str], Sequence[Any]] = make_text_encoder(self.tokenizer) if self.tokenizer else str.split
        parts: list[str] = []
        for text, ends in self._documents():
            if self.lines:
                yield from (split(line) for line in text.splitlines() if line.strip())
                continue
            parts.append(text)
            if ends:
                yield split("".join(parts))
                parts = []

    def _documents(self) -> Iterator[tuple[str, bool]]:
        """Yields (part of a document, whether the document ends with this part); shows a progress bar."""
        from mlx_zip.text.sources import Skipped, Source, SourceReader, is_read_from_files, parse_item, source_files

        source = Source(tuple(self.files), separator=self.separator)
        local = all(map(is_read_from_files, self.files))
        total = sum(Path(file).stat().st_size for name in self.files for file in source_files(name)) if local else None
        reader, digest = SourceReader(source), sha256()
        with ProgressBar(total, "byte", "Reading") as count:
            for item in reader:
                record = parse_item(item)
                if isinstance(record, Skipped):
                    if not record.empty:
                        raise DataError(f"{record.where}: {record.reason}")
                elif record.text is None:
                    raise DataError(f"{record.where}: a conversation has no text of its own")
                else:
                    text = (record.prompt or "") + record.text
                    digest.update(b"%d " % len(text) + text.encode("utf-8"))
                    yield text, not record.continues
                count.set_done(reader.stored)
        if self._seen not in (b"", digest.digest()):
            raise self.changed_texts_error()
        self._seen = digest.digest()

    def changed_texts_error(self) -> DataError:
        """Returns the error to raise if a second reading differs from the first."""
        return DataError(f"{', '.join(self.files)}: changed while the command read it; run it again")

    def batches(self) -> Iterator[list[Sequence[Any]]]:
        """Yields samples in lists of about `BATCH` units."""
        batch, size = [], 0
        for sample in self:
            batch.append(sample)
            size += len(sample)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


def read_tokenizer_units(name: str | None) -> tuple[Any, Any]:
    """Returns the tokenizer `name` and its ids as units; (None, None) if `name` is None, so that units are words."""
    if name is None:
        return None, None
    from mlx_zip.text.tokenizers import load_tokenizer
    from mlx_zip.vocab.first_stage import tokenizer_fingerprint
    from mlx_zip.vocab.multitok import Tokens

    tokenizer = load_tokenizer(name)
    return tokenizer, Tokens(1 + max(tokenizer.get_vocab().values()), tokenizer_fingerprint(tokenizer))


def make_text_encoder(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """Returns a function from text to the tokenizer's ids, without special tokens.

    A fast tokenizer is called through the `tokenizers` library; its truncation and padding are switched off.
    """
    if not getattr(tokenizer, "is_fast", False):
        return lambda text: tokenizer.encode(text, add_special_tokens=False)
    library = tokenizer.backend_tokenizer
    library.no_truncation()
    library.no_padding()
    return lambda text: library.encode(text, add_special_tokens=False).ids


def read_dictionary_tokenizer(units: Any, args: argparse.Namespace) -> Any:
    """Returns the tokenizer of --tokenizer, None for a dictionary over words. units: units of the dictionary.

    Raises `DataError` if the dictionary was trained on another tokenizer's ids, or on ids and --tokenizer is missing,
    or on words and --tokenizer is given.
    """
    from mlx_zip.vocab.multitok import Words

    if isinstance(units, Words) != (args.tokenizer is None):
        said = "words: leave --tokenizer out" if args.tokenizer else "a tokenizer's ids: name it with --tokenizer"
        raise DataError(f"{args.dictionary} was trained on {said}")
    tokenizer, own = read_tokenizer_units(args.tokenizer)
    if own is not None and not own.may_equal(units):
        raise DataError(f"{args.dictionary} was trained on the ids of another tokenizer than {args.tokenizer}")
    return tokenizer


@contextlib.contextmanager
def ids_writer(path: Path | None) -> Iterator[Callable[[Any], None]]:
    """Context manager: yields a function that writes samples of ids to `path`, one JSON list per line.

    The file is created when the block ends without an error. If `path` is None, the function does nothing.
    """
    from mlx_zip.files import atomic_file

    if path is None:
        yield lambda samples: None
        return
    with (
        errors_as(DataError, str(path), OSError),
        atomic_file(path) as partial,
        open(partial, "w", encoding="ascii") as file,
    ):
        yield lambda samples: file.writelines(f"{json.dumps(ids)}\n" for ids in samples.to_lists())
