"""Two sets of `bench generate` records held against each other: ratios with their intervals, and an exit status.

A ratio is B's median over A's. Its interval comes from drawing the trials anew (bootstrap); trials of one command were
interleaved, so there they are drawn in pairs. A record regresses where the ratio is worse than the bound allows and
the interval excludes 1: a difference that chance does not explain. Then the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_zip.errors import MlxZipError

from .engines import ENGINES
from .generate_record import FIGURES, key, read_records
from .tables import FORMATS, table

LOWER_IS_BETTER = ("ttft_ms", "step_ms", "total_s", "peak_bytes", "joules", "joules_per_token")
NOT_COMPARED = ("base_tokens_per_step", "bytes_per_token")  # neither better nor worse
MEASURES = tuple(name for name in FIGURES if name not in NOT_COMPARED)
DEFAULT = ("ttft_ms", "steps_per_s", "base_tokens_per_s")
DRAWS = 10_000
REGRESSION = 1


@dataclass(frozen=True)
class Ratio:
    """One figure of two records: B's median over A's, and a 95 % interval."""

    name: str
    a: dict[str, Any]
    b: dict[str, Any]
    value: float
    low: float
    high: float

    def regresses(self, bound: float) -> bool:
        """Whether B is worse than A by more than `bound` (0.05: 5 %), and not by chance."""
        if self.name in LOWER_IS_BETTER:
            return self.value > 1 + bound and self.low > 1
        return self.value < 1 - bound and self.high < 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench compare`."""
    add = parser.add_argument
    add("a", metavar="A", help="records to compare with: a file that `bench generate` printed")
    add("b", metavar="B", help="records to judge; may be the same file, with --engines")
    add("--engines", nargs=2, metavar=("A", "B"), help="hold engine B of the second file against engine A of the first")
    add(
        "--measures",
        nargs="+",
        choices=MEASURES,
        default=list(DEFAULT),
        metavar="NAME",
        help=f"figures to compare (default: {' '.join(DEFAULT)})",
    )
    add("--bound", type=float, default=0.05, help="how much worse is still good: 0.05 for 5 %% (default: 0.05)")
    add("--format", choices=FORMATS, default="markdown", help="of the table (default: markdown)")
    add("--seed", type=int, default=0, help="of the bootstrap (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Prints the ratios; 1 where something regresses, else 0. Raises `MlxZipError`."""
    if not 0 <= args.bound < 1:
        raise MlxZipError(f"--bound must be from 0 to below 1, got {args.bound}")
    for name in args.engines or ():
        if name not in ENGINES:
            raise MlxZipError(f"engine {name!r} is not one of {', '.join(ENGINES)}")
    pairs = matched(read_records([args.a]), read_records([args.b]), args.engines)
    rng = np.random.default_rng(args.seed)
    ratios = [found for a, b in pairs for name in args.measures if (found := ratio(name, a, b, rng)) is not None]
    if not ratios:
        raise MlxZipError(f"{args.a} and {args.b} have no figure of --measures in common")
    print(_table(ratios, args.bound, args.format))
    worse = [found for found in ratios if found.regresses(args.bound)]
    print(f"{len(worse)} of {len(ratios)} ratios are worse by more than {args.bound:.0%}", file=sys.stderr)
    return REGRESSION if worse else 0


def matched(
    first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]], engines: Sequence[str] | None
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Records of the same thing; of several, the last. engines: A's and B's, else the same in both.

    What has no counterpart is told. Raises `MlxZipError` where nothing has.
    """
    of_a = {key(r, engines is None): r for r in first if engines is None or r["engine"] == engines[0]}
    of_b = {key(r, engines is None): r for r in second if engines is None or r["engine"] == engines[1]}
    both = [name for name in of_a if name in of_b]
    if not both:
        raise MlxZipError("the two files have no record of the same engine, model, text and settings")
    if alone := len(of_a) + len(of_b) - 2 * len(both):
        print(f"{alone} record(s) are in one file only and are not compared", file=sys.stderr)
    if any(of_a[name]["machine"] != of_b[name]["machine"] for name in both):
        print("these records are of different machines", file=sys.stderr)
    return [(of_a[name], of_b[name]) for name in both]


def ratio(name: str, a: dict[str, Any], b: dict[str, Any], rng: np.random.Generator) -> Ratio | None:
    """One figure of both; None where either lacks it or A's is 0."""
    figures = a["figures"][name], b["figures"][name]
    if None in figures or figures[0]["median"] == 0:
        return None
    samples = [np.array(figure["samples"], float) for figure in figures]
    low, high = interval(*samples, paired=a["run"] == b["run"] and len(samples[0]) == len(samples[1]), rng=rng)
    return Ratio(name, a, b, figures[1]["median"] / figures[0]["median"], low, high)


def interval(a: np.ndarray, b: np.ndarray, paired: bool, rng: np.random.Generator) -> tuple[float, float]:
    """95 % interval of median(b) / median(a), samples [n] and [m] drawn with replacement; paired: the same trials."""
    of_a = rng.integers(0, len(a), (DRAWS, len(a)))
    of_b = of_a if paired else rng.integers(0, len(b), (DRAWS, len(b)))
    ratios = np.median(b[of_b], axis=1) / np.median(a[of_a], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def _table(ratios: Sequence[Ratio], bound: float, kind: str) -> str:
    rows = [
        [
            r.a["model"]["name"],
            f"{r.a['workload']['domain']} {r.a['workload']['prompt_tokens']}+{r.a['workload']['tokens']}",
            r.a["engine"] if r.a["engine"] == r.b["engine"] else f"{r.b['engine']} over {r.a['engine']}",
            r.name,
            *(f"{record['figures'][r.name]['median']:.5g}" for record in (r.a, r.b)),
            f"{r.value:.3f}",
            f"{r.low:.3f} to {r.high:.3f}",
            "worse" if r.regresses(bound) else "",
        ]
        for r in ratios
    ]
    return table(["model", "text", "engine", "measure", "A", "B", "B / A", "95 % interval", ""], rows, kind)
