"""The tables of docs/reports/smollm2.md, from the record `smollm2` that `recipes/smollm2` writes (stage `measure`)."""

from __future__ import annotations

from typing import Any

from .records import Record, Records
from .tables import table

RECORD = "smollm2"
MODELS = {
    "base": "the base, untouched",
    "control": "the control",
    "masked": "hypertokens masked",
    "zip": "hypertokens",
}


def _part(records: Records, part: str) -> Record:
    """Returns the record's line of one part. Raises `KeyError` if there is none."""
    return {line["part"]: line for line in records.lines(RECORD)}[part]


def _percent(value: float, against: float) -> str:
    return f"{value / against - 1:+.1%}"


def bits_table(records: Records) -> str:
    """Returns bits per byte of held-out text by domain, and how they compare with the control's."""
    rows = []
    for line in records.lines(RECORD):
        if not line["part"].startswith("bits-") or "control" not in line["models"]:
            continue
        found = {name: one["bits_per_byte"] for name, one in line["models"].items()}
        packed = line["models"]["zip"]["base_ids_per_id"]
        cells = [f"{found['base']:.3f}", f"{found['control']:.3f}"]
        cells += [f"{found[name]:.3f} ({_percent(found[name], found['control'])})" for name in ("masked", "zip")]
        rows.append(
            [line["part"].removeprefix("bits-"), f"{line['models']['zip']['bytes']:,}", *cells, f"{packed:.3f}"]
        )
    line, plain = _part(records, "bits-chat-pack"), _part(records, "bits-chat")["models"]["control"]["bits_per_byte"]
    one = line["models"]["zip"]
    shown = f"{one['bits_per_byte']:.3f} ({_percent(one['bits_per_byte'], plain)})"
    rows.append(
        [
            "chat, with the chat pack",
            f"{one['bytes']:,}",
            "",
            f"{plain:.3f}",
            "",
            shown,
            f"{one['base_ids_per_id']:.3f}",
        ]
    )
    return table(["held-out text", "bytes", *MODELS.values(), "base ids per id"], rows)


def rates_table(records: Records) -> str:
    """Returns what free greedy answers are like, a row per model."""
    rows = []
    for name, one in _part(records, "rates")["models"].items():
        canonical = "" if one["of_canonical"] is None else f"{one['of_canonical']:.3f}"
        cells = [f"{one['base_tokens_per_step']:.3f}", canonical, str(one["invalid_ids"])]
        rows.append([MODELS[name], *cells, f"{one['repeated_4grams']:.1%}", f"{one['ended']:.0%}"])
    heads = ["base tokens per step", "of the compressor's", "invalid ids", "repeated 4-grams", "ended by itself"]
    return table(["model", *heads], rows)


def labels_table(records: Records) -> str:
    """Returns shares of right answers on data sets of classes, and differences to the control, paired by example."""
    line, rows = _part(records, "labels"), []
    counts = {**line["examples"], "all": sum(line["examples"].values())}
    for task, count in counts.items():
        found = {name: line["models"][name][task] for name in ("base", "control", "zip")}
        difference = found["zip"]["difference"]
        low, high = (difference + side * 1.96 * found["zip"]["difference_standard_error"] for side in (-1, 1))
        shares = [f"{one['accuracy']:.1%}" for one in found.values()]
        rows.append([task, f"{count:,}", *shares, f"{100 * difference:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"])
    names = [MODELS[name] for name in ("base", "control", "zip")]
    return table(["data set", "examples", *names, "points to the control (95 % interval)"], rows)


def curve_table(records: Records) -> str:
    """Returns bits per byte of the training batches by base tokens seen, before each was trained on."""
    rows, before = [], 0
    for line in records.lines(RECORD):
        if line["part"] != "curve":
            continue
        for a, b in zip(line["zip"], line["control"], strict=True):
            both = a["bits_per_byte"], b["bits_per_byte"]
            figures = [f"{both[0]:.3f}", f"{both[1]:.3f}", _percent(*both)]
            rows.append([str(line["leg"]), f"{before + a['base_tokens']:,}", *figures])
        before += line["zip"][-1]["base_tokens"]
    return table(["leg", "base tokens seen", MODELS["zip"], MODELS["control"], "to the control"], rows)


TABLES = {
    "smollm2-bits": bits_table,
    "smollm2-rates": rates_table,
    "smollm2-labels": labels_table,
    "smollm2-curve": curve_table,
}
PICTURES: dict[str, Any] = {}
