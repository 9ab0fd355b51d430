"""`mlx_zip convert`: the flags of `mlx_lm.convert`, and some of ours."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from mlx_zip.flags import add_pack


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags; imports nothing heavy."""
    add = parser.add_argument
    add("--hf-path", "--model", required=True, help="Checkpoint to convert: a folder or a Hugging Face hub id.")
    add("--mlx-path", default="mlx_model", help="Folder to write; it must not exist. Default: %(default)s.")
    add("-q", "--quantize", action="store_true", help="Quantize decoder, embedding and head.")
    add("--q-group-size", type=int, help="Group size for quantization.")
    add("--q-bits", type=int, help="Bits per weight for quantization.")
    add("--q-mode", default="affine", choices=["affine", "mxfp4", "nvfp4", "mxfp8"], help="Quantization mode.")
    add(
        "--quant-predicate",
        choices=["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"],
        help="Mixed-bit quantization recipe.",
    )
    add("--dtype", choices=["float16", "bfloat16", "float32"], help="Type to store. Default: the source's.")
    add("-d", "--dequantize", action="store_true", help="Dequantize a converted, quantized model.")
    add("--revision", help="Branch, tag or commit of a hub checkpoint (zip2zip++ releases: hf).")
    add("--upload-repo", help="Hub repository to upload the converted model to.")
    add("--trust-remote-code", action="store_true", help="Run and copy the tokenizer's own code.")
    add("--keep-adapter", action="store_true", help="Keep a LoRA unmerged, in adapters/ inside the output.")
    add("--lora-only", action="store_true", help="The checkpoint is a plain PEFT LoRA; write an mlx-lm adapter folder.")
    add(
        "--canonical",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Whether ids that the compressor would not have written get no probability, unless they hold most of it. "
        "Default: as it was, upstream no.",
    )
    add_pack(
        add,
        "Pack (.json, .npz or .npy) that every request of the written model begins with; several packs are merged. "
        "Rows that were tuned for the written weights are kept. Default: the source's pack, if it has one.",
        aliases=["--codebook"],
    )
    add(
        "--policy",
        choices=["freeze", "lru", "use-count"],
        help="What a full codebook does: nothing any more, or a new entry takes the place of the one used longest ago, "
        "or least often. Training and canonical decoding need freeze. Default: as it was, upstream freeze.",
    )
    add("--encoder-bits", type=int, choices=[4, 8], help="Quantize the hyper-encoders too.")


def run(args: argparse.Namespace) -> int:
    """Converts and prints the folder's path. Raises `MlxZipError`."""
    from mlx_zip.converters import convert

    flags = (
        "hf_path",
        "mlx_path",
        "quantize",
        "q_group_size",
        "q_bits",
        "q_mode",
        "quant_predicate",
        "dtype",
        "dequantize",
        "revision",
        "upload_repo",
        "trust_remote_code",
        "keep_adapter",
        "lora_only",
        "encoder_bits",
        "canonical",
        "policy",
    )
    with warnings_on_stderr():
        print(convert(pack=args.pack, **{flag: getattr(args, flag) for flag in flags}))
    return 0


@contextlib.contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Shows the converters' warnings, each as one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _print_warning
        yield


def _print_warning(message: Any, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
