"""`mlx_zip bench NAME [flags]`: runs one bench and prints its JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from mlx_zip.arguments import Parser
from mlx_zip.errors import MlxZipError

from .recording import add_record_flag, run_bench

# Name -> (module, purpose). The module has add_arguments(parser) and run(args), which returns the records to print,
# or an exit status if it prints or writes its results itself.
BENCHES = {
    "generate": (
        "mlx_zip.bench.generation.generate",
        "time engines on the same texts: time to first id, decoding speed, memory, energy",
    ),
    "batch": (
        "mlx_zip.bench.generation.batch",
        "time a batch of requests against the same requests one after the other, with and without hypertokens",
    ),
    "drafts": (
        "mlx_zip.bench.generation.drafts",
        "measure drafts on five kinds of text: base tokens per pass, the host's work, time by ways to draft",
    ),
    "serve": (
        "mlx_zip.bench.serve.timing",
        "time the server: one stream, many streams, two long prompts; next to mlx-lm's server",
    ),
    "report": (
        "mlx_zip.bench.generation.report",
        "print a table of records of `bench generate`, with ratios to the base engine",
    ),
    "nvidia": (
        "mlx_zip.bench.gpu.nvidia",
        "check and time mlx_zip on PyTorch and Triton: kernels, steps, whole requests; says which targets are met",
    ),
    "checkpoint": (
        "mlx_zip.bench.gpu.random_checkpoint",
        "write a checkpoint of random weights for the published zip2zip package, for bench nvidia to compare with",
    ),
    "profile": ("mlx_zip.bench.steps.profile", "split the time of one decoding step of mlx_zip into its parts"),
    "codec": ("mlx_zip.bench.codec", "time the codec, and zip2zip-compression on the same ids if it is installed"),
    "tokens": ("mlx_zip.bench.tokens", "count bytes per token with and without compression, by tokenizer and text"),
}
TIMED = {
    "generate",
    "batch",
    "drafts",
    "serve",
    "profile",
    "codec",
}  # benches that measure time; they accept --record
PAPERS = "mlx_zip.bench.papers"  # experiments that run as benches; only in the repository, not in an installed package


def main(argv: Sequence[str] | None = None) -> int:
    """Imports and runs the bench or experiment that argv[0] names, and returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    benches, timed = BENCHES, TIMED
    if find_spec(PAPERS):
        papers = import_module(PAPERS)
        benches, timed = benches | papers.EXPERIMENTS, timed | papers.TIMED
    parser = Parser(prog="mlx_zip bench", description=__doc__)
    commands = parser.add_subparsers(dest="bench", required=True)
    for name, (home, summary) in benches.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if argv and argv[0] == name:
            module = import_module(home)
            module.add_arguments(command)
            if name in timed:
                add_record_flag(command)
            command.set_defaults(run=module.run, record=None)
    if not argv:
        parser.print_help()
        return 0
    args = parser.parse_args(argv)
    try:
        return run_bench(args.run, args, args.record)
    except MlxZipError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(import_module("mlx_zip.cli").main(["bench", *sys.argv[1:]]))  # handles errors and Ctrl-C
