"""Compares two sets of `bench generate` records: ratios B / A with 95 % intervals, and an exit status.

If one command printed both records, their trials alternated: the ratio is the median of B / A over the pairs of trials.
Otherwise the ratio is B's median divided by A's median. Intervals come from 10,000 bootstrap draws of pairs or trials.
A figure regresses, with exit status 1, if its ratio is worse than --bound and the interval excludes 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_zip.arguments import check_at_least
from mlx_zip.bench.engines.interface import ENGINES
from mlx_zip.bench.records import table
from mlx_zip.errors import MlxZipError

from .generate_record import FIGURES, read_records, record_key, refuse_wrong_fields
from .ratios import Ratio, conversation_count, paired_ratio, unpaired_ratio

LOWER_IS_BETTER = ("ttft_ms", "step_ms", "total_s", "peak_bytes", "joules", "joules_per_token")
NOT_COMPARED = ("base_tokens_per_step", "bytes_per_token")  # neither direction is better
MEASURES = tuple(name for name in FIGURES if name not in NOT_COMPARED)
DEFAULT = ("ttft_ms", "steps_per_s", "base_tokens_per_s")
REGRESSION = 1


@dataclass(frozen=True)
class Comparison:
    """The figure `name` in the records `a` and `b`, and its ratio b / a."""

    name: str
    a: dict[str, Any]
    b: dict[str, Any]
    ratio: Ratio

    def regresses(self, bound: float) -> bool:
        """Returns whether B is worse than A by more than `bound` (0.05: 5 %) and the interval excludes 1."""
        if self.name in LOWER_IS_BETTER:
            return self.ratio.value > 1 + bound and self.ratio.low > 1
        return self.ratio.value < 1 - bound and self.ratio.high < 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench compare`."""
    add = parser.add_argument
    add("a", metavar="A", help="reference: a file of records that `bench generate` printed")
    add("b", metavar="B", help="file of records to compare with A; with --engines it may be A itself")
    add(
        "--engines",
        nargs=2,
        metavar=("A", "B"),
        help="engine of file A and engine of file B to compare (default: compare every engine with itself)",
    )
    add(
        "--measures",
        nargs="+",
        choices=MEASURES,
        default=list(DEFAULT),
        metavar="NAME",
        help=f"names of the figures to compare (default: {' '.join(DEFAULT)})",
    )
    add(
        "--bound",
        type=float,
        default=0.05,
        help="largest accepted loss as a fraction; above it the exit status is 1 (default: 0.05)",
    )
    add("--seed", type=int, default=0, help="seed of the bootstrap's random draws (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Prints a table of ratios; returns 1 if a figure regresses, else 0.

    Raises `MlxZipError` if a flag or file is invalid, or the files have no figure of --measures in common.
    """
    if not 0 <= args.bound < 1:
        raise MlxZipError(f"--bound must be from 0 to below 1, got {args.bound}")
    for name in args.engines or ():
        if name not in ENGINES:
            raise MlxZipError(f"engine {name!r} is not one of {', '.join(ENGINES)}")
    check_at_least(args, 0, "seed")
    with refuse_wrong_fields((args.a, args.b)):
        pairs = match_records(read_records([args.a]), read_records([args.b]), args.engines)
        tried = [compare_figure(name, a, b, args.seed) for a, b in pairs for name in args.measures]
        ratios = [found for found in tried if found is not None]
        if not ratios:
            raise MlxZipError(f"{args.a} and {args.b} have no figure of --measures in common")
        print(_ratio_table(ratios, args.bound))
    worse = [found for found in ratios if found.regresses(args.bound)]
    print(f"{len(worse)} of {len(ratios)} ratios are worse by more than {args.bound:.0%}", file=sys.stderr)
    return REGRESSION if worse else 0


def match_records(
    first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]], engines: Sequence[str] | None
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns pairs (A's record, B's record) of equal model, text, mode and rows; of a file's equal records, the last.

    engines: (A's engine, B's engine); None pairs records of equal engines. Prints the number of unpaired records to
    standard error. Raises `MlxZipError` if there is no pair.
    """
    of_a = {record_key(r, engines is None): r for r in first if engines is None or r["engine"] == engines[0]}
    of_b = {record_key(r, engines is None): r for r in second if engines is None or r["engine"] == engines[1]}
    shared = [name for name in of_a if name in of_b]
    if not shared:
        raise MlxZipError("the two files have no record of the same engine, model, text and settings")
    if alone := len(of_a) + len(of_b) - 2 * len(shared):
        print(f"{alone} record(s) are in one file only and are not compared", file=sys.stderr)
    if any(of_a[name]["machine"] != of_b[name]["machine"] for name in shared):
        print("these records are of different machines", file=sys.stderr)
    return [(of_a[name], of_b[name]) for name in shared]


def compare_figure(name: str, a: dict[str, Any], b: dict[str, Any], seed: int) -> Comparison | None:
    """Returns the ratio of figure `name` in b to that in a; None if either record lacks it or a's median is 0.

    seed: seed of the bootstrap's draws.
    """
    of_a, of_b = a["figures"][name], b["figures"][name]
    if of_a is None or of_b is None or of_a["median"] == 0:
        return None
    if a["run"] == b["run"] and len(of_a["samples"]) == len(of_b["samples"]):
        return Comparison(name, a, b, paired_ratio(of_a["samples"], of_b["samples"], conversation_count(b), seed))
    return Comparison(name, a, b, unpaired_ratio(of_a["samples"], of_b["samples"], seed))


def _ratio_table(ratios: Sequence[Comparison], bound: float) -> str:
    rows = [
        [
            r.a["model"]["name"],
            f"{r.a['workload']['domain']} {r.a['workload']['prompt_tokens']}+{r.a['workload']['tokens']}",
            r.a["engine"] if r.a["engine"] == r.b["engine"] else f"{r.b['engine']} over {r.a['engine']}",
            r.name,
            *(f"{record['figures'][r.name]['median']:.5g}" for record in (r.a, r.b)),
            f"{r.ratio.value:.3f}",
            f"{r.ratio.low:.3f} to {r.ratio.high:.3f}",
            "worse" if r.regresses(bound) else "",
        ]
        for r in ratios
    ]
    return table(["model", "text", "engine", "measure", "A", "B", "B / A", "95 % interval", ""], rows)
