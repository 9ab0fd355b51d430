"""The files of a checkpoint of random weights in the published package's format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mlx_zip.bench.engines.shape_table import ZipOptions, zip_config
from mlx_zip.bench.engines.torch_engines import random_decoder
from mlx_zip.files import write_json

SHARD = "5GB"  # largest file of the decoder


def write(folder: Path, config: dict[str, Any], options: ZipOptions, tokenizer: Any, dtype: str) -> None:
    """Writes a self-contained checkpoint (format 2): decoder, tokenizer, encoders.

    config: the decoder's. dtype: torch's name of the weights' number type.
    """
    section = zip_config(config, options)["zip2zip"]
    kind = getattr(torch, dtype)
    random_decoder(config, kind).save_pretrained(folder, max_shard_size=SHARD)
    tokenizer.save_pretrained(folder)
    save_file(dict(encoder_weights(section, kind)), folder / "zip2zip_encoders.safetensors")
    names = ("encoder_type", "encoder", "compression")
    fields = {"format_version": 2, "base_model_name_or_path": ".", "position_mode": "compressed"}
    write_json(folder / "zip2zip_config.json", fields | {name: section[name] for name in names})


def encoder_weights(section: dict[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of two transformer encoders. section: `zip2zip` of a config.json."""
    sizes = section["encoder"]
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    matrices = {f"attention.{one}_proj": (width, width) for one in "qkvo"} | {
        "mlp.fc1": (inner, width),
        "mlp.fc2": (width, inner),
    }
    for side in ("input_encoder", "output_encoder"):
        for layer in range(sizes["num_hidden_layers"]):
            start = f"{side}.layers.{layer}"
            for name, shape in matrices.items():
                yield f"{start}.{name}.weight", (torch.randn(shape) * shape[1] ** -0.5).to(dtype)
            for name in ("post_attention_layernorm", "post_mlp_layernorm"):
                yield f"{start}.{name}.weight", torch.ones(width, dtype=dtype)
                yield f"{start}.{name}.bias", torch.zeros(width, dtype=dtype)
