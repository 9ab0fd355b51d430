"""The tables and the picture of the report on packs, from the records `packs`, `pack_quality` and `pack_transfer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mlx_zip.bench.records import Record, Records, machines
from mlx_zip.bench.tables import table

from .figure import picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CROSSED = 1024  # entries of the packs that are tried on texts of other kinds
LEARNERS = ("learn", "multitok", "bpe")


def _own_kind(records: Records) -> str:
    """Base ids per id on texts of a pack's own kind, by size, for packs of `vocab pack learn`."""
    lines = records.lines("packs")
    sizes = sorted({pack["size"] for pack in lines[0]["packs"]})
    rows = []
    for line in lines:
        test = line["tests"][line["domain"]]
        rates = [f"{_pack(line, size, 'learn')['rates'][line['domain']]:.3f}" for size in sizes]
        rows.append([_text(line["domain"], test), f"{line['train_ids']:,}", f"{test['empty']:.3f}", *rates])
    return table(["text", "base ids learned from", "growth alone", *(f"{size:,}" for size in sizes)], rows)


def _crossed(records: Records) -> str:
    """Base ids per id of every domain with every pack of 1,024 entries; the pack's own domain in bold."""
    lines = records.lines("packs")
    tests = lines[0]["tests"]
    rows = [["none: growth alone", *(f"{test['empty']:.3f}" for test in tests.values())]]
    for line in lines:
        rates = _pack(line, CROSSED, "learn")["rates"]
        told = [f"**{rate:.3f}**" if name == line["domain"] else f"{rate:.3f}" for name, rate in rates.items()]
        rows.append([line["domain"], *told])
    return table(["pack of", *tests], rows)


def _learners(records: Records) -> str:
    """Base ids per id on texts of a pack's own kind, by learner, and without growth."""
    rows = []
    for line in records.lines("packs"):
        domain = line["domain"]
        for more in line["retokenized"]:
            packs = [_pack(line, more["size"], name) for name in LEARNERS]
            rates = [*(pack["rates"][domain] for pack in packs), packs[0]["static"][domain], more["rates"][domain]]
            rows.append([domain, f"{more['size']:,}", *(f"{rate:.3f}" for rate in rates)])
    static = ["`learn`, static", "larger tokenizer"]
    return table(["text", "entries", *(f"`{name}`" for name in LEARNERS), *static], rows)


def _pack(line: Record, size: int, learner: str) -> Record:
    return next(pack for pack in line["packs"] if (pack["size"], pack["learner"]) == (size, learner))


def _text(domain: str, test: Record) -> str:
    return f"{domain} ({', '.join(name.split('.')[0] for name in test['text']['files'])})"


def _pack_quality(records: Records) -> str:
    rows = []
    for line in records.lines("pack_quality"):
        kind = {"empty": "none", "own": "its own"}.get(line["curve"], line["curve"])
        rows.append([kind, f"{line['entries']:,}", *_scored(line)])
    heads = ["pack", "entries", "base ids per id", "bits per byte", "to the control", "to no pack"]
    return table(heads, rows)


def _price(records: Records) -> str:
    """The bundled models' bits per byte, for the first page: the baseline, and `stories` without and with its pack."""
    lines = {line["curve"]: line for line in records.lines("pack_quality")}
    empty, packed = lines["empty"], lines["its own, tuned"]
    rows = [["`stories-base`, no hypertokens", "1.000", f"{empty['base_bits_per_byte']:.3f}", ""]]
    for name, line in (("`stories` without its pack", empty), ("`stories`", packed)):
        bits = f"{line['bits_per_byte']:.3f}"
        rows.append([name, f"{line['base_ids_per_id']:.3f}", bits, f"{line['over_base']:+.1%}"])
    return table(["bundled model", "base tokens per id read", "bits per byte", "to the baseline"], rows)


def _scored(line: Record) -> list[str]:
    """The cells of a pack in both tables of bits per byte."""
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
    "packs": _own_kind,
    "packs-crossed": _crossed,
    "packs-learners": _learners,
    "packs-machines": lambda records: machines(records, ("packs", "pack_quality", "pack_transfer")),
    "pack-quality": _pack_quality,
    "price": _price,
    "pack-transfer": _pack_transfer,
    "pack-transfer-written": _pack_transfer_written,
}
PICTURES: dict[str, Callable[[Records], Figure]] = {
    "docs/reports/packs.svg": lambda records: picture(records.lines("pack_quality"))
}
