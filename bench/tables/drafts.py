"""The tables of docs/reports/drafts.md, from records of `bench drafts`.

`drafts`: passes replayed without a model. `drafts-greedy`: passes of greedy answers. `drafts-time`: timed runs of the
models as stored. `drafts-float32`: timed runs in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlx_zip.bench.generation.ratios import figure_ratio
from mlx_zip.bench.records import Record, Records, Tables, machines_table, table

PASSES, GREEDY, TIME, FLOAT32 = "drafts", "drafts-greedy", "drafts-time", "drafts-float32"
WAYS = ("off", "lookup", "head", "draft model")


def passes_table(records: Records) -> str:
    """Returns base tokens per pass (total tokens divided by total passes), without and with lookup, by kind of text."""
    rows = []
    for model, kind, plain, zipped in group_by_kind(records.lines(PASSES)):
        one, both = pooled_tokens_per(plain, "passes"), pooled_tokens_per(zipped, "passes")
        alone = pooled_tokens_per(zipped, "ids")
        prompt, written = (sum(line["counts"][name] for line in plain) for name in ("prompt_tokens", "base_tokens"))
        accepted = (
            sum(line["counts"]["ids"] - line["counts"]["passes"] for line in lines) for lines in (plain, zipped)
        )
        proposed = (sum(line["counts"]["proposed"] for line in lines) for lines in (plain, zipped))
        shares = (f"{a / p:.0%}" if p else "-" for a, p in zip(accepted, proposed, strict=True))
        figures = [f"{one:.2f}", f"{alone:.2f}", f"{both:.2f}", f"{both / max(one, alone):.2f}"]
        rows.append([model, kind, str(len(plain)), f"{prompt:,}", f"{written:,}", *figures, *shares])
    heads = [
        *("model", "text", "texts", "base tokens read", "written", "plain, lookup", "zip alone", "zip, lookup"),
        *("to the better one alone", "accepted, plain", "accepted, zip"),
    ]
    return table(heads, rows)


def greedy_table(records: Records) -> str:
    """Returns base tokens per pass of greedy answers by way to draft; "-" for a way that a model does not support."""
    found: dict[tuple[str, str, str], dict[str, list[Record]]] = {}
    for line in records.lines(GREEDY):
        kind, _, way = line["engine"].partition(" ")
        ways = found.setdefault((line["model"]["name"], line["workload"]["domain"], kind), {})
        ways.setdefault(way, []).append(line)
    rows = [
        [
            *key,
            str(len(ways["off"])),
            *(f"{pooled_tokens_per(ways[way], 'passes'):.2f}" if way in ways else "-" for way in WAYS),
        ]
        for key, ways in found.items()
    ]
    return table(["model", "text", "", "texts", *("no drafts" if way == "off" else way for way in WAYS)], rows)


def host_table(records: Records) -> str:
    """Returns the host's processor us per emitted id, with `lookup`, and with `auto` at costs where drafts never gain.

    The last columns are steps/s with `auto` at these costs divided by steps/s without drafts.
    """
    rows = []
    for model, kind, *both in group_by_kind(records.lines(PASSES)):
        cells = [f"{pooled_host_us(lines, draft):.1f}" for draft in ("auto", "lookup") for lines in both]
        gains = [pooled_gain(lines, [line["row_by_row"] for line in lines]) for lines in both]
        rows.append([model, kind, *cells, *(f"{gain:.3f}" for gain in gains)])
    heads = ["auto, plain", "auto, zip", "lookup, plain", "lookup, zip", "auto's passes, plain", "auto's passes, zip"]
    return table(["model", "text", *heads], rows)


def group_by_kind(lines: Sequence[Record]) -> Iterator[tuple[str, str, list[Record], list[Record]]]:
    """Yields (model, kind of text, records of the plain model, records with hypertokens) of replayed texts."""
    found: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for line in lines:
        both = found.setdefault((line["model"]["name"], line["workload"]["domain"]), {"plain": [], "zip": []})
        both[line["engine"]].append(line)
    for (model, kind), both in found.items():
        yield model, kind, both["plain"], both["zip"]


def pooled_tokens_per(lines: Sequence[Record], over: str) -> float:
    return sum(line["counts"]["base_tokens"] for line in lines) / sum(line["counts"][over] for line in lines)


def pooled_gain(lines: Sequence[Record], gains: Sequence[float]) -> float:
    """Returns the gain for all texts: passes without drafts / cost of passes with drafts. gains: each text's gain."""
    ids = [line["counts"]["ids"] for line in lines]
    return sum(ids) / sum(n / gain for n, gain in zip(ids, gains, strict=True))


def pooled_host_us(lines: Sequence[Record], draft: str) -> float:
    ids = [line["counts"]["ids"] for line in lines]
    return sum(n * line["host_us"][draft] for n, line in zip(ids, lines, strict=True)) / sum(ids)


def time_table(lines: Sequence[Record]) -> str:
    """Returns base tokens per pass and base tokens/s of timed runs, and ratios of base tokens/s, paired by trial."""
    found = {time_key(line): line for line in lines}
    rows = []
    for (*text, engine), line in found.items():
        kind, _, draft = engine.partition(" ")
        speed, per_pass = (line["figures"][name] for name in ("base_tokens_per_s", "base_tokens_per_step"))
        others = [None if engine == base else found.get((*text, base)) for base in (f"{kind} off", "plain off")]
        ratios = ["" if other is None else str(figure_ratio((other, line), "base_tokens_per_s")) for other in others]
        rows.append([*text, kind, draft, f"{per_pass['median']:.2f}", f"{speed['median']:.1f}", *ratios])
    heads = ["model", "text", "rows", "", "drafts", "base tokens per pass", "base tokens/s"]
    return table([*heads, "to no drafts", "to plain, no drafts"], rows)


def time_key(line: Record) -> tuple[str, ...]:
    written = "" if line["mode"] == "replay" else f", {line['mode']}"
    return line["model"]["name"], line["workload"]["data"] + written, line["setting"]["rows"], line["engine"]


TABLES: Tables = {
    "drafts-passes": passes_table,
    "drafts-greedy": greedy_table,
    "drafts-host": host_table,
    "drafts-time": lambda records: time_table(records.lines(TIME)),
    "drafts-float32": lambda records: time_table(records.lines(FLOAT32)),
    "drafts-records": lambda records: machines_table(records, (PASSES, GREEDY, TIME, FLOAT32)),
}
