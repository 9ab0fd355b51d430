"""`convert`: a zip2zip checkpoint, or a PEFT adapter, becomes an mlx-lm folder."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from tqdm import tqdm

import mlx_zip
from mlx_zip.config import SIDES, ZipConfig
from mlx_zip.converters import hub, names, output, source
from mlx_zip.converters.hub import Place
from mlx_zip.converters.lora import Lora, check_targets, merge, mlx_adapter, read_lora
from mlx_zip.converters.meta_pt import encoder_overrides
from mlx_zip.converters.quantization import QuantPredicate, Recipe, quantize_encoders, quantize_model
from mlx_zip.converters.tensors import FLOATS, load, read_model_files
from mlx_zip.converters.tokenizer_files import TokenizerFacts, copy_tokenizer, read_tokenizer
from mlx_zip.errors import CodecError, ConversionError
from mlx_zip.files import write_json
from mlx_zip.hyper import Fingerprints
from mlx_zip.layout import Layout
from mlx_zip.models import Model, ModelArgs, check_config
from mlx_zip.models.zip_model import RECORD_KEYS
from mlx_zip.register import MODEL_TYPE
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.vocab.first_stage import tokenizer_fingerprint
from mlx_zip.vocab.packs import IN_FOLDER, Pack, load_pack, merge_packs, pack_in_folder, save_pack

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
ADAPTERS = "adapters"  # the folder of a kept adapter inside the output


@dataclass
class Prepared:
    """A model with lazy weights, everything checked, nothing written.

    config: config.json to be, without the fingerprint. tokenizer: the folder it comes from, and how it loads there.
    pack: the one with tuned rows that the folder is to bring along, if any.
    """

    model: nn.Module
    config: dict[str, Any]
    tokenizer: Path
    facts: TokenizerFacts
    card: str
    kept: Lora | None = None
    pack: Pack | None = None


def convert(
    hf_path: str,
    mlx_path: str | Path = "mlx_model",
    quantize: bool = False,
    q_group_size: int | None = None,
    q_bits: int | None = None,
    q_mode: str = "affine",
    dtype: str | None = None,
    upload_repo: str | None = None,
    revision: str | None = None,
    dequantize: bool = False,
    quant_predicate: QuantPredicate | str | None = None,
    keep_adapter: bool = False,
    lora_only: bool = False,
    encoder_bits: int | None = None,
    canonical: bool | None = None,
    codebook: Sequence[str | Path] | None = None,
    policy: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> Path:
    """Converts a zip2zip checkpoint (formats 1 and 2) to an mlx-lm folder, and returns that folder's path.

    hf_path: a folder or a hub id (at `revision`). mlx_path: must not exist; it appears whole or not at all. Arguments
    up to `quant_predicate` are those of `mlx_lm.convert`. dtype: "float16", "bfloat16" or "float32"; the default is
    the source decoder's. keep_adapter: leave a PEFT LoRA unmerged, in `adapters/` inside the output. lora_only:
    `hf_path` is a plain PEFT LoRA, and the output an mlx-lm adapter folder. encoder_bits: quantize the hyper-encoders
    too (4 or 8). canonical: what the config is to say of it (`mlx_zip.canonical`), None leaves it. codebook: packs
    whose entries, merged, every request of the model begins with; None leaves what it had. Where they were tuned, for
    the weights that are written, their rows go along as `pack.npz`. policy: what a full codebook does (`CodecParams`),
    None leaves it. A folder that is converted already can be quantized, dequantized or cast again.

    Raises `ConversionError` or `ConfigError`, `DataError` for a pack that cannot be read or does not fit, `ModelError`
    for a folder with a `pack.npz` that its config does not name and for rows of another shape than the model's, each a
    line that names the file, tensor or key at fault; then nothing has been written. A tuned pack is checked against the
    weights, which are all read for that.
    """
    if quantize and dequantize:
        raise ConversionError("choose either quantize or dequantize, not both")
    if dtype is not None and dtype not in DTYPES:
        raise ConversionError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if upload_repo is not None:
        hub.check_repository(upload_repo)
    out = Path(mlx_path)
    output.refuse_existing(out)
    recipe = Recipe(quantize, q_group_size, q_bits, q_mode, quant_predicate, encoder_bits, dequantize)
    place = source.locate(hf_path, revision)
    if lora_only:
        others = any(option is not None for option in (canonical, codebook, policy))
        _refuse_with_lora_only(recipe, keep_adapter or others)
        _write_adapter(out, source.complete(place), dtype, progress)
    else:
        prepared = _prepare(place, dtype, keep_adapter, trust_remote_code)
        _decide(prepared.config["zip2zip"], canonical, policy)
        if codebook is not None:
            _begin_with(prepared, codebook, trust_remote_code)
        elif source.is_converted(place):
            _keep_pack(prepared, trust_remote_code)
        _quantize(prepared, recipe)
        _check_rows(prepared, codebook)
        _write(out, prepared, trust_remote_code, progress)
    if upload_repo is not None:
        hub.upload(out, upload_repo)
    return out


def _refuse_with_lora_only(recipe: Recipe, others: bool) -> None:
    if recipe != Recipe() or others:
        raise ConversionError(
            "--lora-only writes an adapter alone; it takes no quantization, no --keep-adapter, no --canonical, "
            "no --pack and no --policy"
        )


def _decide(section: dict[str, Any], canonical: bool | None, policy: str | None) -> None:
    """Writes what of these is given into a config's section. Raises `ConfigError` where the two do not go together."""
    if canonical is not None:
        section["canonical"] = canonical
    if policy is not None:
        section["compression"]["policy"] = policy
    settled = ZipConfig.from_dict({name: section[name] for name in section if name not in RECORD_KEYS})
    section["compression"] = settled.to_dict()["compression"]


