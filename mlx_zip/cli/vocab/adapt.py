"""`mlx_zip vocab adapt` (AdaptBPE): adapts a tokenizer to texts, shows and uses it, and converts a model to it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from mlx_zip.arguments import add_limit_bytes_flag
from mlx_zip.cli.actions import (
    add_data_flag,
    add_held_out_flag,
    add_json_flag,
    add_tokenizer_flag,
    checked_output_path,
    format_record,
    iterate_with_progress,
    read_texts,
)
from mlx_zip.cli.preparation import add_columns_flag, parse_columns
from mlx_zip.cli.vocab.plots import add_plot_flag, checked_plot_path, draw_bars
from mlx_zip.errors import DataError, GenerationError
from mlx_zip.named import resolve_model_name
from mlx_zip.progress import ProgressBar

_ADAPTED = "adapted tokenizer, as written by `mlx_zip vocab adapt learn`"
_SWAP_DEFAULTS = {
    "margin": 0,
    "max_swaps": None,
    "tie": "high",
    "counting": "overlapping",
}  # defaults of --method adapt
EXAMPLES = """examples:
  mlx_zip vocab adapt learn --tokenizer model-folder --data notes.txt papers.jsonl --merges 15000 --out adapted.json
  mlx_zip vocab adapt show adapted.json --tokenizer model-folder --data held-out.txt
  mlx_zip vocab adapt encode adapted.json --data letter.txt > ids.txt
  mlx_zip vocab adapt encode adapted.json --data ids.txt --decode
  mlx_zip vocab adapt convert adapted.json --model model-folder --out smaller-model
