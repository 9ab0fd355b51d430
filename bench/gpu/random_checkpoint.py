"""Writes a checkpoint of random weights for the published zip2zip package, to be timed next to mlx_zip's shapes.

This bench needs torch and transformers, but neither MLX nor the package. Weights are made on the GPU if torch finds
one. Sizes, encoders and codebook are those of `--shape` in other benches; only the values of the weights differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_zip.arguments import default_flags
from mlx_zip.bench.engines.shape_table import SHAPES, ZipOptions, config_with_hypertokens, narrow_shape_config
from mlx_zip.errors import MlxZipError, failure_reason, missing_library_error
from mlx_zip.files import atomic_folder, check_writable, write_json
from mlx_zip.layout import Layout
from mlx_zip.text.tokenizers import load_tokenizer

if TYPE_CHECKING:
    import torch

SHARD = "5GB"  # maximum size of a file of the decoder's weights
DTYPES = {"16": "bfloat16", "float32": "float32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench checkpoint`."""
    add = parser.add_argument
    flag = default_flags(add)
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write; it must not exist")
    flag("--shape", "phi-3.5-mini", "layer sizes", choices=tuple(SHAPES))
    flag("--precision", "16", "number type of the weights: 16 is bfloat16", choices=tuple(DTYPES))
    add("--tokenizer", default="stories", help="tokenizer to copy: folder or hub id (default: stories, bundled)")
    add("--rehearse", action="store_true", help="write the narrow shape of `bench nvidia --rehearse`")


def run(args: argparse.Namespace) -> int:
    """Writes the folder and prints its size. Raises `MlxZipError` if it cannot be written."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise missing_library_error("bench checkpoint", "torch", extra="cuda") from error
    config = narrow_shape_config(SHAPES[args.shape]) if args.rehearse else SHAPES[args.shape]
    tokenizer = load_tokenizer(args.tokenizer)
    Layout(config["vocab_size"], 0, config["vocab_size"]).check_tokenizer(len(tokenizer))
    if args.out.exists():
        raise MlxZipError(f"--out {args.out} exists already")
    check_writable(args.out)
    try:
        with atomic_folder(args.out, replace=False) as partial:
            write_checkpoint(partial, config, ZipOptions(), tokenizer, DTYPES[args.precision])
    except OSError as error:
        raise MlxZipError(f"--out {args.out} cannot be written: {failure_reason(error)}") from error
    size = sum(file.stat().st_size for file in args.out.iterdir())
    print(f"{args.out}: random weights of {args.shape}, {size / 1e6:.0f} MB", file=sys.stderr)
    return 0


def write_checkpoint(folder: Path, config: dict[str, Any], options: ZipOptions, tokenizer: Any, dtype: str) -> None:
    """Writes a self-contained checkpoint in the published package's format 2: decoder, tokenizer, encoders.

    config: the decoder's config.json. dtype: torch's name of the weights' dtype.
    """
    import torch
    from safetensors.torch import save_file

    from mlx_zip.bench.engines.torch_engines import make_random_decoder

    section = config_with_hypertokens(config, options)["zip2zip"]
    kind = getattr(torch, dtype)
    make_random_decoder(config, kind).save_pretrained(folder, max_shard_size=SHARD)
    tokenizer.save_pretrained(folder)
    save_file(dict(random_encoder_weights(section, kind)), folder / "zip2zip_encoders.safetensors")
    names = ("encoder_type", "encoder", "compression")
    fields = {"format_version": 2, "base_model_name_or_path": ".", "position_mode": "compressed"}
    write_json(folder / "zip2zip_config.json", fields | {name: section[name] for name in names})


def random_encoder_weights(section: dict[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of both transformer encoders. section: the section `zip2zip` of a config.json."""
    import torch

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
