"""`python -m mlx_zip.bench.papers NAME [flags]`: runs one experiment that repeats a paper and prints its JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mlx_zip.bench.__main__ import run_named

EXPERIMENTS = {
    "ablations": (
        "mlx_zip.bench.papers.zip2zip.ablations",
        "zip2zip's ablations at small scale: trains, evaluates, draws and tabulates every setting",
    ),
    "codec_latency": (
        "mlx_zip.bench.papers.zip2zip.codec_figure",
        "zip2zip's figure 4: time of a tokenizer alone and with each codec, by bytes of text",
    ),
    "multitok": (
        "mlx_zip.bench.papers.multitok.phrases",
        "phrases of MultiTok: speed compared with plain Python, memory, and how far a corpus shrinks",
    ),
    "classify": (
        "mlx_zip.bench.papers.multitok.classify",
        "MultiTok's own experiment at small scale: a classifier of texts in words and in phrases",
    ),
    "adaptbpe": (
        "mlx_zip.bench.papers.adaptbpe.utility",
        "AdaptBPE: bytes saved by a cut and adapted merge list; seconds of adapting, speed of encoding",
    ),
    "adapt_model": (
        "mlx_zip.bench.papers.adaptbpe.model",
        "AdaptBPE: bits per byte, utility and size of a model adapted to texts, compared with first-k and top-k",
    ),
    "adapt_step": (
        "mlx_zip.bench.papers.adaptbpe.step",
        "AdaptBPE: time of a decoding step with part of the vocabulary's rows, compared with what bytes allow",
    ),
    "hbpe": (
        "mlx_zip.bench.papers.hbpe.patches",
        "patches of hierarchical BPE: learning merges, their number by patch size, a text in patches, FLOPs",
    ),
    "hbpe_model": (
        "mlx_zip.bench.papers.hbpe.model",
        "models over patches, plain BPE and bytes, trained from scratch for equal time",
    ),
    "packs": (
        "mlx_zip.bench.papers.packs.compression",
        "what codebook packs bring to texts of their own kind and of others: base ids per id, by size and learner",
    ),
    "pack_quality": (
        "mlx_zip.bench.papers.packs.quality",
        "what codebook packs cost: strict bits per byte against base ids per id, compared with the base",
    ),
    "pack_transfer": (
        "mlx_zip.bench.papers.packs.transfer",
        "packs for text that training never saw: what they bring, read and written, and what they cost",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment named by argv[0]; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    return run_named(EXPERIMENTS, "python -m mlx_zip.bench.papers", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
