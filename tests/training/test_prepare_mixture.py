"""Mixtures keep their shares of base ids, and the command prepares them."""

import numpy as np
import pytest

from mlx_zip import cli
from mlx_zip.errors import DataError
from mlx_zip.text.sources import Source
from mlx_zip.training.prepare.mixture import choose_next_sources, count_kept_samples, load_mixture
from mlx_zip.training.prepare.shards import PreparedShards
from support.prepared import expanded, prepared, stories, texts, tokenizer_folder, tree


@pytest.fixture
def mixture(tmp_path):
    """Two parts of cats, one of dogs, in files next to the mixture."""
    texts(tmp_path / "cats.jsonl", stories(60))
    texts(tmp_path / "dogs.jsonl", [text.replace("cat", "cow") for text in stories(60)])
    path = tmp_path / "mix.yaml"
    path.write_text("sources:\n- {data: cats.jsonl, share: 2}\n- {data: [dogs.jsonl], share: 1}\n")
    return path


def test_shares_hold_to_within_a_sample(tmp_path, mixture):
    shards = prepared(tmp_path / "out", sources=load_mixture(mixture), shard_samples=4)
    cats, dogs = shards.index["sources"]
    assert cats["base_ids"] > 3000
    assert abs(cats["base_ids"] - 2 * dogs["base_ids"]) <= 3 * 32
    assert cats["share"] == cats["base_ids"] / shards.index["totals"]["base_ids"]


def test_shares_hold_under_a_limit_too(tmp_path, mixture):
    shards = prepared(tmp_path / "out", sources=load_mixture(mixture), shard_samples=2, limit=30)
    cats, dogs = (source["base_ids"] for source in shards.index["sources"])
    assert 29 <= len(shards) <= 30
    assert abs(cats - 2 * dogs) <= 3 * 32


def test_a_limit_that_the_shares_cannot_meet_to_the_sample_ends_the_reading_all_the_same(tmp_path):
    same = [texts(tmp_path / f"{name}.jsonl", ["the cat sat on the mat."] * 60) for name in "ab"]
    sources = tuple(Source((name,)) for name in same)  # samples come in pairs, so that three cannot be kept
    shards = prepared(tmp_path / "out", sources=sources, fill_windows=False, shard_samples=1, limit=3)
    assert len(shards) == 2
    assert shards.index["records"] < 40


@pytest.mark.slow
def test_a_mixture_does_not_depend_on_the_number_of_workers(tmp_path, mixture):
    for workers in (1, 2):
        prepared(tmp_path / str(workers), sources=load_mixture(mixture), shard_samples=2, workers=workers)
    assert tree(tmp_path / "1") == tree(tmp_path / "2")


def test_the_source_most_behind_its_share_is_read_next():
    assert choose_next_sources([2, 1], [[], [5]], 3) == [0]
    assert choose_next_sources([2, 1], [[10], [10]], 4) == [0, 0, 1, 0]
    assert choose_next_sources([1], [[10]], 3) == [0, 0, 0]


def test_what_is_kept_is_the_most_that_the_shares_allow():
    tens, threes = np.full(10, 10), np.full(10, 3)
    assert count_kept_samples([1.0], [tens], None) == [10]
    assert count_kept_samples([1.0, 1.0], [tens, threes], None) == [3, 10]
    assert count_kept_samples([1.0], [tens], 4) == [4]
    assert count_kept_samples([1.0, 1.0], [tens, np.empty(0, np.int64)], None) == [0, 0]


def test_a_source_that_gives_nothing_is_named(tmp_path, mixture):
    (tmp_path / "dogs.jsonl").write_text("")
    with pytest.raises(DataError, match=r"dogs.jsonl gives no sample"):
        prepared(tmp_path / "out", sources=load_mixture(mixture))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a", "must hold a list called sources"),
        ("sources: []", "must hold a list called sources"),
        ("sources: [a]", "source 1: it is not a map"),
        ("sources: [{data: a.txt}]", "source 1: it needs data and share"),
        ("sources: [{data: a.txt, share: 1}, {data: b.txt, share: none}]", "source 2: b.txt: share must be a number"),
        ("sources: [{data: a.txt, share: 1, color: red}]", "source 1: color is none of"),
        ("sources: [{data: [1], share: 1}]", "data must be a name or a list of names"),
        ("sources: [{data: a.txt, share: 1, columns: text}]", "columns must be a map"),
        ("sources: {", "cannot be read"),
    ],
)
def test_a_mixture_file_with_a_fault_names_the_source_and_the_fault(tmp_path, text, words):
    (tmp_path / "mix.yaml").write_text(text)
    with pytest.raises(DataError, match=words):
        load_mixture(tmp_path / "mix.yaml")


