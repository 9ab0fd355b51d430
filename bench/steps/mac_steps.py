"""Estimates the time of a step on Macs, in mlx_zip and mlx-lm, from launches, bytes, bandwidths and host time.

Nothing here is measured on a Mac. The launches of a shape are counted on small models of the same family, quantization
and hyper-encoder, with one and with two layers: the difference is the launches of a layer; all other launches do not
depend on depth. The bytes are those of the shape's own arrays, which are made but never evaluated. Bandwidths are
Apple's published ones. Host time is measured on another machine by running this file, which prints the lines of the
record `mac-host`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from mlx_zip.bench.records import Records, table
from mlx_zip.models.two_part_step import INPUT_ROWS_TOGETHER


class ChipKind(NamedTuple):
    """Common figures of a kind of chip. launch_us: minimum and maximum time of a launch.

    ops, mb: MLX submits a command buffer when the buffer exceeds `ops` operations or mb x 2^20 numbers
    (mlx/backend/metal/device.cpp).
    """

    launch_us: tuple[float, float]
    ops: int
    mb: int


class Chip(NamedTuple):
    """A chip. bandwidth: GB/s, from Apple's technical specifications."""

    bandwidth: float
    kind: ChipKind


BASE, MAX = ChipKind((3.0, 5.0), 40, 40), ChipKind((2.0, 3.0), 50, 50)
CHIPS = {
    "M1": Chip(68.25, BASE),
    "M2 Pro": Chip(200.0, BASE),
    "M4": Chip(120.0, BASE),
    "M4 Max": Chip(546.0, MAX),
    "M5": Chip(153.0, BASE),
}
SECOND_BODIES = 0.01  # largest share of steps that run the body twice
MODELS = {"Llama-3.2-1B": "llama-3.2-1b", "Phi-3.5-mini": "phi-3.5-mini"}
PRECISIONS = ("4", "16")
SHARE = 0.8  # share of the bandwidth that large products reach
BUFFER_US = 20.0  # time of a command buffer
KV_IDS = 1024  # ids in the KV cache
ROWS = 1024  # entries in the codebook
INSTALL_IDS = 4000  # number of ids over which the share of installing steps is computed
INSTALLS_OF: dict[str, Any] = {"tokenizer": "llama3", "merge_size": 3, "codebook_size": 2048}  # rows of `tokens` to use
ENCODER_BITS = {"4": 8, "16": 16}  # weights' bits -> encoders' bits, as `mlx_zip convert` makes them
HOST_ROUNDS = 7  # number of runs; the fastest counts


class DeviceCost(NamedTuple):
    """The cost of a step on the device, or of reading arrays.

    numbers: count of the numbers that are read. evals: count of evaluations.
    """

    bytes_read: float
    launches: float = 0.0
    numbers: float = 0.0
    evals: float = 0.0

    def __add__(self, other: Any) -> DeviceCost:
        return DeviceCost(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, share: float) -> DeviceCost:
        """Returns the mean cost per step if a fraction `share` of the steps has this cost."""
        return DeviceCost(*(value * share for value in self))

    def buffers(self, kind: ChipKind) -> float:
        """Returns the number of command buffers of a step: one per evaluation, and one whenever a buffer is full."""
        return self.evals + max(self.launches / kind.ops, self.numbers / (kind.mb << 20))

    def ms(self, chip: Chip, launch_us: float) -> float:
        """Returns the device's time in ms. launch_us: time per launch."""
        read = self.bytes_read / (chip.bandwidth * SHARE * 1e6)
        return read + (self.launches * launch_us + self.buffers(chip.kind) * BUFFER_US) / 1e3


class HostTimes(NamedTuple):
    """The host's ms per step: of mlx-lm, and of mlx_zip with stored rows (warm) and with an encoded entry (cold)."""

    plain: float
    warm: float
    cold: float


class StepCosts(NamedTuple):
    """The costs of one model's steps.

    plain: mlx-lm's step. warm: what mlx_zip adds to every step. output_row: what it adds to a step that installs an
    entry whose output row must be encoded. input_rows: a pass that encodes the input rows of `INPUT_ROWS_TOGETHER`
    entries. body: a second run of the decoder's body. host: the host's times, which overlap with the device's.
    """

    plain: DeviceCost
    warm: DeviceCost
    output_row: DeviceCost
    input_rows: DeviceCost
    body: DeviceCost
    host: HostTimes

    def plain_ms(self, chip: Chip, launch_us: float) -> float:
        """Returns the ms of mlx-lm's step: the longer of device and host time, as both work at once."""
        return max(self.plain.ms(chip, launch_us), self.host.plain)

    def warm_ms(self, chip: Chip, launch_us: float) -> float:
        """Returns the ms of a step of mlx_zip if all rows are in the store."""
        device = self.plain + self.warm + self.body.times(SECOND_BODIES)
        return max(device.ms(chip, launch_us), self.host.warm)

    def cold_ms(self, chip: Chip, launch_us: float, installs: float) -> float:
        """Returns the mean ms of a step if a share `installs` of the steps encodes an entry's rows."""
        added = self.output_row + self.input_rows.times(1 / INPUT_ROWS_TOGETHER)
        device = self.plain + self.warm + added + self.body.times(SECOND_BODIES)
        one = max(device.ms(chip, launch_us), self.host.cold)
        return installs * one + (1 - installs) * self.warm_ms(chip, launch_us)


