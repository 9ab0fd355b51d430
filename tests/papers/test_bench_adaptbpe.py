"""The AdaptBPE bench: its records hold what they promise (no timing is judged here)."""

import json

import pytest

from mlx_zip.bench import __main__ as bench
from support.adaptbpe_cases import ADAPTBPE, GPT2, HEAD, needs_gpt2


@pytest.fixture
def lines(tmp_path, capsys):
    """Runs the bench on two halves of a golden text -> its records."""

    def command(base, *flags):
        for name in ("train", "test"):
            (tmp_path / f"{name}.txt").write_text(ADAPTBPE["gpt2"][f"{name}_text"])
        texts = ["--train", f"py={tmp_path}/train.txt", "--test", f"py={tmp_path}/test.txt"]
        assert bench.main(["adaptbpe", "--tokenizer", str(base), *texts, "--trials", "2", *flags]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return command


def test_every_method_rule_and_the_library_are_measured(lines, tmp_path):
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(HEAD["merges"]) + "\n")
    first, second, encoding = lines(tmp_path / "vocab.bpe", "--merges", "300", "600")
    for line, n in ((first, 300), (second, 600)):
        assert (line["what"], line["merges"], line["test_bytes"]) == ("utility", n, 15000)
        assert line["utility"].keys() == {"first_k", "top_k", "replay", "final", "whole_list"}
        assert line["utility"]["first_k"] < line["utility"]["replay"] < line["utility"]["whole_list"]
    for name in ("tokenizers", "whole_list", "whole_list_fresh", "adapted", "adapted_fresh"):
        assert encoding[name]["min"] > 0


@needs_gpt2
def test_utility_is_that_of_the_golden_counts(lines):
    row = next(row for row in ADAPTBPE["gpt2"]["rows"] if (row["N"], row["tie"]) == (500, "high"))
    utility = lines(GPT2, "--merges", "500")[0]["utility"]
    names = {
        "first_k": "first_k",
        "top_k": "top_k",
        "replay": "adapt_replay",
        "final": "adapt_final_rule",
        "whole_list": "full_vocabulary",
    }
    assert utility == {name: round(1 - row["test"][key] / row["test"]["bytes"], 4) for name, key in names.items()}


def test_texts_of_different_names_are_refused(tmp_path, capsys):
    (tmp_path / "vocab.bpe").write_text("a b\n")
    (tmp_path / "a.txt").write_text("ab")
    flags = ["--tokenizer", f"{tmp_path}/vocab.bpe", "--train", f"x={tmp_path}/a.txt", "--test", f"y={tmp_path}/a.txt"]
    assert bench.main(["adaptbpe", *flags]) == 2
    assert "name different texts: x, y" in capsys.readouterr().err
