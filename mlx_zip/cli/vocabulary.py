"""`mlx_zip vocab METHOD ...`: learned vocabularies. A method's module is named here, imported when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from mlx_zip.arguments import Parser

METHODS: dict[str, tuple[str, str]] = {  # name: (module with add_arguments(parser) and run(args), what it does)
    "pack": ("mlx_zip.cli.vocab_packs", "learn the entries that a codebook begins with"),
    "multitok": ("mlx_zip.cli.multitok", "phrases that a corpus repeats as one id, over words or a tokenizer's ids"),
    "adapt": ("mlx_zip.cli.vocabulary_adapt", "cut a tokenizer's merge list down and adapt it to texts (AdaptBPE)"),
    "hbpe": ("mlx_zip.cli.hbpe", "patches of hierarchical BPE: short runs of symbols for the tokens of any tokenizer"),
}


def method_parser(method: str) -> Parser:
    """The full parser of one method."""
    module, purpose = METHODS[method]
    parser = Parser(prog=f"mlx_zip vocab {method}", description=purpose[0].upper() + purpose[1:] + ".")
    import_module(module).add_arguments(parser)
    return parser


def main(argv: Sequence[str]) -> int | None:
    """Parses and runs one method; the exit status. Raises what the method raises."""
    if argv and argv[0] in METHODS:
        return import_module(METHODS[argv[0]][0]).run(method_parser(argv[0]).parse_args(argv[1:]))
    parser = Parser(prog="mlx_zip vocab", description="Learned vocabularies.")
    methods = parser.add_subparsers(metavar="METHOD", required=True, help="mlx_zip vocab METHOD --help shows its flags")
    for name, (_, purpose) in METHODS.items():
        methods.add_parser(name, help=purpose, add_help=False)
    parser.parse_args(argv)
    return 2
