"""Writes every generated table and picture of the documentation: `python -m mlx_zip.bench.pages [--check]`.

A page is Markdown with tables between `<!-- table: NAME -->` and `<!-- end -->`; only what is between these two is
written. Tables come from the records (`records.py`) and from the command line's own parsers (`flag_tables.py`).
A paper registers its tables and pictures in `bench/papers/PAPER/tables.py`, which is found by its name.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_zip.errors import MlxZipError

from . import mac_steps, performance_tables, smollm2_tables
from .flag_tables import KNOWN, named_table
from .gpu import card_steps
from .plots import rendered, write_bytes
from .records import Records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "bench/**/*.md", "recipes/**/*.md", "mlx_zip/bundle/**/*.md")
DIFFERS = 1  # exit status of --check if a page or picture would change
# begin or end of a table, each on its own line
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
        changed = [path for path, data in rendering(args.root) if _differs(path, data, args.check)]
    except MlxZipError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return DIFFERS if args.check and changed else 0


def _differs(path: Path, data: bytes, only_check: bool) -> bool:
    """Whether a file does not hold `data`; it is then written, unless `only_check`, and named on standard error."""
    old = path.read_bytes() if path.exists() else b""
    if old == data:
        return False
    if path.suffix == ".svg" and only_check and _VERSION.findall(old) != _VERSION.findall(data):
        print(f"{path}: drawn by another version of matplotlib, not compared", file=sys.stderr)
        return False
    if not only_check:
        write_bytes(path, data)
    print(f"{path}: {'would change' if only_check else 'written'}", file=sys.stderr)
    return True


def rendering(root: Path) -> list[tuple[Path, bytes]]:
    """Returns every page and picture of a checkout with the bytes it should have; nothing is written.

    Raises `MlxZipError` for a page, marker or record that cannot be used, and for a table that no page shows.
    """
    records, (tables, pictures) = Records(root), registered()
    pages = {path: _read_page(path) for path in pages_of(root)}
    shown = {name for text in pages.values() for name in names(text)}
    found = [(path, page(path, text, tables, records).encode()) for path, text in pages.items()]
    later = {name for name, record in performance_tables.NOT_YET.items() if record not in records.files}
    if missing := tables.keys() - shown - later:
        raise MlxZipError(f"no page shows the tables {', '.join(sorted(missing))}")
    return found + [
        (root / name, rendered(_make(name, make, records), Path(name).suffix)) for name, make in pictures.items()
    ]


def pages_of(root: Path) -> list[Path]:
    """Returns the Markdown files of a checkout that may hold tables, sorted."""
    return sorted({path for pattern in PAGES for path in root.glob(pattern)})


def names(text: str) -> list[str]:
    """Returns the names of the tables that a page shows."""
    return [name for name in _MARK.findall(text) if name]


def registered() -> tuple[Tables, Pictures]:
    """Returns all tables and pictures by name, the papers' too in a checkout.

    Raises `MlxZipError` for a name that is used twice.
    """
    tables: Tables = {}
    pictures: Pictures = {}
    for module in (performance_tables, mac_steps, card_steps, smollm2_tables, *_paper_modules()):
        for known, new in ((tables, module.TABLES), (pictures, module.PICTURES)):
            if twice := known.keys() & new.keys():
                raise MlxZipError(f"{module.__name__}: the name {min(twice)} is registered twice")
            known |= new
    return tables, pictures


def _paper_modules() -> Iterator[Any]:
    """Yields the module `tables` of every paper."""
    for file in sorted((Path(__file__).parent / "papers").glob("*/tables.py")):
        yield import_module(f"mlx_zip.bench.papers.{file.parent.name}.tables")


def page(path: Path, text: str, tables: Tables, records: Records) -> str:
    """Returns a page with every table made anew. Raises `MlxZipError` for an unknown name or an unpaired marker."""
    out, at, opened = [], 0, None
    for mark in _MARK.finditer(text):
        if (mark[1] is None) == (opened is None):
            raise _unpaired(path)
        if opened is None:
            out.append(text[at : mark.end()])
            at, opened = mark.end(), mark[1]
        else:
            section = f"\n\n{_table(path, opened, tables, records)}\n\n"
            out.append(section.replace("\n", "\r\n") if "\r\n" in text else section)
            at, opened = mark.start(), None
    if opened is not None:
        raise _unpaired(path)
    return "".join([*out, text[at:]])


def _unpaired(path: Path) -> MlxZipError:
    """Returns the error for a page with a begin of a table without its end, or an end without its begin."""
    return MlxZipError(f"{path}: not every '<!-- table: NAME -->' has its '<!-- end -->'")


def _table(path: Path, name: str, tables: Tables, records: Records) -> str:
    """Returns the table `name` of a page: one from the records, or one of commands or flags."""
    if name in tables:
        return _make(name, tables[name], records)
    if (found := named_table(name)) is not None:
        return found
    raise MlxZipError(f"{path}: there is no table named {name!r}; known: {', '.join(tables)}, {KNOWN}")


def _make(name: str, make: Callable[[Records], Any], records: Records) -> Any:
    """Returns `make(records)`; errors from records that lack something become a `MlxZipError` with the table's name."""
    try:
        return make(records)
    except KeyError as missing:
        raise MlxZipError(f"{name}: its records have no {missing}") from missing
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise MlxZipError(f"{name}: its records do not hold what they should: {error}") from error


def _read_page(path: Path) -> str:
    """Returns a page's text with its line ends as they are. Raises `MlxZipError` if it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise MlxZipError(f"{path} is not valid UTF-8 at byte {error.start}") from error


if __name__ == "__main__":
    sys.exit(main())
