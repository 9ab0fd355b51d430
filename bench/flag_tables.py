"""Tables of commands and flags for the documentation, made from the parsers that `--help` prints.

Parsers are imported only when a table needs them, so a page may list the flags of any command.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from mlx_zip.errors import MlxZipError

from .record import add_record_flag
from .records import table

KNOWN = "'flags COMMAND', commands, benches, experiments, methods"


@cache
def named_table(name: str) -> str | None:
    """Returns the table called `name`, such as `flags vocab pack learn` or `benches`; None if there is no such table.

    Raises `MlxZipError` for flags of a command that does not exist.
    """
    if name.startswith("flags "):
        return flags(parser_of(name.removeprefix("flags ")))
    return LISTS[name]() if name in LISTS else None


def flags(parser: argparse.ArgumentParser) -> str:
    """Returns a table with one row per flag that `--help` shows: its names and choices, and its help text."""
    shown = [a for a in parser._actions if not isinstance(a, argparse._HelpAction) and a.help != argparse.SUPPRESS]
    return table(["flag", ""], [[_spelling(a), _text((a.help or "") % vars(a))] for a in shown])


def parser_of(command: str) -> argparse.ArgumentParser:
    """Returns the parser of a command such as `bench codec`. Raises `MlxZipError` for an unknown command."""
    first, _, rest = command.partition(" ")
    cli = import_module("mlx_zip.cli")
    if first == "bench" and rest in benches() | experiments():
        parser = argparse.ArgumentParser()
        import_module((benches() | experiments())[rest][0]).add_arguments(parser)
        if rest in timed():
            add_record_flag(parser)
        return parser
    if first == "vocab" and rest in (known := _vocab_parsers()):
        return known[rest]
    if not rest and first in cli.COMMANDS.keys() - {"bench", "vocab"}:
        return cli.command_parser(first, f"mlx_zip {first}")
    raise MlxZipError(f"there is no command mlx_zip {command}")


def benches() -> dict[str, tuple[str, str]]:
    """Returns name -> (module, purpose) of every bench that `mlx_zip bench` runs."""
    return import_module("mlx_zip.bench.__main__").BENCHES


def experiments() -> dict[str, tuple[str, str]]:
    """Returns name -> (module, purpose) of every experiment that repeats a paper."""
    return import_module("mlx_zip.bench.papers.__main__").EXPERIMENTS


def timed() -> set[str]:
    """Returns the names of the benches and experiments that measure time."""
    return {
        name for home in ("mlx_zip.bench", "mlx_zip.bench.papers") for name in import_module(f"{home}.__main__").TIMED
    }


def _vocab_parsers() -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers of `mlx_zip vocab` by name: "METHOD ACTION", or "METHOD" for a method without actions."""
    vocabulary, found = import_module("mlx_zip.cli.vocabulary"), {}
    for method in vocabulary.METHODS:
        parser = vocabulary.method_parser(method)
        groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        actions = [choice.dest for choice in groups[0]._choices_actions] if groups else []  # without their aliases
        found |= {f"{method} {name}": groups[0].choices[name] for name in actions} or {method: parser}
    return found


def _spelling(action: argparse.Action) -> str:
    """Returns a flag's names and the values it can take, as Markdown."""
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar}`"
    choices = f" {{{', '.join(map(str, action.choices))}}}" if action.choices else ""
    return names + choices


def _text(help_text: str) -> str:
    """Returns a help text as Markdown shows it, with no `<` that would begin an HTML tag."""
    return help_text.replace("<", "&lt;")


def _command_table(prefix: str, choices: Mapping[str, tuple[str, str]]) -> str:
    """Returns a table of commands, each after `prefix`, with its purpose. choices: name -> (module, purpose)."""
    return table(["command", ""], [[f"`{prefix} {name}`", purpose] for name, (_, purpose) in choices.items()])


LISTS: dict[str, Callable[[], str]] = {
    "commands": lambda: _command_table("mlx_zip", import_module("mlx_zip.cli").COMMANDS),
    "methods": lambda: _command_table("mlx_zip vocab", import_module("mlx_zip.cli.vocabulary").METHODS),
    "benches": lambda: _command_table("mlx_zip bench", benches()),
    "experiments": lambda: _command_table("mlx_zip bench", experiments()),
}


def all_commands() -> list[str]:
    """Returns the name of every command that has flags, as in the marker `<!-- table: flags NAME -->`."""
    cli: Any = import_module("mlx_zip.cli")
    own = [name for name in cli.COMMANDS if name not in ("bench", "vocab")]
    return [
        *own,
        *(f"bench {name}" for name in (*benches(), *experiments())),
        *(f"vocab {name}" for name in _vocab_parsers()),
    ]
