"""The tables of README.md and docs/performance.md, from the records in bench/records, with targets and verdicts.

Ratios are medians over alternating trials, with 95 % intervals by paired bootstrap (`ratios.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from mlx_zip.bench.generation.ratios import Ratio, figure_ratio, median_with_interval, paired_ratio
from mlx_zip.bench.records import Record, Records, libraries_cell, machines_table, table

PROFILES = {  # name of a row -> record of `bench profile`
    "bundled model, 8 bit, rows cold": "profile-stories-cold",
    "bundled model, 8 bit, rows warm": "profile-stories",
    "`small-125m`, rows cold": "profile-cold-transformer",
    "`small-125m`, rows cold, `res_latent_attn`": "profile-cold-latent",
    "`small-125m`, rows warm": "profile-warm",
}
REQUESTS = {"code": "generate-code-1024", "chat": "generate-chat-1024"}
STORIES = "stories-chat"  # bundled model, conversations of three stories, cold and warm rows
PUBLISHED = {"float32": "zip2zip-float", "8 bit": "zip2zip"}
TURNS = ("first", "second", "third")
SPEEDS = ("steps_per_s", "base_tokens_per_s")
# name of a row -> part of `bench profile`
HOST_PARTS = {"codec": "codec", "rows, host": "rows", "embedding": "embedding", "head": "head"}
OPERATIONS = {  # operation in a `bench codec` record: its name in the table
    "compress arrays": "compress; arrays here, lists there",
    "compress lists": "compress; Python lists on both sides",
    "decode arrays": "decode; arrays here, lists there",
    "decode lists": "decode; Python lists on both sides",
    "push": "follow compressed ids, without decoding",
    "push_one": "one push from Python, as generation makes it",
    "mark": "mark",
    "rewind_one": "rewind by one id",
}
BATCH = "batch"  # record of `bench batch`
SERVE = "serve"  # record of `bench serve`
PACK = "its own, tuned"  # name of the bundled model's own pack in the record `pack_quality`


def step_time_ratio(record: Record) -> Ratio:
    """Returns mlx_zip's time per step divided by mlx-lm's at equal KV length, from a record of `bench profile`."""
    return median_with_interval(tuple(record["ratio"]["samples"]))


def median_base_tokens_per_step(record: Record) -> float:
    return record["figures"]["base_tokens_per_step"]["median"]


def pooled_base_tokens_per_step(record: Record) -> float:
    """Returns base tokens of all conversations divided by all steps."""
    return record["counts"]["base_tokens"] / record["counts"]["steps"]


def step_ratio_table(records: Records) -> str:
    found = {name: (file, records.only_record(file)) for name, file in PROFILES.items()}
    rows = [
        [name, f"`{file}`", str(step_time_ratio(line)), libraries_cell(line)] for name, (file, line) in found.items()
    ]
    return table(["", "record", "a step over mlx-lm's", "preloaded; BLAS"], rows)


def ratio_cells(pair: tuple[Record, Record], *figures: str) -> list[str]:
    return [str(figure_ratio(pair, name)) for name in figures]


def request_ratio_table(records: Records) -> str:
    rows = []
    for text, file in REQUESTS.items():
        pair = records.engine_pair(file)
        per_step, ratios = median_base_tokens_per_step(pair[1]), ratio_cells(pair, *SPEEDS, "ttft_ms")
        rows.append([text, f"`{file}`", f"{per_step:.2f}", *ratios, libraries_cell(pair[1])])
    heads = ["text", "record", "base tokens per step", "steps/s", "base tokens/s", "time to first id"]
    return table([*heads, "preloaded; BLAS"], rows)


def stories_table(records: Records) -> str:
    rows = []
    for (turn, name), state in product(enumerate(TURNS), ("cold", "warm")):
        pair = records.engine_pair(STORIES, turn=turn, rows=state)
        ratios = ratio_cells(pair, *SPEEDS, "bytes_per_s", "ttft_ms")
        rows.append([name, state, f"{pooled_base_tokens_per_step(pair[1]):.2f}", *ratios])
    heads = ["story", "rows", "base tokens per step", "steps/s", "base tokens/s", "bytes/s", "time to first id"]
    return table(heads, rows)


def published_package_table(records: Records) -> str:
    rows = []
    for precision, file in PUBLISHED.items():
        pair = records.engine_pair(file, "zip2zip")
        rows.append([precision, f"`{file}`", *ratio_cells(pair, "steps_per_s", "ttft_ms"), libraries_cell(pair[1])])
    return table(["weights", "record", "steps/s", "time to first id", "preloaded; BLAS"], rows)


def step_parts_table(records: Records) -> str:
    profiles = [records.only_record(file) for _, file in HOST]
    rows = [["step over mlx-lm's at equal KV length", *(f"{step_time_ratio(record).value:.2f}" for record in profiles)]]
    rows.append(["rows, apart", *(median_us(record["parts"]["rows"]["apart_us"]) for record in profiles)])
    for name, part in HOST_PARTS.items():
        rows.append([name, *(median_us(record["parts"][part]["host_us"]) for record in profiles)])
    rows.append(["host work of mlx_zip, by the wall's clock", *(median_us(record["ours_us"]) for record in profiles)])
    rows.append(["host work of mlx_zip, processor time", *(median_us(record["ours_cpu_us"]) for record in profiles)])
    rows.append(["preloaded; BLAS", *map(libraries_cell, profiles)])
    return table(["us per step, median", *(name for name, _ in HOST)], rows)


def median_us(figure: Mapping[str, float]) -> str:
    return f"{figure['median']:,.0f}"


def codec_table(records: Records) -> str:
    rows = []
    for line in records.lines("codec"):
        setting = line["setting"]
        measured = f"{'windows' if setting['of'] == 'windows' else 'one sequence'} of {setting['ids_each']:,} ids"
        times = [f"{line[side]['median']:,.0f}" if line[side] else "-" for side in ("ours", "upstream")]
        rows.append([OPERATIONS[line["what"]], measured, line["unit"], *times, times_as_fast_cell(line)])
    return table(["", "of", "unit", "mlx_zip", "zip2zip-compression", "times as fast"], rows)


def times_as_fast_cell(line: Record) -> str:
    """Returns zip2zip-compression's time divided by ours, with an interval, from paired trials; "-" if not measured."""
    if not line["upstream"]:
        return "-"
    return str(paired_ratio(line["ours"]["samples"], line["upstream"]["samples"]))


