"""The page of the ablations: tables, orderings beside the paper's, and the page that is kept."""

from __future__ import annotations

import copy
import math

from mlx_zip.bench.papers.zip2zip.ablation_page import differences, page, table7, table8, tables
from mlx_zip.bench.papers.zip2zip.ablation_results import (
    ENCODERS,
    PAPER_ENCODERS,
    PAPER_SIZES,
    PAPER_TEXTS,
    RECORDS,
    Results,
    read_lines,
    read_remarks,
)
from support.places import REPO


def test_the_repositorys_page_is_written_from_its_recorded_lines():
    results = Results(read_lines(RECORDS))
    drawn = ["ablations-figure5.png", "ablations-figure6.png"] if results.lines else []
    assert (REPO / "docs" / "ablations.md").read_text() == page(results, drawn, read_remarks(RECORDS))
    assert all((REPO / "docs" / name).exists() for name in drawn)


def made_lines(sizes=PAPER_SIZES, encoders=PAPER_ENCODERS, seed=0):
    """Lines with the byte-perplexities of tables, as if they had been measured."""
    conditions = {"valid": [[name, None] for name in PAPER_TEXTS], "encoder": "transformer-2", "merge_size": 3}
    found = [(m, None if m == 1 else "transformer-2", row) for m, row in sizes.items()]
    found += [(3, name, row) for name, row in encoders.items() if name != "transformer-2"]
    return [
        {
            "setting": {"merge_size": m, "encoder": encoder, "seed": seed},
            "conditions": conditions,
            "parameters": {"encoders": 7},
            "training": {"compression_rate": 1 - m / 10},
            "texts": {
                text: {"byte_perplexity": p, "bits_per_byte": math.log2(p)}
                for text, p in zip(PAPER_TEXTS, row, strict=True)
            },
        }
        for m, encoder, row in found
    ]


def test_tables_have_a_row_per_setting_and_a_column_per_text():
    results = Results(made_lines())
    assert table7(results).splitlines()[3] == (
        "| 2 | 1.960 | 2.210 | 2.550 | 2.220 | 80.00 | 1.96 | 2.21 | 2.55 | 2.22 | 75.30 |"
    )
    assert [row.split(" | ")[0] for row in table8(results).splitlines()[2:]] == [
        f"| {ENCODERS[name][2]}" for name in PAPER_ENCODERS
    ]
    assert tables(results).startswith("Table 7")


def test_several_seeds_are_shown_as_mean_and_range():
    high = {m: tuple(p + 0.1 for p in row) for m, row in PAPER_SIZES.items()}
    results = Results([*made_lines(), *made_lines(high, seed=1)])
    assert table7(results).splitlines()[3].startswith("| 2 | 2.010 (1.960 to 2.060) |")


def test_the_papers_own_numbers_do_not_differ_from_the_paper():
    told = differences(Results(made_lines()))
    assert "- No measured ordering differs from the paper's." in told
    assert "| worst encoder | averaging (4 of 4 texts) | averaging | averaging | averaging | averaging |" in told
    assert "| 7.1 to 14.9 | 12.4 | 14.9 | 10.4 | 7.1 |" in told


def test_an_ordering_that_differs_is_told_with_the_text():
    sizes = copy.deepcopy(PAPER_SIZES)
    sizes[5] = (3.0, *PAPER_SIZES[5][1:])
    encoders = {**PAPER_ENCODERS, "attention": (1.73, 1.86, 2.16, 2.5)}
    told = differences(Results(made_lines(sizes, encoders))).splitlines()
    worst = "Worst merge size that compresses: the paper has M = 2 (4 of 4 texts); on Wiki it is M = 5 here."
    assert [line for line in told if line.startswith("- Worst")] == [
        f"- {worst}",
        "- Worst encoder: the paper has averaging (4 of 4 texts); on dC4 it is 1 attention layer here.",
    ]


def test_seeds_that_disagree_are_counted():
    swapped = {**PAPER_SIZES, 2: PAPER_SIZES[5], 5: PAPER_SIZES[2]}
    told = differences(Results([*made_lines(), *made_lines(seed=1), *made_lines(swapped, seed=2)]))
    assert "M = 2 (2 of 3 seeds), M = 5 (1 of 3 seeds)" in told
    assert "One seed" not in told


def test_a_question_is_open_until_every_setting_of_the_paper_is_measured():
    sizes = {m: row for m, row in PAPER_SIZES.items() if m != 4}
    told = differences(Results(made_lines(sizes)))
    assert told.count("not measured") == 3 * len(PAPER_TEXTS)
