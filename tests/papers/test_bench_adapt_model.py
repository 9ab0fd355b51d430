"""The benches of adapted models: their records, tables and picture hold what they promise. No timing is judged here."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip.bench import __main__ as bench
from mlx_zip.bench.engines.model_making import make_model_with_kept_rows, models_from_folders
from mlx_zip.bench.papers.adaptbpe.tables import TABLES, group_adapted_models, utility_and_bits_figure
from mlx_zip.bench.records import Records
from mlx_zip.errors import MlxZipError
from support import tiny_bench
from support.adaptbpe_cases import ADAPTBPE
from support.adapting import logits_of, quantized
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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["adapt_model"], "--train is missing"),
        (["adapt_model", "--train", "x=a.txt", "--shares", "1"], "--shares 1 is not between 0 and 1"),
        (["adapt_step"], "name a model with --model or a shape with --shape"),
        (["adapt_step", "--model", "a", "--shape", "small-125m"], "one of them"),
        (["adapt_step", "--model", "a", "--tokens", "3"], "--tokens must be at least 4"),
        (["adapt_step", "--model", "a", "--keep", "0"], "--keep 0 is not a share"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, told, capsys):
    assert bench.main(words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["float32", "4"])
def test_a_step_is_timed_whole_and_cut(monkeypatch, capsys, precision):
    tiny_bench.small(monkeypatch)
    monkeypatch.setitem(tiny_bench.SHAPE, "hidden_size", 64)
    monkeypatch.setitem(tiny_bench.SHAPE, "intermediate_size", 64)
    words = ["--tokens", "4", "--trials", "2", "--precisions", precision]
    assert tiny_bench.run("adapt_step", "--shape", "tiny", *words) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["vocab_size"], line["kept"]) == (4160, 2080)
    per_row = 64 * 4 if precision == "float32" else 64 // 2 + 8  # 4 bit: and a scale and a bias of 4 bytes
    assert line["bytes"]["removed"] == 2080 * per_row
    assert line["bound"] == round(line["bytes"]["removed"] / line["bytes"]["read_per_step"], 4)
    for clock in ("wall_ms", "processor_ms"):
        assert all(len(line[clock][name]["samples"]) == 2 for name in ("whole", "cut"))
        gain = 1 - line["ratio"][clock]["median"]
        assert line["of_bound"][clock] == pytest.approx(gain / line["bound"], abs=0.01)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_sliced_model_has_the_full_ones_logits_bit_for_bit(tmp_path, bits):
    folder = quantized(PLAIN, tmp_path / "quantized") if bits else PLAIN
    models, kept = models_from_folders(None, str(folder)), np.arange(0, 512, 3, dtype=np.uint32)
    whole, cut = models.plain(), make_model_with_kept_rows(models, kept)()
    ids = np.arange(20)
    np.testing.assert_array_equal(logits_of(cut, ids), logits_of(whole, kept[ids])[:, kept])
    assert mx.array_equal(cut.lm_head.weight, whole.lm_head.weight[mx.array(kept)]).item()


def test_nothing_is_drawn_of_an_empty_record(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "bench/records").mkdir(parents=True)
    (tmp_path / "bench/records/adapt_model.jsonl").write_text("")
    with pytest.raises(MlxZipError, match="has no line to draw"):
        utility_and_bits_figure(Records(tmp_path))


def test_the_tables_hold_every_line_of_the_record(lines, tmp_path):
    folder = tmp_path / "bench/records"
    folder.mkdir(parents=True)
    for name in ("adaptbpe", "adaptbpe-wide", "adapt_step"):
        shutil.copy(Records(REPO).files[name], folder)
    (folder / "adapt_model.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = {name: of(Records(tmp_path)) for name, of in TABLES.items()}
    assert f"{lines[1]['bits_per_byte']:.3f} ({lines[1]['change']:+.1%})" in made["adapt-bits"]
    assert f"{lines[1]['utility']:.4f}" in made["adapt-saved"]
    assert len(made["adapt-steps"].splitlines()) == 2 + len((folder / "adapt_step.jsonl").read_text().splitlines())
    assert list(group_adapted_models(lines)) == [("py", lines[0]["file_bytes"])]
