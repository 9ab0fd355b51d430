"""The tables and the picture of docs/reports/smollm2.md.

The records are `smollm2`, from `recipes/smollm2` (stages `measure` and `frontier`; its parts `trainer`, `growth` and
`readers` were written by hand), and `smollm2-speed` and `smollm2-mlx-lm`, from `bench generate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_zip.bench.plots import Figure, Pictures, new_figure
from mlx_zip.bench.records import Columns, Record, Records, Tables, make_column_table, table

RECORD = "smollm2"
CHAT_PACK = "bits-chat-pack"  # a part of the record
MODELS = {
    "base": "the base, untouched",
    "control": "the control",
    "masked": "hypertokens masked",
    "zip": "hypertokens",
}
ENGINES = {
    "torch-base": "mlx_zip, `smollm2-base`",
    "torch-zip": "mlx_zip, `smollm2`",
    "hf-float32": "transformers, float32",
    "hf-bfloat16": "transformers, bfloat16",
}


def records_part(records: Records, part: str) -> Record:
    return {line["part"]: line for line in records.lines(RECORD)}[part]


def percent_change(value: float, against: float) -> str:
    return f"{value / against - 1:+.1%}"


def bits_table(records: Records) -> str:
    lines = {line["part"]: line["models"] for line in records.lines(RECORD) if line["part"].startswith("bits-")}
    rows = []
    for part in sorted(lines, key=lambda one: one == CHAT_PACK):
        zipped = lines[part]["zip"]
        others = lines["bits-chat" if part == CHAT_PACK else part]  # plain models have no pack
        control = others["control"]["bits_per_byte"]
        cells = [f"{others['base']['bits_per_byte']:.3f}", f"{control:.3f}"]
        for one in (None if part == CHAT_PACK else others["masked"], zipped):
            bits = one and one["bits_per_byte"]
            cells.append(f"{bits:.3f} ({percent_change(bits, control)})" if bits else "")
        name = "chat, with the chat pack" if part == CHAT_PACK else part.removeprefix("bits-")
        rows.append([name, f"{zipped['bytes']:,}", *cells, f"{zipped['base_ids_per_id']:.3f}"])
    return table(["held-out text", "bytes", *MODELS.values(), "base ids per id"], rows)


def growth_table(records: Records) -> str:
    """Returns bits per byte by the number of entries that a codebook may add to the pack's."""
    points = records_part(records, "growth")["points"]
    domains = sorted({one["domain"] for one in points}, reverse=True)
    rows = []
    for growth in sorted({one["growth"] for one in points}):
        same = {one["domain"]: one for one in points if one["growth"] == growth}
        rows.append([str(growth)])
        for found in map(same.__getitem__, domains):
            rows[-1] += [percent_change(found["bits_per_byte"], found["control"]), f"{found['base_ids_per_id']:.3f}"]
    heads = [f"{domain}: {what}" for domain in domains for what in ("to the control", "base ids per id")]
    return table(["entries to add", *heads], rows)


def rates_table(records: Records) -> str:
    rows = []
    for name, one in records_part(records, "rates")["models"].items():
        canonical = "" if one["of_canonical"] is None else f"{one['of_canonical']:.3f}"
        cells = [f"{one['base_tokens_per_step']:.3f}", canonical, str(one["invalid_ids"])]
        rows.append([MODELS[name], *cells, f"{one['repeated_4grams']:.1%}", f"{one['ended']:.0%}"])
    heads = ["base tokens per step", "of the compressor's", "invalid ids", "repeated 4-grams", "ended by itself"]
    return table(["model", *heads], rows)


def labels_table(records: Records) -> str:
    """Returns accuracies on classification data sets, and differences from the control model, paired by example."""
    line, rows = records_part(records, "labels"), []
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
    """Returns bits per byte of each training batch before that batch was trained on, by base tokens seen."""
    rows, before = [], 0
    for line in records.lines(RECORD):
        if line["part"] != "curve":
            continue
        for a, b in zip(line["zip"], line["control"], strict=True):
            both = a["bits_per_byte"], b["bits_per_byte"]
            figures = [f"{both[0]:.3f}", f"{both[1]:.3f}", percent_change(*both)]
            rows.append([str(line["leg"]), f"{before + a['base_tokens']:,}", *figures])
        before += line["zip"][-1]["base_tokens"]
    return table(["leg", "base tokens seen", MODELS["zip"], MODELS["control"], "to the control"], rows)


