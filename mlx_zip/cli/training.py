"""`mlx_zip train`: trains a model on prepared data. A setting comes from a flag, else a YAML file, else a default."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from mlx_zip.arguments import suggest_nearest
from mlx_zip.errors import TrainingError, errors_as
from mlx_zip.files import expand_home
from mlx_zip.training.mlx_lm_names import MLX_LM_NAMES, translate_mlx_lm_names
from mlx_zip.training.settings import (
    ADAPTED_BITS,
    ENGINES,
    SAVE_DTYPES,
    SAVES,
    TYPE_WORDS,
    VALID_SHARE,
    EncoderOptions,
    RunOptions,
    TrainSettings,
    has_value_type,
    setting_help_text,
)

_STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}  # signal that ended a run -> exit status
_SETTINGS = {one.name: str(one.type) for one in fields(TrainSettings)}
_KINDS = {  # flag that is not a setting -> kind of its value in YAML, a key of `VALUE_TYPES`
    **dict.fromkeys(("model", "from_scratch", "tokenizer", "out", "save", "save_dtype", "adapted_bits"), "str"),
    **dict.fromkeys(("report_to", "project_name", "adapter_path", "resume_adapter_file", "engine", "init_from"), "str"),
    **dict.fromkeys(("plot", "canonical", "mask_prompt"), "bool"),
    "max_seq_length": "int",
    "valid_share": "float",
}
_FOLDERS = ("data", "valid")
_TYPES = {"int": int, "int | None": int, "float": float, "str": str}
ENCODER_FLAGS = {  # field of EncoderOptions -> name of its flag
    "kind": "encoder",
    "num_hidden_layers": "encoder_layers",
    "num_heads": "encoder_heads",
    "size": "encoder_size",
    "intermediate_size": "encoder_intermediate_size",
    "tie_encoders": "tie_encoders",
    "residual_by_side": "residual_by_side",
    "position_mode": "position_mode",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `train`."""
    add = parser.add_argument
    add("--model", help="model folder, bundled model or hub id to start from, zip2zip or plain")
    add(
        "--from-scratch",
        metavar="CONFIG",
        help="config.json of a model that starts with random weights, instead of --model; needs --tokenizer",
    )
    add("--tokenizer", help="folder of the tokenizer (default: the folder of --model)")
    add("--data", nargs="+", help="folders of training data, as written by `mlx_zip prepare`")
    add(
        "--valid",
        nargs="+",
        default=None,
        help="folders of validation data, as written by `mlx_zip prepare` (default: --valid-share of --data)",
    )
    add(
        "--valid-share",
        type=float,
        metavar="SHARE",
        help="share of the samples in --data to hold out for validation, from 0 to below 1; 0: none (default: "
        f"{VALID_SHARE}, or 0 with --valid; a continued run keeps its own)",
    )
    add("--out", help="folder for checkpoints, metrics.jsonl and the finished model/; a run found there is continued")
    add("-c", "--config", help="YAML file of flags, named with underscores; flags on the command line take precedence")
    add(
        "--save",
        choices=SAVES,
        help="what a finished run writes; model: a whole model folder OUT/model, adapter: only LoRA adapters and "
        "hyper-encoders in OUT/adapter (default: model)",
    )
    add(
        "--save-dtype",
        choices=SAVE_DTYPES,
        help="floating-point type of the saved weights (default: float32; after a quantized --model, that model's own)",
    )
    add(
        "--adapted-bits",
        choices=ADAPTED_BITS,
        help="bits per weight, in the saved model, of a quantized model's layers that had LoRA adapters; base: as many "
        "as before, none: not quantized (default: 8)",
    )
    add(
        "--canonical",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="train and save a model for canonical decoding, in which ids that the compressor would never write get no "
        "probability (default: as the model's config says)",
    )
    add(
        "--plot",
        action="store_true",
        default=None,
        help="draw OUT/curves.png when the run ends; needs matplotlib (default: off)",
    )
    add(
        "--engine",
        choices=ENGINES,
        help="what computes the steps; mlx: MLX, torch: PyTorch, on an NVIDIA card if there is one, else the CPU, "
        "where it is much faster than MLX (default: mlx)",
    )
    add(
        "--init-from",
        metavar="RUN",
        help="folder of another run whose trained weights (LoRA adapters, hyper-encoders) this run begins with; its "
        "optimizer starts anew (default: new adapters and encoders)",
    )
    _add_setting_flags(add, TrainSettings)
    _add_setting_flags(add, EncoderOptions, ENCODER_FLAGS)
    _add_mlx_lm_flags(parser.add_argument_group("mlx-lm's names").add_argument)


