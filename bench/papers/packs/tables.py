"""The tables of docs/packs.md, from the records `packs`, `pack_quality` and `pack_transfer`."""

from __future__ import annotations

from collections.abc import Callable

from mlx_zip.bench.records import Record, Records
from mlx_zip.bench.tables import table


def _packs(records: Records) -> str:
    lines = records.lines("packs")
    sizes = [pack["size"] for pack in lines[0]["packs"]]
    rows = []
    for line in lines:
        files = ", ".join(name.split(".")[0] for name in line["test"]["files"])
        found = {pack["size"]: pack["rate"] for pack in line["packs"]}
        rows.append(
            [
                f"{line['domain']} ({files})",
                f"{line['train_ids']:,}",
                f"{line['empty']:.3f}",
                *(f"{found[size]:.3f}" for size in sizes),
            ]
        )
    return table(["text", "base ids learned from", "growth alone", *(f"{size:,}" for size in sizes)], rows)


def _pack_quality(records: Records) -> str:
    rows = []
    for line in records.lines("pack_quality"):
        kind = {"empty": "none", "own": "its own"}.get(line["curve"], line["curve"])
        rows.append([kind, f"{line['entries']:,}", *_scored(line)])
    heads = ["pack", "entries", "base ids per id", "bits per byte", "to the control", "to no pack"]
    return table(heads, rows)


def _scored(line: Record) -> list[str]:
    """What `bench.pack_quality.scored` tells of a pack."""
    return [
        f"{line['base_ids_per_id']:.3f}",
        f"{line['bits_per_byte']:.3f}",
        f"{line['over_base']:+.1%}",
        f"{line['over_empty']:+.1%}",
    ]


def _pack_transfer(records: Records) -> str:
    rows = []
    for line in records.lines("pack_transfer"):
        rows.append([*_start(line), *_scored(line)])
    heads = ["pack", "entries", "base ids per id", "bits per byte", "to the base", "to no pack"]
    return table(heads, rows)


def _pack_transfer_written(records: Records) -> str:
    rows = []
    for line in records.lines("pack_transfer"):
        row = [*_start(line), f"{line['own_base_tokens_per_step']:.3f}"]
        for told in (line["greedy"], line["sampled"]):
            shares = (told["of_gain"], told["of_own_gain"])
            row += [f"{told['base_tokens_per_step']:.3f}", *("-" if x is None else f"{x:.0%}" for x in shares)]
        rows.append(row)
    told = ["of the gain", "of the authors'"]
    return table(["pack", "entries", "theirs", "greedy", *told, "at 0.7", *told], rows)


def _start(line: Record) -> list[str]:
    """A pack as `bench pack_transfer` names it, and its size."""
    kinds = {"empty": "none", "learned": "of the new text", "own": "of the training"}
    curve: str = line["curve"]
    return [kinds.get(curve, curve), f"{line['entries']:,}"]


TABLES: dict[str, Callable[[Records], str]] = {
    "packs": _packs,
    "pack-quality": _pack_quality,
    "pack-transfer": _pack_transfer,
    "pack-transfer-written": _pack_transfer_written,
}
PICTURES = {}
