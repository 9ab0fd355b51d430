"""Tables and picture of the H-BPE report have the figures of the records; equal figures give equal pictures."""

from xml.etree import ElementTree

import pytest

from mlx_zip.bench.papers.hbpe import tables as hbpe_page
from mlx_zip.bench.plots import render_figure

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


def test_a_row_of_kinds_has_the_records_figures_and_the_papers_next_to_them():
    header, _, row = cells(hbpe_page.TABLES["hbpe-kinds"](Lines(LINE)))
    assert row == ["plain BPE", "615,072", "60", "900", "936", "1.26", "1.51", "291", "562", "1.057", "1.16"]
    assert len(header) == len(row)


def test_only_the_lines_of_a_recipe_are_in_its_table():
    records = Lines(LINE, {**SIZED, "recipe": "figure7"}, {**SIZED, "recipe": None})
    assert [row[0] for row in cells(hbpe_page.TABLES["hbpe-sizes"](records))[2:]] == ["8"]
    assert len(cells(hbpe_page.TABLES["hbpe-chinese"](records))) == 2  # its head


def test_the_picture_has_every_curve_over_text_flops_and_time():
    pytest.importorskip("matplotlib")
    picture = hbpe_page.bits_per_byte_figure(Lines(LINE, SIZED))
    tree = ElementTree.fromstring(render_figure(picture, ".svg"))
    shown = {node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert {"plain BPE", "patches, local 2 x 48", "text read, MB", "processor seconds"} <= shown
    assert [len(axes.lines) for axes in picture.axes] == [2, 2, 2]


def test_a_curve_has_the_records_points_and_equal_pictures_have_equal_bytes(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(hbpe_page.NAMES, "plain", "a < b")
    draw = lambda: hbpe_page.bits_per_byte_figure(Lines(LINE, SIZED))
    curve = draw().axes[0].lines[0]
    assert curve.get_xydata().tolist() == [[0.5, 1.5], [0.936, 1.0567]]
    assert render_figure(draw(), ".svg") == render_figure(draw(), ".svg")
    assert b"a &lt; b" in render_figure(draw(), ".svg")
