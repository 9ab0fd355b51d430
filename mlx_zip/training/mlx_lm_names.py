"""Translates mlx-lm's names of training settings to mlx_zip's names, or refuses them with the reason.

Source: mlx-lm 0.32, `mlx_lm.lora` (flags and `CONFIG_DEFAULTS`) and its `lora_config.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlx_zip.errors import TrainingError
from mlx_zip.training.settings import TrainSettings

Values = dict[str, Any]

_HARMLESS: dict[str, tuple[Any, ...]] = {  # values without effect, such as mlx-lm's defaults, are ignored
    "resume_adapter_file": ("",),
    "test": (False,),
    "train": (True,),
    "clear_cache_threshold": (0, "0"),
    "trust_remote_code": (False,),
}
_REFUSED = {
    "train": "this command always trains; `mlx_zip evaluate` measures a model",
    "test": "measure the finished model with `mlx_zip evaluate --model OUT/model --data TEXT`",
    "resume_adapter_file": (
        "a run goes on from the last checkpoint in its own --out; to begin with an adapter of mlx-lm, fuse it first "
        "(`mlx_lm.fuse --model MODEL --adapter-path DIR --save-path FUSED`) and train --model FUSED"
    ),
    "clear_cache_threshold": "there is no such limit; --grad-checkpoint or a smaller --batch-size saves memory",
    "trust_remote_code": "a model's own code is not run in training; `mlx_zip prepare --trust-remote-code` reads texts",
    "report_to": "OUT/metrics.jsonl has all figures of the run, and --plot draws them",
    "project_name": "it names a project at the services of report_to, which is refused",
    "hf_dataset": "prepare the data set first: `mlx_zip prepare --model MODEL --data OWNER/NAME --out FOLDER`",
}
_COLUMN_NAMES = (
    "prompt_feature",
    "text_feature",
    "completion_feature",
    "chat_feature",
    "messages_feature",
    "tools_feature",
)
_REFUSED |= dict.fromkeys(
    _COLUMN_NAMES, "columns are named when data are prepared: `mlx_zip prepare --columns FIELD=COLUMN`"
)
_OPTIMIZER_OPTIONS = {  # fixed options of mlx_zip's optimizers; an optimizer_config may only repeat these values
    "adamw": {"betas": [0.9, 0.95], "eps": 1e-8, "bias_correction": True},
    "adam": {"betas": [0.9, 0.999], "eps": 1e-8, "bias_correction": True},
    "sgd": {"momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False},
    "muon": {"momentum": 0.95, "weight_decay": 0.0, "nesterov": True, "ns_steps": 5},
}
_LORA_NAMES = {"rank": "lora_rank", "scale": "lora_scale", "dropout": "lora_dropout", "keys": "lora_keys"}
_SCHEDULE_KEYS = {"name", "warmup", "warmup_init", "arguments"}


def translate_mlx_lm_names(values: Mapping[str, Any]) -> Values:
    """Returns the settings under mlx_zip's names. Keeps names that mlx-lm does not have; drops values of None.

    Raises `TrainingError` if a setting has no counterpart in mlx_zip, with advice what to use instead, or if a setting
    is given under two names.
    """
    found = {name: value for name, value in values.items() if value is not None}
    for name, reason in _REFUSED.items():
        if name in found and not any(found[name] is h or found[name] == h for h in _HARMLESS.get(name, ())):
            raise TrainingError(f"{name} of mlx-lm: {reason}")
        found.pop(name, None)
    found.pop("test_batches", None)  # only used by `test`, which is refused above
    if found.get("fine_tune_type") == "dora":
        raise TrainingError("fine_tune_type dora of mlx-lm: DoRA is not supported; use lora")
    if found.get("val_batches") == -1:
        found["val_batches"] = 0
    for name, rule in _RULES.items():
        if name in found:
            _add_translated(found, name, rule(found.pop(name), found))
    return found


def _add_translated(found: Values, name: str, ours: Values) -> None:
    if twice := [one for one in ours if one in found]:
        raise TrainingError(f"{name} of mlx-lm and {twice[0]} name one setting; give one of them")
    found.update(ours)


# ---- one function per name of mlx-lm: (its value, the given settings) -> our settings


def _translate_num_layers(value: Any, found: Values) -> Values:
    if found.get("fine_tune_type") == "full" and value != -1:
        raise TrainingError("num_layers of mlx-lm: fine_tune_type full trains all blocks; leave it out")
    return {"lora_layers": value}


def _translate_adapter_path(value: Any, found: Values) -> Values:
    if "save" in found:
        return {"out": value}
    return {"out": value, "save": "model" if found.get("fine_tune_type") == "full" else "adapter"}


def _translate_lora_parameters(value: Any, found: Values) -> Values:
    given = _check_option_mapping("lora_parameters", value, set(_LORA_NAMES))
    if isinstance(given.get("keys"), list | tuple):
        given["keys"] = ",".join(map(str, given["keys"]))  # an empty list counts as not given
    return {
        _LORA_NAMES[name]: _to_number(one) if name in ("scale", "dropout") else one
        for name, one in given.items()
        if one not in (None, "")
    }


def _translate_optimizer_config(value: Any, found: Values) -> Values:
    if not isinstance(value, Mapping):
        raise TrainingError(f"optimizer_config of mlx-lm must map optimizers to their options, got {value!r}")
    chosen = found.get("optimizer", "adamw")
    given = value.get(chosen) or {}
    if not isinstance(given, Mapping):
        raise TrainingError(f"optimizer_config of mlx-lm: {chosen} must be a mapping, got {given!r}")
    given = dict(given)
    ours = (
        {"weight_decay": _to_number(given.pop("weight_decay"))} if chosen == "adamw" and "weight_decay" in given else {}
    )
    fixed = _OPTIMIZER_OPTIONS.get(chosen, {})
    for name, one in given.items():
        if name not in fixed or (list(one) if isinstance(one, list | tuple) else _to_number(one)) != fixed[name]:
            does = f" (it is {fixed[name]})" if name in fixed else ""
            raise TrainingError(
                f"optimizer_config of mlx-lm: {name} of {chosen} cannot be set here{does}; leave it out"
            )
    return ours


def _translate_lr_schedule(value: Any, found: Values) -> Values:
    given = _check_option_mapping("lr_schedule", value, _SCHEDULE_KEYS)
    arguments = given.get("arguments")
    if given.get("name") != "cosine_decay" or not isinstance(arguments, list) or len(arguments) not in (2, 3):
        raise TrainingError(
            "lr_schedule of mlx-lm: only cosine_decay with arguments [peak, steps, end] is supported; for another use "
            "--learning-rate, --min-learning-rate and --warmup"
        )
    if given.get("warmup_init"):
        raise TrainingError("lr_schedule of mlx-lm: warmup_init is always 0 here; leave it out")
    warmup, total = given.get("warmup") or 0, found.get("iters", TrainSettings.iters)
    if not isinstance(warmup, int):
        raise TrainingError(f"lr_schedule of mlx-lm: warmup must be a whole number, got {warmup!r}")
    if not isinstance(total, int):
        return {}  # `TrainSettings` will name iters
    if arguments[1] != total - warmup:
        raise TrainingError(
            f"lr_schedule of mlx-lm: its {arguments[1]} steps are not iters minus warmup ({total} - {warmup}); the "
            "cosine ends here where the run does"
        )
    found.pop("learning_rate", None)  # mlx-lm also ignores it if there is a schedule
    end = arguments[2] if len(arguments) > 2 else 0.0
    rates = {"learning_rate": _to_number(arguments[0]), "min_learning_rate": _to_number(end)}
    return {**rates, **({"warmup": warmup} if warmup else {})}


def _to_number(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _check_option_mapping(name: str, value: Any, known: set[str]) -> Values:
    if not isinstance(value, Mapping):
        raise TrainingError(f"{name} of mlx-lm must be a mapping, got {value!r}")
    if unknown := sorted(map(str, value.keys() - known)):
        raise TrainingError(f"{name} of mlx-lm: unknown {', '.join(unknown)}")
    return dict(value)


_RULES: dict[str, Callable[[Any, Values], Values]] = {
    "num_layers": _translate_num_layers,
    "adapter_path": _translate_adapter_path,
    "lora_parameters": _translate_lora_parameters,
    "optimizer_config": _translate_optimizer_config,
    "lr_schedule": _translate_lr_schedule,
}
MLX_LM_NAMES = frozenset({*_RULES, *_REFUSED, "test_batches", "val_batches"})
