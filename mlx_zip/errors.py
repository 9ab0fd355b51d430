"""The one exception family. Each message is one line that names the culprit and says what to do."""

from collections.abc import Iterator
from contextlib import contextmanager


class MlxZipError(Exception):
    """Base of every error that mlx_zip raises on purpose; the command line prints it and exits with status 2."""


class CodecError(MlxZipError, ValueError):
    """Ids that are neither base ids nor hypertokens known at that point, or codec parameters out of range."""


class ConfigError(MlxZipError, ValueError):
    """A configuration that is unknown, incomplete or contradicts the model or tokenizer beside it."""


class ModelError(MlxZipError, ValueError):
    """A model, cache or input that the runtime cannot run as asked."""


class ConversionError(MlxZipError):
    """A checkpoint that cannot be converted; nothing was written."""


class GenerationError(MlxZipError, ValueError):
    """A request that cannot be generated as asked (empty prompt, prompt longer than the context, a refused flag)."""


class DataError(MlxZipError, ValueError):
    """Training or evaluation data that cannot be read, are empty, or do not fit the model beside them."""


class TrainingError(MlxZipError):
    """A training run that cannot start, go on or be resumed; what was saved before stays good."""


class InstallationError(MlxZipError, ImportError):
    """A library that this installation lacks."""


@contextmanager
def bare_exceptions_as_value_errors() -> Iterator[None]:
    """The `tokenizers` library raises the bare class `Exception` for a tokenizer.json that it cannot make sense of."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise ValueError(str(error)) from error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its class when it has none."""
    if isinstance(error, KeyError):
        return f"key {error} is missing"
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


@contextmanager
def explained_imports() -> Iterator[None]:
    """Turns a failed import of MLX into an `InstallationError`: on Linux its flavour is chosen by an extra."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "mlx":
            raise
        raise InstallationError(
            "MLX is not installed here: pip install 'mlx_zip[cpu]' or 'mlx_zip[mlx-cuda]' (on macOS: pip install mlx)"
        ) from error
