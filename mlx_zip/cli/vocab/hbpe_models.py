"""`mlx_zip vocab hbpe fit`, `generate` and `evaluate`: train, run and measure models that read patches."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_zip.arguments import add_limit_bytes, add_separator, check_at_least
from mlx_zip.cli.actions import DATA
from mlx_zip.cli.generation import read_prompt
from mlx_zip.cli.training import add_some, stopped
from mlx_zip.progress import counted
from mlx_zip.vocab.hbpe.measures import FIT_LATENT, FIT_LOCAL, read_tower

if TYPE_CHECKING:
    from mlx_zip.models.patches.generation import Written

_SIZES = ("vocab_size", "patch_size", "mode", "context", "latent", "local")
_SETTINGS = {
    "iters": 1000,
    "batch_size": 8,
    "learning_rate": 1e-3,
    "warmup": 0,
    "seed": 0,
    "steps_per_report": 10,
    "save_every": 100,
}
_PURPOSES = {
    "iters": "number of optimizer steps in the whole run",
    "batch_size": "number of windows per step",
    "learning_rate": "peak learning rate of the cosine schedule, which ends at a twentieth of it",
    "seed": "random seed of new weights and of the order of the windows",
}


def fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `fit`."""
    add = parser.add_argument
    add(
        "out",
        metavar="RUN",
        help="folder for checkpoints, metrics.jsonl and the finished model/; a run found there is continued",
    )
    _add_data(add, "texts to learn from")
    add(
        "--valid",
        nargs="+",
        default=[],
        metavar="FILE",
        help=f"texts to measure the finished model on: {DATA} (default: none)",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer whose tokens become patches: tokenizer.json or a folder with one, vocab.bpe or merges.txt "
        "(default: a BPE learned from --data)",
    )
    add(
        "--vocab-size",
        type=int,
        default=4096,
        help="number of tokens in a tokenizer that is learned, without --tokenizer (default: 4096)",
    )
    add(
        "--patch-size",
        type=int,
        default=10,
        metavar="S",
        help="maximum symbols per patch, its end mark included (default: 10)",
    )
    add(
        "--mode",
        choices=("stop", "full"),
        default="stop",
        help="merges applied to a token that is too long. stop: only until it fits; full: all of them (default: stop)",
    )
    add("--context", type=int, default=128, help="number of patches per window (default: 128)")
    add(
        "--latent",
        type=read_tower,
        default=FIT_LATENT,
        metavar="LAYERS,WIDTH,FFN,HEADS",
        help="size of the large transformer, which runs once per patch; FFN: width of its MLP (default: 4,256,704,4)",
    )
    add(
        "--local",
        type=read_tower,
        default=FIT_LOCAL,
        metavar="LAYERS,WIDTH,FFN,HEADS",
        help="size of the local encoder and of the local decoder, which read and write a patch's symbols; FFN: width "
        "of the MLP (default: 2,128,128,2)",
    )
    add_some(add, _SETTINGS, _PURPOSES)
    add("--json", action="store_true", help="print one JSON object, and no progress")


def generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `generate`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="model folder that `mlx_zip vocab hbpe fit` wrote: RUN/model")
    add("--prompt", "-p", help="text to continue; - reads UTF-8 text from standard input (default: begin a document)")
    add("--max-patches", "-m", type=int, default=100, help="maximum number of patches to write (default: 100)")
    add("--temp", type=float, default=0.0, help="sampling temperature; 0 is greedy (default: 0)")
    add("--seed", type=int, default=0, help="random seed of sampling (default: 0)")
    add("--json", action="store_true", help="print one JSON object at the end instead of the text")


def evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `evaluate`."""
    parser.add_argument("model", metavar="MODEL", help="model folder that `mlx_zip vocab hbpe fit` wrote: RUN/model")
    _add_data(parser.add_argument, "texts to measure on")
    parser.add_argument("--batch-size", type=int, default=16, help="number of windows per model call (default: 16)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_data(add: Any, purpose: str) -> None:
    add("--data", nargs="+", required=True, metavar="FILE", help=f"{purpose}: {DATA}")
    add_separator(add)
    add_limit_bytes(add, "--data")


def fit(args: argparse.Namespace) -> int:
    """Trains, and writes the model folder. Returns 0, or 130/143 when a signal ended the run. Raises `MlxZipError`."""
    from mlx_zip.files import at_home
    from mlx_zip.training.hbpe_fit import MODEL, FitOptions, evaluate_texts
    from mlx_zip.training.hbpe_fit import fit as train
    from mlx_zip.training.loop import Stopped
    from mlx_zip.training.settings import TrainSettings

    settings = {name: getattr(args, name) for name in _SETTINGS}
    settings = TrainSettings(**settings, min_learning_rate=args.learning_rate / 20)
    options = FitOptions(args.tokenizer, **{name: getattr(args, name) for name in _SIZES})
    texts = _texts(args.data, args.separator, args.limit_bytes)
    valid = _texts(args.valid, args.separator, None) if args.valid else []
    out = at_home(args.out)
    try:
        saved = train(texts, options, settings, out, quiet=args.json)
    except Stopped as early:
        return stopped(early.progress.step, early.number)
    record = {"model": str(out / MODEL), **saved.source["progress"]}
    if valid:
        record["valid"] = evaluate_texts(saved, valid)
    if args.json:
        print(json.dumps(record))
        return 0
    print(record["model"])
    if valid:
        _print(record["valid"])
    return 0


def generate(args: argparse.Namespace) -> int:
    """Prints text as it is generated. Returns 0, or 130 after Ctrl-C. Raises `MlxZipError`."""
    from mlx_zip.models.patches.folder import load_patch_model
    from mlx_zip.models.patches.generation import generate_text
    from mlx_zip.vocab.hbpe.merges import MARK

    prompt = "" if args.prompt is None else read_prompt(args.prompt)
    saved = load_patch_model(args.model)
    begun = time.perf_counter()
    parts, status = _print_parts(
        prompt, generate_text(saved, prompt, args.max_patches, args.temp, args.seed), args.json
    )
    seconds = max(time.perf_counter() - begun, 1e-9)
    text, patches = "".join(part.text for part in parts), [part.patch for part in parts if part.patch]
    n_bytes, ended = len(text.encode("utf-8")), patches[-1:] == [[MARK]]
    record = {
        "model": args.model,
        "prompt": prompt,
        "text": text,
        "prompt_patches": len(saved.text.patches(prompt)),
        "patches": len(patches),
        "symbols": sum(map(len, patches)),
        "text_bytes": n_bytes,
        "finish_reason": "interrupted" if status else "stop" if ended else "length",
        "patches_per_s": len(patches) / seconds,
        "bytes_per_s": n_bytes / seconds,
    }
    print(json.dumps(record, ensure_ascii=False) if args.json else "", flush=True)
    if not args.json:
        rates = f"{record['patches_per_s']:.1f} patches/s, {record['bytes_per_s']:.1f} bytes/s"
        print(
            f"{len(patches)} patches of {record['symbols']} symbols and {n_bytes} bytes, after "
            f"{record['prompt_patches']} patches: {rates}",
            file=sys.stderr,
        )
    return status


def _print_parts(prompt: str, written: Iterator[Written], silent: bool) -> tuple[list[Written], int]:
    """Prints the prompt and each part as it comes, unless silent; returns the parts, and 130 after Ctrl-C, else 0."""
    parts = []
    try:
        for part in written:
            if not silent:
                sys.stdout.write(part.text if parts else prompt + part.text)
                sys.stdout.flush()
            parts.append(part)
    except KeyboardInterrupt:
        return parts, 130
    return parts, 0


def evaluate(args: argparse.Namespace) -> int:
    """Measures a model and prints its bits per byte. Returns 0. Raises `MlxZipError`."""
    from mlx_zip.models.patches.folder import load_patch_model
    from mlx_zip.training.hbpe_fit import evaluate_texts

    check_at_least(args, 1, "batch_size")
    saved = load_patch_model(args.model)
    found = evaluate_texts(saved, _texts(args.data, args.separator, args.limit_bytes), args.batch_size)
    if args.json:
        print(json.dumps({"model": args.model, **found}))
    else:
        _print(found)
    return 0


def _print(found: dict[str, Any]) -> None:
    """Prints the figures that `evaluate_texts` returned."""
    words = "" if found["fertility"] is None else f", {found['fertility']:.3f} patches per word"
    texts = f"{counted(found['documents'], 'document')}, {counted(found['bytes'], 'byte')}"
    print(f"{found['bits_per_byte']:.4f} bits per byte: {texts}")
    print(
        f"{found['bytes_per_patch']:.3f} bytes and {found['symbols_per_patch']:.3f} symbols per patch{words}; "
        f"{found['forward_flops_per_byte']:.3g} FLOPs per byte, {found['parameters']} parameters"
    )
    if not found["exact"]:
        print("the patches do not spell the texts: the tokenizer changes them before it splits them")


def _texts(files: list[str], separator: str | None, limit_bytes: int | None) -> list[str]:
    from mlx_zip.text.documents import read_corpus

    return [document.text for document in read_corpus(files, separator, limit_bytes).documents]
