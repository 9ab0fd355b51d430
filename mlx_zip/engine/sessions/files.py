"""Writes sessions to files, and reads them back and checks them against the model.

This module imports neither MLX nor PyTorch: `SessionCaches` turns a KV cache into tensors and back.

A file holds a whole session: KV cache, ids, base ids, random state, and the answers' texts with the base ids that were
emitted, because these cannot be derived from a text. Hyper rows are not in the file. The conversation is in the file
unencrypted. Other users cannot read it: files have mode 0600, and a folder that others can write to is not used.
Damaged and hostile files are refused: lengths and shapes are checked before anything is built, there are two checksums,
and no pickle. Nothing protects against somebody with access to your account or disk, because checksums are not
signatures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mlx_zip.engine.sessions.file_format import (
    INDEX_TENSORS,
    BadFileError,
    FileContents,
    FileTensor,
    ModelIdentity,
    read_session_file,
    write_session_file,
)
from mlx_zip.engine.sessions.session import AnswerIds, Session, SessionCaches
from mlx_zip.errors import EngineError, MlxZipError, failure_reason, first_message_line

_DAMAGE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, RecursionError)


def session_as_file(session: Session, caches: SessionCaches, file_facts: Mapping[str, str]) -> FileContents:
    """Returns the contents of a session's file, without its answers. Call this in the engine's thread.

    The contents do not change when the session is continued. file_facts: further facts for the file: "model" and
    "tokenizer_config", in mlx-lm's format.
    """
    facts = {
        **caches.identity.facts,
        "pack_key": session.pack_key,
        "base_tokens": str(len(session.base_ids)),
        "trims": str(int(session.is_trimmable)),
        **file_facts,
    }
    return caches.file_contents(session).with_facts(facts)


def write_session(path: Path, contents: FileContents, answers: AnswerIds) -> None:
    """Writes a session to a file atomically. contents: result of `session_as_file`. Raises `OSError`."""
    write_session_file(path, contents.with_facts({"answers": json.dumps(answers)}))


# ---- reading


def read_session_index(path: Path, identity: ModelIdentity) -> Session:
    """Reads a session without its cache. Raises `EngineError` if the file is damaged or of another model."""
    with _errors_name_the_file(path):
        return _session_without_cache(path, read_session_file(path, whole=False), identity)


def read_session(path: Path, caches: SessionCaches, most_bytes: int) -> Session:
    """Reads a session with its cache and checks it against the model.

    Raises `EngineError`, naming the file, if the file is damaged, unreadable, larger than `most_bytes`, or of another
    model.
    """
    with _errors_name_the_file(path):
        contents = read_session_file(path, most_bytes=most_bytes)
        session = _session_without_cache(path, contents, caches.identity)
        session.cache, session.random_state = caches.cache_from_file(contents, session)
        session.bytes, session.is_trimmable = caches.measure(session.cache)
        return session


@contextmanager
def _errors_name_the_file(path: Path) -> Iterator[None]:
    """Context manager: turns all errors that a damaged or foreign file can cause into an `EngineError` with `path`."""
    advice = "it is left as it is; delete it, or use it with the model and version that made it"
    try:
        yield
    except BadFileError as error:
        raise EngineError(f"session file {path}: {error} ({advice})") from error
    except OSError as error:
        raise EngineError(f"session file {path}: {failure_reason(error)}") from error
    except (*_DAMAGE_ERRORS, MlxZipError) as error:
        text = f"its contents do not fit together: {first_message_line(error)}"
        raise EngineError(f"session file {path}: {text} ({advice})") from error


def _session_without_cache(path: Path, contents: FileContents, identity: ModelIdentity) -> Session:
    """Returns the session in a file, without its cache. Raises `BadFileError` or one of `_DAMAGE_ERRORS`."""
    facts = contents.facts
    identity.raise_if_other_model(facts)
    (base_ids, ends) = (_uint32_array(tensor) for tensor in list(contents.tensors.values())[:INDEX_TENSORS])
    spans = np.diff(ends.astype(np.int64), prepend=0)
    if base_ids.ndim != 1 or ends.ndim != 1 or not len(ends) or spans.min() < 1 or ends[-1] != len(base_ids):
        raise BadFileError("its ids and base ids do not fit together")
    answers = {str(key): tuple(map(int, ids)) for key, ids in json.loads(facts["answers"]).items()}
    return Session(path.stem, facts["pack_key"], base_ids, ends, None, facts["trims"] == "1", 0, answers)


def _uint32_array(tensor: FileTensor) -> np.ndarray:
    if tensor.dtype != "U32":
        raise BadFileError("its ids are no 32-bit integers")
    return np.frombuffer(tensor.data, np.uint32).reshape(tensor.shape).copy()


def raise_if_other_ids(held: tuple[np.ndarray, np.ndarray], session: Session) -> None:
    """Raises `BadFileError` if `held`, from `SessionCaches.held_ids`, differs from the ids that `session` names."""
    if not all(np.array_equal(*pair) for pair in zip(held, (session.base_ids, session.ends), strict=True)):
        raise BadFileError("its codebook holds other ids than it says")


# ---- names


def list_session_files(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder that have the name of a session file, sorted. Raises `OSError`."""
    return (path for path in sorted(folder.iterdir()) if is_session_file_name(path.name))


def is_session_file_name(name: str) -> bool:
    """Returns whether `name` is that of a session file: 16 hexadecimal digits and the suffix .safetensors."""
    stem, _, suffix = name.partition(".")
    return suffix == "safetensors" and len(stem) == 16 and set(stem) <= set("0123456789abcdef")
