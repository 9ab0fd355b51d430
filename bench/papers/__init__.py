"""Experiments that repeat papers: run from a checkout as `mlx_zip bench NAME`; not part of an installed package."""

EXPERIMENTS = {
    "ablations": (
        "mlx_zip.bench.papers.zip2zip.ablations",
        "zip2zip's ablations at small scale: trains, evaluates and tabulates every setting",
    ),
    "codec_latency": (
        "mlx_zip.bench.papers.zip2zip.codec_figure",
        "zip2zip's figure 4: time of a tokenizer alone and with each codec, by bytes of text",
    ),
    "multitok": (
        "mlx_zip.bench.papers.multitok.phrase_rates",
        "phrases of MultiTok: speed compared with plain Python, memory, and tokens per unit of a corpus",
    ),
    "classify": (
        "mlx_zip.bench.papers.multitok.classify",
        "MultiTok's own experiment at small scale: a classifier of texts in words and in phrases",
    ),
    "adaptbpe": (
        "mlx_zip.bench.papers.adaptbpe.compression_utility",
        "AdaptBPE: compression utility of a shortened and adapted merge list, speed of encoding",
    ),
    "adapt_model": (
        "mlx_zip.bench.papers.adaptbpe.adapt_model",
        "AdaptBPE: bits per byte, utility and size of a model adapted to texts, compared with first-k and top-k",
    ),
    "hbpe": (
        "mlx_zip.bench.papers.hbpe.patches",
        "patches of hierarchical BPE: number of merges, learning time and FLOPs by patch size; patches of a text",
    ),
    "hbpe_model": (
        "mlx_zip.bench.papers.hbpe.hbpe_model",
        "models over patches, plain BPE and bytes, trained from scratch for equal time",
    ),
    "packs": (
        "mlx_zip.bench.papers.packs.pack_compression",
        "base ids per id with codebook packs, on texts of the pack's own kind and of others, by size and learner",
    ),
    "pack_quality": (
        "mlx_zip.bench.papers.packs.pack_quality",
        "strict bits per byte against base ids per id of a model with codebook packs, compared with the base model",
    ),
    "pack_transfer": (
        "mlx_zip.bench.papers.packs.pack_transfer",
        "packs for text that training never saw: base ids per id read and per step written, and bits per byte",
    ),
}
TIMED = {"codec_latency", "multitok", "adaptbpe"}  # experiments that measure time; they accept --record
