"""The `mlx_zip` command: parses the command line and runs one of `COMMANDS`, whose module is imported only then.

Exit status: 0 done, 1 a check failed or the engine stopped, 2 wrong flags or input (one line on stderr), 129 terminal
closed, 130 Ctrl-C, 143 SIGTERM. Almost everything is imported inside functions, so that `run_and_print_errors` ends
Ctrl-C during an import without a traceback.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import mlx_zip
from mlx_zip.errors import MlxZipError, explain_missing_mlx, failure_reason

if TYPE_CHECKING:
    from mlx_zip.arguments import Parser

# Command name -> (module, purpose). The module has add_arguments(parser) and run(args) -> int | None; that of bench has
# main(argv) -> int | None.
COMMANDS = {
    "generate": ("mlx_zip.cli.generation", "generate text with a zip2zip or a plain mlx-lm model"),
    "app": (
        "mlx_zip.cli.serving.app",
        "chat with a model on a page in your browser, served by this machine for you alone",
    ),
    "chat": ("mlx_zip.cli.chat", "talk with a model in the terminal, with its hypertokens in colour"),
    "serve": ("mlx_zip.cli.serving.serve", "serve a model to the clients of OpenAI and Anthropic, over HTTP"),
    "agent": (
        "mlx_zip.cli.serving.agents",
        "print or write the settings with which Codex, Claude Code, opencode, aider or litellm use a running server",
    ),
    "convert": (
        "mlx_zip.converters.cli",
        "make an MLX model folder from a zip2zip checkpoint for PyTorch, or from a GGUF file",
    ),
    "export": ("mlx_zip.converters.export_cli", "write an mlx_zip model as a zip2zip checkpoint for PyTorch"),
    "evaluate": ("mlx_zip.cli.evaluation", "compare models: bits per byte, base tokens per step, benchmark tasks"),
    "prepare": ("mlx_zip.cli.preparation", "turn text, conversations and data sets into shards to train on"),
    "compress": ("mlx_zip.cli.compression", "show the hypertokens of a text, without a model"),
    "train": ("mlx_zip.cli.training", "train a model on prepared data, with or without hypertokens"),
    "vocab": (
        "mlx_zip.cli.vocab",
        "learn vocabularies: packs, phrases (MultiTok), adapted tokenizers (AdaptBPE), patches (H-BPE)",
    ),
    "rows": ("mlx_zip.cli.row_cache", "show or delete the hypertoken rows that --row-cache keeps on disk"),
    "cache-prompt": ("mlx_zip.cli.prompt_caching", "read a prompt once and save it, for generate and for servers"),
    "sessions": ("mlx_zip.cli.sessions", "show or delete the conversations that a server keeps on disk"),
    "selftest": ("mlx_zip.cli.selftest", "check this installation and measure its speed; writes a one-page report"),
    "bench": ("mlx_zip.bench.__main__", "measure speed, memory and energy on this machine; one JSON line per result"),
}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the `mlx_zip` command and returns its exit status. argv: arguments, None for those of this process."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["bench"]:  # its subcommands have parsers of their own
        return run_and_print_errors(lambda: _run_bench(argv[1:]))
    if argv and argv[0] in COMMANDS:
        return _run_command(argv[0], f"mlx_zip {argv[0]}", argv[1:])
    return run_and_print_errors(lambda: _run_without_command(argv))


def generate(argv: Sequence[str] | None = None) -> int:
    """Runs the `mlx_zip.generate` command and returns its exit status."""
    return _run_command("generate", "mlx_zip.generate", argv)


def convert(argv: Sequence[str] | None = None) -> int:
    """Runs the `mlx_zip.convert` command and returns its exit status."""
    return _run_command("convert", "mlx_zip.convert", argv)


def top_parser() -> Parser:
    """Returns the parser of `mlx_zip` itself, which has the commands' names but not their flags."""
    from mlx_zip.arguments import Parser

    parser = Parser(prog="mlx_zip", description="Language models whose vocabulary grows while they run, on MLX.")
    parser.add_argument("--version", action="version", version=f"mlx_zip {mlx_zip.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, help="mlx_zip COMMAND --help shows its flags")
    for name, (_, purpose) in COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    return parser


def command_parser(name: str, prog: str) -> Parser:
    """Returns the parser of the command `name`, with all its flags. prog: program name in help and errors."""
    from mlx_zip.arguments import Parser

    module, purpose = COMMANDS[name]
    parser = Parser(prog=prog, description=purpose[0].upper() + purpose[1:] + ".")
    import_module(module).add_arguments(parser)
    return parser


def _run_command(name: str, prog: str, argv: Sequence[str] | None) -> int:
    """Runs a command. First chooses MLX's device if --engine is mlx or the command has no --engine."""

    def run() -> int | None:
        from mlx_zip.cli.engine_choice import MLX
        from mlx_zip.device import set_device_from_environment

        args = command_parser(name, prog).parse_args(argv)
        if getattr(args, "engine", MLX) == MLX:
            set_device_from_environment()
        return import_module(COMMANDS[name][0]).run(args)

    return run_and_print_errors(run)


def _run_without_command(argv: Sequence[str]) -> int:
    """Prints the help if there are no arguments; else parses flags such as --version, or reports an unknown command."""
    if not argv:
        top_parser().print_help()
        return 0
    top_parser().parse_args(argv)
    return 2


def _run_bench(argv: Sequence[str]) -> int | None:
    from mlx_zip.device import set_device_from_environment

    set_device_from_environment()
    return import_module(COMMANDS["bench"][0]).main(argv)


def run_and_print_errors(command: Callable[[], int | None]) -> int:
    """Calls `command` and returns the exit status; prints an `MlxZipError` or an output error as one line on stderr."""
    if sys.stdout is None:  # closed by the caller, who wants no output
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until exit)
    silence_library_warnings()
    try:
        from mlx_zip.files import exit_on_signals

        with exit_on_signals(), explain_missing_mlx():
            return command() or 0
    except MlxZipError as error:
        return _print_error(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, UnicodeEncodeError) as error:  # while printing: a full disk, an unencodable character
        return _print_error(error)


def silence_library_warnings() -> None:
    """Silences warnings of the Hugging Face libraries, and their progress bars unless stderr is a terminal.

    Only commands call this, before they import those libraries. Environment variables that the user has set are kept.
    """
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # datasets also logs each error that it raises
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if sys.stderr is None or not sys.stderr.isatty():
        for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    if not sys.warnoptions:  # python -W shows them again
        for library in ("transformers", "huggingface_hub", "mlx_lm", "datasets"):
            warnings.filterwarnings("ignore", module=library)


def _print_error(error: Exception) -> int:
    """Prints an error as one line of at most 1000 characters; control characters are escaped. Returns 2."""
    from mlx_zip.cli.actions import escape_unprintable

    named = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    line = " ".join((named + failure_reason(error) if isinstance(error, OSError) else str(error)).split())
    print(f"error: {escape_unprintable(line[:1000])}", file=sys.stderr)
    return 2
