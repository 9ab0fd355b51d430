"""Trains a draft head (`mlx_zip train --draft-head`), which learns to propose ids that its frozen model would choose.

At every position the head makes `depth` guesses in a row, each from the head's last state and the text's next id. The
loss of a guess is the cross entropy between the head's and the model's distributions over base ids and entries, not the
text's next id, because a draft is accepted if the model would choose it. The loss of a position is the mean over the
depths. The model's soft cap is not applied to a guess's logits, because the cap does not change the order of logits.

The cross entropy does not multiply the two distributions element by element: a guess's mean logit under the model's
probabilities is the product of the head's state and the mean output row.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.codec import CodecParams
from mlx_zip.engine.sampling.canonical import MAX_EXCLUDED_SHARE
from mlx_zip.errors import ModelError, TrainingError, errors_as
from mlx_zip.files import expand_home
from mlx_zip.models.draft_head import DEPTH, DraftHead, HeadedModel, save_draft_head
from mlx_zip.models.model_folder import DRAFT_HEAD, is_plain_model
from mlx_zip.models.zip_model import Model
from mlx_zip.packs.pack import Pack, pack_in_folder
from mlx_zip.training.prepare.shards import can_have_entries
from mlx_zip.training.settings import ADAPTER, RunOptions, TrainSettings
from mlx_zip.training.starting_model import dequantize_all_weights
from mlx_zip.training.steps.batches import Batch
from mlx_zip.training.steps.forward_pass import encode_hyper_rows, run_forward_pass
from mlx_zip.training.steps.objective import CLOSED_LOGIT, LossWeights, Trainee, separate_pack

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class _Taught:
    """Outputs of the frozen model for a batch, from which the head learns.

    h [B, L, D]: output of the last layer. rows [B, K, D]: output rows of each sample's slots, None for a plain model.
    mean_row [B, L, D]: mean of all output rows, weighted with the probabilities of their ids. best [B, L]: the
    likeliest ids, as columns of [base ids | slots].
    """

    h: mx.array
    rows: mx.array | None
    mean_row: mx.array
    best: mx.array


class HeadTrainee(Trainee):
    """A frozen model and the draft head that is trained. The loss is not a text's likelihood.

    size: width inside the head. depth: number of guesses in a row. pack: the pack that samples begin with, or None; its
    tuned rows, if any, replace the hyper-encoder's. Raises `ModelError` if the model cannot have a head.
    """

    loss_is_of_text = False

    def __init__(self, model: Any, size: int, depth: int = DEPTH, pack: Pack | None = None) -> None:
        super().__init__(model, LossWeights())
        model.freeze()
        self._headed, self._depth, self._tuned = HeadedModel(model), depth, None if pack is None else pack.rows
        self._headed.check_logits()
        self.draft_head = DraftHead(self._headed.width, size)

    @property
    def embedding_rows(self) -> int:
        """The number of rows of the model's embedding."""
        return self._headed.rows

    def prepare_batch(self, batch: Batch) -> Batch:
        """Returns the batch with entries that have tuned rows separated from the others, see `separate_pack`."""
        if self._tuned is None:
            return batch
        pack = len(self._tuned.output)
        return replace(batch, arrays=separate_pack(batch.arrays, batch.distinct, pack, batch.padding))

    def losses(self, arrays: Arrays, long: bool = False) -> Arrays:
        """Returns sums over the positions that count: `nats`, `count`, and `accepted` outside of training.

        accepted: number of guesses that equal the model's greedy choice, as do all earlier guesses of their position.
        """
        taught = self._compute_teaching_signal(arrays, long)
        rows, state, length = self._rows_of_next_ids(arrays["targets"], taught.rows), taught.h, taught.h.shape[1]
        nats, accepted, right = mx.array(0.0), mx.array(0.0), arrays["weights"] >= 0
        for depth in range(1, min(self._depth, length - 1) + 1):
            # position t guesses the model's output at position t + depth of the text
            state = self.draft_head(state[:, : length - depth], rows[:, depth - 1 : -1])
            parts, weights = self._draft_logits(state, taught.rows, arrays, depth), arrays["weights"][:, depth:]
            whole = mx.logsumexp(mx.stack([mx.logsumexp(part, axis=-1) for part in parts]), axis=0)
            mean = (state * taught.mean_row[:, depth:]).sum(axis=-1)
            nats += ((whole - mean) * weights).sum() / self._depth
            if not self.training:
                agrees = mx.argmax(mx.concatenate(parts, axis=-1), axis=-1) == taught.best[:, depth:]
                right = right[:, : length - depth] & agrees & (weights > 0)
                accepted += right.sum()
        sums = {"nats": nats, "count": arrays["weights"][:, 1:].sum()}
        return sums if self.training else {**sums, "accepted": accepted}

    def validation_figures(self, sums: Mapping[str, float]) -> tuple[dict[str, float], str]:
        """Returns a validation's figures, for the log and as text: nats per guess, accepted ids per position."""
        count = max(sums["count"], 1)
        line = {"val_loss": sums["nats"] / count, "val_accepted_ids": sums["accepted"] / count}
        return line, f"validation: {line['val_accepted_ids']:.3f} proposed ids accepted per pass"

    def _compute_teaching_signal(self, arrays: Arrays, long: bool) -> _Taught:
        headed, vocab = self._headed, self._headed.vocab_size
        h, rows = self._run_to_last_layer(arrays, long)
        logits = headed.base_logits(h)[..., :vocab].astype(mx.float32)
        if rows is not None:
            hyper = _mask_unavailable_slots(self.model.soft_cap_logits(h @ rows.swapaxes(-1, -2)), arrays, 0)
            logits = mx.concatenate([logits, hyper], axis=-1)
        shares = _canonical_probabilities(mx.softmax(logits, axis=-1), arrays)
        mean_row = headed.mean_base_row(shares[..., :vocab])
        if rows is not None:
            mean_row += shares[..., vocab:] @ rows
        still = mx.stop_gradient
        return _Taught(still(h), None if rows is None else still(rows), still(mean_row), mx.argmax(shares, axis=-1))

    def _run_to_last_layer(self, arrays: Arrays, long: bool) -> tuple[mx.array, mx.array | None]:
        """Returns the last layer's output [B, L, D], and output rows [B, K, D] of slots (None for a plain model)."""
        if not isinstance(self.model, Model):
            return self.model.model(arrays["inputs"]), None
        encoded = encode_hyper_rows(self.model, arrays)
        if self._tuned is not None:
            own = [mx.array(rows.astype(np.float32)) for rows in (self._tuned.input, self._tuned.output)]
            encoded = mx.concatenate([own[0], encoded[0]]), mx.concatenate([own[1], encoded[1]])
        h = run_forward_pass(self.model, arrays, encoded, long).hidden
        return h, encoded[1][arrays["slots"]].astype(h.dtype)

    def _draft_logits(self, state: mx.array, rows: mx.array | None, arrays: Arrays, depth: int) -> list[mx.array]:
        """Returns float32 logits [B, L - depth, V] of base ids and, if `rows` are given, [B, L - depth, K] of slots."""
        base = self._headed.products_with_output_rows(state)[..., : self._headed.vocab_size].astype(mx.float32)
        return [base] if rows is None else [base, _mask_unavailable_slots(state @ rows.swapaxes(-1, -2), arrays, depth)]

    def _rows_of_next_ids(self, targets: mx.array, rows: mx.array | None) -> mx.array:
        """Returns the output rows [B, L, D] of the ids `targets` [B, L]. rows [B, K, D]: output rows of the slots."""
        vocab = self._headed.vocab_size
        base = self._headed.base_rows(mx.minimum(targets, vocab - 1))
        if rows is None:
            return base
        slots = mx.clip(targets - vocab, 0, rows.shape[1] - 1)
        hyper = mx.take_along_axis(rows, slots[..., None], axis=1)
        return mx.where((targets < vocab)[..., None], base, hyper.astype(base.dtype))


