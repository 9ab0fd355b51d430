"""The ablations' recorded lines, grouped as in the paper, with the paper's figures; tables and figures of the report.

Tables 7 and 8 and figures 5 and 6 are the paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from mlx_zip.bench.plots import new_figure
from mlx_zip.bench.records import Cell, Record, Records, column_table, table
from mlx_zip.errors import MlxZipError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENCODERS = {  # name: (kind, layers, label)
    "averaging": ("averaging", 1, "averaging"),
    "attention": ("attention", 1, "1 attention layer"),
    "transformer": ("transformer", 1, "1 transformer layer"),
    "transformer-2": ("transformer", 2, "2 transformer layers"),
    "res_latent_attn": ("res_latent_attn", 2, "res_latent_attn, 2 layers (zip2zip++)"),
}
PAPER_TEXTS = ("Wiki", "Pile", "mC4", "dC4")
# Byte-perplexity of Phi-3.5-4B on PAPER_TEXTS. Source: arXiv 2506.01084, appendix A, tables 7 and 8. The row of M = 3
# and that of two transformer layers are equal, so table 7 was measured with that encoder.
PAPER_SIZES = {
    1: (1.62, 1.70, 2.00, 1.91),
    2: (1.96, 2.21, 2.55, 2.22),
    3: (1.72, 1.84, 2.15, 2.00),
    4: (1.71, 1.84, 2.14, 1.99),
    5: (1.72, 1.84, 2.14, 1.99),
}
PAPER_RATES = {1: 100.00, 2: 75.30, 3: 71.21, 4: 68.93, 5: 68.41}  # compression rate in percent, table 7
PAPER_ENCODERS = {
    "averaging": (1.81, 1.97, 2.29, 2.08),
    "attention": (1.73, 1.86, 2.16, 2.01),
    "transformer": (1.71, 1.83, 2.13, 1.99),
    "transformer-2": (1.72, 1.84, 2.15, 2.00),
}


class AblationResults:
    """Our lines, and those of each ablation: `sizes` by merge size, `encoders` by hyper-encoder.

    Raises `MlxZipError` if the conditions of two lines differ.
    """

    def __init__(self, lines: Sequence[Record]) -> None:
        self.lines = sorted(lines, key=setting_order)
        self.conditions: dict[str, Any] = lines[0]["conditions"] if lines else {}
        for line in lines:
            if line["conditions"] != self.conditions:
                raise MlxZipError("the lines were measured under different conditions and do not compare")
        self.texts = [name for name, _ in self.conditions.get("valid", [])]
        self.seeds = sorted({line["setting"]["seed"] for line in lines})
        self.sizes = self._group_lines("merge_size", "encoder", (None, self.conditions.get("encoder")))
        encoders = self._group_lines("encoder", "merge_size", (self.conditions.get("merge_size"),))
        self.encoders = {name: encoders[name] for name in ENCODERS if name in encoders}

    def _group_lines(self, key: str, other: str, allowed: tuple[Any, ...]) -> dict[Any, list[Record]]:
        """Returns lines grouped by their setting's `key`; only lines whose setting `other` is in `allowed`."""
        groups: dict[Any, list[Record]] = {}
        for line in self.lines:
            if line["setting"][other] in allowed and line["setting"][key] is not None:
                groups.setdefault(line["setting"][key], []).append(line)
        return groups


def setting_order(line: Record) -> tuple[int, int, int]:
    setting = line["setting"]
    encoder = list(ENCODERS).index(setting["encoder"]) if setting["encoder"] else -1
    return setting["merge_size"], encoder, setting["seed"]


def setting_label(line: Record) -> str:
    """Returns the name of a line's setting, for example "M = 3, 1 attention layer"."""
    setting = line["setting"]
    if setting["encoder"] is None:
        return f"M = {setting['merge_size']}"
    return f"M = {setting['merge_size']}, {ENCODERS[setting['encoder']][2]}"


# ---- tables


def tables_7_and_8(results: AblationResults) -> str:
    """Returns the paper's tables 7 and 8 as Markdown, with our results next to the paper's."""
    return f"Table 7: merge size\n\n{table7(results)}\n\nTable 8: hyper-encoder\n\n{table8(results)}"


def table7(results: AblationResults) -> str:
    """Returns the table of byte-perplexity and compression rate by merge size, our results and the paper's."""
    rate = ["compression rate (%)"] if results.lines else []
    rows = [["M", *results.texts, *rate, *_paper_heads(PAPER_TEXTS), "paper: rate (%)"]]
    for m in sorted({*results.sizes, *PAPER_SIZES}):
        lines = results.sizes.get(m, [])
        rates = [100 * line["training"]["compression_rate"] for line in lines]
        theirs = [*_paper_cells(PAPER_SIZES.get(m)), f"{PAPER_RATES[m]:.2f}" if m in PAPER_RATES else "-"]
        ours = [*_perplexity_cells(lines, results.texts), mean_and_range(rates, 2)] if results.lines else []
        rows.append([str(m), *ours, *theirs])
    return table(rows[0], rows[1:])


def table8(results: AblationResults) -> str:
    """Returns the table of byte-perplexity by hyper-encoder, our results and the paper's."""
    parameters = ["parameters"] if results.lines else []
    rows = [["encoder", *results.texts, *parameters, *_paper_heads(PAPER_TEXTS)]]
    for name in ENCODERS:
        lines = results.encoders.get(name, [])
        if not lines and name not in PAPER_ENCODERS:
            continue
        size = f"{lines[0]['parameters']['encoders']:,}" if lines else "-"
        ours = [*_perplexity_cells(lines, results.texts), size] if results.lines else []
        rows.append([ENCODERS[name][2], *ours, *_paper_cells(PAPER_ENCODERS.get(name))])
    return table(rows[0], rows[1:])


