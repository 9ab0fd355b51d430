"""Converts a GGUF file to a plain mlx-lm model folder. Packed values that MLX has a form for are not rounded again."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

import mlx_zip
from mlx_zip.converters import output
from mlx_zip.converters.gguf_config import SETTINGS_TENSORS, read_config, row_order, tensor_names
from mlx_zip.converters.gguf_file import DENSE, GROUP, GgufFile, Tensor, dequantizer, read_gguf
from mlx_zip.converters.hub import Place
from mlx_zip.converters.output import Planned
from mlx_zip.converters.prepared import DTYPES, parameters_of
from mlx_zip.converters.quantization import Recipe, quantize_model
from mlx_zip.converters.tensors import some
from mlx_zip.converters.tokenizer_files import PROBE, read_tokenizer
from mlx_zip.errors import ConfigError, ConversionError, DataError
from mlx_zip.files import write_json
from mlx_zip.models import check_config
from mlx_zip.progress import ProgressBar
from mlx_zip.text.gguf_tokenizer import GgufTokenizer, read_gguf_tokenizer


def convert_gguf(place: Place, out: Path, dtype: str | None, recipe: Recipe, progress: bool) -> None:
    """Writes the model in a GGUF file as the new folder `out`, which appears whole or not at all.

    place: its `folder` is the file. dtype: type of the tensors that are not packed, and of scales; None for float16,
    or the matrices' own type if none is packed. recipe: without `quantize` and `dequantize`, matrices of Q8_0, Q4_0 and
    Q4_1 stay packed with the values they have. Raises `ConversionError`, and `InstallationError` if a tensor type needs
    the library gguf.
    """
    file = read_gguf(place.folder)
    architecture = file.metadata.get("general.architecture")
    try:
        config = read_config(file)
        check_config(config)
        tokenizer = read_gguf_tokenizer(file.path, file.metadata, architecture, config["max_position_embeddings"])
    except (ConfigError, DataError) as error:
        where = "" if str(error).startswith(str(file.path)) else f"{file.path}: "
        raise ConversionError(f"{where}{error}") from error
    if tokenizer.library.get_vocab_size() > config["vocab_size"]:
        raise ConversionError(
            f"{file.path}: the tokenizer has {tokenizer.library.get_vocab_size()} ids, and the embedding "
            f"{config['vocab_size']} rows"
        )
    tensors = {name: file.tensors[source] for name, source in _sources(file, config, architecture).items()}
    if any(not tensor.kind.bits and tensor.kind.name not in DENSE for tensor in tensors.values()):
        dequantizer()  # is missing, before anything is written
    stored = dtype or _own_dtype(tensors)
    model = _checked_model(file, config, tensors, DTYPES[stored])
    model, config, exact = _packed(model, config, tensors, recipe)
    config["torch_dtype"] = stored
    config["eos_token_id"] = list(tokenizer.eos_ids)
    config |= tokenizer.special_ids
    config["mlx_zip"] = {"source": _record(place, file, tensors, stored)}
    _write(out, file, model, config, tokenizer, _planned(file, model, tensors, architecture, config, exact), progress)


def _sources(file: GgufFile, config: dict[str, Any], architecture: str) -> dict[str, str]:
    """Returns the file's name for each of the model's names; tensors that hold settings are left out.

    Raises `ConversionError` listing tensors that are not known.
    """
    names = tensor_names(config, architecture)
    if unknown := file.tensors.keys() - names.keys() - {*SETTINGS_TENSORS.get(architecture, ())}:
        raise ConversionError(f"{file.path}: unknown tensors: {some(unknown)}")
    return {names[name]: name for name in file.tensors if name in names}


def _own_dtype(tensors: dict[str, Tensor]) -> str:
    """Returns the name of the type that holds the matrices' values: float16 unless none is packed or in 16 bits."""
    kinds = {tensor.kind.name for tensor in tensors.values() if len(tensor.shape) > 1}
    return "float32" if kinds == {"F32"} else "bfloat16" if kinds <= {"F32", "BF16"} else "float16"


