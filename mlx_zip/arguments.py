"""The parser of every command, and the flags that several commands share.

`Parser` is argparse's parser, but reports an error in one line, which names the wrong word and suggests a valid one.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from mlx_zip.errors import DataError, GenerationError, failure_reason

_TYPE_WORDS = {"int": "a whole number", "float": "a number"}
_ARITY_WORDS = {"one argument": "a value", "at least one argument": "at least one value"}
_WRONG_TYPE = re.compile(r"invalid (\w+) value: (.*)", re.S)
PACK_HELP = (
    "pack file (.json, .npz or .npy): every codebook begins with its entries. A plain model needs a pack that was "
    "tuned for it. Repeat the flag to merge packs (default: the model's own pack, if it has one)"
)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that reports each error as one line on stderr with exit status 2, in sub-parsers too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses the arguments; exits with an error if a word belongs to no flag and no argument."""
        self._words = list(sys.argv[1:] if args is None else args)
        if lost := [word for word in self._words if word[:1] == "-" and word.partition("=")[2] == "--"]:
            self.error(f"{lost[0]}: -- cannot be a flag's value")  # argparse would drop the -- silently
        found, extra = super().parse_known_args(self._words, namespace)
        if extra:
            self.error(self._unknown_words_error(extra))
        return found, extra

    def error(self, message: str) -> NoReturn:
        """Prints `message` on stderr as one line, and exits with status 2."""
        line = " ".join(self._reword_error(message).split())
        self.exit(2, f"error: {line}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises `ArgumentError`, with valid choices in its message, unless `value` is one of the action's choices."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            choices = [choice.dest for choice in action._choices_actions]  # without hidden aliases
            hint = suggest_nearest(str(value), choices) or f"choose from {', '.join(choices)}"
            raise argparse.ArgumentError(None, f"{self.prog} has no {_argument_name(action).lower()} {value!r}; {hint}")
        message = f"{str(value)!r} is not one of {', '.join(choices)}"
        raise argparse.ArgumentError(action, message)

    def _reword_error(self, message: str) -> str:
        if message.startswith("the following arguments are required: "):
            needed = message.partition(": ")[2]
            unknown = [word for word in self._words if self._is_unknown_flag(word)]
            typo = f"; {self._unknown_words_error(unknown)}" if unknown else f" ({self.prog} --help shows how)"
            return f"{self.prog} needs {self._append_subcommand_names(needed)}{typo}"
        message = message.removeprefix("argument ")
        for theirs, ours in _ARITY_WORDS.items():
            message = message.replace(f": expected {theirs}", f" needs {ours}")
        message += self._leading_dash_hint(message)
        return _WRONG_TYPE.sub(lambda m: f"{m[2]} is not {_TYPE_WORDS.get(m[1], f'a valid {m[1]}')}", message)

    def _leading_dash_hint(self, message: str) -> str:
        """Returns a hint to write FLAG=VALUE if a flag has no value because the next word begins with -; else ""."""
        names = message.partition(" needs ")[0].split("/") if " needs " in message else []
        for flag, word in zip(self._words, self._words[1:], strict=False):
            if (
                flag in names
                and word[:1] == "-"
                and not any(known.startswith(word) for known in self._flag_names(True))
            ):
                return f"; one that begins with - is given as {flag}={word}"
        return ""

    def _append_subcommand_names(self, needed: str) -> str:
        """Returns `needed`, the name of a missing argument, plus the subcommands' names if they are what is missing."""
        commands = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        choices = [choice.dest for action in commands for choice in action._choices_actions]
        return f"{needed}: {', '.join(choices)}" if choices and needed == _argument_name(commands[0]) else needed

    def _is_unknown_flag(self, word: str) -> bool:
        """Returns whether `word` looks like a flag (--name or --name=value), but no known flag begins with --name."""
        flag = word.partition("=")[0]
        return flag[:2] == "--" and flag != "--" and not any(known.startswith(flag) for known in self._flag_names(True))

    def _unknown_words_error(self, words: Sequence[str]) -> str:
        """Returns the error for words that belong to no flag; names the first word with a leading -, or the first."""
        word = next((word for word in words if word[:1] == "-"), words[0])
        flag = word.partition("=")[0]
        if flag[:1] != "-":
            return f"{word!r} belongs to no flag ({self.prog} --help lists the flags)"
        hint = suggest_nearest(flag, self._flag_names()) or f"{self.prog} --help lists all flags"
        return f"unknown flag {flag}; {hint}"

    def _flag_names(self, hidden: bool = False) -> list[str]:
        actions = [action for action in self._actions if hidden or action.help != argparse.SUPPRESS]
        return [flag for action in actions for flag in action.option_strings]


def _argument_name(action: argparse.Action) -> str:
    return str(action.metavar or action.dest)


def suggest_nearest(word: str, choices: Iterable[str]) -> str:
    """Returns "did you mean A?" or "did you mean A or B?" for the choices most like `word`, "" if none is."""
    known = list(choices)
    close = difflib.get_close_matches(word, known, 2, 0.85) or difflib.get_close_matches(word, known, 1, 0.6)
    return f"did you mean {' or '.join(close)}?" if close else ""


# ---- shared flags and checks


def check_flags_at_least(args: argparse.Namespace, least: float, *names: str, below: float | None = None) -> None:
    """Raises `DataError` unless the named flags have values from `least` on and below `below`. Skips flags not given.

    names: attributes of `args`, for example "most_ids" for --most-ids. If a flag has several values, all are checked.
    """
    for name in names:
        value = getattr(args, name)
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None and not (least <= one and (below is None or one < below)):
                bounds = f"{least}" if below is None else f"{least} and below {below}"
                raise DataError(f"--{name.replace('_', '-')} must be at least {bounds}, got {one}")


def default_flags(add: Any) -> Callable[..., None]:
    """Returns a function that declares a flag with a default, for example `flag("--trials", 5, "number of runs")`.

    The default is a value, or a list for a flag that takes several values. The flag's type and the end of its help,
    "(default: 5)", follow from the default. Further options are those of `add`, a parser's or group's `add_argument`.
    """

    def flag(name: str, default: Any, purpose: str, **options: Any) -> None:
        several = isinstance(default, list)
        values = default if several else [default]
        if several:
            options["nargs"] = "+"
        if not isinstance(values[0], str):
            options["type"] = type(values[0])
        add(name, default=default, help=f"{purpose} (default: {' '.join(map(str, values))})", **options)

    return flag


def add_trust_remote_code_flag(add: Any) -> None:
    """Declares --trust-remote-code, for commands that load a tokenizer."""
    add(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the tokenizer (default: off)",
    )


def add_separator_flag(add: Any) -> None:
    """Declares --separator, for commands that read documents."""
    add("--separator", help="line that ends a document of a .txt file (default: each file is one document)")


def add_limit_bytes_flag(add: Any, texts: str, flag: str = "--limit-bytes") -> None:
    """Declares a flag that limits how many bytes of text are read. texts: the kind of texts, for the help."""
    add(flag, type=int, metavar="N", help=f"read at most N bytes of {texts} (default: all)")


def add_pack_flag(add: Any, purpose: str = PACK_HELP) -> None:
    """Declares --pack FILE, which may be repeated: `args.pack` is a list of file names, or None without the flag.

    add: a parser's or group's `add_argument`. purpose: the help text.
    """
    add("--pack", help=purpose, metavar="FILE", action="append")


def add_codebook_flags(add: Any) -> None:
    """Declares --pack and --codebook-size, for commands that run models."""
    add_pack_flag(add)
    add(
        "--codebook-size",
        type=int,
        metavar="N",
        help="maximum number of hypertokens, the pack's entries included (default: the model's)",
    )


def parse_json_map(flag: str, text: str | None) -> dict[str, Any]:
    """Returns the JSON object in `text`, a flag's value; {} for None. Raises `GenerationError` for other text."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise GenerationError(f"{flag} is not valid JSON: {failure_reason(error)}") from error
    if not isinstance(value, dict):
        raise GenerationError(f'{flag} must be a JSON map: {{"name": value}}')
    return value
