"""`mlx_zip vocab hbpe`: learns to spell a tokenizer's tokens as patches of symbols; trains and runs patch models."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_zip.arguments import add_limit_bytes_flag, add_separator_flag, check_flags_at_least
from mlx_zip.cli.actions import (
    DATA_HELP,
    Action,
    add_data_flag,
    add_json_flag,
    add_show_flag,
    add_tokenizer_flag,
    checked_output_path,
    format_record,
    read_texts,
)
from mlx_zip.cli.generation import read_prompt
from mlx_zip.cli.training import add_training_flags, report_stop
from mlx_zip.cli.vocab.plots import add_plot_flag, checked_plot_path, draw_bars
from mlx_zip.errors import DataError, errors_as
from mlx_zip.vocab.hbpe.measures import FIT_LATENT, FIT_LOCAL, parse_tower

if TYPE_CHECKING:
    from mlx_zip.models.patch_model import WrittenPatch

EXAMPLES = """\
examples:
  mlx_zip vocab hbpe learn --tokenizer vocab.bpe --patch-size 10 --out gpt2-10.npz
  mlx_zip vocab hbpe show gpt2-10.npz --show 5
  mlx_zip vocab hbpe encode gpt2-10.npz --tokenizer vocab.bpe --data letter.txt --json
  mlx_zip vocab hbpe fit run --data stories.train.txt --separator '<|endofstory|>' --iters 2000
  mlx_zip vocab hbpe generate run/model --prompt "Once upon a time" --temp 0.8
  mlx_zip vocab hbpe evaluate run/model --data stories.test.txt --separator '<|endofstory|>'
"""
_TABLE = "patch table, as written by `mlx_zip vocab hbpe learn`"


def _add_hbpe_learn_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_tokenizer_flag(add)
    add(
        "--out",
        required=True,
        metavar="TABLE",
        help="file to write the table of patches (runs of tokens that a model reads as one unit) to (.npz)",
    )
    _add_patch_flags(add)
    add_show_flag(add, "merges to list; --json lists all", 10)
    add_plot_flag(add, "the number of patches of each length")
    add_json_flag(add)


def _add_hbpe_show_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("table", metavar="TABLE", help=_TABLE)
    add_show_flag(add, "merges to list; --json lists all", 10)
    add_plot_flag(add, "the number of patches of each length")
    add_json_flag(add)


def _add_hbpe_encode_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("table", metavar="TABLE", help=_TABLE)
    _add_tokenizer_flag(add)
    add("--data", required=True, metavar="FILE", help="UTF-8 text file to turn into patches; - reads standard input")
    add_show_flag(add, "patches to list; --json lists all", 10)
    add_json_flag(add)


def _add_patch_flags(add: Any) -> None:
    add(
        "--patch-size",
        type=int,
        default=10,
        metavar="S",
        help="maximum number of symbols in a patch, its end mark included: 2 to 256 (default: 10)",
    )
    add(
        "--mode",
        choices=("stop", "full"),
        default="stop",
        help="merges to apply to a token of more than --patch-size symbols. stop: only until it fits; full: all of "
        "them (default: stop)",
    )


def _add_tokenizer_flag(add: Any) -> None:
    add_tokenizer_flag(
        add, "tokenizer whose tokens become patches", "; or a .json list of tokens in hex", required=True
    )


def _run_hbpe_learn(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.text.tokenizers import read_first_stage_tokenizer
    from mlx_zip.vocab.hbpe.patch_merges import learn_merges, tokens_too_long
    from mlx_zip.vocab.hbpe.patch_table import SUFFIX, PatchTable

    check_flags_at_least(args, 0, "show")
    out = checked_output_path("--out", args.out, "a patch table", SUFFIX)
    plot = checked_plot_path(args.plot, read=[args.tokenizer, out])
    tokens = read_first_stage_tokenizer(args.tokenizer).tokens()
    learned = learn_merges(tokens, args.patch_size)
    table = PatchTable.build(learned.merges, tokens, args.mode)
    with errors_as(DataError, str(out), OSError):
        table.save(out)
    pool = len(tokens_too_long(tokens, args.patch_size))
    record, lines = _describe_patch_table(table, args.show, plot, learned.counts.tolist())
    record["tokens_too_long"] = pool
    return record, [f"{out} is written; merges were learned from {pool} tokens that did not fit", *lines]


def _run_hbpe_show(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.vocab.hbpe.patch_table import PatchTable

    check_flags_at_least(args, 0, "show")
    plot = checked_plot_path(args.plot, read=[args.table])
    return _describe_patch_table(PatchTable.load(args.table), args.show, plot)


def _describe_patch_table(
    table: Any, show: int, plot: Path | None, counts: list[int] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Returns the contents of a patch table as a record for --json and as lines to print.

    show: number of merges that the lines list. plot: file to draw the number of patches of each length in, or None.
    counts: per merge, how often its pair occurred when the merge was learned; None for a table from a file, which does
    not hold counts.
    """
    record = table.stats() | ({} if counts is None else {"counts": counts})
    if plot is not None:
        heights = {str(length): count for length, count in record["patch_lengths"].items()}
        draw_bars(plot, {"patches": heights}, ("symbols of a patch", "patches"))
    lines, spelled = [*format_record(record), ""], table.merges.bytes_of_symbols
    for k, (left, right) in enumerate(table.merges.pairs[:show]):
        seen = "" if counts is None else f", seen {counts[k]} times"
        lines.append(f"{257 + k:>6} = {left} {right}  {_format_token_bytes(spelled[257 + k])}{seen}")
    return record, lines


