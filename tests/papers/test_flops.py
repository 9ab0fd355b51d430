"""Appendix B's equations by hand, and table 9's numbers."""

from __future__ import annotations

import pytest

from mlx_zip.bench.papers.zip2zip.flops import TABLE_9, counted_overhead, flops_line, hyper_overhead, relative_flops


def test_every_row_of_table_9_is_the_equations():
    assert [(s.layers, s.merge_size, s.encoder_layers, s.paper_alpha) for s in TABLE_9] == [
        (14, 2, 1, 0.14),
        (32, 2, 2, 0.13),
        (80, 3, 3, 0.11),
        (128, 3, 4, 0.09),
    ]
    for s in TABLE_9:  # two digits; the tie 0.125 is rounded up
        alpha = hyper_overhead(s.encoder_layers, s.merge_size, s.layers)
        assert alpha == pytest.approx(s.paper_alpha, abs=0.005 + 1e-12)


def test_the_equations_by_hand():
    assert hyper_overhead(2, 3, 32) == 0.1875
    assert relative_flops(0.5, 0.25) == 0.5 * 1.25


def test_the_count_by_rows_is_the_papers_at_one_row_per_id():
    assert counted_overhead(2, 3, 32, 1.0) == hyper_overhead(2, 3, 32)
    assert counted_overhead(2, 3, 32, 0.5) == hyper_overhead(2, 3, 32) / 2


def test_a_line_has_the_papers_count_and_the_one_by_rows():
    line = flops_line(TABLE_9[0], 0.7121, 2.0)
    assert line["overhead"] == pytest.approx(1 / 7)
    assert line["relative_flops"] == pytest.approx(0.7121 * 8 / 7)
    assert line["counted_overhead"] == pytest.approx(2 / 7)
    assert line["counted_relative_flops"] == pytest.approx(0.7121 * 9 / 7)
