"""Computes what a step costs on Macs, for mlx_zip and mlx-lm: launches, bytes and published bandwidths, no measurement.

The launches of a shape are counted on small models of the same family, quantization and kind of encoder, with one and
with two layers: their difference is a layer's, and the rest is the same at every depth. The bytes are those of the
shape's own arrays, which are made but never computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from statistics import mean
from typing import Any, NamedTuple

from .records import Records
from .tables import table

# bandwidth in GB/s, from Apple's technical specifications
CHIPS = {"M1": 68.25, "M2 Pro": 200.0, "M4": 120.0, "M4 Max": 546.0, "M5": 153.0}
MODELS = {"Llama-3.2-1B": "llama-3.2-1b", "Phi-3.5-mini": "phi-3.5-mini"}
PRECISIONS = ("4", "16")
SHARE = 0.8  # of the bandwidth that large products reach
LAUNCH_US = (5.0, 10.0)
KV_IDS = 1024  # ids in the KV cache
ROWS = 1024  # entries in the codebook
INSTALLS = 0.9  # share of the steps that install an entry
SECOND_BODIES = (0.19, 0.33)  # share of steps that ran the body twice, before entries were installed with input rows
ENCODER_BITS = {"4": 8, "16": 16}  # of the hyper-encoders, by bits of the weights: what `mlx_zip convert` makes
SMALL = {"intermediate_size": 256, "vocab_size": 512}
WIDTHS = {  # of the small models: quantized layers need 64 columns, and LongRoPE its 48 factors
    "llama": {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "phi3": {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 2},
}


class Cost(NamedTuple):
    """What a step costs: bytes it reads, and kernels it launches."""

    bytes_read: float
    launches: float

    def __add__(self, other: Any) -> Cost:
        return Cost(self.bytes_read + other.bytes_read, self.launches + other.launches)

    def times(self, share: float) -> Cost:
        """Returns the mean cost if only this share of the steps has it."""
        return Cost(self.bytes_read * share, self.launches * share)

    def ms(self, bandwidth: float, launch_us: float) -> float:
        """Returns the time in ms with this bandwidth in GB/s and this time per launch."""
        return self.bytes_read / (bandwidth * SHARE * 1e6) + self.launches * launch_us / 1e3


class Step(NamedTuple):
    """The costs of one model's steps.

    plain: mlx-lm's. warm: what mlx_zip adds to every step. cold: what it adds to a step that installs an entry whose
    rows must be encoded. body: a second run of the decoder's body.
    """

    plain: Cost
    warm: Cost
    cold: Cost
    body: Cost

    @property
    def costs(self) -> tuple[Cost, Cost]:
        """The cost of a mean step with warm rows and with cold ones."""
        warm = self.plain + self.warm
        return warm, warm + self.cold.times(INSTALLS)


# ---- launches


class Counted(NamedTuple):
    """Launches of a step: mlx-lm's, and those that mlx_zip adds, warm and at most when an entry is encoded."""

    plain: float
    warm: float
    cold: float


@cache
def launches_of(name: str, precision: str) -> tuple[Counted, float]:
    """Returns the launches of a shape's step, and those of one layer."""
    from .shape_table import SHAPES

    one, two = (_small_launches(name, precision, layers) for layers in (1, 2))
    layer = two.plain - one.plain
    added = (SHAPES[name]["num_hidden_layers"] - 1) * layer
    return Counted(one.plain + added, one.warm, one.cold), layer


def _small_launches(name: str, precision: str, layers: int) -> Counted:
    """Returns the launches of the steps of a small model of this shape's family that install an entry."""
    import mlx.core as mx

    from .selftest import PROMPT, synthetic_ids
    from .shape_table import SHAPES, ZipOptions
    from .shapes import from_config
    from .step_launches import step_launches

    family = SHAPES[name]["model_type"]
    config = {**SHAPES[name], **SMALL, **WIDTHS[family], "num_hidden_layers": layers}
    before, options = mx.default_device(), ZipOptions(encoder_bits=8)
    mx.set_default_device(mx.cpu)  # so that the page is the same on every machine
    try:
        models = from_config(name, config, precision, range(SMALL["vocab_size"]), options)
        ids = synthetic_ids(2 * PROMPT, SMALL["vocab_size"])
        found = {rows: step_launches(models, ids, rows) for rows in ("warm", "cold")}
    finally:
        mx.set_default_device(before)
    ours = {
        rows: mean(n for n, new in zip(one.ours, one.installs, strict=True) if new)
        for rows, one in found.items()
        if one
    }
    plain = mean(found["warm"].plain) if found["warm"] else 0.0
    return Counted(plain, ours["warm"] - plain, ours["cold"] - ours["warm"])


# ---- bytes


