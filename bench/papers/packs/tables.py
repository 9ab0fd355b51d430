"""The tables and the picture of the report on packs, from the records `packs`, `pack_quality` and `pack_transfer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mlx_zip.bench.plots import Figure, Pictures, new_figure
from mlx_zip.bench.records import Cell, Columns, Record, Records, Tables, machines_table, make_column_table, table

CROSSED = 1024  # entries of the packs that are tried on texts of other domains
LEARNERS = ("learn", "multitok", "bpe")


def _own_domain_table(records: Records) -> str:
    """Returns base ids per id on held-out texts of the pack's own domain, by size; packs of `vocab pack learn`."""
    lines = records.lines("packs")
    sizes = sorted({pack["size"] for pack in lines[0]["packs"]})
    rows = []
    for line in lines:
        test = line["tests"][line["domain"]]
        rates = [f"{pack_of_size_and_learner(line, size, 'learn')['rates'][line['domain']]:.3f}" for size in sizes]
        rows.append([_text_cell(line["domain"], test), f"{line['train_ids']:,}", f"{test['empty']:.3f}", *rates])
    return table(["text", "base ids learned from", "growth alone", *(f"{size:,}" for size in sizes)], rows)


def _crossed_table(records: Records) -> str:
    """Returns base ids per id of each domain with each domain's pack of `CROSSED` entries, its own pack in bold."""
    lines = records.lines("packs")
    tests = lines[0]["tests"]
    rows = [["none: growth alone", *(f"{test['empty']:.3f}" for test in tests.values())]]
    for line in lines:
        rates = pack_of_size_and_learner(line, CROSSED, "learn")["rates"]
        cells = [f"**{rate:.3f}**" if name == line["domain"] else f"{rate:.3f}" for name, rate in rates.items()]
        rows.append([line["domain"], *cells])
    return table(["pack of", *tests], rows)


def _learners_table(records: Records) -> str:
    """Returns the table of base ids per id on a pack's own domain, by learner.

    Two more columns: the pack of `learn` with a codebook that does not grow, and a larger tokenizer without a codebook.
    """
    rows = []
    for line in records.lines("packs"):
        domain = line["domain"]
        for more in line["retokenized"]:
            packs = [pack_of_size_and_learner(line, more["size"], name) for name in LEARNERS]
            rates = [*(pack["rates"][domain] for pack in packs), packs[0]["static"][domain], more["rates"][domain]]
            rows.append([domain, f"{more['size']:,}", *(f"{rate:.3f}" for rate in rates)])
    static = ["`learn`, static", "larger tokenizer"]
    return table(["text", "entries", *(f"`{name}`" for name in LEARNERS), *static], rows)


def pack_of_size_and_learner(line: Record, size: int, learner: str) -> Record:
    return next(pack for pack in line["packs"] if (pack["size"], pack["learner"]) == (size, learner))


def _text_cell(domain: str, test: Record) -> str:
    return f"{domain} ({', '.join(name.split('.')[0] for name in test['text']['files'])})"


def _bundled_table(records: Records) -> str:
    lines = {line["curve"]: line for line in records.lines("pack_quality")}
    empty, packed = lines["empty"], lines["its own, tuned"]
    rows = [["`stories-base`, no hypertokens", "1.000", f"{empty['base_bits_per_byte']:.3f}", ""]]
    for name, line in (("`stories` without its pack", empty), ("`stories`", packed)):
        bits = f"{line['bits_per_byte']:.3f}"
        rows.append([name, f"{line['base_ids_per_id']:.3f}", bits, f"{line['over_base']:+.1%}"])
    return table(["bundled model", "base ids per id", "bits per byte", "to the baseline"], rows)


PACKS = {"empty": "none", "own": "its own"}
TRANSFERRED = {"empty": "none", "learned": "of the new text", "own": "of the training"}


def _pack_columns(names: Mapping[str, str]) -> Columns:
    return (("pack", lambda line: names.get(line["curve"], line["curve"])), ("entries", "{entries:,}"))


def _scored_columns(compared: str) -> Columns:
    return (
        ("base ids per id", "{base_ids_per_id:.3f}"),
        ("bits per byte", "{bits_per_byte:.3f}"),
        (f"to the {compared}", "{over_base:+.1%}"),
        ("to no pack", "{over_empty:+.1%}"),
    )


def _written_columns(head: str, key: str) -> Columns:
    """Returns columns of base tokens per step and their shares of the possible gains, "-" if no gain was possible."""
    share: Callable[[str], Cell] = lambda of: lambda line: "-" if line[key][of] is None else f"{line[key][of]:.0%}"
    tokens = f"{{{key}[base_tokens_per_step]:.3f}}"
    return ((head, tokens), ("of the gain", share("of_gain")), ("of the authors'", share("of_own_gain")))


def bits_against_compression_figure(lines: Sequence[Record]) -> Figure:
    """Returns a figure of bits per byte against base ids per id, from lines of `bench pack_quality`.

    Each curve begins at the model without a pack; the dotted line is the base model. Bars are standard errors over
    documents. Raises `InstallationError` if matplotlib is missing.
    """
    figure = new_figure()
    panel = figure.subplots()
    empty = [line for line in lines if line["curve"] == "empty"]
    curves = dict.fromkeys(line["curve"] for line in lines if line["curve"] != "empty")
    for n, curve in enumerate(curves):
        points = sorted([*empty, *(line for line in lines if line["curve"] == curve)], key=lambda line: line["entries"])
        x, y = ([line[name] for line in points] for name in ("base_ids_per_id", "bits_per_byte"))
        errors = [line["bits_per_byte_standard_error"] or 0 for line in points]
        panel.errorbar(x, y, errors, color=f"C{n}", marker="o", capsize=3, label=f"packs {curve}")
        for line, at in zip(points, zip(x, y, strict=True), strict=True):
            panel.annotate(f"{line['entries']:,}", at, textcoords="offset points", xytext=(6, -12))
    panel.axhline(lines[0]["base_bits_per_byte"], color="black", linestyle=":", label=lines[0]["base"])
    panel.set(xlabel="base ids per id", ylabel="bits per byte", title=f"{lines[0]['model']}, {lines[0]['data']}")
    panel.grid(alpha=0.3)
    panel.legend()
    return figure


TABLES: Tables = {
    "packs": _own_domain_table,
    "packs-crossed": _crossed_table,
    "packs-learners": _learners_table,
    "packs-machines": lambda records: machines_table(records, ("packs", "pack_quality", "pack_transfer")),
    "pack-quality": make_column_table("pack_quality", (*_pack_columns(PACKS), *_scored_columns("control"))),
    "price": _bundled_table,
    "pack-transfer": make_column_table("pack_transfer", (*_pack_columns(TRANSFERRED), *_scored_columns("base"))),
    "pack-transfer-written": make_column_table(
        "pack_transfer",
        (
            *_pack_columns(TRANSFERRED),
            ("theirs", "{own_base_tokens_per_step:.3f}"),
            *_written_columns("greedy", "greedy"),
            *_written_columns("at 0.7", "sampled"),
        ),
    ),
}
PICTURES: Pictures = {
    "docs/reports/packs.svg": lambda records: bits_against_compression_figure(records.lines("pack_quality"))
}