def _run_hbpe_encode(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.cli.compression import read_file_or_standard_input
    from mlx_zip.text.formats import read_tokenizer_file
    from mlx_zip.text.tokenizers import read_first_stage_tokenizer
    from mlx_zip.vocab.hbpe.measures import fertility, word_count
    from mlx_zip.vocab.hbpe.patch_table import PatchTable
    from mlx_zip.vocab.hbpe.patch_text import make_text_encoder

    check_flags_at_least(args, 0, "show")
    text, table = read_file_or_standard_input(args.data), PatchTable.load(args.table)
    tokenizer = read_first_stage_tokenizer(args.tokenizer)
    table.check_tokens(tokenizer.tokens())
    ranks = tokenizer.kind == "ranks"  # a .tiktoken file, whose name says how text is split
    ids = list(make_text_encoder(read_tokenizer_file(tokenizer.path) if ranks else tokenizer.build_tokenizer())(text))
    if not ids:
        raise DataError(f"{args.data}: this text has no token of the tokenizer")
    rows, lengths = table.encode(ids), table.lengths[ids]
    n_bytes, words = len(text.encode("utf-8")), word_count(text)
    patches = [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)]
    record = {
        "text_bytes": n_bytes,
        "patches": len(ids),
        "symbols": int(lengths.sum()),
        "bytes_per_patch": n_bytes / len(ids),
        "symbols_per_patch": float(lengths.mean()),
        "fertility": fertility(len(ids), words) if words else None,
        "exact": table.decode(rows) == text.encode("utf-8"),
        "ids": ids,
        "patch_symbols": patches,
    }
    lines = [*format_record(record), ""]
    for i, patch in zip(ids[: args.show], patches, strict=False):
        lines.append(f"{i:>8}  {_format_token_bytes(table.tokens[i])}  {' '.join(map(str, patch))}")
    return record, lines


def _format_token_bytes(token: bytes) -> str:
    try:
        return repr(token.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(token)


# ---- models that read and write patches

_SIZES = ("vocab_size", "patch_size", "mode", "context", "latent", "local")
_SETTINGS = {
    "iters": (1000, "number of optimizer steps in the whole run"),
    "batch_size": (8, "number of windows per step"),
    "learning_rate": (1e-3, "peak learning rate of the cosine schedule, which ends at a twentieth of it"),
    "warmup": 0,
    "seed": (0, "random seed of new weights and of the order of the windows"),
    "steps_per_report": 10,
    "save_every": 100,
}


def _add_hbpe_fit_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "out",
        metavar="RUN",
        help="folder for checkpoints, metrics.jsonl and the finished model/; a run found there is continued",
    )
    _add_data_flags(add, "texts to learn from")
    add(
        "--valid",
        nargs="+",
        default=[],
        metavar="FILE",
        help=f"texts to measure the finished model on: {DATA_HELP} (default: none)",
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
        help="number of tokens of the BPE that is learned from --data if --tokenizer is not given (default: 4096)",
    )
    _add_patch_flags(add)
    add("--context", type=int, default=128, help="number of patches per window (default: 128)")
    add(
        "--latent",
        type=parse_tower,
        default=FIT_LATENT,
        metavar="LAYERS,WIDTH,FFN,HEADS",
        help="size of the large transformer, which runs once per patch; FFN: width of its MLP (default: 4,256,704,4)",
    )
    add(
        "--local",
        type=parse_tower,
        default=FIT_LOCAL,
        metavar="LAYERS,WIDTH,FFN,HEADS",
        help="size of the local encoder and of the local decoder, which read and write a patch's symbols; FFN: width "
        "of the MLP (default: 2,128,128,2)",
    )
    add_training_flags(add, _SETTINGS)
    add("--json", action="store_true", help="print one JSON object, and no progress")