@cache
def bytes_of(name: str, precision: str) -> Mapping[str, float]:
    """Returns the bytes that a step reads of: weights, head, KV cache, output rows, and both hyper-encoders."""
    import mlx.core as mx

    from mlx_zip.config import SIDES
    from mlx_zip.models import Model

    from .engines import parameters, weight_bytes
    from .runs import kv_bytes
    from .shape_table import SHAPES, ZipOptions
    from .shapes import quantization_of, quantize, zip_args

    config, options = SHAPES[name], ZipOptions(encoder_bits=ENCODER_BITS[precision])
    model = Model(zip_args(config, options))
    quantize(model, mx.bfloat16, quantization_of(precision, options, model))
    sizes = {key: value.nbytes for key, value in parameters(model)}
    head = "model.embed_tokens." if config["tie_word_embeddings"] else "lm_head."
    return {
        "weights": weight_bytes(model),
        "head": sum(size for key, size in sizes.items() if key.startswith(head)),
        "KV cache": KV_IDS * kv_bytes(config, 2),
        "output rows": ROWS * config["hidden_size"] * 2,
        "encoders": sum(size for key, size in sizes.items() if key.startswith(SIDES)),
    }


def step_of(name: str, precision: str) -> Step:
    """Returns the costs of a shape's step."""
    found, (counted, layer) = bytes_of(name, precision), launches_of(name, precision)
    body = found["weights"] - found["head"] + found["KV cache"]
    from .shape_table import SHAPES

    return Step(
        plain=Cost(found["weights"] + found["KV cache"], counted.plain),
        warm=Cost(found["output rows"], counted.warm),
        cold=Cost(found["encoders"], counted.cold),
        body=Cost(body, layer * SHAPES[name]["num_hidden_layers"]),
    )


# ---- tables


def _kinds() -> list[tuple[str, str, Step]]:
    """Returns (model, bits, step) of every model at every precision."""
    return [(model, bits, step_of(name, bits)) for model, name in MODELS.items() for bits in PRECISIONS]


def steps_table(records: Records) -> str:
    """Returns the table of computed steps, one row per chip, model and precision; a range spans `LAUNCH_US`."""
    rows = []
    for chip, bandwidth in CHIPS.items():
        for model, bits, step in _kinds():
            warm, cold = step.costs
            plain = [step.plain.ms(bandwidth, us) for us in LAUNCH_US]
            before = [cost + step.body.times(share) for cost in (warm, cold) for share in SECOND_BODIES]
            ratios = [
                [cost.ms(bandwidth, us) / base for us, base in zip(LAUNCH_US, plain, strict=True)]
                for cost in (warm, cold)
            ]
            then = [cost.ms(bandwidth, us) / base for cost in before for us, base in zip(LAUNCH_US, plain, strict=True)]
            cells = [
                _range(plain, ".1f"),
                *(_range(one, ".2f") for one in ratios),
                _range(then[:4], ".2f"),
                _range(then[4:], ".2f"),
            ]
            rows.append([chip, model, bits, *cells])
    heads = ["chip", "model", "bits", "mlx-lm, ms", "warm", "cold", "warm, before", "cold, before"]
    return table(heads, rows)


def costs_table(records: Records) -> str:
    """Returns the table of what the steps above are computed from: bytes and launches of every model."""
    rows = []
    for model, bits, step in _kinds():
        costs = (step.plain, step.warm, step.cold, step.body)
        rows.append([model, bits, *(f"{one.bytes_read / 1e6:,.0f} MB, {one.launches:.0f}" for one in costs)])
    return table(["model", "bits", "mlx-lm", "warm adds", "cold adds, per entry", "a second body"], rows)


def assumptions_table(records: Records) -> str:
    """Returns the table of what the computation assumes."""
    chips = ", ".join(f"{chip} {found:g}" for chip, found in CHIPS.items())
    rows = [
        ["bandwidth, GB/s, as Apple publishes it", chips],
        ["share of it that a step reaches", f"{SHARE:.0%}"],
        ["time per launch", f"{LAUNCH_US[0]:g} to {LAUNCH_US[1]:g} us"],
        ["ids in the KV cache, which has 16 bits", f"{KV_IDS:,}"],
        ["entries in the codebook, each with an output row", f"{ROWS:,}"],
        ["steps that install an entry", f"{INSTALLS:.0%}"],
        ["hyper-encoders", "kind `transformer`, two layers, untied; 8 bits with weights of 4 bits, else 16"],
        ["steps with a second body, before", " to ".join(f"{share:.0%}" for share in SECOND_BODIES)],
        ["steps with a second body, now", "none"],
    ]
    return table(["assumed", ""], rows)


def _range(values: list[float], form: str) -> str:
    """Returns the smallest and the largest value as text; one of them if both are written alike."""
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


TABLES = {"mac_steps": steps_table, "mac_costs": costs_table, "mac_assumptions": assumptions_table}
PICTURES: dict[str, Any] = {}
