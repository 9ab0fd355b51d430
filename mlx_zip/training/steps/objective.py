"""Computes the training loss: cross entropy over base ids and entries together, and two optional losses.

Every loss is a sum over the positions that count. So gradients of several batches and machines can be added, and
dividing the sum once by the number of positions gives the gradients of one large batch.

The normalizers of base and hyper logits are computed separately and joined by `logaddexp`, so the joint softmax is
never materialized. The logit of an unavailable entry is -1e30, so that its gradient is 0 and not NaN.

Rows of a pack's entries can be trained alone, with the model frozen, or together with the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_zip.codec import CodecParams
from mlx_zip.engine.sampling import canonical
from mlx_zip.models.zip_model import Model
from mlx_zip.packs.entries import pad_entries
from mlx_zip.training.steps.batches import FINE_PADDING, Batch, Padding
from mlx_zip.training.steps.forward_pass import (
    Arrays,
    ForwardOutputs,
    encode_entries,
    encode_hyper_rows,
    run_forward_pass,
)

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
CLOSED_LOGIT = -1e30  # logit of an unavailable entry; finite, so that the gradient is 0 and not NaN


@dataclass(frozen=True)
class LossWeights:
    """Weights of the losses that are added to the cross entropy; 0 leaves a loss out.

    reconstruction: lambda of arXiv 2506.01084 eq. 3. token_type: binary cross entropy of "the next id is a
    hypertoken" (zip2zip++ uses 0.05). reconstruct_entries: maximum number of entries per batch for the
    reconstruction loss.
    """

    reconstruction: float = 0.0
    token_type: float = 0.0
    reconstruct_entries: int = 256

    def total_loss(self, sums: Mapping[str, Any]) -> Any:
        """Returns the weighted sum of the losses, to be minimized; not yet divided by `count`.

        sums: result of `Trainee.losses` or of the PyTorch engine's `compute_losses`.
        """
        added = [name for name in ("reconstruction", "token_type") if name in sums]
        return sum((getattr(self, name) * sums[name] for name in added), sums["nats"])


class Trainee(nn.Module):
    """The model, and the heads that only training needs.

    decoder: f_psi of arXiv 2506.01084 eq. 3, which maps a hyper row [D] to merge_size vectors [D], from which the
    model's embedding or head computes logits. type_head: maps a hidden state [D] to the logit of "the next id is a
    hypertoken".
    """

    loss_is_of_text = True  # whether the loss is a text's likelihood, so that reports include bits per byte

    def __init__(self, model: nn.Module, weights: LossWeights) -> None:
        super().__init__()
        self.model: Any = model
        self.loss_weights = weights
        if isinstance(model, Model):
            width = model.config.encoder.model_size
            if weights.reconstruction:
                self.decoder = nn.Linear(width, model.config.merge_size * width)
            if weights.token_type:
                self.type_head = nn.Linear(width, 1)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Returns the batch with all arrays that `losses` needs. Called on the CPU while the device trains."""
        return batch

    def losses(self, arrays: dict[str, mx.array], long: bool = False) -> dict[str, mx.array]:
        """Returns float32 sums over the positions to predict: `nats`, `count`, and each auxiliary loss with a weight.

        arrays: arrays of a `Batch`; without a codebook its ids are base ids, and there are no auxiliary losses. long:
        use LongRoPE's long factors.
        """
        if not isinstance(self.model, Model):
            return sum_plain_nats(self.model(arrays["inputs"]), arrays)
        if "entries" not in arrays:
            return self._base_losses(arrays, long)
        out = run_forward_pass(self.model, arrays, self.make_hyper_rows(arrays), long)
        sums = sum_joint_nats(out.base, out.hyper, arrays)
        if self.loss_weights.reconstruction:
            mean = self._reconstruction_loss(out, arrays)
            sums["reconstruction"] = mean * sums["count"]
        if self.loss_weights.token_type:
            sums["token_type"] = self._token_type_loss(out, arrays)
        return sums

    def validation_figures(self, sums: Mapping[str, float]) -> tuple[dict[str, float], str]:
        """Returns a validation's figures, for the log and as text: loss in nats per id, bits per byte, and more.

        sums: sums over the validation samples, of the results of `losses`, and of `n_bytes`, `ids` and `base_ids`.
        """
        line = {
            "val_loss": sums["nats"] / max(sums["count"], 1),
            "val_bits_per_byte": sums["nats"] / math.log(2) / max(sums["n_bytes"], 1),
            "val_base_tokens_per_step": sums["base_ids"] / max(sums["ids"], 1),
        }
        bits, per_step = line["val_bits_per_byte"], line["val_base_tokens_per_step"]
        return line, f"validation {bits:.4f} bits per byte, {per_step:.3f} base tokens per step"

    def make_hyper_rows(self, arrays: Arrays) -> tuple[mx.array, mx.array]:
        """Returns a batch's hyper rows for `run_forward_pass`: those that the hyper-encoders make."""
        return encode_hyper_rows(self.model, arrays)

    def _base_losses(self, arrays: dict[str, mx.array], long: bool) -> dict[str, mx.array]:
        row = mx.zeros((1, self.model.config.encoder.model_size))  # of an entry that is not available
        without = {
            **arrays,
            "input_rows": mx.full(arrays["inputs"].shape, -1, mx.int32),
            "slots": mx.zeros((arrays["inputs"].shape[0], 1), mx.int32),
            "available": mx.zeros_like(arrays["targets"]),
        }
        out = run_forward_pass(self.model, without, (row, row), long)
        return sum_joint_nats(out.base, out.hyper, without)

    def _reconstruction_loss(self, out: ForwardOutputs, arrays: dict[str, mx.array]) -> mx.array:
        """Returns the mean cross entropy of entries' base ids, predicted from the entries' input and output rows."""
        size = arrays["entries"].shape[0]
        n = min(self.loss_weights.reconstruct_entries, size)
        chosen = (mx.arange(n) * size) // n  # spread over the entries, which are sorted by base ids
        entries, lengths = arrays["entries"][chosen], arrays["lengths"][chosen]
        real = (mx.arange(entries.shape[1]) < lengths[:, None]) & (lengths[:, None] > 1)
        both_sides = [
            self._reconstruction_nats(out.output_rows[chosen], self.model.head_matrix, entries),
            self._reconstruction_nats(
                encode_entries(self.model.input_encoder, self.model.model.embed_tokens, entries, lengths),
                self.model.model.embed_tokens,
                entries,
            ),
        ]
        return sum((nats * real).sum() for nats in both_sides) / (2 * mx.maximum(real.sum(), 1))

    def _reconstruction_nats(self, rows: mx.array, matrix: nn.Module, entries: mx.array) -> mx.array:
        """Returns nats [N, S] of the base ids of `entries` [N, S], predicted from the entries' rows [N, D].

        matrix: the embedding or head that computes logits from the decoder's vectors.
        """
        guesses = self.decoder(rows).reshape(*entries.shape, -1)
        logits = matrix.as_linear(guesses) if isinstance(matrix, EMBEDDINGS) else matrix(guesses)
        return nn.losses.cross_entropy(logits.astype(mx.float32), entries)

    def _token_type_loss(self, out: ForwardOutputs, arrays: dict[str, mx.array]) -> mx.array:
        is_hyper = (arrays["targets"] >= out.base.shape[-1]).astype(mx.float32)
        logits = self.type_head(out.hidden)[..., 0].astype(mx.float32)
        loss = nn.losses.binary_cross_entropy(logits, is_hyper, with_logits=True, reduction="none")
        return (loss * arrays["weights"]).sum()


