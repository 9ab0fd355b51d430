"""Reads a checkpoint, or a model that was converted before, as a checked model with lazy weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

import mlx_zip
from mlx_zip.config import SIDES, ZipConfig
from mlx_zip.converters import source
from mlx_zip.converters.lora import Lora, check_lora_targets, merge_lora, read_lora
from mlx_zip.converters.meta_pt import read_encoder_overrides
from mlx_zip.converters.source import ModelPlace
from mlx_zip.converters.tensors import (
    DTYPES,
    FLOATS,
    Tensors,
    dtype_name,
    list_some_names,
    read_folder_tensors,
)
from mlx_zip.converters.tokenizer_files import TokenizerFacts, read_tokenizer_facts
from mlx_zip.errors import ConversionError, errors_as
from mlx_zip.layout import MODEL_TYPE, Layout
from mlx_zip.models.decoder import raise_if_decoder_unsupported
from mlx_zip.models.model_folder import ModelArgs
from mlx_zip.models.zip_model import Model
from mlx_zip.packs.pack import Pack

ADAPTERS = "adapters"  # folder inside a converted model's, with an adapter that is not merged
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROTARY_BUFFER = ".rotary_emb.inv_freq"  # saved by older transformers; computed from the config

Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class PreparedModel:
    """A checked model with lazy weights, not yet written.

    config: the content of config.json, without the fingerprint. tokenizer: the folder of the tokenizer's files. facts:
    properties that the copied tokenizer must also have. card: the text of README.md. kept: an adapter to write
    unmerged, or None. pack: a pack with tuned rows to write, or None.
    """

    model: nn.Module
    config: dict[str, Any]
    tokenizer: Path
    facts: TokenizerFacts
    card: str
    kept: Lora | None = None
    pack: Pack | None = None


def prepare_model(
    place: ModelPlace, dtype: str | None, keep_adapter: bool, trust_remote_code: bool, base: ModelPlace | None = None
) -> PreparedModel:
    """Reads and checks a published checkpoint or a converted model; returns it with lazy weights.

    dtype: name of the type to cast to, None for the source's. keep_adapter: leave the checkpoint's adapter unmerged.
    base: place of the base model, None for the checkpoint's. Raises `ConversionError` or `ConfigError` on failure.
    """
    if source.is_converted_model(place):
        if keep_adapter:
            raise ConversionError(f"{place.name} is converted already; there is no adapter to keep")
        return _prepare_converted_model(source.download_all_files(place), dtype, trust_remote_code)
    return _prepare_checkpoint(source.open_checkpoint(place, base), dtype, keep_adapter, trust_remote_code)


def _prepare_checkpoint(
    checkpoint: source.Checkpoint, dtype: str | None, keep_adapter: bool, trust_remote_code: bool
) -> PreparedModel:
    """Reads and checks a published checkpoint; see `prepare_model`."""
    raise_if_decoder_unsupported(checkpoint.base_config)
    overrides = _apply_meta_pt(checkpoint)
    facts = read_tokenizer_facts(checkpoint.base.folder, trust_remote_code)
    zip_config = ZipConfig.from_dict(checkpoint.zip_config, pad_id=facts.pad_id)
    _check_encoder_sizes(zip_config, checkpoint.base_config, facts)
    config = _build_config(checkpoint, zip_config)
    model = Model(ModelArgs.from_dict(config))
    lora = read_lora(checkpoint.adapter) if checkpoint.adapter else None
    if keep_adapter and lora is None:
        raise ConversionError(f"{checkpoint.place.name} has no adapter to keep")
    plan, encoders = _plan_tensors(checkpoint, model, zip_config, lora)
    _check_tied_head(plan)
    weights = plan.tensors | encoders.tensors
    if lora is not None and not keep_adapter:
        merge_lora(weights, lora)
    stored = dtype or dtype_name(plan.tensors[EMBEDDING].dtype)
    model.load_weights(list(weights.items()), strict=True)
    cast_floats(model, DTYPES[stored])
    adapter = None if lora is None else "kept" if keep_adapter else "merged"
    _record_source(config, checkpoint, stored, overrides, adapter, plan, encoders)
    card = _converted_model_card(checkpoint.place, checkpoint.base, mlx_zip.__version__)
    return PreparedModel(model, config, checkpoint.base.folder, facts, card, lora if keep_adapter else None)


def _apply_meta_pt(checkpoint: source.Checkpoint) -> dict[str, bool]:
    """Sets encoder options of `checkpoint` from meta.pt, as zip2zip does; returns the options that changed."""
    encoder = checkpoint.zip_config.get("encoder")
    if checkpoint.meta is None or checkpoint.zip_config.get("encoder_type") != "res_latent_attn":
        return {}
    found = read_encoder_overrides(checkpoint.meta)
    if not isinstance(encoder, dict):
        return {}
    defaults = {"causal": False, "residual": True}
    changed = {key: value for key, value in found.items() if encoder.get(key, defaults[key]) != value}
    for key, value in changed.items():
        warnings.warn(f"{source.META} overrides encoder.{key}: {encoder.get(key)} becomes {value}", stacklevel=2)
    encoder.update(changed)
    return changed


def _check_encoder_sizes(config: ZipConfig, base: dict[str, Any], facts: TokenizerFacts) -> None:
    """Checks that the encoder has the model's width, and that hypertoken ids begin after the tokenizer's last id.

    base: the base model's config. Raises `ConversionError` or `ConfigError` if a check fails.
    """
    if config.encoder.model_size != base["hidden_size"]:
        key = "model_hidden_size" if config.encoder.model_hidden_size else "hidden_size"
        raise ConversionError(
            f"encoder {key} is {config.encoder.model_size}, the base model's hidden_size {base['hidden_size']}"
        )
    Layout(config.vocab_size, config.codebook_size, base["vocab_size"]).check_tokenizer(facts.length)


def _build_config(checkpoint: source.Checkpoint, zip_config: ZipConfig) -> dict[str, Any]:
    """Returns the content of config.json: the base model's keys, mlx_zip's model type and the zip2zip section.

    Keys that name Python code or local paths are left out.
    """
    base = {k: v for k, v in checkpoint.base_config.items() if k not in ("auto_map", "_name_or_path", "zip2zip")}
    section = {**zip_config.to_dict(), "base_model_type": base["model_type"]}
    if zip_config.base_model and Path(zip_config.base_model).is_absolute():
        section["base_model_name_or_path"] = Path(zip_config.base_model).name
    return {**base, "model_type": MODEL_TYPE, "zip2zip": section}


def _plan_tensors(
    checkpoint: source.Checkpoint, model: nn.Module, zip_config: ZipConfig, lora: Lora | None
) -> tuple[Plan, Plan]:
    """Returns the match of source tensors to the model's tensors: one plan for the decoder, one for the encoders.

    Raises `ConversionError` if they do not match.
    """
    shapes = {name: tuple(array.shape) for name, array in tensors_by_name(model).items()}
    encoder_shapes = {name: shape for name, shape in shapes.items() if name.startswith(SIDES)}
    decoder_shapes = {name: shape for name, shape in shapes.items() if name not in encoder_shapes}
    plan = _plan_decoder(checkpoint.decoder, decoder_shapes)
    if checkpoint.partial:
        plan = _plan_override(plan, checkpoint.partial, decoder_shapes, source.PARTIAL)
    if lora is not None:
        check_lora_targets(lora, decoder_shapes)
    return plan, _plan_encoders(checkpoint.encoders, encoder_shapes, zip_config.encoder.tie_encoders)


def tensors_by_name(model: nn.Module) -> Tensors:
    """Returns the model's tensors by name."""
    return dict(tree_flatten(model.parameters()))


