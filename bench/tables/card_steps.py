"""Computes what a step can reach on cards, from published rates, counted launches and counted instructions.

Nothing here is a measurement. The launches are those that `tests/cuda` counts and holds to; the instructions are read
from compiled code by `python tests/cuda/kernels/compile_for_gpu.py 90 --products`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mlx_zip.bench.records import Records, table

FIRST = "H100"  # card for which targets are set


class Card(NamedTuple):
    """A card's published rates: bytes per second of its memory, and float32 operations per second of its cores."""

    bytes_per_s: float
    flops: float

    @property
    def issued_per_s(self) -> float:
        """Instructions per second of all lanes; a multiplication with an addition is one, and counts as two."""
        return self.flops / 2


CARDS = {"H100": Card(3.35e12, 67e12), "H200": Card(4.8e12, 67e12)}  # SXM, from NVIDIA's data sheets
LAYER_LAUNCHES, OTHER_LAUNCHES = 7, 10  # of a step of torch-base
KINDS = (("phi-3.5-mini", "16"), ("phi-3.5-mini", "4"), ("llama-3.2-1b", "16"))
KV_IDS = 512 + 128  # ids in the cache halfway through a request of 512+256
SHARE = 0.78  # of the bandwidth, the target at phi-3.5-mini in 16 bits
LAUNCH_US = (1.0, 2.0, 3.0)  # time per launch in which nothing is read
WEIGHT_BYTES = {"16": 2.0, "8": 1 + 4 / 64, "4": 0.5 + 4 / 64}  # with scale and bias of each group of 64
# Triton -> bits -> instructions per weight of the product's best size at 3072 columns, without and with a norm
INSTRUCTIONS = {
    "3.6": {"16": (5.53, 6.14), "8": (8.79, 9.82), "4": (7.08, 7.85)},
    "3.9": {"16": (4.82, 5.55), "8": (9.94, 10.67), "4": (6.91, 7.72)},
}


def reached(read_s: float, other_s: float) -> float:
    """Returns the share of the bandwidth that is reached in reading for read_s if other things take other_s more."""
    return read_s / (read_s + other_s)


def same_overhead(share: float, card: str) -> float:
    """Returns the share of a card's bandwidth at which a step loses as much time as one at `share` on the first card.

    The bytes are the same; faster memory reads them in less time, so the time that is lost weighs more.
    """
    return 1 / (1 + (1 / share - 1) * CARDS[card].bytes_per_s / CARDS[FIRST].bytes_per_s)


def launches(layers: int) -> int:
    """Returns the launches of a step of torch-base."""
    return LAYER_LAUNCHES * layers + OTHER_LAUNCHES


def step_bytes(name: str, precision: str) -> int:
    """Returns the bytes of weights, keys and values that a step of a shape reads."""
    from mlx_zip.bench.engines.runs import kv_bytes_per_id
    from mlx_zip.bench.engines.shape_table import SHAPES
    from mlx_zip.bench.steps.mac_steps import sizes_of

    return round(sizes_of(name, precision)["weights"].bytes + KV_IDS * kv_bytes_per_id(SHAPES[name], 2))


def steps_table(records: Records) -> str:
    """Returns the table of steps: what they read and launch, and what launches leave of the bandwidth."""
    from mlx_zip.bench.engines.shape_table import SHAPES

    rows = []
    for name, precision in KINDS:
        read, count = step_bytes(name, precision), launches(SHAPES[name]["num_hidden_layers"])
        for card, rates in CARDS.items():
            read_s = read / rates.bytes_per_s
            left_us = 1e6 * read_s * (1 / SHARE - 1) / count
            shares = [f"{reached(read_s, 1e-6 * us * count):.0%}" for us in LAUNCH_US]
            cells = [f"{read / 1e6:,.0f}", str(count), f"{1e3 * read_s:.2f}", f"{left_us:.1f}", *shares]
            rows.append([name, precision, card, *cells])
    heads = ["shape", "bits", "card", "MB", "launches", "reading, ms", f"us per launch that leave {SHARE:.0%}"]
    return table([*heads, *(f"at {us:g} us" for us in LAUNCH_US)], rows)


def arithmetic_table(records: Records) -> str:
    """Returns the table of products with one vector: how much of the bandwidth their instructions can keep up with."""
    rows = []
    for triton, kinds in INSTRUCTIONS.items():
        for bits, (plain, normed) in kinds.items():
            shares = []
            for rates in CARDS.values():
                weights_per_s = rates.bytes_per_s / WEIGHT_BYTES[bits]
                found = [rates.issued_per_s / (count * weights_per_s) for count in (normed, plain)]
                low, high = (f"{min(1.0, share):.0%}" for share in found)
                shares.append("all" if low == "100%" else f"{low} to {high}")
            rows.append([triton, bits, f"{plain:.1f} to {normed:.1f}", *shares])
    return table(["Triton", "bits", "instructions per weight", *(f"share on an {card}" for card in CARDS)], rows)


TABLES = {"card_steps": steps_table, "card_arithmetic": arithmetic_table}
PICTURES: dict[str, Any] = {}
