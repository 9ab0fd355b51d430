"""The tables of README.md and docs/performance.md, from the records in bench/records.

Ratios are medians of trials that ran in turns, with 95 % intervals by paired bootstrap (`ratios.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from . import targets
from .records import Record, Records, machines
from .speeds import PROFILES, PUBLISHED, REQUESTS, STORIES, TURNS, per_step, ratio, step_ratio
from .tables import table

HOST_PARTS = {"codec": "codec", "rows, host": "rows", "embedding": "embedding", "head": "head"}  # as `bench profile`'s


def _steps(records: Records) -> str:
    rows = [[name, f"`{file}`", str(step_ratio(records.one(file)))] for name, file in PROFILES.items()]
    return table(["", "record", "a step over mlx-lm's"], rows)


def _requests(records: Records) -> str:
    rows = []
    for text, file in REQUESTS.items():
        pair = records.pair(file)
        found = (ratio(pair, name) for name in ("steps_per_s", "base_tokens_per_s", "ttft_ms"))
        rows.append([text, f"`{file}`", f"{per_step(pair):.2f}", *map(str, found)])
    header = ["text", "record", "base tokens per step", "steps/s", "base tokens/s", "time to first id"]
    return table(header, rows)


def _stories(records: Records) -> str:
    rows = []
    for precision, file in STORIES.items():
        for turn, name in enumerate(TURNS):
            pair = records.pair(file, turn=turn)
            found = (ratio(pair, figure) for figure in ("steps_per_s", "base_tokens_per_s", "bytes_per_s"))
            rows.append([f"{precision}, {name}", f"{per_step(pair):.2f}", *map(str, found)])
    return table(["story", "base tokens per step", "steps/s", "base tokens/s", "bytes/s"], rows)


def _published(records: Records) -> str:
    rows = []
    for precision, file in PUBLISHED.items():
        pair = records.pair(file, "zip2zip")
        rows.append([precision, f"`{file}`", *(str(ratio(pair, name)) for name in ("steps_per_s", "ttft_ms"))])
    return table(["weights", "record", "steps/s", "time to first id"], rows)


def _parts(records: Records) -> str:
    before, after, bundled = map(records.one, ("profile-before", "profile-warm", "profile-stories"))
    both = (before, after, bundled)
    rows = [["step over mlx-lm's at equal KV length", *(f"{step_ratio(record).value:.2f}" for record in both)]]
    rows.append(["rows, apart", *(_us(record["parts"]["rows"]["apart_us"]) for record in both)])
    for name, part in HOST_PARTS.items():
        rows.append([name, *(_us(record["parts"][part]["host_us"]) for record in both)])
    rows.append(["host work of mlx_zip, by the wall's clock", *(_us(record["ours_us"]) for record in both)])
    rows.append(["host work of mlx_zip, processor time", "-", *(_us(r["ours_cpu_us"]) for r in both[1:])])
    return table(["us per step, median", "before", "after", "bundled model"], rows)


def _us(figure: Mapping[str, float]) -> str:
    return f"{figure['median']:,.0f}"


def _codec(records: Records) -> str:
    wanted = {
        ("compress", "windows"): "compress, windows of 2,048 ids",
        ("compress", "sequence"): "compress, one sequence of 500,000 ids",
        ("push", "windows"): "follow compressed ids (push), windows",
        ("expand", "windows"): "expand ids, windows",
    }
    found = {(line["what"], line["setting"]["of"]): line for line in records.lines("codec-linux-x86_64")}
    rows = [[name, f"{found[key]['ours']['median']:.1f}", f"{found[key]['ratio']:.0f}"] for key, name in wanted.items()]
    return table(["2 cores, x86-64", "ours, ns per id", "times the published codec's speed"], rows)


def _speed(records: Records) -> str:
    rows = []
    for text, file in REQUESTS.items():
        pair = records.pair(file)
        size = f"{pair[0]['workload']['prompt_tokens']:,} + {pair[0]['workload']['tokens']}"
        rows.append([f"`small-125m`, float32, {text}, {size}", *_gains(pair)])
    for turn in (0, 2):
        rows.append([f"`stories`, 8 bit, {TURNS[turn]} story", *_gains(records.pair(STORIES["8 bit"], turn=turn))])
    header = ["2 cores, x86-64", "base tokens per step", "steps/s", "base tokens/s", "bytes/s"]
    return table(header, rows)


def _gains(pair: tuple[Record, Record]) -> list[str]:
    rates = (ratio(pair, name).value for name in ("steps_per_s", "base_tokens_per_s", "bytes_per_s"))
    return [f"{per_step(pair):.2f}", *(f"{rate:.2f} x" for rate in rates)]


def _machines(records: Records) -> str:
    files = [*PROFILES.values(), *REQUESTS.values(), *STORIES.values(), *PUBLISHED.values(), "profile-stories", "rows"]
    return machines(records, sorted({*files, "profile-before"}))


TABLES: dict[str, Callable[[Records], str]] = {
    "codec": _codec,
    "speed": _speed,
    "steps": _steps,
    "requests": _requests,
    "stories": _stories,
    "published": _published,
    "parts": _parts,
    "targets": targets.all_targets,
    "records": _machines,
}
PICTURES = {}
