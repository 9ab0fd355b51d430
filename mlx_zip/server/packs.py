"""The packs that requests can choose, alone or merged."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_zip.engine import Engine
from mlx_zip.errors import GenerationError, MlxZipError
from mlx_zip.vocab.packs import Pack, as_pack, merge_packs

MERGED_KEPT = 16


@dataclass(frozen=True)
class PackInfo:
    """A pack that can be chosen. entries: how many it has. reason: why the model cannot use it, None if it can."""

    name: str
    entries: int
    reason: str | None = None


class Packs:
    """Packs by name, for any thread. packs: name -> pack, a path or a `Pack`. default: for requests that name none."""

    def __init__(self, packs: Mapping[str, Any], default: Any = None) -> None:
        self._packs, self._default, self._lock = packs, default, threading.Lock()
        self._merged: OrderedDict[tuple[str, ...], Pack] = OrderedDict()

    def chosen(self, names: str | Sequence[str] | None) -> Any:
        """Returns the pack of a name, or of several names merged in their order; the default for none.

        Raises `GenerationError` for an unknown name, and for packs that cannot be merged.
        """
        several = (names,) if isinstance(names, str) else tuple(names or ())
        for name in several:
            if name not in self._packs:
                known = ", ".join(sorted(self._packs)) or "none"
                raise GenerationError(f"pack: there is no pack {name!r:.80}; the server was started with: {known}")
        if len(several) < 2:
            return self._packs[several[0]] if several else self._default
        with self._lock:
            if several not in self._merged:
                self._merged[several] = self._merge(several)
                if len(self._merged) > MERGED_KEPT:
                    self._merged.popitem(last=False)
            self._merged.move_to_end(several)
            return self._merged[several]

    def _merge(self, names: Sequence[str]) -> Pack:
        """Returns the merged packs. Raises `GenerationError`."""
        try:
            return merge_packs([as_pack(self._packs[name]) for name in names])
        except MlxZipError as error:
            raise GenerationError(f"pack: {' and '.join(names)}: {error}") from error

    def infos(self, engine: Engine) -> list[PackInfo]:
        """Returns what packs there are, and whether requests of an engine can begin with them."""
        return [self._info(name, pack, engine) for name, pack in self._packs.items()]

    def _info(self, name: str, pack: Any, engine: Engine) -> PackInfo:
        """Returns what one pack is."""
        entries = 0
        try:
            found = as_pack(pack)
            entries = len(found.entries)
            engine.check_pack(found)
        except MlxZipError as error:
            return PackInfo(name, entries, str(error))
        return PackInfo(name, entries)
