"""`mlx_zip vocab hbpe`: tables of patches for any first-stage tokenizer, and models over patches, from text to text."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from mlx_zip.cli import hbpe_models
from mlx_zip.cli.actions import FIRST_STAGE, Action, add_actions, add_by_place, add_json, settle, writable
from mlx_zip.errors import DataError, GenerationError

EXAMPLES = """\
examples:
  mlx_zip vocab hbpe learn --tokenizer vocab.bpe --patch-size 10 --out gpt2-10.npz
  mlx_zip vocab hbpe show gpt2-10.npz --show 5
  mlx_zip vocab hbpe encode gpt2-10.npz --tokenizer vocab.bpe --data letter.txt --json
  mlx_zip vocab hbpe fit run --data stories.train.txt --separator '<|endofstory|>' --iters 2000
  mlx_zip vocab hbpe generate run/model --prompt "Once upon a time" --temp 0.8
  mlx_zip vocab hbpe evaluate run/model --data stories.test.txt --separator '<|endofstory|>'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions and their flags."""
    add_actions(parser, ACTIONS, EXAMPLES, aliases={"learn": ["train"]})


def _learn_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _tokenizer_flag(add)
    add("--out", metavar="TABLE", help="table of patches to write, a .npz file")
    add(
        "--patch-size",
        type=int,
        default=10,
        metavar="S",
        help="symbols of a patch at most, its end mark counted (default: 10)",
    )
    add(
        "--mode",
        choices=("stop", "full"),
        default="stop",
        help="stop: replay merges until the token fits, as they are learned; full: all of them (default: stop)",
    )
    _show_flag(add, "merges")
    add_json(add)
    add_by_place(add)


def _show_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("table", metavar="TABLE", help="what `learn` wrote")
    _show_flag(add, "merges")
    add_json(add)


def _encode_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("table", metavar="TABLE", help="what `learn` wrote")
    _tokenizer_flag(add)
    add("--data", metavar="FILE", help="UTF-8 text to encode; - reads standard input")
    _show_flag(add, "patches")
    add_json(add)
    add_by_place(add)


def _tokenizer_flag(add: Any) -> None:
    add("--tokenizer", metavar="NAME", help=f"first stage: {FIRST_STAGE}; or a .json list of tokens in hex")


def _show_flag(add: Any, what: str) -> None:
    add("--show", type=int, default=10, metavar="N", help=f"{what} to list at most; JSON has all (default: 10)")


def run(args: argparse.Namespace) -> int:
    """Does one action; its status. Raises `MlxZipError`."""
    if args.action in MODEL_ACTIONS:
        return args.do(args)
    if args.show < 0:
        raise GenerationError(f"--show must be at least 0, got {args.show}")
    record, lines = args.do(args)
    print(json.dumps(record, ensure_ascii=False) if args.json else "\n".join(lines))
    return 0


def _learn(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.vocab.hbpe import learn, too_long
    from mlx_zip.vocab.hbpe_table import SUFFIX, PatchTable
    from mlx_zip.vocab.hbpe_tokens import read_tokens

    settle(args, out="one", tokenizer="none")
    out = writable("--out", args.out, "a table of patches", SUFFIX)
    tokens = read_tokens(args.tokenizer)
    learned = learn(tokens, args.patch_size)
    table = PatchTable.build(learned.merges, tokens, args.mode)
    try:
        table.save(out)
    except OSError as error:
        raise DataError(f"{out}: {error.strerror or error}") from error
    pool = len(too_long(tokens, args.patch_size))
    record, lines = _told(table, args.show, learned.counts.tolist())
    record["tokens_too_long"] = pool
    return record, [f"{out} is written; merges were learned from {pool} tokens that did not fit", *lines]


def _show(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.vocab.hbpe_table import PatchTable

    return _told(PatchTable.load(args.table), args.show)


def _told(table: Any, show: int, counts: list[int] | None = None) -> tuple[dict[str, Any], list[str]]:
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
    from mlx_zip.cli.compression import read_text
    from mlx_zip.vocab.hbpe_measures import fertility, words_of
    from mlx_zip.vocab.hbpe_table import PatchTable
    from mlx_zip.vocab.hbpe_tokens import read_tokens, text_encoder

    settle(args, data="one", tokenizer="none")
    text, table = read_text(args.data), PatchTable.load(args.table)
    table.check_tokens(read_tokens(args.tokenizer))
    ids = list(text_encoder(args.tokenizer)(text))
    if not ids:
        raise DataError(f"{args.data}: the tokenizer makes no token of this text")
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
    told = "" if words == 0 else f", {record['fertility']:.3f} patches per word"
    lines = [
        f"{n_bytes} bytes -> {len(ids)} patches of {record['bytes_per_patch']:.3f} bytes{told}",
        f"{record['symbols']} symbols, {record['symbols_per_patch']:.3f} per patch with its mark",
    ]
    if not record["exact"]:
        lines.append("the patches do not spell the text: its tokenizer changes it before it splits it")
    for i, patch in zip(ids[: args.show], patches, strict=False):
        lines.append(f"{i:>8}  {_text(table.tokens[i])}  {' '.join(map(str, patch))}")
    return record, lines


def _text(token: bytes) -> str:
    """A token as one can read it: text in quotes, or bytes where it is no whole characters."""
    try:
        return repr(token.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(token)


MODEL_ACTIONS: dict[str, Action] = {
    "fit": (
        hbpe_models.fit_arguments,
        "train a model over patches from texts, on from where it stopped",
        hbpe_models.fit,
    ),
    "generate": (
        hbpe_models.generate_arguments,
        "text that a model over patches writes, as it comes",
        hbpe_models.generate,
    ),
    "evaluate": (
        hbpe_models.evaluate_arguments,
        "bits per byte of a model over patches on texts",
        hbpe_models.evaluate,
    ),
}
ACTIONS = {
    "learn": (_learn_flags, "learn merges from a tokenizer's tokens and write the table of their patches", _learn),
    "show": (_show_flags, "show what a table holds", _show),
    "encode": (_encode_flags, "show the patches of a text", _encode),
    **MODEL_ACTIONS,
}