def _check_tied_head(plan: Plan) -> None:
    """Raises `ConversionError` if a tied model stores its embedding and its head with different values."""
    if plan.twin is not None and not mx.array_equal(plan.twin, plan.tensors[EMBEDDING]).item():
        raise ConversionError(
            f"{HEAD} differs from {EMBEDDING} although the word embeddings are tied; "
            "set tie_word_embeddings to false in the base's config.json to keep both"
        )


def cast_floats(model: nn.Module, dtype: mx.Dtype) -> None:
    """Casts float tensors to `dtype`, lazily and in place, except those that the model's `cast_predicate` excludes."""
    keep = getattr(model, "cast_predicate", lambda _: True)

    def cast(name: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) and keep(name) else array

    model.update(tree_map_with_path(cast, model.parameters()))


def _record_source(
    config: dict[str, Any],
    checkpoint: source.Checkpoint,
    dtype: str,
    overrides: dict[str, bool],
    adapter: str | None,
    *plans: Plan,
) -> None:
    """Adds a record of the model's origin to `config`.

    overrides: encoder options that meta.pt changed. adapter: "kept", "merged" or None. plans: the matched tensors.
    """
    config["torch_dtype"] = dtype
    if "dtype" in config:
        config["dtype"] = dtype
    config["zip2zip"]["source"] = {
        "path": checkpoint.place.name,
        "revision": checkpoint.place.revision,
        "base": checkpoint.base.name,
        "base_revision": checkpoint.base.revision,
        "adapter": adapter,
        "override": sorted(checkpoint.partial),
        "meta_pt": overrides,
        "dropped": {reason: count for plan in plans for reason, count in plan.dropped.items()},
        "dtype": dtype,
        "mlx_zip": mlx_zip.__version__,
    }


