"""The flags of `mlx_zip vocab adapt`."""

from __future__ import annotations

import argparse
from typing import Any

from mlx_zip.arguments import add_limit_bytes
from mlx_zip.cli.actions import DATA, TOKENIZER, add_json
from mlx_zip.cli.vocab.plots import add_plot

ADAPTED = "adapted tokenizer, as written by `mlx_zip vocab adapt learn`"
# settings of --method adapt: defaults
SWAPS = {"margin": 0, "max_swaps": None, "tie": "high", "counting": "overlapping"}


def learn_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `learn`."""
    add = parser.add_argument
    add("--tokenizer", required=True, metavar="NAME", help=f"tokenizer to adapt: {TOKENIZER}")
    add(
        "--data",
        "--text",
        dest="data",
        nargs="+",
        required=True,
        metavar="FILE",
        help=f"texts to adapt the tokenizer to: {DATA}",
    )
    add(
        "--held-out",
        nargs="+",
        default=[],
        metavar="FILE",
        help="texts to measure the adapted tokenizer on; nothing is learned from them",
    )
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
        help="with --method adapt: swap only if more than N tokens are saved (default: 0)",
    )
    add(
        "--max-swaps",
        type=int,
        metavar="N",
        help="with --method adapt: maximum number of swaps (default: as many as save tokens)",
    )
    add(
        "--tie",
        choices=("high", "low"),
        help="with --method adapt: which of equally rare merges is swapped out first, the one of high or of low rank "
        "(default: high)",
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
    _common(add, "--data, and at most N of --held-out")


def show_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `show`."""
    add = parser.add_argument
    add("file", metavar="FILE", help=ADAPTED)
    add(
        "--tokenizer",
        "--base",
        dest="tokenizer",
        metavar="NAME",
        help=f"tokenizer that was adapted, to check that and to count its tokens in --data too: {TOKENIZER}",
    )
    add(
        "--data",
        "--text",
        dest="data",
        nargs="+",
        default=[],
        metavar="FILE",
        help=f"texts to count tokens in: {DATA}",
    )
    _common(add, "--data")


def encode_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `encode`."""
    add = parser.add_argument
    add("file", metavar="FILE", help=ADAPTED)
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
    add_json(add)


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `convert`."""
    add = parser.add_argument
    add("file", metavar="FILE", help=ADAPTED)
    add(
        "--model",
        required=True,
        metavar="NAME",
        help="model whose tokenizer was adapted: folder or bundled model, plain or zip2zip, quantized or not",
    )
    add(
        "--out",
        "--mlx-path",
        dest="out",
        required=True,
        metavar="DIR",
        help="folder to write the converted model to; it must not exist",
    )


def _common(add: Any, texts: str) -> None:
    """Declares the flags that `learn` and `show` share. texts: what --limit-bytes limits."""
    add(
        "--columns",
        nargs="+",
        default=[],
        metavar="KEY=NAME",
        help="column of .jsonl records that holds the text, as text=NAME (default: text)",
    )
    add_limit_bytes(add, texts)
    add_plot(add, "bytes per token of the adapted and the base tokenizer")
    add_json(add)