# ---- steps that install an entry


def install_shares(records: Records, ids: int) -> dict[str, float]:
    """Returns, by domain, the share of the first `ids` ids of a text that install an entry, from the record `tokens`.

    The record has ids and entries for windows of several lengths; between these, entries are interpolated.
    """
    found = {}
    for line in records.lines("tokens"):
        if line["tokenizer"]["name"] != INSTALLS_OF["tokenizer"]:
            continue
        rows = [dict(zip(line["columns"], row, strict=True)) for row in line["counts"]]
        points, size = [(0.0, 0.0)], INSTALLS_OF["codebook_size"]
        for row in sorted((one for one in rows if isinstance(one["window"], int)), key=lambda one: one["window"]):
            same = row["codebook_size"] == size or row["window"] <= row["codebook_size"] < size  # never full
            if row["merge_size"] == INSTALLS_OF["merge_size"] and same:
                windows = line["base_ids"] / row["window"]
                points.append((row["ids"] / windows, min(size, row["entries"] / windows)))
        at, entries = np.array(points).T
        found[line["domain"]] = float(np.interp(ids, at, entries)) / ids
    return found


# ---- launches and host time of small models


class CountedLaunches(NamedTuple):
    """Numbers of launches. plain: of mlx-lm's step. warm: added by mlx_zip in a step that installs an entry.

    one_row, input_rows: of a pass that encodes rows of one side, for one entry and for `INPUT_ROWS_TOGETHER` entries.
    """

    plain: float
    warm: float
    one_row: float
    input_rows: float


@cache
def launches_of(name: str, precision: str) -> tuple[CountedLaunches, float]:
    """Returns the launches of a shape's step, and the launches of one decoder layer in mlx-lm."""
    one, two = (count_small_model_launches(name, precision, layers) for layers in (1, 2))
    layer = two.plain - one.plain
    return one._replace(plain=one.plain + (layer_count(name) - 1) * layer), layer


def layer_count(name: str) -> int:
    from mlx_zip.bench.engines.shape_table import SHAPES

    return SHAPES[name]["num_hidden_layers"]


def count_small_model_launches(name: str, precision: str, layers: int) -> CountedLaunches:
    from .launches import count_step_launches, encoder_launches

    def counted(models: Any, ids: Sequence[int]) -> CountedLaunches:
        found = count_step_launches(models, ids, "warm")
        assert found is not None
        plain = mean(found.plain)
        ours = mean(n for n, new in zip(found.ours, found.installs, strict=True) if new)
        one, together = (encoder_launches(models, "input", n) for n in (1, INPUT_ROWS_TOGETHER))
        return CountedLaunches(plain, ours - plain, one, together)

    return call_with_small_models(name, precision, layers, counted)


def call_with_small_models(name: str, precision: str, layers: int, call: Callable[[Any, list[int]], Any]) -> Any:
    """Returns `call(models, ids)` for small models of a shape's family and made-up base ids, on the CPU."""
    import mlx.core as mx

    from mlx_zip.bench.engines.model_making import models_from_config
    from mlx_zip.bench.engines.shape_table import SHAPES, ZipOptions, narrow_shape_config

    from .selftest_steps import PROMPT, synthetic_ids

    config = {**narrow_shape_config(SHAPES[name]), "num_hidden_layers": layers}
    before, options = mx.default_device(), ZipOptions(encoder_bits=8)
    mx.set_default_device(mx.cpu)  # so that the page is the same on every machine
    try:
        models = models_from_config(name, config, precision, range(config["vocab_size"]), options)
        return call(models, synthetic_ids(2 * PROMPT, config["vocab_size"]))
    finally:
        mx.set_default_device(before)


