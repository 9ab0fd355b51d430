"""Reads config.json of a converted model: the base model's keys and the `zip2zip` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_zip.config import ZipConfig
from mlx_zip.errors import ConfigError

RECORD_KEYS = ("base_model_type", "source", "fingerprint", "plain")  # section keys that `ZipConfig` does not read


def config_of(section: Mapping[str, Any]) -> ZipConfig:
    """Returns what a `zip2zip` section of config.json says of codec and encoders. Raises `ConfigError`."""
    return ZipConfig.from_dict({key: value for key, value in section.items() if key not in RECORD_KEYS})


@dataclass(frozen=True)
class ModelArgs:
    """config.json of a converted model: the base model's keys plus a `zip2zip` section."""

    config: dict[str, Any]

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelArgs:
        """Returns the arguments for a parsed config.json. mlx-lm's loader calls this method by this name."""
        return cls(config)

    @property
    def zip_config(self) -> ZipConfig:
        """The `zip2zip` section, checked. Raises `ConfigError`."""
        section = self.config.get("zip2zip")
        if not isinstance(section, dict):
            raise ConfigError("config.json has no zip2zip section; convert the checkpoint with `mlx_zip convert`")
        return config_of(section)

    @property
    def decoder_config(self) -> dict[str, Any]:
        """The base model's own config."""
        return {**self.config, "model_type": self.config["zip2zip"].get("base_model_type")}