"""


def _add_adapt_learn_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_tokenizer_flag(add, "tokenizer to adapt", required=True)
    add_data_flag(add, "texts to adapt the tokenizer to", required=True)
    add_held_out_flag(add, "adapted tokenizer")
    add(
        "--merges",
        type=int,
        required=True,
        metavar="N",
        help="number of merges in the adapted tokenizer, besides the 256 bytes and the added tokens",
    )
    add("--out", required=True, metavar="FILE", help="file to write the adapted tokenizer to (JSON)")
    add(
        "--method",
        choices=("adapt", "first-k", "top-k"),
        default="adapt",
        help="which N merges are kept. adapt: the first N, of which rare ones are swapped for ones that save more "
        "tokens; first-k: the first N; top-k: the N used most in the texts (default: adapt)",
    )
    add(
        "--rule",
        choices=("replay", "final"),
        help="how new texts are encoded. replay: the swaps are repeated in order; final: all merges are applied, then "
        "tokens that are not kept are split (default: replay; final for top-k)",
    )
    add(
        "--margin",
        type=int,
        metavar="N",
        help="with --method adapt: swap a merge for another only if that saves more than N tokens (default: 0)",
    )
    add(
        "--max-swaps",
        type=int,
        metavar="N",
        help="with --method adapt: maximum number of swaps (default: none; swapping ends when no swap saves tokens)",
    )
    add(
        "--tie",
        choices=("high", "low"),
        help="with --method adapt: which of equally rare merges is swapped out first, the one learned last (high) or "
        "first (low) (default: high)",
    )
    add(
        "--counting",
        choices=("overlapping", "firing"),
        help="with --method adapt: how the pair that a merge joins is counted. overlapping: at every position; firing: "
        "only where it would be joined (default: overlapping)",
    )
    add(
        "--pieces",
        choices=("gpt2", "cl100k", "digits", "whole"),
        help="how text is split before merging, for a tokenizer file that does not say so (default: gpt2 for merge "
        "lists; by its name for a .tiktoken file)",
    )
    add(
        "--tokenizer-json",
        metavar="FILE",
        help="also write the adapted tokenizer to FILE as a tokenizer.json; an error if a merge was swapped out",
    )
    _add_adapt_text_flags(add, "--data, and at most N of --held-out")


def _add_adapt_text_flags(add: Any, texts: str) -> None:
    """Declares the flags that `learn` and `show` share. texts: what --limit-bytes limits."""
    add_columns_flag(add)
    add_limit_bytes_flag(add, texts)
    add_plot_flag(add, "bytes per token of the adapted and the base tokenizer")
    add_json_flag(add)


def _run_adapt_learn(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from mlx_zip.files import write_json
    from mlx_zip.text.tokenizers import read_first_stage_tokenizer
    from mlx_zip.vocab.adaptbpe.adapted import adapt_vocabulary, count_words
    from mlx_zip.vocab.adaptbpe.base_vocabulary import read_base_vocabulary
    from mlx_zip.vocab.adaptbpe.tokenizer_json import exact_tokenizer_json

    settings, read = _adapt_method_settings(args), [*args.data, *args.held_out, args.tokenizer]
    out, plain = checked_output_path("--out", args.out, read=read), None
    if args.tokenizer_json is not None:
        plain = checked_output_path("--tokenizer-json", args.tokenizer_json, read=[*read, out])
    plot = checked_plot_path(args.plot, read=[*read, out, plain])
    base = read_base_vocabulary(read_first_stage_tokenizer(args.tokenizer), args.pieces)
    columns = parse_columns(args.columns)
    texts, held_out = (read_texts(files, None, args.limit_bytes, columns) for files in (args.data, args.held_out))
    begun = time.perf_counter()
    words = count_words(base.splitter, iterate_with_progress("Counting", texts))
    with ProgressBar(None, "swap", "Adapting") as count:
        vocabulary = adapt_vocabulary(
            base, words, args.merges, method=args.method, progress=lambda swap: count(), **settings
        )
    took_s = time.perf_counter() - begun
    exact = None if plain is None else exact_tokenizer_json(vocabulary, base.source)
    vocabulary.save(out)
    if plain is not None:
        write_json(plain, exact)
    record = _adapted_vocabulary_record(vocabulary, base) | _count_tokens(vocabulary, base, texts)
    if held_out:
        record["held_out"] = _count_tokens(vocabulary, base, held_out)
    _draw_bytes_per_token(plot, record)
    record |= {"seconds": round(took_s, 3), "file": str(out)}
    hint = "these counts are of the texts adapted to: --held-out FILE counts others"
    return record, [*format_record(record), *([] if held_out else ["", hint])]


def _draw_bytes_per_token(path: Path | None, record: dict[str, Any]) -> None:
    """Draws bytes per token of the adapted and the base tokenizer, on the texts and on the held-out texts.

    record: record that `_run_adapt_learn` or `_run_adapt_show` returns. Draws nothing if `path` is None.
    """
    if path is None:
        return
    texts = {"texts": record} | ({"held-out texts": record["held_out"]} if "held_out" in record else {})
    bars = {"adapted": {name: counts["bytes"] / counts["tokens"] for name, counts in texts.items()}}
    if "base_tokens" in record:
        bars["base"] = {name: counts["bytes"] / counts["base_tokens"] for name, counts in texts.items()}
    draw_bars(path, bars, ("", "bytes per token"))


def _adapt_method_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of --method. Raises `GenerationError` if a flag of another method is given."""
    chosen = {name: value for name in (*_SWAP_DEFAULTS, "rule") if (value := getattr(args, name)) is not None}
    if args.method != "adapt" and (lost := [name for name in chosen if name in _SWAP_DEFAULTS]):
        raise GenerationError(f"--{lost[0].replace('_', '-')} needs --method adapt, the only one that swaps merges")
    if args.method == "top-k" and args.rule == "replay":
        raise GenerationError("--rule replay has no swaps to replay with --method top-k, whose rule is final")
    return _SWAP_DEFAULTS | chosen if args.method == "adapt" else chosen


def _add_adapt_show_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help=_ADAPTED)
    add_tokenizer_flag(add, "tokenizer that was adapted, to check that and to count its tokens in --data too")
    add_data_flag(add, "texts to count tokens in", default=[])
    _add_adapt_text_flags(add, "--data")


def _run_adapt_show(args: argparse.Namespace) -> dict[str, Any]:
    from mlx_zip.text.tokenizers import read_first_stage_tokenizer
    from mlx_zip.vocab.adaptbpe.adapted import read_adapted_vocabulary
    from mlx_zip.vocab.adaptbpe.base_vocabulary import read_base_vocabulary
    from mlx_zip.vocab.adaptbpe.merge_list import PIECES

    if args.plot is not None and not args.data:
        raise GenerationError("--plot draws the tokens of texts: name some with --data")
    plot = checked_plot_path(args.plot, [*args.data, args.file])
    vocabulary, base = read_adapted_vocabulary(args.file), None
    if args.tokenizer is not None:
        pieces = vocabulary.splitter.pieces  # other pieces than those in PIECES come from the base's own file
        base = read_base_vocabulary(read_first_stage_tokenizer(args.tokenizer), pieces if pieces in PIECES else None)
        vocabulary.check_base(base)
    record = _adapted_vocabulary_record(vocabulary, base)
    if args.data:
        texts = read_texts(args.data, None, args.limit_bytes, parse_columns(args.columns))
        record |= _count_tokens(vocabulary, base, texts)
        _draw_bytes_per_token(plot, record)
    return record


