"""Splits the time of a decoding step of mlx_zip: codec, rows, graph building, waiting, sampling, detokenizing.

The same request runs in four ways, alternately: mlx-lm at the same KV length and mlx_zip, both unchanged; mlx_zip with
clocks around its parts; and mlx_zip with every part evaluated before the next begins. The clocks show the host's time
while the device works: `host_us`, wall time, adds up to a step over the parts; `cpu_us` is the time of it in which the
thread ran instead of waiting. `apart_us` are the times with parts evaluated separately: they include the parts' work on
the device and do not overlap, so they add up to more than a step.

Host work is reported in processor time: on two busy cores a thread waits up to 0.7 ms for a core after every wait,
which would count for the part that runs next.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np

from mlx_zip.arguments import check_flags_at_least, default_flags
from mlx_zip.bench.engines.interface import Run
from mlx_zip.bench.engines.mlx_engines import MlxLm, MlxZip
from mlx_zip.bench.engines.shape_table import Models
from mlx_zip.bench.engines.workloads import Workload
from mlx_zip.bench.generation.generate import (
    add_model_arguments,
    add_text_arguments,
    prepare_models_and_workloads,
    record_model_section,
)
from mlx_zip.bench.recording import load_before_bench, print_header
from mlx_zip.bench.records import table
from mlx_zip.device import default_device_is_gpu
from mlx_zip.progress import ProgressBar

from .tracer import CPU, OURS, PARTS, ZIP_HOOKS, Seconds, Tracer, seconds_of_parts

SCHEMA = 4
SIZES = ("512+128",)
AHEAD = {"on": True, "off": False, "auto": None}  # --ahead: what `RunOptions.ahead` takes
CLOCKS = ("host_us", "cpu_us", "apart_us")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench profile`."""
    add = parser.add_argument
    flag = default_flags(add)
    flag(
        "--mode",
        "replay",
        "what engines write. replay: the text's own continuation; free: greedy decoding",
        choices=("replay", "free"),
    )
    flag("--trials", 5, "number of timed runs in each of the four ways to run")
    flag(
        "--rows",
        "warm",
        "hyper rows that a run may reuse. warm: those that earlier runs encoded; cold: none",
        choices=("warm", "cold"),
    )
    flag(
        "--ahead",
        "auto",
        "whether a step's body begins before the host has read the step's id. auto: on a GPU",
        choices=tuple(AHEAD),
    )
    add_model_arguments(parser)
    add_text_arguments(parser, SIZES)


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a record per text and size, and prints a table of the step's parts on standard error.

    Raises `MlxZipError` if the flags, models or texts cannot be used.
    """
    check_flags_at_least(args, 1, "trials")
    args.engines = [MlxLm.name, MlxZip.name]
    load_before_bench()
    models, workloads = prepare_models_and_workloads(args)
    profiler = StepProfiler(args, models)
    plan = f"{len(workloads)} texts, {args.trials} trials of four ways to run, rows {args.rows}"
    print_header("profile", models.name, profiler.zipped.device, plan)
    with ProgressBar(len(workloads) * (args.trials + 1), "round", "Measuring") as count:
        for workload in workloads:
            record = profiler.measure(workload, count)
            count.clear()
            yield record
            count.say(step_parts_table(record))


class StepTimes:
    """Seconds of the steps of one way to run, without the first step of every run.

    whole: seconds of each step. medians: each run's median step. parts: part -> seconds of the part in each step.
    """

    def __init__(self) -> None:
        self.whole: list[float] = []
        self.medians: list[float] = []
        self.parts: dict[str, list[float]] = defaultdict(list)

    def add(self, run: Run, marks: Sequence[Seconds]) -> None:
        """Adds a run. marks: the tracer's totals at each step; empty for a run without a tracer."""
        steps = list(seconds_of_parts(marks))
        whole = [sum(wall.values()) for wall, _ in steps] if steps else np.diff(run.times).tolist()
        self.whole += whole
        self.medians.append(float(np.median(whole)))
        for wall, cpu in steps:
            for part in PARTS:
                self.parts[part].append(wall[part])
                self.parts[part + CPU].append(cpu[part])


