"""`mlx_zip bench NAME [flags]`: runs one bench and prints its JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec

from mlx_zip.arguments import Parser
from mlx_zip.errors import MlxZipError

BENCHES = {
    "generate": ("mlx_zip.bench.generate", "speed and memory of engines on the same texts: first id, decoding, energy"),
    "report": ("mlx_zip.bench.report", "tables and plots of `bench generate` records of any machines and days"),
    "compare": ("mlx_zip.bench.compare", "ratios of two files of `bench generate` records; status 1 if one got slower"),
    "profile": ("mlx_zip.bench.profile", "where a decoding step of mlx_zip spends its time, by part"),
    "codec": ("mlx_zip.bench.codec", "speed of the codec, like for like with zip2zip-compression"),
    "tokens": ("mlx_zip.bench.tokens", "bytes per token with and without compression, by tokenizer and text"),
    "flops": ("mlx_zip.bench.flops", "training FLOPs with hypertokens, by the zip2zip paper's estimate (appendix B)"),
    "rows": ("mlx_zip.bench.rows", "the store of hyper rows: opening, looking up, memory and size on disk"),
    "memory": ("mlx_zip.bench.memory", "memory during a long generation, with and without hypertokens"),
    "training": ("mlx_zip.bench.training", "a training step and its parts, data preparation, memory, against mlx-lm"),
}
PAPERS = "mlx_zip.bench.papers.__main__"  # in a checkout only


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the bench named by argv[0] and returns the exit status; experiments of papers too, in a checkout."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] not in BENCHES and find_spec("mlx_zip.bench.papers"):
        experiments = import_module(PAPERS)
        if argv[0] in experiments.EXPERIMENTS:
            return experiments.main(argv)
    return run_named(BENCHES, "mlx_zip bench", __doc__, argv)


def run_named(choices: Mapping[str, tuple[str, str]], prog: str, description: str | None, argv: Sequence[str]) -> int:
    """Imports and runs the module that argv[0] names; choices: name -> (module, help text). Returns the exit status."""
    parser = Parser(prog=prog, description=description)
    commands = parser.add_subparsers(dest="bench", required=True)
    for name, (home, summary) in choices.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if argv and argv[0] == name:
            module = import_module(home)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    if not argv:
        parser.print_help()
        return 0
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except MlxZipError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