def _add_adapt_encode_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help=_ADAPTED)
    add(
        "--data",
        required=True,
        metavar="FILE",
        help="UTF-8 text file to encode, or with --decode a file of ids separated by blanks; - reads standard input",
    )
    add("--decode", action="store_true", help="read ids and print their text (default: read text and print its ids)")
    add(
        "--base-ids",
        action="store_true",
        help="print base ids instead of adapted ids; with --decode, read base ids (default: off)",
    )
    add_json_flag(add)


def _run_adapt_encode(args: argparse.Namespace) -> int:
    from mlx_zip.cli.compression import read_file_or_standard_input
    from mlx_zip.vocab.adaptbpe.adapted import read_adapted_vocabulary

    vocabulary = read_adapted_vocabulary(args.file)
    text = read_file_or_standard_input(args.data)
    if args.decode:
        ids = _parse_id_words(args.data, text)
        data = vocabulary.decode(vocabulary.adapted_ids_of(ids) if args.base_ids else ids)
        if args.json:
            print(json.dumps({"text": data.decode("utf-8", "replace"), "bytes": len(data)}, ensure_ascii=False))
        else:
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
        return 0
    ids = vocabulary.encode(text)
    shown = (vocabulary.ids[ids] if args.base_ids else ids).tolist()
    print(json.dumps({"ids": shown, "bytes": len(text.encode("utf-8"))}) if args.json else " ".join(map(str, shown)))
    return 0


def _add_adapt_convert_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help=_ADAPTED)
    add(
        "--model",
        required=True,
        metavar="NAME",
        help="model whose tokenizer was adapted: folder or bundled model, plain or zip2zip, quantized or not",
    )
    add(
        "--out",
        required=True,
        metavar="DIR",
        help="folder to write the converted model to; it must not exist",
    )


def _run_adapt_convert(args: argparse.Namespace) -> int:
    converters: Any = import_module("mlx_zip.converters.adapt")
    with import_module("mlx_zip.converters.cli").warnings_on_stderr():
        print(converters.adapt(str(resolve_model_name(args.model)), args.file, args.out))
    return 0


def _parse_id_words(name: str, text: str) -> list[int]:
    words = text.split()
    if wrong := next((word for word in words if not (word.isascii() and word.isdigit() and len(word) < 11)), None):
        raise DataError(f"{name}: {wrong!r:.40} is not an id")
    return [int(word) for word in words]


def _adapted_vocabulary_record(vocabulary: Any, base: Any) -> dict[str, Any]:
    """Returns counts and settings of an adapted tokenizer, for --json. base: its base tokenizer, None if unknown."""
    of_base = {} if base is None else {"unreachable": base.unreachable, "ignore_merges": base.ignore_merges}
    return vocabulary.stats() | of_base


def _count_tokens(vocabulary: Any, base: Any, texts: list[str]) -> dict[str, Any]:
    """Returns the bytes of texts, and their tokens and utility with the adapted tokenizer and, if given, with `base`.

    Utility is 1 - tokens per byte (arXiv 2601.21665).
    """
    n_bytes = sum(len(text.encode("utf-8")) for text in texts)
    tokens = sum(len(vocabulary.encode(text)) for text in iterate_with_progress("Encoding", texts))
    counts = {"bytes": n_bytes, "tokens": tokens, "utility": round(1 - tokens / n_bytes, 4)}
    if base is not None:
        whole = base.encoder()
        base_tokens = sum(len(base.encode(text, whole)) for text in iterate_with_progress("Encoding", texts))
        counts |= {"base_tokens": base_tokens, "base_utility": round(1 - base_tokens / n_bytes, 4)}
    return counts


ACTIONS = {
    "learn": (_add_adapt_learn_flags, "adapt a tokenizer to texts and write the adapted one", _run_adapt_learn),
    "show": (
        _add_adapt_show_flags,
        "show what an adapted tokenizer keeps, check its base, count its tokens in texts",
        _run_adapt_show,
    ),
    "encode": (_add_adapt_encode_flags, "turn a text into ids, or ids into text", _run_adapt_encode),
    "convert": (
        _add_adapt_convert_flags,
        "write a model folder that keeps the adapted tokenizer's rows and ids",
        _run_adapt_convert,
    ),
}
