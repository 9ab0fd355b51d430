"""`Session`: what a `SessionStore` knows of one session, and the session's file. `SessionCaches`: a model's caches.

MLX and PyTorch each implement `SessionCaches`. A request's cache is what `mlx_zip.engine.parts.Served.new_cache`
returns. The cache kept in a session may be of another type. Only implementations of `SessionCaches` look inside caches.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import Codebook
from mlx_zip.engine.interface import SessionInfo
from mlx_zip.engine.sessions.file_format import (
    INDEX_TENSORS,
    BadFileError,
    FileContents,
    FileTensor,
    ModelIdentity,
    read_session_file,
    write_session_file,
)
from mlx_zip.errors import EngineError, MlxZipError, failure_reason, first_message_line

Ids = NDArray[np.uint32]
AnswerIds = dict[str, tuple[int, ...]]  # key of an answer (for example its text) -> base ids
FileStamp = tuple[int, int, int]  # a file's inode, bytes, and time of its last change


@dataclass(eq=False)
class SessionFile:
    """The file of a session. A longer session that continues the session overwrites the file.

    stamp: the file's stamp when this process last read or wrote the file, None before there is a file. The thread that
    writes the file sets the fields, so use them in one thread at a time.
    """

    path: Path
    stamp: FileStamp | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the file, 0 before there is one."""
        return 0 if self.stamp is None else self.stamp[1]

    def is_unchanged(self) -> bool:
        """Returns whether the file still has `stamp`: False if another process has replaced the file."""
        return file_stamp(self.path) == self.stamp

    def delete_if_unchanged(self) -> None:
        """Deletes the file unless another process has replaced it. Raises `OSError`."""
        if self.stamp is not None and self.is_unchanged():
            self.path.unlink(missing_ok=True)
        self.stamp = None


@dataclass(eq=False)
class Session:
    """What is kept of an ended request, so that a later request can continue from there.

    base_ids: base ids of prompt and answer. ends: for each id, the number of base tokens up to the end of the id.
    cache: None if the session is on disk only. is_trimmable: whether `cache` can be trimmed. bytes: memory of `cache`.
    used: time of the last use in seconds since 1970. answers_version: number of times that answers were noted. saved:
    whether `file` holds the session's present state, not an older one. is_dropped: whether the session was dropped, so
    that a file written after that must be deleted.
    """

    name: str
    pack_key: str
    base_ids: Ids
    ends: Ids
    cache: Any
    is_trimmable: bool
    bytes: int
    answers: AnswerIds = field(default_factory=dict)
    random_state: Any = None
    used: float = field(default_factory=time.time)
    answers_version: int = 0
    file: SessionFile | None = None
    saved: bool = False
    is_dropped: bool = False

    def count_reusable_ids(self, base_tokens: int, merge_size: int) -> int:
        """Returns how many of the session's ids depend only on its first `base_tokens` base tokens.

        merge_size: maximum base tokens of an id. The choice of an id depends on the `merge_size` base tokens from the
        id's beginning on.
        """
        if base_tokens < merge_size:
            return 0
        starts = self.ends[:-1]  # of all ids but the first, which begins at 0
        return min(1 + int(np.searchsorted(starts, base_tokens - merge_size, side="right")), len(self.ends))

    @property
    def can_be_read(self) -> bool:
        """Whether the session is in memory or on disk. While it is being written, it may be in neither."""
        return self.cache is not None or self.saved

    def is_prefix_of(self, other: Session) -> bool:
        """Returns whether `other` has this session's pack and begins with all base ids of this session."""
        n = len(self.base_ids)
        return self.pack_key == other.pack_key and np.array_equal(self.base_ids, other.base_ids[:n])

    def info(self) -> SessionInfo:
        """Returns the session's facts for fronts."""
        return SessionInfo(self.name, len(self.base_ids), len(self.ends), self.bytes, self.saved, self.used)


def file_stamp(path: Path) -> FileStamp | None:
    """Returns a file's stamp, None if there is no file. Raises `OSError`."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def new_session_name() -> str:
    """Returns a random name that no other session has, in this or any other process."""
    return secrets.token_hex(8)


def ids_in_book(book: Codebook) -> tuple[Ids, Ids]:
    """Returns the base ids that a codebook has read, and the ends of its ids, as `SessionCaches.held_ids` does."""
    return book.base_ids(), book.ends().astype(np.uint32)


def answers_within(answers: AnswerIds, base_ids: NDArray[np.uint32]) -> AnswerIds:
    """Returns the answers whose base ids occur, one after the other, in `base_ids`."""
    held = base_ids.tobytes()
    return {key: ids for key, ids in answers.items() if np.array(ids, np.uint32).tobytes() in held}


class SessionCaches(Protocol):
    """How a session store handles the caches of one model. merge_size: maximum base tokens of an id."""

    @property
    def merge_size(self) -> int: ...

    @cached_property
    def identity(self) -> ModelIdentity:
        """The fingerprints and settings that are stored in this model's session files."""
        ...

    @cached_property
    def own_pack_key(self) -> str:
        """The `pack_key` of sessions with the model's own pack, which may be another pack after a restart."""
        ...

    def held_ids(self, cache: Any, base_ids: Sequence[int] | None) -> tuple[Ids, Ids]:
        """Returns the base ids in a request's cache, and for each id the number of base tokens up to the id's end.

        base_ids: the base ids that a plain model's cache holds, because such a cache does not store them. Raises
        `EngineError` if `base_ids` has the wrong length.
        """
        ...

    def prepare_to_keep(self, cache: Any) -> Any:
        """Converts a request's cache into one that a session keeps. `cache` must not be used after that."""
        ...

    def measure(self, kept: Any) -> tuple[int, bool]:
        """Returns the bytes of a kept cache, and whether it can be trimmed to any number of its ids."""
        ...

    def count_fitting_ids(self, ids: int) -> int:
        """Returns how many of the first `ids` ids of a session fit into a request's cache."""
        ...

    def cache_for_request(self, session: Session, ids: int, move: bool, start: Any) -> Any:
        """Returns a request's cache with the first `ids` ids of a session.

        move: True to return the session's own cache, False to return a copy and leave the session's cache unchanged.
        start: pack that the request's codebook begins with, None for the model's own.
        """
        ...

    def file_contents(self, session: Session) -> FileContents:
        """Returns the contents of a session's file, without the facts that `session_as_file` adds.

        The contents do not change when the session is continued.
        """
        ...

    def cache_from_file(self, contents: FileContents, session: Session) -> tuple[Any, Any]:
        """Returns the cache in a session file, and the sampler's random state, None if the file has none.

        Raises `BadFileError` or another error if this model cannot have made the cache.
        """
        ...


# ---- a session's file
#
# A file holds a whole session: KV cache, ids, base ids, random state, and the answers' texts with the base ids that
# were emitted, because these cannot be derived from a text. Hyper rows are not in the file. The conversation is in the
# file unencrypted. Other users cannot read it: files have mode 0600, and a folder that others can write to is not used.
# Damaged and hostile files are refused: lengths and shapes are checked before anything is built, there are two
# checksums, and no pickle. Nothing protects against somebody with access to your account or disk, because checksums are
# not signatures.

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
