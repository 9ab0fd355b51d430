"""Tables 7 and 8 of the paper and the page docs/ablations.md, from recorded lines, beside the paper's own numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from mlx_zip.files import whole_file

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
from .ablation_trends import Answers, answers, cost_of_compression, paper_cost

# ---- tables


def tables(results: Results) -> str:
    """Tables 7 and 8 as Markdown."""
    return f"Table 7: merge size\n\n{table7(results)}\n\nTable 8: hyper-encoder\n\n{table8(results)}"


def table7(results: Results) -> str:
    """Byte-perplexity and compression rate by merge size, ours and the paper's."""
    rate = ["compression rate (%)"] if results.lines else []
    rows = [["M", *results.texts, *rate, *_of_paper(PAPER_TEXTS), "paper: rate (%)"]]
    for m in sorted({*results.sizes.found, *PAPER_SIZES}):
        lines = results.sizes.found.get(m, [])
        rates = [100 * line["training"]["compression_rate"] for line in lines]
        theirs = [*_shown(PAPER_SIZES.get(m)), f"{PAPER_RATES[m]:.2f}" if m in PAPER_RATES else "-"]
        ours = [*_perplexities(lines, results.texts), _spread(rates, 2)] if results.lines else []
        rows.append([str(m), *ours, *theirs])
    return markdown(rows)


def table8(results: Results) -> str:
    """Byte-perplexity by encoder, ours and the paper's."""
    parameters = ["parameters"] if results.lines else []
    rows = [["encoder", *results.texts, *parameters, *_of_paper(PAPER_TEXTS)]]
    for name in ENCODERS:
        lines = results.encoders.found.get(name, [])
        if not lines and name not in PAPER_ENCODERS:
            continue
        size = f"{lines[0]['parameters']['encoders']:,}" if lines else "-"
        ours = [*_perplexities(lines, results.texts), size] if results.lines else []
        rows.append([ENCODERS[name][2], *ours, *_shown(PAPER_ENCODERS.get(name))])
    return markdown(rows)


def all_figures(results: Results) -> str:
    """A row per line and text."""
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
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of cells, the first row its head; all but the first column to the right."""
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ruler, *body])


def _of_paper(names: Sequence[str]) -> list[str]:
    return [f"paper: {name}" for name in names]


def _shown(values: Sequence[float] | None) -> list[str]:
    return ["-"] * len(PAPER_TEXTS) if values is None else [f"{value:.2f}" for value in values]


def _perplexities(lines: Sequence[Line], texts: Sequence[str]) -> list[str]:
    return [_spread([line["texts"][text]["byte_perplexity"] for line in lines], 3) for text in texts]


def _spread(values: Sequence[float], digits: int) -> str:
    """The mean, and least and greatest where they differ."""
    if not values:
        return "-"
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), mean(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


# ---- where we differ


def differences(results: Results) -> str:
    """A table of the questions, then a sentence for every answer that is not the paper's."""
    found = answers(results)
    rows = [["", "paper", *results.texts]]
    rows += [[a.question.text, a.of_paper, *(a.of_text(text) for text in results.texts)] for a in found]
    cost = [_spread([100 * value for value in cost_of_compression(results, text)], 1) for text in results.texts]
    theirs = [100 * value for value in paper_cost()]
    rows.append(["bits per byte of M = 3 over M = 1 (%)", f"{min(theirs):.1f} to {max(theirs):.1f}", *cost])
    sentences = [sentence for a in found for text in results.texts if (sentence := _difference(a, text))]
    sentences += [_cost_difference(results, text) for text in results.texts if _cost_difference(results, text)]
    if not sentences:
        measured = any(a.ours[text] for a in found for text in results.texts)
        sentences = ["No measured ordering differs from the paper's." if measured else "Nothing to compare yet."]
    if len(results.seeds) == 1:
        sentences.append("One seed was run: orders of neighbours that lie close together may be chance.")
    return markdown(rows) + "\n\n" + "\n".join(f"- {sentence}" for sentence in sentences)


def _difference(found: Answers, text: str) -> str:
    if not found.strange(text):
        return ""
    what = found.question.text[0].upper() + found.question.text[1:]
    return f"{what}: the paper has {found.of_paper}; on {text} it is {found.of_text(text)} here."


