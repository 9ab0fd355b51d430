"""Writes every generated table and picture of the documentation: `python -m mlx_zip.bench.pages [--check]`.

A page is Markdown with tables between `<!-- table: NAME -->` and `<!-- end -->`; only the text between these markers is
replaced. Tables come from the records (`records.py`) and from the command line's parsers, which are imported only when
a table needs them. The tables and pictures of papers are found in every `bench/papers/PAPER/*tables.py`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_zip.errors import MlxZipError

from .plots import render_figure
from .recording import add_record_flag
from .records import Records, explain_wrong_fields, table, write_whole
from .tables import drafts, nvidia, performance, smollm2

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "bench/**/*.md", "recipes/**/*.md", "mlx_zip/bundle/**/*.md")
DIFFERS = 1  # exit status of --check if a page or picture would change
# start or end marker of a table, on its own line
_MARK = re.compile(r"^<!-- (?:table: ([^\n]+?)|end) -->(?=\r?$)", re.MULTILINE)
_VERSION = re.compile(rb"Matplotlib v[\d.]+")  # in an SVG's metadata

Tables = dict[str, Callable[[Records], str]]
Pictures = dict[str, "Callable[[Records], Figure]"]


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the pages and pictures, or with --check only reports which differ; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_zip.bench.pages", description="Writes all tables and pictures."
    )
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--root", type=Path, default=here, metavar="DIR", help="checkout to write (default: this one)")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 where something would change"
    )
    args = parser.parse_args(argv)
    try:
        changed = [path for path, data in render_all(args.root) if update_file(path, data, args.check)]
    except MlxZipError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return DIFFERS if args.check and changed else 0


def update_file(path: Path, data: bytes, only_check: bool) -> bool:
    """Returns whether a file differs from `data`. If so, prints the file's name and, unless `only_check`, writes it."""
    old = path.read_bytes() if path.exists() else b""
    if old == data:
        return False
    if path.suffix == ".svg" and only_check and _VERSION.findall(old) != _VERSION.findall(data):
        print(f"{path}: drawn by another version of matplotlib, not compared", file=sys.stderr)
        return False
    if not only_check:
        write_whole(path, data)
    print(f"{path}: {'would change' if only_check else 'written'}", file=sys.stderr)
    return True


def render_all(root: Path) -> list[tuple[Path, bytes]]:
    """Returns every page and picture of a checkout with the bytes it should have; writes nothing.

    Raises `MlxZipError` if a page, marker or record cannot be used, or if no page shows one of the tables.
    """
    records, (tables, pictures) = Records(root), registered_tables_and_pictures()
    pages = {path: read_page(path) for path in pages_of(root)}
    shown = {name for text in pages.values() for name in table_names(text)}
    found = [(path, render_page(path, text, tables, records).encode()) for path, text in pages.items()]
    if missing := tables.keys() - shown:
        raise MlxZipError(f"no page shows the tables {', '.join(sorted(missing))}")
    return found + [
        (root / name, render_figure(make_or_explain(name, make, records), Path(name).suffix))
        for name, make in pictures.items()
    ]


def pages_of(root: Path) -> list[Path]:
    """Returns the pages of a checkout. Raises `MlxZipError` if `root` is not a checkout."""
    if not (root / "bench/records").is_dir():
        raise MlxZipError(f"{root} is no checkout of mlx_zip: it has no bench/records")
    return sorted({path for pattern in PAGES for path in root.glob(pattern)})


def table_names(text: str) -> list[str]:
    return [name for name in _MARK.findall(text) if name]


def registered_tables_and_pictures() -> tuple[Tables, Pictures]:
    """Returns all tables and pictures by name; in a checkout, those of the papers too.

    Raises `MlxZipError` if a name is used twice.
    """
    tables: Tables = {}
    pictures: Pictures = {}
    for module in (performance, nvidia, smollm2, drafts, *paper_table_modules()):
        for known, new in ((tables, module.TABLES), (pictures, module.PICTURES)):
            if twice := known.keys() & new.keys():
                raise MlxZipError(f"{module.__name__}: the name {min(twice)} is registered twice")
            known |= new
    return tables, pictures


def paper_table_modules() -> Iterator[Any]:
    for file in sorted((Path(__file__).parent / "papers").glob("*/*tables.py")):
        yield import_module(f"mlx_zip.bench.papers.{file.parent.name}.{file.stem}")


