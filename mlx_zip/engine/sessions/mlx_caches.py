"""`MlxCaches`: what a store of sessions needs to know of the caches of a model on MLX."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from mlx_zip.engine.caches import Parts
from mlx_zip.engine.session_arrays import parts_of, read_parts
from mlx_zip.engine.session_caches import bytes_of, can_trim, forked, held_ids, settled
from mlx_zip.engine.session_checks import CacheChecks
from mlx_zip.engine.session_marks import Marks, codec_mark, own_pack_key
from mlx_zip.engine.session_options import SessionOptions
from mlx_zip.engine.session_positions import positions_mark
from mlx_zip.engine.sessions.files import check_held
from mlx_zip.engine.sessions.format import BadFileError, Contents
from mlx_zip.engine.sessions.kept import Ids, Kept
from mlx_zip.engine.sessions.store import SessionStore
from mlx_zip.errors import EngineError
from mlx_zip.hyper.model_fingerprint import name_of
from mlx_zip.layout import is_zip
from mlx_zip.request import base_config
from mlx_zip.state import find_state
from mlx_zip.vocab.first_stage import tokenizer_fingerprint


def open_store(
    model: Any, tokenizer: Any, options: SessionOptions | None = None, max_kv_size: int | None = None
) -> SessionStore:
    """Returns a new store of a model's sessions. max_kv_size: see `MlxCaches`."""
    options = options or SessionOptions()
    return SessionStore(MlxCaches(model, tokenizer, options.share, max_kv_size), options)


def positions_of(model: Any) -> str:
    """Returns the settings, beside the weights, that the keys of a model on MLX depend on, as text."""
    return positions_mark(base_config(model), model.config if is_zip(model) else None)


class MlxCaches:
    """The caches of one model. share: name of the part of the model that is here, "" for a whole model.

    max_kv_size: bound on the ids in a plain model's caches, None for none.

    See `mlx_zip.engine.caches`. A request's cache and a kept one are of the same type: a list of mlx-lm's entries.
    """

    def __init__(self, model: Any, tokenizer: Any, share: str = "", max_kv_size: int | None = None) -> None:
        self.model, self.tokenizer, self._share = model, tokenizer, share
        self.reach = model.config.merge_size if is_zip(model) else 1
        self._checks = CacheChecks(model, max_kv_size)

    @cached_property
    def marks(self) -> Marks:
        model, name = self.model, f"{name_of(self.model)} {self._share}".strip()
        codec = codec_mark(model.config.codec_params if is_zip(model) else None)
        return Marks(name, tokenizer_fingerprint(self.tokenizer), codec, positions_of(model))

    @cached_property
    def own_pack(self) -> str:
        if not is_zip(self.model):
            return ""
        pack = self.model.session.pack
        return own_pack_key(self.model.config.codec_params.start, None if pack is None else pack.fingerprint)

    def held(self, cache: Sequence[Any], base_ids: Sequence[int] | None) -> tuple[Ids, Ids]:
        held = held_ids(cache)
        if held is not None:
            return held
        ids = np.asarray(() if base_ids is None else base_ids, dtype=np.uint32)
        for entry in cache:
            if getattr(entry, "offset", len(ids)) != len(ids):
                raise EngineError(f"the cache holds {entry.offset} ids, and {len(ids)} base ids were given for it")
        return ids, np.arange(1, 1 + len(ids), dtype=np.uint32)

    def kept(self, cache: list[Any]) -> list[Any]:
        return settled(cache)

    def size(self, kept: list[Any]) -> tuple[int, bool]:
        return bytes_of(kept), can_trim(kept)

    def room(self, ids: int) -> int:
        return ids

    def lent(self, kept: Kept, ids: int, alone: bool, start: Any) -> list[Any]:
        cache = kept.cache if alone else forked(kept.cache, ids, len(kept.ends) - ids)
        if start is not None:
            find_state(cache).begun_with([start])  # type: ignore[union-attr]
        return cache

    def parts(self, kept: Kept) -> Parts:
        return parts_of(kept)

    def made(self, contents: Contents, kept: Kept) -> tuple[list[Any], Any]:
        classes, states, extra = read_parts(contents)
        cache = self._checks.made(classes, states, len(kept.ends))
        held = held_ids(cache)
        if held is not None:
            check_held(held, kept)
        elif len(kept.ends) != len(kept.base_ids):
            raise BadFileError("its ids are not base ids")
        self._checks.check_ids(kept.base_ids)
        mx.eval(tree_map(lambda leaf: leaf if isinstance(leaf, mx.array) else None, [entry.state for entry in cache]))
        return cache, extra[2] if len(extra) > 2 else None