def _add_hbpe_generate_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="model folder that `mlx_zip vocab hbpe fit` wrote: RUN/model")
    add("--prompt", "-p", help="text to continue; - reads UTF-8 text from standard input (default: begin a document)")
    add("--max-patches", "-m", type=int, default=100, help="maximum number of patches to write (default: 100)")
    add("--temp", type=float, default=0.0, help="sampling temperature; 0 is greedy (default: 0)")
    add("--seed", type=int, default=0, help="random seed of sampling (default: 0)")
    add("--json", action="store_true", help="print one JSON object at the end instead of the text")


def _add_hbpe_evaluate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder that `mlx_zip vocab hbpe fit` wrote: RUN/model")
    _add_data_flags(parser.add_argument, "texts to measure on")
    parser.add_argument("--batch-size", type=int, default=16, help="number of windows per model call (default: 16)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_data_flags(add: Any, purpose: str) -> None:
    add_data_flag(add, purpose, required=True)
    add_separator_flag(add)
    add_limit_bytes_flag(add, "--data")


def _run_hbpe_fit(args: argparse.Namespace) -> Any:
    """Trains a patch model and writes its folder; returns a record for --json and lines to print.

    If a signal ended the run, returns the exit status 129, 130 or 143. Raises `MlxZipError`.
    """
    from mlx_zip.files import expand_home
    from mlx_zip.training.patch_training import MODEL, PatchFitOptions, evaluate_patch_texts
    from mlx_zip.training.patch_training import fit_patch_model as train
    from mlx_zip.training.settings import TrainSettings
    from mlx_zip.training.trainer import TrainingStopped

    settings = {name: getattr(args, name) for name in _SETTINGS}
    settings = TrainSettings(**settings, min_learning_rate=args.learning_rate / 20)
    options = PatchFitOptions(args.tokenizer, **{name: getattr(args, name) for name in _SIZES})
    texts = read_texts(args.data, args.separator, args.limit_bytes)
    valid = read_texts(args.valid, args.separator)
    out = expand_home(args.out)
    try:
        saved = train(texts, options, settings, out, quiet=args.json)
    except TrainingStopped as early:
        return report_stop(early.progress.step, early.number)
    record = {"model": str(out / MODEL), **saved.source["progress"]}
    if not valid:
        return record, [record["model"]]
    record["valid"] = evaluate_patch_texts(saved, valid)
    return record, [record["model"], *format_record(record["valid"])]


def _run_hbpe_generate(args: argparse.Namespace) -> int:
    """Prints text as it is generated. Returns 0, or 130 after Ctrl-C. Raises `MlxZipError`."""
    from mlx_zip.models.patch_model import generate_text, load_patch_model
    from mlx_zip.vocab.hbpe.patch_merges import MARK

    prompt = "" if args.prompt is None else read_prompt(args.prompt)
    saved = load_patch_model(args.model)
    begun = time.perf_counter()
    parts, status = _print_written_patches(
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


def _print_written_patches(
    prompt: str, written: Iterator[WrittenPatch], silent: bool
) -> tuple[list[WrittenPatch], int]:
    """Prints the prompt and each part as it arrives, unless `silent`. Returns the parts and the exit status."""
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


def _run_hbpe_evaluate(args: argparse.Namespace) -> dict[str, Any]:
    from mlx_zip.models.patch_model import load_patch_model
    from mlx_zip.training.patch_training import evaluate_patch_texts

    check_flags_at_least(args, 1, "batch_size")
    saved = load_patch_model(args.model)
    found = evaluate_patch_texts(saved, read_texts(args.data, args.separator, args.limit_bytes), args.batch_size)
    return {"model": args.model, **found}


ACTIONS: dict[str, Action] = {
    "learn": (_add_hbpe_learn_flags, "learn merges from a tokenizer's tokens and write a patch table", _run_hbpe_learn),
    "show": (_add_hbpe_show_flags, "show the merges and patch lengths of a patch table", _run_hbpe_show),
    "encode": (_add_hbpe_encode_flags, "turn a text into patches and show them", _run_hbpe_encode),
    "fit": (_add_hbpe_fit_flags, "train a model over patches on texts; an interrupted run is continued", _run_hbpe_fit),
    "generate": (_add_hbpe_generate_flags, "print the text that a model over patches generates", _run_hbpe_generate),
    "evaluate": (
        _add_hbpe_evaluate_flags,
        "measure the bits per byte of a model over patches on texts",
        _run_hbpe_evaluate,
    ),
}
