"""`python -m mlx_zip.bench.papers NAME [flags]`: runs one experiment that repeats a paper and prints its JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mlx_zip.bench.__main__ import run_named

EXPERIMENTS = {
    "hbpe": (
        "mlx_zip.bench.papers.hbpe.hbpe",
        "patches of hierarchical BPE: learning merges, their number by patch size, a text in patches, FLOPs",
    ),
    "hbpe_model": (
        "mlx_zip.bench.papers.hbpe.hbpe_model",
        "models over patches beside plain BPE and bytes, trained from scratch at equal time",
    ),
    "packs": (
        "mlx_zip.bench.papers.packs.compression",
        "what codebook packs bring: base ids per id of held-out text, by pack size",
    ),
    "pack_quality": (
        "mlx_zip.bench.papers.packs.quality",
        "what codebook packs cost: strict bits per byte against base ids per id, beside the base",
    ),
    "pack_transfer": (
        "mlx_zip.bench.papers.packs.transfer",
        "packs for text that training never saw: what they bring, read and written, and cost",
    ),
    "multitok": (
        "mlx_zip.bench.papers.multitok.phrases",
        "phrases of MultiTok: learning and encoding beside plain Python, memory, how far a corpus shrinks",
    ),
    "classify": (
        "mlx_zip.bench.papers.multitok.classify",
        "MultiTok's own experiment at small scale: a classifier of texts in words and in phrases",
    ),
    "adaptbpe": (
        "mlx_zip.bench.papers.adaptbpe.adaptbpe",
        "AdaptBPE: what a cut and adapted merge list saves of texts; seconds of adapting, speed of encoding",
    ),
    "adapt_model": (
        "mlx_zip.bench.papers.adaptbpe.adapt_model",
        "AdaptBPE: bits per byte, utility and bytes of a model adapted to texts, beside first-k and top-k",
    ),
    "adapt_step": (
        "mlx_zip.bench.papers.adaptbpe.adapt_step",
        "AdaptBPE: time of a decoding step with a part of the vocabulary's rows, beside what bytes allow",
    ),
    "codec_latency": (
        "mlx_zip.bench.papers.zip2zip.codec_figure",
        "the paper's figure 4: latency of a tokenizer alone and with either codec, by bytes of text",
    ),
    "ablations": (
        "mlx_zip.bench.papers.zip2zip.ablations",
        "the paper's ablations at small scale: train, evaluate, draw and tabulate every setting",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment named by argv[0]; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    return run_named(EXPERIMENTS, "python -m mlx_zip.bench.papers", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
