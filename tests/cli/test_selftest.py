"""`mlx_zip selftest`, on this machine."""

import re

import pytest

from mlx_zip import selftest
from mlx_zip.cli import main

FAILED = selftest.Check("codec", False, "3 of 4 equal")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    file = tmp_path_factory.mktemp("selftest") / "report.md"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "TRIALS", 1)  # speed is not what these tests are about
        assert main(["selftest", "--out", str(file)]) == 0
    return file.read_text()


def test_the_report_says_that_all_checks_passed(page):
    assert page.startswith("# mlx_zip selftest\n\nAll checks passed.\n")


@pytest.mark.parametrize("check", ["codec: encode cases", "llama_transformer_tied_lora: logits", "step, plain"])
def test_the_report_has_a_line_for_each_check(page, check):
    assert check in page


def test_the_report_names_versions(page):
    assert re.search(r"versions: mlx \d+\.\d+.*mlx-lm \d+", page)


def test_the_report_fits_on_a_page(page):
    assert len(page.splitlines()) < 50


def only(monkeypatch, *checks):
    """Replaces the real checks."""
    monkeypatch.setattr(selftest, "check_codec", lambda golden: list(checks))
    monkeypatch.setattr(selftest, "check_models", lambda golden, folder: [])
    monkeypatch.setattr(selftest, "measure", lambda golden, folder: [])


def test_a_failed_check_is_in_the_report_with_its_figure():
    assert "| FAILED | codec | 3 of 4 equal |" in selftest.report([FAILED])


def test_the_report_says_first_that_a_check_failed():
    assert selftest.report([FAILED]).startswith("# mlx_zip selftest\n\n**1 checks failed.**\n")


def test_a_failed_check_gives_exit_status_1(monkeypatch, tmp_path):
    only(monkeypatch, FAILED)
    assert main(["selftest", "--out", str(tmp_path / "report.md")]) == 1


def test_an_error_in_a_check_is_a_failure_with_its_message():
    def broken():
        raise RuntimeError("no device\nfound")

    assert selftest.attempt("a", broken) == selftest.Check("a", False, "RuntimeError: no device found")


def test_not_a_number_is_worse_than_any_tolerance():
    assert not selftest._worse(0.0, float("nan")) <= 1.0


def test_a_wrong_recorded_case_is_named():
    case = {"name": "odd", "ok": False}
    assert selftest._count(lambda case: case["ok"], [case]) == (False, "0 of 1 equal; not: odd")


def test_a_report_that_cannot_be_written_is_an_error(monkeypatch, tmp_path):
    only(monkeypatch)
    assert main(["selftest", "--out", str(tmp_path / "no" / "report.md")]) == 2


def test_a_report_that_cannot_be_written_is_refused_before_the_checks(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(selftest, "check_codec", None)
    assert main(["selftest", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: --out {tmp_path}: is a folder or device, not a file\n"


def test_the_old_name_of_out_still_works(monkeypatch, tmp_path):
    only(monkeypatch)
    assert main(["selftest", "--output", str(tmp_path / "report.md")]) == 0
    assert (tmp_path / "report.md").is_file()