def bundled_speed_table(records: Records) -> str:
    price = next(line for line in records.lines("pack_quality") if line["curve"] == PACK)
    bits = f"{price['bits_per_byte']:.3f} ({price['base_bits_per_byte']:.3f}, {price['over_base']:+.1%})"
    rows = []
    for turn, name in enumerate(TURNS):
        cold, warm = (records.engine_pair(STORIES, turn=turn, rows=state) for state in ("cold", "warm"))
        gains = [f"{figure_ratio(pair, 'bytes_per_s')} x" for pair in (cold, warm)]
        rows.append([f"{name} story of a conversation", f"{pooled_base_tokens_per_step(warm[1]):.2f}", *gains, bits])
    heads = ["`stories`, 8 bit", "base tokens per step", "bytes/s to mlx-lm, cold", "warm", "bits per byte (base)"]
    return table(heads, rows)


def record_machines_table(records: Records) -> str:
    names = [*PROFILES.values(), *REQUESTS.values(), *PUBLISHED.values()]
    return machines_table(records, sorted((*names, STORIES, BATCH, SERVE, "codec")))


# ---- the targets


@dataclass(frozen=True)
class Target:
    """A figure of the records and its bound.

    measured: computes the figure. record: name of the figure's record. most: True for an upper bound, False for a lower
    bound. unit: appended to the number.
    """

    name: str
    bound: float
    measured: Callable[[Records], Ratio | float]
    record: str = ""
    most: bool = True
    unit: str = ""

    def row(self, records: Records) -> list[str]:
        """Returns name, libraries, bound, measured figure, and a verdict: whether the figure is within the bound."""
        found = self.measured(records)
        value = found.value if isinstance(found, Ratio) else found
        worst = value if not isinstance(found, Ratio) else found.high if self.most else found.low
        shown = str(found) if isinstance(found, Ratio) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
        bound = f"{'at most' if self.most else 'at least'} {self.bound:g}{self.unit}"
        blas = libraries_cell(records.lines(self.record)[0]) if self.record else "-"
        return [self.name, blas, bound, f"{shown}{self.unit}", self._verdict(value, worst)]

    def _verdict(self, value: float, worst: float) -> str:
        """Returns the verdict, such as "met". worst: the end of the interval that is nearest to missing the bound."""
        is_met, surely = ((x <= self.bound if self.most else x >= self.bound) for x in (value, worst))
        return "missed" if not is_met else "met" if surely else "met; the interval reaches past it"


