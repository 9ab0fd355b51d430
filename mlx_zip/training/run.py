"""A training run from beginning to end: the model, the data, the loop, the saved folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlx_zip
from mlx_zip.errors import DataError, TrainingError
from mlx_zip.files import check_in, sole_user, write_json
from mlx_zip.loading import model_folder
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.training.adapt import EncoderOptions, fingerprint, freeze, start_model
from mlx_zip.training.adapter import check_savable, save_adapter
from mlx_zip.training.machines import check_equal, together
from mlx_zip.training.objective import LossWeights, Trainee
from mlx_zip.training.recompute import recompute_activations
from mlx_zip.training.saving import DTYPES, save_trained
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.shards import Joined, Shards
from mlx_zip.training.trainer import Outcome, Trainer, check_data
from mlx_zip.vocab.first_stage import tokenizer_fingerprint

RECORD, MODEL, ADAPTER = "train.json", "model", "adapter"
SAVES = (MODEL, ADAPTER)
TELLING = ("steps_per_report", "steps_per_eval", "val_batches", "save_every", "keep", "compile")  # change no number


@dataclass(frozen=True)
class RunOptions:
    """What a run reads and writes.

    data, valid: prepared folders. out: the run's folder. model: folder or hub id to start from, or None with
    `scratch`, the path of a config.json, and `tokenizer`, a folder. encoder: for a plain model on compressed data.
    canonical: train on the probabilities of canonical decoding, and save a model that decodes so; None for what the
    model's config says. save: what a finished run leaves, one of `SAVES`. save_dtype: of what is saved.
    """

    data: Sequence[Path]
    out: Path
    model: str | None = None
    scratch: Path | None = None
    tokenizer: Path | None = None
    valid: Sequence[Path] = ()
    encoder: EncoderOptions = field(default_factory=EncoderOptions)
    canonical: bool | None = None
    save: str = MODEL
    save_dtype: str = "float32"


def train(options: RunOptions, settings: TrainSettings, quiet: bool = False) -> Outcome:
    """Runs, or goes on with, the training run in `options.out`; a finished one leaves `out/model` or `out/adapter`.

    Raises `TrainingError`, `DataError`, `ConfigError`, `ModelError`.
    """
    group = mx.distributed.init()
    start = together(group, lambda: _start(options, settings, first=group.rank() == 0))
    facts = json.dumps([start.fingerprint, start.record["data"]])
    check_equal(group, sha256(facts.encode()).hexdigest(), "model, data or settings")
    with _alone(group, options.out):
        return _run(group, options, settings, start, quiet)


@contextmanager
def _alone(group: mx.distributed.Group, out: Path) -> Iterator[None]:
    """No other process trains in the folder: each would take the other's checkpoints for its own."""
    with sole_user(out) if group.rank() == 0 else nullcontext(True) as alone:
        together(group, lambda: _refuse_others(out, alone))
        yield


def _refuse_others(out: Path, alone: bool) -> None:
    if not alone:
        raise TrainingError(f"another process trains in {out}; wait for it, or choose another --out")


def _run(
    group: mx.distributed.Group, options: RunOptions, settings: TrainSettings, start: _Start, quiet: bool
) -> Outcome:
    trainee = Trainee(start.model, LossWeights(settings.reconstruction, settings.token_type))
    if settings.grad_checkpoint:
        recompute_activations(start.model.layers)
    trainer = Trainer(trainee, start.data, settings, options.out, start.fingerprint, start.valid, quiet)
    outcome = trainer.train()
    if outcome.progress.step >= settings.iters and group.rank() == 0:
        _save(options, settings, start, outcome)
    return outcome


@dataclass(frozen=True)
class _Start:
    """All that a run begins with, read and checked. folder: of the model or, from scratch, of the tokenizer."""

    model: Any
    config: dict[str, Any]
    tokenizer: Any
    folder: Path
    data: Joined
    valid: Joined | None
    record: dict[str, Any]
    fingerprint: str


