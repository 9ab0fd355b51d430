"""Times a batch of requests against the same requests one after the other, with and without hypertokens.

Both models run through mlx_zip's `stream_generate` and `stream_batch`. Each trial runs all four ways: two models,
batched or not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

from mlx_zip.arguments import check_flags_at_least, default_flags
from mlx_zip.bench.engines.mlx_engines import MlxEngine, MlxLm, MlxZip, wait_and_free_memory
from mlx_zip.bench.engines.model_making import models_from_folders
from mlx_zip.bench.engines.workloads import make_conversations, read_requests
from mlx_zip.bench.recording import load_before_bench, print_header, run_in_turns, summarize_samples
from mlx_zip.bench.tables.performance import KINDS, batch_table
from mlx_zip.engine.mlx.generate import stream_batch, stream_generate

from .ratios import median_with_interval

WAYS = ("one_stream", "batch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench batch`."""
    add = parser.add_argument
    flag = default_flags(add)
    add("--model", required=True, help="model with hypertokens to time: model folder, hub id or bundled model")
    add(
        "--base",
        help="plain model to compare with: model folder, hub id or bundled model (default: the decoder of --model)",
    )
    flag("--rows", 8, "number of requests in the batch", metavar="N")
    flag("--max-tokens", 256, "maximum number of base tokens per answer")
    flag("--trials", 5, "number of timed runs of each of the four ways to run")
    add("--cold", action="store_true", help="begin every run without the hyper rows that earlier runs encoded")
    add(
        "--requests",
        type=Path,
        metavar="FILE",
        help="file with the requests, one per line (default: 64 built-in requests for stories)",
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times both models in both ways and yields one record. Raises `MlxZipError` if the flags cannot be used."""
    check_flags_at_least(args, 1, "rows", "trials")
    check_flags_at_least(args, 2, "max_tokens")
    load_before_bench()
    models = models_from_folders(args.model, args.base)
    asked = make_conversations(models.tokenizer, read_requests(args.requests), args.rows, 1, args.max_tokens)
    prompts = [list(one.turns[0].prompt) for one in asked]
    engines = {"base": MlxLm(models), "zip": MlxZip(models)}
    device = engines["zip"].device
    print_header("batch", models.name, device, f"{args.rows} requests, trials: {args.trials} after 1 warm-up")
    base = Path(args.base).name if args.base else f"decoder of {Path(args.model).name}"
    record = {
        "bench": "batch",
        "model": {"zip": models.name, "base": base, "precision": models.precision},
        "setting": {
            "requests": args.rows,
            "max_tokens": args.max_tokens,
            "trials": args.trials,
            "warmup": 1,
            "rows": "cold" if args.cold else "warm",
        },
        **measure_batch_gain(engines, prompts, args),
        "device": device,
    }
    yield record
    print(batch_table([record]), file=sys.stderr)


# ---- measuring


class TimedRun(NamedTuple):
    """The counts and times of one run.

    ids: number of emitted ids. base_tokens, seconds: emitted base tokens, and duration including the prompts.
    """

    ids: int
    base_tokens: int
    seconds: float


def measure_batch_gain(
    engines: Mapping[str, MlxEngine], prompts: Sequence[list[int]], args: argparse.Namespace
) -> dict:
    """Returns the record's `counts` (of one run; all runs emit equal ids) and `figures`. engines: "base" and "zip"."""

    def run(kind: str, way: str, trial: int) -> TimedRun:
        if args.cold:
            engines[kind].forget_encoded_rows()
        return answer_all_prompts(engines[kind], way, prompts, args.max_tokens)

    runs = run_in_turns({pair: partial(run, *pair) for pair in product(KINDS, WAYS)}, args.trials, "Measuring")
    whole = {pair: [run.base_tokens / run.seconds for run in found] for pair, found in runs.items()}
    return {"counts": emitted_counts(runs), "figures": {"whole": throughput_figures(whole)}}


def answer_all_prompts(engine: MlxEngine, way: str, prompts: Sequence[list[int]], max_tokens: int) -> TimedRun:
    wait_and_free_memory()
    model, tokenizer, begun = engine.model, engine.tokenizer, time.perf_counter()
    if way == "batch":
        return time_responses((response for _, response in stream_batch(model, tokenizer, prompts, max_tokens)), begun)
    answers = (stream_generate(model, tokenizer, prompt, max_tokens=max_tokens) for prompt in prompts)
    return time_responses(chain.from_iterable(answers), begun)


def time_responses(responses: Iterable[Any], begun: float) -> TimedRun:
    """Reads all responses; returns counts and time. begun: when the request began, by `time.perf_counter`."""
    tokens = [len(response.base_ids) for response in responses]
    return TimedRun(len(tokens), sum(tokens), time.perf_counter() - begun)


# ---- the record


def throughput_figures(samples: Mapping[tuple[str, str], Sequence[float]]) -> dict[str, Any]:
    """Returns the speed of each model in each way, each model's gain by batching, and the ratio of the two gains.

    samples: (kind, way) -> base tokens/s of each trial. A gain is a trial's speed in a batch divided by its speed of
    one stream. The ratio is the gain with hypertokens divided by the plain model's gain.
    """
    found: dict[str, Any] = {}
    gains = {}
    for kind in KINDS:
        one, batch = (samples[kind, way] for way in WAYS)
        gains[kind] = [b / a for a, b in zip(one, batch, strict=True)]
        found[kind] = {way: figure_with_interval(samples[kind, way], "base tokens/s") for way in WAYS}
        found[kind]["gain"] = figure_with_interval(gains[kind], "x")
    found["quotient"] = figure_with_interval([b / a for a, b in zip(gains["base"], gains["zip"], strict=True)], "x")
    return found


def figure_with_interval(samples: Sequence[float], unit: str) -> dict[str, Any]:
    ratio = median_with_interval(tuple(samples))
    return {"unit": unit, **summarize_samples(samples), "low": round(ratio.low, 3), "high": round(ratio.high, 3)}


def emitted_counts(runs: Mapping[tuple[str, str], Sequence[TimedRun]]) -> dict[str, Any]:
    first = {pair: found[0] for pair, found in runs.items()}
    return {
        kind: {way: {"base_tokens": first[kind, way].base_tokens, "ids": first[kind, way].ids} for way in WAYS}
        for kind in KINDS
    }
