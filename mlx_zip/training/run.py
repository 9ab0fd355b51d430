"""Runs training from beginning to end: loads model and data, trains, and saves the result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlx_zip
from mlx_zip.errors import DataError, TrainingError, missing_library_error
from mlx_zip.files import expand_home, read_json_object
from mlx_zip.models.loading import find_model_folder
from mlx_zip.models.machines import (
    is_first_machine,
    raise_unless_machines_agree,
    run_on_all_machines,
    sum_over_machines,
)
from mlx_zip.models.zip_model import Model
from mlx_zip.packs.pack import IN_FOLDER
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.training.checkpoints import hash_trained_weights, list_checkpoints, load_trained_weights
from mlx_zip.training.head_training import (
    HeadTrainee,
    check_head_data_fits,
    check_head_options,
    make_head_trainee,
    save_head,
)
from mlx_zip.training.prepare.shards import PreparedShards
from mlx_zip.training.run_data import JoinedFolders, count_held_out, open_run_data, split_held_out
from mlx_zip.training.run_folder import open_run_folder, read_begun_run, record_more_iters
from mlx_zip.training.run_summary import run_header_lines, run_summary_lines
from mlx_zip.training.saving import check_adapter_savable, default_save_dtype, save_adapter_folder, save_model_folder
from mlx_zip.training.settings import ADAPTER, MODEL, VALID_SHARE, RunOptions, TrainSettings
from mlx_zip.training.starting_model import fingerprint_run, freeze_and_add_lora, make_starting_model
from mlx_zip.training.steps.forward_pass import recompute_activations
from mlx_zip.training.steps.objective import LossWeights, PackAndModelTrainee, Trainee
from mlx_zip.training.steps.stepper import Stepper
from mlx_zip.training.trainer import Outcome, Trainer, check_enough_samples
from mlx_zip.vocab.first_stage import tokenizer_fingerprint


def train(options: RunOptions, settings: TrainSettings, quiet: bool = False) -> Outcome:
    """Trains in the folder `options.out`, from the last checkpoint there; when finished, writes the result there.

    The result is `out/model`, `out/adapter` or a draft head. Raises `TrainingError`, `DataError`, `ConfigError` or
    `ModelError` if options, data or model are invalid or do not fit together.
    """
    group = mx.distributed.init()
    first = group.rank() == 0
    run = run_on_all_machines(group, lambda: _Run(options, settings))
    facts = json.dumps([run.fingerprint(settings.iters), run.record["data"]])
    raise_unless_machines_agree(group, facts, "model, data or settings")
    with ExitStack() as stack:
        held_out = run_on_all_machines(group, lambda: run.open_folder(stack) if first else 0)
        run.data, held_out_data = split_held_out(run.data, sum_over_machines(group, held_out)[0], settings.seed)
        run.valid = run.valid or held_out_data
        return run.train(quiet or not first)


def choose_stepper(engine: str, config: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a function that makes the engine's stepper. Raises `InstallationError` if the engine lacks a library."""
    if engine == "mlx":
        return Stepper
    if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        raise missing_library_error("--engine torch", *missing, extra="torch")
    from mlx_zip.training.steps.torch_stepper import TorchStepper

    return partial(TorchStepper, config=config)


