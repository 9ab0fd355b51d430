"""`bench pack_quality`: its lines compared with `measure_bits`, and the picture of a record."""

import json

import numpy as np
import pytest

from mlx_zip.engine.mlx.generate import load
from mlx_zip.errors import CodecError, DataError, MlxZipError
from mlx_zip.evaluation.bits import cut_scored_windows, measure_bits
from mlx_zip.packs.pack import Pack, save_pack
from mlx_zip.packs.tuned import TunedRows
from mlx_zip.text.documents import read_corpus
from support import tiny_bench, tiny_text
from support.places import GOLDEN_MODELS

NAME = "llama_transformer_tied_lora"
TEXT = "the cat sat on the mat\n<end>\nthe dog sat on the cat, and the cat on the dog\n"
FIRST = 40  # an id that may merge


@pytest.fixture
def flags(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    save_pack(tmp_path / "two.npz", Pack(((FIRST, FIRST + 1), (FIRST, FIRST + 2))))
    models = {"--model": tiny_text.converted(NAME), "--base": GOLDEN_MODELS / NAME / "base"}
    text = ["--data", tmp_path / "text.txt", "--separator", "<end>"]
    return [*(word for pair in models.items() for word in pair), *text]


def test_a_line_per_start_holds_what_scoring_gives(flags, tmp_path, capsys):
    assert tiny_bench.run("pack_quality", *flags, "--pack", f"own={tmp_path / 'two.npz'}") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["curve"], line["pack"], line["entries"]) for line in lines] == [
        ("empty", None, 0),
        ("own", "two.npz", 2),
    ]
    (model, tokenizer), (base, _) = load(str(flags[1])), load(str(flags[3]))
    windows = cut_scored_windows(tokenizer, read_corpus([str(tmp_path / "text.txt")], "<end>", None).documents, 1024)
    control = measure_bits(base, windows).bits_per_byte
    empty = measure_bits(model, windows, pack=Pack(())).bits_per_byte
    for line, entries in zip(lines, ((), ((FIRST, FIRST + 1), (FIRST, FIRST + 2))), strict=True):
        bits = measure_bits(model, windows, pack=Pack(entries))
        assert line["documents"] == 2
        assert line["bits_per_byte"] == pytest.approx(bits.bits_per_byte, rel=1e-6)
        assert line["base_ids_per_id"] == bits.base_ids / bits.ids
        assert line["over_base"] == pytest.approx(bits.bits_per_byte / control - 1, abs=1e-6)
        assert line["over_empty"] == pytest.approx(bits.bits_per_byte / empty - 1, abs=1e-6)


def test_a_tuned_pack_is_measured_with_its_rows(flags, tmp_path, capsys):
    (model, tokenizer), entries = load(str(flags[1])), ((FIRST, FIRST + 1), (FIRST, FIRST + 2))
    output = np.random.default_rng(0).normal(0, 1, (2, model.config.encoder.model_size)).astype(np.float32)
    tuned = TunedRows(output if model.sides_are_one else output[::-1], output, model.fingerprint)
    save_pack(tmp_path / "tuned.npz", Pack(entries, rows=tuned))
    assert tiny_bench.run("pack_quality", *flags, "--pack", f"own={tmp_path / 'tuned.npz'}") == 0
    line = json.loads(capsys.readouterr().out.splitlines()[1])
    windows = cut_scored_windows(tokenizer, read_corpus([str(tmp_path / "text.txt")], "<end>", None).documents, 1024)
    packs = Pack(entries, rows=tuned), Pack(entries)
    found, untuned = (measure_bits(model, windows, pack=pack).bits_per_byte for pack in packs)
    assert line["bits_per_byte"] == pytest.approx(found, rel=1e-6)
    assert line["bits_per_byte"] != pytest.approx(untuned, rel=1e-3)


def test_a_base_of_another_tokenizer_is_refused(flags, capsys):
    flags[3] = GOLDEN_MODELS / "llama_transformer_untied_pos" / "base"
    with pytest.raises(MlxZipError, match="another tokenizer"):
        tiny_bench.run("pack_quality", *flags)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("entries", "mark", "error", "told"),
    [
        (((FIRST, FIRST + 1),), "0" * 64, DataError, "two.npz was learned with another tokenizer"),
        (tuple((FIRST, n) for n in range(10, 400)), None, CodecError, "do not fit in codebook_size"),
    ],
)
def test_a_pack_that_does_not_fit_is_told_before_scoring(entries, mark, error, told, flags, tmp_path, capsys):
    save_pack(tmp_path / "two.npz", Pack(entries, mark))
    with pytest.raises(error, match=told):
        tiny_bench.run("pack_quality", *flags, "--pack", f"own={tmp_path / 'two.npz'}")
    assert capsys.readouterr().out == ""


def test_a_pack_without_a_name_is_refused(flags):
    with pytest.raises(MlxZipError, match="NAME=FILE"):
        tiny_bench.run("pack_quality", *flags, "--pack", "two.npz")