def _prepare_converted_model(place: ModelPlace, dtype: str | None, trust_remote_code: bool) -> PreparedModel:
    if (place.folder / ADAPTERS).is_dir():
        raise ConversionError(f"{place.name} keeps an adapter, which would be lost; convert its original instead")
    model, config = load_converted_model(place)
    section = config["zip2zip"]
    record = section.setdefault("source", {})
    if dtype is not None:
        cast_floats(model, DTYPES[dtype])
        config["torch_dtype"] = record["dtype"] = dtype
    record["mlx_zip"] = mlx_zip.__version__
    facts = read_tokenizer_facts(place.folder, trust_remote_code)
    card = _converted_model_card(place, place, mlx_zip.__version__)
    return PreparedModel(model, config, place.folder, facts, card)


def load_converted_model(place: ModelPlace) -> tuple[Any, dict[str, Any]]:
    """Returns a converted folder's model, with lazy weights, and config. Raises `ConversionError` if loading fails."""
    from mlx_lm.utils import load_model

    read_folder_tensors(place.folder)
    with errors_as(ConversionError, f"{place.name} cannot be loaded", ValueError):
        return load_model(place.folder, lazy=True)


# ---- matching a checkpoint's tensor names to the model's names; no name may be left over on either side


@dataclass
class Plan:
    """Maps the model's tensors to source tensors. tensors: model's name -> source tensor. dropped: reason -> count.

    twin: the stored head of a model with tied embeddings, which must equal the embedding; None if no head is stored.
    """

    tensors: Tensors
    dropped: dict[str, int] = field(default_factory=dict)
    twin: mx.array | None = None


def _drop(plan: Plan, reason: str, names: list[str]) -> None:
    """Leaves out tensors, and records their number unless it is 0."""
    for name in names:
        del plan.tensors[name]
    if names:
        plan.dropped[reason] = len(names)


def _plan_decoder(found: Tensors, expected: Shapes) -> Plan:
    """Matches a decoder's tensors with `expected`, the model's names and shapes without the encoders.

    Leaves out rotary buffers, and the head of a model with tied embeddings. If such a model stores only the head, the
    head becomes the embedding. Raises `ConversionError` if names are unknown, missing or misshapen.
    """
    plan = Plan(dict(found))
    _drop(plan, "rotary buffers", [name for name in found if name.endswith(_ROTARY_BUFFER)])
    if HEAD in found and HEAD not in expected:
        head = plan.tensors.pop(HEAD)
        if EMBEDDING in plan.tensors:
            plan.twin = head
            plan.dropped["tied head"] = 1
        else:
            plan.tensors[EMBEDDING] = head
    check_tensors(plan.tensors, expected, "decoder")
    return plan


