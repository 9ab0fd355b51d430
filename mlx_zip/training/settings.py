"""Defines the settings of a training run: defaults, checks, and the help texts of the command-line flags.

Does not import MLX, so that `mlx_zip train --help` is fast.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mlx_zip.config import AVAILABILITY, ENCODER_FIELDS, POSITION_MODES, EncoderConfig
from mlx_zip.errors import ConfigError, TrainingError

OPTIMIZERS = ("adamw", "adam", "muon", "sgd", "adafactor")
FINE_TUNE_TYPES = ("lora", "full", "encoders")
DTYPES = ("float32", "bfloat16")
MOST_HEAD_SIZE = 1 << 20
COMPILE = ("auto", "on", "off")
ENGINES = ("mlx", "torch")
MODEL, ADAPTER = "model", "adapter"
SAVES = (MODEL, ADAPTER)
SAVE_DTYPES = ("float32", "float16", "bfloat16")
BASE, UNQUANTIZED = "base", "none"
ADAPTED_BITS = (BASE, "6", "8", UNQUANTIZED)
VALID_SHARE = 0.02  # share of the samples to hold out by default
WITHOUT_EFFECT_ON_RESULTS = (  # settings that do not change the trained weights
    "steps_per_report",
    "steps_per_eval",
    "val_batches",
    "save_every",
    "keep",
    "compile",
)
ADDED_LATER = (
    "lora_keys",
    "encoder_learning_rate",
    "pack_rows",
    "pack_learning_rate",
    "draft_head",
    "head_size",
)  # recorded only if set, so that runs of older versions can be continued
LARGEST_INTEGER = 2**63 - 1  # MLX counts in int64
VALUE_TYPES = {"int": int, "float": (int, float), "str": str, "bool": bool}
TYPE_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}


def has_value_type(value: Any, kind: str) -> bool:
    """Returns whether a value has one of the types of `kind`, a key of `VALUE_TYPES`. A truth value is no number."""
    return isinstance(value, VALUE_TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))


def declare_setting(
    default: Any,
    text: str,
    *,
    choices: Sequence[str] | None = None,
    least: int | None = None,
    shown: str | None = None,
) -> Any:
    """Returns a dataclass field whose metadata also declares a command-line flag.

    text: the flag's help. choices: allowed values. least: smallest allowed whole number. shown: text to show as default
    in the help.
    """
    about = {"help": text, "choices": choices, "least": least, "shown": shown}
    return field(default=default, metadata=about)


def setting_help_text(one: Field[Any], default: Any = MISSING) -> str:
    """Returns the help line of the setting `one`, with its default. default: value to show instead of the default."""
    value = one.default if default is MISSING else default
    shown = one.metadata["shown"] or ("off" if value is False else "on" if value is True else value)
    return f"{one.metadata['help']} (default: {shown})"


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a run. Names are those of mlx-lm's `lora` command if it has the setting.

    Each field's help text describes the field. The learning rate rises over `warmup` steps, then falls along a cosine.
    For LoRA, `lora_dropout` and `grad_checkpoint` exclude each other. Trained weights are float32 for every `dtype`.
    Raises `TrainingError`, naming the setting, if a value is not allowed.
    """

    iters: int = declare_setting(
        1000, "number of optimizer steps in the whole run; more of them continue a finished run", least=1
    )
    batch_size: int = declare_setting(4, "number of samples per batch, counted over all machines", least=1)
    grad_accumulation_steps: int = declare_setting(
        1, "number of batches whose gradients are added up for one step", least=1
    )
    optimizer: str = declare_setting(
        "adamw", "optimizer; muon: Muon for the matrices of blocks and encoders, AdamW for the rest", choices=OPTIMIZERS
    )
    learning_rate: float = declare_setting(3e-4, "peak learning rate of the cosine schedule")
    min_learning_rate: float = declare_setting(
        1e-5, "final learning rate of the cosine schedule, at most --learning-rate"
    )
    encoder_learning_rate: float = declare_setting(
        0.0,
        "peak learning rate of the hyper-encoders, whose steps move every hypertoken at once, usually "
        "below --learning-rate",
        shown="--learning-rate",
    )
    pack_rows: bool = declare_setting(
        False,
        "train a row of its own for each entry of the pack that the data were prepared with; hyper-encoders make those "
        "of other entries",
    )
    pack_learning_rate: float = declare_setting(
        0.0,
        "peak learning rate of the rows that --pack-rows trains, usually above --learning-rate",
        shown="--learning-rate",
    )
    draft_head: bool = declare_setting(
        False,
        "train no weight of the model, but a small layer that proposes the ids which come next, for faster generation "
        "(--draft head)",
    )
    head_size: int = declare_setting(
        0, "width inside the layer that --draft-head trains", least=0, shown="twice the model's"
    )
    muon_learning_rate: float = declare_setting(
        0.02, "peak learning rate of the matrices that --optimizer muon trains with Muon"
    )
    warmup: int = declare_setting(
        0, "number of steps at the start in which the learning rate rises from 0 to its peak", least=0
    )
    weight_decay: float = declare_setting(0.01, "weight decay that AdamW applies")
    max_grad_norm: float = declare_setting(
        1.0, "maximum gradient norm, to which larger gradients are scaled down; 0: no maximum"
    )
    fine_tune_type: str = declare_setting(
        "lora",
        "weights to train; lora: LoRA adapters and hyper-encoders, encoders: only hyper-encoders, full: all weights",
        choices=FINE_TUNE_TYPES,
    )
    lora_layers: int = declare_setting(
        -1, "number of blocks that get LoRA adapters, counted from the last block; -1: all"
    )
    lora_rank: int = declare_setting(32, "rank of the LoRA adapters", least=1)
    lora_scale: float = declare_setting(1.0, "factor that multiplies the LoRA adapters' output (alpha / rank)")
    lora_dropout: float = declare_setting(0.0, "share of the LoRA adapters' inputs that is dropped in training")
    lora_keys: str = declare_setting(
        "",
        "linear layers of a block that get LoRA adapters, separated by commas, for example self_attn.q_proj",
        shown="all linear layers",
    )
    availability: str = declare_setting(
        "causal",
        "hypertokens that a position may predict; causal: those installed by then, legacy: all of the sample's",
        choices=AVAILABILITY,
    )
    reconstruction: float = declare_setting(
        0.0, "weight of the reconstruction loss (lambda in arXiv 2506.01084, eq. 3); 0: off"
    )
    token_type: float = declare_setting(0.0, "weight of the loss on whether the next id is a hypertoken; 0: off")
    dtype: str = declare_setting("float32", "number type of the forward and backward pass", choices=DTYPES)
    grad_checkpoint: bool = declare_setting(
        False, "save memory: compute activations again in the backward pass instead of keeping them"
    )
    compile: str = declare_setting(
        "auto", "compile the training step; auto: on every device but the CPU", choices=COMPILE
    )
    seed: int = declare_setting(0, "random seed of new weights, dropout and the order of the samples", least=0)
    steps_per_report: int = declare_setting(10, "number of steps between two reports of the training loss", least=1)
    steps_per_eval: int = declare_setting(200, "number of steps between two validations", least=1)
    val_batches: int = declare_setting(25, "number of batches per validation; 0: all validation samples", least=0)
    save_every: int = declare_setting(100, "number of steps between two checkpoints", least=1)
    keep: int = declare_setting(2, "number of latest checkpoints to keep", least=1)

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
        if self.pack_rows and (self.reconstruction or self.token_type):
            raise TrainingError("pack_rows is trained with the cross entropy alone: leave out the other losses")
        if self.draft_head and (self.pack_rows or self.reconstruction or self.token_type):
            raise TrainingError("draft_head is trained alone: leave out pack_rows and the other losses")
        if self.head_size and not self.draft_head:
            raise TrainingError("head_size is for draft_head, which is off")
        if self.head_size > MOST_HEAD_SIZE:
            raise TrainingError(f"head_size must be at most {MOST_HEAD_SIZE}, got {self.head_size}")
        for name in ("encoder_learning_rate", "pack_learning_rate"):
            if getattr(self, name) and self.optimizer == "muon":
                raise TrainingError(f"{name} is for one optimizer; muon has rates of its own")
        if self.pack_learning_rate and not self.pack_rows:
            raise TrainingError("pack_learning_rate is for pack_rows, which is off")
        if self.warmup >= self.iters and self.warmup:
            raise TrainingError(f"warmup {self.warmup} must be shorter than the run's {self.iters} iters")

    def _check_type(self, name: str, kind: Any) -> None:
        """Raises `TrainingError` unless the setting `name` has the type `kind`. Converts int to float if needed."""
        value = getattr(self, name)
        if not has_value_type(value, kind):
            raise TrainingError(f"{name} must be {TYPE_WORDS[kind]}, got {value!r}")
        if kind == "int" and abs(value) > LARGEST_INTEGER:
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
        """Returns the settings in a mapping. Raises `TrainingError` if a name is not a setting."""
        unknown = values.keys() - {one.name for one in fields(cls)}
        if unknown:
            raise TrainingError(f"unknown training settings: {', '.join(sorted(unknown))}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings by name."""
        return asdict(self)

    def values_to_record(self) -> dict[str, Any]:
        """Returns the settings that change the trained weights, by name. A run records and later compares these."""
        left_out = {*WITHOUT_EFFECT_ON_RESULTS, *(name for name in ADDED_LATER if not getattr(self, name))}
        return {name: value for name, value in self.to_dict().items() if name not in left_out}


@dataclass(frozen=True)
class EncoderOptions:
    """The hyper-encoder that is added to a plain model. Field names are those of zip2zip 0.2.0's encoder config.

    kind: a key of `ENCODER_FIELDS`. size: the encoder's width; None: the model's width. Only `res_latent_attn` allows
    another width than the model's. intermediate_size: width of the encoder's MLP; None: four times `size`.
    """

    kind: str = declare_setting(
        "res_latent_attn", "kind of hyper-encoder to add to a plain model", choices=tuple(sorted(ENCODER_FIELDS))
    )
    num_hidden_layers: int = declare_setting(2, "number of layers in a hyper-encoder added to a plain model")
    num_heads: int = declare_setting(4, "number of attention heads in a hyper-encoder added to a plain model")
    size: int | None = declare_setting(
        None,
        "width of a hyper-encoder added to a plain model; only res_latent_attn may be narrower or wider than the model",
        shown="the model's",
    )
    intermediate_size: int | None = declare_setting(
        None, "width of the MLP in a hyper-encoder added to a plain model", shown="four times --encoder-size"
    )
    tie_encoders: bool = declare_setting(
        False, "add one hyper-encoder to a plain model for both input and output rows, instead of one for each"
    )
    residual_by_side: bool = declare_setting(
        False,
        "a res_latent_attn encoder's rows begin as the entry's last base row (input) and as the mean of its base rows "
        "(output), instead of the first base row (needs an encoder for each side; not in the zip2zip package)",
    )
    position_mode: str = declare_setting(
        "compressed",
        "how a plain model with new hyper-encoders counts positions; compressed: by id, base_token_end: by base id",
        choices=POSITION_MODES,
    )

    def config(self, width: int) -> EncoderConfig:
        """Returns the hyper-encoder's config for a model of the given width. Raises `ConfigError` if not allowed."""
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
            "residual_by_side": self.residual_by_side,
        }
        if self.kind == "transformer":
            chosen["position_encoding"] = "learnable"
        if size != width:
            chosen["model_hidden_size"] = width
        return EncoderConfig.from_dict(self.kind, {k: v for k, v in chosen.items() if k in ENCODER_FIELDS[self.kind]})


