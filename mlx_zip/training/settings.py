"""What a training run is asked to do: one frozen record, checked once, saved beside its checkpoints."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mlx_zip.errors import TrainingError
from mlx_zip.training.batches import AVAILABILITY

OPTIMIZERS = ("adamw", "adam", "muon", "sgd", "adafactor")
FINE_TUNE_TYPES = ("lora", "full", "encoders")
DTYPES = ("float32", "bfloat16")
COMPILE = ("auto", "on", "off")
POSITIVE = (
    "iters",
    "batch_size",
    "grad_accumulation_steps",
    "steps_per_report",
    "steps_per_eval",
    "save_every",
    "keep",
    "lora_rank",
)
NOT_NEGATIVE = ("seed", "warmup", "val_batches")  # beside all floats
LARGEST = 2**63 - 1  # what MLX counts with
KINDS = {"int": int, "float": (int, float), "str": str, "bool": bool}


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a run; names follow mlx-lm's `lora` command where it has them.

    iters: optimizer steps in the whole run. batch_size: samples per step, over all machines, before accumulation.
    grad_accumulation_steps: batches per optimizer step. learning_rate falls along a cosine from its peak, after
    `warmup` steps, to `min_learning_rate`; muon_learning_rate is the peak for the matrices that Muon trains.
    max_grad_norm: gradients are scaled down to this norm; 0 leaves them. fine_tune_type: "lora" trains adapters on
    the decoder and the encoders, "full" everything, "encoders" nothing but the encoders. lora_layers: how many of
    the last blocks get adapters, -1 for all. lora_dropout and grad_checkpoint exclude each other. availability: see
    `make_batch`. reconstruction, token_type: weights of the losses beside the cross entropy. dtype: what the forward
    pass computes in; trained weights stay float32. compile: "auto" compiles the step except on the CPU backend, where
    the compiler costs more than it gains. save_every, keep: steps between checkpoints, and how many are kept.
    val_batches: 0 for all.
    """

    iters: int = 1000
    batch_size: int = 4
    grad_accumulation_steps: int = 1
    optimizer: str = "adamw"
    learning_rate: float = 3e-4
    min_learning_rate: float = 1e-5
    muon_learning_rate: float = 0.02
    warmup: int = 0
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    fine_tune_type: str = "lora"
    lora_layers: int = -1
    lora_rank: int = 32
    lora_scale: float = 1.0
    lora_dropout: float = 0.0
    availability: str = "causal"
    reconstruction: float = 0.0
    token_type: float = 0.0
    dtype: str = "float32"
    grad_checkpoint: bool = False
    compile: str = "auto"
    seed: int = 0
    steps_per_report: int = 10
    steps_per_eval: int = 200
    val_batches: int = 25
    save_every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check_type(field.name, field.type)
        for name, allowed in (
            ("optimizer", OPTIMIZERS),
            ("fine_tune_type", FINE_TUNE_TYPES),
            ("availability", AVAILABILITY),
            ("dtype", DTYPES),
            ("compile", COMPILE),
        ):
            if getattr(self, name) not in allowed:
                raise TrainingError(f"{name} {getattr(self, name)!r} is not one of {', '.join(allowed)}")
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in (*(field.name for field in fields(self) if field.type == "float"), *NOT_NEGATIVE):
            if not 0 <= getattr(self, name) < math.inf:
                raise TrainingError(f"{name} must be a number of 0 or more, got {getattr(self, name)}")
        self._check_lora()
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

    def _check_lora(self) -> None:
        if self.lora_layers != -1 and self.lora_layers < 1:
            raise TrainingError(f"lora_layers must be 1 or more, or -1 for all, got {self.lora_layers}")
        if self.lora_dropout >= 1:
            raise TrainingError(f"lora_dropout must be below 1, got {self.lora_dropout}")
        if self.lora_dropout and self.grad_checkpoint and self.fine_tune_type == "lora":
            raise TrainingError("grad_checkpoint would drop other values in its second pass: leave out lora_dropout")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainSettings:
        """Builds from a mapping. Raises `TrainingError` for a name that is none of the settings."""
        unknown = values.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise TrainingError(f"unknown training settings: {', '.join(sorted(unknown))}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All settings by name."""
        return asdict(self)
