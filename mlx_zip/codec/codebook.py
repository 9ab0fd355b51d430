"""`compress` for whole sequences and `Codebook` for growing ones: the C library's codec with numpy arrays."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec._native import ffi, lib
from mlx_zip.codec.entries import Entries, Installed
from mlx_zip.codec.ids import Uint32s, as_ids, as_one_id, calls_for_one_id, ids_of
from mlx_zip.codec.params import CodecParams, raise_for_status, serialize_codebook
from mlx_zip.errors import CodecError

_UINT32 = np.dtype(np.uint32)


def compress_next(book: Codebook, ids: Any) -> Uint32s:
    """Compresses the base ids that a request reads next -> uint32 [n]. The request's codebook `book` is not changed.

    Compresses the whole text, the base ids of the log and the new ones. If the result begins with the log, returns the
    rest, so a text read in parts gets the same ids as a text read at once. Otherwise, usually after an answer, returns
    `book.compress(ids)`.
    """
    if not (read := book.mark()):
        return compress(book.params, ids)[0]
    whole = compress(book.params, np.concatenate((book.base_ids(), as_ids(ids))))[0]
    return whole[read:] if np.array_equal(whole[:read], book.ids) else book.compress(ids)


def base_ids_of_next_id(book: Codebook, one: int) -> tuple[int, ...]:
    """Returns the base ids of an id that a codebook may read next, even if the id installs its own entry (KwKwK).

    Raises `CodecError` for an id that cannot be read.
    """
    try:
        return book.base_ids_of(one)
    except CodecError:
        book = book.copy()
        book.push(one)
        rows, lengths = book.logged_base_ids(book.mark() - 1)
        return tuple(rows[0, : lengths[0]].tolist())


def compress(params: CodecParams, ids: Any) -> tuple[Uint32s, Entries]:
    """Compresses a whole sequence of n base ids -> (ids uint32 [<= n], all entries at the end).

    At each position the longest installed entry is emitted, and this match plus the next id becomes a new entry, if it
    is not too long and there is room. Without start entries, the result equals that of zip2zip-compression 0.3.4. Under
    the policies lru and use-count, the ids that remain when the table is full are compressed as by `Codebook.compress`.
    ids: see `as_ids`; a contiguous uint32 array is not copied. Raises `CodecError` if an id is neither below
    `params.vocab_size` nor in `params.disabled_ids`, and if a match would be emitted as a hypertoken whose id is also
    in `params.disabled_ids`.
    """
    base_ids = as_ids(ids)
    n, native = len(base_ids), params.native
    bound = lib.mlxzip_entries_bound(native, n)
    out, rows = np.empty(n, np.uint32), np.empty((bound, params.merge_size), np.uint32)
    lengths, counts = np.empty(bound, np.uint8), ffi.new("size_t[3]")
    n_out, n_entries, bad = counts, counts + 1, counts + 2
    status = lib.mlxzip_compress(
        native,
        _id_pointer(base_ids),
        n,
        _id_pointer(out),
        n_out,
        _id_pointer(rows),
        _byte_pointer(lengths),
        n_entries,
        bad,
    )
    if status != lib.MLXZIP_OK:
        _raise_for_bad_id(status, params, base_ids, bad[0], None)
    k = n_entries[0]
    return out[: n_out[0]], Entries(params.vocab_size, rows[:k], lengths[:k])


class Codebook:
    """The decoder side of the codec: reads emitted ids and installs the entries that the compressor made.

    `len(book)` is the number of installed entries. One call with many ids and many calls with one id give equal books.
    An entry that id t installs can be emitted as id t+1. An id stands for the entry that its slot holds when the id is
    read, before a new entry is installed. After an error the book is unchanged. Use a book in one thread at a time.
    Calls release the interpreter lock, except `push` and `expand` of one id, which take less time than releasing it.
    The log of all ids read so far takes 12 bytes per id.
    """

    def __init__(self, params: CodecParams) -> None:
        out = ffi.new("mlxzip_codebook **")
        raise_for_status(lib.mlxzip_new(params.native, out))
        self._set_up(params, out[0])

    def _set_up(self, params: CodecParams, book: Any) -> None:
        """Sets all attributes. book: a codebook of the C library, which this object frees when it is deleted."""
        self.params, self.rewinds = params, 0  # rewinds: number of rewinds so far
        self._book = ffi.gc(book, lib.mlxzip_free)
        owner = self._book, params.native  # objects that the functions for one id keep alive
        calls = calls_for_one_id(owner, int(ffi.cast("uintptr_t", book)))
        self._push_one, self._expand_one, self._entry_words = calls

    @classmethod
    def _from_handle(cls, params: CodecParams, book: Any) -> Codebook:
        """Returns a Codebook that owns `book`, a codebook of the C library."""
        self = cls.__new__(cls)
        self._set_up(params, book)
        return self

    def push(self, ids: Any) -> Installed:
        """Reads one id or n ids (see `as_ids`) and returns the entries that they install.

        Base ids, disabled ids and installed hypertokens are always accepted. The hypertoken of the next free slot is
        accepted if the run of base ids before it can be extended (LZW's KwKwK). Raises `CodecError` for any other id;
        then none of the ids is read.
        """
        packed = self._push_one(ids)
        if packed is None:
            one = as_one_id(ids)
            packed = None if one is None else self._push_one(one)
            if packed is None:  # several ids, or an illegal one, which `_push_array` reports
                return self._push_array(as_ids(ids))
        new = Installed()
        new._params, new._packed = self.params, packed
        return new

    def _push_array(self, ids: Uint32s) -> Installed:
        bad, n_ids = ffi.new("size_t *"), len(ids)
        n = lib.mlxzip_push(self._book, _id_pointer(ids), n_ids, bad)
        if n < 0:
            _raise_for_bad_id(n, self.params, ids, bad[0], self)
        packed = np.empty(n * (4 * (1 + self.params.merge_size) + 1) + n_ids, np.uint8)
        lib.mlxzip_installed(self._book, n_ids, ffi.cast("uint32_t *", ffi.from_buffer(packed)))
        new = Installed()
        new._params, new._packed, new._n_ids = self.params, packed, n_ids
        return new

    def expand(self, ids: Any) -> Uint32s:
        """Returns the base ids that one id or n ids stand for now, uint32. The codebook is not changed.

        Raises `CodecError` for an id that is neither a base id, nor disabled, nor an installed hypertoken.
        """
        words = self._expand_one(ids)
        if words is None and (one := as_one_id(ids)) is not None:
            words = self._expand_one(one)
        return self._expand_array(as_ids(ids)) if words is None else np.frombuffer(words, _UINT32)

    def _expand_array(self, ids: Uint32s) -> Uint32s:
        counts = ffi.new("size_t[2]")
        out = np.empty(len(ids) * min(self.params.merge_size, 4), np.uint32)
        status = lib.mlxzip_expand(
            self._book, _id_pointer(ids), len(ids), _id_pointer(out), len(out), counts, counts + 1
        )
        if status == lib.MLXZIP_E_SPACE:
            out = np.empty(counts[0], np.uint32)
            status = lib.mlxzip_expand(
                self._book, _id_pointer(ids), len(ids), _id_pointer(out), len(out), counts, counts + 1
            )
        if status != lib.MLXZIP_OK:
            _raise_for_bad_id(status, self.params, ids, counts[1], self)
        return out[: counts[0]]

    def spans(self, ids: Any) -> NDArray[np.int32]:
        """Returns the number of base ids that each id stands for now, int32 [n]. Errors as in `expand`."""
        ids, bad = as_ids(ids), ffi.new("size_t *")
        out = np.empty(len(ids), np.int32)
        status = lib.mlxzip_spans(self._book, _id_pointer(ids), len(ids), ffi.from_buffer("int32_t[]", out), bad)
        if status != lib.MLXZIP_OK:
            _raise_for_bad_id(status, self.params, ids, bad[0], self)
        return out

    def compress(self, base_ids: Any) -> Uint32s:
        """Compresses base ids as a continuation of this codebook -> ids uint32. To read the result, `push` it.

        Each emitted id is the longest entry that is installed after the ids before it have been pushed. So, unlike
        `mlx_zip.compress`, no entry is emitted before it is installed. The codebook is not changed. Raises `CodecError`
        as the function `compress` does.
        """
        ids, counts = as_ids(base_ids), ffi.new("size_t[2]")
        out = np.empty(len(ids), np.uint32)
        status = lib.mlxzip_continue(self._book, _id_pointer(ids), len(ids), _id_pointer(out), counts, counts + 1)
        if status != lib.MLXZIP_OK:
            _raise_for_bad_id(status, self.params, ids, counts[1], None)
        return out[: counts[0]]

    def padded_entries(self, first: int, n: int) -> tuple[Uint32s, NDArray[np.uint8]]:
        """Returns base ids [n, merge_size], padded, and lengths [n] of the entries in slots first..first+n-1."""
        rows, lengths = np.empty((n, self.params.merge_size), np.uint32), np.empty(n, np.uint8)
        raise_for_status(lib.mlxzip_entries(self._book, first, n, _id_pointer(rows), _byte_pointer(lengths)))
        return rows, lengths

    def entry_words(self, slot: int) -> bytes:
        """Returns the base ids of the entry in `slot` as 32-bit words in the machine's byte order.

        Raises `CodecError` for a slot without an entry.
        """
        words = self._entry_words(slot)
        if words is None:
            raise CodecError(f"slot {slot} has no entry: the codebook has {len(self)}")
        return words

    def entry(self, slot: int) -> tuple[int, ...]:
        """Returns the base ids of the entry in `slot`. Raises `CodecError` for a slot without an entry."""
        return ids_of(self.entry_words(slot))

    def base_ids_of(self, one: int) -> tuple[int, ...]:
        """Returns the base ids that one id stands for now, as `expand` does, but without making an array."""
        words = self._expand_one(one)
        return tuple(self.expand(one).tolist()) if words is None else ids_of(words)

    def logged_base_ids(self, first: int = 0, n: int | None = None) -> tuple[Uint32s, NDArray[np.uint8]]:
        """Returns what n ids of the log stood for when they were read: base ids [n, merge_size], padded; lengths [n].

        first: index in the log of the first of these ids. n: None for all ids from `first` on. (`expand` uses the
        entries that are installed now; these may be others after evictions, under lru and use-count.) Raises
        `CodecError` if the log is shorter.
        """
        n = self.mark() - first if n is None else n
        if first < 0 or n < 0 or first + n > self.mark():
            raise CodecError(f"ids {first} to {first + n} are not all in the log: the codebook has read {self.mark()}")
        rows, lengths = np.empty((n, self.params.merge_size), np.uint32), np.empty(n, np.uint8)
        raise_for_status(lib.mlxzip_logged(self._book, first, n, _id_pointer(rows), _byte_pointer(lengths)))
        return rows, lengths

    def base_ids(self, first: int = 0) -> Uint32s:
        """Returns the base ids that the log stands for, uint32. first: index in the log of the id to begin with.

        Errors as in `logged_base_ids`.
        """
        rows, lengths = self.logged_base_ids(first)
        return rows[np.arange(self.params.merge_size) < lengths[:, None]]

    def ends(self, first: int = 0) -> NDArray[np.int64]:
        """Returns for each id of the log the number of base ids up to the end of that id, int64 [n].

        first: index in the log of the id to begin with. Errors as in `logged_base_ids`.
        """
        spans = self.logged_base_ids(first)[1].astype(np.int64)
        return self.base_length - spans.sum() + np.cumsum(spans)

    @property
    def entries(self) -> Entries:
        """A snapshot of all installed entries in id order, start entries first."""
        rows, lengths = self.padded_entries(0, len(self))
        return Entries(self.params.vocab_size, rows, lengths)

    @property
    def ids(self) -> Uint32s:
        """A copy of the id log, all ids that were pushed and not rewound: uint32 [mark()]."""
        n = self.mark()
        return np.frombuffer(bytes(ffi.buffer(lib.mlxzip_log(self._book), 4 * n)) if n else b"", np.uint32)

    @property
    def last(self) -> int:
        """The last id of the log; O(1). Raises `IndexError` when it is empty."""
        n = self.mark()
        if not n:
            raise IndexError("the codebook has read no id")
        return lib.mlxzip_log(self._book)[n - 1]

    @property
    def base_length(self) -> int:
        """Number of base ids that the id log expands to; O(1)."""
        return lib.mlxzip_base_length(self._book)

    def __len__(self) -> int:
        return lib.mlxzip_size(self._book)

    def mark(self) -> int:
        """Returns the length of the id log; O(1)."""
        return lib.mlxzip_mark(self._book)

    def rewind(self, mark: int) -> None:
        """Goes back to the state after the first `mark` ids of the log, 0..`mark()`.

        Takes O(entries undone) time, or O(ids undone) under the policies lru and use-count. Raises `CodecError` for a
        mark beyond the log.
        """
        if not 0 <= mark <= self.mark():
            raise CodecError(f"cannot rewind to {mark}: the codebook has read {self.mark()} ids")
        raise_for_status(lib.mlxzip_rewind(self._book, mark))
        self.rewinds += 1

    def copy(self) -> Codebook:
        """Returns an independent codebook in the same state."""
        out = ffi.new("mlxzip_codebook **")
        raise_for_status(lib.mlxzip_copy(self._book, out))
        return self._from_handle(self.params, out[0])

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Codebook:
        return self.copy()

    def to_bytes(self) -> bytes:
        """Returns parameters and id log in the saved form that `native/mlxzip.h` defines."""
        return serialize_codebook(self._book)

    @classmethod
    def from_bytes(cls, data: bytes) -> Codebook:
        """Returns the codebook that `to_bytes` saved, by replaying its log. Raises `CodecError` for any other bytes."""
        params = CodecParams.from_bytes(data)
        view, out = ffi.from_buffer("uint8_t[]", data), ffi.new("mlxzip_codebook **")
        raise_for_status(lib.mlxzip_from_bytes(params.native, view, len(view), out))
        return cls._from_handle(params, out[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return Codebook.from_bytes, (self.to_bytes(),)

    def __repr__(self) -> str:
        return f"<Codebook: {len(self)} of {self.params.codebook_size} entries after {self.mark()} ids>"


def _id_pointer(array: NDArray[Any]) -> Any:
    return ffi.from_buffer("uint32_t[]", array)


def _byte_pointer(array: NDArray[np.uint8]) -> Any:
    return ffi.from_buffer("uint8_t[]", array)


def _raise_for_bad_id(status: int, params: CodecParams, ids: Any, index: int, book: Codebook | None) -> NoReturn:
    """Raises the exception for an error of the C library about the id at `index`.

    book: the codebook that read the ids; None if the ids were to be compressed, so that hypertokens are not valid.
    """
    reasons = {
        lib.MLXZIP_E_ID: f"is neither a base id (below {params.vocab_size}) nor a disabled id"
        + (" nor an installed hypertoken" if book is not None else ""),
        lib.MLXZIP_E_UNKNOWN: "is a hypertoken that is neither installed nor the next one to be installed",
        lib.MLXZIP_E_NO_PREV: "is the next hypertoken, but there is no run before it to extend",
        lib.MLXZIP_E_PREV_FULL: f"is the next hypertoken, but the run before it has {params.merge_size} ids already",
        lib.MLXZIP_E_DUPLICATE: "is the next hypertoken, but the run it would stand for is already installed",
        lib.MLXZIP_E_CLASH: "begins a match whose hypertoken id is also a disabled id: choose a pad id and disabled "
        "ids that are no hypertoken ids",
    }
    if status not in reasons:
        raise_for_status(status)
    raise CodecError(f"id {ids[index]} at index {index} {reasons[status]}")
