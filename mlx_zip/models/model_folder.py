"""Finds a model's folder and reads its config.json; needs neither MLX nor mlx-lm."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.codec import CodecParams
from mlx_zip.codec.params import MAX_CODEBOOK
from mlx_zip.config import ZipConfig, parse_zip_section
from mlx_zip.errors import ConfigError, ModelError
from mlx_zip.files import read_json_object
from mlx_zip.layout import MODEL_TYPE
from mlx_zip.named import KNOWN, resolve_model_name
from mlx_zip.packs.pack import IN_FOLDER, Pack
from mlx_zip.packs.tuned import PlainCodec
from mlx_zip.text import hub
from mlx_zip.text.tokenizers import Tokenizer, load_tokenizer

UPSTREAM_CONFIG_NAME, UPSTREAM_ENCODERS = "zip2zip_config.json", "zip2zip_encoders.safetensors"  # in a checkpoint
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # in an adapter of PEFT
DRAFT_HEAD = "draft_head.safetensors"  # name of a draft head's file in its model's folder
_MODEL_FILES = (*hub.TOKENIZER, *hub.CODE, *hub.WEIGHTS, IN_FOLDER, DRAFT_HEAD, "*.jsonl")


def find_model_folder(path_or_hf_repo: str | Path, revision: str | None = None) -> Path:
    """Returns the local folder of a model, given a folder, a name of `named.KNOWN` or a hub id, tried in that order.

    A model on the hub is downloaded first, and a model of `named.MADE` is made if it does not exist yet. revision: the
    hub's branch, tag or commit. Raises `ModelError` if there is no such model, `MlxZipError` if it cannot be made.
    """
    path, name = resolve_model_name(path_or_hf_repo), str(path_or_hf_repo)
    if os.path.isdir(path):  # unlike Path.is_dir, does not raise for a name that is no valid path
        if revision is not None:
            raise ModelError(f"{path_or_hf_repo} is a folder, so revision (--revision) {revision} does not apply")
        return _raise_unless_model_folder(path)
    if os.path.isfile(path) and name.lower().endswith(".gguf"):
        raise ModelError(f"{name} is a GGUF file; convert it first: mlx_zip convert --hf-path {name}")
    if os.path.exists(path) or not hub.is_hub_id(name):
        raise ModelError(f"{name}: no such model folder, nor bundled ({', '.join(KNOWN)}), nor a hub id owner/name")
    _raise_unless_model_folder(
        hub.download_files(name, ["*.json"], revision)
    )  # refuses a wrong kind of model before gigabytes arrive
    return hub.download_files(name, _MODEL_FILES, revision)


def _raise_unless_model_folder(folder: Path) -> Path:
    """Returns the folder. Raises `ModelError` if it has no config.json or is a zip2zip checkpoint not yet converted."""
    config = folder / "config.json"
    if (folder / UPSTREAM_CONFIG_NAME).exists() and (
        not config.exists() or read_model_config(folder).get("model_type") != MODEL_TYPE
    ):
        raise ModelError(
            f"{folder} is a zip2zip checkpoint as published; convert it first: mlx_zip convert --hf-path {folder}"
        )
    if not config.exists():
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    return folder


def read_model_config(folder: Path) -> dict[str, Any]:
    """Returns a folder's config.json. Raises `ModelError` if it cannot be read or names no model_type."""
    config = read_json_object(folder / "config.json", raises=ModelError, constants=True)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder / 'config.json'} names no model_type")
    return config


def read_eos_ids(folder: Path, config: Mapping[str, Any]) -> list[int]:
    """Returns the base ids that end a text: those in generation_config.json, else those in config.json, as in mlx-lm.

    config: contents of config.json. Raises `ConfigError` naming the file if an id is no integer.
    """
    path = folder / "generation_config.json"
    own = read_json_object(path, raises=ConfigError, constants=True).get("eos_token_id") if path.is_file() else None
    found = config.get("eos_token_id") if own is None else own
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if any(type(one) is not int for one in ends):
        where = folder / ("config.json" if own is None else path.name)
        raise ConfigError(f"{where}: eos_token_id must be an id, a list of ids or null, got {found!r}")
    return ends


