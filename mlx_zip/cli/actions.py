"""Helpers of the commands, mainly of `mlx_zip vocab`: declare and print actions, name tokenizers, check output paths.

In `mlx_zip vocab` the action `learn` (`train` in multitok) writes a file; other actions take it as first argument.
--tokenizer names a tokenizer, --data and --held-out name texts, --json prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError, GenerationError
from mlx_zip.progress import ProgressBar

Action = tuple[Callable[[argparse.ArgumentParser], None], str, Callable[[argparse.Namespace], Any]]
TOKENIZER_HELP = (
    "model folder, bundled model, hub id, or a file (plain or .gz): tokenizer.json, NAME.tiktoken, NAME.model "
    "(SentencePiece), vocab.bpe, merges.txt or NAME.vocab.txt (BERT)"
)
DATA_HELP = (
    ".txt, .jsonl and source files such as .py (each also as .gz), .parquet files, folders of source files, and data "
    "sets by folder or hub name"
)


def add_actions(parser: argparse.ArgumentParser, actions: Mapping[str, Action], examples: str) -> None:
    """Declares a method's actions as subcommands.

    actions: name -> (function that declares the action's flags, purpose for --help, function that runs the action).
    examples: text at the end of each --help. Parsing sets `args.do` to the function that runs the action; what this
    function returns is for `print_action_result`.
    """
    parser.epilog, parser.formatter_class = examples, argparse.RawDescriptionHelpFormatter
    found = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (declare, purpose, do) in actions.items():
        action = found.add_parser(
            name,
            help=purpose,
            description=purpose[0].upper() + purpose[1:] + ".",
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        declare(action)
        action.set_defaults(do=do, action=name)


def print_action_result(args: argparse.Namespace, result: Any) -> int:
    """Prints the result of an action and returns the exit status.

    result: a record, or (a record, lines to print instead unless --json is given), or an exit status if the action
    printed its output.
    """
    if isinstance(result, int):
        return result
    record, lines = result if isinstance(result, tuple) else (result, format_record(result))
    if args.json:
        text = json.dumps(record, ensure_ascii=False)
        print(text.encode(errors="backslashreplace").decode())  # a path that is not UTF-8 has lone surrogates
    elif lines:
        print("\n".join(lines))
    return 0


def format_record(record: Mapping[str, Any]) -> list[str]:
    """Returns a record as lines: figures by name, then each record in it, then each list of records as a table.

    Values that are None are left out, and so are lists that are neither of records nor of texts. A mapping whose keys
    are numbers is one figure.
    """
    inner = {name: one for name, one in record.items() if isinstance(one, Mapping) and all(map(_is_text, one))}
    figures = {_in_words(name): _format_figure(one) for name, one in record.items() if name not in inner}
    width = max(map(len, figures), default=0)
    lines = [f"{name:{width}}  {figure}" for name, figure in figures.items() if figure]
    for name, one in inner.items():
        lines += ["", f"{_in_words(name)}:", *format_record(one)]
    for rows in record.values():
        if isinstance(rows, list) and rows and all(isinstance(row, Mapping) for row in rows):
            lines += ["", *_format_table(rows)]
    return lines


def _format_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns records with the same names as the lines of a table, the names first."""
    cells = [list(map(_in_words, rows[0])), *(list(map(_format_cell, row.values())) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=False)]
    return ["  ".join(map(str.rjust, row, widths)) for row in cells]


def _format_cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return repr(value) if isinstance(value, str) else _format_figure(value)


def _format_figure(value: Any) -> str:
    """Returns a number, a text, a list of texts or counts by number as it is shown, "" for anything else."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,.5g}" if isinstance(value, float) else f"{value:,}"
    texts = [f"{key}: {one}" for key, one in value.items()] if isinstance(value, Mapping) else value
    if isinstance(texts, list | tuple) and all(map(_is_text, texts)):
        texts = ", ".join(texts)
    return escape_unprintable(texts) if isinstance(texts, str) else ""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _in_words(name: Any) -> str:
    return escape_unprintable(str(name).replace("_", " "))


def add_json_flag(add: Any) -> None:
    """Declares --json."""
    add("--json", action="store_true", help="print the result as one JSON object instead of text (default: off)")


def add_tokenizer_flag(add: Any, purpose: str, end: str = "", required: bool = False) -> None:
    """Declares --tokenizer. purpose, end: texts around the list of formats in the help."""
    add("--tokenizer", required=required, metavar="NAME", help=f"{purpose}: {TOKENIZER_HELP}{end}")


def add_data_flag(add: Any, purpose: str, end: str = "", **options: Any) -> None:
    """Declares --data. purpose, end: texts around the list of formats in the help. options: for `add`."""
    add("--data", nargs="+", metavar="FILE", help=f"{purpose}: {DATA_HELP}{end}", **options)


def add_held_out_flag(add: Any, measured: str, metavar: str = "FILE") -> None:
    """Declares --held-out. measured: what the texts measure, for the help."""
    help_line = f"texts to measure the {measured} on; nothing is learned from them"
    add("--held-out", nargs="+", default=[], metavar=metavar, help=help_line)


def add_show_flag(add: Any, listed: str, default: int = 20) -> None:
    """Declares --show. listed: what is listed, for the help."""
    add("--show", type=int, default=default, metavar="N", help=f"number of {listed} (default: {default})")


def read_texts(
    files: Sequence[str],
    separator: str | None = None,
    limit_bytes: int | None = None,
    columns: Mapping[str, str] | None = None,
) -> list[str]:
    """Returns the texts in files, folders and data sets, [] for none; see `documents.read_corpus`."""
    from mlx_zip.text.documents import read_corpus

    corpus = read_corpus(files, separator, limit_bytes, columns) if files else None
    return [] if corpus is None else [document.text for document in corpus.documents]


def iterate_with_progress(task: str, texts: Sequence[str]) -> Iterator[str]:
    """Yields the texts and counts them in a progress bar. task: the bar's name."""
    with ProgressBar(len(texts), "text", task) as count:
        for text in texts:
            yield text
            count()


def read_standard_input() -> str:
    """Returns the text on standard input. Raises `GenerationError` if standard input is closed or not UTF-8."""
    if sys.stdin is None:
        raise GenerationError("standard input is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise GenerationError(f"standard input is not valid UTF-8 at byte {error.start}") from error


def checked_output_path(
    flag: str, name: str | Path, what: str = "", suffix: str = "", read: Iterable[str | Path | None] = ()
) -> Path:
    """Returns the path of a file that the command will write, after checks; leaves no file.

    flag: flag that gives `name`, for error messages. what: kind of file. suffix: suffix that the file must have, "" for
    any. read: other files that the command reads or writes. Raises `DataError` if the file cannot be written, has
    another suffix or is in `read`.
    """
    from mlx_zip.files import check_writable, expand_home

    path = expand_home(name)
    try:
        check_writable(path, what, suffix)
    except DataError as error:
        raise DataError(f"{flag} {error}") from error
    for other in read:
        if other is not None and os.path.realpath(expand_home(other)) == os.path.realpath(path):
            raise DataError(f"{flag} {path}: the same command reads or writes that file; name another one")
    return path


def escape_unprintable(text: str) -> str:
    """Returns the text with unprintable characters escaped, so that text from a file cannot control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
