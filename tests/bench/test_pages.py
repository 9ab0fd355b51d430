"""`python -m mlx_zip.bench.pages`: pages say what the records say, and nothing else of a page is touched."""

import json
import re
import shutil
from pathlib import Path

import pytest

from mlx_zip.bench import pages
from mlx_zip.bench.generation.ratios import Ratio, figure_ratio
from mlx_zip.bench.pages import main, pages_of, registered_tables_and_pictures, table_names
from mlx_zip.bench.records import PLACES, Records, machines_table
from mlx_zip.bench.tables.performance import TARGETS, Target
from support.places import REPO
from support.tiny_bench import record

ROOT = REPO
RECORDS = "bench/records"


PAGES = ("README.md", "docs/performance.md")  # of the checkouts made here
PICTURE = "docs/reports/hbpe.svg"


def copy_to(folder, paths):
    for path in paths:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """All records, two pages with tables and no picture, to be changed."""
    copy_to(tmp_path, [path for place in PLACES for path in ROOT.glob(f"{place}/*.jsonl")])
    copy_to(tmp_path, [ROOT / page for page in PAGES])
    shown = {name for page in PAGES for name in table_names((ROOT / page).read_text())}
    tables = {name: make for name, make in registered_tables_and_pictures()[0].items() if name in shown}
    monkeypatch.setattr(pages, "registered_tables_and_pictures", lambda: (tables, {}))
    return tmp_path


@pytest.fixture
def pictured(checkout, monkeypatch):
    """The checkout with one picture."""
    copy_to(checkout, [ROOT / PICTURE])
    tables, pictures = (
        pages.registered_tables_and_pictures()[0],
        {PICTURE: registered_tables_and_pictures()[1][PICTURE]},
    )
    monkeypatch.setattr(pages, "registered_tables_and_pictures", lambda: (tables, pictures))
    return checkout


@pytest.mark.slow
def test_the_tables_of_this_checkout_are_those_of_its_records_and_parsers():
    assert main(["--check", "--root", str(ROOT)]) == 0


def test_a_record_that_changes_is_told_and_then_written(checkout, capsys):
    path = checkout / "bench/records" / "profile-warm.jsonl"
    record = json.loads(path.read_text())
    record["ratio"]["samples"] = [1.5, 1.75, 2.25]
    path.write_text(json.dumps(record))
    before = {page: page.read_text() for page in pages_of(checkout)}
    assert main(["--check", "--root", str(checkout)]) == 1
    assert "performance.md: would change" in capsys.readouterr().err
    assert {page: page.read_text() for page in pages_of(checkout)} == before
    assert main(["--root", str(checkout)]) == 0
    text = (checkout / "docs/performance.md").read_text()
    assert "| 1.75 (1.50 to 2.25) |" in text
    assert "at most 1.02 | 1.75 (1.50 to 2.25) | missed |" in text
    assert main(["--check", "--root", str(checkout)]) == 0


def test_what_stands_between_the_tables_stays(checkout):
    page = checkout / "README.md"
    page.write_text(page.read_text().replace("# mlx_zip\n", "# mlx_zip\n\nAn é and a \\1.\n", 1))
    assert main(["--root", str(checkout)]) == 0
    text = page.read_text()
    assert "\n\nAn é and a \\1.\n" in text
    assert text.count("<!-- end -->") == (ROOT / "README.md").read_text().count("<!-- end -->")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda root: (root / "bench/records" / "serve.jsonl").unlink(), "there is no record serve.jsonl"),
        (lambda root: (root / "bench/records" / "serve.jsonl").write_text("{"), "serve.jsonl: not JSON lines"),
        (lambda root: (root / "bench/records" / "serve.jsonl").write_text(""), "serve.jsonl: 0 records, not one"),
        (lambda root: (root / "bench/records" / "serve.jsonl").write_text("{}"), "its records have no"),
        (lambda root: (root / "bench/records" / "zip2zip.jsonl").write_text("{}"), "published: its records have no"),
        (lambda root: edit(root, "<!-- table: speed -->", "<!-- table: heat -->"), "no table named 'heat'"),
        (lambda root: edit(root, "<!-- end -->", ""), "not every"),
        (lambda root: edit(root, "<!-- table: speed -->", ""), "not every"),
        (lambda root: edit(root, "<!-- table: speed -->", "<!--table: speed-->"), "not every"),
        (lambda root: (root / "README.md").write_text(""), "no page shows the tables price, speed"),
        (lambda root: (root / "README.md").write_bytes(b"\xff"), "README.md is not valid UTF-8"),
        *(
            (
                lambda root, text=text: (root / "bench/records" / "serve.jsonl").write_text(text),
                "serve.jsonl: not JSON lines: each must be an object",
            )
            for text in ("[]", "3", "null", '"x"')
        ),
        (lambda root: change(root, "profile-warm", samples=[]), "do not hold what they should"),
        (lambda root: change(root, "profile-warm", samples=["a"]), "do not hold what they should"),
        (lambda root: change(root, "profile-warm", samples=None), "do not hold what they should"),
        (lambda root: change(root, "profile-warm", samples=[float("nan")]), "NaN is no number"),
        (lambda root: change(root, "profile-warm", samples=[10**400]), "do not hold what they should"),
        (
            lambda root: (root / "bench/records" / "serve.jsonl").write_text("[" * 200_000),
            "serve.jsonl: not JSON lines",
        ),
    ],
)
def test_what_cannot_be_used_is_said_and_no_page_is_written(change, told, checkout, capsys):
    change(checkout)
    assert main(["--root", str(checkout)]) == 2
    assert told in capsys.readouterr().err


