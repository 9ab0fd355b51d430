"""The exceptions of mlx_zip. Each message is one line that names what is at fault and says what to do."""

import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from json import JSONDecodeError
from typing import Any


class MlxZipError(Exception):
    """Base of every error that mlx_zip raises on purpose; the command line prints it and exits with status 2."""


class CodecError(MlxZipError, ValueError):
    """Raised for ids that are neither base ids nor known hypertokens, and for codec parameters out of range."""


class ConfigError(MlxZipError, ValueError):
    """A configuration that is unknown, incomplete, or contradicts its model or tokenizer."""


class ModelError(MlxZipError, ValueError):
    """A model, cache or input that the runtime cannot run as asked."""


class ConversionError(MlxZipError):
    """A checkpoint that cannot be converted; nothing was written."""


class GenerationError(MlxZipError, ValueError):
    """A request that cannot be generated as asked (empty prompt, prompt longer than the context, a refused flag)."""


class PromptTooLongError(GenerationError):
    """A prompt that is longer than the model's context, or than a server allows."""

    @classmethod
    def of(cls, tokens: int, most: int, why: str) -> "PromptTooLongError":
        """Returns the error for a prompt of `tokens` base tokens where `most` are allowed. why: explains the limit.

        Clients made for OpenAI's or Anthropic's servers recognize the message's wording and numbers, and then shorten
        the conversation. The maximum in OpenAI's wording counts one token of the answer, so it is `most` + 1.
        """
        return cls(
            f"the prompt is too long: {tokens} tokens > {most} maximum; the maximum context length is {most + 1} "
            f"tokens, one for an answer included ({why}); shorten the prompt"
        )


class EngineError(MlxZipError):
    """A request that an engine cannot serve, for example one for a session that the engine does not have."""


class UnknownSessionError(EngineError):
    """A request for a session that the engine does not have."""


class EngineBusyError(EngineError):
    """Too many requests are waiting already. retry_after_s: seconds after which the client should try again."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStoppedError(EngineError):
    """A request for an engine that was closed, or that stopped after a fault."""


class DataError(MlxZipError, ValueError):
    """Training or evaluation data that cannot be read, are empty, or do not fit the model."""


class TrainingError(MlxZipError):
    """A training run that cannot start, continue or be resumed; checkpoints saved earlier remain valid."""


class MachineError(MlxZipError):
    """A run on several machines that cannot go on, because one has failed or differs from the others."""


class InstallationError(MlxZipError, ImportError):
    """A library that is not installed, or that cannot be loaded."""


@contextmanager
def bare_exceptions_as_value_errors() -> Iterator[None]:
    """Context manager: turns an exception of exactly the class `Exception` into a `ValueError`.

    The `tokenizers` library raises `Exception` itself for a tokenizer.json that it cannot read.
    """
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise ValueError(str(error)) from error


@contextmanager
def errors_as(raised: type[MlxZipError], begin: str, *caught: type[Exception], end: str = "") -> Iterator[None]:
    """Context manager: turns an error of the classes `caught` into an error of class `raised`.

    The message is `begin`, a colon, the reason (see `failure_reason`) and `end`.
    """
    try:
        yield
    except caught as error:
        raise raised(f"{begin}: {failure_reason(error)}{end}") from error


def first_message_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of the error's class if the message is empty.

    If the first line ends in a colon, all lines are joined. For a `JSONDecodeError`, the name of the field with the
    invalid value is added if it is found. For a `KeyError`, says which key is missing. Python's advice to programmers
    about integers of thousands of digits is left out.
    """
    if isinstance(error, KeyError):
        return f"key {error} is missing"
    if isinstance(error, JSONDecodeError):
        field = re.search(r'"[^"]*"(?=\s*:\s*$)', error.doc[max(0, error.pos - 100) : error.pos])
        return f"{error}, the value of {field[0]}" if field else str(error)
    lines = str(error).partition("; use sys.set_int_max_str_digits()")[0].strip().splitlines()
    if lines and lines[0].rstrip().endswith(":"):
        return " ".join(str(error).split())
    return lines[0].strip() if lines else type(error).__name__


def failure_reason(error: BaseException) -> str:
    """Returns why something failed: an `OSError`'s text without number and path, else `first_message_line(error)`."""
    words = error.strerror if isinstance(error, OSError) else None
    return str(words or first_message_line(error))


def missing_library_error(purpose: str, *libraries: str, extra: str = "") -> InstallationError:
    """Returns the error for libraries that are not installed, with the command that installs them.

    purpose: what needs the libraries, for example a flag. extra: mlx_zip's extra that installs them, "" if none does.
    """
    verb, command = "is" if len(libraries) == 1 else "are", install_command(*libraries, extra=extra)
    return InstallationError(f"{purpose} needs {', '.join(libraries)}, which {verb} not installed: {command}")


def import_or_explain(module: str, purpose: str, *libraries: str, extra: str, implied: Collection[str] = ()) -> Any:
    """Imports a module and returns it. Raises the error of `missing_library_error` if one of the libraries is missing.

    implied: libraries that are installed together with `libraries`; the message does not name them.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in (*libraries, *implied):
            raise
        raise missing_library_error(purpose, *libraries, extra=extra) from error


def install_command(*libraries: str, extra: str = "") -> str:
    """Returns the command that installs `libraries`, or mlx_zip's extra `extra` if one is given."""
    if extra:
        return f"in the folder of mlx_zip's source run pip install -e '.[{extra}]'"
    return f"run pip install {' '.join(libraries)}"


@contextmanager
def explain_missing_mlx() -> Iterator[None]:
    """Context manager: turns a failed import of MLX into an `InstallationError` that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "mlx":
            raise
        raise InstallationError(f"MLX is not installed here: {_mlx_install_command()}") from error
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "mlx":
            raise
        raise InstallationError(
            f"MLX is installed but cannot be loaded ({error}); if this machine has no GPU driver, install MLX for the "
            f"CPU: {_mlx_install_command()}"
        ) from error


def _mlx_install_command() -> str:
    if sys.platform == "darwin":
        return install_command("mlx")
    cards = "with an NVIDIA GPU: '.[mlx-cuda]', or '.[cuda]' and --engine cuda"
    return f"{install_command(extra='cpu')} ({cards}; without MLX: '.[torch]' and --engine torch)"
