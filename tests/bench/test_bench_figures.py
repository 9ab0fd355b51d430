"""`bench figures`: the pages say what the records say, and nothing else of a page is touched."""

import json
import shutil
from pathlib import Path

import pytest

from mlx_zip.bench.__main__ import main
from mlx_zip.bench.figures import FOLDER, PAGES, PICTURES, TARGETS, Ratio, Records, Target, ratio
from support.places import REPO

ROOT = REPO


@pytest.fixture
def checkout(tmp_path):
    """Pages and records, to be changed."""
    shutil.copytree(ROOT / FOLDER, tmp_path / FOLDER)
    for page in (*PAGES, *PICTURES):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    return tmp_path


def test_the_pages_of_this_checkout_say_what_its_records_say():
    assert main(["figures", "--check", "--root", str(ROOT)]) == 0


def test_a_record_that_changes_is_told_and_then_written(checkout, capsys):
    path = checkout / FOLDER / "profile-warm.jsonl"
    record = json.loads(path.read_text())
    record["ratio"]["samples"] = [1.5, 1.75, 2.25]
    path.write_text(json.dumps(record))
    before = {page: (checkout / page).read_text() for page in PAGES}
    assert main(["figures", "--check", "--root", str(checkout)]) == 1
    assert "performance.md: differs" in capsys.readouterr().err
    assert {page: (checkout / page).read_text() for page in PAGES} == before
    assert main(["figures", "--root", str(checkout)]) == 0
    text = (checkout / "docs/performance.md").read_text()
    assert "| 1.75 (1.50 to 2.25) |" in text
    assert "at most 1.04 | 1.75 (1.50 to 2.25) | missed |" in text
    assert main(["figures", "--check", "--root", str(checkout)]) == 0


def test_what_stands_between_the_tables_stays(checkout):
    page = checkout / "README.md"
    page.write_text(page.read_text().replace("# mlx_zip\n", "# mlx_zip\n\nAn é and a \\1.\n", 1))
    assert main(["figures", "--root", str(checkout)]) == 0
    text = page.read_text()
    assert "\n\nAn é and a \\1.\n" in text
    assert text.count("<!-- end of figures -->") == (ROOT / "README.md").read_text().count("<!-- end of figures -->")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda root: (root / "README.md").unlink(), "README.md: No such file"),
        (lambda root: (root / FOLDER / "rows.jsonl").unlink(), "rows.jsonl: No such file"),
        (lambda root: (root / FOLDER / "rows.jsonl").write_text("{"), "rows.jsonl: not JSON lines"),
        (lambda root: (root / FOLDER / "rows.jsonl").write_text(""), "rows.jsonl: 0 records, not one"),
        (lambda root: (root / FOLDER / "rows.jsonl").write_text("{}"), "its records have no"),
        (lambda root: (root / FOLDER / "zip2zip.jsonl").write_text("{}"), "published: its records have no"),
        (lambda root: edit(root, "<!-- figures: speed -->", "<!-- figures: heat -->"), "no figures named 'heat'"),
        (lambda root: edit(root, "<!-- end of figures -->", ""), "not every"),
        (lambda root: edit(root, "<!-- figures: speed -->", ""), "not every"),
        (lambda root: edit(root, "<!-- figures: speed -->", "<!--figures: speed-->"), "not every"),
        (lambda root: (root / "README.md").write_text(""), "no page shows the figures codec, speed"),
        (lambda root: (root / "README.md").write_bytes(b"\xff"), "README.md is not valid UTF-8"),
        *(
            (lambda root, text=text: (root / FOLDER / "rows.jsonl").write_text(text), "do not hold what they should")
            for text in ("[]", "3", "null", '"x"')
        ),
        (lambda root: change(root, "profile-warm", samples=[]), "do not hold what they should"),
        (lambda root: change(root, "profile-warm", samples=["a"]), "do not hold what they should"),
        (lambda root: change(root, "profile-warm", samples=None), "do not hold what they should"),
        (lambda root: change(root, "profile-warm", samples=[float("nan")]), "NaN is no number"),
        (lambda root: change(root, "profile-warm", samples=[10**400]), "do not hold what they should"),
        (lambda root: (root / FOLDER / "rows.jsonl").write_text("[" * 200_000), "rows.jsonl: not JSON lines"),
    ],
)
def test_what_cannot_be_used_is_said_and_no_page_is_written(change, told, checkout, capsys):
    change(checkout)
    assert main(["figures", "--root", str(checkout)]) == 2
    assert told in capsys.readouterr().err


def change(root, name, **ratio):
    path = root / FOLDER / f"{name}.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ratio": ratio}))


def test_a_page_keeps_its_line_ends(checkout):
    page = checkout / "README.md"
    page.write_bytes(page.read_bytes().replace(b"\n", b"\r\n"))
    assert main(["figures", "--check", "--root", str(checkout)]) == 0
    change(checkout, "profile-warm", samples=[1.5])
    path = checkout / FOLDER / "generate-code-1024.jsonl"
    text = path.read_text()
    path.write_text(text.replace('"ttft_ms": {"unit": "ms", "median": ', '"ttft_ms": {"unit": "ms", "median": 1'))
    assert main(["figures", "--root", str(checkout)]) == 0
    data = page.read_bytes()
    assert data.count(b"\n") == data.count(b"\r\n") > 50


def test_a_page_that_cannot_be_written_is_said(checkout, capsys, monkeypatch):
    change(checkout, "profile-warm", samples=[1.5])

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("mlx_zip.bench.figures.whole_file", refuse)
    assert main(["figures", "--root", str(checkout)]) == 2
    told = capsys.readouterr().err
    assert "performance.md cannot be written: Permission denied" in told
    assert "written\n" not in told


def edit(root, old, new):
    page = root / "README.md"
    text = page.read_text()
    assert old in text
    page.write_text(new.join(text.rsplit(old, 1)))


def test_a_ratio_has_the_medians_and_the_trials_that_ran_together():
    a = {"figures": {"steps_per_s": {"median": 10.0, "samples": [8.0, 10.0, 20.0]}}}
    b = {"figures": {"steps_per_s": {"median": 12.0, "samples": [12.0, 12.0, 10.0]}}}
    assert ratio((a, b), "steps_per_s") == Ratio(1.2, 0.5, 1.5)
    assert ratio((a, b), "steps_per_s").over(2) == Ratio(0.6, 0.25, 0.75)


@pytest.mark.parametrize(
    ("value", "most", "told"),
    [
        (1.0, True, "met"),
        (1.01, True, "missed"),
        (1.0, False, "met"),
        (0.99, False, "missed"),
        (Ratio(0.9, 0.8, 1.0), True, "met"),
        (Ratio(0.9, 0.8, 1.1), True, "met, not by every trial"),
        (Ratio(1.2, 0.9, 1.3), False, "met, not by every trial"),
        (Ratio(1.2, 1.0, 1.3), False, "met"),
        (Ratio(1.1, 0.9, 1.3), True, "missed"),
    ],
)
def test_a_target_is_met_at_its_bound(value, most, told):
    assert Target("speed", 1.0, lambda records: value, most=most).row(Records(Path()))[-1] == told


def test_every_target_of_the_page_is_measured():
    records = Records(ROOT / FOLDER)
    rows = [target.row(records) for target in TARGETS]
    assert len({row[0] for row in rows}) == len(rows) == len(TARGETS)
    assert {row[-1] for row in rows} <= {"met", "met, not by every trial", "missed"}