def _begin_with(prepared: Prepared, files: Sequence[str | Path], trust_remote_code: bool) -> None:
    packs = {str(file): load_pack(file) for file in files}
    mark = tokenizer_fingerprint(load_tokenizer(prepared.tokenizer, trust_remote_code))
    for name, one in packs.items():
        one.check_tokenizer(mark, name)
    found = list(packs.values())
    pack = found[0] if len(found) == 1 else merge_packs(found)
    config: Any = prepared.model.config
    try:
        params = replace(config.codec_params, start=pack.entries)
    except CodecError as error:
        raise ConversionError(f"--pack {' '.join(packs)} does not fit the model: {error}") from error
    prepared.config["zip2zip"]["start"] = [list(entry) for entry in params.start or ()]
    prepared.pack = None if pack.rows is None else pack


def _keep_pack(prepared: Prepared, trust_remote_code: bool) -> None:
    """A folder that brings a pack along hands it on. Raises `ModelError` or `DataError` for one that is not its own."""
    model: Any = prepared.model
    prepared.pack = pack = pack_in_folder(prepared.tokenizer, model.config.start)
    if pack is not None and pack.tokenizer is not None:
        mark = tokenizer_fingerprint(load_tokenizer(prepared.tokenizer, trust_remote_code))
        pack.check_tokenizer(mark, str(prepared.tokenizer / IN_FOLDER))


def _check_rows(prepared: Prepared, files: Sequence[str | Path] | None) -> None:
    """Tuned rows are good for the weights that they were tuned for: those asked for must be, others are left behind."""
    pack, model = prepared.pack, cast(Any, prepared.model)
    if pack is None or pack.rows is None:
        return
    if pack.rows.model == model.fingerprint:
        model.check_pack(pack.start)
        return
    if files is not None:
        raise ConversionError(
            f"--pack {' '.join(map(str, files))}: its rows were tuned for other weights than those to be written; "
            "convert first, tune the pack for the new folder, then convert that one with it, or leave its rows behind "
            "(mlx_zip vocab pack merge --drop-rows)"
        )
    warnings.warn(f"the tuned rows in {IN_FOLDER} are left behind: they are not for the new weights", stacklevel=2)
    prepared.pack = None


# ---- reading


def _prepare(place: Place, dtype: str | None, keep_adapter: bool, trust_remote_code: bool) -> Prepared:
    if source.is_converted(place):
        if keep_adapter:
            raise ConversionError(f"{place.name} is converted already; there is no adapter to keep")
        return _prepare_converted(source.complete(place), dtype, trust_remote_code)
    return _prepare_checkpoint(source.open_checkpoint(place), dtype, keep_adapter, trust_remote_code)


