"""`bench flops`: appendix B's equations by hand, table 9's numbers, and what is refused."""

from __future__ import annotations

import argparse
import json

import pytest

from mlx_zip.bench import flops
from mlx_zip.bench.flops import (
    TABLE_9,
    TRAINED,
    Shape,
    alpha_agrees_with_paper,
    counted_overhead,
    hyper_overhead,
    make_record,
    relative_flops,
)
from mlx_zip.errors import MlxZipError


def lines(capsys, *flags: object) -> list[dict]:
    parser = argparse.ArgumentParser()
    flops.add_arguments(parser)
    assert flops.run(parser.parse_args(list(map(str, flags)))) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_row_of_table_9_is_the_equations():
    assert [(s.layers, s.merge_size, s.encoder_layers, s.paper_alpha) for s in TABLE_9] == [
        (14, 2, 1, 0.14),
        (32, 2, 2, 0.13),
        (80, 3, 3, 0.11),
        (128, 3, 4, 0.09),
    ]
    assert all(alpha_agrees_with_paper(shape) for shape in TABLE_9)


def test_a_printed_number_that_is_not_the_equations_would_be_seen():
    assert not alpha_agrees_with_paper(Shape("other", 14, 2, 1, 0.15))
    assert not alpha_agrees_with_paper(Shape("other", 32, 2, 2, 0.12 - 1e-6))


def test_the_equations_by_hand():
    assert hyper_overhead(2, 3, 32) == 0.1875
    assert relative_flops(0.5, 0.25) == 0.5 * 1.25


def test_the_count_by_rows_is_the_papers_at_one_row_per_id():
    assert counted_overhead(2, 3, 32, 1.0) == hyper_overhead(2, 3, 32)
    assert counted_overhead(2, 3, 32, 0.5) == hyper_overhead(2, 3, 32) / 2


@pytest.mark.slow
def test_a_line_per_model_with_the_papers_number_next_to_ours(capsys):
    found = lines(capsys)
    assert [line["model"] for line in found] == [shape.name for shape in (*TABLE_9, *TRAINED)]
    assert [line["agrees"] for line in found] == [True] * 4 + [None] * 2
    assert found[0]["overhead"] == pytest.approx(1 / 7)
    assert found[0]["relative_flops"] == pytest.approx(0.7121 * 8 / 7)
    assert found[0]["counted_overhead"] == pytest.approx(2 / 7)
    assert {"machine", "versions", "commit"} <= found[0].keys()


def test_rate_and_rows_are_taken_from_the_flags(capsys):
    for line, shape in zip(lines(capsys, "--rate", 0.5, "--rows-per-id", 1.5), (*TABLE_9, *TRAINED), strict=True):
        assert make_record(shape, 0.5, 1.5).items() <= line.items()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--rate", 0),
        ("--rate", 1.01),
        ("--rate", "nan"),
        ("--rows-per-id", -1),
        ("--rows-per-id", "inf"),
        ("--rows-per-id", "nan"),
    ],
)
def test_a_number_out_of_range_is_refused(capsys, flag, value):
    with pytest.raises(MlxZipError, match=f"{flag} must be"):
        lines(capsys, flag, value)
