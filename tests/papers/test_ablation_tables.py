"""The tables of the ablations: our figures next to the paper's, and which setting is best and worst."""

from __future__ import annotations

import math

from mlx_zip.bench.papers.zip2zip.ablation_tables import (
    ENCODERS,
    PAPER_ENCODERS,
    PAPER_SIZES,
    PAPER_TEXTS,
    AblationResults,
    conditions_table,
    longer_training_table,
    table7,
    table8,
    tables_7_and_8,
)
from mlx_zip.bench.records import read_lines
from support.places import REPO

RECORDS = REPO / "bench" / "papers" / "zip2zip" / "records"


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
    results = AblationResults(made_lines())
    assert table7(results).splitlines()[3] == (
        "| 2 | 1.960 | 2.210 | 2.550 | 2.220 | 80.00 | 1.96 | 2.21 | 2.55 | 2.22 | 75.30 |"
    )
    assert [row.split(" | ")[0] for row in table8(results).splitlines()[2:]] == [
        f"| {ENCODERS[name][2]}" for name in PAPER_ENCODERS
    ]
    assert tables_7_and_8(results).startswith("Table 7")


def test_several_seeds_are_shown_as_mean_and_range():
    high = {m: tuple(p + 0.1 for p in row) for m, row in PAPER_SIZES.items()}
    results = AblationResults([*made_lines(), *made_lines(high, seed=1)])
    assert table7(results).splitlines()[3].startswith("| 2 | 2.010 (1.960 to 2.060) |")


def test_every_kept_line_is_a_result_and_the_setup_says_how_they_were_made():
    for name in ("ablations", "ablations-longer"):
        assert read_lines(RECORDS / f"{name}.jsonl")
    told = conditions_table(AblationResults(read_lines(RECORDS / "ablations.jsonl")))
    assert "| steps | 128, of 4 windows of 1024 base ids |" in told
    assert "| seeds | 0 |" in told


def test_longer_runs_stand_next_to_the_short_ones_of_their_setting():
    short = AblationResults(read_lines(RECORDS / "ablations.jsonl"))
    long = read_lines(RECORDS / "ablations-longer.jsonl")
    rows = longer_training_table(short, long).splitlines()
    assert rows[0].startswith("| bits per byte | 128 steps, t1.test.jsonl | 128 steps, real.test.jsonl | 384 steps, t1")
    for row, line in zip(rows[2:], long, strict=True):
        found = next(other for other in short.lines if other["setting"] == line["setting"])
        bits = [run["texts"][text]["bits_per_byte"] for run in (found, line) for text in short.texts]
        assert row.split(" | ")[1:] == [f"{x:.3f}" for x in bits[:-1]] + [f"{bits[-1]:.3f} |"]