def _start(options: RunOptions, settings: TrainSettings, first: bool) -> _Start:
    """first: this is the machine that writes."""
    if (options.model is None) == (options.scratch is None):
        raise TrainingError("give --model, or --from-scratch with a config.json")
    if options.save not in SAVES:
        raise TrainingError(f"save {options.save!r} is not one of {', '.join(SAVES)}")
    if options.save_dtype not in DTYPES:
        raise TrainingError(f"save_dtype {options.save_dtype!r} is not one of {', '.join(DTYPES)}")
    data = Joined(options.data)
    valid = Joined(options.valid) if options.valid else None
    if valid is not None and valid.params != data.params:
        raise DataError(f"{valid} was prepared for another codec than {data}")
    folder = None if options.model is None else model_folder(options.model)
    tokenizer_folder = options.tokenizer or folder
    if tokenizer_folder is None:
        raise TrainingError("--from-scratch needs --tokenizer")
    tokenizer = load_tokenizer(Path(tokenizer_folder))
    for part in (*data.parts, *(valid.parts if valid else ())):
        _check_tokenizer(part, tokenizer, tokenizer_folder)
    mx.random.seed(settings.seed)
    scratch = None if options.scratch is None else _read_object(options.scratch)
    model, config = start_model(folder, scratch, data.params, options.encoder, options.canonical)
    _check_sizes(config, data, len(tokenizer))
    if options.save == ADAPTER:
        check_savable(model, config, settings, from_scratch=folder is None)
    freeze(model, settings)
    check_data(data, valid, settings)
    record = _record(options, settings, data)
    mark = fingerprint(model, config, record["fixed"])
    if first:
        open_run(options.out, record, mark)
    return _Start(model, config, tokenizer, folder or Path(tokenizer_folder), data, valid, record, mark)


def _check_tokenizer(part: Shards, tokenizer: Any, folder: str | Path) -> None:
    """The data must have been prepared with this tokenizer, if they say with which."""
    made_with = (part.index.get("tokenizer") or {}).get("fingerprint")
    if made_with is not None and made_with != tokenizer_fingerprint(tokenizer):
        raise DataError(f"{part.folder} was prepared with another tokenizer than the one in {folder}; prepare it again")


def _save(options: RunOptions, settings: TrainSettings, start: _Start, outcome: Outcome) -> None:
    if options.save == ADAPTER:
        place = Path(str(options.model)).expanduser()
        base = str(place.resolve()) if place.is_dir() else str(options.model)
        save_adapter(options.out / ADAPTER, start.model, base, settings, options.save_dtype)
        return
    source = {**start.record["fixed"], **vars(outcome.progress)}
    folder = options.out / MODEL
    save_trained(folder, start.model, start.config, start.tokenizer, source, options.save_dtype, start.folder)


def _read_object(path: Path, hint: str = "") -> dict[str, Any]:
    """A JSON object from a file. Raises `TrainingError`, its message ending in `hint`."""
    try:
        check_in(path)
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, DataError) as error:
        raise TrainingError(f"{path} cannot be read: {error}{hint}") from error
    if not isinstance(found, dict):
        raise TrainingError(f"{path} holds no JSON object{hint}")
    return found


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
    return {
        "fixed": {"model": Path(origin).name if origin else None, "settings": fixed},
        "data": [_data_record(part) for part in data.parts],
        "encoder": vars(options.encoder),
        "mlx_zip": mlx_zip.__version__,
    }


def _data_record(part: Shards) -> dict[str, Any]:
    """What a prepared folder holds and was made of, wherever it and its sources lie."""
    settings = part.index.get("settings") or {}
    try:
        digests = [sorted(source["sha256"].values()) for source in settings.get("sources", ())]
    except (TypeError, LookupError, AttributeError) as error:
        raise DataError(f"{part.folder}: its index is damaged ({error!r}); prepare the data again") from error
    record = {key: part.index.get(key) for key in ("codec", "context", "tokenizer", "shards")}
    return {**record, "settings": {**settings, "sources": digests}}


def open_run(out: Path, record: dict[str, Any], mark: str, flag: str = "--out") -> None:
    """Makes the run's folder, or checks that it is this run's. flag: what names the folder."""
    path, advice = out / RECORD, f"choose another {flag}"
    if path.exists():
        before = _read_object(path, f"; {advice}")
        same_data = before.get("data") == json.loads(json.dumps(record["data"]))
        if before.get("fingerprint") != mark or not same_data:
            raise TrainingError(f"{out} holds another run ({_difference(before, record)}); {advice}")
        return
    if out.is_dir() and any(not path.name.startswith(".") for path in out.iterdir()):
        raise TrainingError(f"{out} is not empty and holds no run; {advice}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, {**record, "fingerprint": mark})
    except OSError as error:
        raise TrainingError(f"cannot write {out}: {error}") from error


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which of the recorded facts differ, by name."""
    fixed, new = before.get("fixed"), now["fixed"]["settings"]
    old = fixed.get("settings") if isinstance(fixed, dict) else None
    old = old if isinstance(old, dict) else {}
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    parts = [name for name in ("data", "encoder") if before.get(name) != json.loads(json.dumps(now[name]))]
    return ", ".join([*names, *parts]) or "another model"


def trained_model(out: Path) -> Path:
    """The model folder that a finished run left. Raises `TrainingError` if it is not finished."""
    if not (out / MODEL / "config.json").exists():
        raise TrainingError(f"{out} has no finished model yet")
    return out / MODEL
