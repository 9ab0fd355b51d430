"""The benches of adapted models: their records, tables and picture hold what they promise. No timing is judged here."""

import json
import shutil

import pytest

from mlx_zip.bench import __main__ as bench
from mlx_zip.bench.papers.adaptbpe.tables import TABLES, group_adapted_models, utility_and_bits_figure
from mlx_zip.bench.records import Records
from mlx_zip.errors import MlxZipError
from support.adaptbpe_cases import ADAPTBPE
from support.places import GOLDEN_MODELS, REPO

PLAIN = GOLDEN_MODELS / "llama_transformer_untied_pos" / "base"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Flags with a text to adapt to, and one to score."""
    folder = tmp_path_factory.mktemp("texts")
    for name, size in (("train", 8000), ("test", 600)):
        text = ADAPTBPE["gpt2"][f"{name}_text"][:size]
        (folder / f"{name}.txt").write_text("\n==\n".join([text[: size // 2], text[size // 2 :]]))
    return ["--train", f"py={folder}/train.txt", "--test", f"py={folder}/test.txt", "--separator", "=="]


@pytest.fixture(scope="module")
def lines(texts):
    """The records of one share, adapted."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        words = ["adapt_model", "--model", str(PLAIN), *texts, "--shares", "0.5", "--methods", "adapt"]
        assert bench.main(words) == 0
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_model_is_scored_whole_and_adapted(lines):
    whole, cut = lines
    assert (whole["share"], whole["method"], whole["change"]) == (1, "whole list", 0)
    assert (cut["share"], cut["method"]) == (0.5, "adapt")
    assert cut["merges"] == round(whole["merges"] / 2)
    assert cut["vocab_size"] < whole["vocab_size"]
    assert cut["file_bytes"] < whole["file_bytes"]
    assert cut["tokens"] > whole["tokens"]
    assert cut["utility"] == round(1 - cut["tokens"] / cut["test"]["bytes"], 5)
    assert cut["change"] == pytest.approx(cut["bits_per_byte"] / whole["bits_per_byte"] - 1, abs=1e-4)


def test_bits_of_same_and_split_tokens_add_up(lines):
    whole, cut = lines
    before, after = (cut["where"][f"bits_per_byte_{when}"] for when in ("before", "after"))
    assert sum(before.values()) == pytest.approx(whole["bits_per_byte"], abs=1e-4)
    assert sum(after.values()) == pytest.approx(cut["bits_per_byte"], abs=1e-4)
    assert 0 < cut["where"]["tokens_before"] < cut["where"]["tokens_after"]
    assert cut["where"]["tokens_after"] - cut["where"]["tokens_before"] == cut["tokens"] - whole["tokens"]


def test_a_share_that_is_none_is_refused(capsys):
    assert bench.main(["adapt_model", "--train", "x=a.txt", "--test", "x=a.txt", "--shares", "1"]) == 2
    assert "--shares 1 is not between 0 and 1" in capsys.readouterr().err


def test_nothing_is_drawn_of_an_empty_record(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "bench/records").mkdir(parents=True)
    (tmp_path / "bench/records/adapt_model.jsonl").write_text("")
    with pytest.raises(MlxZipError, match="has no line to draw"):
        utility_and_bits_figure(Records(tmp_path))


def test_the_tables_hold_every_line_of_the_record(lines, tmp_path):
    folder = tmp_path / "bench/records"
    folder.mkdir(parents=True)
    for name in ("adaptbpe", "adaptbpe-wide"):
        shutil.copy(Records(REPO).files[name], folder)
    (folder / "adapt_model.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = {name: of(Records(tmp_path)) for name, of in TABLES.items()}
    assert f"{lines[1]['bits_per_byte']:.3f} ({lines[1]['change']:+.1%})" in made["adapt-bits"]
    assert list(group_adapted_models(lines)) == [("py", lines[0]["file_bytes"])]