def _speedup_over_compression(records: Records) -> Ratio:
    """Returns the gain in base tokens/s on code divided by base tokens per step: 1 if a step is as fast as mlx-lm's."""
    pair = records.engine_pair(REQUESTS["code"])
    return figure_ratio(pair, "base_tokens_per_s").divided_by(median_base_tokens_per_step(pair[1]))


def _first_id_over_length(records: Records) -> Ratio:
    """Returns the time to the first id on code, relative to mlx-lm's, divided by the prompt's ids per base id."""
    pair = records.engine_pair(REQUESTS["code"])
    counts = pair[1]["counts"]
    return figure_ratio(pair, "ttft_ms").divided_by(counts["prompt_ids"] / counts["prompt_tokens"])


def detokenizing_us_per_base_token(record: Record) -> float:
    """Returns the processor time of detokenizing in us per base token, from a record of `bench profile`."""
    counts = record["counts"]
    return record["parts"]["text"]["cpu_us"]["mean"] * counts["steps"] / counts["base_tokens"]


def story_bytes_per_s_ratio(turn: int, rows: str) -> Callable[[Records], Ratio]:
    """Returns a function that computes the bytes/s of story number `turn` (from 0) divided by the base model's."""
    return lambda records: figure_ratio(records.engine_pair(STORIES, turn=turn, rows=rows), "bytes_per_s")


def steps_over_published(precision: str) -> Callable[[Records], Ratio]:
    """Returns a function that computes steps/s divided by the published package's. precision: a key of `PUBLISHED`."""
    return lambda records: figure_ratio(records.engine_pair(PUBLISHED[precision], "zip2zip"), "steps_per_s")


HOST = (("`small-125m`", "profile-warm"), ("bundled model", "profile-stories"))  # name, record

TARGETS = (
    *(
        Target(
            f"step over mlx-lm's at equal KV length, {name}", bound, lambda r, f=f: step_time_ratio(r.only_record(f)), f
        )
        for name, bound, f in (
            ("bundled model, rows cold", 1.35, "profile-stories-cold"),
            ("bundled model, rows warm", 1.10, "profile-stories"),
            ("`small-125m`, rows cold, two transformer layers", 1.25, "profile-cold-transformer"),
            ("`small-125m`, rows cold, `res_latent_attn`", 1.15, "profile-cold-latent"),
            ("`small-125m`, rows warm", 1.02, "profile-warm"),
        )
    ),
    Target(
        "code, 1,024 + 256, warm: base tokens/s over compression x mlx-lm's",
        0.95,
        _speedup_over_compression,
        REQUESTS["code"],
        most=False,
    ),
    Target(
        "the same: time to first id over mlx-lm's x compressed length", 1.1, _first_id_over_length, REQUESTS["code"]
    ),
    *(
        Target(
            f"bundled model, bytes/s over its base's: {TURNS[turn]} story, {rows}",
            bound,
            story_bytes_per_s_ratio(turn, rows),
            STORIES,
            most=False,
        )
        for turn in (0, 2)
        for rows, bound in (("cold", 1.5), ("warm", 1.85))
    ),
    *(
        Target(
            f"bundled model, steps/s over the published package's, {name}",
            3,
            steps_over_published(name),
            file,
            most=False,
        )
        for name, file in PUBLISHED.items()
    ),
    *(
        Target(
            f"host work of mlx_zip per step, processor time, {name}",
            bound,
            lambda r, file=file: r.only_record(file)["ours_cpu_us"]["median"],
            file,
            unit=" us",
        )
        for (name, file), bound in zip(HOST, (400, 250), strict=True)
    ),
    *(
        Target(
            f"detokenizing a base token, {name}",
            20,
            lambda r, f=f: detokenizing_us_per_base_token(r.only_record(f)),
            f,
            unit=" us",
        )
        for name, f in HOST
    ),
)


