"""Times what `mlx_zip.vllm` adds to a step of vLLM on the host, and measures the memory of the process.

    python -m mlx_zip.bench.steps.vllm_hooks --model MODEL [--vllm-args JSON]

prints a line of JSON for each number of concurrent requests, warm (all rows are encoded) and cold (rows of new entries
are encoded in the step). Only the calls in `HOOKS` are timed, in steps of one id per request, in an engine whose worker
is in this process. Work that these calls start on a GPU is not waited for. On a CPU that work runs inside the call, so
times are also given without the products of outputs and hyper rows, which a GPU computes while the host goes on. A
first round of other requests is a warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlx_zip.arguments import Parser, check_flags_at_least
from mlx_zip.bench.machine import resident_bytes
from mlx_zip.bench.recording import print_record, summarize_samples
from mlx_zip.errors import MlxZipError

HOOKS = ("_read_step", "_write_rows", "_embed", "add_hyper_logits")  # methods of `Zip2ZipState`, in the order of a step
PRODUCTS = "_row_logits"  # method of `Zip2ZipState` that the last hook calls
AT_A_TIME = (1, 16)
OPENING = "Once upon a time there was a little girl who had {} cats. She"
Step = dict[str, float]  # name of a hook: seconds


@contextmanager
def timed_hooks(done: Callable[[int, bool, Step], None]) -> Iterator[None]:
    """Context manager: times `HOOKS` and `PRODUCTS` in every `Zip2ZipState`.

    done: called after each step of one id per request, with the number of requests, whether the step was cold, and the
    seconds of each hook.
    """
    from mlx_zip.vllm.state import Zip2ZipState

    timed_names = (*HOOKS, PRODUCTS)
    real, step, cold = {name: getattr(Zip2ZipState, name) for name in timed_names}, Step(), False

    def wrap(name: str) -> Callable[..., Any]:
        def timed(self: Any, *arguments: Any) -> Any:
            nonlocal cold
            if name == "_write_rows":
                cold = bool(self._unwritten)
            began = time.perf_counter()
            result = real[name](self, *arguments)
            step[name] = time.perf_counter() - began
            if name == HOOKS[-1]:
                batch = arguments[1]
                if batch.num_tokens == batch.num_reqs and len(step) == len(timed_names):
                    done(batch.num_reqs, cold, step.copy())
                step.clear()
            return result

        return timed

    for name in timed_names:
        setattr(Zip2ZipState, name, wrap(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(Zip2ZipState, name, function)


def measure_hooks(model: str, vllm_args: dict[str, Any], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Returns a record per number of concurrent requests, warm and cold: microseconds of a step and each hook."""
    from mlx_zip.vllm import LLM

    steps: dict[tuple[int, bool], list[Step]] = defaultdict(list)
    with (
        timed_hooks(lambda count, cold, step: steps[count, cold].append(step)),
        LLM(model, max_running=max(AT_A_TIME), vllm_args=vllm_args) as opened,
    ):
        started = resident_bytes()
        for number in range(rounds + 1):
            for count in AT_A_TIME:
                opened.generate([OPENING.format(f"{number} and {one}") for one in range(count)], tokens)
            if not number:
                steps.clear()
        answered = resident_bytes()
    records = []
    for (count, cold), found in sorted(steps.items()):
        if count in AT_A_TIME:
            hooks = {name: summarize_samples([1e6 * step[name] for step in found])["median"] for name in found[0]}
            sums = [sum(step[name] for name in HOOKS) for step in found]
            others = [total - step[PRODUCTS] for total, step in zip(sums, found, strict=True)]
            figures = {
                "us": summarize_samples([1e6 * total for total in sums]),
                "us_without_products": summarize_samples([1e6 * other for other in others]),
                "hooks": hooks,
            }
            memory = {"resident_bytes": {"after_start": started, "after_answers": answered}}
            rows = "cold" if cold else "warm"
            records.append(
                {"bench": "vllm-hooks", "model": model, "requests": count, "rows": rows, **figures, **memory}
            )
    return records


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the records; returns exit status 0, or 2 after an error."""
    made = Parser(prog="python -m mlx_zip.bench.steps.vllm_hooks", description="Times our hooks on vLLM in an engine.")
    made.add_argument("--model", default="stories", help="model folder, bundled model or hub id (default: stories)")
    made.add_argument("--vllm-args", type=json.loads, default={}, metavar="JSON", help="as of `mlx_zip serve`")
    made.add_argument("--tokens", type=int, default=60, help="base tokens of each answer (default: 60)")
    made.add_argument("--rounds", type=int, default=4, help="times that each answer is written (default: 4)")
    args: argparse.Namespace = made.parse_args(argv)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker must run in this process
    try:
        check_flags_at_least(args, 1, "tokens", "rounds")
        for record in measure_hooks(args.model, args.vllm_args, args.tokens, args.rounds):
            print_record(record)
    except (MlxZipError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
