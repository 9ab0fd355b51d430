"""Reads the stories that the models are trained on: lists the files, checks checksums, and splits files into stories.

Does not download anything. `SOURCES` describes each file well enough to find or remake it.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_zip.errors import DataError

SEPARATOR = "<|endofstory|>"
_SAMPLED = (
    "stories sampled one by one from the published 1.8 M-parameter TinyStories weights 'stories2M-relu' (MIT licence), "
    "duplicates removed, each ended by a line " + SEPARATOR
)
_REAL = (
    "part of the TinyStories corpus (Eldan and Li, CDLA-Sharing-1.0), paragraphs parted by an empty line and stories "
    "by a single newline"
)


@dataclass(frozen=True)
class Source:
    """One gzipped text file of stories.

    name: path in the data folder. sha256: SHA-256 of the gzipped file, in hex. origin: description of the content.
    """

    name: str
    sha256: str
    origin: str
    real: bool = False  # whether the file is part of TinyStories; else it was sampled for this recipe

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise DataError(f"{self.name}: {self.sha256!r} is not a sha256 in hex")

    def stories(self, folder: Path, check: bool = True) -> list[str]:
        """Reads this file in `folder` and returns its stories in order. check: refuse a file with another checksum.

        Raises `DataError`, naming the file, if it cannot be read, is refused or holds no story.
        """
        path = folder / self.name
        text = read_checked(path, self.sha256 if check else None)
        stories = split_tinystories(text) if self.real else split_sampled(text)
        if not stories:
            raise DataError(f"{path} holds no story")
        return stories


SOURCES = {
    "t1.train": Source(
        "synth_t1.train.txt.gz",
        "eeb4c0cc2f5cac43f97ab4e4bad7a03d6cc57b3eefbb6a5d084286907c6831b5",
        f"{_SAMPLED}; temperature 1, nothing cut off: the teacher's distribution itself; training part",
    ),
    "t1.test": Source(
        "synth_t1.test.txt.gz",
        "7b5b86f8ff65c53b299b798727a091b9cca37701d28ac180115e8a3301980b20",
        f"{_SAMPLED}; temperature 1; test part",
    ),
    "mixed.train": Source(
        "synth_mixed.train.txt.gz",
        "39053cf51fb966d0c75c736648e19d6b9f8b870e08a7a8b5525d15f3fb777ff1",
        f"{_SAMPLED}; temperature 0.8, 0.9 or 1, top-p 0.95: easier, less varied; training part",
    ),
    "real.train": Source(
        "tinystories.train.txt.gz",
        "6bc32a5a3c911c226718a83f3ec9dc18bbfa4e3cbfea7f37dad9c45368906683",
        f"{_REAL}; training part",
        real=True,
    ),
    "real.test": Source(
        "tinystories.test.txt.gz",
        "34f12555656cb7e4ab18e8037a62d3fc2dccd167724e93597d3e1cbaf4840ee2",
        f"{_REAL}; test part",
        real=True,
    ),
}


def read_stories(folder: Path, check: bool = True) -> dict[str, list[str]]:
    """Reads the files in `folder` and returns the stories of each source, by key of `SOURCES`.

    check: refuse files whose sha256 differs from the recorded one, because the recorded figures would not apply.
    Raises `DataError` if a file is missing, cannot be read or is refused.
    """
    require_files(folder)
    return {key: source.stories(folder, check) for key, source in SOURCES.items()}


def require_files(folder: Path) -> None:
    """Raises `DataError` unless all files of the recipe exist in `folder`."""
    missing = [source for source in SOURCES.values() if not (folder / source.name).is_file()]
    if missing:
        names = ", ".join(source.name for source in missing)
        raise DataError(f"{folder} lacks {names} (--data names the folder of the stories). {describe_sources(missing)}")


def describe_sources(sources: Sequence[Source] = tuple(SOURCES.values())) -> str:
    """Returns a sentence that lists the files that the recipe reads, with origin and checksum."""
    return "Needed: " + "; ".join(f"{s.name}: {s.origin} (sha256 {s.sha256})" for s in sources)


def read_checked(path: Path, sha256: str | None) -> str:
    """Returns the text of a gzipped UTF-8 file. sha256: required checksum of the file; None for any.

    Raises `DataError` if the checksum differs or the file cannot be read.
    """
    try:
        stored = path.read_bytes()
        found = hashlib.sha256(stored).hexdigest()
        if sha256 is not None and found != sha256:
            raise DataError(
                f"{path} is not the file of the recipe: sha256 {found}, recorded is {sha256} "
                "(--no-checksum accepts it; the recorded figures do not apply then)"
            )
        return gzip.decompress(stored).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def split_sampled(text: str) -> list[str]:
    """Splits a text at lines equal to `SEPARATOR`; strips newlines around stories and drops empty stories."""
    return _strip_and_drop_empty(re.split(rf"^{re.escape(SEPARATOR)}$", text, flags=re.MULTILINE))


def split_tinystories(text: str) -> list[str]:
    """Splits a file of TinyStories. A single newline ends a story; an empty line separates paragraphs and is kept."""
    return _strip_and_drop_empty(re.split(r"(?<!\n)\n(?!\n)", text))


def _strip_and_drop_empty(pieces: list[str]) -> list[str]:
    return [story for piece in pieces if (story := piece.strip("\n")).strip()]
