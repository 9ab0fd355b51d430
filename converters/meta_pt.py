"""Reads `meta.pt`, a torch file, without unpickling: only plain values are built and no code is run.

zip2zip 0.2.0 lets `args` in a checkpoint's `meta.pt` override two encoder options, and loads the file with full
unpickling, which can run any code. Here the pickle's opcodes are interpreted one by one into dicts, lists, tuples,
strings and numbers. Anything that names a class or function becomes an inert `Opaque`, and the name is never looked up.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlx_zip.errors import ConversionError, errors_as

MAX_PICKLE_BYTES = 64 << 20
MAX_OPERATIONS = 1 << 20  # take a second or two to run; a small zip file can hold many more
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # first pickle of files written before torch 1.6
_MARK = object()


class Opaque:
    """Placeholder for an object that is not built. name: its class, "?" if unknown. state, items: set by the pickle."""

    def __init__(self, name: str = "?") -> None:
        self.name = name
        self.state: Any = None
        self.items: dict[Any, Any] = {}


def read_encoder_overrides(path: Path) -> dict[str, bool]:
    """Returns the encoder options in `meta.pt`: {"causal": bool, "residual": bool}, or {} if its `args` is empty.

    As in zip2zip 0.2.0, if `args` is not empty, a missing `encoder_causal` or `no_encoder_residual` means false. Raises
    `ConversionError` if the file is malformed.
    """
    meta = read_meta_pt(path)
    args = _plain_dict(meta.get("args")) if isinstance(meta, dict) else None
    if not args:
        return {}
    return {
        "causal": _read_flag(args, "encoder_causal", path),
        "residual": not _read_flag(args, "no_encoder_residual", path),
    }


def _plain_dict(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, Opaque):
        value = value.items or value.state
    return value if isinstance(value, dict) else None


def _read_flag(args: dict[Any, Any], name: str, path: Path) -> bool:
    """Returns whether the option `name` in `args` is true; False if it is missing.

    Raises `ConversionError` if the option is a pickled object, not a plain value.
    """
    value = args.get(name, False)
    if value is not None and not isinstance(value, bool | int | float | str):
        raise ConversionError(f"{path.name}: args.{name} is not a plain value")
    return bool(value)


def read_meta_pt(path: Path) -> Any:
    """Returns the object in a file written by `torch.save`, with an `Opaque` in place of each tensor and class.

    Raises `ConversionError` if the file is malformed.
    """
    try:
        with open(path, "rb") as file:
            if zipfile.is_zipfile(file):
                return _read_one_pickle(io.BytesIO(_pickle_in_zip(path)))
            file.seek(0)
            data = file.read(MAX_PICKLE_BYTES + 1)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise ConversionError(f"cannot read {path.name}: {error}") from error
    except _PickleError as error:
        raise ConversionError(f"{path.name} is malformed: {error}") from error
    return _read_legacy_format(path, data)


def _pickle_in_zip(path: Path) -> bytes:
    """Returns the pickle in a zip file of torch: the member data.pkl. Raises unless there is exactly one."""
    with zipfile.ZipFile(path) as archive:
        names = [i for i in archive.infolist() if i.filename == "data.pkl" or i.filename.endswith("/data.pkl")]
        if len(names) != 1:
            raise _PickleError(f"{len(names)} data.pkl inside")
        with archive.open(names[0]) as member:
            data = member.read(MAX_PICKLE_BYTES + 1)
    if len(data) > MAX_PICKLE_BYTES:
        raise _PickleError(f"its data.pkl is larger than {MAX_PICKLE_BYTES} bytes")
    return data


def _read_legacy_format(path: Path, data: bytes) -> Any:
    """Returns the object in torch's old format: four pickles with magic number, protocol, system info and object."""
    stream = io.BytesIO(data)
    with errors_as(ConversionError, f"{path.name} is malformed", _PickleError):
        if _read_one_pickle(stream) != _LEGACY_MAGIC:
            raise _PickleError("not a file written by torch.save")
        for _ in range(2):
            _read_one_pickle(stream)
        return _read_one_pickle(stream)


class _PickleError(Exception):
    """The reason why a pickle cannot be read; reported as a `ConversionError` with the file's name."""


def _read_one_pickle(stream: io.BytesIO) -> Any:
    try:
        return _PickleMachine().run(pickletools.genops(stream))
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, EOFError) as error:
        raise _PickleError(str(error)[:200] or type(error).__name__) from error


