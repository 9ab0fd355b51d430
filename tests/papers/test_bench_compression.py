"""docs/compression.md is made of the recorded lines and of the paper's numbers, and says where the two differ."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from mlx_zip.bench.flops import TABLE_9, TRAINED, record
from mlx_zip.bench.papers.zip2zip.compression_page import PICTURE, page, write_page
from mlx_zip.bench.papers.zip2zip.compression_results import DOMAINS, RECORDS, SHARES, TABLE_2, Counts, read_lines
from mlx_zip.bench.tokens import COLUMNS
from mlx_zip.errors import MlxZipError
from support.places import DOCS

FLOPS = [record(shape, 0.5, 2.0) for shape in (*TABLE_9, *TRAINED)]


def counted(tokenizer: str = "llama3", text: str = "code/some", rate: float = 0.65) -> dict:
    """A line whose rate falls with M and whose larger window has no room left in its codebook."""
    rows = [
        [window, m, size, round(1000 * (rate + (3 - m) / 100 + (0.02 if window == "document" else 0))), 90, 30]
        for window, m, size in [(1024, 3, 1024), *((2048, m, 2048) for m in (2, 3, 4, 5)), ("document", 3, 2048)]
    ]
    return {
        "bench": "tokens",
        "domain": text,
        "tokenizer": {"name": tokenizer, "size": 300, "library": "none"},
        "text": {"files": ["a.txt"], "documents": 2, "bytes": 4000, "cut_by_limit": False, "sha256": text},
        "disabled": "none",
        "base_ids": 1000,
        "bytes_per_base_id": 4.0,
        "columns": COLUMNS,
        "counts": rows,
        "checked_against": "zip2zip_compression 0.3.4",
    }


def timed(n_bytes: int = 1000, theirs: bool = True) -> dict:
    times = lambda us: {"median": us, "min": us - 10, "max": us + 10, "samples": [us - 10, us, us + 10]}
    return {
        "bench": "codec",
        "what": "figure4",
        "bytes": n_bytes,
        "base_ids": 250,
        "ids": 200,
        "data": "a.txt; mini",
        "setting": {"library": "tokenizers"},
        "tokenizer": times(1000.0),
        "with_ours": times(1010.0),
        "with_upstream": times(1500.0) if theirs else None,
        "machine": "some machine",
        "load_average": 0.5,
    }


# ---- the paper's numbers


def test_the_papers_percentages_are_quotients_of_its_numbers():
    printed = [(54, 48, 25, 24, 17), (55, 61, 25, 24, 18), (54, 52, 24, 20, 15), (70, 61, 28, 23, 20)]
    assert [tuple(round(100 * row.gain(domain)) for domain in DOMAINS) for row in TABLE_2] == printed


def test_one_decimal_leaves_a_gain_open_by_some_points():
    low, high = TABLE_2[0].bounds("code")
    assert (round(low, 4), round(high, 4)) == (round(6.25 / 4.15 - 1, 4), round(6.35 / 4.05 - 1, 4))
    assert low < TABLE_2[0].gain("code") < high


def test_the_shares_of_the_domains_are_a_whole():
    assert list(SHARES) == ["code", "math", "chat", "multilingual", "web"]
    assert sum(SHARES.values()) == pytest.approx(1)


# ---- the page


def test_the_repositorys_page_is_written_from_its_recorded_lines():
    lines = [line for path in RECORDS for line in read_lines(path)]
    assert (DOCS / "compression.md").read_text() == page(lines, picture=(DOCS / PICTURE).exists())


def test_a_gain_stands_beside_the_papers_and_is_held_against_it():
    text = page([counted(), *FLOPS], picture=False)
    assert "### llama3: 300 base ids (Llama-3-128K in the paper)" in text
    assert "| code/some | 4.00 | 6.15 (+53.8%) | 6.15 (+53.8%) | 5.97 (+49.3%) | 4.1 | 6.3 (+54%) |" in text
    within = "- llama3 on code/some: within 3 points of it: windows of 1,024 (+53.8%), windows of 2,048 (+53.8%)."
    assert within in text


def test_a_text_whose_gain_is_another_is_said_to_be_so():
    text = page([counted(rate=0.8), *FLOPS], picture=False)
    assert "within 3 points of it: none; windows of 1,024 come nearest, -28.7 points." in text


def test_texts_of_code_are_held_against_the_paper_together_too():
    text = page([counted(rate=0.60), counted(text="code/other", rate=0.70), *FLOPS], picture=False)
    alike = "- llama3 on all of them, each counting alike: within 3 points of it: windows of 1,024 (+53.8%), "
    assert alike in text
    assert "- llama3 on code/other: within 3 points of it: none;" in text


def test_a_tokenizer_that_the_paper_has_not_stands_alone():
    text = page([counted("gpt2", "stories"), *FLOPS], picture=False)
    assert "### gpt2: 300 base ids\n" in text
    assert "| stories | 4.00 | 6.15 (+53.8%) | 6.15 (+53.8%) | 5.97 (+49.3%) |\n" in text
    assert "The paper's gains for code" not in text


def test_rates_are_weighed_as_the_papers_text_is():
    rates = dict(zip(DOMAINS, (0.6, 0.7, 0.8, 0.9, 0.75), strict=True))
    lines = [counted("llama2", f"{domain}/some", rate) for domain, rate in rates.items()]
    assert Counts(lines).mixed("llama2", 2048, "ids") == pytest.approx(sum(SHARES[d] * rates[d] for d in DOMAINS))
    assert "| 3 | 60.00 | 70.00 | 80.00 | 90.00 | 75.00 | 73.50 | 71.21 |" in page([*lines, *FLOPS], picture=False)
    assert Counts(lines[1:]).mixed("llama2", 2048, "ids") is None


def test_texts_of_a_domain_count_alike_in_the_mixture():
    lines = [counted("llama2", f"{domain}/some", 0.7) for domain in DOMAINS] + [counted("llama2", "code/other", 0.5)]
    assert Counts(lines).mixed("llama2", 2048, "ids") == pytest.approx(0.25 * 0.6 + 0.75 * 0.7)


def test_a_codebook_that_no_window_fills_stands_for_larger_ones():
    counts = Counts([counted()])
    assert counts.row("llama3", "code/some", 1024, size=2048) == counts.row("llama3", "code/some", 1024, size=1024)
    assert counts.row("llama3", "code/some", 2048, size=1024) is None
    assert counts.row("llama3", "code/some", 1024, size=512) is None


def test_latencies_are_shown_with_what_the_codecs_add():
    text = page([timed(), timed(10_000, theirs=False), *FLOPS], picture=True)
    assert "| 1,000 | 1.00 (0.99 to 1.01) | 1.01 (1.00 to 1.02) | 1.50 (1.49 to 1.51) | +1.0% | +50.0% |" in text
    assert "| mini | tokenizers | 10,000 | 1.00 (0.99 to 1.01) | 1.01 (1.00 to 1.02) | - | +1.0% | - |" in text
    assert f"]({PICTURE})" in text


def test_table_9_is_shown_with_the_papers_numbers():
    assert "| LLM-4B | 14 | 2 | 1 | 0.1429 | 0.14 | 0.571 | 2.00 | 0.2857 | 0.643 |" in page(FLOPS, picture=False)


# ---- records that cannot be used


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_the_page_is_written_from_the_records_that_are_named(tmp_path):
    lines = [counted(), *FLOPS]
    files = write(tmp_path / "a.jsonl", lines[0]), write(tmp_path / "b.jsonl", *lines[1:])
    write_page(tmp_path / "page.md", files)
    assert (tmp_path / "page.md").read_text() == page(lines, picture=False)


@pytest.mark.parametrize("line", ["{", "[]", "{}", {"bench": "tokens"}, {**timed(), "what": "compress"}])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = write(tmp_path / "a.jsonl", counted(), line)
    (tmp_path / "page.md").write_text("as it was")
    with pytest.raises(MlxZipError, match=r"a\.jsonl, line 2: "):
        write_page(tmp_path / "page.md", [path])
    assert (tmp_path / "page.md").read_text() == "as it was"


def test_a_file_of_records_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MlxZipError, match=r"none\.jsonl cannot be read"):
        write_page(tmp_path / "page.md", [tmp_path / "none.jsonl"])


def test_what_was_measured_twice_is_refused():
    with pytest.raises(MlxZipError, match="llama3 on code/some was measured twice"):
        Counts([counted(), counted()])


def test_texts_that_differ_between_tokenizers_do_not_compare():
    other = copy.deepcopy(counted("qwen"))
    other["text"]["sha256"] = "other"
    with pytest.raises(MlxZipError, match="code/some is not the same text"):
        Counts([counted(), other])


def test_lines_with_disabled_ids_are_left_out_of_the_tables():
    assert Counts([{**counted(), "disabled": "digits"}]).tokenizers == []