@dataclass(frozen=True)
class RunOptions:
    """What a run reads and writes.

    data, valid: prepared folders to train and to validate on. out: the run's folder. model: folder or hub id of the
    model to start from. scratch: instead of `model`, path of a config.json, whose model begins with random weights.
    tokenizer: the tokenizer's folder, needed with `scratch`. encoder: the hyper-encoder to add to a plain model if the
    data are compressed. canonical: train on the probabilities of canonical decoding, and save a model that decodes
    canonically; None: as in the model's config. save: what a finished run writes, one of `SAVES`. save_dtype:
    floating-point type of the saved weights; None: see `default_save_dtype`. adapted_bits: for a quantized model, bits
    per weight of the saved layers that had LoRA adapters, one of `ADAPTED_BITS`. valid_share: share of the samples of
    `data` to hold out; None: `VALID_SHARE`, or the share with which the run in `out` began; 0: none. max_seq_length:
    maximum base ids of a prepared sample; None: not checked. mask_prompt: whether the data must have been prepared
    without a loss on prompts; None: not checked. engine: engine that computes the steps, one of `ENGINES`; not
    recorded, so a run may continue on another engine. init_from: folder of another run, whose last trained weights this
    run begins with; read only while `out` has no checkpoint.
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
    save_dtype: str | None = None
    adapted_bits: str = "8"
    valid_share: float | None = None
    max_seq_length: int | None = None
    mask_prompt: bool | None = None
    engine: str = "mlx"
    init_from: Path | None = None

    def check(self) -> None:
        """Raises `TrainingError` if an option is missing or not allowed."""
        if (self.model is None) == (self.scratch is None):
            raise TrainingError("give --model, or --from-scratch with a config.json")
        if self.engine not in ENGINES:
            raise TrainingError(f"engine {self.engine!r} is not one of {', '.join(ENGINES)}")
        if self.save not in SAVES:
            raise TrainingError(f"save {self.save!r} is not one of {', '.join(SAVES)}")
        if self.save_dtype is not None and self.save_dtype not in SAVE_DTYPES:
            raise TrainingError(f"save_dtype {self.save_dtype!r} is not one of {', '.join(SAVE_DTYPES)}")
        if self.adapted_bits not in ADAPTED_BITS:
            raise TrainingError(f"adapted_bits {self.adapted_bits!r} is not one of {', '.join(ADAPTED_BITS)}")
        most = self.max_seq_length
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise TrainingError(f"max_seq_length must be a whole number of 1 or more, got {most!r}")
        share = self.valid_share
        if share is not None and not (isinstance(share, int | float) and 0 <= share < 1):
            raise TrainingError(f"valid_share must be a number from 0 to below 1, got {share!r}")
