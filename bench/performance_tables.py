"""The tables of README.md and docs/performance.md, from the records in bench/records.

Ratios are medians of trials that ran in turns, with 95 % intervals by paired bootstrap (`ratios.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from . import targets
from .batch_table import batch_table
from .ratios import paired_ratio
from .records import Record, Records, libraries, machines
from .serving_table import serving_table
from .speeds import PROFILES, PUBLISHED, REQUESTS, STORIES, TURNS, per_step, pooled_per_step, ratio, step_ratio
from .tables import table

# row's name: part of `bench profile`
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


def _steps(records: Records) -> str:
    """Returns the table of times per step over mlx-lm's at equal KV length, one row per profile."""
    found = {name: (file, records.one(file)) for name, file in PROFILES.items()}
    rows = [[name, f"`{file}`", str(step_ratio(line)), libraries(line)] for name, (file, line) in found.items()]
    return table(["", "record", "a step over mlx-lm's", "preloaded; BLAS"], rows)


def _requests(records: Records) -> str:
    """Returns the table of whole requests, mlx_zip over mlx-lm, one row per kind of text."""
    rows = []
    for text, file in REQUESTS.items():
        pair = records.pair(file)
        found = (ratio(pair, name) for name in ("steps_per_s", "base_tokens_per_s", "ttft_ms"))
        rows.append([text, f"`{file}`", f"{per_step(pair):.2f}", *map(str, found), libraries(pair[1])])
    header = [
        "text",
        "record",
        "base tokens per step",
        "steps/s",
        "base tokens/s",
        "time to first id",
        "preloaded; BLAS",
    ]
    return table(header, rows)


def _stories(records: Records) -> str:
    """Returns the table of the bundled model's conversations over its base's, by story, with cold and warm rows."""
    if STORIES not in records.files:
        return not_yet(STORIES)
    rows = []
    for turn, name in enumerate(TURNS):
        for state in ("cold", "warm"):
            pair = records.pair(STORIES, turn=turn, rows=state)
            found = (ratio(pair, figure) for figure in ("steps_per_s", "base_tokens_per_s", "bytes_per_s", "ttft_ms"))
            rows.append([name, state, f"{pooled_per_step(pair):.2f}", *map(str, found)])
    heads = ["story", "rows", "base tokens per step", "steps/s", "base tokens/s", "bytes/s", "time to first id"]
    return table(heads, rows)


def not_yet(name: str) -> str:
    """Returns the sentence shown in place of a table whose record has not been made."""
    return f"Not measured yet: there is no record `{name}`."


def _published(records: Records) -> str:
    """Returns the table of mlx_zip over the published package, one row per precision of the weights."""
    rows = []
    for precision, file in PUBLISHED.items():
        pair = records.pair(file, "zip2zip")
        found = (str(ratio(pair, name)) for name in ("steps_per_s", "ttft_ms"))
        rows.append([precision, f"`{file}`", *found, libraries(pair[1])])
    return table(["weights", "record", "steps/s", "time to first id", "preloaded; BLAS"], rows)


def _parts(records: Records) -> str:
    """Returns the table of a step's parts in us: before the work on host time, after it, and of the bundled model."""
    before, after, bundled = map(records.one, ("profile-before", "profile-warm", "profile-stories"))
    profiles = (before, after, bundled)
    rows = [["step over mlx-lm's at equal KV length", *(f"{step_ratio(record).value:.2f}" for record in profiles)]]
    rows.append(["rows, apart", *(_us(record["parts"]["rows"]["apart_us"]) for record in profiles)])
    for name, part in HOST_PARTS.items():
        rows.append([name, *(_us(record["parts"][part]["host_us"]) for record in profiles)])
    rows.append(["host work of mlx_zip, by the wall's clock", *(_us(record["ours_us"]) for record in profiles)])
    rows.append(["host work of mlx_zip, processor time", "-", *(_us(r["ours_cpu_us"]) for r in profiles[1:])])
    rows.append(["preloaded; BLAS", *map(libraries, profiles)])
    return table(["us per step, median", "before", "after", "bundled model"], rows)


def _us(figure: Mapping[str, float]) -> str:
    """Returns a figure's median as text; the figure is in us."""
    return f"{figure['median']:,.0f}"


def _codec(records: Records) -> str:
    """Returns the table of times of mlx_zip's codec and of zip2zip-compression, and how many times as fast ours is."""
    if "codec" not in records.files:
        return not_yet("codec")
    rows = []
    for line in records.lines("codec"):
        setting = line["setting"]
        measured = f"{'windows' if setting['of'] == 'windows' else 'one sequence'} of {setting['ids_each']:,} ids"
        times = [f"{line[side]['median']:,.0f}" if line[side] else "-" for side in ("ours", "upstream")]
        rows.append([OPERATIONS[line["what"]], measured, line["unit"], *times, _times_as_fast(line)])
    return table(["", "of", "unit", "mlx_zip", "zip2zip-compression", "times as fast"], rows)


def _times_as_fast(line: Record) -> str:
    """Returns zip2zip-compression's time over ours, median and interval of paired trials; "-" if it is not measured."""
    if not line["upstream"]:
        return "-"
    return str(paired_ratio(line["ours"]["samples"], line["upstream"]["samples"]))


def _speed(records: Records) -> str:
    """Returns the table of the bundled model's speed for a user, with the bits per byte that it costs."""
    if STORIES not in records.files:
        return not_yet(STORIES)
    price = next(line for line in records.lines("pack_quality") if line["curve"] == PACK)
    bits = f"{price['bits_per_byte']:.3f} ({price['base_bits_per_byte']:.3f}, {price['over_base']:+.1%})"
    rows = []
    for turn, name in enumerate(TURNS):
        cold, warm = (records.pair(STORIES, turn=turn, rows=state) for state in ("cold", "warm"))
        gains = [f"{ratio(pair, 'bytes_per_s')} x" for pair in (cold, warm)]
        rows.append([f"{name} story of a conversation", f"{pooled_per_step(warm):.2f}", *gains, bits])
    heads = ["`stories`, 8 bit", "base tokens per step", "bytes/s to mlx-lm, cold", "warm", "bits per byte (base)"]
    return table(heads, rows)


def _batch(records: Records) -> str:
    """Returns the table of the gain from batching, with and without hypertokens."""
    return batch_table(records.lines(BATCH)) if BATCH in records.files else not_yet(BATCH)


def _serve(records: Records) -> str:
    """Returns the table of the server's figures and targets."""
    return serving_table(records.one(SERVE)) if SERVE in records.files else not_yet(SERVE)


def _machines(records: Records) -> str:
    """Returns the table of where and how each record of docs/performance.md was measured."""
    names = [*PROFILES.values(), *REQUESTS.values(), *PUBLISHED.values(), "profile-before", "rows"]
    return machines(records, sorted(name for name in (*names, STORIES, BATCH, SERVE, "codec") if name in records.files))


TABLES: dict[str, Callable[[Records], str]] = {
    "codec": _codec,
    "speed": _speed,
    "steps": _steps,
    "requests": _requests,
    "stories": _stories,
    "published": _published,
    "parts": _parts,
    "serve": _serve,
    "batch": _batch,
    "targets": targets.all_targets,
    "records": _machines,
}
NOT_YET = {"batch": BATCH}  # table: its record; no page needs to show the table before the record exists
PICTURES = {}
