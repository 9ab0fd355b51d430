"""Each page lists commands and flags as `--help` does. To write the tables anew: `make docs`."""

import re

import pytest

from mlx_zip import cli
from mlx_zip.bench import pages
from mlx_zip.bench.pages import pages_of, table_names
from mlx_zip.cli.vocab import METHODS
from support.places import DOCS, REPO

PAGE = DOCS / "reference" / "cli.md"
TEXTS = {path: path.read_text(encoding="utf-8") for path in pages_of(REPO)}


def written(name: str) -> str:
    """The table of this name, from the page that shows it."""
    (text,) = [text for text in TEXTS.values() if name in table_names(text)]
    return re.search(rf"<!-- table: {name} -->\n(.*?)\n<!-- end -->", text, re.DOTALL)[1].strip()


def all_commands() -> list[str]:
    """Returns the name of every installed command with flags, as in the marker `<!-- table: flags NAME -->`."""
    own = [name for name in cli.COMMANDS if name not in ("bench", "vocab")]
    return [*own, *(f"bench {name}" for name in pages.benches()), *(f"vocab {name}" for name in pages.vocab_parsers())]


@pytest.mark.parametrize("command", all_commands())
def test_a_page_lists_the_flags_of_each_command_as_help_does(command):
    wanted = pages.command_line_table(f"flags {command}")
    assert written(f"flags {command}") == wanted, "the table is not what --help says: make docs writes it anew"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_page_says_what_each_command_does_as_help_does(command):
    assert f"| `mlx_zip {command}` | {cli.COMMANDS[command][1]} |" in TEXTS[PAGE]


@pytest.mark.parametrize("method", METHODS)
def test_the_page_says_what_each_method_of_vocab_does_as_help_does(method):
    purpose = METHODS[method][1]
    assert f"### vocab {method}\n\n{purpose[0].upper()}{purpose[1:]}." in TEXTS[PAGE]


@pytest.mark.parametrize("bench", pages.benches() | pages.experiments())
def test_a_page_says_what_each_bench_measures_as_help_does(bench):
    purpose = (pages.benches() | pages.experiments())[bench][1]
    assert any(f"{purpose[0].upper()}{purpose[1:]}." in text or f"| {purpose} |" in text for text in TEXTS.values())
