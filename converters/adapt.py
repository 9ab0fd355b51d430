"""`adapt`: writes a smaller model folder for a tokenizer that was adapted from the model's own.

Every kept id was an id of the model, so nothing is trained: rows of the embedding and the head are selected. MLX packs
quantized weights along the last axis, so rows of weight, scales and biases are selected exactly, without quantizing
again. Every id in the config files is renumbered. If an id there is not kept, `ConversionError` is raised.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_zip
from mlx_zip.config import parse_zip_section
from mlx_zip.converters import output, source
from mlx_zip.converters.prepared import ADAPTERS
from mlx_zip.converters.tensors import read_folder_tensors, read_json_object_strictly
from mlx_zip.converters.tokenizer_files import CONFIG, TEMPLATES, read_tokenizer_facts
from mlx_zip.errors import ConversionError
from mlx_zip.files import write_json
from mlx_zip.packs.pack import IN_FOLDER
from mlx_zip.vocab.adaptbpe.adapted import AdaptedVocabulary, read_adapted_vocabulary
from mlx_zip.vocab.adaptbpe.base_vocabulary import FILE, read_base_vocabulary
from mlx_zip.vocab.adaptbpe.tokenizer_json import kept_ids_tokenizer_json

_FLAG = "--out"  # of `mlx_zip vocab adapt convert`, for messages
ROWS = ("embed_tokens", "lm_head")  # modules whose tensors have a row per id
_PAIRS = {"forced_decoder_ids": 1, "sequence_bias": 0}  # config key whose value is a list of pairs: index of the ids
_COPIED = ("special_tokens_map.json", "chat_template.json", "chat_template.jinja")  # files without ids
_ENDINGS = ("_token_id", "_token_ids", "_token_index", "suppress_tokens", "bad_words_ids", "force_words_ids")


def adapt(model: str | Path, vocabulary: str | Path, mlx_path: str | Path, progress: bool = True) -> Path:
    """Writes the smaller model to the new folder `mlx_path` and returns that path. On an error no folder is left.

    model: local folder of a plain mlx-lm model or a converted zip2zip model, quantized or not, with a byte-level
    tokenizer.json. vocabulary: the file that `mlx_zip vocab adapt learn` wrote for that tokenizer. Raises
    `ConversionError`, `ConfigError` or `DataError` if the model cannot be adapted, naming the file, tensor or key.
    """
    out, place = Path(mlx_path), source.locate_local_model(model)
    output.refuse_existing_path(out, _FLAG)
    if place is None:
        raise ConversionError(f"{model} is not a folder")
    if (place.folder / ADAPTERS).is_dir():
        raise ConversionError(f"{place.name} keeps an adapter; merge it first (mlx_zip convert without --keep-adapter)")
    base, kept = read_base_vocabulary(place.folder), read_adapted_vocabulary(vocabulary)
    kept.check_base(base)
    if kept.splitter.added != base.splitter.added:
        raise ConversionError(
            f"{vocabulary}: added tokens differ from those of {place.name}: learn the vocabulary again"
        )
    new_ids = {int(old): new for new, old in enumerate(kept.ids)}
    config = _adapted_config(read_json_object_strictly(place.folder / "config.json"), new_ids)
    weights = _select_rows(read_folder_tensors(place.folder), kept.ids)
    files = _adapt_json_files(place.folder, kept, base.source, new_ids)
    if (place.folder / IN_FOLDER).exists():
        warnings.warn(f"the tuned rows in {IN_FOLDER} are left out: they were tuned for other weights", stacklevel=2)
    config["adapted"] = {"from": place.name, "vocabulary": kept.fingerprint, "mlx_zip": mlx_zip.__version__}
    with output.new_model_folder(out, _FLAG) as folder:
        parameters = _count_parameters(weights, config.get("quantization", {}))
        output.write_model(folder, weights, parameters, config, progress)
        for name, data in files.items():
            write_json(folder / name, data)
        kept.save(folder / FILE)
        for name in _COPIED:
            if (place.folder / name).is_file():
                shutil.copyfile(place.folder / name, folder / name)
        if (place.folder / TEMPLATES).is_dir():
            shutil.copytree(place.folder / TEMPLATES, folder / TEMPLATES, copy_function=shutil.copyfile)
        if (length := read_tokenizer_facts(folder).length) > len(kept):
            raise ConversionError(
                f"transformers finds {length} ids in the new tokenizer, of which {len(kept)} have a row: {CONFIG} or "
                f"special_tokens_map.json names tokens that {place.name}'s tokenizer.json has not among its added ones"
            )
    return out


def _select_rows(weights: dict[str, mx.array], ids: Any) -> dict[str, mx.array]:
    """Returns all tensors by name, lazily. The embedding and the head have only the rows of `ids`, the kept old ids.

    Raises `ConversionError` if another tensor has as many rows as the embedding: its rows might also belong to ids.
    """
    rows = {name: array for name, array in weights.items() if set(name.split(".")[:-1]) & set(ROWS)}
    if not rows:
        raise ConversionError(f"no tensor of {' or '.join(ROWS)} is there to select rows of")
    heights = {array.shape[0] for array in rows.values()}
    if len(heights) != 1:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in sorted(rows.items()))
        raise ConversionError(f"the embedding and the head have different numbers of rows: {shapes}")
    if int(ids[-1]) >= (height := heights.pop()):
        raise ConversionError(f"the vocabulary keeps id {int(ids[-1])}, but the embedding has {height} rows")
    if others := sorted(name for name in weights.keys() - rows.keys() if weights[name].shape[:1] == (height,)):
        raise ConversionError(f"{', '.join(others)}: {height} rows, as the embedding has; not known to be one per id")
    chosen = mx.array(np.asarray(ids))
    return weights | {name: mx.take(array, chosen, axis=0) for name, array in rows.items()}


def _count_parameters(weights: Mapping[str, mx.array], quantization: Mapping[str, Any]) -> int:
    """Returns a model's number of parameters, counting each weight of a quantized layer as one.

    quantization: the section `quantization` of config.json, {} for an unquantized model.
    """
    packed = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    count = 0
    for name, array in weights.items():
        layer, _, kind = name.rpartition(".")
        if layer not in packed or kind == "bias":
            count += array.size
        elif kind == "weight":
            own = quantization.get(layer)
            count += array.size * 32 // (own if isinstance(own, dict) else quantization)["bits"]
    return count


def _adapted_config(config: dict[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """Returns config.json with the new vocabulary size and ids. new: old id -> new id.

    Raises `ConversionError` if `config` has no `vocab_size` of its own, as in a multimodal model.
    """
    if "vocab_size" not in config:
        raise ConversionError("config.json has no vocab_size of its own: only plain text models can be adapted")
    made = {**_translate_ids_in_json("config.json", config, new), "vocab_size": len(new)}
    if "zip2zip" in config:
        made["zip2zip"] = _adapt_zip_section(config["zip2zip"], new)
    return made


def _adapt_zip_section(section: dict[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """Returns config.json's zip2zip section with new ids. new: old id -> new id.

    Drops each entry of the model's pack that contains an id that is not kept, and warns.
    """
    old = parse_zip_section(section)
    if high := [i for i in new if i >= old.vocab_size]:
        raise ConversionError(f"the vocabulary keeps id {high[0]}, but hypertokens begin at {old.vocab_size}")
    if old.pad_id not in new:
        raise ConversionError(f"the codec's pad id {old.pad_id} is not kept: make it an added token and adapt again")
    start = [tuple(new[i] for i in entry) for entry in old.start or () if all(i in new for i in entry)]
    if old.start and len(start) < len(old.start):
        lost = len(old.start) - len(start)
        warnings.warn(
            f"{lost} entries of the pack hold ids that are not kept; these entries are left out", stacklevel=2
        )
    disabled = tuple(sorted(new[i] for i in old.disabled_ids if i in new))
    made = replace(old, vocab_size=len(new), pad_id=new[old.pad_id], disabled_ids=disabled, start=tuple(start) or None)
    kept = {key: value for key, value in section.items() if key not in ("start", "fingerprint")}
    return {**kept, **made.to_dict()}


def _adapt_json_files(
    folder: Path, kept: AdaptedVocabulary, source: Mapping[str, Any] | None, new: Mapping[int, int]
) -> dict[str, Any]:
    """Returns the JSON files of the tokenizer and of generation with new ids, by file name.

    folder: the model's folder. source: content of its tokenizer.json, None if it has none. new: old id -> new id. Omits
    vocab.json and other files that tokenizer.json makes superfluous.
    """
    files = {"tokenizer.json": kept_ids_tokenizer_json(kept, source)}
    own = folder / CONFIG
    if own.is_file():
        data = _translate_ids_in_json(CONFIG, read_json_object_strictly(own), new)
        if "added_tokens_decoder" in data:
            known = data["added_tokens_decoder"].items()
            ids = _translate_ids(
                f"{CONFIG}: added_tokens_decoder",
                ((_content_of_token(token), _parse_id_key(i)) for i, token in known),
                new,
            )
            data["added_tokens_decoder"] = dict(zip(map(str, ids), dict(known).values(), strict=True))
        files[CONFIG] = data
    generation = folder / "generation_config.json"
    if generation.is_file():
        files[generation.name] = _translate_ids_in_json(generation.name, read_json_object_strictly(generation), new)
    added = folder / "added_tokens.json"
    if added.is_file():
        known = read_json_object_strictly(added)
        files[added.name] = dict(zip(known, _translate_ids(added.name, known.items(), new), strict=True))
    return files


def _translate_ids(place: str, tokens: Iterable[tuple[str, Any]], new: Mapping[int, int]) -> list[int]:
    """Returns the new ids of (token, old id) pairs. place: file and key, for messages. new: old id -> new id.

    Raises `ConversionError` if a token is not kept: transformers would give that token an id beyond the embedding's
    last row.
    """
    tokens = list(tokens)
    for token, i in tokens:
        if type(i) is not int or i not in new:
            raise ConversionError(
                f"{place} has {token!r}, id {i}, which the vocabulary does not keep: list it among the added_tokens of "
                "tokenizer.json (transformers does on saving) and adapt again"
            )
    return [new[i] for _, i in tokens]


def _parse_id_key(key: str) -> int | str:
    return int(key) if key.isdecimal() else key


def _content_of_token(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _translate_ids_in_json(file: str, data: Mapping[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """Returns the content of a JSON file with new ids under every key that holds ids. new: old id -> new id.

    file: the file's name, for messages. Raises `ConversionError` if such a key holds an id that is not kept.
    """

    def value_of(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [value_of(key, item) for item in value]
        if type(value) is not int:
            return value
        if value not in new:
            raise ConversionError(f"{file}: {key} is {json.dumps(value)}, an id that the vocabulary does not keep")
        return new[value]

    made = {key: value_of(key, value) if key.endswith(_ENDINGS) else value for key, value in data.items()}
    for key in _PAIRS.keys() & {key for key, value in data.items() if value}:
        value, side = data[key], _PAIRS[key]
        if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
            raise ConversionError(f"{file}: {key} is no list of pairs, the form that is read here")
        made[key] = [[value_of(key, item) if i == side else item for i, item in enumerate(pair)] for pair in value]
    return made
