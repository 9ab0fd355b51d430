"""What a training run is asked to do, stated once: defaults, checks, and the help texts that make the flags.

No MLX here: `mlx_zip train --help` reads this file and nothing heavier.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mlx_zip.config import ENCODER_FIELDS, POSITION_MODES, EncoderConfig
from mlx_zip.errors import ConfigError, TrainingError

OPTIMIZERS = ("adamw", "adam", "muon", "sgd", "adafactor")
FINE_TUNE_TYPES = ("lora", "full", "encoders")
DTYPES = ("float32", "bfloat16")
COMPILE = ("auto", "on", "off")
AVAILABILITY = ("causal", "legacy")
MODEL, ADAPTER = "model", "adapter"
SAVES = (MODEL, ADAPTER)
SAVE_DTYPES = ("float32", "float16", "bfloat16")
VALID_SHARE = 0.02  # of the samples, where neither flag nor run says otherwise
CHANGE_NO_NUMBER = ("steps_per_report", "steps_per_eval", "val_batches", "save_every", "keep", "compile")
ADDED_LATER = ("lora_keys",)  # recorded only where they are set: runs begun without them go on
LARGEST = 2**63 - 1  # what MLX counts with
KINDS = {"int": int, "float": (int, float), "str": str, "bool": bool}


def setting(
    default: Any,
    text: str,
    *,
    choices: Sequence[str] | None = None,
    least: int | None = None,
    shown: str | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that also makes a flag.

    text: the flag's help. choices: what a text may be. least: the smallest whole number. shown: the default in words,
    where the value would not say it. metavar: what stands for the value in the help.
    """
    about = {"help": text, "choices": choices, "least": least, "shown": shown, "metavar": metavar}
    return field(default=default, metadata=about)


def help_of(one: Field[Any], default: Any = MISSING) -> str:
    """The help line of a setting with its default; default: another one than the setting's own."""
    value = one.default if default is MISSING else default
    shown = one.metadata["shown"] or ("off" if value is False else "on" if value is True else value)
    return f"{one.metadata['help']} (default: {shown})"


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a run; names follow mlx-lm's `lora` command where it has them.

    Each field's metadata says what it is for. The learning rate rises over `warmup` steps and falls along a cosine.
    lora_dropout and grad_checkpoint exclude each other. Trained weights stay float32 whatever `dtype` is. Raises
    `TrainingError` naming a value that cannot be.
    """

    iters: int = setting(1000, "optimizer steps of the whole run; may be raised on a finished run", least=1)
    batch_size: int = setting(4, "samples per batch, over all machines", least=1)
    grad_accumulation_steps: int = setting(1, "batches per optimizer step", least=1)
    optimizer: str = setting("adamw", "muon trains matrices with Muon and the rest with AdamW", choices=OPTIMIZERS)
    learning_rate: float = setting(3e-4, "peak learning rate of the cosine schedule")
    min_learning_rate: float = setting(1e-5, "final learning rate of the cosine schedule")
    muon_learning_rate: float = setting(0.02, "peak learning rate of the matrices that Muon trains")
    warmup: int = setting(0, "steps in which the learning rate rises from 0 to its peak", least=0)
    weight_decay: float = setting(0.01, "weight decay of AdamW")
    max_grad_norm: float = setting(1.0, "norm to which larger gradients are scaled down; 0: never")
    fine_tune_type: str = setting(
        "lora",
        "what is trained; lora: adapters and hyper-encoders, encoders: hyper-encoders alone, full: all weights",
        choices=FINE_TUNE_TYPES,
    )
    lora_layers: int = setting(-1, "blocks that get adapters, counted from the last one; -1: all")
    lora_rank: int = setting(32, "rank of the adapters", least=1)
    lora_scale: float = setting(1.0, "factor of the adapters' output (alpha / rank)")
    lora_dropout: float = setting(0.0, "share of the adapters' inputs that is dropped in training")
    lora_keys: str = setting(
        "",
        "linear layers of a block that get adapters, separated by commas, such as self_attn.q_proj",
        shown="all linear layers",
    )
    availability: str = setting(
        "causal",
        "entries open to a position; causal: those installed before it, legacy: the sample's whole codebook",
        choices=AVAILABILITY,
    )
    reconstruction: float = setting(0.0, "weight of the reconstruction loss (lambda in arXiv 2506.01084, eq. 3)")
    token_type: float = setting(0.0, "weight of the loss on whether the next id is a hypertoken")
    dtype: str = setting("float32", "number type of the forward and backward pass", choices=DTYPES)
    grad_checkpoint: bool = setting(False, "compute activations twice instead of keeping them, to save memory")
    compile: str = setting("auto", "compile the step; auto: everywhere but on the CPU backend", choices=COMPILE)
    seed: int = setting(0, "seed of new weights, dropout and the order of the samples", least=0)
    steps_per_report: int = setting(10, "steps between two reports of the training loss", least=1)
    steps_per_eval: int = setting(200, "steps between two validations", least=1)
    val_batches: int = setting(25, "batches of a validation; 0: all", least=0)
    save_every: int = setting(100, "steps between two checkpoints", least=1)
    keep: int = setting(2, "checkpoints that are kept, the last ones", least=1)

    def __post_init__(self) -> None:
        for one in fields(self):
            self._check_type(one.name, one.type)
            self._check_range(one)
        if self.lora_layers != -1 and self.lora_layers < 1:
            raise TrainingError(f"lora_layers must be 1 or more, or -1 for all, got {self.lora_layers}")
        if self.lora_dropout >= 1:
            raise TrainingError(f"lora_dropout must be below 1, got {self.lora_dropout}")
        if self.lora_dropout and self.grad_checkpoint and self.fine_tune_type == "lora":
            raise TrainingError("grad_checkpoint would drop other values in its second pass: leave out lora_dropout")
        if self.warmup >= self.iters and self.warmup:
            raise TrainingError(f"warmup {self.warmup} must be shorter than the run's {self.iters} iters")

    def _check_type(self, name: str, kind: Any) -> None:
        value = getattr(self, name)
        if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise TrainingError(f"{name} must be of type {kind}, got {value!r}")
        if kind == "int" and abs(value) > LARGEST:
            raise TrainingError(f"{name} is too large: {value}")
        if kind == "float":
            object.__setattr__(self, name, math.inf if value > sys.float_info.max else float(value))

    def _check_range(self, one: Field[Any]) -> None:
        value, choices, least = getattr(self, one.name), one.metadata["choices"], one.metadata["least"]
        if choices is not None and value not in choices:
            raise TrainingError(f"{one.name} {value!r} is not one of {', '.join(choices)}")
        if least is not None and value < least:
            raise TrainingError(f"{one.name} must be {least} or more, got {value}")
        if one.type == "float" and not 0 <= value < math.inf:
            raise TrainingError(f"{one.name} must be a number of 0 or more, got {value}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainSettings:
        """Builds from a mapping. Raises `TrainingError` for a name that is none of the settings."""
        unknown = values.keys() - {one.name for one in fields(cls)}
        if unknown:
            raise TrainingError(f"unknown training settings: {', '.join(sorted(unknown))}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All settings by name."""
        return asdict(self)

    def deciding(self) -> dict[str, Any]:
        """The settings that decide the run's numbers, by name: what a run records and compares when it is resumed."""
        left_out = {*CHANGE_NO_NUMBER, *(name for name in ADDED_LATER if not getattr(self, name))}
        return {name: value for name, value in self.to_dict().items() if name not in left_out}