def _mask_unavailable_slots(hyper: mx.array, arrays: Arrays, first: int) -> mx.array:
    """Returns float32 logits [B, L - first, K] from position `first` on, with `CLOSED_LOGIT` for unavailable slots."""
    is_open = mx.arange(hyper.shape[-1]) < arrays["available"][:, first:, None]
    return mx.where(is_open, hyper.astype(mx.float32), CLOSED_LOGIT)


def _canonical_probabilities(shares: mx.array, arrays: Arrays) -> mx.array:
    """Returns the probabilities `shares` [B, L, W] under canonical decoding; see `sampling.canonical.exclude_ids`."""
    if "excluded_at" not in arrays:
        return shares
    flat = shares.reshape(-1, shares.shape[-1])
    padded = mx.concatenate([flat, flat[:1]])  # one more position, whose ids the batch's padding excludes
    left = padded.at[arrays["excluded_at"], arrays["excluded"]].multiply(0.0)[:-1].reshape(shares.shape)
    whole = left.sum(axis=-1, keepdims=True)
    return mx.where(whole >= 1 - MAX_EXCLUDED_SHARE, left / whole, shares)


# ---- a run


def check_head_options(options: RunOptions, settings: TrainSettings) -> None:
    """Raises `TrainingError` if an option makes no sense when only a draft head is trained."""
    refused = {
        "--from-scratch: a head needs a trained model": options.scratch is not None,
        "--engine torch: heads are trained with MLX": options.engine != "mlx",
        "--save adapter: a head is a file of its own": options.save == ADAPTER,
        "--canonical: the model stays as it is": options.canonical is not None,
        "--availability: the model stays as it is": settings.availability != TrainSettings.availability,
        "--fine-tune-type: only the head is trained": settings.fine_tune_type != TrainSettings.fine_tune_type,
    }
    if found := next((why for why, given in refused.items() if given), None):
        raise TrainingError(f"--draft-head goes without {found}")


