"""Sessions as files: a cache's arrays as the tensors of a file, and back, checked against the model.

The tensors and their names are those of mlx-lm's `save_prompt_cache`, so mlx-lm reads the cache of such a file. What
mlx-lm has no place for follows as if it were one more entry of the cache: base ids, the ends of ids, and the sampler's
random state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlx_zip.engine.kept_session import Kept
from mlx_zip.engine.session_caches import bytes_of, can_trim, held_ids, used_part
from mlx_zip.engine.session_checks import CacheChecks
from mlx_zip.engine.session_format import BadFileError, Contents, Tensor, read, write
from mlx_zip.errors import EngineError, MlxZipError, first_line, reason

FORMAT = "mlx_zip session 1"
INDEX = 2  # tensors that a session is found by
_NAMES = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16", mx.float16: "F16",
    mx.bfloat16: "BF16", mx.uint32: "U32", mx.int32: "I32", mx.float32: "F32", mx.uint64: "U64", mx.int64: "I64",
    mx.float64: "F64", mx.complex64: "C64",
}  # fmt: skip
_NUMPY = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "F16": np.float16,
    "BF16": np.uint16, "U32": np.uint32, "I32": np.int32, "F32": np.float32, "U64": np.uint64, "I64": np.int64,
    "F64": np.float64, "C64": np.complex64,
}  # fmt: skip
_DAMAGED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, RecursionError)


@dataclass(frozen=True)
class Marks:
    """What a session's file must agree with: fingerprints of the model, its tokenizer and its codec ("" for none)."""

    model_fingerprint: str
    tokenizer_fingerprint: str
    codec: str

    def check(self, facts: Mapping[str, str]) -> None:
        """Raises `BadFileError` if a file's facts name another format, model, tokenizer or codec."""
        if facts.get("format") != FORMAT:
            found = facts.get("format", "unknown")
            raise BadFileError(f"its format is {found!r:.60}, this version of mlx_zip reads {FORMAT!r}")
        words = {"model_fingerprint": "model", "tokenizer_fingerprint": "tokenizer", "codec": "codec parameters"}
        for name, own in asdict(self).items():
            if facts.get(name) != own:
                raise BadFileError(f"it was made with another {words[name]} than the one that is loaded")


class Snapshot:
    """A session as bytes, ready to be written by any thread. Make it, and let go of it, in the engine's thread.

    It does not change when the session goes on: it shares the memory of the session's arrays, which MLX copies before
    it writes to them. about: further facts for the file, "model" and "tokenizer_config" as mlx-lm notes them.
    """

    def __init__(self, kept: Kept, marks: Marks, about: Mapping[str, str]) -> None:
        assert kept.cache is not None
        arrays, scalars = _as_arrays([used_part(entry).state for entry in kept.cache])
        classes = [type(entry).__name__ for entry in kept.cache]
        extra = [kept.base_ids, kept.ends, *([] if kept.random_state is None else [kept.random_state])]
        index = {f"{len(classes)}.{i}": mx.array(array) for i, array in enumerate(extra)}
        mx.eval([*index.values(), *arrays.values()])
        self._arrays = {name: _host_view(array) for name, array in {**index, **arrays}.items()}
        self._classes: list[Any] = [classes, scalars]
        self._facts = {
            "format": FORMAT,
            **asdict(marks),
            "pack_key": kept.pack_key,
            "base_tokens": str(len(kept.base_ids)),
            "trims": str(int(kept.trims)),
            **about,
        }

    @property
    def bytes(self) -> int:
        """Bytes of the file, without its header."""
        return sum(view.nbytes for _, view in self._arrays.values())

    def write(self, path: Path, answers: Mapping[str, tuple[int, ...]]) -> None:
        """Writes the session's file, whole or not at all. Raises `OSError`."""
        facts = {**self._facts, "answers": json.dumps(answers)}
        flat: Any = tree_flatten([facts, *self._classes])
        tensors = {name: _tensor(dtype, view) for name, (dtype, view) in self._arrays.items()}
        write(path, Contents(dict(flat), tensors), INDEX)


def _as_arrays(states: list[Any]) -> tuple[dict[str, mx.array], list[Any]]:
    """Returns the states of a cache's entries as arrays by place, and the places of other values, as mlx-lm does."""
    arrays: dict[str, mx.array] = {}
    scalars: list[Any] = [""]
    for place, leaf in tree_flatten(states):
        if isinstance(leaf, mx.array):
            arrays[place] = leaf
        elif isinstance(leaf, str):
            scalars.append((place, "string"))
            arrays[place] = mx.array([ord(character) for character in leaf])
        else:
            scalars.append((place, "none" if leaf is None else "scalar"))
            arrays[place] = mx.array([] if leaf is None else leaf)
    return arrays, scalars


