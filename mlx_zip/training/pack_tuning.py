"""Tunes a pack: trains the rows of the pack's entries on texts, for one frozen model."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_zip
from mlx_zip.codec import CodecParams
from mlx_zip.errors import TrainingError
from mlx_zip.layout import MODEL_TYPE
from mlx_zip.models.loading import load
from mlx_zip.models.model_folder import codec_for_tuned_pack, find_model_folder, read_model_config
from mlx_zip.models.zip_model import Model
from mlx_zip.packs.pack import Pack
from mlx_zip.packs.tuned import TunedRows
from mlx_zip.progress import pluralize
from mlx_zip.training.prepare.text_windows import CompressedTexts
from mlx_zip.training.run_folder import MetricsLog, open_run_folder, read_metrics
from mlx_zip.training.run_summary import run_header_lines
from mlx_zip.training.settings import EncoderOptions, TrainSettings
from mlx_zip.training.starting_model import make_starting_model
from mlx_zip.training.steps.objective import PackTrainee, encode_pack_rows
from mlx_zip.training.trainer import Outcome, Trainer, check_enough_samples


@dataclass(frozen=True)
class TuningResult:
    """The result of `tune_pack`.

    rows: the tuned rows, None if a signal ended the run early. before, after: held-out bits per byte before the first
    and after the last step; `after` is None if `rows` is None.
    """

    rows: TunedRows | None
    outcome: Outcome
    before: float
    after: float | None


def load_model_to_tune(name: str, params: CodecParams, position_mode: str, trust_remote_code: bool = False) -> Model:
    """Loads the model that a pack is tuned for, with the codec `params`.

    name: model folder, bundled model or hub id; a plain model gets a codebook and an averaging encoder. position_mode:
    how a plain model counts positions; a zip2zip model keeps its own mode. trust_remote_code: see `load`.
    """
    folder = find_model_folder(name)
    if read_model_config(folder)["model_type"] == MODEL_TYPE:
        model = load(
            folder,
            pack=Pack(params.start or ()),
            codebook_size=params.codebook_size,
            trust_remote_code=trust_remote_code,
        )[0]
    else:
        encoder = EncoderOptions("averaging", tie_encoders=True, position_mode=position_mode)
        model: Any = make_starting_model(folder, None, params, encoder)[0]
    return model


def tune_pack(
    pack: Pack,
    model: Model,
    data: CompressedTexts,
    valid: CompressedTexts,
    settings: TrainSettings,
    run: Path,
    *,
    plain: bool = False,
    name: str | None = None,
    save_dtype: str = "float32",
    quiet: bool = False,
) -> TuningResult:
    """Trains the rows of a pack's entries with the model frozen; resumes the run's last checkpoint if there is one.

    data, valid: samples to train and to validate on, whose codebooks begin with the pack's entries. run: folder of
    checkpoints and metrics. plain: whether the model was plain when it was loaded. name: fingerprint of the model that
    the rows are for; None for `model`'s own (pass the original's if `model` was dequantized). save_dtype: dtype of the
    saved rows, float16 or float32. Training begins with the pack's rows for this model if the pack has any, else with
    the rows that the model's encoder makes (for a plain model, the mean of the base ids' rows). `fine_tune_type` and
    LoRA settings are ignored. If `settings.dtype` is float32, the model is cast to float32. Raises `TrainingError` if
    the data do not fit the model or the folder holds another run, and `DataError` if the data are damaged.
    """
    _check_windows_fit(model, data, valid)
    check_enough_samples(data, valid, settings)
    name, params = name or model.fingerprint, data.params
    if settings.dtype == "float32":
        model.set_dtype(mx.float32)
    rows = _initial_pack_rows(pack, model, name, params)
    record = _make_tuning_record(pack, name, data, valid, settings)
    mark = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    with open_run_folder(run, record, mark, "--run"):
        trainee = PackTrainee(model, *rows)
        first = trainee.trainable_parameters()
        trainer = Trainer(trainee, data, settings, run, mark, valid, quiet)
        if not trainer.quiet:
            print(
                *run_header_lines(trainer, f"rows of {pluralize(len(pack.entries), 'entry')}"),
                sep="\n",
                file=sys.stderr,
            )
        before = _bits_before_training(trainer, first, run)
        outcome = trainer.train()
        if outcome.progress.step < settings.iters:
            return TuningResult(None, outcome, before, None)
        after = trainer.measure_validation()[0]["val_bits_per_byte"]
    codec = codec_for_tuned_pack(params, model.config.position_mode) if plain else None
    output = np.array(trainee.output_rows).astype(save_dtype)
    read = output if model.sides_are_one else np.array(trainee.pack_input_rows).astype(save_dtype)
    return TuningResult(TunedRows(read, output, name, codec), outcome, before, after)


def _check_windows_fit(model: Model, data: CompressedTexts, valid: CompressedTexts) -> None:
    context = model.args.config.get("max_position_embeddings")
    longest = max(sample.base_ids for sample in (*data.samples, *valid.samples))
    if isinstance(context, int) and longest > context:
        raise TrainingError(f"there are windows of {longest} base ids (--context), the model has {context} positions")


def _initial_pack_rows(pack: Pack, model: Model, name: str, params: CodecParams) -> list[mx.array]:
    """Returns the input rows and output rows before tuning, float32 [entries, D] each. name: see `tune_pack`."""
    if pack.rows is not None and pack.rows.model == name and pack.rows.sides_are_one == model.sides_are_one:
        return [mx.array(rows.astype(np.float32)) for rows in (pack.rows.input, pack.rows.output)]
    return encode_pack_rows(model, pack.entries, params)


def _bits_before_training(trainer: Trainer, first: Any, run: Path) -> float:
    """Returns held-out bits per byte before the first step: from a resumed run's log, else measured with `first`.

    first: the initial rows, by parameter name.
    """
    for line in read_metrics(run):
        if line["step"] == 0 and isinstance(line.get("val_bits_per_byte"), float):
            return line["val_bits_per_byte"]
    now = trainer.trainee.trainable_parameters()
    trainer.trainee.update(first)
    found, _ = trainer.measure_validation()
    trainer.trainee.update(now)
    MetricsLog(run, trainer.progress.step).add(step=0, **found)
    return found["val_bits_per_byte"]


def _make_tuning_record(
    pack: Pack, name: str, data: CompressedTexts, valid: CompressedTexts, settings: TrainSettings
) -> dict[str, Any]:
    fixed = settings.values_to_record()
    return {
        "fixed": {"model": name, "settings": fixed},
        "data": [pack.fingerprint, data.fingerprint, valid.fingerprint],
        "encoder": None,
        "mlx_zip": mlx_zip.__version__,
    }
