"""`mlx_zip convert`: has the flags of `mlx_lm.convert` and some more."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from mlx_zip.flags import add_pack


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags; imports nothing heavy."""
    add = parser.add_argument
    add("--hf-path", "--model", required=True, help="checkpoint to convert: a folder or a Hugging Face hub id")
    add("--mlx-path", default="mlx_model", help="folder to write; it must not exist yet (default: %(default)s)")
    add("-q", "--quantize", action="store_true", help="quantize decoder, embedding and head (default: not quantized)")
    add("--q-group-size", type=int, help="weights that share a scale in a quantized layer (default: 64, or --q-mode's)")
    add("--q-bits", type=int, help="bits per quantized weight (default: 4, or --q-mode's)")
    add(
        "--q-mode",
        default="affine",
        choices=["affine", "mxfp4", "nvfp4", "mxfp8"],
        help="number format of quantized weights (default: affine)",
    )
    add(
        "--quant-predicate",
        choices=["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"],
        help="recipe that gives layers different numbers of bits (default: all layers alike)",
    )
    add(
        "--dtype",
        choices=["float16", "bfloat16", "float32"],
        help="type of the stored tensors (default: the source decoder's)",
    )
    add("-d", "--dequantize", action="store_true", help="dequantize a converted model that is quantized")
    add("--revision", help="branch, tag or commit of a hub checkpoint (zip2zip++ releases: hf) (default: main)")
    add("--upload-repo", help="hub repository to upload the converted model to (default: no upload)")
    add("--trust-remote-code", action="store_true", help="run and copy Python code that comes with the tokenizer")
    add("--keep-adapter", action="store_true", help="keep a LoRA unmerged, in the folder adapters/ of the output")
    add("--lora-only", action="store_true", help="convert a plain PEFT LoRA to an mlx-lm adapter folder")
    add(
        "--canonical",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="forbid ids that the compressor would never write, unless together they hold over half the probability "
        "(default: as in the source; published checkpoints do not)",
    )
    add_pack(
        add,
        "pack (.json, .npz or .npy) that every request of the written model begins with; several packs are merged; "
        "rows that were tuned for the written weights are kept (default: the source's pack, if it has one)",
        aliases=["--codebook"],
    )
    add(
        "--policy",
        choices=["freeze", "lru", "use-count"],
        help="what a full codebook does. freeze: stop adding entries; lru: evict the least recently used entry; "
        "use-count: evict the least often used one. Training and canonical decoding need freeze "
        "(default: as in the source; published checkpoints freeze)",
    )
    add("--encoder-bits", type=int, choices=[4, 8], help="bits per weight of the hyper-encoders (default: unquantized)")


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
    """Prints the converters' warnings on stderr, each as one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _print_warning
        yield


def _print_warning(message: Any, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