class _Run:
    """A run whose inputs are loaded and checked.

    data, valid: samples to train and to validate on. folder: the model's folder or, from scratch, the tokenizer's.
    config: the model's config.json. trainee: the model with what is trained beside it. dtype: floating-point type of
    the saved weights. begun: the run in `options.out`, None for a new run. done: steps saved there. first_iters: number
    of steps with which the run began. record, mark: see `open_run_folder`.
    """

    def __init__(self, options: RunOptions, settings: TrainSettings) -> None:
        options.check()
        if settings.draft_head:
            check_head_options(options, settings)
        self.options, self.settings = options, settings
        self.data, self.valid = open_run_data(options)
        self._load_model()
        check_enough_samples(self.data, self.valid, settings)
        self.begun = read_begun_run(options.out)
        found = list_checkpoints(options.out)
        self.done = found[-1][0] if found else 0
        self.record = self._make_record()
        self.first_iters = settings.iters if self.begun is None else self.begun.iters
        self.mark = self.fingerprint(self.first_iters)

    def _load_model(self) -> None:
        options, settings, params = self.options, self.settings, self.data.params
        folder = None if options.model is None else find_model_folder(options.model)
        tokenizer_folder = options.tokenizer or folder
        if tokenizer_folder is None:
            raise TrainingError("--from-scratch needs --tokenizer")
        self.folder = folder or Path(tokenizer_folder)
        self.tokenizer = load_tokenizer(Path(tokenizer_folder))
        for part in (*self.data.parts, *(self.valid.parts if self.valid else ())):
            _check_same_tokenizer(part, self.tokenizer, tokenizer_folder)
        mx.random.seed(settings.seed)
        scratch = None if options.scratch is None else read_json_object(options.scratch, raises=TrainingError)
        if settings.draft_head:
            check_head_data_fits(self.folder, params)
        model, self.config = make_starting_model(folder, scratch, params, options.encoder, options.canonical)
        _check_vocabulary_and_context(self.config, self.data, len(self.tokenizer))
        if settings.pack_rows:
            _check_pack_rows_trainable(model, self.data, folder)
        if options.save == ADAPTER:
            check_adapter_savable(model, self.config, settings, from_scratch=folder is None)
        self.dtype = options.save_dtype or default_save_dtype(model)
        self.trainee = self._make_trainee(model)

    def _make_trainee(self, model: Any) -> Trainee:
        settings, params = self.settings, self.data.params
        if settings.draft_head:
            return make_head_trainee(model, self.folder, params, settings)
        freeze_and_add_lora(model, settings)
        if settings.pack_rows:
            return PackAndModelTrainee(model, len(params.start or ()))
        return Trainee(model, LossWeights(settings.reconstruction, settings.token_type))

    def _make_record(self) -> dict[str, Any]:
        """Returns the record of what the run trains. If the folder has a checkpoint, --init-from is not read again."""
        options = self.options
        origin = options.model if options.scratch is None else options.scratch.name
        before = {}
        if options.init_from is not None:
            known = self.begun.init_from if self.begun is not None and self.done else None
            before = {"init_from": known or hash_trained_weights(options.init_from)}
        settings = self.settings.values_to_record()
        return {
            "fixed": {"model": Path(origin).name if origin else None, "settings": settings, **before},
            "data": [_make_prepared_data_record(part) for part in self.data.parts],
            "encoder": vars(options.encoder),
            "mlx_zip": mlx_zip.__version__,
        }

    def fingerprint(self, iters: int) -> str:
        """Returns the fingerprint of this run if it began with `iters` steps."""
        return fingerprint_run(self.trainee.model, self.config, self._fixed(iters))

    def _fixed(self, iters: int) -> dict[str, Any]:
        fixed = self.record["fixed"]
        return {**fixed, "settings": {**fixed["settings"], "iters": iters}}

    def open_folder(self, stack: ExitStack) -> int:
        """Makes or continues the run's folder, which stays locked until `stack` is closed. For the first machine.

        Returns how many samples of `data` to hold out. Raises `TrainingError` if another run is in the folder.
        """
        options, begun, iters = self.options, self.begun, self.settings.iters
        share = (0.0 if options.valid else VALID_SHARE) if options.valid_share is None else options.valid_share
        if begun is not None:
            begun.check_continued_by(iters, options.valid_share, self.done)
            share = begun.valid_share
        record = {**self.record, "fixed": self._fixed(self.first_iters)}
        if share:
            record["valid_share"] = share
        stack.enter_context(open_run_folder(options.out, record, self.mark))
        if begun is not None and iters != begun.raised_to:
            record_more_iters(options.out, iters)
        return count_held_out(self.data, share, self.settings.batch_size)

    def train(self, quiet: bool) -> Outcome:
        """Trains the model, and saves the result if all steps are done."""
        options, settings, trainee = self.options, self.settings, self.trainee
        if options.init_from is not None and not self.done:
            load_trained_weights(options.init_from, trainee)
        if settings.grad_checkpoint and options.engine == "mlx":
            recompute_activations(trainee.model.layers)
        steps = choose_stepper(options.engine, self.config)
        trainer = Trainer(trainee, self.data, settings, options.out, self.mark, self.valid, quiet, steps)
        if not quiet and sys.stderr is not None:
            trained = "a draft head" if settings.draft_head else settings.fine_tune_type
            what = f"{options.model or options.scratch} ({trained})"
            print(*run_header_lines(trainer, what), sep="\n", file=sys.stderr)
        if trainee.loss_is_of_text and options.scratch is None:
            trainer.log_base_bits()
        unfinished = trainer.progress.step < settings.iters
        outcome = trainer.train()
        if outcome.progress.step >= settings.iters and is_first_machine():
            if unfinished and not quiet and trainee.loss_is_of_text:
                print(*run_summary_lines(trainer, options), sep="\n", file=sys.stderr)
            self._save(outcome)
        return outcome

    def _save(self, outcome: Outcome) -> None:
        options, params, trainee = self.options, self.data.params, self.trainee
        if isinstance(trainee, HeadTrainee):
            save_head(options, trainee)
            return
        rows: dict[str, mx.array] = {}
        if isinstance(trainee, PackAndModelTrainee):
            rows = trainee.trained_pack_rows(params.start or (), params)
        if options.save == ADAPTER:
            place = expand_home(str(options.model))
            base = str(place.resolve()) if place.is_dir() else str(options.model)
            save_adapter_folder(options.out / ADAPTER, trainee.model, base, self.settings, self.dtype, rows)
            return
        source = {**self.record["fixed"], **vars(outcome.progress)}
        save_model_folder(
            options.out / MODEL,
            trainee.model,
            self.config,
            self.tokenizer,
            source,
            self.dtype,
            self.folder,
            options.adapted_bits,
            rows,
        )