def change(root, name, **ratio):
    path = root / "bench/records" / f"{name}.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ratio": ratio}))


def test_a_page_keeps_its_line_ends(checkout):
    page = checkout / "README.md"
    page.write_bytes(page.read_bytes().replace(b"\n", b"\r\n"))
    assert main(["--check", "--root", str(checkout)]) == 0
    change(checkout, "profile-warm", samples=[1.5])
    path = checkout / "bench/records" / "generate-code-1024.jsonl"
    text = path.read_text()
    path.write_text(text.replace('"ttft_ms": {"unit": "ms", "median": ', '"ttft_ms": {"unit": "ms", "median": 1'))
    assert main(["--root", str(checkout)]) == 0
    data = page.read_bytes()
    assert data.count(b"\n") == data.count(b"\r\n") > 50


def test_a_page_that_cannot_be_written_is_said(checkout, capsys, monkeypatch):
    change(checkout, "profile-warm", samples=[1.5])

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("mlx_zip.bench.records.atomic_file", refuse)
    assert main(["--root", str(checkout)]) == 2
    told = capsys.readouterr().err
    assert "performance.md cannot be written: Permission denied" in told
    assert "written\n" not in told


def edit(root, old, new):
    page = root / "README.md"
    text = page.read_text()
    assert old in text
    page.write_text(new.join(text.rsplit(old, 1)))


def test_a_ratio_has_the_medians_and_the_trials_that_ran_together():
    a = {"run": "a", "figures": {"steps_per_s": {"samples": [8.0, 10.0, 20.0]}}}
    b = {"run": "a", "figures": {"steps_per_s": {"samples": [12.0, 12.0, 10.0]}}, "workload": {}}
    found = figure_ratio((a, b), "steps_per_s")
    assert found == Ratio(1.2, 0.5, 1.5, 3)
    assert found.divided_by(2) == Ratio(0.6, 0.25, 0.75, 3)


def test_trials_of_one_conversation_count_as_one_pair():
    a = {"run": "a", "figures": {"bytes_per_s": {"samples": [1.0] * 6}}}
    b = {
        "run": "a",
        "figures": {"bytes_per_s": {"samples": [1.0, 3.0, 2.0, 2.0, 2.5, 3.5]}},
        "workload": {"conversations": 3},
    }
    assert figure_ratio((a, b | {"x": 0}), "bytes_per_s") == Ratio(2.0, 2.0, 3.0, 3)


@pytest.mark.parametrize(
    ("value", "most", "told"),
    [
        (1.0, True, "met"),
        (1.01, True, "missed"),
        (1.0, False, "met"),
        (0.99, False, "missed"),
        (Ratio(0.9, 0.8, 1.0, 5), True, "met"),
        (Ratio(0.9, 0.8, 1.1, 5), True, "met; the interval reaches past it"),
        (Ratio(1.2, 0.9, 1.3, 5), False, "met; the interval reaches past it"),
        (Ratio(1.2, 1.0, 1.3, 5), False, "met"),
        (Ratio(1.1, 0.9, 1.3, 5), True, "missed"),
    ],
)
def test_a_target_is_met_at_its_bound(value, most, told):
    assert Target("speed", 1.0, lambda records: value, most=most).row(Records(Path()))[-1] == told


