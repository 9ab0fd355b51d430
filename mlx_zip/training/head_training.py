"""Trains a draft head (`mlx_zip train --draft-head`) for a model whose own weights are frozen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_zip.codec import CodecParams
from mlx_zip.errors import ModelError, TrainingError, errors_as
from mlx_zip.files import expand_home
from mlx_zip.models.draft_head import save_draft_head
from mlx_zip.models.model_folder import DRAFT_HEAD
from mlx_zip.models.zip_model import Model
from mlx_zip.packs.pack import Pack, pack_in_folder
from mlx_zip.training.pack_tuning import dequantize
from mlx_zip.training.prepare.shards import can_have_entries
from mlx_zip.training.settings import ADAPTER, RunOptions, TrainSettings
from mlx_zip.training.steps.head_objective import HeadTrainee
from mlx_zip.training.trainer import Trainer


class HeadTrainer(Trainer):
    """A run that trains a draft head. The loss is not a text's likelihood, so no bits per byte are reported."""

    loss_is_of_text = False

    def describe_validation(self, line: dict[str, float]) -> str:
        """Returns the figures of `measure_validation` as text. line: result of `measure_validation`."""
        return f"validation: {line['val_accepted_ids']:.3f} proposed ids accepted per pass"

    def measure_validation(self) -> dict[str, float]:
        """Measures the head on `validation_batches`: loss in nats per guess, and accepted ids per position."""
        sums = self.sum_validation()
        count = max(sums["count"], 1)
        return {"val_loss": sums["nats"] / count, "val_accepted_ids": sums["accepted"] / count}


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


def check_data_fits(plain: bool, params: CodecParams) -> None:
    """Raises `TrainingError` if the data have a codebook but the model is plain. plain: whether the model is plain."""
    if plain and can_have_entries(params):
        raise TrainingError(
            "--draft-head: the data were prepared with a codebook and the model has none; prepare them with "
            "--codebook-size 0 --merge-size 1"
        )


def freeze_model(model: Any, settings: TrainSettings) -> Any:
    """Returns the model with all weights frozen, and dequantized on the CPU, where quantized weights are slow."""
    if mx.default_device() == mx.cpu:
        model = dequantize(model, settings.dtype)
    elif settings.dtype == "float32":
        model.set_dtype(mx.float32)
    model.freeze()
    return model


def make_head_trainee(model: Any, folder: Path, params: CodecParams, settings: TrainSettings) -> HeadTrainee:
    """Returns the frozen model with a new draft head. folder: the model's folder. params: the data's codec.

    If samples begin with the entries of the pack in `folder`, the pack's tuned rows are used. Raises `TrainingError` if
    the model cannot have a head, and `DataError` if the pack cannot be read.
    """
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
        with errors_as(TrainingError, f"cannot write {place / DRAFT_HEAD}"):
            save_draft_head(place / DRAFT_HEAD, trainee.draft_head, trainee.embedding_rows)
    if len(places) == 1:
        print(f"copy {options.out / DRAFT_HEAD} into the model's folder to use it", file=sys.stderr)
