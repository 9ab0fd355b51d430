"""Tables and picture of docs/hbpe.md: made of the records' own figures; a chart is the same for the same figures."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from mlx_zip.bench.papers.hbpe import hbpe_page
from mlx_zip.bench.svg import Curve, Panel, drawn, ticks

LINE = {
    "recipe": "table2",
    "model": "plain",
    "parameters": 615072,
    "processor_s": 60.2,
    "steps": 900,
    "train_bytes_seen": 936000,
    "fertility": 1.26,
    "forward_flops_per_byte": 291271,
    "bits_per_byte": 1.0567,
    "bytes_per_unit": 4.05,
    "symbols_per_unit": None,
    "vocab_size": 4096,
    "config": {"vocab_size": 4097},
    "curve": [
        {"train_bytes": 500000, "processor_s": 30.0, "bits_per_byte": 1.5},
        {"train_bytes": 936000, "processor_s": 60.2, "bits_per_byte": 1.0567},
    ],
}
CONFIG = {"patch_size": 8, "symbols": 331, "local": {"layers": 2, "width": 48}}
SIZED = {**LINE, "model": "patches", "symbols_per_unit": 4.97, "config": CONFIG}


class Lines:
    def __init__(self, *lines):
        self._lines = lines

    def lines(self, name):
        return list(self._lines) if name == hbpe_page.MODELS else []


def cells(text):
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()]


def test_a_row_of_kinds_has_the_records_figures_and_the_papers_beside_them():
    header, _, row = cells(hbpe_page.TABLES["hbpe-kinds"](Lines(LINE)))
    assert row == ["plain BPE", "615,072", "60", "900", "936", "1.26", "1.51", "291", "562", "1.057", "1.16"]
    assert len(header) == len(row)


def test_only_the_lines_of_a_recipe_are_in_its_table():
    records = Lines(LINE, {**SIZED, "recipe": "figure7"}, {**SIZED, "recipe": None})
    assert [row[0] for row in cells(hbpe_page.TABLES["hbpe-sizes"](records))[2:]] == ["8"]
    assert "no record yet: `mlx_zip bench hbpe_model --recipe table3`" in hbpe_page.TABLES["hbpe-chinese"](records)


def test_the_picture_has_every_curve_over_text_flops_and_time():
    tree = ElementTree.fromstring(hbpe_page.picture(Lines(LINE, SIZED)))
    shown = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"plain BPE", "patches, local 2 x 48", "text read, MB", "processor seconds"} <= set(shown)
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}circle"))) == 3 * 2 * 2


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.93, 2.87), (0, 0.0031), (17, 18), (2, 2)])
def test_ticks_are_round_and_hold_what_is_drawn(low, high):
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high * 0.999
    assert 2 <= len(found) <= 13 or low == high
    steps = {f"{b - a:.6g}" for a, b in pairwise(found)}
    assert len(steps) <= 1
    assert all(re.fullmatch(r"0*\.?0*[125]0*(e-\d+)?", step) for step in steps)


def test_a_point_stands_where_its_figures_say_and_names_are_escaped():
    panel = Panel("x", "y", [Curve("a < b", [(0.0, 1.0), (10.0, 3.0)])])
    tree = ElementTree.fromstring(drawn([panel]))
    first, last = ((float(c.get("cx")), float(c.get("cy"))) for c in tree.iter("{http://www.w3.org/2000/svg}circle"))
    assert first[0] < last[0]
    assert first[1] > last[1]  # up is less in SVG
    assert drawn([panel]) == drawn([panel])
    assert "a < b" in [node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")]
