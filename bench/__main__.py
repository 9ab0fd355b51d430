"""`python -m mlx_zip.bench NAME [flags]`: runs one bench and prints its JSON lines."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from mlx_zip.errors import MlxZipError

BENCHES = {
    "codec": "compression, reading and single steps of the codec, beside zip2zip-compression",
    "tokens": "bytes per token with and without compression (tables 2 and 7 of the paper), by tokenizer and text",
    "flops": "the paper's estimate of training FLOPs (appendix B, table 9), beside a count of what is encoded",
    "generate": "engines side by side: time to first token, decoding, memory, energy, share of the memory bandwidth",
    "report": "tables and plots of records of `bench generate`, of any machines and days",
    "compare": "ratios of two sets of those records, with intervals; status 1 where something got slower",
    "figures": "the tables of README.md and of pages in docs/, written from the records in bench/records",
    "profile": "a decode step of mlx_zip, split: codec, rows, graph building, device, sampling, detokenizing",
    "hbpe": "patches of hierarchical BPE: learning merges, their number by patch size, a text in patches, FLOPs",
    "hbpe_model": "models over patches beside plain BPE and bytes, trained from scratch at equal time",
    "rows": "the row store: opening it, looking rows up, its memory and its size on disk",
    "packs": "what codebook packs bring: base ids per id of held-out text, by pack size",
    "pack_quality": "what codebook packs cost: strict bits per byte against base ids per id, beside the base",
    "pack_transfer": "packs for text that training never saw: what they bring, read and written, and cost",
    "multitok": "phrases of MultiTok: learning and encoding beside plain Python, memory, how far a corpus shrinks",
    "classify": "MultiTok's own experiment at small scale: a classifier of texts in words and in phrases",
    "memory": "memory over a long generation",
    "adaptbpe": "AdaptBPE: what a cut and adapted merge list saves of texts; seconds of adapting, speed of encoding",
    "adapt_model": "AdaptBPE: bits per byte, utility and bytes of a model adapted to texts, beside first-k and top-k",
    "adapt_step": "AdaptBPE: time of a decoding step with a part of the vocabulary's rows, beside what bytes allow",
    "training": "a training step and its parts, preparation of data, memory beside mlx-lm's trainer",
    "ablations": "the paper's ablations at small scale: train, evaluate, draw and tabulate every setting",
}


def main(argv: list[str] | None = None) -> int:
    """Parses, runs the bench that is named, and returns the exit status. Only its module is imported."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m mlx_zip.bench", description=__doc__)
    commands = parser.add_subparsers(dest="bench", required=True)
    for name, summary in BENCHES.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if argv and argv[0] == name:
            module = import_module(f"mlx_zip.bench.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except MlxZipError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