class StepProfiler:
    """Runs a model with hypertokens and the plain model in four ways, and makes the records."""

    def __init__(self, args: argparse.Namespace, models: Models) -> None:
        """Raises `MlxZipError` if there is no model with hypertokens."""
        self.args, self.models = args, models
        self.plain, self.zipped = MlxLm(models), MlxZip(models)

    def measure(self, workload: Workload, count: Callable[[], object]) -> dict[str, Any]:
        """Runs a workload in all four ways, alternately, and returns its record. The first round is a warm-up.

        count: called after each round.
        """
        ways = {name: StepTimes() for name in ("mlx-lm", "mlx-zip", "mlx-zip traced", "mlx-zip apart")}
        turn = workload.turns[0]
        for trial in range(-1, self.args.trials):
            untraced, _ = self._run_zip(workload, None)
            runs = {
                "mlx-zip": (untraced, ()),
                "mlx-lm": (run_as_many_ids(self.plain, untraced, turn.prompt, turn.text or ()), ()),
                "mlx-zip traced": self._run_zip(workload, Tracer(ZIP_HOOKS)),
                "mlx-zip apart": self._run_zip(workload, Tracer(ZIP_HOOKS, apart=True)),
            }
            for name, (one, marks) in runs.items():
                if trial >= 0:
                    ways[name].add(one, marks)
            count()
        return self._make_record(workload, untraced, ways)

    def _run_zip(self, workload: Workload, tracer: Tracer | None) -> tuple[Run, Sequence[Seconds]]:
        """Runs the workload in mlx_zip, with an empty row store if --rows is cold; returns the run and the marks."""
        if self.args.rows == "cold":
            self.zipped.forget_encoded_rows()
        turn = workload.turns[0]
        with forced_run_ahead(AHEAD[self.args.ahead]), tracer or nullcontext():
            return self.zipped.run(turn.prompt, turn.tokens, turn.text), tracer.marks if tracer else ()

    @property
    def ahead(self) -> bool:
        """Whether mlx_zip begins a step's body before the host has read the step's id."""
        chosen = AHEAD[self.args.ahead]
        return default_device_is_gpu() if chosen is None else chosen

    def _make_record(self, workload: Workload, untraced: Run, ways: dict[str, StepTimes]) -> dict[str, Any]:
        turn, host, apart = workload.turns[0], ways["mlx-zip traced"], ways["mlx-zip apart"]
        ours, ours_cpu = (np.sum([host.parts[part + clock] for part in OURS], axis=0) for clock in ("", CPU))
        ratios = np.divide(ways["mlx-zip"].medians, ways["mlx-lm"].medians)
        args = self.args
        return {
            "bench": "profile",
            "schema": SCHEMA,
            "model": record_model_section(self.models, args),
            "mode": workload.mode,
            "workload": {
                "domain": workload.domain,
                "data": workload.data,
                "prompt_tokens": len(turn.prompt),
                "tokens": turn.tokens,
            },
            "setting": {"trials": args.trials, "rows": args.rows, "ahead": self.ahead},
            "counts": {
                "prompt_ids": untraced.prompt_ids,
                "steps": len(untraced.times),
                "base_tokens": len(untraced.base_ids),
            },
            "second_bodies": round_to_five_digits(untraced.second_bodies / len(untraced.times)) if self.ahead else None,
            "unit": "us per step",
            "steps": {name: summarize_us(way.whole, way.medians) for name, way in ways.items()},
            "ratio": {
                "median": round_to_five_digits(float(np.median(ratios))),
                "samples": [round_to_five_digits(r) for r in ratios.tolist()],
            },
            "parts": {
                part: {
                    "host_us": summarize_us(host.parts[part]),
                    "cpu_us": summarize_us(host.parts[part + CPU]),
                    "apart_us": summarize_us(apart.parts[part]),
                }
                for part in PARTS
            },
            "ours_us": summarize_us(ours.tolist()),
            "ours_cpu_us": summarize_us(ours_cpu.tolist()),
            "device": self.zipped.device,
        }


@contextmanager
def forced_run_ahead(ahead: bool | None) -> Iterator[None]:
    """Context manager: sets whether `mlx_zip.stream_generate` starts a step before the host has read its id.

    ahead: None lets the device decide.
    """
    generate = import_module("mlx_zip.engine.mlx.generate")
    with patch.object(generate, "_ahead_option", lambda model: ahead):
        yield


def run_as_many_ids(plain: MlxLm, like: Run, prompt: Sequence[int], text: Sequence[int]) -> Run:
    """Runs mlx-lm with as many prompt ids and forced ids as mlx_zip's run `like`, thus with equal KV length.

    prompt, text: base ids to read and to write, as far as they are needed.
    """
    written = (*text, *prompt)
    forced = [written[i % len(written)] for i in range(len(like.ids))]
    return plain.run(prompt[: like.prompt_ids], len(forced), forced)


def summarize_us(seconds: Sequence[float], trial_medians: Sequence[float] = ()) -> dict[str, Any]:
    us = 1e6 * np.asarray(seconds)
    found = {"mean": us.mean(), "median": np.median(us), "p90": np.quantile(us, 0.9)}
    figure: dict[str, Any] = {name: round_to_five_digits(float(value)) for name, value in found.items()}
    return (
        {**figure, "samples": [round_to_five_digits(1e6 * one) for one in trial_medians]} if trial_medians else figure
    )


def round_to_five_digits(value: float) -> float:
    return float(f"{value:.5g}")


def step_parts_table(record: dict[str, Any]) -> str:
    parts, steps = record["parts"], record["steps"]
    rows = [
        [
            part,
            *(f"{figure[name][of]:.0f}" for name in CLOCKS for of in ("mean", "median")),
            what,
        ]
        for (part, what), figure in zip(PARTS.items(), parts.values(), strict=True)
    ]
    totals = [f"{sum(figure[name]['mean'] for figure in parts.values()):.0f}" for name in CLOCKS]
    rows.append(["all", *(cell for total in totals for cell in (total, "")), "a step, under the clocks"])
    medians = ", ".join(f"{name} {figure['median']:.0f}" for name, figure in steps.items())
    bodies = record["second_bodies"]
    twice = "" if bodies is None else f" Steps that ran the body twice: {bodies:.1%}."
    size = f"{record['workload']['prompt_tokens']}+{record['workload']['tokens']}"
    header = ["part", "host mean", "median", "of it CPU mean", "median", "apart mean", "median", ""]
    return (
        f"{record['model']['name']}, {record['mode']}, {record['workload']['domain']} {size}; us per step\n\n"
        f"{table(header, rows)}\n\n"
        f"Median steps: {medians}. Ratio to mlx-lm's at the same KV length: {record['ratio']['median']:.3f}. "
        f"Host work of mlx_zip: {record['ours_cpu_us']['median']:.0f} (90 %: {record['ours_cpu_us']['p90']:.0f}), "
        f"by the wall's clock {record['ours_us']['median']:.0f}.{twice}\n"
    )