def check_head_data_fits(folder: Path, params: CodecParams) -> None:
    """Raises `TrainingError` if the data have a codebook but the model in `folder` is plain."""
    if can_have_entries(params) and is_plain_model(str(folder)):
        raise TrainingError(
            "--draft-head: the data were prepared with a codebook and the model has none; prepare them with "
            "--codebook-size 0 --merge-size 1"
        )


def make_head_trainee(model: Any, folder: Path, params: CodecParams, settings: TrainSettings) -> HeadTrainee:
    """Returns the model, with all weights frozen, and a new draft head.

    On the CPU, where quantized weights are slow, the weights are dequantized. folder: the model's folder. params: the
    data's codec. If samples begin with the entries of the pack in `folder`, the pack's tuned rows are used. Raises
    `TrainingError` if the model cannot have a head, and `DataError` if the pack cannot be read.
    """
    if mx.default_device() == mx.cpu:
        model = dequantize_all_weights(model, settings.dtype)
    elif settings.dtype == "float32":
        model.set_dtype(mx.float32)
    pack: Pack | None = None
    if isinstance(model, Model) and params.start:
        pack = pack_in_folder(folder, model.config.start)
        pack = pack if pack is not None and pack.entries == tuple(params.start) else None
    with errors_as(TrainingError, "--draft-head", ModelError, AttributeError):
        width = model.config.encoder.model_size if isinstance(model, Model) else model.args.hidden_size
        return HeadTrainee(model, settings.head_size or 2 * width, pack=pack)


def save_head(options: RunOptions, trainee: HeadTrainee) -> None:
    """Writes the head to `options.out`, and also to `options.model` if that is a local folder.

    Raises `TrainingError` if a file cannot be written.
    """
    own = expand_home(str(options.model))
    places = [options.out, *([own] if own.is_dir() else [])]
    for place in places:
        if (place / DRAFT_HEAD).exists():
            print(f"{place / DRAFT_HEAD} is replaced", file=sys.stderr)
        with errors_as(TrainingError, f"cannot write {place / DRAFT_HEAD}", OSError):
            save_draft_head(place / DRAFT_HEAD, trainee.draft_head, trainee.embedding_rows)
    if len(places) == 1:
        print(f"copy {options.out / DRAFT_HEAD} into the model's folder to use it", file=sys.stderr)
