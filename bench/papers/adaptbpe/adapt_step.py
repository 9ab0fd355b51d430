"""Times a decoding step of a model that keeps only some of the rows of its embedding and head.

The whole and the smaller model run the same forced ids through mlx-lm, a few steps at a time and alternately, so that a
machine that slows down affects both; each ratio is of two consecutive runs. On a busy machine the wall time of a step
includes waits for a core, so processor time is recorded too. The bound is the largest share of time that can be saved:
bytes of the dropped rows divided by the bytes that a step of the whole model reads. The kept rows are evenly spaced;
which rows are kept does not change the time. Source of the question: AdaptBPE, arXiv 2601.21665.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from mlx_zip.arguments import check_flags_at_least
from mlx_zip.bench.engines.mlx_engines import MlxLm
from mlx_zip.bench.engines.model_making import make_model_with_kept_rows, models_from_folders, models_from_shape
from mlx_zip.bench.engines.shape_table import PRECISIONS, SHAPES, Models, ZipOptions
from mlx_zip.bench.engines.workloads import read_tokenizer
from mlx_zip.bench.machine import describe_mlx_device
from mlx_zip.bench.recording import print_record, run_in_turns, summarize_samples
from mlx_zip.errors import MlxZipError

CLOCKS = ("wall_ms", "processor_ms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench adapt_step` to a parser."""
    add = parser.add_argument
    add("--model", metavar="DIR", help="plain model to measure: a folder or the name of a bundled model")
    add(
        "--shape",
        choices=tuple(SHAPES),
        help="measure a model with random weights and the layer sizes of SHAPE, instead of --model",
    )
    add(
        "--precisions",
        nargs="+",
        choices=PRECISIONS,
        default=["float32"],
        help="precisions of the random weights of --shape, measured one by one (default: float32)",
    )
    add(
        "--tokenizer", default="stories-base", help="tokenizer of --shape: a folder or a hub id (default: stories-base)"
    )
    add(
        "--keep",
        type=float,
        nargs="+",
        default=[0.5],
        metavar="SHARE",
        help="shares of the vocabulary's rows to keep, above 0 and up to 1, measured one by one (default: 0.5)",
    )
    add("--tokens", type=int, default=16, metavar="N", help="decoding steps per timed run (default: 16)")
    add("--trials", type=int, default=15, help="timed runs of each of the two models (default: 15)")


def run(args: argparse.Namespace) -> int:
    """Measures and prints one JSON line per precision and share of rows.

    Raises `MlxZipError` if a flag is invalid, before any weights are made.
    """
    if (args.model is None) == (args.shape is None):
        raise MlxZipError("name a model with --model or a shape with --shape, one of them")
    check_flags_at_least(args, 4, "tokens")
    check_flags_at_least(args, 1, "trials")
    if wrong := [share for share in args.keep if not 0 < share <= 1]:
        raise MlxZipError(f"--keep {wrong[0]:g} is not a share above 0, 1 at most")
    tokenizer = read_tokenizer(args.tokenizer) if args.shape else None
    for precision in args.precisions if args.shape else ["as stored"]:
        options = ZipOptions(encoder="averaging")  # the smallest encoder; only the plain model is used
        models = (
            models_from_folders(None, args.model)
            if args.model
            else models_from_shape(args.shape, precision, tokenizer, options)
        )
        for share in args.keep:
            line = {"bench": "adapt_step", **measure_kept_share(models, share, args.tokens, args.trials)}
            print_record({**line, "device": describe_mlx_device()})
    return 0


def measure_kept_share(models: Models, share: float, tokens: int, trials: int) -> dict[str, Any]:
    """Returns the record for one share of kept rows.

    Times are milliseconds per step. A ratio is the smaller ("cut") model's time divided by the whole model's in one
    trial. `of_bound` is the time saved at the median ratio, divided by the bound. One untimed round comes first.
    """
    vocab_size = models.base_config["vocab_size"]
    kept = np.linspace(0, vocab_size - 1, max(1, round(share * vocab_size))).astype(np.uint32)
    cut_models = replace(models, plain=make_model_with_kept_rows(models, kept))
    engines = {"whole": MlxLm(models), "cut": MlxLm(cut_models)}
    eos = set(models.tokenizer.eos_token_ids)
    ids = [i for i in range(min(len(kept), len(models.tokenizer))) if i not in eos][-tokens:]
    if not ids:
        raise MlxZipError(f"of {vocab_size} rows {len(kept)} are too few to emit an id")
    forced = [ids[i % len(ids)] for i in range(tokens)]
    ways = {name: lambda trial, engine=engine: time_forced_steps_ms(engine, forced) for name, engine in engines.items()}
    found = run_in_turns(ways, trials)
    times = {clock: {name: [ms[i] for ms in runs] for name, runs in found.items()} for i, clock in enumerate(CLOCKS)}
    whole, cut = engines["whole"], engines["cut"]
    read, removed = whole.weight_bytes + whole.kv_bytes * tokens // 2, whole.weight_bytes - cut.weight_bytes
    ratios = {clock: [y / x for x, y in zip(of["whole"], of["cut"], strict=True)] for clock, of in times.items()}
    gains = {clock: 1 - median(of) for clock, of in ratios.items()}
    return {
        "model": {"name": models.name, "precision": models.precision, "weights": models.weights},
        "vocab_size": vocab_size,
        "kept": len(kept),
        "tokens": tokens,
        "trials": trials,
        "bytes": {"read_per_step": read, "removed": removed},
        "bound": round(removed / read, 4),
        **{clock: {name: summarize_samples(samples) for name, samples in of.items()} for clock, of in times.items()},
        "ratio": {clock: summarize_samples(of) for clock, of in ratios.items()},
        "of_bound": {clock: round(gain * read / removed, 3) for clock, gain in gains.items()} if removed else None,
    }


def time_forced_steps_ms(engine: MlxLm, forced: list[int]) -> tuple[float, float]:
    """Runs the forced ids once and returns milliseconds per step by wall clock and by processor clock.

    Wall time is the median time between consecutive steps. Processor time is the whole run's, divided by its steps.
    """
    begun = time.process_time()
    found = engine.run(forced[:1], len(forced), forced)
    used_s = time.process_time() - begun
    return 1e3 * float(np.median(np.diff(found.times))), 1e3 * used_s / len(forced)