def speed_table(records: Records) -> str:
    lines = records.lines("smollm2-speed")
    rows = []
    for line in lines:
        found = {name: one["median"] for name, one in line["figures"].items() if one}
        same = (one for one in lines if one["setting"]["rows"] == line["setting"]["rows"])
        eager = {one["engine"]: one["figures"]["base_tokens_per_s"]["median"] for one in same}
        ratios = [f"{found['base_tokens_per_s'] / eager[name]:.2f}" for name in ("hf-float32", "hf-bfloat16")]
        figures = [f"{found['step_ms']:.1f}", f"{found['base_tokens_per_s']:.1f}", *ratios]
        read = f"{found['prefill_tokens_per_s']:.0f}"
        rows.append([line["setting"]["rows"], ENGINES[line["engine"]], *figures, read])
    heads = ["ms per step", "base tokens/s written", "to float32 eager", "to bfloat16 eager", "base tokens/s read"]
    return table(["rows", "engine", *heads], rows)


MLX_LM_COLUMNS: Columns = (
    ("rows", "{setting[rows]}"),
    ("engine", "{engine}"),
    ("base tokens per step", "{figures[base_tokens_per_step][median]:.2f}"),
    ("ms per step", "{figures[step_ms][median]:.0f}"),
    ("base tokens/s written", "{figures[base_tokens_per_s][median]:.1f}"),
    ("first id, s", lambda line: f"{line['figures']['ttft_ms']['median'] / 1000:.1f}"),
    ("most memory, MB", lambda line: f"{line['figures']['peak_bytes']['median'] / 1e6:.0f}"),
)


def seconds_per_kilobyte(point: Mapping[str, Any]) -> float:
    return 1000 * point["ids_per_byte"] * point["step_s"]


def point_name(point: Mapping[str, Any]) -> str:
    layers = str(point["model"]).replace("layers-16", "16 layers").replace("layers-24", "24 layers")
    name = MODELS.get(point["model"], layers)
    return f"{name}, {point['pack']} pack" if point["pack"] else name


def frontier_table(records: Records) -> str:
    """Returns the points of the frontier, each with the plain models that are faster and need fewer bits per byte."""
    points, rows = records_part(records, "frontier")["points"], []
    for point in sorted(points, key=lambda one: (one["domain"], seconds_per_kilobyte(one))):
        better = [
            point_name(one)
            for one in points
            if one["domain"] == point["domain"]
            and one["model"] != "zip"
            and one["bits_per_byte"] < point["bits_per_byte"]
            and seconds_per_kilobyte(one) < seconds_per_kilobyte(point)
        ]
        figures = [
            f"{point['bits_per_byte']:.3f}",
            f"{1000 * point['step_s']:.1f}",
            f"{seconds_per_kilobyte(point):.2f}",
        ]
        rows.append([point["domain"], point_name(point), *figures, ", ".join(better)])
    heads = ["bits per byte", "ms per step", "seconds per 1,000 bytes", "plain models better in both"]
    return table(["text", "model", *heads], rows)


def picture(records: Records) -> Figure:
    """Returns a figure of bits per byte against seconds per 1,000 bytes, a panel for each domain."""
    points = records_part(records, "frontier")["points"]
    domains = sorted({one["domain"] for one in points})
    figure = new_figure(5 * len(domains), 4)
    for panel, domain in zip(figure.subplots(1, len(domains), squeeze=False)[0], domains, strict=True):
        for zipped, mark, label in ((False, "o", "plain models"), (True, "s", "hypertokens")):
            some = [one for one in points if one["domain"] == domain and (one["model"] == "zip") == zipped]
            xs, ys = [seconds_per_kilobyte(one) for one in some], [one["bits_per_byte"] for one in some]
            panel.plot(xs, ys, mark, label=label)
            for one, x, y in zip(some, xs, ys, strict=True):
                panel.annotate(point_name(one), (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
        panel.set(title=domain, xlabel="seconds per 1,000 bytes", ylabel="bits per byte")
        panel.margins(x=0.3, y=0.15)
        panel.legend()
    return figure


TABLES: Tables = {
    "smollm2-bits": bits_table,
    "smollm2-growth": growth_table,
    "smollm2-rates": rates_table,
    "smollm2-labels": labels_table,
    "smollm2-curve": curve_table,
    "smollm2-speed": speed_table,
    "smollm2-mlx-lm": make_column_table("smollm2-mlx-lm", MLX_LM_COLUMNS),
    "smollm2-frontier": frontier_table,
}
PICTURES: Pictures = {"docs/reports/smollm2.svg": picture}
