"""Adapts a PyTorch model to the interface of `mlx_zip.evaluation`: scores rows of ids and generates texts.

On a CPU the model computes in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mlx_zip.cuda.devices import peak_allocated_bytes
from mlx_zip.cuda.engine import CudaEngine
from mlx_zip.cuda.model import CudaModel, open_model
from mlx_zip.cuda.scorer import RowScorer
from mlx_zip.engine.options import ServeOptions
from mlx_zip.engine.responses import stream_answers
from mlx_zip.engine.scored import Compressed, Scored
from mlx_zip.packs.pack import Pack


def load_evaluated_model(
    folder: Path,
    *,
    device: torch.device,
    trust_remote_code: bool = False,
    canonical: bool | None = None,
    pack: Any = None,
    codebook_size: int | None = None,
    row_store: None = None,
) -> tuple[EvaluatedModel, Any]:
    """Returns a model and its tokenizer, as `mlx_zip.load` does. row_store: ignored."""
    dtype = "float32" if device.type == "cpu" else None
    model = open_model(
        folder,
        device,
        dtype,
        pack=pack,
        codebook_size=codebook_size,
        canonical=canonical,
        trust_remote_code=trust_remote_code,
    )
    return EvaluatedModel(model), model.tokenizer


class EvaluatedModel:
    """A PyTorch model as `mlx_zip.evaluation` uses models. layout, config: None without hypertokens."""

    def __init__(self, model: CudaModel) -> None:
        self._model, self.config, self.fingerprint = model, model.config, model.fingerprint
        self.layout = model.layout if model.has_hypertokens else None
        self.is_plain = model.is_plain
        config = model.folder.config
        self.args = SimpleNamespace(config=config) if model.has_hypertokens else SimpleNamespace(**config)
        self.row_source = SimpleNamespace(pack=model.pack)
        self._engine: CudaEngine | None = None
        self._engine_capacity = 0  # prompts that the engine answers at the same time
        self._scorer = RowScorer(model)

    def peak_bytes(self) -> int:
        """Returns the peak bytes that PyTorch allocated on the GPU; on a CPU, the peak memory of the process."""
        return peak_allocated_bytes(self._model.device)

    def close(self) -> None:
        """Closes the engine that `stream` has opened, if any."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def score_row(self, row: Compressed, causal: bool) -> Scored:
        """Returns the predictions of a row's ids, from the second id on. See `RowScorer.score_in_parts`."""
        return Scored.joined(list(self._scorer.score_in_parts(row, causal)))

    def score_next(self, row: Compressed, ids: Sequence[int]) -> np.ndarray:
        """Returns the log-probabilities, float64 [k], that each of k base ids comes next after the whole row.

        The row's end is the end of a part (see `Compressed.breaks`), so canonical decoding forbids no id there.
        """
        return self._scorer.score_next_ids(row, ids)

    def stream(
        self,
        tokenizer: Any,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int = 0,
        pack: Pack | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Yields (index of the prompt, response) as `stream_batch` does. seed: prompt i gets `seed` + i.

        pack: what every codebook begins with. options: `max_tokens`, `stop` and sampling options.
        """
        if self._engine is None or self._engine_capacity < len(prompts):
            self.close()
            self._engine_capacity = len(prompts)
            self._engine = CudaEngine(
                lambda: (self._model, tokenizer), "evaluated", ServeOptions(self._engine_capacity)
            )
        limit, stop = options.pop("max_tokens"), options.pop("stop", ())
        samplings = [{**options, "seed": seed + at} for at in range(len(prompts))]
        yield from stream_answers(self._engine, prompts, samplings, pack, limit, stop)