def _add_mlx_lm_flags(add: Any) -> None:
    """Declares flags of `mlx_lm.lora`; flags without a counterpart here are hidden, and an error if given."""
    add("--num-layers", type=int, metavar="N", help="mlx-lm's name for --lora-layers N")
    add("--adapter-path", metavar="DIR", help="mlx-lm's name for --out DIR --save adapter")
    add(
        "--max-seq-length",
        type=int,
        metavar="N",
        help="fail if --data holds samples of more than N base ids (default: no check)",
    )
    add(
        "--mask-prompt",
        action="store_true",
        default=None,
        help="fail if --data was prepared with a loss on prompts (`mlx_zip prepare --train-on all`; default: no check)",
    )
    for name in ("resume_adapter_file", "report_to", "project_name", "test_batches", "clear_cache_threshold"):
        add(flag_name(name), help=argparse.SUPPRESS)
    for name in ("train", "test", "trust_remote_code"):
        add(flag_name(name), action="store_true", default=None, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Trains the model. Returns 0, or 129, 130 or 143 if a signal ended the run, whose last step is then saved."""
    given = {name: value for name, value in vars(args).items() if value is not None and name != "config"}
    values = _merge_file_and_flags(_read_train_config(args.config), given)
    options = _make_run_options(values)
    settings = TrainSettings.from_dict({name: values[name] for name in _SETTINGS if name in values})
    if values.get("plot"):
        from mlx_zip.training.run_folder import load_matplotlib

        load_matplotlib()  # fails now rather than after the run
    from mlx_zip.models.machines import is_first_machine
    from mlx_zip.models.model_folder import DRAFT_HEAD
    from mlx_zip.training.run import train

    outcome = train(options, settings)
    if values.get("plot") and is_first_machine():
        from mlx_zip.training.run_folder import plot_training_curves

        plot_training_curves(options.out)
    if outcome.stopped_by is not None:
        return report_stop(outcome.progress.step, outcome.stopped_by)
    if is_first_machine():
        print(options.out / (DRAFT_HEAD if settings.draft_head else options.save))
    return 0


def _merge_file_and_flags(file_values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a YAML file and of flags, with mlx-lm's names replaced by ours. Flags take precedence."""
    iters = {} if given.get("iters") is None else {"iters": given["iters"]}
    for name in ("fine_tune_type", "optimizer"):  # the meaning of other names of mlx-lm depends on these
        iters |= {name: given[name]} if given.get(name) is not None else {}
    return {**translate_mlx_lm_names({**file_values, **iters}), **translate_mlx_lm_names(given)}


def _make_run_options(values: dict[str, Any]) -> RunOptions:
    """Returns the `RunOptions` made of the flags' values. Raises `TrainingError` if --data or --out is missing."""
    for name in ("data", "out"):
        if not values.get(name):
            raise TrainingError(f"--{name} is missing")
    encoder = {name: values[named] for name, named in ENCODER_FLAGS.items() if values.get(named) is not None}
    chosen: dict[str, Any] = {one.name: values[one.name] for one in fields(RunOptions) if one.name in values}
    chosen |= {name: _folder_paths(values.get(name) or []) for name in _FOLDERS}
    paths = {"out": "out", "init_from": "init_from", "scratch": "from_scratch", "tokenizer": "tokenizer"}
    chosen |= {name: expand_home(values[flag]) for name, flag in paths.items() if values.get(flag) is not None}
    chosen["encoder"] = EncoderOptions(**encoder)
    return RunOptions(**chosen)


def report_stop(step: int, number: int) -> int:
    """Prints on stderr that a run was stopped after `step`; returns the exit status for the signal `number`."""
    print(f"stopped after step {step}; the same command goes on from there", file=sys.stderr)
    return _STOPPED[signal.Signals(number)]


def _read_train_config(path: str | None) -> dict[str, Any]:
    """Returns the values of a YAML file by name, {} without a file. Raises `TrainingError`, which names the file."""
    if path is None:
        return {}
    from mlx_zip.training.yaml_file import read_yaml

    with errors_as(TrainingError, f"--config {path} cannot be read", OSError, ValueError):
        values = read_yaml(expand_home(path)) or {}
    if not isinstance(values, dict):
        raise TrainingError(f"--config {path} holds no settings")
    known = {*_SETTINGS, *ENCODER_FLAGS.values(), *_KINDS, *_FOLDERS, *MLX_LM_NAMES}
    if unknown := sorted(map(str, values.keys() - known)):
        hint = suggest_nearest(unknown[0], known)
        raise TrainingError(f"--config {path}: unknown {', '.join(unknown)}" + (f"; {hint}" if hint else ""))
    return {name: _convert_yaml_value(path, name, value) for name, value in values.items() if value is not None}


def _convert_yaml_value(path: str, name: str, value: Any) -> Any:
    """Returns one value of the YAML file at `path`. Raises `TrainingError` if its type is not that of the flag.

    YAML reads 3e-4, which has no decimal point, as text, and `on` as true: both are corrected.
    """
    if any("\0" in one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)):
        raise TrainingError(f"--config {path}: {name} must not hold a null character")
    if name in _FOLDERS:
        if not all(isinstance(one, str) for one in (value if isinstance(value, list) else [value])):
            raise TrainingError(f"--config {path}: {name} must be names of folders, got {value!r}")
    elif name in _KINDS and not has_value_type(value, _KINDS[name]):
        raise TrainingError(f"--config {path}: {name} must be {TYPE_WORDS[_KINDS[name]]}, got {value!r}")
    if name == "compile" and isinstance(value, bool):
        return "on" if value else "off"
    if _SETTINGS.get(name) != "float" or not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError as error:
        raise TrainingError(f"--config {path}: {name} must be a number, got {value!r}") from error


