"""Writes a prepared model, or an adapter, as an mlx-lm folder."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map

from mlx_zip.converters import output
from mlx_zip.converters.hub import Place
from mlx_zip.converters.lora import Lora, mlx_adapter, read_lora
from mlx_zip.converters.prepared import DTYPES, Prepared, parameters_of
from mlx_zip.converters.tokenizer_files import copy_tokenizer
from mlx_zip.files import write_json
from mlx_zip.hyper import Fingerprints
from mlx_zip.models import ModelArgs
from mlx_zip.progress import ProgressBar
from mlx_zip.vocab.packs import IN_FOLDER, save_pack

ADAPTERS = "adapters"  # the folder of a kept adapter inside the output


def write_model_folder(out: Path, prepared: Prepared, trust_remote_code: bool, progress: bool) -> None:
    """Writes the prepared model to the new folder `out`, with a fingerprint of the weights that hypertoken rows depend
    on.

    progress: whether to draw a bar on a terminal. Raises `ConversionError`.
    """
    from mlx_lm.utils import get_total_parameters

    model, config = prepared.model, prepared.config
    weights = parameters_of(model)
    parameters = get_total_parameters(model)
    model.update(tree_map(lambda _: mx.array([]), model.parameters()))  # only `weights` holds them now
    prints = Fingerprints()
    with output.new_folder(out) as folder, ProgressBar(len(weights), "tensor", "Writing", shown=progress) as step:

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


def write_adapter(out: Path, place: Place, dtype: str | None, progress: bool) -> None:
    """Writes the PEFT LoRA adapter at `place` as an mlx-lm adapter folder. Raises `ConversionError`.

    dtype: name of the type to cast to, None for the adapter's own.
    """
    lora = read_lora(place.folder)
    with output.new_folder(out) as folder, ProgressBar(1, "tensor", "Writing", shown=progress) as step:
        _write_lora(folder, lora, DTYPES[dtype] if dtype else None)
        step()


def _write_lora(folder: Path, lora: Lora, dtype: mx.Dtype | None) -> None:
    """Writes the two files of an mlx-lm adapter into an existing folder."""
    weights, config = mlx_adapter(lora, dtype)
    output.write_tensors(folder / "adapters.safetensors", weights)
    write_json(folder / "adapter_config.json", config)