def sum_plain_nats(logits: mx.array, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Returns `nats` and `count`: summed cross entropy of logits [B, L, V] over base ids, and positions that count."""
    nats = nn.losses.cross_entropy(logits.astype(mx.float32), arrays["targets"])
    return {"nats": (nats * arrays["weights"]).sum(), "count": arrays["weights"].sum()}


def sum_joint_nats(base: mx.array, hyper: mx.array, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """Returns `nats` and `count`: summed cross entropy over base ids and available entries, and positions that count.

    base [B, L, V], hyper [B, L, K]: logits of base ids and of slots, normalized together without concatenation. arrays:
    arrays of a `Batch`; if they include `excluded`, the probabilities are those of canonical decoding. Source: arXiv
    2506.01084 eq. 2.
    """
    base, hyper = base.astype(mx.float32), hyper.astype(mx.float32)
    vocab, slots = base.shape[-1], hyper.shape[-1]
    is_open = mx.arange(slots) < arrays["available"][..., None]
    hyper = mx.where(is_open, hyper, CLOSED_LOGIT)
    targets = arrays["targets"]
    is_hyper = targets >= vocab
    in_base = mx.take_along_axis(base, mx.where(is_hyper, 0, targets)[..., None], axis=-1)
    in_hyper = mx.take_along_axis(hyper, mx.where(is_hyper, targets - vocab, 0)[..., None], axis=-1)
    target = mx.where(is_hyper[..., None], in_hyper, in_base)[..., 0]
    normaliser = mx.logaddexp(mx.logsumexp(base, axis=-1), mx.logsumexp(hyper, axis=-1))
    nats = normaliser - target
    if "excluded" in arrays:
        nats += canonical_gain(base, hyper, normaliser, arrays)
    nats *= arrays["weights"]
    return {"nats": nats.sum(), "count": arrays["weights"].sum()}


def canonical_gain(base: mx.array, hyper: mx.array, normaliser: mx.array, arrays: dict[str, mx.array]) -> mx.array:
    """Returns nats [B, L], at most 0: the change of each target's loss if excluded ids get no probability.

    At positions where excluded ids hold over half the probability, nothing is excluded and the change is 0. base,
    hyper: logits as in `sum_joint_nats`. normaliser [B, L]: logsumexp of all logits. The result equals that of setting
    excluded logits to minus infinity (`mlx_zip.engine.sampling.canonical`), without a second pass.
    """
    at, column = arrays["excluded_at"], arrays["excluded"]
    batch, length, vocab = base.shape
    real, is_hyper = at < batch * length, column >= vocab
    row, place = mx.where(real, at // length, 0), at % length
    in_base = base[row, place, mx.where(is_hyper, 0, column)]
    in_hyper = hyper[row, place, mx.where(is_hyper, column - vocab, 0)]
    share = mx.where(real, mx.exp(mx.where(is_hyper, in_hyper, in_base) - normaliser[row, place]), 0)
    excluded = mx.zeros(batch * length).at[mx.where(real, at, 0)].add(share).reshape(batch, length)  # total probability
    return mx.log1p(-mx.where(excluded <= canonical.MAX_EXCLUDED_SHARE, excluded, 0))


# ---- rows of a pack's entries


class PackTrainee(Trainee):
    """A frozen model, and the trained rows of the P entries that every sample begins with.

    output_rows, input_rows [P, D]: one row per entry. `input_rows` is absent if the model uses the same rows for input
    and output.
    """

    def __init__(self, model: Model, input_rows: mx.array, output_rows: mx.array) -> None:
        super().__init__(model, LossWeights())
        model.freeze()
        self.output_rows = output_rows
        if not model.sides_are_one:
            self.input_rows = input_rows

    @property
    def pack_input_rows(self) -> mx.array:
        """Input rows [P, D] of the pack's entries."""
        return self.output_rows if self.model.sides_are_one else self.input_rows

    def prepare_batch(self, batch: Batch) -> Batch:
        """Returns the batch with the pack's entries separated from the other entries, see `separate_pack`."""
        return replace(batch, arrays=separate_pack(batch.arrays, batch.distinct, len(self.output_rows), batch.padding))

    def make_hyper_rows(self, arrays: Arrays) -> tuple[mx.array, mx.array]:
        """Returns the pack's rows, followed by the hyper-encoder's rows of entries that the samples installed."""
        grown = encode_hyper_rows(self.model, arrays)
        return mx.concatenate([self.pack_input_rows, grown[0]]), mx.concatenate([self.output_rows, grown[1]])


class PackAndModelTrainee(Trainee):
    """A model that is trained together with rows of the P entries that every sample begins with.

    output_rows, input_rows: as in `PackTrainee`, but added to the hyper-encoder's rows, and initially 0. So the encoder
    learns what applies to all entries, and the rows hold what is specific to one entry.
    """

    def __init__(self, model: Model, entries: int) -> None:
        super().__init__(model, LossWeights())
        self.output_rows = mx.zeros((entries, model.config.encoder.model_size))
        if not model.sides_are_one:
            self.input_rows = mx.zeros_like(self.output_rows)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Adds `in_pack` [U] int32 to the batch: index of each distinct entry in the pack, P if it is not there."""
        size = len(self.output_rows)
        places = _places_in_pack(batch.arrays, size)
        return replace(batch, arrays={**batch.arrays, "in_pack": np.where(places < 0, size, places).astype(np.int32)})

    def make_hyper_rows(self, arrays: Arrays) -> tuple[mx.array, mx.array]:
        """Returns the encoder's rows, plus the trained rows for entries of the pack."""
        read, output = encode_hyper_rows(self.model, arrays)
        places = arrays["in_pack"]
        own_read = self.input_rows if "input_rows" in self else self.output_rows
        return read + _append_zero_row(own_read)[places[arrays["read"]]], output + _append_zero_row(self.output_rows)[
            places
        ]

    def trained_pack_rows(self, entries: Sequence[Sequence[int]], params: CodecParams) -> dict[str, mx.array]:
        """Returns float32 [P, D] sums of encoder and trained rows: "output_rows" and, if separate, "input_rows"."""
        read, output = encode_pack_rows(self.model, entries, params)
        rows = {"output_rows": output + self.output_rows}
        return rows if self.model.sides_are_one else {**rows, "input_rows": read + self.input_rows}


def _places_in_pack(arrays: Mapping[str, NDArray[Any]], pack: int) -> NDArray[np.int64]:
    """Returns the index of each distinct entry in the pack, -1 for entries outside of the pack, [U].

    arrays: arrays of a `Batch`, in which every sample has the pack's entries in the first `pack` slots, in pack order,
    except plain samples, which have no entry.
    """
    places = np.full(len(arrays["entries"]), -1)
    with_pack = np.flatnonzero(arrays["available"].max(1) >= pack)
    if pack and len(with_pack):
        places[arrays["slots"][with_pack[0], :pack]] = np.arange(pack)
    return places


def _append_zero_row(rows: mx.array) -> mx.array:
    return mx.concatenate([rows, mx.zeros((1, rows.shape[1]), rows.dtype)])


def encode_pack_rows(model: Model, entries: Sequence[Sequence[int]], params: CodecParams) -> list[mx.array]:
    """Returns the input rows and the output rows of entries from a model's hyper-encoders, each float32 [P, D]."""
    base_ids, lengths = pad_entries(entries, params.merge_size, params.fill)
    rows = [side.astype(mx.float32) for side in model.encode_rows(base_ids, lengths)]
    mx.eval(rows)
    return rows


def separate_pack(
    arrays: dict[str, NDArray], distinct: int, pack: int, padding: Padding = FINE_PADDING
) -> dict[str, NDArray]:
    """Returns a batch's arrays for a model that already has rows for the pack's entries.

    arrays: see `_places_in_pack`. distinct: number of entries before the padding. padding: rules for the arrays' sizes.
    "Grown" entries are entries outside of the pack.

    In the result, `entries` and `lengths` hold only grown entries. slots: index of each slot's row in [pack rows |
    grown rows]. read: the grown entries that occur in inputs, as indices into `entries`. input_rows: index of each
    input's row in [pack rows | rows of `read`], -1 for a base id.
    """
    place = _places_in_pack(arrays, pack)  # index of each entry in [pack | grown]
    grown = np.flatnonzero(place[:distinct] < 0)
    place[grown] = pack + np.arange(len(grown))
    read = place[arrays["read"][: int(arrays["input_rows"].max()) + 1]]
    is_grown = read >= pack
    new_index = np.where(is_grown, pack + np.cumsum(is_grown) - 1, read)  # new index of each entry in `read`
    rows, size = arrays["input_rows"], padding.padded_entry_count(len(grown))
    grown_read = (read[is_grown] - pack).astype(np.int32)
    return {
        **arrays,
        "entries": _pad_with_copies(arrays["entries"][grown], arrays["entries"], size),
        "lengths": _pad_with_copies(arrays["lengths"][grown], arrays["lengths"], size),
        "slots": np.maximum(place[arrays["slots"]], 0).astype(np.int32),
        "read": _pad_with_copies(
            grown_read, np.zeros(1, np.int32), padding.padded_read_entry_count(len(grown_read), size)
        ),
        "input_rows": np.where(rows < 0, -1, new_index[rows] if len(new_index) else -1).astype(np.int32),
    }


def _pad_with_copies(values: NDArray, like: NDArray, size: int) -> NDArray:
    return np.concatenate([values, np.repeat(like[:1], size - len(values), axis=0)])
