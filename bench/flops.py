"""Appendix B of the zip2zip paper: training FLOPs with hypertokens, and table 9 compared with our arithmetic.

Source: arXiv 2506.01084, appendix B. Its equations are not numbered; they are named here by what they give.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from mlx_zip.errors import MlxZipError

from .recording import print_record

PAPER_RATE = 0.7121  # compression rate at merge size 3, windows of 2,048 (table 7)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and its α in table 9; None for models of the paper's experiments that the table lacks."""

    name: str
    layers: int
    merge_size: int
    encoder_layers: int
    paper_alpha: float | None


TABLE_9 = (
    Shape("LLM-4B", 14, 2, 1, 0.14),
    Shape("LLM-7B", 32, 2, 2, 0.13),
    Shape("LLM-70B", 80, 3, 3, 0.11),
    Shape("LLM-400B", 128, 3, 4, 0.09),
)
TRAINED = (  # M = 3 and two encoder layers (§3.1); layers from the models' own configurations
    Shape("Phi-3.5-mini (4B)", 32, 3, 2, None),
    Shape("Phi-3-medium (14B)", 40, 3, 2, None),
)


def hyper_overhead(encoder_layers: int, merge_size: int, layers: int) -> float:
    """The hyper-encoder's share, α ≈ l · M / L, if every id is an entry of M base ids (last equation, table 9)."""
    return encoder_layers * merge_size / layers


def relative_flops(rate: float, overhead: float) -> float:
    """Training FLOPs with hypertokens over those without, ρ · (1 + α) (fourth equation). rate: ρ; overhead: α."""
    return rate * (1.0 + overhead)


def counted_overhead(encoder_layers: int, merge_size: int, layers: int, rows_per_id: float) -> float:
    """The hyper-encoder's share α by encoded rows: l · M / L times the rows encoded per id of compressed text.

    An encoder layer costs as much as a decoder layer, as in appendix B. rows_per_id: input and output rows together;
    two encoders that each encode every id's new entry make it 2.
    """
    return hyper_overhead(encoder_layers, merge_size, layers) * rows_per_id


def alpha_agrees_with_paper(shape: Shape) -> bool:
    """Whether our α rounds to table 9's two digits; a tie such as 0.125 may round up, as in the paper."""
    alpha = hyper_overhead(shape.encoder_layers, shape.merge_size, shape.layers)
    return shape.paper_alpha is not None and abs(alpha - shape.paper_alpha) <= 0.005 + 1e-12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench flops`."""
    parser.add_argument(
        "--rate",
        type=float,
        default=PAPER_RATE,
        help=f"compression rate: ids per base id, above 0 and at most 1 (default: {PAPER_RATE}, the paper's)",
    )
    parser.add_argument(
        "--rows-per-id",
        type=float,
        default=2.0,
        help="number of hyper rows encoded per id of compressed text, input and output rows together (default: 2)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints one JSON line per model. Raises `MlxZipError` for a rate or a number of rows out of range."""
    if not 0 < args.rate <= 1:
        raise MlxZipError(f"--rate must be above 0 and at most 1, got {args.rate}")
    if not 0 <= args.rows_per_id < float("inf"):
        raise MlxZipError(f"--rows-per-id must be 0 or more, got {args.rows_per_id}")
    for shape in (*TABLE_9, *TRAINED):
        print_record(make_record(shape, args.rate, args.rows_per_id))
    return 0


def make_record(shape: Shape, rate: float, rows_per_id: float) -> dict[str, Any]:
    """Returns a model's JSON record: α and ρ · (1 + α) by appendix B and by encoded rows, and the paper's α."""
    sizes = shape.encoder_layers, shape.merge_size, shape.layers
    alpha, counted = hyper_overhead(*sizes), counted_overhead(*sizes, rows_per_id)
    return {
        "bench": "flops",
        "model": shape.name,
        "layers": shape.layers,
        "merge_size": shape.merge_size,
        "encoder_layers": shape.encoder_layers,
        "overhead": alpha,
        "paper_overhead": shape.paper_alpha,
        "agrees": None if shape.paper_alpha is None else alpha_agrees_with_paper(shape),
        "rate": rate,
        "relative_flops": relative_flops(rate, alpha),
        "rows_per_id": rows_per_id,
        "counted_overhead": counted,
        "counted_relative_flops": relative_flops(rate, counted),
    }