def _checked_model(file: GgufFile, config: dict[str, Any], tensors: dict[str, Tensor], dtype: mx.Dtype) -> nn.Module:
    """Returns mlx-lm's model with lazy random weights, of which none is ever computed.

    Raises `ConversionError` unless its tensors have the names and shapes of the file's.
    """
    from mlx_lm.utils import _get_classes

    made, arguments = _get_classes(config)
    model = made(arguments.from_dict(config))
    if hasattr(model, "sanitize"):
        model.sanitize(dict.fromkeys(tensors))  # drops the head of a tied model
    expected = {name: tuple(array.shape) for name, array in parameters_of(model).items()}
    problems = []
    if unknown := tensors.keys() - expected.keys():
        problems.append(f"unknown: {some(tensors[name].name for name in unknown)}")
    if missing := expected.keys() - tensors.keys():
        problems.append(f"missing: {some(missing)}")
    wrong = [name for name in expected.keys() & tensors.keys() if tensors[name].shape != expected[name]]
    if wrong:
        shapes = (f"{tensors[n].name} {list(tensors[n].shape)} instead of {list(expected[n])}" for n in wrong)
        problems.append(f"misshapen: {some(shapes)}")
    if packed := [t.name for t in tensors.values() if len(t.shape) == 1 and t.kind.name not in DENSE]:
        problems.append(f"vectors in a packed type: {some(packed)}")
    if problems:
        raise ConversionError(f"{file.path}: the tensors do not match the metadata; {'; '.join(problems)}")
    model.set_dtype(dtype)
    return model


def _packed(
    model: nn.Module, config: dict[str, Any], tensors: dict[str, Tensor], recipe: Recipe
) -> tuple[nn.Module, dict[str, Any], bool]:
    """Returns the model with the packed layers that are to be written, its config, and whether they hold the file's
    own levels.
    """
    bits = {name.removesuffix(".weight"): tensor.kind.bits for name, tensor in tensors.items() if tensor.kind.bits}
    if recipe.quantize:
        if bits:
            warnings.warn("the file's packed values are rounded again; without -q they stay as they are", stacklevel=2)
        with contextlib.redirect_stdout(sys.stderr):  # mlx-lm prints what it did
            return *quantize_model(model, config, recipe), False
    if recipe.dequantize or not bits:
        if recipe.dequantize and not bits:
            warnings.warn("no tensor is packed: -d (dequantize) changes nothing", stacklevel=2)
        return model, config, False
    most = Counter(bits.values()).most_common(1)[0][0]
    how = {path: {"group_size": GROUP, "bits": own, "mode": "affine"} for path, own in bits.items()}
    nn.quantize(model, class_predicate=lambda path, _: how.get(path, False))
    section = {"group_size": GROUP, "bits": most, "mode": "affine"}
    section |= {path: own for path, own in how.items() if own["bits"] != most}
    return model, {**config, "quantization": section, "quantization_config": section}, True


def _planned(
    file: GgufFile,
    model: nn.Module,
    tensors: dict[str, Tensor],
    architecture: str,
    config: dict[str, Any],
    exact: bool,
) -> dict[str, Any]:
    """Returns every tensor to write by name, made when it is written, so that few are in memory at a time."""
    modules = {path: module for path, module in model.named_modules() if hasattr(module, "scales")}
    makers: dict[str, Callable[[], mx.array]] = {}
    shapes = parameters_of(model)
    for name, tensor in tensors.items():
        path, order = name.removesuffix(".weight"), row_order(name, config, architecture)
        shift = -1.0 if architecture.startswith("gemma") and len(tensor.shape) == 1 else 0.0  # they are stored plus 1
        dense = functools.partial(file.dense, tensor, shapes[name].dtype, order, shift)
        if path not in modules:
            makers[name] = dense
        elif exact:
            scales = functools.partial(file.scales, tensor, order, shapes[f"{path}.scales"].dtype)
            makers[name] = functools.partial(file.words, tensor, order)
            makers[f"{path}.scales"], makers[f"{path}.biases"] = scales, functools.partial(scales, biases=True)
        else:
            module: Any = modules[path]
            dense = functools.partial(file.dense, tensor, DTYPES[config["torch_dtype"]], order)
            quantized = _Quantized(dense, module.group_size, module.bits, module.mode)
            for part, kind in enumerate(("weight", "scales", "biases")):
                makers[f"{path}.{kind}"] = functools.partial(quantized.take, part)
    return {name: Planned(tuple(array.shape), array.dtype, makers[name]) for name, array in shapes.items()}


