"""Appendix B of the zip2zip paper: training FLOPs with hypertokens, and table 9 compared with our counts.

Source: arXiv 2506.01084, appendix B. Its equations are not numbered; comments name them by position or result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PAPER_RATE = 0.7121  # compression rate: ids per base id at merge size 3, windows of 2,048 (table 7)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. paper_alpha: the model's α in table 9; None if the table lacks the model."""

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
    """Returns α ≈ l · M / L: the hyper-encoder's FLOPs divided by the decoder's, if every id is an entry of M base ids.

    This is the last equation of appendix B. encoder_layers: l. merge_size: M. layers: L, layers of the decoder.
    """
    return encoder_layers * merge_size / layers


def relative_flops(rate: float, overhead: float) -> float:
    """Returns ρ · (1 + α): training FLOPs with hypertokens divided by those without. rate: ρ. overhead: α.

    This is the fourth equation of appendix B.
    """
    return rate * (1.0 + overhead)


def counted_overhead(encoder_layers: int, merge_size: int, layers: int, rows_per_id: float) -> float:
    """Returns the α of `hyper_overhead` times the number of rows that are encoded per id of compressed text.

    An encoder layer costs as much as a decoder layer, as in appendix B. rows_per_id: encoded input rows plus encoded
    output rows, per id; 2 if every id makes a new entry, which an input encoder and an output encoder each encode.
    """
    return hyper_overhead(encoder_layers, merge_size, layers) * rows_per_id


def flops_line(shape: Shape, rate: float, rows_per_id: float) -> dict[str, Any]:
    """Returns a model's line of table 9: α and ρ · (1 + α) by appendix B and by encoded rows, and the paper's α."""
    sizes = shape.encoder_layers, shape.merge_size, shape.layers
    alpha, counted = hyper_overhead(*sizes), counted_overhead(*sizes, rows_per_id)
    return {
        "model": shape.name,
        "layers": shape.layers,
        "merge_size": shape.merge_size,
        "encoder_layers": shape.encoder_layers,
        "overhead": alpha,
        "paper_overhead": shape.paper_alpha,
        "relative_flops": relative_flops(rate, alpha),
        "rows_per_id": rows_per_id,
        "counted_overhead": counted,
        "counted_relative_flops": relative_flops(rate, counted),
    }