def targets_table(records: Records) -> str:
    return table(["", "preloaded; BLAS", "wanted", "measured", ""], [target.row(records) for target in TARGETS])


# ---- the table of `bench batch`

KINDS = ("base", "zip")  # plain model, model with hypertokens
HEADS = (
    "model",
    "hyper rows",
    "requests",
    "one stream",
    "batch",
    "gain of batching",
    "over its base's",
    "preloaded; BLAS",
)


def batch_table(records: Sequence[Record]) -> str:
    """Returns a table with a row per record and model; intervals are 95 %."""
    return table(HEADS, [row for record in records for row in batch_rows(record)])


def batch_rows(record: Record) -> list[list[str]]:
    rows, figures, setting = [], record["figures"]["whole"], record["setting"]
    for kind in KINDS:
        rows.append(
            [
                f"`{record['model'][kind]}`",
                setting["rows"] if kind == "zip" else "-",
                str(setting["requests"]),
                *(f"{figures[kind][way]['median']:,.0f}" for way in ("one_stream", "batch")),
                interval_cell(figures[kind]["gain"]),
                interval_cell(figures["quotient"]) if kind == "zip" else "-",
                libraries_cell(record),
            ]
        )
    return rows


def interval_cell(figure: Mapping[str, Any]) -> str:
    return f"{figure['median']:.2f} ({figure['low']:.2f} to {figure['high']:.2f})"


# ---- the table of `bench serve`


def serving_row(name: str, value: float, form: str, bound: float | None = None, most: bool = True) -> list[str]:
    """Returns name, figure, target and verdict. bound: the target, if any. most: whether it is an upper bound."""
    shown = form.format(value)
    if bound is None:
        return [name, shown, "-", "-"]
    is_met = value <= bound if most else value >= bound
    return [name, shown, f"{'at most' if most else 'at least'} {form.format(bound)}", "met" if is_met else "missed"]


def serving_table(record: Mapping[str, Any]) -> str:
    """Returns a table of the figures of a record of `bench serve`. All figures are medians."""
    return table(("figure", "measured", "target", ""), list(serving_rows(record)))


def serving_rows(record: Mapping[str, Any]) -> Iterator[list[str]]:
    figures = record["figures"]
    one = figures["one_stream"]
    yield serving_row("one stream: time added to `generate`'s", one["overhead"]["median"], "{:.1%}", 0.1)
    yield serving_row("first text after the first id", one["first_byte_ms"]["median"], "{:.1f} ms", 20)
    yield serving_row(
        "two prompts: time to first text over one's", figures["two_prompts"]["ratio"]["median"], "{:.2f}", 2.2
    )
    yield from stream_rows(f"{record['setting']['streams']} streams", figures["streams"])


def stream_rows(name: str, servers: Mapping[str, Any]) -> Iterator[list[str]]:
    for server, found in servers.items():
        yield serving_row(f"{name}, {server}: base tokens/s", found["streams"]["median"], "{:,.0f}")
        yield serving_row(f"{name}, {server}: over one stream's", found["gain"]["median"], "{:.2f}")
        bound = 1.5 if server == "zip" else None
        yield serving_row(f"{name}, {server}: most progress over least", found["unfairness"]["median"], "{:.2f}", bound)
    quotient = servers["zip"]["gain"]["median"] / servers["base"]["gain"]["median"]
    yield serving_row(f"{name}: gain of zip over base's", quotient, "{:.2f}", 0.9, most=False)


TABLES: dict[str, Callable[[Records], str]] = {
    "codec": codec_table,
    "speed": bundled_speed_table,
    "steps": step_ratio_table,
    "requests": request_ratio_table,
    "stories": stories_table,
    "published": published_package_table,
    "parts": step_parts_table,
    "serve": lambda records: serving_table(records.only_record(SERVE)),
    "batch": lambda records: batch_table(records.lines(BATCH)),
    "targets": targets_table,
    "records": record_machines_table,
}
PICTURES = {}