def _plan_override(base: Plan, found: Tensors, expected: Shapes, file_name: str) -> Plan:
    """Returns the plan `base` with tensors replaced by those of a partial decoder.

    found: the partial decoder's tensors. expected: the model's names and shapes. Raises `ConversionError`, naming
    `file_name`, if a tensor is unknown or misshapen, or if nothing is replaced.
    """
    extra = {name: t for name, t in found.items() if not name.endswith(_ROTARY_BUFFER)}
    twin = base.twin
    if {EMBEDDING, HEAD} & extra.keys() and HEAD not in expected:
        head = extra.pop(HEAD, None)
        twin = head if EMBEDDING in extra else None
        if head is not None:
            extra.setdefault(EMBEDDING, head)
    if not extra:
        raise ConversionError(f"{file_name} overrides nothing")
    check_tensors(extra, {name: shape for name, shape in expected.items() if name in extra}, file_name)
    return Plan({**base.tensors, **extra}, base.dropped, twin)


def _plan_encoders(found: Tensors, expected: Shapes, tied: bool) -> Plan:
    """Matches the tensors of the encoder file with `expected`, the encoders' names and shapes in the model.

    tied: whether input and output share an encoder; if so, the output encoder's tensors are left out, as in zip2zip.
    Raises `ConversionError` if names are unknown, missing or misshapen.
    """
    plan = Plan(dict(found))
    if tied:
        _drop(plan, "output_encoder of tied encoders", [name for name in found if name.startswith(SIDES[1])])
    _check_positions(plan.tensors, expected)
    check_tensors(plan.tensors, expected, "encoders")
    return plan


def _check_positions(found: Tensors, expected: Shapes) -> None:
    """Raises `ConversionError` if an encoder's number of positions differs from the config's merge size."""
    for side in SIDES:
        name = f"{side}pos_embed.weight"
        if name in found and name in expected and found[name].shape[:1] != expected[name][:1]:
            raise ConversionError(
                f"max_subtokens is {expected[name][0]} but {name} has positions for {found[name].shape[0]}"
            )


def check_tensors(found: Tensors, expected: Shapes, what: str) -> None:
    """Raises `ConversionError` unless names and shapes are exactly the expected ones and all tensors are floats.

    what: the part of the model, for the message.
    """
    if problems := find_mismatches({name: (name, one.shape) for name, one in found.items()}, expected):
        raise ConversionError(f"{what} tensors do not match the config; {'; '.join(problems)}")
    if odd := [f"{name} {dtype_name(one.dtype)}" for name, one in found.items() if one.dtype not in FLOATS]:
        raise ConversionError(f"{what} tensors that are not {', '.join(DTYPES)}: {list_some_names(odd)}")


def find_mismatches(found: Mapping[str, tuple[str, tuple[int, ...]]], expected: Shapes) -> list[str]:
    """Returns, for a message, which tensors are unknown, missing or misshapen: one text for each kind of mismatch.

    found: name and shape of each tensor in its file, by the model's name for it. expected: shapes by the model's names.
    """
    problems = {
        "unknown": [name for ours, (name, _) in found.items() if ours not in expected],
        "missing": expected.keys() - found.keys(),
        "misshapen": [
            f"{name} {list(shape)} instead of {list(expected[ours])}"
            for ours, (name, shape) in found.items()
            if ours in expected and shape != expected[ours]
        ],
    }
    return [f"{problem}: {list_some_names(names)}" for problem, names in problems.items() if names]


def _converted_model_card(source: ModelPlace, base: ModelPlace, version: str) -> str:
    names = dict.fromkeys(place.name for place in (source, base) if place.revision)
    based_on = "".join(f"- {name}\n" for name in names)
    return (
        "---\nlibrary_name: mlx\npipeline_tag: text-generation\ntags:\n- mlx\n- mlx_zip\n- zip2zip\n"
        + (f"base_model:\n{based_on}" if based_on else "")
        + f"---\n\n# {source.name}, converted for mlx_zip\n\n"
        "A zip2zip model: while it reads and writes, recurring token runs become hypertokens, so the same text takes\n"
        "fewer steps. This folder was made by `mlx_zip convert` "
        f"{version}; what it was made from is recorded in the `zip2zip`\nsection of `config.json`.\n\n"
        "```bash\npip install .  # in a clone of mlx_zip\n"
        'mlx_zip generate --model <this folder or repository> --prompt "Hello"\n```\n\n'
        "It runs with mlx_zip; `mlx_lm.generate`, `chat` and `server` cannot turn hypertokens into text.\n"
        "The licence is that of the models above.\n"
    )
