"""What the methods of `mlx_zip vocab` have in common: actions, flags of one name for one thing, checks, bars.

`learn` (MultiTok's paper: `train`) makes a file, --out; the other actions take such a file first. --tokenizer names a
tokenizer, --data texts, --json asks for one JSON object.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError, GenerationError

Action = tuple[Callable[[argparse.ArgumentParser], None], str, Callable[[argparse.Namespace], Any]]
TOKENIZER = "model folder, tokenizer.json, bundled model or hub id"
FIRST_STAGE = "model folder, tokenizer.json, vocab.bpe or merges.txt, or NAME.tiktoken; files also with .gz"


def add_actions(
    parser: argparse.ArgumentParser,
    actions: Mapping[str, Action],
    examples: str,
    aliases: Mapping[str, Sequence[str]] = {},
) -> None:
    """Declares actions: by name, what declares flags, what it is for, and what does it, which `args.do` then is."""
    parser.epilog, parser.formatter_class = examples, argparse.RawDescriptionHelpFormatter
    found = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (declare, purpose, do) in actions.items():
        action = found.add_parser(
            name,
            aliases=aliases.get(name, ()),
            help=purpose,
            description=purpose[0].upper() + purpose[1:] + ".",
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        declare(action)
        action.set_defaults(do=do, action=name)


def add_json(add: Any) -> None:
    """Declares --json."""
    add("--json", action="store_true", help="print one JSON object")


def add_by_place(add: Any) -> None:
    """Takes what has no flag before it, for `settle`: calls were once written without these flags."""
    add("by_place", nargs="*", help=argparse.SUPPRESS)


def settle(args: argparse.Namespace, **flags: str) -> None:
    """Puts what was given by place where its flag would have put it; all of these flags are needed.

    flags: attribute -> how many places it may take, in their order: "one", "many" (all that are left) or "none".
    Raises `GenerationError` naming a flag that is missing, or what has no place.
    """
    placed = args.by_place
    for name, number in flags.items():
        if placed and number != "none" and getattr(args, name) is None:
            taken = len(placed) if number == "many" else 1
            setattr(args, name, placed if number == "many" else placed[0])
            placed = placed[taken:]
    if placed:
        raise GenerationError(f"{args.action} has no use for {' '.join(placed)}")
    if missing := [f"--{name.replace('_', '-')}" for name in flags if getattr(args, name) is None]:
        raise GenerationError(f"{args.action} needs {' and '.join(missing)}")


def writable(
    flag: str, name: str | Path, what: str = "", suffix: str = "", read: Iterable[str | Path | None] = ()
) -> Path:
    """The path of a file to write; read: files that the command reads, or writes besides, and must not replace.

    Raises `DataError` naming the flag where it cannot be written (see `files.check_out`), or is one of those.
    """
    from mlx_zip.files import check_out

    path = Path(name).expanduser()
    try:
        check_out(path, what, suffix)
    except DataError as error:
        raise DataError(f"{flag} {error}") from error
    for other in read:
        if other is not None and os.path.realpath(Path(other).expanduser()) == os.path.realpath(path):
            raise DataError(f"{flag} {path}: the same command reads or writes that file; name another one")
    return path


def printable(text: str) -> str:
    """A text that a file brought along, for a line of ours: it cannot steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def progress(task: str, unit: str, total: int | None = None, **options: Any) -> Any:
    """A bar on standard error, where that is a terminal; it leaves nothing behind."""
    from tqdm import tqdm

    return tqdm(total=total, desc=task, unit=unit, file=sys.stderr, disable=None, leave=False, **options)
