"""Converts a GGUF file to a plain mlx-lm model folder. Tensors of packed types that MLX also has keep exact values."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import mlx_zip
from mlx_zip.converters import output
from mlx_zip.converters.gguf.gguf_config import SETTINGS_TENSORS, gguf_tensor_names, read_config, tensor_row_order
from mlx_zip.converters.gguf.gguf_file import DENSE, GROUP, GgufFile, GgufTensor, gguf_dequantizer, read_gguf
from mlx_zip.converters.gguf.gguf_tokenizer import GgufTokenizer, read_gguf_tokenizer
from mlx_zip.converters.output import LazyTensor
from mlx_zip.converters.prepared import DTYPES, find_mismatches, tensors_by_name
from mlx_zip.converters.quantization import QuantizationRecipe, quantize_model
from mlx_zip.converters.source import ModelPlace
from mlx_zip.converters.tensors import list_some_names
from mlx_zip.converters.tokenizer_files import PROBE, read_tokenizer_facts
from mlx_zip.errors import ConfigError, ConversionError, errors_as
from mlx_zip.files import write_json
from mlx_zip.models.decoder_blocks import raise_if_decoder_unsupported
from mlx_zip.progress import ProgressBar


@dataclass
class _GgufSource:
    """A GGUF file that was read and checked, except for the shapes of its tensors.

    architecture: general.architecture. config: the content of config.json, to be completed. tensors: the file's tensors
    by their names in the model. dtype: name of the dtype of scales and of unpacked tensors.
    """

    place: ModelPlace
    file: GgufFile
    architecture: str
    config: dict[str, Any]
    tokenizer: GgufTokenizer
    tensors: dict[str, GgufTensor]
    dtype: str

    def error(self, what: str) -> ConversionError:
        return ConversionError(f"{self.file.path}: {what}")


def convert_gguf(place: ModelPlace, out: Path, dtype: str | None, recipe: QuantizationRecipe, progress: bool) -> None:
    """Writes the model in a GGUF file to the new folder `out`. On an error no folder is left.

    place: `place.folder` is the file. dtype: dtype of unpacked tensors and of scales; None for that of `_stored_dtype`.
    recipe: if neither `quantize` nor `dequantize` is set, matrices of Q8_0, Q4_0 and Q4_1 stay packed with their exact
    values. Raises `ConversionError` if the file cannot be converted, and `InstallationError` if gguf is missing.
    """
    source = _read_gguf_source(place, dtype)
    model, exact = _quantize_layers(source, _build_gguf_model(source), recipe)
    _complete_gguf_config(source)
    _write_gguf_model(out, source, model, _plan_gguf_tensors(source, model, exact), progress)


def _read_gguf_source(place: ModelPlace, dtype: str | None) -> _GgufSource:
    """Reads and checks everything but the tensors' data. dtype: see `convert_gguf`, which documents the errors too."""
    file = read_gguf(place.folder)
    config, architecture = read_config(file), file.metadata["general.architecture"]
    with errors_as(ConversionError, str(file.path), ConfigError):
        raise_if_decoder_unsupported(config)
    tokenizer = read_gguf_tokenizer(file.path, file.metadata, architecture, config["max_position_embeddings"])
    names = gguf_tensor_names(config, architecture)
    tensors = {names[name]: tensor for name, tensor in file.tensors.items() if name in names}
    source = _GgufSource(place, file, architecture, config, tokenizer, tensors, dtype or _stored_dtype(tensors))
    if unknown := file.tensors.keys() - names.keys() - {*SETTINGS_TENSORS.get(architecture, ())}:
        raise source.error(f"unknown tensors: {list_some_names(unknown)}")
    if (length := tokenizer.library.get_vocab_size()) > config["vocab_size"]:
        raise source.error(f"the tokenizer has {length} ids, and the embedding {config['vocab_size']} rows")
    if any(not tensor.kind.bits and tensor.kind.name not in DENSE for tensor in tensors.values()):
        gguf_dequantizer()  # raises now if the library is missing
    return source


