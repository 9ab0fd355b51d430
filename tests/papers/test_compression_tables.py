"""The tables of the compression report are made of recorded lines and of the paper's numbers."""

from __future__ import annotations

import copy

import pytest

from mlx_zip.bench.papers.zip2zip.compression_tables import (
    DOMAINS,
    LATENCY,
    SHARES,
    TABLE_2,
    TABLES,
    RecordedCounts,
    bytes_per_token_table,
    merge_sizes_table,
    paper_only_table,
    texts_table,
)
from mlx_zip.bench.records import Records, column_table
from mlx_zip.bench.tokens import COLUMNS
from mlx_zip.errors import MlxZipError
from support.places import REPO


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


def test_the_shares_of_the_domains_are_a_whole():
    assert list(SHARES) == ["code", "math", "chat", "multilingual", "web"]
    assert sum(SHARES.values()) == pytest.approx(1)


# ---- the tables


def test_every_table_is_made_of_the_kept_records_and_every_counted_tokenizer_has_one():
    records = Records(REPO)
    made = {name: make(records) for name, make in TABLES.items()}
    assert {f"tokens-{name}" for name in RecordedCounts(records.lines("tokens")).tokenizers} <= made.keys()
    assert all(len(text.splitlines()) > 2 for text in made.values())


def test_a_gain_stands_next_to_the_papers():
    told = bytes_per_token_table(RecordedCounts([counted()]), "llama3")
    assert "| code/some | 4.00 | 6.15 (+53.8%) | 6.15 (+53.8%) | 5.97 (+49.3%) | 4.1 | 6.3 (+54%) |" in told


def test_a_tokenizer_that_the_paper_has_not_stands_alone():
    counts = RecordedCounts([counted("gpt2", "stories")])
    assert "| stories | 4.00 | 6.15 (+53.8%) | 6.15 (+53.8%) | 5.97 (+49.3%) |" in bytes_per_token_table(counts, "gpt2")
    assert "Llama-3-128K" in paper_only_table(counts)


def test_a_texts_files_and_checks_are_shown():
    assert "| code/some | a.txt | 2 | 4,000 | zip2zip_compression 0.3.4 |" in texts_table(RecordedCounts([counted()]))


def test_rates_are_weighed_as_the_papers_text_is():
    rates = dict(zip(DOMAINS, (0.6, 0.7, 0.8, 0.9, 0.75), strict=True))
    lines = [counted("llama2", f"{domain}/some", rate) for domain, rate in rates.items()]
    assert RecordedCounts(lines).mean_rate_of_mixture("llama2", 2048, 3) == pytest.approx(
        sum(SHARES[d] * rates[d] for d in DOMAINS)
    )
    assert "| 3 | 60.00 | 70.00 | 80.00 | 90.00 | 75.00 | 73.50 | 71.21 |" in merge_sizes_table(RecordedCounts(lines))
    assert RecordedCounts(lines[1:]).mean_rate_of_mixture("llama2", 2048, 3) is None


def test_texts_of_a_domain_count_alike_in_the_mixture():
    lines = [counted("llama2", f"{domain}/some", 0.7) for domain in DOMAINS] + [counted("llama2", "code/other", 0.5)]
    assert RecordedCounts(lines).mean_rate_of_mixture("llama2", 2048, 3) == pytest.approx(0.25 * 0.6 + 0.75 * 0.7)


def test_a_codebook_that_no_window_fills_stands_for_larger_ones():
    counts = RecordedCounts([counted()])
    assert counts.rate("llama3", "code/some", 1024, size=2048) == counts.rate("llama3", "code/some", 1024, size=1024)
    assert counts.rate("llama3", "code/some", 1024, size=1024) == 0.65
    assert counts.rate("llama3", "code/some", 2048, size=1024) is None
    assert counts.rate("llama3", "code/some", 1024, size=512) is None


def test_latencies_are_shown_with_what_the_codecs_add():
    told = column_table([timed(), timed(10_000, theirs=False)], LATENCY)
    assert "| 1,000 | 1.00 (0.99 to 1.01) | 1.01 (1.00 to 1.02) | 1.50 (1.49 to 1.51) | +1.0% | +50.0% | 0.5 |" in told
    assert "| mini | tokenizers | 10,000 | 1.00 (0.99 to 1.01) | 1.01 (1.00 to 1.02) | - | +1.0% | - | 0.5 |" in told


# ---- records that cannot be used


def test_what_was_measured_twice_is_refused():
    with pytest.raises(MlxZipError, match="llama3 on code/some was measured twice"):
        RecordedCounts([counted(), counted()])


def test_texts_that_differ_between_tokenizers_do_not_compare():
    other = copy.deepcopy(counted("qwen"))
    other["text"]["sha256"] = "other"
    with pytest.raises(MlxZipError, match="code/some is not the same text"):
        RecordedCounts([counted(), other])


def test_lines_with_disabled_ids_are_left_out_of_the_tables():
    assert RecordedCounts([{**counted(), "disabled": "digits"}]).tokenizers == []