def _folder_paths(value: str | list[str]) -> list[Path]:
    return [expand_home(one) for one in ([value] if isinstance(value, str) else value)]


def flag_name(name: str) -> str:
    """Returns the flag of a setting, for example `--save-every` for `save_every`."""
    return f"--{name.replace('_', '-')}"


def _add_setting_flags(
    add: Any, cls: type[TrainSettings] | type[EncoderOptions], names: Mapping[str, str] | None = None
) -> None:
    """Declares every field of a settings class as a flag with the default None.

    add: a parser's `add_argument`. names: field name -> flag name, where the two differ.
    """
    for one in fields(cls):
        _add_setting_flag(add, (names or {}).get(one.name, one.name), one, None, setting_help_text(one))


def add_training_flags(add: Any, defaults: Mapping[str, Any]) -> None:
    """Declares the training settings in `defaults` as flags, for a command with defaults of its own.

    add: a parser's `add_argument`. defaults: setting -> default, or (default, help text in place of the setting's own).
    """
    known = {one.name: one for one in fields(TrainSettings)}
    for name, given in defaults.items():
        default, text = given if isinstance(given, tuple) else (given, None)
        shown = setting_help_text(known[name], default) if text is None else f"{text} (default: {default})"
        _add_setting_flag(add, name, known[name], default, shown)


def _add_setting_flag(add: Any, name: str, one: Field[Any], default: Any, text: str) -> None:
    if one.type == "bool":
        add(flag_name(name), action="store_true", default=default, help=text)
    else:
        add(flag_name(name), type=_TYPES[str(one.type)], choices=one.metadata["choices"], default=default, help=text)
