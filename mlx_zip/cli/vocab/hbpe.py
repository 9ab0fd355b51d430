"""`mlx_zip vocab hbpe`: patch tables for any first-stage tokenizer, and models that read and write patches."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from mlx_zip.arguments import check_at_least
from mlx_zip.cli.actions import TOKENIZER, Action, add_actions, add_json, first_stage, writable
from mlx_zip.cli.vocab import hbpe_models
from mlx_zip.cli.vocab.plots import add_plot, draw_bars, plot_file
from mlx_zip.errors import DataError

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions and their flags."""
    add_actions(parser, ACTIONS, EXAMPLES)


def _learn_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _tokenizer_flag(add)
    add("--out", required=True, metavar="TABLE", help="file to write the patch table to (.npz)")
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
    _show_flag(add, "merges")
    add_plot(add, "the number of patches of each length")
    add_json(add)


def _show_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("table", metavar="TABLE", help=_TABLE)
    _show_flag(add, "merges")
    add_plot(add, "the number of patches of each length")
    add_json(add)


def _encode_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("table", metavar="TABLE", help=_TABLE)
    _tokenizer_flag(add)
    add("--data", required=True, metavar="FILE", help="UTF-8 text file to turn into patches; - reads standard input")
    _show_flag(add, "patches")
    add_json(add)


def _tokenizer_flag(add: Any) -> None:
    add(
        "--tokenizer",
        required=True,
        metavar="NAME",
        help=f"tokenizer whose tokens become patches: {TOKENIZER}; or a .json list of tokens in hex",
    )


def _show_flag(add: Any, what: str) -> None:
    add("--show", type=int, default=10, metavar="N", help=f"number of {what} to list; --json lists all (default: 10)")


def run(args: argparse.Namespace) -> int:
    """Runs one action, prints its result and returns the exit status. Raises `MlxZipError`."""
    if args.action in MODEL_ACTIONS:
        return args.do(args)
    check_at_least(args, 0, "show")
    record, lines = args.do(args)
    print(json.dumps(record, ensure_ascii=False) if args.json else "\n".join(lines))
    return 0


