"""Reads config.json of a converted model: the base model's keys and the `zip2zip` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_zip.config import ZipConfig, config_of
from mlx_zip.errors import ConfigError


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