def load_model_tokenizer(
    folder: Path, eos_ids: Iterable[int], trust_remote_code: bool = False, chat_template: str | None = None
) -> Tokenizer:
    """Returns the tokenizer in a model's folder. Raises `DataError` if loading fails.

    eos_ids: ids that end a text in addition to the tokenizer's own (`read_eos_ids`). chat_template: replaces the
    tokenizer's own; None keeps that one.
    """
    tokenizer = load_tokenizer(folder, trust_remote_code)
    tokenizer.eos_token_ids.update(eos_ids)
    if chat_template is not None:
        tokenizer._tokenizer.chat_template = chat_template
    return tokenizer


def is_plain_model(name: str, revision: str | None = None) -> bool:
    """Returns whether a model is plain, by its config.json. Raises `ModelError` as `find_model_folder` does."""
    return read_model_config(find_model_folder(name, revision))["model_type"] != MODEL_TYPE


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
        """The `zip2zip` section as a `ZipConfig`. Raises `ConfigError` if the section is missing or wrong."""
        return parse_zip_section(self._section)

    @property
    def decoder_config(self) -> dict[str, Any]:
        """The base model's config, with its own `model_type`. Raises `ConfigError` if the section is missing."""
        return {**self.config, "model_type": self._section.get("base_model_type")}

    @property
    def _section(self) -> dict[str, Any]:
        section = self.config.get("zip2zip")
        if not isinstance(section, dict):
            raise ConfigError("config.json has no zip2zip section; convert the checkpoint with `mlx_zip convert`")
        return section


def read_model_codec(config: Mapping[str, Any]) -> CodecParams | None:
    """Returns the codec in a zip2zip model's config.json, or None for a plain model. Raises `ConfigError`."""
    return ModelArgs(dict(config)).zip_config.codec_params if "zip2zip" in config else None


def check_codebook_size(size: int | None) -> None:
    """Raises `ConfigError` if `size` is a number of slots that no codebook can have; None is the model's own number."""
    if isinstance(size, int) and not 0 <= size <= MAX_CODEBOOK:
        raise ConfigError(f"codebook_size (--codebook-size) must be from 0 to {MAX_CODEBOOK}, got {size}")


def codebook_config_changes(config: Mapping[str, Any], size: int | None, pack: Pack | None) -> dict[str, Any]:
    """Returns the keys of config.json to replace, for a codebook of `size` slots that begins with `pack`.

    size: None for the config's own. pack: None for the model's own. Raises `ConfigError` for a size that no codebook
    can have, `ModelError` if a plain model is given a size, or a pack without tuned rows.
    """
    check_codebook_size(size)
    if config["model_type"] == MODEL_TYPE:
        section = config.get("zip2zip")
        sizes = section.get("compression") if isinstance(section, Mapping) else None
        if size is None or not isinstance(section, Mapping) or not isinstance(sizes, Mapping):
            return {}
        own = {key: value for key, value in section.items() if key != "start" or pack is None}
        return {"zip2zip": {**own, "compression": {**sizes, "max_codebook_size": size}}}
    if size is not None:
        raise ModelError("codebook_size (--codebook-size): a plain model has no codebook of its own")
    return {} if pack is None else config_with_pack(config, pack.plain_codec(), pack.entries)


def config_with_pack(base: Mapping[str, Any], plain: PlainCodec, entries: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns the keys of config.json to replace so that a plain model reads these entries as hypertokens.

    The model then uses no hyper-encoder, because every entry has a tuned row. base: the plain model's config.json.
    plain: the codec settings that the pack was tuned with. entries: base ids of each entry. Raises `ConfigError` if
    settings and entries do not fit together, or the base's `hidden_size` is not a positive integer.
    """
    config = plain.config(entries, hidden_width(base))
    section = {**config.to_dict(), "base_model_type": base["model_type"], "plain": True}
    return {"model_type": MODEL_TYPE, "zip2zip": section}


def hidden_width(base: Mapping[str, Any]) -> int:
    """Returns the width D of a decoder's states. base: the decoder's config.json.

    Raises `ConfigError` if `hidden_size` is not a positive integer.
    """
    width = base.get("hidden_size")
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ConfigError(f"config.json: hidden_size must be a positive integer, got {width!r}")
    return width


def codec_for_tuned_pack(params: CodecParams, position_mode: str) -> PlainCodec:
    """Returns the codec settings to record in a pack tuned for a plain model, which then runs with these settings.

    position_mode: "compressed" or "base_token_end". Raises `ConfigError` if the codec has no pad id.
    """
    if params.pad_id is None:
        raise ConfigError("the tokenizer has neither a pad nor an eos token, and a codebook needs one of them")
    return PlainCodec(params.vocab_size, params.disabled_ids, params.pad_id, position_mode)
