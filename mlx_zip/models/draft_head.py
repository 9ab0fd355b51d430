"""`DraftHead`: one small trained layer that proposes the next ids, and its file in the model's folder.

The head reads two vectors: the body's output at one id, and the output row of the id that was chosen from this output.
It predicts the body's output at the chosen id, without running the body. The model's output matrix and hyper rows turn
the prediction into the next proposed id, and the head continues with that id. So the head can propose any hypertoken,
even one that did not occur in the head's training.

A head belongs to the model that it was trained with. The model checks every proposed id, so a wrong head costs time and
changes no answer.

Source: Hydra (arXiv 2402.05109), whose heads run one after the other; here one layer serves all depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_zip.errors import ModelError, failure_reason, first_message_line
from mlx_zip.files import atomic_file
from mlx_zip.layout import decoder_config, has_hypertokens
from mlx_zip.models.rows.encoders import matrix_rows, quantization_settings
from mlx_zip.models.rows.fingerprints import named_arrays
from mlx_zip.models.rows.zip_state import Advance, ZipState, find_zip_state

FORMAT = "mlx_zip draft head 1"
DEPTH = 3  # successive guesses that a head is trained for; it may make more


class DraftHead(nn.Module):
    """Predicts the body's output at an id: x + W_down silu(W_up x), where x = W_join [norm(state), norm(row)].

    state: the body's output before the id. row: the id's output row. width: the model's width D. size: width of the
    hidden layer.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.state_norm, self.row_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.join = nn.Linear(2 * width, width, bias=False)
        self.up = nn.Linear(width, size, bias=False)
        self.down = nn.Linear(size, width, bias=False)

    def __call__(self, state: mx.array, row: mx.array) -> mx.array:
        """Returns predicted states [..., D] at ids. state: before the ids. row: the ids' output rows. Both [..., D]."""
        x = self.join(mx.concatenate([self.state_norm(state), self.row_norm(row)], axis=-1))
        return x + self.down(nn.silu(self.up(x)))


def save_draft_head(path: Path, head: DraftHead, vocab_size: int) -> None:
    """Writes a head in float16, whole or not at all. vocab_size: rows of the model's embedding. Raises `OSError`."""
    weights = {name: value.astype(mx.float16) for name, value in named_arrays(head.parameters())}
    with atomic_file(path) as partial, open(partial, "wb") as file:  # MLX would add .safetensors to a path
        mx.save_safetensors(file, weights, {"format": FORMAT, "vocab_size": str(vocab_size)})


def load_draft_head(path: Path, width: int, vocab_size: int) -> DraftHead:
    """Reads a head for a model of this width whose embedding has `vocab_size` rows.

    Raises `ModelError` if the file cannot be read, is not a head, or belongs to a model of another size.
    """
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        weights, about = loaded
        mx.eval(weights)  # reads the file
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be read: {failure_reason(error)}") from error
    if about.get("format") != FORMAT or not _are_head_tensors(weights):
        raise ModelError(f"{path} is no draft head that this version knows; delete it to go on without")
    theirs = weights["down.weight"].shape[0], about.get("vocab_size")
    if theirs != (width, str(vocab_size)):
        raise ModelError(
            f"{path} is the head of a model of width {theirs[0]} with an embedding of {theirs[1]} rows, this one has "
            f"{width} and {vocab_size}; delete the file or train a head (mlx_zip train --draft-head)"
        )
    head = DraftHead(width, weights["down.weight"].shape[-1])
    try:
        head.load_weights(list(weights.items()))
    except ValueError as error:
        raise ModelError(f"{path} is damaged: {first_message_line(error)}; delete it to go on without") from error
    head.freeze()
    return head


def _are_head_tensors(weights: dict[str, mx.array]) -> bool:
    """Returns whether the tensors could be a head's: all are floating-point, and `down.weight` is a matrix."""
    floats = all(mx.issubdtype(one.dtype, mx.floating) and one.size for one in weights.values())
    return floats and "down.weight" in weights and weights["down.weight"].ndim == 2


# ---- a model's body and output