def _prepare_checkpoint(
    checkpoint: source.Checkpoint, dtype: str | None, keep_adapter: bool, trust_remote_code: bool
) -> Prepared:
    check_config(checkpoint.base_config)
    overrides = _apply_meta(checkpoint)
    facts = read_tokenizer(checkpoint.base.folder, trust_remote_code)
    zip_config = ZipConfig.from_dict(checkpoint.zip_config, pad_id=facts.pad_id)
    _check_sizes(zip_config, checkpoint.base_config, facts)
    config = _config(checkpoint, zip_config)
    model = Model(ModelArgs.from_dict(config))
    lora = read_lora(checkpoint.adapter) if checkpoint.adapter else None
    if keep_adapter and lora is None:
        raise ConversionError(f"{checkpoint.place.name} has no adapter to keep")
    plan, encoders = _plans(checkpoint, model, zip_config, lora)
    weights = load(plan.tensors | encoders.tensors)
    _check_twin(plan, weights)
    if lora is not None and not keep_adapter:
        merge(weights, lora)
    stored = dtype or str(FLOATS[plan.tensors[names.EMBEDDING].dtype]).removeprefix("mlx.core.")
    model.load_weights(list(weights.items()), strict=True)
    cast_floats(model, DTYPES[stored])
    adapter = None if lora is None else "kept" if keep_adapter else "merged"
    _record(config, checkpoint, stored, overrides, adapter, plan, encoders)
    card = hub.model_card(checkpoint.place, checkpoint.base, mlx_zip.__version__)
    return Prepared(model, config, checkpoint.base.folder, facts, card, lora if keep_adapter else None)


def _apply_meta(checkpoint: source.Checkpoint) -> dict[str, bool]:
    """Lets meta.pt override the encoder's options, as upstream; returns what it changed."""
    encoder = checkpoint.zip_config.get("encoder")
    if checkpoint.meta is None or checkpoint.zip_config.get("encoder_type") != "res_latent_attn":
        return {}
    found = encoder_overrides(checkpoint.meta)
    if not isinstance(encoder, dict):
        return {}
    defaults = {"causal": False, "residual": True}
    changed = {key: value for key, value in found.items() if encoder.get(key, defaults[key]) != value}
    for key, value in changed.items():
        warnings.warn(f"{source.META} overrides encoder.{key}: {encoder.get(key)} becomes {value}", stacklevel=2)
    encoder.update(changed)
    return changed


def _check_sizes(config: ZipConfig, base: dict[str, Any], facts: TokenizerFacts) -> None:
    """Width of the rows, and the id boundary against embedding and tokenizer. Raises `ConfigError`."""
    if config.encoder.model_size != base["hidden_size"]:
        key = "model_hidden_size" if config.encoder.model_hidden_size else "hidden_size"
        raise ConversionError(
            f"encoder {key} is {config.encoder.model_size}, the base model's hidden_size {base['hidden_size']}"
        )
    Layout(config.vocab_size, config.codebook_size, base["vocab_size"]).check_tokenizer(facts.length)


def _config(checkpoint: source.Checkpoint, zip_config: ZipConfig) -> dict[str, Any]:
    """config.json: the base's, flat, with our model type and section. Code and local paths are left out."""
    base = {k: v for k, v in checkpoint.base_config.items() if k not in ("auto_map", "_name_or_path", "zip2zip")}
    section = {**zip_config.to_dict(), "base_model_type": base["model_type"]}
    if zip_config.base_model and Path(zip_config.base_model).is_absolute():
        section["base_model_name_or_path"] = Path(zip_config.base_model).name
    return {**base, "model_type": MODEL_TYPE, "zip2zip": section}


def _plans(
    checkpoint: source.Checkpoint, model: nn.Module, zip_config: ZipConfig, lora: Lora | None
) -> tuple[names.Plan, names.Plan]:
    shapes = {name: tuple(array.shape) for name, array in parameters_of(model).items()}
    encoder_shapes = {name: shape for name, shape in shapes.items() if name.startswith(SIDES)}
    decoder_shapes = {name: shape for name, shape in shapes.items() if name not in encoder_shapes}
    plan = names.plan_decoder(checkpoint.decoder, decoder_shapes)
    if checkpoint.partial:
        plan = names.plan_override(plan, checkpoint.partial, decoder_shapes, source.PARTIAL)
    if lora is not None:
        check_targets(lora, decoder_shapes)
    return plan, names.plan_encoders(checkpoint.encoders, encoder_shapes, zip_config.encoder.tie_encoders)


def parameters_of(model: nn.Module) -> dict[str, mx.array]:
    """The model's tensors by name."""
    return dict(tree_flatten(model.parameters()))


def _check_twin(plan: names.Plan, weights: dict[str, mx.array]) -> None:
    """A tied model's two copies of one matrix must be one."""
    if plan.twin is None:
        return
    twin = load({"twin": plan.twin})["twin"]
    if twin.shape != weights[names.EMBEDDING].shape or not mx.array_equal(twin, weights[names.EMBEDDING]).item():
        raise ConversionError(
            f"{names.HEAD} differs from {names.EMBEDDING} although the word embeddings are tied; "
            "set tie_word_embeddings to false in the base's config.json to keep both"
        )


