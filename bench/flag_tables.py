"""Tables of commands and flags for the documentation, made from the parsers that `--help` prints.

Parsers are named as strings and imported when a table asks for them: a page of the harness may list any command.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from mlx_zip.errors import MlxZipError

from .tables import table

KNOWN = "'flags COMMAND', commands, benches, experiments, methods"


def made(name: str) -> str | None:
    """The table of a name such as `flags vocab pack learn` or `benches`; None for a name that is not one of these.

    Raises `MlxZipError` for flags of a command that does not exist.
    """
    if name.startswith("flags "):
        return flags(parser_of(name.removeprefix("flags ")))
    return LISTS[name]() if name in LISTS else None


def flags(parser: argparse.ArgumentParser) -> str:
    """One row per flag that `--help` shows: its names and choices, and its help text."""
    shown = [a for a in parser._actions if not isinstance(a, argparse._HelpAction) and a.help != argparse.SUPPRESS]
    return table(["flag", ""], [[_spelling(a), _text((a.help or "") % vars(a))] for a in shown])


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of `generate`, `vocab pack learn`, `bench codec`, ... Raises `MlxZipError` for an unknown command."""
    first, _, rest = command.partition(" ")
    cli = import_module("mlx_zip.cli")
    if first == "bench" and rest in benches() | experiments():
        parser = argparse.ArgumentParser()
        import_module((benches() | experiments())[rest][0]).add_arguments(parser)
        return parser
    if first == "vocab" and rest in (known := _of_vocab()):
        return known[rest]
    if not rest and first in cli.COMMANDS.keys() - {"bench", "vocab"}:
        return cli.command_parser(first, f"mlx_zip {first}")
    raise MlxZipError(f"there is no command mlx_zip {command}")


def benches() -> dict[str, tuple[str, str]]:
    """Name -> (module, purpose) of what `mlx_zip bench` runs."""
    return import_module("mlx_zip.bench.__main__").BENCHES


def experiments() -> dict[str, tuple[str, str]]:
    """Name -> (module, purpose) of the experiments that repeat papers."""
    return import_module("mlx_zip.bench.papers.__main__").EXPERIMENTS


def _of_vocab() -> dict[str, argparse.ArgumentParser]:
    """The parsers of `mlx_zip vocab`: "METHOD ACTION", or "METHOD" for a method without actions."""
    vocabulary, found = import_module("mlx_zip.cli.vocabulary"), {}
    for method in vocabulary.METHODS:
        parser = vocabulary.method_parser(method)
        groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        actions = [choice.dest for choice in groups[0]._choices_actions] if groups else []  # without their aliases
        found |= {f"{method} {name}": groups[0].choices[name] for name in actions} or {method: parser}
    return found


def _spelling(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar}`"
    choices = f" {{{', '.join(map(str, action.choices))}}}" if action.choices else ""
    return names + choices


def _text(help_text: str) -> str:
    return help_text.replace("<", "&lt;")


def _listed(prefix: str, choices: Mapping[str, tuple[str, str]]) -> str:
    return table(["command", ""], [[f"`{prefix} {name}`", purpose] for name, (_, purpose) in choices.items()])


LISTS: dict[str, Callable[[], str]] = {
    "commands": lambda: _listed("mlx_zip", import_module("mlx_zip.cli").COMMANDS),
    "methods": lambda: _listed("mlx_zip vocab", import_module("mlx_zip.cli.vocabulary").METHODS),
    "benches": lambda: _listed("mlx_zip bench", benches()),
    "experiments": lambda: _listed("mlx_zip bench", experiments()),
}


def all_commands() -> list[str]:
    """Every command that has flags, as the markers name it."""
    cli: Any = import_module("mlx_zip.cli")
    own = [name for name in cli.COMMANDS if name not in ("bench", "vocab")]
    return [
        *own,
        *(f"bench {name}" for name in (*benches(), *experiments())),
        *(f"vocab {name}" for name in _of_vocab()),
    ]