class HeadedModel:
    """A model, with access to what a draft head needs: the body's output and the output rows.

    width: width D of the body. rows: number of rows of the embedding. vocab_size: number of base ids.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.hyper = model, has_hypertokens(model)
        config: Any = decoder_config(model)
        self.width = config.get("hidden_size")
        self.rows = config.get("vocab_size")
        self.vocab_size = model.layout.vocab_size if self.hyper else self.rows

    def check_logits(self) -> None:
        """Raises `ModelError` if a plain model's logits are not `base_logits` of the output of `model.model`."""
        if self.hyper:
            return
        model, ids = self.model, mx.array([[0, 1]])
        found = None
        if hasattr(model, "model") and hasattr(model.model, "embed_tokens") and isinstance(self.width, int):
            found = self.base_logits(model.model(ids))
        logits = model(ids)
        if found is None or found.shape != logits.shape or not mx.allclose(found, logits, atol=1e-3).item():
            raise ModelError("draft heads are not for this kind of model: its logits are not its body's output rows")

    @property
    def matrix(self) -> Any:
        """The module whose rows are the output rows of base ids."""
        return self.model.lm_head if "lm_head" in self.model else self.model.model.embed_tokens

    def base_logits(self, h: mx.array) -> mx.array:
        """Returns logits [..., V or more] of the body's output h [..., D]."""
        return self.model.base_logits(h) if self.hyper else self.products_with_output_rows(h)

    def products_with_output_rows(self, h: mx.array) -> mx.array:
        """Returns the products [..., V or more] of h [..., D] with the output rows: logits without a soft cap."""
        return self.model.lm_head(h) if "lm_head" in self.model else self.model.model.embed_tokens.as_linear(h)

    def mean_base_row(self, shares: mx.array) -> mx.array:
        """Returns the mean [..., D] of the output rows of base ids, weighted with shares [..., V]."""
        matrix, v = self.matrix, shares.shape[-1]
        if "scales" not in matrix:
            return shares @ matrix["weight"][:v]
        parts = [matrix[name][:v] for name in ("weight", "scales", "biases") if matrix.get(name) is not None]
        return mx.quantized_matmul(shares, *parts, transpose=False, **quantization_settings(matrix))

    def base_rows(self, ids: mx.array) -> mx.array:
        """Returns the output rows [..., D] of base ids [...]."""
        return matrix_rows(self.matrix, ids)

    def read(self, ids: mx.array, cache: Sequence[Any], **options: Any) -> tuple[mx.array, mx.array]:
        """Runs the model on ids [B, L]; returns the logits [B, L, W] and the body's output [B, L, D].

        options: arguments for `Model.read`; not used for a plain model.
        """
        if self.hyper:
            return self.model.read(ids, cache, **options)
        h = self.model.model(ids, cache=cache)
        return self.base_logits(h), h


class HeadFile:
    """The file of a model's head, read on first use. Not an `nn.Module`, so the head is not part of the model."""

    def __init__(self, path: Path) -> None:
        self._path, self._head = path, None

    def head_for(self, model: HeadedModel) -> DraftHead:
        """Returns the head. Raises `ModelError` if the file is damaged or the head is for a model of another size."""
        if self._head is None:
            head = load_draft_head(self._path, model.width, model.rows)
            model.check_logits()
            self._head = head
        return self._head


def make_head_proposer(model: Any) -> Proposer | None:
    """Returns a `Proposer` with the head in the model's folder, or None if there is no head.

    Raises `ModelError` as `HeadFile.head_for` does.
    """
    file, headed = getattr(model, "draft_head", None), HeadedModel(model)
    return None if file is None else Proposer(file.head_for(headed), headed)


class Proposer:
    """Proposes ids that may follow the last id of a request, with a head and the model that the head belongs to."""

    def __init__(self, head: DraftHead, model: HeadedModel) -> None:
        self.head, self.model = head, model

    def propose(self, h: mx.array, last: int, cache: Sequence[Any], most: int) -> tuple[list[int], list[float]]:
        """Returns `most` ids that may follow the id `last`, chosen greedily, and the head's probability of each.

        h [1, 1, D]: the body's output from which `last` was chosen. cache: the request's cache, which has not read
        `last` yet. Returns two empty lists if `last` is a hypertoken without an output row.
        """
        rows = _OutputRows(self.model, find_zip_state(cache))
        if most < 1 or last >= rows.end:
            return [], []
        state, one, ids, shares = h, mx.array([[last]]), [], []
        for _ in range(most):
            state = self.head(state, rows.rows_of_ids(one).astype(state.dtype)).astype(h.dtype)
            logits = rows.logits(state).astype(mx.float32)
            one = mx.argmax(logits, axis=-1)
            ids.append(one)
            shares.append(mx.exp(logits.max(axis=-1) - mx.logsumexp(logits, axis=-1)))
        mx.eval(ids, shares)
        return [int(one.item()) for one in ids], [float(share.item()) for share in shares]


class _OutputRows:
    """The output rows of the ids below `end`, the ids that a request can choose. state: None for a plain model."""

    def __init__(self, model: HeadedModel, state: ZipState | None) -> None:
        self._model, self._state = model, state
        self._slots = 0 if state is None or state.outputs.array is None else state.encoded_outputs[0]
        self.end = model.vocab_size + self._slots

    def rows_of_ids(self, ids: mx.array) -> mx.array:
        """Returns the rows [1, 1, D] of ids [1, 1]."""
        vocab = self._model.vocab_size
        base = self._model.base_rows(mx.minimum(ids, vocab - 1))
        if not self._slots:
            return base
        assert self._state is not None
        hyper = self._state.outputs.take_rows(mx.clip(ids - vocab, 0, self._slots - 1))
        return mx.where((ids < vocab)[..., None], base, hyper.astype(base.dtype))

    def logits(self, h: mx.array) -> mx.array:
        """Returns logits [1, 1, end or more] of states h [1, 1, D]; a logit's column is its id."""
        if self._state is None:
            return self._model.base_logits(h)
        return self._model.model.joint_head(h, self._state, Advance(self._slots, self._slots), causal=False)