class _Quantized:
    """A matrix that is quantized when its first part is asked for; each part is given once and then forgotten."""

    def __init__(self, dense: Callable[[], mx.array], group_size: int, bits: int, mode: str) -> None:
        self.dense, self.how, self.parts = dense, (group_size, bits, mode), {}

    def take(self, part: int) -> mx.array:
        """Returns words (0), scales (1) or biases (2)."""
        if not self.parts:
            group_size, bits, mode = self.how
            made = mx.quantize(self.dense(), group_size=group_size, bits=bits, mode=mode)
            mx.eval(made)
            self.parts = dict(enumerate(made))
        return self.parts.pop(part)


def _record(place: Place, file: GgufFile, tensors: dict[str, Tensor], dtype: str) -> dict[str, Any]:
    """Returns what config.json says of where the model comes from."""
    said = {name: file.metadata.get(f"general.{name}") for name in ("name", "license", "organization", "quantized_by")}
    return {
        "path": place.name,
        "revision": place.revision,
        "sha256": file.sha256(),
        **{name: value for name, value in said.items() if isinstance(value, str)},
        "types": dict(Counter(tensor.kind.name for tensor in tensors.values())),
        "dtype": dtype,
        "mlx_zip": mlx_zip.__version__,
    }


def _write(
    out: Path,
    file: GgufFile,
    model: nn.Module,
    config: dict[str, Any],
    tokenizer: GgufTokenizer,
    weights: dict[str, Any],
    progress: bool,
) -> None:
    """Writes the folder, whole or not at all."""
    from mlx_lm.utils import get_total_parameters

    parameters = get_total_parameters(model)
    model.update(tree_map(lambda _: mx.array([]), model.parameters()))
    with output.new_folder(out) as folder, ProgressBar(len(weights), "tensor", "Writing", shown=progress) as step:
        output.write_model(folder, weights, parameters, lambda *_: step())
        write_json(folder / "config.json", config)
        ids = {
            key: config[key]
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
            if config.get(key) not in (None, [])
        }
        write_json(folder / "generation_config.json", ids)
        tokenizer.library.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", tokenizer.settings)
        _check_tokenizer(file, folder, tokenizer)
        (folder / "README.md").write_text(_card(config), encoding="utf-8")


def _check_tokenizer(file: GgufFile, folder: Path, tokenizer: GgufTokenizer) -> None:
    """Raises `ConversionError` unless transformers reads the written tokenizer as the one that was meant."""
    found = read_tokenizer(folder)
    meant = tuple(tokenizer.library.encode(PROBE, add_special_tokens=False).ids)
    if found.probe != meant or found.length != tokenizer.library.get_vocab_size():
        raise ConversionError(f"{file.path}: transformers reads the written tokenizer ({found.kind}) with other ids")


def _card(config: dict[str, Any]) -> str:
    """Returns the text of README.md."""
    source = config["mlx_zip"]["source"]
    licence = source.get("license")
    named = f"license: {licence}\n" if licence and licence.isascii() and licence.isprintable() else ""
    return (
        f"---\nlibrary_name: mlx\npipeline_tag: text-generation\ntags:\n- mlx\n{named}---\n\n"
        f"# {Path(source['path']).stem}\n\n"
        f"Made by `mlx_zip convert` {mlx_zip.__version__} from the GGUF file `{source['path']}`. The section `mlx_zip` of\n"
        "`config.json` has the file's hash and what it says of itself.\n\n"
        f"Licence, as the file states it: {licence or 'not stated; look where the file comes from'}.\n"
    )
