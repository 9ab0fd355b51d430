"""A training run from beginning to end: the model, the data, the loop, the saved folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tuner.trainer import grad_checkpoint
from mlx_lm.utils import load_tokenizer

import mlx_zip
from mlx_zip.errors import DataError, TrainingError
from mlx_zip.files import write_json
from mlx_zip.loading import model_folder
from mlx_zip.training.adapt import EncoderOptions, fingerprint, freeze, start_model
from mlx_zip.training.checkpoint import checkpoints
from mlx_zip.training.objective import LossWeights, Trainee
from mlx_zip.training.saving import save_trained
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.shards import Joined
from mlx_zip.training.trainer import Outcome, Trainer

RECORD, MODEL = "train.json", "model"
TELLING = ("steps_per_report", "steps_per_eval", "val_batches", "save_every", "keep", "compile")  # change no number


@dataclass(frozen=True)
class RunOptions:
    """What a run reads and writes.

    data, valid: prepared folders. out: the run's folder. model: folder or hub id to start from, or None with
    `scratch`, the path of a config.json, and `tokenizer`, a folder. encoder: for a plain model on compressed data.
    save_dtype: of the saved model.
    """

    data: Sequence[Path]
    out: Path
    model: str | None = None
    scratch: Path | None = None
    tokenizer: Path | None = None
    valid: Sequence[Path] = ()
    encoder: EncoderOptions = field(default_factory=EncoderOptions)
    save_dtype: str = "float32"


def train(options: RunOptions, settings: TrainSettings, quiet: bool = False) -> Outcome:
    """Runs, or goes on with, the training run in `options.out`; a finished one leaves `out/model`.

    Raises `TrainingError`, `DataError`, `ConfigError`, `ModelError`.
    """
    if (options.model is None) == (options.scratch is None):
        raise TrainingError("give --model, or --from-scratch with a config.json")
    data = Joined(options.data)
    valid = Joined(options.valid) if options.valid else None
    if valid is not None and valid.params != data.params:
        raise DataError(f"{valid} was prepared for another codec than {data}")
    folder = None if options.model is None else model_folder(options.model)
    tokenizer_folder = options.tokenizer or folder
    if tokenizer_folder is None:
        raise TrainingError("--from-scratch needs --tokenizer")
    tokenizer = load_tokenizer(Path(tokenizer_folder))
    mx.random.seed(settings.seed)
    model, config = start_model(folder, _read_config(options.scratch), data.params, options.encoder)
    _check_sizes(config, data, len(tokenizer))
    freeze(model, settings)
    record = _record(options, settings, data)
    mark = fingerprint(model, config, record["fixed"])
    _open_run(options.out, record, mark)
    weights = LossWeights(settings.reconstruction, settings.token_type)
    trainee = Trainee(model, weights)
    if settings.grad_checkpoint:
        grad_checkpoint(model.layers[0])
    outcome = Trainer(trainee, data, settings, options.out, mark, valid, quiet).train()
    if outcome.progress.step >= settings.iters and mx.distributed.init().rank() == 0:
        source = {**record["fixed"], **vars(outcome.progress)}
        save_trained(options.out / MODEL, model, config, tokenizer, source, options.save_dtype)
    return outcome


def _read_config(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise TrainingError(f"{path} holds no JSON object")
    return config


def _check_sizes(config: Mapping[str, Any], data: Joined, tokens: int) -> None:
    """Every id of the data must have a row, and the context must fit."""
    rows = config.get("vocab_size")
    if isinstance(rows, int) and data.params.vocab_size > rows:
        raise TrainingError(f"{data} has base ids up to {data.params.vocab_size}, the model has {rows} rows")
    if tokens > data.params.vocab_size:
        raise TrainingError(f"the tokenizer has {tokens} tokens, the data's base ids end at {data.params.vocab_size}")
    context, longest = config.get("max_position_embeddings"), max(part.context for part in data.parts)
    if isinstance(context, int) and longest > context:
        raise TrainingError(f"the data hold windows of {longest} base ids, the model's context is {context}")


def _record(options: RunOptions, settings: TrainSettings, data: Joined) -> dict[str, Any]:
    fixed = {name: value for name, value in settings.to_dict().items() if name not in TELLING}
    origin = options.model if options.scratch is None else options.scratch.name
    shards = [{key: part.index.get(key) for key in ("codec", "context", "tokenizer", "shards")} for part in data.parts]
    return {
        "fixed": {"model": Path(origin).name if origin else None, "settings": fixed},
        "data": shards,
        "encoder": vars(options.encoder),
        "mlx_zip": mlx_zip.__version__,
    }


def _open_run(out: Path, record: dict[str, Any], mark: str) -> None:
    """Makes the run's folder, or checks that it is this run's."""
    path = out / RECORD
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise TrainingError(f"{path} cannot be read: {error}; choose another --out") from error
        if before.get("fingerprint") != mark:
            raise TrainingError(f"{out} holds another run ({_difference(before, record)}); choose another --out")
        return
    if checkpoints(out) or (out.exists() and any(out.iterdir())):
        raise TrainingError(f"{out} is not empty and holds no run; choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, {**record, "fingerprint": mark})
    except OSError as error:
        raise TrainingError(f"cannot write {out}: {error}") from error


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which of the recorded facts differ, by name."""
    old, new = before.get("fixed", {}).get("settings", {}), now["fixed"]["settings"]
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    parts = [name for name in ("data", "encoder") if before.get(name) != json.loads(json.dumps(now[name]))]
    return ", ".join([*names, *parts]) or "another model"


def trained_model(out: Path) -> Path:
    """The model folder that a finished run left. Raises `TrainingError` if it is not finished."""
    if not (out / MODEL / "config.json").exists():
        raise TrainingError(f"{out} has no finished model yet")
    return out / MODEL