def measure_host() -> Iterator[dict[str, Any]]:
    """Yields a line of the record `mac-host` per model and precision.

    host_us: processor us in which the host builds the graph of a step, by the names in `HostTimes`, for narrow models
    with the shape's number of layers: the median step of the fastest of `HOST_ROUNDS` runs. Encoding kernels for a GPU,
    detokenizing and waiting are not included.
    """
    from mlx_zip.bench.recording import environment_fields

    for model, name in MODELS.items():
        for bits in PRECISIONS:
            host = {way: round(1e6 * seconds, 1) for way, seconds in time_host_steps(name, bits).items()}
            line = {"bench": "mac-host", "model": model, "bits": bits, "rounds": HOST_ROUNDS, "host_us": host}
            yield {**line, **environment_fields()}


def time_host_steps(name: str, precision: str) -> dict[str, float]:
    from .launches import step_seconds

    def measured(models: Any, ids: list[int]) -> dict[str, float]:
        found: dict[str, list[float]] = {way: [] for way in HostTimes._fields}
        for _ in range(HOST_ROUNDS):
            warm, plain, _ = step_seconds(models, ids, "warm")
            cold, _, installs = step_seconds(models, ids, "cold")
            installing = [seconds for seconds, new in zip(cold, installs, strict=True) if new]
            for way, seconds in zip(HostTimes._fields, (plain, warm, installing), strict=True):
                found[way].append(median(seconds))
        return {way: min(values) for way, values in found.items()}

    return call_with_small_models(name, precision, layer_count(name), measured)


def host_times_of(records: Records, model: str, bits: str) -> HostTimes:
    (line,) = (one for one in records.lines("mac-host") if (one["model"], one["bits"]) == (model, bits))
    return HostTimes(*(line["host_us"][way] / 1e3 for way in HostTimes._fields))


# ---- bytes


@cache
def costs_of_arrays(name: str, precision: str) -> Mapping[str, DeviceCost]:
    """Returns name -> cost of reading: weights, head, KV cache, output rows, each side's hyper-encoder."""
    import mlx.core as mx

    from mlx_zip.bench.engines.interface import kv_bytes_per_id
    from mlx_zip.bench.engines.mlx_engines import weight_bytes
    from mlx_zip.bench.engines.model_making import cast_and_quantize, model_args_with_hypertokens, quantization_config
    from mlx_zip.bench.engines.shape_table import SHAPES, ZipOptions
    from mlx_zip.config import SIDES
    from mlx_zip.models.rows.fingerprints import named_arrays
    from mlx_zip.models.zip_model import Model

    config, options = SHAPES[name], ZipOptions(encoder_bits=ENCODER_BITS[precision])
    model = Model(model_args_with_hypertokens(config, options))
    cast_and_quantize(model, mx.bfloat16, quantization_config(precision, options, model))
    arrays = named_arrays(model.parameters())
    untied = any(key.startswith("lm_head.") for key, _ in arrays)

    def cost(wanted: Callable[[str], bool]) -> DeviceCost:
        found = [value for key, value in arrays if wanted(key)]
        return DeviceCost(sum(value.nbytes for value in found), numbers=sum(value.size for value in found))

    head = "lm_head." if untied else "model.embed_tokens."
    skipped = (*SIDES, "model.embed_tokens.") if untied else SIDES
    weights = cost(lambda key: not key.startswith(skipped))
    assert weights.bytes_read == weight_bytes(model)
    return {
        "weights": weights,
        "head": cost(lambda key: key.startswith(head)),
        "KV cache": DeviceCost(2, numbers=1).times(KV_IDS * kv_bytes_per_id(config, 2) / 2),
        "output rows": DeviceCost(2, numbers=1).times(ROWS * config["hidden_size"]),
        **{side: cost(lambda key, side=side: key.startswith(side)) for side in SIDES},
    }


def step_costs_of(name: str, precision: str, host: HostTimes) -> StepCosts:
    from mlx_zip.config import SIDES

    found, (counted, layer) = costs_of_arrays(name, precision), launches_of(name, precision)
    plain = found["weights"] + found["KV cache"]
    return StepCosts(
        plain=plain._replace(launches=counted.plain, evals=1),
        warm=found["output rows"]._replace(launches=counted.warm, evals=1),  # body and head are submitted separately
        output_row=found[SIDES[1]]._replace(launches=counted.one_row),
        input_rows=found[SIDES[0]]._replace(launches=counted.input_rows),
        body=(plain + found["head"].times(-1))._replace(launches=layer * layer_count(name)),
        host=host,
    )


# ---- tables


def costs_of_all_models(records: Records) -> list[tuple[str, str, StepCosts]]:
    kinds = [(model, name, bits) for model, name in MODELS.items() for bits in PRECISIONS]
    return [
        (model, bits, step_costs_of(name, bits, host_times_of(records, model, bits))) for model, name, bits in kinds
    ]


