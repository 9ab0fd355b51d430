"""Declares flags from the fields of a settings dataclass: name, type, choices and help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mlx_zip.training.settings import EncoderOptions, TrainSettings, help_of

TYPES = {"int": int, "int | None": int, "float": float, "str": str}
ENCODER_FLAGS = {  # field of EncoderOptions: its flag's name
    "kind": "encoder",
    "num_hidden_layers": "encoder_layers",
    "num_heads": "encoder_heads",
    "size": "encoder_size",
    "intermediate_size": "encoder_intermediate_size",
    "tie_encoders": "tie_encoders",
    "residual_by_side": "residual_by_side",
    "position_mode": "position_mode",
}


def flag(name: str) -> str:
    """Returns the flag of a setting: `save_every` becomes `--save-every`."""
    return f"--{name.replace('_', '-')}"


def add_all(add: Any, cls: type[TrainSettings] | type[EncoderOptions], names: Mapping[str, str] | None = None) -> None:
    """Declares every field of a settings class as a flag whose value is None unless given.

    add: a parser's `add_argument`. names: field name -> flag name, where the two differ.
    """
    for one in fields(cls):
        name, kind = (names or {}).get(one.name, one.name), str(one.type)
        if kind == "bool":
            add(flag(name), action="store_true", default=None, help=help_of(one))
        else:
            add(flag(name), type=TYPES[kind], choices=one.metadata["choices"], help=help_of(one))


def add_some(add: Any, defaults: Mapping[str, Any], purposes: Mapping[str, str] | None = None) -> None:
    """Declares some training settings as flags with defaults of the command's own.

    add: a parser's `add_argument`. defaults: setting -> default. purposes: setting -> help text, where it is not the
    setting's own.
    """
    known = {one.name: one for one in fields(TrainSettings)}
    for name, default in defaults.items():
        one = known[name]
        text = (purposes or {}).get(name)
        shown = help_of(one, default) if text is None else f"{text} (default: {default})"
        add(flag(name), type=TYPES[str(one.type)], choices=one.metadata["choices"], default=default, help=shown)