@pytest.fixture
def spoken(checkout):
    """The checkout with a made-up record of two conversations of three stories, cold and warm."""
    made = [
        record(engine, (0.1, 0.2), turn=turn, mode="chat", setting={"rows": rows, "trials": 1}, conversations=2)
        for rows in ("cold", "warm")
        for engine in ("mlx-lm", "mlx-zip")
        for turn in range(3)
    ]
    (checkout / RECORDS / "stories-chat.jsonl").write_text("".join(json.dumps(one) + "\n" for one in made))
    return checkout


def test_the_speed_table_has_cold_and_warm_ratios_and_bits_per_byte(spoken):
    assert main(["--root", str(spoken)]) == 0
    text = (spoken / "README.md").read_text()
    gain = "2.00 (2.00 to 2.00) x"
    row = f"| first story of a conversation | 2.00 | {gain} | {gain} | 0.760 (0.711, +6.8%) |"
    assert row in text
    assert "| third | cold | 2.00 |" in (spoken / "docs/performance.md").read_text()


def test_a_target_names_the_blas_that_was_preloaded_for_its_record():
    row = Target("speed", 1.0, lambda records: 1.0, "profile-warm").row(Records(ROOT))
    assert row[1].split(";")[0] == "libopenblas.so.0"


def test_every_target_of_the_page_is_measured(spoken):
    records = Records(spoken)
    rows = [target.row(records) for target in TARGETS]
    assert len({row[0] for row in rows}) == len(rows) == len(TARGETS)
    assert {row[-1] for row in rows} <= {"met", "met; the interval reaches past it", "missed"}


@pytest.mark.slow
def test_a_picture_is_the_same_for_the_same_figures_and_compared_only_with_its_own_matplotlib(pictured, capsys):
    pytest.importorskip("matplotlib")
    picture = pictured / PICTURE
    data = picture.read_bytes()
    picture.write_bytes(data.replace(b"<svg", b"<!-- changed --><svg", 1))
    assert main(["--check", "--root", str(pictured)]) == 1
    picture.write_bytes(re.sub(rb"Matplotlib v[\d.]+", b"Matplotlib v0.1", data))
    assert main(["--check", "--root", str(pictured)]) == 0
    assert "drawn by another version of matplotlib" in capsys.readouterr().err
    assert main(["--root", str(pictured)]) == 0
    assert picture.read_bytes() == data


def test_a_name_that_two_folders_use_for_a_record_is_an_error(checkout, capsys):
    other = checkout / "bench/papers/packs/records"
    other.mkdir(parents=True, exist_ok=True)
    shutil.copy(checkout / "bench/records/serve.jsonl", other)
    assert main(["--root", str(checkout)]) == 2
    assert "two records are named serve" in capsys.readouterr().err


def test_a_papers_records_are_found_in_its_own_folder(tmp_path):
    folder = tmp_path / "bench/papers/packs/records"
    folder.mkdir(parents=True)
    (folder / "some.jsonl").write_text('{"a": 1}\n')
    assert Records(tmp_path).only_record("some") == {"a": 1}


def test_a_flag_table_of_an_unknown_command_is_an_error(checkout, capsys):
    edit(checkout, "<!-- table: speed -->", "<!-- table: flags generat -->")
    assert main(["--root", str(checkout)]) == 2
    assert "there is no command mlx_zip generat" in capsys.readouterr().err


def test_a_folder_that_is_no_checkout_is_told_as_that(tmp_path, capsys):
    assert main(["--root", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} is no checkout of mlx_zip: it has no bench/records\n"


def test_a_record_of_two_runs_has_a_row_for_each(tmp_path):
    lines = [{"commit": "aa", "trials": 3}, {"commit": "aa", "trials": 3}, {"commit": "bb", "trials": 15}]
    (tmp_path / "bench/records").mkdir(parents=True)
    (tmp_path / "bench/records/times.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = machines_table(Records(tmp_path), ["times"]).splitlines()[2:]
    assert [[cell.strip() for cell in row.split("|")[1:6]] for row in rows] == [
        ["`times`", "-", "aa", "-", "3"],
        ["`times`", "-", "bb", "-", "15"],
    ]