def median_install_share(records: Records) -> float:
    """Returns the median over the domains of the share of steps that install an entry."""
    return median(install_shares(records, INSTALL_IDS).values())


def steps_table(records: Records) -> str:
    """Returns the table of computed steps, a row per chip, model and precision; ranges span `ChipKind.launch_us`."""
    rows, share = [], median_install_share(records)
    for name, chip in CHIPS.items():
        for model, bits, step in costs_of_all_models(records):
            plain = [step.plain_ms(chip, us) for us in chip.kind.launch_us]
            cells = [range_cell(plain, ".1f")]
            for encoded in (0.0, share):  # share of the steps that encode: none if rows are warm
                ours = [step.cold_ms(chip, us, encoded) for us in chip.kind.launch_us]
                cells.append(range_cell([a / b for a, b in zip(ours, plain, strict=True)], ".2f"))
            rows.append([name, model, bits, *cells])
    heads = ["chip", "model", "bits", "mlx-lm, ms", "warm", "cold"]
    return table(heads, rows)


def costs_table(records: Records) -> str:
    """Returns the table of the inputs of `steps_table`: bytes and launches of every model, and host time."""
    rows = []
    for model, bits, step in costs_of_all_models(records):
        costs = (step.plain, step.warm, step.output_row, step.input_rows, step.body)
        cells = [f"{one.bytes_read / 1e6:,.0f} MB, {one.launches:.0f}" for one in costs]
        buffers = [f"{step.plain.buffers(kind):.0f}" for kind in (BASE, MAX)]
        rows.append([model, bits, *cells, " or ".join(buffers), " / ".join(f"{ms:.1f}" for ms in step.host)])
    heads = ["model", "bits", "mlx-lm", "warm adds", "an output row"]
    heads += [f"{INPUT_ROWS_TOGETHER} input rows", "a second body", "command buffers, mlx-lm", "host, ms"]
    return table(heads, rows)


def installs_table(records: Records) -> str:
    """Returns the table of the shares of steps that install an entry, by domain."""
    lengths = (500, 1000, 2000, INSTALL_IDS)
    shares = [install_shares(records, ids) for ids in lengths]
    rows = [[domain, *(f"{found[domain]:.0%}" for found in shares)] for domain in shares[0]]
    rows.append(["median", *(f"{median(found.values()):.0%}" for found in shares)])
    return table(["text", *(f"first {ids:,} ids" for ids in lengths)], rows)


def assumptions_table(records: Records) -> str:
    """Returns the table of the computation's assumptions."""
    chips = ", ".join(f"{name} {chip.bandwidth:g}" for name, chip in CHIPS.items())
    machine = {line["machine"] for line in records.lines("mac-host")}
    kinds = [(f"base and Pro chips: {BASE.launch_us[0]:g} to {BASE.launch_us[1]:g} us", BASE)]
    kinds.append((f"Max and Ultra: {MAX.launch_us[0]:g} to {MAX.launch_us[1]:g} us", MAX))
    rows = [
        ["bandwidth, GB/s, as Apple publishes it", chips],
        ["share of it that a step reaches", f"{SHARE:.0%}"],
        ["time per launch", "; ".join(text for text, _ in kinds)],
        ["time per command buffer", f"{BUFFER_US:g} us"],
        [
            "a command buffer holds",
            f"{BASE.ops} launches or {BASE.mb} x 2^20 numbers; Max and Ultra {MAX.ops} and {MAX.mb}",
        ],
        ["host time per step", f"measured on {', '.join(sorted(machine))}: record `mac-host`"],
        ["ids in the KV cache, which has 16 bits", f"{KV_IDS:,}"],
        ["entries in the codebook, each with an output row", f"{ROWS:,}"],
        [
            "steps that install an entry",
            f"{median_install_share(records):.0%}: median over the first {INSTALL_IDS:,} ids",
        ],
        ["hyper-encoders", "kind `transformer`, two layers, untied; 8 bits with weights of 4 bits, else 16"],
        ["input rows encoded in one pass", f"{INPUT_ROWS_TOGETHER}"],
        ["steps with a second body", f"at most {SECOND_BODIES:.0%}"],
    ]
    return table(["assumed", ""], rows)


def range_cell(values: list[float], form: str) -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


TABLES = {
    "mac_steps": steps_table,
    "mac_costs": costs_table,
    "mac_installs": installs_table,
    "mac_assumptions": assumptions_table,
}
PICTURES: dict[str, Any] = {}

if __name__ == "__main__":
    for line in measure_host():
        print(json.dumps(line), flush=True)