def render_page(path: Path, text: str, tables: Tables, records: Records) -> str:
    """Returns a page with every table rebuilt. Raises `MlxZipError` if a table is unknown or a marker is unpaired."""
    out, at, opened = [], 0, None
    for mark in _MARK.finditer(text):
        if (mark[1] is None) == (opened is None):
            raise unpaired_marker_error(path)
        if opened is None:
            out.append(text[at : mark.end()])
            at, opened = mark.end(), mark[1]
        else:
            section = f"\n\n{render_table(path, opened, tables, records)}\n\n"
            out.append(section.replace("\n", "\r\n") if "\r\n" in text else section)
            at, opened = mark.start(), None
    if opened is not None:
        raise unpaired_marker_error(path)
    return "".join([*out, text[at:]])


def unpaired_marker_error(path: Path) -> MlxZipError:
    return MlxZipError(f"{path}: not every '<!-- table: NAME -->' has its '<!-- end -->'")


def render_table(path: Path, name: str, tables: Tables, records: Records) -> str:
    if name in tables:
        return make_or_explain(name, tables[name], records)
    if (found := command_line_table(name)) is not None:
        return found
    raise MlxZipError(f"{path}: there is no table named {name!r}; known: {', '.join(tables)}, {KNOWN}")


def make_or_explain(name: str, make: Callable[[Records], Any], records: Records) -> Any:
    """Returns `make(records)`; errors from incomplete records become a `MlxZipError` that names the table."""
    with explain_wrong_fields(name):
        return make(records)


def read_page(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise MlxZipError(f"{path} is not valid UTF-8 at byte {error.start}") from error


# ---- tables of commands and flags, made from the parsers that `--help` prints

KNOWN = "'flags COMMAND', commands, benches, experiments, methods"


@cache
def command_line_table(name: str) -> str | None:
    """Returns the table called `name`, such as `flags vocab pack learn` or `benches`; None if there is no such table.

    Raises `MlxZipError` if the table is of flags of an unknown command.
    """
    if name.startswith("flags "):
        return flags_table(command_parser_of(name.removeprefix("flags ")))
    return LISTS[name]() if name in LISTS else None


def flags_table(parser: argparse.ArgumentParser) -> str:
    shown = [a for a in parser._actions if not isinstance(a, argparse._HelpAction) and a.help != argparse.SUPPRESS]
    return table(["flag", ""], [[flag_spelling(a), escape_help_text((a.help or "") % vars(a))] for a in shown])


def command_parser_of(command: str) -> argparse.ArgumentParser:
    """Returns the parser of a command such as `bench codec`. Raises `MlxZipError` if the command is unknown."""
    first, _, rest = command.partition(" ")
    cli = import_module("mlx_zip.cli")
    if first == "bench" and rest in benches() | experiments():
        parser = argparse.ArgumentParser()
        import_module((benches() | experiments())[rest][0]).add_arguments(parser)
        if rest in timed_benches():
            add_record_flag(parser)
        return parser
    if first == "vocab" and rest in (known := vocab_parsers()):
        return known[rest]
    if not rest and first in cli.COMMANDS.keys() - {"bench", "vocab"}:
        return cli.command_parser(first, f"mlx_zip {first}")
    raise MlxZipError(f"there is no command mlx_zip {command}")


def benches() -> dict[str, tuple[str, str]]:
    return import_module("mlx_zip.bench.__main__").BENCHES


def experiments() -> dict[str, tuple[str, str]]:
    return import_module("mlx_zip.bench.papers").EXPERIMENTS


def timed_benches() -> set[str]:
    return {name for home in ("mlx_zip.bench.__main__", "mlx_zip.bench.papers") for name in import_module(home).TIMED}


def vocab_parsers() -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers of the actions of `mlx_zip vocab` by name: "METHOD ACTION"."""
    methods = subcommands(import_module("mlx_zip.cli").command_parser("vocab", "mlx_zip vocab"))
    return {f"{method} {name}": one for method, parser in methods.items() for name, one in subcommands(parser).items()}


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (group,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return group.choices


def flag_spelling(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar}`"
    choices = f" {{{', '.join(map(str, action.choices))}}}" if action.choices else ""
    return names + choices


def escape_help_text(help_text: str) -> str:
    return help_text.replace("<", "&lt;")


def command_table(prefix: str, choices: Mapping[str, tuple[str, str]]) -> str:
    return table(["command", ""], [[f"`{prefix} {name}`", purpose] for name, (_, purpose) in choices.items()])


LISTS: dict[str, Callable[[], str]] = {
    "commands": lambda: command_table("mlx_zip", import_module("mlx_zip.cli").COMMANDS),
    "methods": lambda: command_table("mlx_zip vocab", import_module("mlx_zip.cli.vocab").METHODS),
    "benches": lambda: command_table("mlx_zip bench", benches()),
    "experiments": lambda: command_table("mlx_zip bench", experiments()),
}


if __name__ == "__main__":
    sys.exit(main())