def _learn(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Learns a patch table and writes it; returns what it holds as a record for --json and as lines to print."""
    from mlx_zip.vocab.hbpe.merges import learn, too_long
    from mlx_zip.vocab.hbpe.table import SUFFIX, PatchTable

    out = writable("--out", args.out, "a patch table", SUFFIX)
    plot = plot_file(args.plot, read=[args.tokenizer, out])
    tokens = first_stage(args.tokenizer).tokens()
    learned = learn(tokens, args.patch_size)
    table = PatchTable.build(learned.merges, tokens, args.mode)
    try:
        table.save(out)
    except OSError as error:
        raise DataError(f"{out}: {error.strerror or error}") from error
    pool = len(too_long(tokens, args.patch_size))
    record, lines = _describe(table, args.show, learned.counts.tolist())
    _plot(plot, record)
    record["tokens_too_long"] = pool
    return record, [f"{out} is written; merges were learned from {pool} tokens that did not fit", *lines]


def _show(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.vocab.hbpe.table import PatchTable

    plot = plot_file(args.plot, read=[args.table])
    record, lines = _describe(PatchTable.load(args.table), args.show)
    _plot(plot, record)
    return record, lines


def _plot(path: Path | None, record: dict[str, Any]) -> None:
    """Draws the number of patches of each length, from a record of `_describe`; draws nothing if `path` is None."""
    if path is not None:
        lengths = {str(length): count for length, count in record["patch_lengths"].items()}
        draw_bars(path, {"patches": lengths}, ("symbols of a patch", "patches"))


def _describe(table: Any, show: int, counts: list[int] | None = None) -> tuple[dict[str, Any], list[str]]:
    """Returns what a patch table holds as a record for --json and as lines to print.

    show: number of merges that the lines list. counts: how often each merge's pair occurred when it was learned; None
    for a table from a file, which does not hold counts.
    """
    spelled = table.merges.spelled
    lengths = Counter(table.lengths.tolist())
    record = {
        "tokens": len(table),
        "patch_size": table.patch_size,
        "mode": table.mode,
        "merges": [list(pair) for pair in table.merges.pairs],
        "symbols": table.merges.symbols,
        "table_bytes": table.rows.nbytes,
        "longest_token_bytes": max(map(len, table.tokens), default=0),
        "patch_lengths": dict(sorted(lengths.items())),
        "fingerprint": table.fingerprint,
        **({} if counts is None else {"counts": counts}),
    }
    lines = [
        f"{record['tokens']} tokens, the longest of {record['longest_token_bytes']} bytes, in patches of at most "
        f"{record['patch_size']} symbols ({record['mode']})",
        f"{len(record['merges'])} merges, {record['symbols']} symbols; table {record['table_bytes']} bytes",
        "patches by length: " + ", ".join(f"{n}: {count}" for n, count in record["patch_lengths"].items()),
    ]
    for k, (left, right) in enumerate(table.merges.pairs[:show]):
        seen = "" if counts is None else f", seen {counts[k]} times"
        lines.append(f"{257 + k:>6} = {left} {right}  {_text(spelled[257 + k])}{seen}")
    return record, lines


def _encode(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Turns a text into patches; returns them and their rates as a record for --json and as lines to print."""
    from mlx_zip.cli.compression import read_text
    from mlx_zip.text.formats import read_library
    from mlx_zip.vocab.hbpe.measures import fertility, words_of
    from mlx_zip.vocab.hbpe.table import PatchTable
    from mlx_zip.vocab.hbpe.text import encoder_of

    text, table, tokenizer = read_text(args.data), PatchTable.load(args.table), first_stage(args.tokenizer)
    table.check_tokens(tokenizer.tokens())
    ranks = tokenizer.kind == "ranks"  # a .tiktoken file, whose name says how text is split
    ids = list(encoder_of(read_library(tokenizer.path) if ranks else tokenizer.library())(text))
    if not ids:
        raise DataError(f"{args.data}: this text has no token of the tokenizer")
    rows, lengths = table.encode(ids), table.lengths[ids]
    n_bytes, words = len(text.encode("utf-8")), words_of(text)
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
    per_word = f", {record['fertility']:.3f} patches per word" if words else ""
    lines = [
        f"{n_bytes} bytes -> {len(ids)} patches of {record['bytes_per_patch']:.3f} bytes{per_word}",
        f"{record['symbols']} symbols, {record['symbols_per_patch']:.3f} per patch, end mark included",
    ]
    if not record["exact"]:
        lines.append("the patches do not spell the text exactly: the tokenizer normalizes the text before it splits it")
    for i, patch in zip(ids[: args.show], patches, strict=False):
        lines.append(f"{i:>8}  {_text(table.tokens[i])}  {' '.join(map(str, patch))}")
    return record, lines


def _text(token: bytes) -> str:
    try:
        return repr(token.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(token)


MODEL_ACTIONS: dict[str, Action] = {
    "fit": (
        hbpe_models.fit_arguments,
        "train a model over patches on texts; an interrupted run is continued",
        hbpe_models.fit,
    ),
    "generate": (
        hbpe_models.generate_arguments,
        "print the text that a model over patches generates",
        hbpe_models.generate,
    ),
    "evaluate": (
        hbpe_models.evaluate_arguments,
        "measure the bits per byte of a model over patches on texts",
        hbpe_models.evaluate,
    ),
}
ACTIONS = {
    "learn": (_learn_flags, "learn merges from a tokenizer's tokens and write a patch table", _learn),
    "show": (_show_flags, "show the merges and patch lengths of a patch table", _show),
    "encode": (_encode_flags, "turn a text into patches and show them", _encode),
    **MODEL_ACTIONS,
}
