"""docs/cli.md lists every command and flag as `--help` does.

To write the lists anew: python tests/cli/test_cli_docs.py
"""

import argparse
import re
from importlib import import_module

import pytest

from mlx_zip import cli
from mlx_zip.bench.__main__ import BENCHES as HARNESS
from mlx_zip.bench.papers.__main__ import EXPERIMENTS
from mlx_zip.cli.vocabulary import METHODS, method_parser
from support.places import DOCS

PAGE = DOCS / "cli.md"
BENCHES = HARNESS | EXPERIMENTS


def actions(method: str) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a method of `vocab`: of its actions, or its own."""
    parser = method_parser(method)
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not found:
        return {f"vocab {method}": parser}
    names = [choice.dest for choice in found[0]._choices_actions]  # not the aliases
    return {f"vocab {method} {name}": found[0].choices[name] for name in names}


VOCAB = {name: parser for method in METHODS for name, parser in actions(method).items()}
OWN_COMMANDS = ("bench", "vocab")
LISTED = [*(name for name in cli.COMMANDS if name not in OWN_COMMANDS), *(f"bench {name}" for name in BENCHES), *VOCAB]
SECTION = re.compile(r"(<!-- flags: ([\w ]+) -->\n).*?(<!-- end -->)", re.S)


def flags(command: str) -> str:
    """One table row per flag, from the parser itself."""
    actions = [a for a in parser_of(command)._actions if not isinstance(a, argparse._HelpAction)]
    actions = [a for a in actions if a.help != argparse.SUPPRESS]
    rows = [f"| {_spelling(a)} | {_cell((a.help or '') % vars(a))} |" for a in actions]
    return "\n".join(["| flag | |", "| --- | --- |", *rows, ""])


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of a command, or of one of those that `bench` and `vocab` have."""
    if command in VOCAB:
        return VOCAB[command]
    name, _, bench = command.partition(" ")
    if not bench:
        return cli.command_parser(name, f"mlx_zip {name}")
    parser = argparse.ArgumentParser()
    import_module(BENCHES[bench][0]).add_arguments(parser)
    return parser


def _spelling(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar}`"
    choices = f" {{{', '.join(map(str, action.choices))}}}" if action.choices else ""
    return names + choices


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def written() -> dict[str, str]:
    return {m[2]: m[0].removeprefix(m[1]).removesuffix(m[3]) for m in SECTION.finditer(PAGE.read_text())}


@pytest.mark.parametrize("command", LISTED)
def test_the_page_lists_the_flags_of_each_command_as_help_does(command):
    assert written()[command] == flags(command)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_page_says_what_each_command_does_as_help_does(command):
    assert f"| `mlx_zip {command}` | {cli.COMMANDS[command][1]} |" in PAGE.read_text()


@pytest.mark.parametrize("bench", BENCHES)
def test_the_page_says_what_each_bench_measures_as_help_does(bench):
    purpose = BENCHES[bench][1]
    assert f"### bench {bench}\n\n{purpose[0].upper()}{purpose[1:]}." in PAGE.read_text()


@pytest.mark.parametrize("method", METHODS)
def test_the_page_says_what_each_method_of_vocab_does_as_help_does(method):
    purpose = METHODS[method][1]
    assert f"### vocab {method}\n\n{purpose[0].upper()}{purpose[1:]}." in PAGE.read_text()


if __name__ == "__main__":
    PAGE.write_text(SECTION.sub(lambda m: m[1] + flags(m[2]) + m[3], PAGE.read_text()))