def cast_floats(model: nn.Module, dtype: mx.Dtype) -> None:
    """Casts every float of the model, lazily."""
    keep = getattr(model, "cast_predicate", lambda _: True)

    def cast(name: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) and keep(name) else array

    model.update(tree_map_with_path(cast, model.parameters()))


def _record(
    config: dict[str, Any],
    checkpoint: source.Checkpoint,
    dtype: str,
    overrides: dict[str, bool],
    adapter: str | None,
    *plans: names.Plan,
) -> None:
    """What the model was made from, into config.json."""
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
        "dropped": {reason: len(found) for plan in plans for reason, found in plan.dropped.items()},
        "dtype": dtype,
        "mlx_zip": mlx_zip.__version__,
    }


def _prepare_converted(place: Place, dtype: str | None, trust_remote_code: bool) -> Prepared:
    """A model converted before, as it is loaded."""
    source.check_converted(place)
    model, config = load_converted(place)
    section = config["zip2zip"]
    record = section.setdefault("source", {})
    if dtype is not None:
        cast_floats(model, DTYPES[dtype])
        config["torch_dtype"] = record["dtype"] = dtype
    record["mlx_zip"] = mlx_zip.__version__
    facts = read_tokenizer(place.folder, trust_remote_code)
    card = hub.model_card(place, place, mlx_zip.__version__)
    return Prepared(model, config, place.folder, facts, card)


def load_converted(place: Place) -> tuple[Any, dict[str, Any]]:
    """A converted folder's model, its weights lazy, and config.json. Raises `ConversionError`."""
    from mlx_lm.utils import load_model

    read_model_files(place.folder)
    try:
        return load_model(place.folder, lazy=True)
    except ValueError as error:
        raise ConversionError(f"{place.name} cannot be loaded: {str(error).partition(chr(10))[0]}") from error


# ---- quantizing and writing


def _quantize(prepared: Prepared, recipe: Recipe) -> None:
    with contextlib.redirect_stdout(sys.stderr):  # mlx-lm prints what it did
        prepared.model, prepared.config = quantize_model(prepared.model, prepared.config, recipe)
    quantize_encoders(prepared.model, prepared.config, recipe)


def _write(out: Path, prepared: Prepared, trust_remote_code: bool, progress: bool) -> None:
    from mlx_lm.utils import get_total_parameters

    model, config = prepared.model, prepared.config
    weights = parameters_of(model)
    parameters = get_total_parameters(model)
    model.update(tree_map(lambda _: mx.array([]), model.parameters()))  # only `weights` holds them now
    prints = Fingerprints()
    with output.new_folder(out) as folder, progress_bar(len(weights), progress) as step:

        def stored(name: str, array: mx.array, data: memoryview) -> None:
            prints.add(name, array, data)
            step()

        output.write_model(folder, weights, parameters, stored)
        section = config["zip2zip"]
        section["fingerprint"] = prints.sides(ModelArgs.from_dict(config).zip_config, config.get("quantization", {}))
        write_json(folder / "config.json", config)
        copy_tokenizer(prepared.tokenizer, folder, prepared.facts, trust_remote_code)
        (folder / "README.md").write_text(prepared.card, encoding="utf-8")
        if prepared.pack is not None:
            save_pack(folder / IN_FOLDER, prepared.pack)
        if prepared.kept is not None:
            (folder / ADAPTERS).mkdir()
            _write_lora(folder / ADAPTERS, prepared.kept, None)


@contextlib.contextmanager
def progress_bar(total: int, progress: bool) -> Iterator[Callable[[], object]]:
    """Gives the function that counts one tensor written; shown on stderr."""
    with tqdm(total=total, desc="Writing", unit="tensor", disable=not progress, file=sys.stderr) as bar:
        yield bar.update


def _write_adapter(out: Path, place: Place, dtype: str | None, progress: bool) -> None:
    lora = read_lora(place.folder)
    with output.new_folder(out) as folder, progress_bar(1, progress) as step:
        _write_lora(folder, lora, DTYPES[dtype] if dtype else None)
        step()


def _write_lora(folder: Path, lora: Lora, dtype: mx.Dtype | None) -> None:
    weights, config = mlx_adapter(lora, dtype)
    output.write_tensors(folder / "adapters.safetensors", weights)
    write_json(folder / "adapter_config.json", config)