def test_a_mixture_that_is_not_there_is_answered_with_the_ready_ones():
    with pytest.raises(DataError, match="one of zip2zip"):
        load_mixture("nothing")


def test_the_papers_mixture_is_ready():
    sources = load_mixture("zip2zip")
    assert [s.data[0].split("/")[1] for s in sources] == [
        "fineweb-edu",
        "the-stack-llm-annotations-v2",
        "NuminaMath-1.5",
        "ultrachat_200k",
        "fineweb-2",
    ]
    assert [s.share for s in sources] == [20, 25, 20, 20, 15]
    assert len(sources[-1].subsets) == 9


# ---- the command


def run(*flags):
    return cli.main(["prepare", *map(str, flags)])


def test_the_command_prepares_and_says_what_it_did(tmp_path, capsys):
    data = texts(tmp_path / "d.jsonl", [*stories(20), " "])
    status = run(
        "--tokenizer",
        tokenizer_folder(),
        "--data",
        data,
        "--out",
        tmp_path / "out",
        "--workers",
        1,
        "--context",
        64,
        "--codebook-size",
        64,
        "--protect",
        "digits",
        "--protect",
        "5,6",
    )
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")  # no bar where there is no terminal
    shards = PreparedShards(tmp_path / "out")
    assert f"{len(shards)} samples in 1 shard:" in out
    assert "21 records: 16 longer than the context, 1 empty, 0 unlearnable windows, 0 wrong" in out
    assert expanded(shards) == expanded(prepared(tmp_path / "same", data, context=64))


@pytest.mark.parametrize(("cores", "workers"), [(3, 3), (100, 8), (None, 1)])
def test_without_a_flag_the_command_has_a_worker_per_core_and_not_too_many(cores, workers, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("mlx_zip.cli.preparation.os.cpu_count", lambda: cores)
    monkeypatch.setattr(
        "mlx_zip.training.prepare.preparation.prepare_data", lambda options, count, **other: given.append(count)
    )
    monkeypatch.setattr("mlx_zip.cli.preparation.format_prepared_summary", lambda *result: "")
    assert run("--tokenizer", "t", "--data", tmp_path / "d.jsonl", "--out", tmp_path / "out") == 0
    assert given == [workers]


def test_the_command_takes_a_mixture(tmp_path, mixture, capsys):
    assert run("--tokenizer", tokenizer_folder(), "--mixture", mixture, "--out", tmp_path / "out", "--workers", 1) == 0
    assert "cats.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "a.txt"], "a.txt: no such file"),
        ([], "name either --data or --mixture"),
        (["--data", "a.txt", "--mixture", "m.yaml"], "name either --data or --mixture"),
        (["--mixture", "m.yaml", "--split", "dev"], "--split cannot go with --mixture"),
        (
            ["--data", "b.txt", "--subset", "x", "--split", "dev"],
            "--subset, --split: of data sets only, and --data b.txt",
        ),
        (["--data", "a.txt", "--columns", "text"], "--columns 'text' is not of the form"),
        (["--data", "a.txt", "--columns", "body=text"], "columns: body is none of"),
        (["--data", "a.txt", "--disable", "x"], "--disable 'x'"),
        (["--data", "a.txt", "--context", "0"], "context must be"),
    ],
)
def test_bad_flags_are_one_line_and_status_2(tmp_path, capsys, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.txt").write_text("the cat.")
    assert run("--tokenizer", tokenizer_folder(), "--out", "out", *flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


def test_wrong_lines_are_reported_on_stderr(tmp_path, capsys):
    (tmp_path / "d.jsonl").write_text('{"text": "the cat."}\n{oops\n')
    assert (
        run("--tokenizer", tokenizer_folder(), "--data", tmp_path / "d.jsonl", "--out", tmp_path / "o", "--workers", 1)
        == 0
    )
    assert f"skipped {tmp_path / 'd.jsonl'}:2: not valid JSON" in capsys.readouterr().err