def _cost_difference(results: Results, text: str) -> str:
    cost, theirs = cost_of_compression(results, text), paper_cost()
    if not cost or min(theirs) <= mean(cost) <= max(theirs):
        return ""
    much = "more" if mean(cost) > max(theirs) else "less"
    return f"Compression costs {much} than in the paper: {mean(cost):+.1%} bits per byte at M = 3 on {text}."


# ---- the page

_HEAD = """\
# Ablations

What the merge size and the hyper-encoder do to a model's bits per byte: the zip2zip paper's appendix A
(arXiv 2506.01084, tables 7 and 8, figures 5 and 6) at small scale. Every setting is trained from the same base on the
same windows of text, then evaluated on the same bytes; a hypertoken has probability only from the id on that created
it, which is what generation sees. Byte-perplexity is 2 to the bits per byte; the compression rate is ids over base ids
of the training text. Lower is better in every column.

This page is written by `mlx_zip bench ablations --write-docs docs/ablations.md` from
`bench/records/ablations.jsonl` and, for the section "Why", `ablations.md` beside it. To measure anew, and then keep the
lines:

```sh
mlx_zip bench ablations --model BASE --data TRAIN.txt --valid TEST.txt --out ablations --iters 500 --seed 0 1 2
cp ablations/ablations.jsonl bench/records/
mlx_zip bench ablations --write-docs docs/ablations.md
```

The command goes on where it was interrupted. `--separator '<|endoftext|>'` names the line between documents of a text
file; `mlx_zip bench ablations --help` lists the rest.
"""
_NOTHING = """\
## Results

No run is recorded yet; the tables hold the paper's numbers alone."""
_PAPER = """\
The paper's numbers are those of Phi-3.5-4B, adapted with LoRA on 0.1 billion tokens and measured in windows of 1,024
tokens; its compression rate is that of windows of 2,048 (§3.1, appendix A)."""


def write_page(path: Path, results: Results, pictures: Sequence[str] = (), remarks: str = "") -> None:
    """Writes the page, whole or not at all. pictures: names of the figures beside it. remarks: why, in Markdown."""
    with whole_file(path) as partial:
        partial.write_text(page(results, pictures, remarks), encoding="utf-8")


def page(results: Results, pictures: Sequence[str] = (), remarks: str = "") -> str:
    """The page's text."""
    parts = [_HEAD, _NOTHING if not results.lines else "## Results\n\n" + _setup(results), _PAPER]
    for n, title, table in ((7, "merge size", table7), (8, "hyper-encoder", table8)):
        parts.append(f"### Table {n}: byte-perplexity by {title}\n\n{table(results)}")
    parts += [f"![Training loss]({name})" for name in pictures]
    if results.lines:
        parts.append("## Where we differ\n\n" + differences(results))
        if remarks:
            parts.append("## Why\n\n" + remarks)
        parts.append("## All figures\n\n" + all_figures(results))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _setup(results: Results) -> str:
    """What was run, in words."""
    c, line = results.conditions, results.lines[0]
    trained = "all weights" if c["fine_tune_type"] == "full" else f"LoRA of rank {c['lora_rank']} and the encoders"
    read = [line["training"]["bytes"] / 1e6 for line in results.lines]
    facts = [
        f"Base: {c['model']['name']}, {line['parameters']['decoder']:,} parameters.",
        f"Training: {', '.join(name for name, _ in c['data'])}; {c['iters']} steps of {c['batch_size']} windows of "
        f"{c['context']} base ids, {_spread(read, 2)} MB of text; {trained}; {c['optimizer']}, {c['dtype']}.",
        f"Merge sizes with {ENCODERS[c['encoder']][2]}; encoders at merge size {c['merge_size']}; at most "
        f"{c['codebook_size']} hypertokens a window.",
        f"Seeds: {', '.join(map(str, results.seeds))}" + (" (mean, least to greatest)." if results.seeds[1:] else "."),
        f"Machine: {line['machine']}; "
        + ", ".join(f"{name} {number}" for name, number in line["versions"].items() if number)
        + ".",
    ]
    return "\n".join(f"- {fact}" for fact in facts)