def all_figures_table(results: AblationResults) -> str:
    texts = [(line, name, text) for line in results.lines for name, text in line["texts"].items()]
    return column_table(({"line": line, "name": name, "text": text} for line, name, text in texts), _FIGURES)


def standard_error_cell(row: Record) -> str:
    error = row["text"]["bits_per_byte_standard_error"]
    return "-" if error is None else f"{error:.4f}"


_FIGURES: tuple[tuple[str, Cell], ...] = (
    ("setting", lambda row: setting_label(row["line"])),
    ("seed", "{line[setting][seed]}"),
    ("text", "{name}"),
    ("bits/byte", "{text[bits_per_byte]:.4f}"),
    ("standard error", standard_error_cell),
    ("byte-perplexity", "{text[byte_perplexity]:.4f}"),
    ("compression rate", "{text[compression_rate]:.1%}"),
    ("hypertokens among ids", "{text[hyper_share]:.1%}"),
    ("text read, MB", lambda row: f"{row['line']['training']['bytes'] / 1e6:.2f}"),
    ("training, s", "{line[training][seconds]:,.0f}"),
)


def _paper_heads(names: Sequence[str]) -> list[str]:
    return [f"paper: {name}" for name in names]


def _paper_cells(values: Sequence[float] | None) -> list[str]:
    return ["-"] * len(PAPER_TEXTS) if values is None else [f"{value:.2f}" for value in values]


def _perplexity_cells(lines: Sequence[Record], texts: Sequence[str]) -> list[str]:
    return [mean_and_range([line["texts"][text]["byte_perplexity"] for line in lines], 3) for text in texts]


def mean_and_range(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), mean(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def conditions_table(results: AblationResults) -> str:
    c, line = results.conditions, results.lines[0]
    trained = "all weights" if c["fine_tune_type"] == "full" else f"LoRA of rank {c['lora_rank']} and the encoders"
    read = [line["training"]["bytes"] / 1e6 for line in results.lines]
    versions = ", ".join(f"{name} {number}" for name, number in line["versions"].items() if number)
    rows = [
        ["base", f"{c['model']['name']}, {line['parameters']['decoder']:,} parameters"],
        ["training text", f"{', '.join(name for name, _ in c['data'])}, {mean_and_range(read, 2)} MB of it"],
        ["steps", f"{c['iters']}, of {c['batch_size']} windows of {c['context']} base ids"],
        ["trained", f"{trained}; {c['optimizer']}, {c['dtype']}"],
        ["encoder of the merge sizes", ENCODERS[c["encoder"]][2]],
        ["merge size of the encoders", str(c["merge_size"])],
        ["hypertokens per window at most", f"{c['codebook_size']:,}"],
        ["seeds", ", ".join(map(str, results.seeds))],
        ["machine", f"{line['machine']}; {versions}"],
        ["commit, load", f"{line['commit'] or 'not recorded'}, {line.get('load_average', 'not recorded')}"],
    ]
    return table(["", ""], rows)


def longer_training_table(short: AblationResults, long: Sequence[Record]) -> str:
    rows = []
    for line in long:
        before = next(other for other in short.lines if other["setting"] == line["setting"])
        bits = [f"{run['texts'][text]['bits_per_byte']:.3f}" for run in (before, line) for text in short.texts]
        rows.append([setting_label(line), *bits])
    steps = (short.conditions["iters"], long[0]["conditions"]["iters"])
    return table(["bits per byte", *(f"{n} steps, {text}" for n in steps for text in short.texts)], rows)


# ---- figures 5 and 6: training loss against bytes read, a curve per setting

PANELS = ((1, "nats per id"), (2, "bits per byte"))  # (index into a point of a training curve, label of the y axis)


def training_loss_figure(name: str, found: Mapping[str, Sequence[Record]]) -> Figure:
    """Returns the figure of one ablation: training loss against text read; the seeds of a setting have one colour.

    name: what differs between settings. found: label of a setting -> its lines. The paper draws nats per id. An id
    stands for more text at higher compression, so only bits per byte compare settings. Raises `InstallationError` if
    matplotlib is missing.
    """
    figure = new_figure()
    for panel, (column, label) in zip(figure.subplots(1, 2), PANELS, strict=True):
        for i, (setting, lines) in enumerate(found.items()):
            for j, line in enumerate(lines):
                curve = line["training"]["curve"]
                points = [point[0] / 1e6 for point in curve], [point[column] for point in curve]
                panel.plot(*points, color=f"C{i}", linewidth=1, label=None if j else setting)
        panel.set(xlabel="text read, MB", ylabel=label)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(f"Training loss by {name}")
    return figure


def from_records(make: Callable[[AblationResults], Any]) -> Callable[[Records], Any]:
    return lambda records: make(AblationResults(records.lines("ablations")))


def merge_size_figure(results: AblationResults) -> Figure:
    return training_loss_figure("merge size", {f"M = {m}": lines for m, lines in results.sizes.items()})


def encoder_figure(results: AblationResults) -> Figure:
    return training_loss_figure("hyper-encoder", {ENCODERS[name][2]: found for name, found in results.encoders.items()})


TABLES: dict[str, Callable[[Records], str]] = {
    "ablations-setup": from_records(conditions_table),
    "ablations-merge-sizes": from_records(table7),
    "ablations-encoders": from_records(table8),
    "ablations-longer": lambda records: longer_training_table(
        AblationResults(records.lines("ablations")), records.lines("ablations-longer")
    ),
    "ablations-all": from_records(all_figures_table),
}
PICTURES: dict[str, Callable[[Records], Figure]] = {
    "docs/reports/ablations-figure5.svg": from_records(merge_size_figure),
    "docs/reports/ablations-figure6.svg": from_records(encoder_figure),
}
