"""`mlx_zip convert`: has the flags of `mlx_lm.convert` and some more."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator
from inspect import signature
from typing import Any

from mlx_zip.arguments import add_pack_flag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags; imports nothing heavy."""
    add = parser.add_argument
    add(
        "--hf-path",
        "--model",
        required=True,
        help="checkpoint to convert: folder, hub id, or GGUF file, which "
        "may lie in a folder or on the hub (owner/name/FILE.gguf)",
    )
    add(
        "--base",
        metavar="PATH",
        help="base model to use instead of the one that the checkpoint names: folder, hub id or GGUF file, whose "
        "packed weights are unpacked to float32 (default: the one named)",
    )
    add("--mlx-path", default="mlx_model", help="folder to write; it must not exist yet (default: %(default)s)")
    add(
        "-q",
        "--quantize",
        action="store_true",
        help="quantize decoder, embedding and head, and the hyper-encoders to --encoder-bits (default: not quantized; "
        "GGUF: as in the file)",
    )
    add(
        "--q-group-size",
        type=int,
        help="number of weights that share a scale in a quantized layer (default: the --q-mode's own, 64 for affine)",
    )
    add("--q-bits", type=int, help="bits per quantized weight (default: the --q-mode's own, 4 for affine)")
    add(
        "--q-mode",
        default="affine",
        choices=["affine", "mxfp4", "nvfp4", "mxfp8"],
        help="number format of quantized weights (default: affine)",
    )
    add(
        "--quant-predicate",
        choices=["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"],
        help="mlx-lm recipe that gives some layers more bits than others, named by the two numbers of bits (default: "
        "all layers alike)",
    )
    add(
        "--dtype",
        choices=["float16", "bfloat16", "float32"],
        help="type of the tensors to write (default: that of the checkpoint's decoder; GGUF: float16, or the type of "
        "all matrices if none is packed)",
    )
    add(
        "-d",
        "--dequantize",
        action="store_true",
        help="dequantize the model of --hf-path, a quantized converted one or a GGUF file",
    )
    add(
        "--revision",
        help="branch, tag or commit of a hub checkpoint; zip2zip++ releases are in the branch hf (default: main)",
    )
    add("--upload-repo", help="hub repository to upload the converted model to (default: no upload)")
    add(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with the tokenizer, and copy it to the output (default: off)",
    )
    add(
        "--keep-adapter",
        action="store_true",
        help="write the checkpoint's LoRA adapter to the folder adapters/ of the output, instead of merging it",
    )
    add(
        "--lora-only",
        action="store_true",
        help="convert a PEFT LoRA adapter without hypertokens to an mlx-lm adapter folder; no model is written",
    )
    add(
        "--canonical",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="forbid ids that the compressor would never write, unless together they hold over half the probability "
        "(default: as in the checkpoint; published ones do not)",
    )
    add_pack_flag(
        add,
        "pack file (.json, .npz or .npy): every codebook of the written model begins with its entries. If the pack has "
        "tuned rows, they must belong to the written weights. Repeat the flag to merge packs (default: the "
        "checkpoint's own pack, if it has one)",
    )
    add(
        "--policy",
        choices=["freeze", "lru", "use-count"],
        help="what a full codebook does. freeze: stop adding entries; lru: evict the least recently used entry; "
        "use-count: evict the least often used one. Training and canonical decoding need freeze "
        "(default: as in the checkpoint; published ones freeze)",
    )
    add(
        "--encoder-bits",
        type=lambda word: int(word) if word.isdecimal() else word,
        choices=[4, 8, "none"],
        help="bits per quantized weight of the hyper-encoders; none: leave them unquantized (default: 8 with -q, else "
        "none)",
    )


def run(args: argparse.Namespace) -> int:
    """Converts the checkpoint and prints the path of the written folder; returns 0. Raises `MlxZipError` on failure."""
    from mlx_zip.converters import convert

    named = signature(convert).parameters.keys() & vars(args).keys()  # a flag sets the argument of its name
    with warnings_on_stderr():
        print(convert(**{name: getattr(args, name) for name in named}))
    return 0


@contextlib.contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Context manager: prints the block's warnings on stderr, each as one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _print_warning_line
        yield


def _print_warning_line(message: Any, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
