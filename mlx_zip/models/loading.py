"""`load`: loads a model and its tokenizer through mlx-lm's own loader, with the checks that mlx-lm's lacks.

Also counts the bytes of weights that a step reads, and by what share one more hypertoken increases them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import _get_classes
from mlx_lm.utils import load as mlx_load

from mlx_zip.config import SIDES
from mlx_zip.errors import MlxZipError, ModelError, bare_exceptions_as_value_errors, first_message_line
from mlx_zip.files import expand_home
from mlx_zip.layout import MODEL_TYPE, has_hypertokens
from mlx_zip.models.draft_head import HeadFile
from mlx_zip.models.machines import (
    Group,
    fail_together,
    raise_unless_machines_agree,
    raise_unless_splittable,
    split_model,
)
from mlx_zip.models.model_folder import (
    ADAPTER_CONFIG,
    DRAFT_HEAD,
    UPSTREAM_CONFIG_NAME,
    codebook_config_changes,
    find_model_folder,
    read_model_config,
)
from mlx_zip.models.rows.row_store import RowStore
from mlx_zip.packs.pack import PackLike, as_pack, use_pack_in_folder
from mlx_zip.text.tokenizers import find_damaged_json, silence_transformers
from mlx_zip.vocab.adaptbpe.tokenizer_json import make_tokenizer_exact_in_folder
from mlx_zip.vocab.first_stage import tokenizer_fingerprint


def load(
    path_or_hf_repo: str | Path,
    *,
    adapter_path: str | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    lazy: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    canonical: bool | None = None,
    row_store: RowStore | None = None,
    pack: PackLike | None = None,
    codebook_size: int | None = None,
    group: Group | None = None,
) -> tuple[Any, Any]:
    """Loads a converted zip2zip model, or any plain mlx-lm model, and its tokenizer.

    path_or_hf_repo: a local folder, a bundled model ("stories") or a Hugging Face hub id. adapter_path: folder of an
    mlx-lm adapter. canonical: whether a zip2zip model writes only ids that the compressor would write; None takes the
    setting in its config.json. row_store: keeps hyper rows between requests; several models may share one (default: a
    new store in memory). pack: the path of a pack, or a `Pack`; requests begin with it unless they name another. A
    plain model takes a pack only if its rows were tuned for that model. Default: the tuned pack in a converted model's
    folder, if there is one and no adapter is loaded. codebook_size: number of slots (default: as in a zip2zip model's
    config.json). group: the machines to split the model over (`connect_machines`). Each machine calls `load` and gets a
    model with its share of every layer. With None or a group of one machine, the model is not split.

    Returns (model, mlx-lm's `TokenizerWrapper`). Raises `ModelError` if the folder is missing, incomplete or not
    converted, or the pack belongs to another model; `DataError` if the pack cannot be read or belongs to another
    tokenizer; `ConfigError` if the tokenizer has ids that are hypertokens, `codebook_size` is too large, or the pack's
    entries do not fit; `MachineError` if another machine fails or has other weights or another tokenizer.
    """
    group = None if group is None or group.size() == 1 else group
    with fail_together(group):
        folder = find_model_folder(path_or_hf_repo, revision)
        config = read_model_config(folder)
        _raise_unless_adapter(adapter_path, path_or_hf_repo)
        if group is not None:
            raise_unless_splittable(config, group.size())
            if adapter_path is not None:
                raise ModelError("an adapter (--adapter-path) cannot be loaded on several machines: merge it first")
        pack = None if pack is None else as_pack(pack)
        changes = codebook_config_changes(config, codebook_size, pack)
        model, tokenizer, fingerprint = _load_with_mlx_lm(
            folder,
            config,
            changes,
            group,
            adapter_path=None if adapter_path is None else str(expand_home(adapter_path)),
            tokenizer_config={"trust_remote_code": trust_remote_code, **(tokenizer_config or {})},
            lazy=lazy or group is not None,
            trust_remote_code=trust_remote_code,
        )
        make_tokenizer_exact_in_folder(getattr(tokenizer, "backend_tokenizer", None), folder)
        if pack is not None:
            pack.check_made_for(tokenizer, "the pack (--pack)")
        if group is None and os.path.lexists(folder / DRAFT_HEAD):  # a broken link too, so drafts raise an error
            model.draft_head = HeadFile(folder / DRAFT_HEAD)
        if has_hypertokens(model):
            if fingerprint:
                model.row_source.fingerprint.set(model, fingerprint)
            model.layout.check_tokenizer(len(tokenizer))
            if canonical is not None:
                model.row_source.config = replace(model.config, canonical=canonical)
            model.row_source.store = RowStore() if row_store is None else row_store
            if pack is not None:
                model.use_pack(pack)
            elif adapter_path is None:
                use_pack_in_folder(folder, model.config.start, lambda: tokenizer, model.use_pack)
    if group is not None:
        both = fingerprint + tokenizer_fingerprint(tokenizer)
        raise_unless_machines_agree(group, both, "the model's weights or tokenizer")
    return model, tokenizer


def _load_with_mlx_lm(
    folder: Path, config: Mapping[str, Any], changes: Mapping[str, Any], group: Group | None, **options: Any
) -> tuple[Any, Any, str]:
    """Returns this machine's share of the model, the tokenizer, and the whole model's fingerprint ("" without a group).

    config: config.json. changes: keys of config.json to replace. options: further arguments of mlx-lm's `load`. Raises
    `ModelError`.
    """
    try:
        with silence_transformers(), bare_exceptions_as_value_errors():
            loaded = mlx_load(str(folder), model_config={**rope_settings_for_mlx_lm(config), **changes}, **options)
            fingerprint = "" if group is None else split_model(loaded[0], group)
    except MlxZipError:
        raise
    except load_error_types() as error:
        raise ModelError(f"cannot load {folder}: {find_damaged_json(folder) or first_message_line(error)}") from error
    return loaded[0], loaded[1], fingerprint


def _raise_unless_adapter(path: str | None, model: str | Path) -> None:
    """Raises `ModelError` unless `path` is an adapter that mlx-lm can load, or None.

    For an adapter in PEFT's format, the message has the command that merges the adapter. model: the adapter's base
    model, for the message.
    """
    if path is None:
        return
    folder = expand_home(path)
    try:
        is_peft = "peft_type" in json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        is_peft = (folder / UPSTREAM_CONFIG_NAME).is_file()
        if not is_peft:
            raise ModelError(f"{path} (--adapter-path) is no folder with an {ADAPTER_CONFIG}") from error
    except (ValueError, TypeError) as error:
        raise ModelError(f"{folder / ADAPTER_CONFIG} is not valid JSON: {first_message_line(error)}") from error
    if is_peft or (folder / UPSTREAM_CONFIG_NAME).is_file():
        raise ModelError(
            f"{path} (--adapter-path) is an adapter as mlx_zip train and PEFT save it; merge it into its base first: "
            f"mlx_zip convert --hf-path {path} --mlx-path OUT, then use OUT in place of {model}"
        )


def load_error_types() -> tuple[type[Exception], ...]:
    """Returns the exceptions that mlx-lm, MLX and transformers raise for a damaged model folder.

    There are many, because a config value of a wrong type raises an error wherever the value is first used.
    """
    from huggingface_hub.errors import StrictDataclassError

    plain = (OSError, ValueError, RuntimeError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError)
    return (*plain, StrictDataclassError)


def rope_settings_for_mlx_lm(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys to add to a plain model's config so that mlx-lm's class reads its rope settings.

    transformers 5 writes rope settings as `rope_parameters`, which many of mlx-lm 0.32's classes ignore: they use theta
    10000 without a warning. For a converted zip2zip model, returns {}. Raises `ModelError` if mlx-lm's class has no
    argument for a setting.
    """
    if config["model_type"] == MODEL_TYPE or "model_file" in config:
        return {}
    text = config.get("text_config")
    if (
        isinstance(text, Mapping)
        and isinstance(text.get("model_type"), str)
        and (filled := _rope_settings_of_level(text))
    ):
        return {"text_config": {**text, **filled}}
    return _rope_settings_of_level(config)


def _rope_settings_of_level(config: Mapping[str, Any]) -> dict[str, Any]:
    """Does what `rope_settings_for_mlx_lm` does, for the config's top level or for its `text_config`."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or "rope_parameters" in (known := _mlx_lm_argument_names(dict(config))):
        return {}
    is_nested = any(isinstance(value, Mapping) for value in rope.values())
    filled = _gemma3_rope_settings(rope) if is_nested else _shared_rope_settings(rope)
    filled = {key: value for key, value in filled.items() if config.get(key) is None}
    if missing := sorted(filled.keys() - known):
        kind = config["model_type"]
        raise ModelError(f"config.json: mlx-lm's {kind} cannot take {', '.join(missing)} from rope_parameters")
    return filled


def _mlx_lm_argument_names(config: dict[str, Any]) -> set[str]:
    """Returns the config keys that mlx-lm's class for this model takes. Raises `ModelError` if there is no class."""
    try:
        arguments = _get_classes(config)[1]
    except ValueError as error:
        raise ModelError(f"config.json: {first_message_line(error)}") from error
    return {f.name for f in fields(arguments)} if is_dataclass(arguments) else set()


def _shared_rope_settings(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one set of rope parameters, used by all layers, under the names that mlx-lm's classes read."""
    own_keys = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    filled = {key: rope[key] for key in own_keys if rope.get(key) is not None}
    if filled.get("partial_rotary_factor") == 1:
        del filled["partial_rotary_factor"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        filled["rope_scaling"] = {**scaling, "type": kind, "rope_type": kind}
        if kind != "longrope":  # only LongRoPE reads this key outside `rope_scaling`
            filled.pop("original_max_position_embeddings", None)
    return filled


def _gemma3_rope_settings(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Gemma 3's two sets of rope parameters, for full and for sliding attention, under mlx-lm's names.

    Raises `ModelError` if there are other sets, or if the set for sliding attention has scaling, which mlx-lm cannot
    read.
    """
    sliding, full = rope.get("sliding_attention"), rope.get("full_attention")
    if sliding is None or full is None or len(rope) != 2 or sliding.get("rope_type", "default") != "default":
        raise ModelError(f"config.json: rope_parameters for {', '.join(map(str, rope))} are not supported")
    return {**_shared_rope_settings(full), "rope_local_base_freq": sliding.get("rope_theta")}


# ---- the weights that a step reads

_EMBEDDING, _HEAD = "model.embed_tokens.", "lm_head."


def weight_bytes_per_step(arrays: Mapping[str, mx.array]) -> int:
    """Returns the bytes of a model's tensors that a step reads without hypertokens. arrays: the tensors by name.

    Leaves out the hyper-encoders, which such a step does not read; an embedding that is not also the head, of which a
    step reads one row; and KV caches and hyper rows, which depend on the text.
    """
    untied = any(name.startswith(_HEAD) for name in arrays)
    unread = (*SIDES, _EMBEDDING) if untied else SIDES
    return sum(value.nbytes for name, value in arrays.items() if not name.startswith(unread))


def output_row_share_of_step(folder: Path) -> float:
    """Returns the bytes of a hypertoken's output row, divided by the bytes that a step reads without hypertokens.

    An upper bound, because `weight_bytes_per_step` leaves some bytes out. Only headers of the folder's weight files are
    read. Raises `ModelError` if they cannot be read.
    """
    arrays: dict[str, mx.array] = {}
    try:
        for file in sorted(folder.glob("model*.safetensors")):
            arrays |= mx.load(str(file))  # type: ignore[arg-type]  # lazy: only names, types and shapes are read
        norm = arrays["model.norm.weight"]  # as wide as a row, and never quantized
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: cannot read the sizes of its weights: {error}") from error
    return norm.nbytes / weight_bytes_per_step(arrays)
