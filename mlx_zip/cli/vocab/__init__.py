"""`mlx_zip vocab METHOD ...`: learns vocabularies. A method's module is imported only when the method is used."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from mlx_zip.arguments import Parser
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


def method_parser(method: str) -> Parser:
    """Returns the parser of one method with all its actions and flags; imports the method's module."""
    module, purpose = METHODS[method]
    parser = Parser(prog=f"mlx_zip vocab {method}", description=purpose[0].upper() + purpose[1:] + ".")
    found = import_module(module)
    add_actions(parser, found.ACTIONS, found.EXAMPLES)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs one action, prints its result and returns the exit status. argv: the arguments after `mlx_zip vocab`.

    Raises what the action raises.
    """
    if argv and argv[0] in METHODS:
        args = method_parser(argv[0]).parse_args(argv[1:])
        return print_action_result(args, args.do(args))
    parser = Parser(prog="mlx_zip vocab", description="Learned vocabularies.")
    methods = parser.add_subparsers(metavar="METHOD", required=True, help="mlx_zip vocab METHOD --help shows its flags")
    for name, (_, purpose) in METHODS.items():
        methods.add_parser(name, help=purpose, add_help=False)
    parser.parse_args(argv)
    return 2
