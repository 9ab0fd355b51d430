"""The tables of the ablations: tables 7 and 8 of the paper with our figures next to the paper's, and all of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean

from mlx_zip.bench.records import Record, Records, table

from .ablation_results import (
    ENCODERS,
    PAPER_ENCODERS,
    PAPER_RATES,
    PAPER_SIZES,
    PAPER_TEXTS,
    Line,
    Results,
    setting_label,
)
from .ablation_trends import answers, cost_of_compression, paper_cost


def tables(results: Results) -> str:
    """Returns the paper's tables 7 and 8 as Markdown, with our figures next to the paper's."""
    return f"Table 7: merge size\n\n{table7(results)}\n\nTable 8: hyper-encoder\n\n{table8(results)}"


def table7(results: Results) -> str:
    """Returns the table of byte-perplexity and compression rate by merge size, ours and the paper's."""
    rate = ["compression rate (%)"] if results.lines else []
    rows = [["M", *results.texts, *rate, *_paper_heads(PAPER_TEXTS), "paper: rate (%)"]]
    for m in sorted({*results.sizes.found, *PAPER_SIZES}):
        lines = results.sizes.found.get(m, [])
        rates = [100 * line["training"]["compression_rate"] for line in lines]
        theirs = [*_paper_cells(PAPER_SIZES.get(m)), f"{PAPER_RATES[m]:.2f}" if m in PAPER_RATES else "-"]
        ours = [*_perplexity_cells(lines, results.texts), _spread(rates, 2)] if results.lines else []
        rows.append([str(m), *ours, *theirs])
    return table(rows[0], rows[1:])


def table8(results: Results) -> str:
    """Returns the table of byte-perplexity by hyper-encoder, ours and the paper's."""
    parameters = ["parameters"] if results.lines else []
    rows = [["encoder", *results.texts, *parameters, *_paper_heads(PAPER_TEXTS)]]
    for name in ENCODERS:
        lines = results.encoders.found.get(name, [])
        if not lines and name not in PAPER_ENCODERS:
            continue
        size = f"{lines[0]['parameters']['encoders']:,}" if lines else "-"
        ours = [*_perplexity_cells(lines, results.texts), size] if results.lines else []
        rows.append([ENCODERS[name][2], *ours, *_paper_cells(PAPER_ENCODERS.get(name))])
    return table(rows[0], rows[1:])


def all_figures(results: Results) -> str:
    """Returns a table of all our figures, with a row per setting, seed and text."""
    rows = [
        [
            "setting",
            "seed",
            "text",
            "bits/byte",
            "standard error",
            "byte-perplexity",
            "compression rate",
            "hypertokens among ids",
            "text read, MB",
            "training, s",
        ]
    ]
    for line in results.lines:
        for name, text in line["texts"].items():
            error = text["bits_per_byte_standard_error"]
            rows.append(
                [
                    setting_label(line),
                    str(line["setting"]["seed"]),
                    name,
                    f"{text['bits_per_byte']:.4f}",
                    "-" if error is None else f"{error:.4f}",
                    f"{text['byte_perplexity']:.4f}",
                    f"{text['compression_rate']:.1%}",
                    f"{text['hyper_share']:.1%}",
                    f"{line['training']['bytes'] / 1e6:.2f}",
                    f"{line['training']['seconds']:,.0f}",
                ]
            )
    return table(rows[0], rows[1:])


def _paper_heads(names: Sequence[str]) -> list[str]:
    """Returns the column heads of the paper's figures."""
    return [f"paper: {name}" for name in names]


def _paper_cells(values: Sequence[float] | None) -> list[str]:
    """Returns the cells of the paper's figures on `PAPER_TEXTS`, "-" where the paper has none."""
    return ["-"] * len(PAPER_TEXTS) if values is None else [f"{value:.2f}" for value in values]


def _perplexity_cells(lines: Sequence[Line], texts: Sequence[str]) -> list[str]:
    """Returns a cell per text: byte-perplexity over the seeds of one setting."""
    return [_spread([line["texts"][text]["byte_perplexity"] for line in lines], 3) for text in texts]


def _spread(values: Sequence[float], digits: int) -> str:
    """Formats values as "mean (least to greatest)"; as one number if all are equal, and "-" if there are none."""
    if not values:
        return "-"
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), mean(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def orders(results: Results) -> str:
    """Returns the table of best and worst settings, the paper's and ours by text.

    The last row is what compression costs in bits per byte.
    """
    found = answers(results)
    rows = [[a.question.text, a.of_paper, *(a.of_text(text) for text in results.texts)] for a in found]
    cost = [_spread([100 * value for value in cost_of_compression(results, text)], 1) for text in results.texts]
    theirs = [100 * value for value in paper_cost()]
    rows.append(["bits per byte of M = 3 over M = 1 (%)", f"{min(theirs):.1f} to {max(theirs):.1f}", *cost])
    return table(["", "paper", *results.texts], rows)


def setup(results: Results) -> str:
    """Returns the table of the conditions under which all settings were trained."""
    c, line = results.conditions, results.lines[0]
    trained = "all weights" if c["fine_tune_type"] == "full" else f"LoRA of rank {c['lora_rank']} and the encoders"
    read = [line["training"]["bytes"] / 1e6 for line in results.lines]
    versions = ", ".join(f"{name} {number}" for name, number in line["versions"].items() if number)
    rows = [
        ["base", f"{c['model']['name']}, {line['parameters']['decoder']:,} parameters"],
        ["training text", f"{', '.join(name for name, _ in c['data'])}, {_spread(read, 2)} MB of it"],
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


def longer(short: Results, long: Sequence[Record]) -> str:
    """Returns the table of bits per byte of settings that were trained twice, for fewer and for more steps, by text."""
    rows = []
    for line in long:
        before = next(other for other in short.lines if other["setting"] == line["setting"])
        bits = [f"{run['texts'][text]['bits_per_byte']:.3f}" for run in (before, line) for text in short.texts]
        rows.append([setting_label(line), *bits])
    steps = (short.conditions["iters"], long[0]["conditions"]["iters"])
    return table(["bits per byte", *(f"{n} steps, {text}" for n in steps for text in short.texts)], rows)


def _from_records(make: Callable[[Results], str]) -> Callable[[Records], str]:
    """Returns a function that makes a table from the record `ablations` instead of from `Results`."""
    return lambda records: make(Results(records.lines("ablations")))


TABLES: dict[str, Callable[[Records], str]] = {
    "ablations-setup": _from_records(setup),
    "ablations-merge-sizes": _from_records(table7),
    "ablations-encoders": _from_records(table8),
    "ablations-orders": _from_records(orders),
    "ablations-longer": lambda records: longer(Results(records.lines("ablations")), records.lines("ablations-longer")),
    "ablations-all": _from_records(all_figures),
}
