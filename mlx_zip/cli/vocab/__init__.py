"""`mlx_zip vocab METHOD ...`: learns vocabularies."""

from __future__ import annotations

import argparse
from importlib import import_module

from mlx_zip.cli.actions import add_actions, print_action_result

METHODS: dict[str, tuple[str, str]] = {  # name -> (module with ACTIONS and EXAMPLES, purpose for --help)
    "pack": ("mlx_zip.cli.vocab.packs", "learn and manage packs, the entries that a codebook begins with"),
    "multitok": ("mlx_zip.cli.vocab.multitok", "learn phrases that texts repeat, and write each as one id (MultiTok)"),
    "adapt": ("mlx_zip.cli.vocab.adapt", "shorten a tokenizer's merge list and adapt it to texts (AdaptBPE)"),
    "hbpe": (
        "mlx_zip.cli.vocab.hbpe",
        "split the tokens of any tokenizer into short patches of symbols (hierarchical BPE)",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the methods as subcommands, each with its actions and their flags."""
    methods = parser.add_subparsers(metavar="METHOD", required=True, help="mlx_zip vocab METHOD --help shows its flags")
    for name, (module, purpose) in METHODS.items():
        method = methods.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        found = import_module(module)
        add_actions(method, found.ACTIONS, found.EXAMPLES)


def run(args: argparse.Namespace) -> int:
    """Runs one action, prints its result and returns the exit status. Raises what the action raises."""
    return print_action_result(args, args.do(args))
