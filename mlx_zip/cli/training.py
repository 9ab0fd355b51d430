"""`mlx_zip train`: train a model on prepared data; every setting is a flag, a line of a YAML file, or its default."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_zip.errors import TrainingError

STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143}
_TYPES = {"int": int, "float": float, "str": str}
_CHOICES = {
    "optimizer": ("adamw", "adam", "muon", "sgd", "adafactor"),
    "fine_tune_type": ("lora", "full", "encoders"),
    "availability": ("causal", "legacy"),
    "dtype": ("float32", "bfloat16"),
    "compile": ("auto", "on", "off"),
}
_SETTINGS = {  # name: (type, default, help); a test holds them equal to TrainSettings, which imports MLX's rooms
    "iters": ("int", 1000, "optimizer steps"),
    "batch_size": ("int", 4, "samples per step, over all machines"),
    "grad_accumulation_steps": ("int", 1, "batches per optimizer step"),
    "optimizer": ("str", "adamw", "muon trains matrices with Muon and the rest with AdamW"),
    "learning_rate": ("float", 3e-4, "peak of the cosine schedule"),
    "min_learning_rate": ("float", 1e-5, "its end"),
    "muon_learning_rate": ("float", 0.02, "peak for the matrices that Muon trains"),
    "warmup": ("int", 0, "steps to the peak"),
    "weight_decay": ("float", 0.01, "of AdamW"),
    "max_grad_norm": ("float", 1.0, "clip gradients to this norm; 0 does not"),
    "fine_tune_type": ("str", "lora", "what is trained: adapters and encoders, everything, or the encoders alone"),
    "lora_layers": ("int", -1, "blocks that get adapters, from the last; -1: all"),
    "lora_rank": ("int", 32, "rank of the adapters"),
    "lora_scale": ("float", 1.0, "scale of the adapters (alpha / rank)"),
    "lora_dropout": ("float", 0.0, "dropout before the adapters"),
    "availability": ("str", "causal", "causal: what generation sees; legacy: the whole codebook everywhere"),
    "reconstruction": ("float", 0.0, "weight of the reconstruction loss (lambda of the paper's eq. 3)"),
    "token_type": ("float", 0.0, "weight of the loss on whether the next id is a hypertoken"),
    "dtype": ("str", "float32", "what the forward pass computes in"),
    "grad_checkpoint": ("bool", False, "compute activations twice to save memory"),
    "compile": ("str", "auto", "compile the step; auto: except on the CPU backend"),
    "seed": ("int", 0, "of order, dropout and new weights"),
    "steps_per_report": ("int", 10, "steps between lines of metrics.jsonl"),
    "steps_per_eval": ("int", 200, "steps between validations"),
    "val_batches": ("int", 25, "batches of a validation; 0: all"),
    "save_every": ("int", 100, "steps between checkpoints"),
    "keep": ("int", 2, "checkpoints kept"),
}
_ENCODER = {
    "encoder": ("str", "res_latent_attn", "hyper-encoder that a plain model gets"),
    "encoder_layers": ("int", 2, "its layers"),
    "encoder_heads": ("int", 4, "its attention heads"),
    "encoder_size": ("int", None, "its own width (res_latent_attn; default: the model's)"),
    "encoder_intermediate_size": ("int", None, "width of its MLP (default: four times its width)"),
    "tie_encoders": ("bool", False, "one encoder for input and output rows"),
    "position_mode": ("str", "compressed", "compressed or base_token_end"),
}
_PLACES = ("model", "from_scratch", "tokenizer", "data", "valid", "out", "save", "save_dtype", "plot", "canonical")
_SWITCHES = ("plot", "canonical")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add = parser.add_argument
    add("--model", help="model folder or hub id to start from, zip2zip or plain")
    add("--from-scratch", metavar="CONFIG", help="start from random weights: a config.json (with --tokenizer)")
    add("--tokenizer", help="folder of the tokenizer (default: the model's)")
    add("--data", nargs="+", help="folders that `mlx_zip prepare` made")
    add("--valid", nargs="+", default=None, help="prepared folders to validate on")
    add("--out", help="folder of the run: checkpoints, metrics.jsonl, and in the end model/; continues what is there")
    add("-c", "--config", help="YAML file of flags (with underscores); flags given here go before it")
    add(
        "--save",
        choices=("model", "adapter"),
        help="model: a whole folder, out/model (default); adapter: LoRA and encoders alone, out/adapter",
    )
    add("--save-dtype", choices=("float32", "float16", "bfloat16"), help="of what is saved (default: float32)")
    add(
        "--canonical",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="train a zip2zip model on the probabilities of canonical decoding, which it then decodes with (default: "
        "what its config says)",
    )
    add("--plot", action="store_true", default=None, help="draw curves.png when the run ends (needs matplotlib)")
    for name, (kind, default, text) in {**_SETTINGS, **_ENCODER}.items():
        flag = f"--{name.replace('_', '-')}"
        shown = "" if default is None or "default" in text else f" (default: {default})"
        if kind == "bool":
            add(flag, action="store_true", default=None, help=text)
        else:
            add(flag, type=_TYPES[kind], choices=_CHOICES.get(name), help=text + shown)


def add_settings(add: Any, defaults: Mapping[str, Any], purposes: Mapping[str, str]) -> None:
    """Declares some settings with defaults of their own; purposes: what they are for, where that is another thing."""
    for name, default in defaults.items():
        kind, _, text = _SETTINGS[name]
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=_TYPES[kind], default=default, help=f"{purposes.get(name, text)} (default: {default})")


def run(args: argparse.Namespace) -> int:
    """Trains; 0, or 130/143 when a signal ended the run early, its last step saved."""
    values = {**_read_yaml(args.config), **{k: v for k, v in vars(args).items() if v is not None}}
    import mlx.core as mx

    from mlx_zip.training.adapt import EncoderOptions
    from mlx_zip.training.run import RunOptions, train
    from mlx_zip.training.settings import TrainSettings

    for name in ("data", "out"):
        if not values.get(name):
            raise TrainingError(f"--{name} is missing")
    settings = TrainSettings.from_dict({name: values[name] for name in _SETTINGS if name in values})
    encoder = EncoderOptions(
        kind=values.get("encoder", "res_latent_attn"),
        num_hidden_layers=values.get("encoder_layers", 2),
        num_heads=values.get("encoder_heads", 4),
        size=values.get("encoder_size"),
        intermediate_size=values.get("encoder_intermediate_size"),
        tie_encoders=values.get("tie_encoders", False),
        position_mode=values.get("position_mode", "compressed"),
    )
    options = RunOptions(
        data=[Path(p) for p in _several(values["data"])],
        valid=[Path(p) for p in _several(values.get("valid") or [])],
        out=Path(values["out"]),
        model=values.get("model"),
        scratch=_path(values.get("from_scratch")),
        tokenizer=_path(values.get("tokenizer")),
        encoder=encoder,
        canonical=values.get("canonical"),
        save=values.get("save", "model"),
        save_dtype=values.get("save_dtype", "float32"),
    )
    if values.get("plot"):
        from mlx_zip.training.curves import drawing

        drawing()  # rather now than when the run is over
    outcome = train(options, settings)
    first = mx.distributed.init().rank() == 0  # of several machines: the one that writes
    if values.get("plot") and first:
        from mlx_zip.training.metrics import plot

        plot(options.out)
    if outcome.stopped_by is not None:
        return stopped(outcome.progress.step, outcome.stopped_by)
    if first:
        print(options.out / options.save)
    return 0


def stopped(step: int, number: int) -> int:
    """Tells that a signal ended a run early; the exit status."""
    print(f"stopped after step {step}; the same command goes on from there", file=sys.stderr)
    return STOPPED[signal.Signals(number)]


def _read_yaml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise TrainingError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise TrainingError(f"--config {path} holds no settings")
    known = {*_SETTINGS, *_ENCODER, *_PLACES}
    if unknown := sorted(map(str, values.keys() - known)):
        raise TrainingError(f"--config {path}: unknown {', '.join(unknown)}")
    for name in _PLACES:
        _check_place(path, name, values.get(name))
    return {name: _as_flag(path, name, value) for name, value in values.items()}


def _check_place(path: str, name: str, value: Any) -> None:
    kind: Any = bool if name in _SWITCHES else str
    several = value if name in ("data", "valid") and isinstance(value, list) else [value]
    if value is not None and not all(isinstance(one, kind) for one in several):
        folders = "names of folders" if name in ("data", "valid") else "text"
        wanted = "true or false" if name in _SWITCHES else folders
        raise TrainingError(f"--config {path}: {name} must be {wanted}, got {value!r}")


def _as_flag(path: str, name: str, value: Any) -> Any:
    """YAML reads 3e-4, without a point, as text, and on as true."""
    if name == "compile" and isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, str) or _SETTINGS.get(name, ("str",))[0] != "float":
        return value
    try:
        return float(value)
    except ValueError as error:
        raise TrainingError(f"--config {path}: {name} must be a number, got {value!r}") from error


def _several(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else value


def _path(value: Any) -> Path | None:
    return None if value is None else Path(value)


def defaults() -> dict[str, Any]:
    """The settings' defaults as this command states them."""
    return {name: default for name, (_, default, _) in _SETTINGS.items()}