def _stored_dtype(tensors: dict[str, GgufTensor]) -> str:
    """Returns "float32" if all matrices are F32, "bfloat16" if all are F32 or BF16, else "float16"."""
    kinds = {tensor.kind.name for tensor in tensors.values() if len(tensor.shape) > 1}
    return "float32" if kinds == {"F32"} else "bfloat16" if kinds <= {"F32", "BF16"} else "float16"


def _build_gguf_model(source: _GgufSource) -> nn.Module:
    """Returns mlx-lm's model with lazy random weights, which are never computed.

    Raises `ConversionError` unless the file's tensors have the names and shapes of the model's tensors.
    """
    from mlx_lm.utils import _get_classes

    made, arguments = _get_classes(source.config)
    model, tensors = made(arguments.from_dict(source.config)), source.tensors
    if hasattr(model, "sanitize"):
        model.sanitize(dict.fromkeys(tensors))  # drops the head of a tied Gemma 3
    expected = {name: tuple(array.shape) for name, array in tensors_by_name(model).items()}
    problems = find_mismatches({name: (one.name, one.shape) for name, one in tensors.items()}, expected)
    if packed := [t.name for t in tensors.values() if len(t.shape) == 1 and t.kind.name not in DENSE]:
        problems.append(f"vectors in a packed type: {list_some_names(packed)}")
    if problems:
        raise source.error(f"the tensors do not match the metadata; {'; '.join(problems)}")
    model.set_dtype(DTYPES[source.dtype])
    return model


def _quantize_layers(source: _GgufSource, model: nn.Module, recipe: QuantizationRecipe) -> tuple[nn.Module, bool]:
    """Returns the model with its layers quantized for writing, and whether the file's packed values are kept as is.

    Adds the section `quantization` to `source.config`.
    """
    bits = {n.removesuffix(".weight"): tensor.kind.bits for n, tensor in source.tensors.items() if tensor.kind.bits}
    if recipe.quantize:
        if bits:
            warnings.warn("the file's packed values are rounded again; without -q they stay as they are", stacklevel=2)
        with contextlib.redirect_stdout(sys.stderr):  # mlx-lm prints to stdout
            model, source.config = quantize_model(model, source.config, recipe)
        return model, False
    if recipe.dequantize or not bits:
        return model, False
    most = Counter(bits.values()).most_common(1)[0][0]
    how = {path: {"group_size": GROUP, "bits": own, "mode": "affine"} for path, own in bits.items()}
    nn.quantize(model, class_predicate=lambda path, _: how.get(path, False))
    section = {"group_size": GROUP, "bits": most, "mode": "affine"}
    section |= {path: own for path, own in how.items() if own["bits"] != most}
    source.config |= {"quantization": section, "quantization_config": section}
    return model, True


def _complete_gguf_config(source: _GgufSource) -> None:
    metadata = source.file.metadata
    said = {name: metadata.get(f"general.{name}") for name in ("name", "license", "organization", "quantized_by")}
    record = {
        "path": source.place.name,
        "revision": source.place.revision,
        "sha256": source.file.sha256(),
        **{name: value for name, value in said.items() if isinstance(value, str)},
        "types": dict(Counter(tensor.kind.name for tensor in source.tensors.values())),
        "dtype": source.dtype,
        "mlx_zip": mlx_zip.__version__,
    }
    source.config |= {"torch_dtype": source.dtype, "mlx_zip": {"source": record}, **source.tokenizer.special_ids}
    if source.tokenizer.eos_ids:
        source.config["eos_token_id"] = list(source.tokenizer.eos_ids)