def _host_view(array: mx.array) -> tuple[str, np.ndarray]:
    """Returns the type of a computed array, as safetensors calls it, and a view of its memory."""
    dtype = _NAMES[array.dtype]
    return dtype, np.array(array.view(mx.uint16) if dtype == "BF16" else array, copy=False)  # numpy has no bfloat16


def _tensor(dtype: str, view: np.ndarray) -> Tensor:
    """Returns an array as a tensor of a file."""
    shape = view.shape
    return Tensor(dtype, shape, np.ascontiguousarray(view).reshape(-1).view(np.uint8).data)


# ---- reading


def found_in(path: Path, marks: Marks) -> Kept:
    """Returns the session in a file, without reading its cache. Raises `EngineError`."""
    with _refusals(path):
        contents = read(path, INDEX, whole=False)
        return _indexed(path, contents, marks)


def read_session(path: Path, marks: Marks, checks: CacheChecks, most_bytes: int) -> Kept:
    """Returns the session in a file, with its cache, checked against the model.

    Raises `EngineError` naming the file for one that is damaged, larger than `most_bytes`, or of another model.
    """
    with _refusals(path):
        contents = read(path, INDEX, most_bytes=most_bytes)
        kept = _indexed(path, contents, marks)
        kept.cache = _cache(contents, checks, kept)
        kept.trims, kept.bytes = can_trim(kept.cache), bytes_of(kept.cache)
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
        raise EngineError(f"session file {path}: {reason(error)}") from error
    except (*_DAMAGED, MlxZipError) as error:
        text = f"its contents do not fit together: {first_line(error)}"
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


def _cache(contents: Contents, checks: CacheChecks, kept: Kept) -> list[Any]:
    """Returns the cache in a file. Raises `BadFileError`, `MlxZipError` and `_DAMAGED`."""
    tree: Any = tree_unflatten(list(contents.metadata.items()))
    _, classes, scalars = tree
    arrays: dict[str, Any] = {place: _array(tensor) for place, tensor in contents.tensors.items()}
    for place, kind in scalars[1:]:
        arrays[place] = _plain(arrays[place], kind)
    *states, extra = _unflattened(arrays)
    cache = checks.made(classes, states, len(kept.ends))
    held = held_ids(cache)
    if held is not None and not all(
        np.array_equal(*pair) for pair in zip(held, (kept.base_ids, kept.ends), strict=True)
    ):
        raise BadFileError("its codebook holds other ids than it says")
    if held is None and len(kept.ends) != len(kept.base_ids):
        raise BadFileError("its ids are not base ids")
    checks.check_ids(kept.base_ids)
    kept.random_state = extra[2] if len(extra) > 2 else None
    mx.eval(tree_map(lambda leaf: leaf if isinstance(leaf, mx.array) else None, [entry.state for entry in cache]))
    return cache


def _unflattened(arrays: Mapping[str, Any]) -> list[Any]:
    """Returns arrays by place as the tree that they were flattened from."""
    tree: Any = tree_unflatten(list(arrays.items()))
    return list(tree)


def _array(tensor: Tensor) -> mx.array:
    """Returns a tensor of a file as an array."""
    flat = np.frombuffer(tensor.data, _NUMPY[tensor.dtype]) if len(tensor.data) else np.zeros(0, _NUMPY[tensor.dtype])
    array = mx.array(flat.reshape(tensor.shape))
    return array.view(mx.bfloat16) if tensor.dtype == "BF16" else array


def _plain(array: mx.array, kind: str) -> Any:
    """Returns what an array stands for: a "scalar", a "string" or "none". Raises `BadFileError` for another kind."""
    if kind == "scalar":
        return array.item()
    if kind == "string":
        return "".join(map(chr, array.tolist()))  # type: ignore[arg-type]
    if kind == "none":
        return None
    raise BadFileError(f"it has a value of the unknown kind {kind!r:.40}")


def session_paths(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder that are named as sessions are. Raises `OSError`."""
    return (path for path in sorted(folder.iterdir()) if is_session_name(path.name))


def is_session_name(name: str) -> bool:
    """Returns whether a file of this name would be a session's: 16 hexadecimal digits and the suffix .safetensors."""
    stem, _, suffix = name.partition(".")
    return suffix == "safetensors" and len(stem) == 16 and set(stem) <= set("0123456789abcdef")