@dataclass(frozen=True)
class EncoderOptions:
    """The hyper-encoder that a plain model gets. Field names as in zip2zip 0.2.0's encoder config.

    kind: one of `ENCODER_FIELDS`. size: width of the encoder; None for the model's, from which only `res_latent_attn`
    may differ. intermediate_size: None for four times `size`.
    """

    kind: str = setting(
        "res_latent_attn", "hyper-encoder that a plain model gets", choices=tuple(sorted(ENCODER_FIELDS))
    )
    num_hidden_layers: int = setting(2, "layers of the new hyper-encoder")
    num_heads: int = setting(4, "attention heads of the new hyper-encoder")
    size: int | None = setting(
        None, "width of the new hyper-encoder; only res_latent_attn may differ", shown="the model's"
    )
    intermediate_size: int | None = setting(None, "width of the new hyper-encoder's MLP", shown="four times its width")
    tie_encoders: bool = setting(False, "one new hyper-encoder makes both input and output rows")
    position_mode: str = setting(
        "compressed",
        "positions of a plain model with new encoders; compressed: one per id, base_token_end: one per base id",
        choices=POSITION_MODES,
    )

    def config(self, width: int) -> EncoderConfig:
        """The encoder's config for a model of width D. Raises `ConfigError`."""
        if not isinstance(self.kind, str) or self.kind not in ENCODER_FIELDS:
            raise ConfigError(f"encoder {self.kind!r} is not one of {', '.join(sorted(ENCODER_FIELDS))}")
        size = width if self.size is None else self.size
        if size != width and self.kind != "res_latent_attn":
            raise ConfigError(f"encoder {self.kind} must be as wide as the model ({width}), got {size}")
        chosen: dict[str, Any] = {
            "hidden_size": size,
            "tie_encoders": self.tie_encoders,
            "num_hidden_layers": self.num_hidden_layers,
            "num_heads": self.num_heads,
            "intermediate_size": self.intermediate_size,
        }
        if self.kind == "transformer":
            chosen["position_encoding"] = "learnable"
        if size != width:
            chosen["model_hidden_size"] = width
        return EncoderConfig.from_dict(self.kind, {k: v for k, v in chosen.items() if k in ENCODER_FIELDS[self.kind]})


@dataclass(frozen=True)
class RunOptions:
    """What a run reads and writes.

    data, valid: prepared folders. out: the run's folder. model: folder or hub id to start from, or None with
    `scratch`, the path of a config.json, and `tokenizer`, a folder. encoder: for a plain model on compressed data.
    canonical: train on the probabilities of canonical decoding, and save a model that decodes so; None for what the
    model's config says. save: what a finished run leaves, one of `SAVES`. save_dtype: number type of what is saved.
    valid_share: share of the samples of `data` that is held out; None for `VALID_SHARE`, or what the run in `out` began
    with; 0 for none. max_seq_length, mask_prompt: what the prepared data must be like, None for any. report_to,
    project_name: services of mlx-lm's callbacks ("wandb", "swanlab", or both with a comma) and the project there.
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
    valid_share: float | None = None
    max_seq_length: int | None = None
    mask_prompt: bool | None = None
    report_to: str | None = None
    project_name: str | None = None

    def check(self) -> None:
        """Raises `TrainingError` naming what is missing or cannot be."""
        if (self.model is None) == (self.scratch is None):
            raise TrainingError("give --model, or --from-scratch with a config.json")
        if self.save not in SAVES:
            raise TrainingError(f"save {self.save!r} is not one of {', '.join(SAVES)}")
        if self.save_dtype not in SAVE_DTYPES:
            raise TrainingError(f"save_dtype {self.save_dtype!r} is not one of {', '.join(SAVE_DTYPES)}")
        share = self.valid_share
        if share is not None and not (isinstance(share, int | float) and 0 <= share < 1):
            raise TrainingError(f"valid_share must be a number from 0 to below 1, got {share!r}")