class _PickleMachine:
    """Pickle's stack machine, restricted to plain values. stack: values and marks. memo: number -> stored value."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, operations: Iterator[tuple[Any, Any, int | None]]) -> Any:
        """Runs operations up to STOP and returns the object on the stack. operations: those of `pickletools.genops`."""
        for done, (opcode, argument, _) in enumerate(operations):
            if done == MAX_OPERATIONS:
                raise _PickleError(f"it has more than {MAX_OPERATIONS} operations")
            if opcode.name == "STOP":
                return self.stack.pop()
            if opcode.name in _LITERALS:
                self.stack.append(argument)
            elif opcode.name in _CONSTANTS:
                self.stack.append(_CONSTANTS[opcode.name]())
            elif opcode.name not in _IGNORED:
                _opcode_handler(opcode.name)(self, argument)
        raise _PickleError("it has no end")

    def pop_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise _PickleError("it has no mark where one is needed")
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise _PickleError("its stack runs empty")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def extend(self, values: list[Any]) -> None:
        """Appends values to the list on top of the stack; drops the values if an `Opaque` is there."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, Opaque):
            raise _PickleError("it appends to something that is not a list")

    def set_items(self, values: list[Any]) -> None:
        """Sets items of the dict or `Opaque` on top of the stack. values: keys and values in turn."""
        target = self.stack[-1]
        items = target.items if isinstance(target, Opaque) else target
        if not isinstance(items, dict) or len(values) % 2:
            raise _PickleError("it sets items of something that is not a dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            items[_hashable_key(key)] = value

    def opaque(self, consumed: list[Any]) -> None:
        """Pushes an `Opaque` in place of an object. consumed: its class and arguments, already off the stack."""
        name = consumed[0].name if consumed and isinstance(consumed[0], Opaque) else "?"
        self.stack.append(Opaque(name))

    def build(self) -> None:
        (state,) = self.pop(1)
        if not isinstance(self.stack[-1], Opaque):
            raise _PickleError("it sets the state of a plain value")
        self.stack[-1].state = state


def _hashable_key(key: Any) -> Any:
    """Returns `key` unchanged if hashing it cannot recurse, else a new `Opaque`."""
    return key if key is None or isinstance(key, str | int | float | bytes) else Opaque()


_LITERALS = {
    "INT",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG",
    "LONG1",
    "LONG4",
    "FLOAT",
    "BINFLOAT",
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
    "UNICODE",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
    "BYTEARRAY8",
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "MARK": lambda: _MARK,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": list,
}
_IGNORED = {"PROTO", "FRAME"}
_Handler = Callable[[_PickleMachine, Any], object]


def _dict_from_items(values: list[Any]) -> dict[Any, Any]:
    if len(values) % 2:
        raise _PickleError("a dict has a key without value")
    return {_hashable_key(k): v for k, v in zip(values[::2], values[1::2], strict=True)}


def _push_from_memo(m: _PickleMachine, index: Any) -> None:
    m.stack.append(m.memo[int(index)])


def _put_in_memo(m: _PickleMachine, index: Any) -> None:
    m.memo[int(index)] = m.stack[-1]


def _push_instance(m: _PickleMachine, name: Any) -> None:
    """Pops the arguments above the last mark and pushes an `Opaque` for an object of the class `name`."""
    m.pop_mark()
    m.stack.append(Opaque(str(name)))


_HANDLERS: dict[str, _Handler] = {
    "POP": lambda m, _: m.pop(1),
    "POP_MARK": lambda m, _: m.pop_mark(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    "GET": _push_from_memo,
    "BINGET": _push_from_memo,
    "LONG_BINGET": _push_from_memo,
    "PUT": _put_in_memo,
    "BINPUT": _put_in_memo,
    "LONG_BINPUT": _put_in_memo,
    "MEMOIZE": lambda m, _: _put_in_memo(m, len(m.memo)),
    "APPEND": lambda m, _: m.extend(m.pop(1)),
    "APPENDS": lambda m, _: m.extend(m.pop_mark()),
    "ADDITEMS": lambda m, _: m.extend(m.pop_mark()),
    "LIST": lambda m, _: m.stack.append(m.pop_mark()),
    "FROZENSET": lambda m, _: m.stack.append(m.pop_mark()),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.pop_mark())),
    "TUPLE1": lambda m, _: m.stack.append(tuple(m.pop(1))),
    "TUPLE2": lambda m, _: m.stack.append(tuple(m.pop(2))),
    "TUPLE3": lambda m, _: m.stack.append(tuple(m.pop(3))),
    "DICT": lambda m, _: m.stack.append(_dict_from_items(m.pop_mark())),
    "SETITEM": lambda m, _: m.set_items(m.pop(2)),
    "SETITEMS": lambda m, _: m.set_items(m.pop_mark()),
    "GLOBAL": lambda m, name: m.stack.append(Opaque(str(name))),
    "STACK_GLOBAL": lambda m, _: m.stack.append(Opaque(" ".join(v for v in m.pop(2) if isinstance(v, str)))),
    "REDUCE": lambda m, _: m.opaque(m.pop(2)),
    "NEWOBJ": lambda m, _: m.opaque(m.pop(2)),
    "NEWOBJ_EX": lambda m, _: m.opaque(m.pop(3)),
    "INST": _push_instance,
    "OBJ": lambda m, _: m.opaque(m.pop_mark()),
    "BUILD": lambda m, _: m.build(),
    "PERSID": lambda m, _: m.stack.append(Opaque("storage")),
    "BINPERSID": lambda m, _: m.opaque(m.pop(1)),
}


def _opcode_handler(name: str) -> _Handler:
    if name not in _HANDLERS:
        raise _PickleError(f"opcode {name} is not read")
    return _HANDLERS[name]
