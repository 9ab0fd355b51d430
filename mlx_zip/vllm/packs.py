"""How a request names its pack to a worker, and how the worker reads that pack."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlx_zip.codec import CodecParams
from mlx_zip.config import SIDES
from mlx_zip.cuda.network.checkpoint import folder_fingerprint
from mlx_zip.errors import DataError, GenerationError
from mlx_zip.packs.pack import Pack, pack_in_folder, resolve_pack

# keys of a request's `extra_args`: whether its sender can expand hypertokens, its pack, and whether its sender knows
# `Zip2ZipConfig.broken_id`
HYPERTOKENS, PACK, TELL_BROKEN = "mlx_zip_hypertokens", "mlx_zip_pack", "mlx_zip_tell_broken"
MAX_KEPT_PACKS = 16


def pack_arguments(pack: Pack | None) -> dict[str, Any]:
    """Returns the `extra_args` that name a request's pack; {} if `pack` is None, which means the model's own pack.

    Tuned rows are not sent: workers read them from the pack's file, which must have the same path on every machine.
    Raises `GenerationError` if a pack with tuned rows is not a file.
    """
    if pack is None:
        return {}
    if pack.rows is None:
        return {PACK: [list(entry) for entry in pack.entries]}
    if pack.name is None or not Path(pack.name).is_file():
        raise GenerationError("pack: one with tuned rows must be given as a file, which the workers read too")
    return {PACK: [str(Path(pack.name).resolve()), pack.fingerprint]}


@dataclass(frozen=True, eq=False, repr=False)
class StartRows:
    """What codebooks begin with. params: the codec. keys: keys of the start entries in a worker's `RowTable`.

    tuned: tuned rows [P, D] of the start entries, per side of the worker; None if the entries are to be encoded.
    """

    params: CodecParams
    keys: list[bytes]
    tuned: list[torch.Tensor] | None = None


class WorkerPacks:
    """A worker's packs: the model's own pack, and up to `MAX_KEPT_PACKS` packs that requests have named last.

    model: our `Zip2ZipForCausalLM`, loaded from `folder`.
    """

    def __init__(self, model: Any, folder: str) -> None:
        self._model, self._folder = model, Path(folder)
        self._params = model.config.codec_params
        own = pack_in_folder(self._folder, model.config.start) or Pack(model.config.start or ())
        self.own = self._start_with(own)
        self._read = lru_cache(MAX_KEPT_PACKS)(lambda asked: self._start_with(_read_pack(asked)))

    def find(self, asked: Any) -> StartRows:
        """Returns what a request begins with. asked: what `pack_arguments` wrote, None for the model's own pack.

        Raises `MlxZipError` if `asked` is not a pack for this model.
        """
        if asked is None:
            return self.own
        return self._read(tuple(one if isinstance(one, str) else tuple(one) for one in asked))

    def _start_with(self, pack: Pack) -> StartRows:
        params = self._params.with_start(pack)
        keys = [np.array(entry, np.uint32).tobytes() for entry in pack.entries]  # as `entry_keys` names entries
        if pack.rows is None:
            return StartRows(params, keys)
        pack.rows.check_model(self._fingerprint, self._model.sides_are_one, self._model.decoder.config.hidden_size)
        mark = pack.rows.fingerprint.encode()  # a tuned row differs from the encoded one, so it has another key
        sides = {SIDES[0]: pack.rows.input, SIDES[1]: pack.rows.output}
        tuned = [torch.from_numpy(np.ascontiguousarray(sides[side])) for side in self._model.sides]
        return StartRows(params, [mark + key for key in keys], tuned)

    @cached_property
    def _fingerprint(self) -> str:
        return folder_fingerprint(self._folder, self._model.decoder.config.tie_word_embeddings)


def _read_pack(asked: tuple[Any, ...]) -> Pack:
    """Returns a pack. asked: entries, or the path of a pack's file and the fingerprint that the file must have."""
    if not (len(asked) == 2 and all(isinstance(one, str) for one in asked)):
        return resolve_pack(asked)
    path, fingerprint = asked
    pack = resolve_pack(path)
    if pack.fingerprint != fingerprint:
        raise DataError(f"{path} is another pack than the one that was asked for; it has changed, or machines differ")
    return pack