def _check_pack_rows_trainable(model: Any, data: JoinedFolders, folder: Path | None) -> None:
    """Raises `TrainingError` if rows of a pack cannot be trained, or would replace rows in the model's folder."""
    if not data.params.start or not isinstance(model, Model):
        raise TrainingError("--pack-rows needs data that were prepared with --pack, and without --start-draw")
    if folder is not None and (folder / IN_FOLDER).exists():
        raise TrainingError(
            f"{folder / IN_FOLDER} has trained rows already, which --pack-rows would replace: begin with the run that "
            "made them (--init-from), or delete the file"
        )


def _check_same_tokenizer(part: PreparedShards, tokenizer: Any, folder: str | Path) -> None:
    made_with = (part.index.get("tokenizer") or {}).get("fingerprint")
    if made_with is not None and made_with != tokenizer_fingerprint(tokenizer):
        raise DataError(f"{part.folder} was prepared with another tokenizer than the one in {folder}; prepare it again")


def _check_vocabulary_and_context(config: Mapping[str, Any], data: JoinedFolders, tokens: int) -> None:
    """Raises `TrainingError` unless every base id has a row and the windows fit into the model's context.

    config: the model's config.json. tokens: number of tokens in the tokenizer.
    """
    rows = config.get("vocab_size")
    if isinstance(rows, int) and data.params.vocab_size > rows:
        raise TrainingError(f"{data} has base ids up to {data.params.vocab_size}, the model has {rows} rows")
    if tokens > data.params.vocab_size:
        raise TrainingError(f"the tokenizer has {tokens} tokens, the data's base ids end at {data.params.vocab_size}")
    context, longest = config.get("max_position_embeddings"), max(part.context for part in data.parts)
    if isinstance(context, int) and longest > context:
        raise TrainingError(f"the data hold windows of {longest} base ids, the model's context is {context}")


def _make_prepared_data_record(part: PreparedShards) -> dict[str, Any]:
    """Returns a record of a prepared folder's content and origin, without paths, so that folders may be moved."""
    settings = part.index.get("settings") or {}
    try:
        digests = [sorted(source["sha256"].values()) for source in settings.get("sources", ())]
    except (TypeError, LookupError, AttributeError) as error:
        raise DataError(f"{part.folder}: its index is damaged ({error!r}); prepare the data again") from error
    record = {key: part.index.get(key) for key in ("codec", "context", "tokenizer", "shards")}
    return {**record, "settings": {**settings, "sources": digests}}


def finished_model_folder(out: Path) -> Path:
    """Returns the model folder of a finished run. Raises `TrainingError` if the run is not finished."""
    if not (out / MODEL / "config.json").exists():
        raise TrainingError(f"{out} has no finished model yet")
    return out / MODEL