def _plan_gguf_tensors(source: _GgufSource, model: nn.Module, exact: bool) -> dict[str, LazyTensor]:
    """Returns all tensors to write by name. A tensor is computed when it is written, so that few are in memory."""
    file, dtype = source.file, DTYPES[source.dtype]
    modules: dict[str, Any] = {path: module for path, module in model.named_modules() if hasattr(module, "scales")}
    makers: dict[str, Callable[[], mx.array]] = {}
    for name, tensor in source.tensors.items():
        path, order = name.removesuffix(".weight"), tensor_row_order(name, source.config, source.architecture)
        shifted = source.architecture.startswith("gemma") and len(tensor.shape) == 1  # a norm plus 1
        dense = functools.partial(file.dense_values, tensor, dtype, order, -1.0 if shifted else 0.0)
        if path not in modules:
            makers[name] = dense
        elif exact:
            scales = functools.partial(file.packed_scales, tensor, order, dtype)
            makers[name] = functools.partial(file.packed_words, tensor, order)
            makers[f"{path}.scales"], makers[f"{path}.biases"] = scales, functools.partial(scales, biases=True)
        else:
            module = modules[path]
            quantized = _QuantizedMatrix(dense, module.group_size, module.bits, module.mode)
            for part, kind in enumerate(("weight", "scales", "biases")):
                makers[f"{path}.{kind}"] = functools.partial(quantized.take, part)
    found = tensors_by_name(model)
    return {name: LazyTensor(tuple(array.shape), array.dtype, makers[name]) for name, array in found.items()}


class _QuantizedMatrix:
    """A matrix that is quantized when its first part is taken; each part can be taken once."""

    def __init__(self, dense: Callable[[], mx.array], group_size: int, bits: int, mode: str) -> None:
        self.dense, self.how = dense, {"group_size": group_size, "bits": bits, "mode": mode}
        self.parts: dict[int, mx.array] = {}

    def take(self, part: int) -> mx.array:
        """Returns words (0), scales (1) or biases (2)."""
        if not self.parts:
            made = mx.quantize(self.dense(), **self.how)
            mx.eval(made)
            self.parts = dict(enumerate(made))
        return self.parts.pop(part)


def _write_gguf_model(
    out: Path, source: _GgufSource, model: nn.Module, weights: dict[str, LazyTensor], progress: bool
) -> None:
    config, tokenizer = source.config, source.tokenizer
    parameters = output.take_weights(model)[1]
    with output.new_model_folder(out) as folder, ProgressBar(len(weights), "tensor", "Writing", shown=progress) as step:
        output.write_model(folder, weights, parameters, lambda *_: step())
        write_json(folder / "config.json", config)
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        write_json(folder / "generation_config.json", {key: config[key] for key in ids if key in config})
        tokenizer.library.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", tokenizer.settings)
        found, meant = read_tokenizer_facts(folder), tokenizer.library.encode(PROBE, add_special_tokens=False).ids
        if found.probe != tuple(meant) or found.length != tokenizer.library.get_vocab_size():
            raise source.error(f"transformers reads the written tokenizer ({found.kind}) with other ids")
        card = _gguf_model_card(config["mlx_zip"]["source"])
        (folder / "README.md").write_text(card, encoding="utf-8", errors="backslashreplace")  # a name may not be UTF-8


def _gguf_model_card(record: dict[str, Any]) -> str:
    licence = record.get("license")
    licence = licence if licence and licence.isascii() and licence.isprintable() else None
    return (
        "---\nlibrary_name: mlx\npipeline_tag: text-generation\ntags:\n- mlx\n"
        + (f"license: {json.dumps(licence)}\n" if licence else "")
        + f"---\n\n# {Path(record['path']).stem}\n\n"
        f"Made by `mlx_zip convert` {mlx_zip.__version__} from the GGUF file `{record['path']}`. The section\n"
        "`mlx_zip` of `config.json` has the file's hash and what it says of itself.\n\n"
        f"Licence, as the file states it: {licence or 'not stated; look where the file comes from'}.\n"
    )
