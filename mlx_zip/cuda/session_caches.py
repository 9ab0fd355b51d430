"""`CudaCaches`: saves rows of a batch for the store of sessions; a session keeps a `Snapshot` on the host.

A session's file holds the ids that were read, what the codebook began with, and the keys and values in the model's
dtype. Hyper rows are not in the file; they are made again when a request continues the session.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mlx_zip.codec import Codebook
from mlx_zip.cuda.batch import Batch
from mlx_zip.cuda.model import CudaModel, SequenceStart
from mlx_zip.cuda.network.checkpoint import FLOAT_DTYPES
from mlx_zip.cuda.sequence import SequenceState, Snapshot
from mlx_zip.engine.sessions.file_format import (
    FACT_PREFIX,
    TORCH_FORMAT,
    BadFileError,
    FileContents,
    FileTensor,
    ModelIdentity,
    codec_settings_text,
    pack_key_of,
    position_settings_text,
)
from mlx_zip.engine.sessions.session import Ids, Session, ids_in_book, raise_if_other_ids
from mlx_zip.errors import ModelError
from mlx_zip.packs.pack import tuned_fingerprint
from mlx_zip.vocab.first_stage import tokenizer_fingerprint

DTYPE_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
FREQUENCY_SET_FACT = "which"  # name of the fact that holds the set of rotary frequencies


class CudaCaches:
    """The `SessionCaches` (`mlx_zip.engine.sessions.session`) of one model's batch.

    A snapshot never changes: a request that continues a session gets a copy of the session's snapshot on the device.
    """

    def __init__(self, model: CudaModel, tokenizer: Any, batch: Batch) -> None:
        self._model, self._tokenizer, self._batch = model, tokenizer, batch
        self.merge_size = 1 if model.config is None else model.config.merge_size

    @cached_property
    def identity(self) -> ModelIdentity:
        model = self._model
        codec = codec_settings_text(model.params if model.has_hypertokens else None)
        positions = position_settings_text(model.folder.config, model.config)
        dtype = str(model.dtype).removeprefix("torch.")
        return ModelIdentity(
            model.fingerprint, tokenizer_fingerprint(self._tokenizer), codec, positions, dtype, TORCH_FORMAT
        )

    @cached_property
    def own_pack_key(self) -> str:
        begin = self._model.default_start
        return pack_key_of(begin.params.start, tuned_fingerprint(begin.pack))

    def held_ids(self, cache: SequenceState, base_ids: Sequence[int] | None) -> tuple[Ids, Ids]:
        return ids_in_book(cache.book)

    def prepare_to_keep(self, cache: SequenceState) -> Snapshot:
        return self._batch.keep(cache)

    def measure(self, kept: Snapshot) -> tuple[int, bool]:
        return kept.nbytes, True

    def count_fitting_ids(self, ids: int) -> int:
        return min(ids, self._batch.capacity)

    def cache_for_request(self, session: Session, ids: int, move: bool, start: Any) -> SequenceState:
        """See `SessionCaches`. Raises `ModelError` if the session began with another pack than the request."""
        snapshot, begin = session.cache, self._model.sequence_start(start)
        if _sequence_start_as_json(snapshot.start) != _sequence_start_as_json(begin):
            raise ModelError("the session began with another pack than the request; begin a new one")
        return self._batch.sequences[self._batch.restore(replace(snapshot, start=begin).truncated(ids))]

    # ---- files

    def file_contents(self, session: Session) -> FileContents:
        snapshot: Snapshot = session.cache
        keys_values = snapshot.keys_values
        tensors = {
            "base_ids": ("U32", session.base_ids),
            "ends": ("U32", session.ends),
            "log": ("U32", snapshot.log),
            "start": ("U8", np.frombuffer(_sequence_start_as_json(snapshot.start).encode(), np.uint8)),
            "keys_values": (DTYPE_NAMES[keys_values.dtype], _as_numpy(keys_values)),
        }
        if session.random_state is not None:
            tensors["random_state"] = ("U8", session.random_state.numpy())
        found = {name: FileTensor(dtype, values.shape, values) for name, (dtype, values) in tensors.items()}
        return FileContents({FACT_PREFIX + FREQUENCY_SET_FACT: str(snapshot.frequency_set)}, found)

    def cache_from_file(self, contents: FileContents, session: Session) -> tuple[Snapshot, torch.Tensor | None]:
        tensors = contents.tensors
        start, tuned = json.loads(bytes(_read_flat_array(tensors["start"], "U8")))
        params = replace(self._model.params, start=start and tuple(map(tuple, start)))
        log = np.array(_read_flat_array(tensors["log"], "U32"))
        book = Codebook(params)
        book.push(log)
        raise_if_other_ids(ids_in_book(book), session)
        keys_values = self._read_keys_values(tensors["keys_values"], len(log))
        snapshot = Snapshot(
            SequenceStart(params, None, tuned), log, keys_values, self._read_frequency_set(contents), None
        )
        state = tensors.get("random_state")
        return snapshot, None if state is None else torch.from_numpy(_read_flat_array(state, "U8").copy())

    def _read_keys_values(self, tensor: FileTensor, ids: int) -> torch.Tensor:
        decoder, dtype = self._model.folder.decoder, self._model.dtype
        wanted = (decoder.layers, 2, decoder.kv_heads, ids, decoder.head_width)
        if tensor.shape != wanted or tensor.dtype != DTYPE_NAMES[dtype]:
            raise BadFileError("the arrays of its cache are not those of this model")
        return torch.frombuffer(tensor.data, dtype=dtype).reshape(wanted)

    def _read_frequency_set(self, contents: FileContents) -> int:
        frequency_set = int(contents.facts[FREQUENCY_SET_FACT])
        if frequency_set not in range(len(self._model.decoder.rope.frequencies)):
            raise BadFileError(
                f"its keys were made with set {frequency_set} of rotary frequencies, which this model lacks"
            )
        return frequency_set


def _sequence_start_as_json(begin: SequenceStart) -> str:
    return json.dumps([begin.params.start, tuned_fingerprint(begin.pack)])


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Returns a NumPy view of a host tensor; bfloat16 becomes uint16, because NumPy has no bfloat16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _read_flat_array(tensor: FileTensor, dtype: str) -> np.ndarray:
    if tensor.dtype != dtype or len(tensor.shape) != 1:
        raise BadFileError("the arrays of its codebook are of another kind")
    return np.frombuffer(tensor.data, np.uint8 if dtype == "U8" else np.uint32)
