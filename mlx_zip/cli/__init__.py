"""`mlx_zip COMMAND ...`: parse, call, print. A command's module is named as a string and imported when it is asked for.

Exit status: 0 done, 1 a check failed, 2 a bad request or input (one line on stderr), 130 stopped by Ctrl-C, 143 by
SIGTERM, 129 by a terminal that was closed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import mlx_zip
from mlx_zip.cli.actions import printable
from mlx_zip.errors import MlxZipError, explained_imports

# name: (module with add_arguments(parser) and run(args) -> int | None, or main(argv) for bench and vocab; what it does)
COMMANDS = {
    "generate": ("mlx_zip.cli.generation", "generate text with a zip2zip or a plain mlx-lm model"),
    "convert": ("mlx_zip.converters.cli", "make an mlx-lm model folder from a zip2zip checkpoint"),
    "export": ("mlx_zip.converters.export_cli", "write an mlx_zip model as a zip2zip checkpoint for PyTorch"),
    "evaluate": ("mlx_zip.cli.evaluation", "measure models side by side: bits per byte, generation, benchmark tasks"),
    "prepare": ("mlx_zip.cli.preparation", "turn text, conversations and data sets into shards to train on"),
    "compress": ("mlx_zip.cli.compression", "show the hypertokens of a text, without a model"),
    "train": ("mlx_zip.cli.training", "train a model on prepared data, to use hypertokens or not"),
    "vocab": ("mlx_zip.cli.vocabulary", "learn vocabularies: codebook packs, phrases, adapted tokenizers, patches"),
    "rows": ("mlx_zip.cli.rows", "show or remove the rows of hypertokens that --row-cache keeps"),
    "selftest": ("mlx_zip.selftest", "check this installation and measure its speed; writes a one-page report"),
    "bench": ("mlx_zip.bench.__main__", "measure, one JSON line per result"),
}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """The `mlx_zip` command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] in (["bench"], ["vocab"]):  # have commands of their own
        return _guarded(lambda: import_module(COMMANDS[argv[0]][0]).main(argv[1:]))
    if argv and argv[0] in COMMANDS:
        return _run(argv[0], f"mlx_zip {argv[0]}", argv[1:])
    top_parser().parse_args(argv)
    return 2


def generate(argv: Sequence[str] | None = None) -> int:
    """The `mlx_zip.generate` command."""
    return _run("generate", "mlx_zip.generate", argv)


def convert(argv: Sequence[str] | None = None) -> int:
    """The `mlx_zip.convert` command."""
    return _run("convert", "mlx_zip.convert", argv)


def top_parser() -> argparse.ArgumentParser:
    """The parser of `mlx_zip` itself: it only knows the names of the commands."""
    parser = argparse.ArgumentParser(
        prog="mlx_zip", description="Language models whose vocabulary grows while they run, on MLX."
    )
    parser.add_argument("--version", action="version", version=f"mlx_zip {mlx_zip.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, help="mlx_zip COMMAND --help shows its flags")
    for name, (_, purpose) in COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    return parser


def command_parser(name: str, prog: str) -> argparse.ArgumentParser:
    """The full parser of one command."""
    module, purpose = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=prog, description=purpose[0].upper() + purpose[1:] + ".")
    import_module(module).add_arguments(parser)
    return parser


def _run(name: str, prog: str, argv: Sequence[str] | None) -> int:
    parser = command_parser(name, prog)
    args = parser.parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    if lost := [word for word in words if word[:1] == "-" and word.partition("=")[2] == "--"]:
        parser.error(f"{lost[0]}: -- cannot be a flag's value")  # argparse would drop it without a word
    return _guarded(lambda: import_module(COMMANDS[name][0]).run(args))


def _guarded(command: Callable[[], int | None]) -> int:
    if sys.stdout is None:  # closed by the caller, who wants no output
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until exit)
    try:
        with _unwound(), explained_imports():
            return command() or 0
    except MlxZipError as error:
        return _failed(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left; nothing more can be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, UnicodeEncodeError) as error:  # of our own output: a full disk, a terminal without these letters
        return _failed(error)


@contextmanager
def _unwound() -> Iterator[None]:
    """SIGTERM and a closed terminal end a command as Ctrl-C does, so that what is half-written goes; unless somebody
    else has seen to them.
    """

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    ends = [n for n in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(n) == signal.SIG_DFL]
    for number in ends:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)


def _failed(error: Exception) -> int:
    """One line, short enough to read; what a file brought along cannot steer the terminal."""
    line = " ".join(str(error).split())
    print(f"error: {printable(line[:1000])}", file=sys.stderr)
    return 2
