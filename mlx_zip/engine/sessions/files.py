"""Sessions as files: written from what `Caches.parts` tells, and read back, checked against the model.

This module knows neither MLX nor PyTorch. What a KV cache is in a file is said by the engine's own `Caches`.

A file holds all that a session is: KV cache, ids, base ids, the answers' texts with their base ids (the emitted base
ids cannot be derived from a text) and the random state; hyper rows are not in it. With the codebook's log, that is the
conversation in clear. Against other users, files have mode 0600 and a folder that others can write to is not used;
against damage and hostile files, lengths and shapes are checked before anything is built, there are two checksums, and
no pickle. Against somebody who has your account or your disk nothing helps here: checksums are no signatures, and
nothing is encrypted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mlx_zip.engine.sessions.format import FACTS, INDEX, BadFileError, Contents, Marks, Tensor, read, write
from mlx_zip.engine.sessions.kept import Caches, Kept
from mlx_zip.errors import EngineError, MlxZipError, failure_reason, first_message_line

_DAMAGED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, RecursionError)


class SessionBytes:
    """A session as bytes, ready to be written by any thread. Make it, and let go of it, in the engine's thread.

    It does not change when the session goes on. about: further facts for the file, "model" and "tokenizer_config" as
    mlx-lm notes them.
    """

    def __init__(self, kept: Kept, caches: Caches, about: Mapping[str, str]) -> None:
        assert kept.cache is not None
        self._parts = caches.parts(kept)
        self._facts = {
            **caches.marks.facts,
            "pack_key": kept.pack_key,
            "base_tokens": str(len(kept.base_ids)),
            "trims": str(int(kept.trims)),
            **about,
        }

    @property
    def bytes(self) -> int:
        """Bytes of the file, without its header."""
        return sum(view.nbytes for _, view in self._parts.tensors.values())

    def write(self, path: Path, answers: Mapping[str, tuple[int, ...]]) -> None:
        """Writes the session's file, whole or not at all. Raises `OSError`."""
        facts = {**self._facts, "answers": json.dumps(answers)}
        metadata = {**{FACTS + name: text for name, text in facts.items()}, **self._parts.metadata}
        write(path, Contents(metadata, {name: _tensor(*one) for name, one in self._parts.tensors.items()}))


def _tensor(dtype: str, view: np.ndarray) -> Tensor:
    """Returns an array as a tensor of a file."""
    shape = view.shape
    return Tensor(dtype, shape, np.ascontiguousarray(view).reshape(-1).view(np.uint8).data)


# ---- reading


def found_in(path: Path, marks: Marks) -> Kept:
    """Returns the session in a file, without reading its cache. Raises `EngineError`."""
    with _refusals(path):
        return _indexed(path, read(path, whole=False), marks)


def read_session(path: Path, caches: Caches, most_bytes: int) -> Kept:
    """Returns the session in a file, with its cache, checked against the model.

    Raises `EngineError` naming the file for one that is damaged, larger than `most_bytes`, or of another model.
    """
    with _refusals(path):
        contents = read(path, most_bytes=most_bytes)
        kept = _indexed(path, contents, caches.marks)
        kept.cache, kept.random_state = caches.made(contents, kept)
        kept.bytes, kept.trims = caches.size(kept.cache)
        return kept


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Turns what can be wrong with a file into an `EngineError` that names the file."""
    advice = "it is left as it is; delete it, or use it with the model and version that made it"
    try:
        yield
    except BadFileError as error:
        raise EngineError(f"session file {path}: {error} ({advice})") from error
    except OSError as error:
        raise EngineError(f"session file {path}: {failure_reason(error)}") from error
    except (*_DAMAGED, MlxZipError) as error:
        text = f"its contents do not fit together: {first_message_line(error)}"
        raise EngineError(f"session file {path}: {text} ({advice})") from error


def _indexed(path: Path, contents: Contents, marks: Marks) -> Kept:
    """Returns a session without its cache. Raises `BadFileError` and `_DAMAGED`."""
    facts = contents.facts
    marks.check(facts)
    (base_ids, ends) = (_numbers(tensor) for tensor in list(contents.tensors.values())[:INDEX])
    spans = np.diff(ends.astype(np.int64), prepend=0)
    if base_ids.ndim != 1 or ends.ndim != 1 or not len(ends) or spans.min() < 1 or ends[-1] != len(base_ids):
        raise BadFileError("its ids and base ids do not fit together")
    answers = {str(key): tuple(map(int, ids)) for key, ids in json.loads(facts["answers"]).items()}
    return Kept(path.stem, facts["pack_key"], base_ids, ends, None, facts["trims"] == "1", 0, answers)


def _numbers(tensor: Tensor) -> np.ndarray:
    """Returns a tensor of uint32 as a numpy array. Raises `BadFileError` for another type."""
    if tensor.dtype != "U32":
        raise BadFileError("its ids are no 32-bit integers")
    return np.frombuffer(tensor.data, np.uint32).reshape(tensor.shape).copy()


def check_held(held: tuple[np.ndarray, np.ndarray], kept: Kept) -> None:
    """Raises `BadFileError` unless what a codebook holds, as `Caches.held` tells it, is what its file says."""
    if not all(np.array_equal(*pair) for pair in zip(held, (kept.base_ids, kept.ends), strict=True)):
        raise BadFileError("its codebook holds other ids than it says")


# ---- names


def session_paths(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder that are named as sessions are. Raises `OSError`."""
    return (path for path in sorted(folder.iterdir()) if is_session_name(path.name))


def is_session_name(name: str) -> bool:
    """Returns whether a file of this name would be a session's: 16 hexadecimal digits and the suffix .safetensors."""
    stem, _, suffix = name.partition(".")
    return suffix == "safetensors" and len(stem) == 16 and set(stem) <= set("0123456789abcdef")
