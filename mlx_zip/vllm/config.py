"""`Zip2ZipConfig`: config.json of a model with hypertokens as transformers and vLLM read it. `register`: the plugin."""

# pyright: reportMissingImports=false

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from mlx_zip.config import ZipConfig, parse_zip_section
from mlx_zip.errors import ConfigError
from mlx_zip.files import read_json_object
from mlx_zip.layout import MODEL_TYPE, Layout
from mlx_zip.models.decoder_options import FAMILIES
from mlx_zip.models.model_folder import UPSTREAM_CONFIG_NAME, UPSTREAM_ENCODERS
from mlx_zip.text.tokenizers import load_tokenizer

ARCHITECTURE = "Zip2ZipForCausalLM"  # vLLM's name for our model
_KINDS = ("llama", "mistral", "phi3", "qwen2", "qwen3")
DECODERS = {kind: FAMILIES[kind].architecture for kind in _KINDS}  # vLLM's names, which are transformers' too
_PACKING = ("quantization", "quantization_config")  # keys of MLX's quantization, which vLLM would take for its own
_NOT_THE_DECODERS = (*_PACKING, "model_type", "name_or_path", "_name_or_path", "mlx_zip")


class Zip2ZipConfig(PretrainedConfig):
    """The decoder's config with a wider vocabulary: base ids, hypertokens, the base tail, and `broken_id`.

    section: the `zip2zip` section of config.json. decoder_keys: its other keys, except those of MLX's quantization.
    packing: MLX's quantization settings, {} for none. encoder_file: the file with the encoders of an exported
    checkpoint, "" for a converted folder.
    """

    model_type = MODEL_TYPE

    def __init__(self, **kwargs: Any) -> None:
        """Takes the keys of config.json or of `to_dict`. Raises `ConfigError` if a key has a wrong type."""
        self.section: dict[str, Any] = kwargs.pop("zip2zip", None) or kwargs.pop("section", {})
        decoder: dict[str, Any] | None = kwargs.pop("decoder_keys", None)
        packing = kwargs.pop("packing", None) or {}
        self.encoder_file: str = kwargs.pop("encoder_file", "")
        if decoder is None:
            packing = kwargs.get(_PACKING[0]) or {}
            decoder = {key: value for key, value in kwargs.items() if key not in _NOT_THE_DECODERS}
        self.decoder_keys, self.packing = decoder, packing
        if not isinstance(self.section, dict) or (self.section and type(decoder.get("vocab_size")) is not int):
            raise ConfigError("config.json: its zip2zip section must be an object, and vocab_size an integer")
        if not self.section:  # transformers makes an empty config to compare others with
            super().__init__(**kwargs)
            return
        base = self.decoder_config().to_dict()
        del base["model_type"]
        super().__init__(**{**base, "architectures": [ARCHITECTURE], "vocab_size": self.broken_id + 1})

    @property
    def zip_config(self) -> ZipConfig:
        """The settings of codec and encoders in the section. Raises `ConfigError` if the section is invalid."""
        return parse_zip_section(self.section)

    @property
    def layout(self) -> Layout:
        """The columns of the logits. Raises `ConfigError` if the section is invalid."""
        config = self.zip_config
        return Layout(config.vocab_size, config.codebook_size, self.decoder_keys["vocab_size"])

    @property
    def broken_id(self) -> int:
        """The id after all others. A worker ends a request with `broken_id` if it could not read the request's ids."""
        return self.layout.width

    @property
    def decoder_name(self) -> str:
        """vLLM's name for the decoder. Raises `ConfigError` if the decoder is not supported."""
        kind = self.section.get("base_model_type")
        if kind not in DECODERS:
            raise ConfigError(f"base_model_type {kind!r} is not supported on vLLM; supported: {', '.join(DECODERS)}")
        return DECODERS[kind]

    def decoder_config(self) -> PretrainedConfig:
        """Returns the decoder's own config. Raises `ConfigError` if the decoder is not supported."""
        name = self.decoder_name
        made = AutoConfig.for_model(self.section["base_model_type"], **deepcopy(self.decoder_keys))
        made.architectures = [name]
        return made


def register() -> None:
    """Registers our config with transformers and our model with vLLM. vLLM calls this in each of its processes."""
    from vllm import ModelRegistry

    AutoConfig.register(MODEL_TYPE, Zip2ZipConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, "mlx_zip.vllm.model:Zip2ZipForCausalLM")


def config_of_export(folder: Path) -> dict[str, Any] | None:
    """Returns an exported checkpoint's config.json in the form that `convert` writes; None if `folder` holds none.

    Raises `ConfigError` if a file cannot be read, or if the exported checkpoint lacks its decoder.
    """
    if not (folder / UPSTREAM_CONFIG_NAME).is_file():
        return None
    config = read_json_object(folder / "config.json", raises=ConfigError, constants=True)
    section = read_json_object(folder / UPSTREAM_CONFIG_NAME, raises=ConfigError)
    if config.get("model_type") == MODEL_TYPE:
        return None
    if not (list(folder.glob("model*.safetensors")) and (folder / UPSTREAM_ENCODERS).is_file()):
        raise ConfigError(f"{folder} does not hold its decoder; convert it first: mlx_zip convert --hf-path {folder}")
    tokenizer = load_tokenizer(folder)._tokenizer
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    section = {**section, "base_model_type": config.get("model_type"), "pad_token_id": pad_id}
    return {**config, "zip2zip": section, "encoder_file": UPSTREAM_ENCODERS}
