"""`vocab pack tune`, and models that run with a pack tuned for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.utils import save_config, save_model

from mlx_zip import ConfigError, DataError, ModelError, load
from mlx_zip.engine.mlx.generate import generate
from mlx_zip.packs.pack import load_pack
from mlx_zip.packs.tuned import TunedRows
from support import tiny_text
from support.prepared import tokenizer_folder
from support.tiny import tiny_config

ZIP_MODEL = "llama_transformer_tied_lora"


TEXT = "the cat sat on the mat. the dog sat on the cat.\n"


@pytest.fixture(autouse=True)
def in_home(home, monkeypatch):
    """Runs every test in its own home folder."""
    monkeypatch.chdir(home)


def plain_folder(folder, seed=0):
    """A plain llama with the tests' tokenizer."""
    shutil.copytree(tokenizer_folder(), folder)
    tokens = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    config = {**tiny_config(), "model_type": "llama", "vocab_size": tokens + 3, "tie_word_embeddings": bool(seed)}
    del config["zip2zip"]
    mx.random.seed(seed)
    save_model(folder, llama.Model(llama.ModelArgs.from_dict(config)))
    save_config(config, folder / "config.json")
    return folder


def learned(run, model, *flags):
    text = Path("text.txt")
    text.write_text("<end>\n".join(TEXT + f"{'on and on ' * (i % 4)}\n" for i in range(60)))
    data = ("--data", text, "--separator", "<end>")
    assert run("vocab", "pack", "learn", *data, "--out", "a.npz", *flags)[0] == 0
    return (
        "vocab",
        "pack",
        "tune",
        "a.npz",
        "--model",
        model,
        *data,
        "--out",
        "tuned.npz",
        "--iters",
        6,
        "--batch-size",
        4,
        "--context",
        64,
        "--json",
    )


def answer(run, model, *flags):
    prompt = ("generate", "--model", model, "--prompt", TEXT[:30], "--ignore-chat-template", "--json")
    return json.loads(run(*prompt, "--max-tokens", 8, *flags)[1])


def test_a_zip2zip_model_is_run_with_a_pack_tuned_for_it_and_another_refuses_it(run):
    model = tiny_text.converted(ZIP_MODEL)
    command = learned(run, model, "--model", model, "--size", 8)
    status, out, err = run(*command, "--learning-rate", 0.02)
    assert status == 0, err
    told = json.loads(out)
    assert told["bits_per_byte"] < told["bits_per_byte_before"]
    pack = load_pack("tuned.npz")
    assert (told["fingerprint"], told["entries"]) == (pack.fingerprint, len(pack.entries))
    assert pack.about["tuned"]["bits_per_byte"] == told["bits_per_byte"]
    assert pack.about["learned_from"]
    tuned, untuned = answer(run, model, "--pack", "tuned.npz"), answer(run, model, "--pack", "a.npz")
    assert tuned["prompt_ids"] == untuned["prompt_ids"]
    assert tuned["codebook_fingerprint"] == pack.fingerprint
    found = {}
    for file in ("a.npz", "tuned.npz"):
        status, _, err = run(
            "evaluate",
            "--model",
            model,
            "--data",
            "text.txt",
            "--separator",
            "<end>",
            "--pack",
            file,
            "--out",
            "e.json",
        )
        assert status == 0, err
        found[file] = json.loads(Path("e.json").read_text())["models"][0]["text"]["bits_per_byte"]
    assert found["tuned.npz"] < found["a.npz"]
    plain_folder(Path("plain"))
    status, _, err = run("generate", "--model", "plain", "--prompt", "the", "--pack", "tuned.npz")
    assert (status, err.count("\n")) == (2, 1)
    assert "was tuned for a zip2zip model" in err


@pytest.mark.slow
def test_a_quantized_model_is_tuned_for_with_floats_and_takes_the_rows_into_its_folder(run):
    convert = ("convert", "--dtype", "bfloat16", "--encoder-bits", 8, "-q", "--q-bits", 4, "--q-group-size", 32)
    assert run(*convert, "--hf-path", tiny_text.converted(ZIP_MODEL), "--mlx-path", "small")[0] == 0
    command = learned(run, "small", "--model", "small", "--size", 8)
    told = {}
    for flags in (("--run", "exact"), ("--run", "quick", "--dequantize")):
        status, out, err = run(*command, "--learning-rate", 0.02, *flags)
        assert status == 0, err
        told[flags[1]] = json.loads(out)
    assert load_pack("tuned.npz").rows.model == load("small")[0].fingerprint
    for name, tolerance in (("bits_per_byte_before", 1e-5), ("bits_per_byte", 1e-3)):
        assert told["quick"][name] == pytest.approx(told["exact"][name], rel=tolerance)
    assert run("convert", "--hf-path", "small", "--pack", "tuned.npz", "--mlx-path", "whole")[0] == 0
    whole, small = answer(run, "whole"), answer(run, "small", "--pack", "tuned.npz")
    for name in ("text", "steps", "hypertokens", "prompt_ids", "codebook_size", "codebook_fingerprint", "rows_encoded"):
        assert whole[name] == small[name]
    assert whole["codebook_fingerprint"] == load_pack("whole/pack.npz").fingerprint == told["quick"]["fingerprint"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compressed", "base_token_end"])
def test_a_plain_model_runs_with_a_pack_tuned_for_it(run, mode):
    model = plain_folder(Path("plain"))
    command = learned(run, model, "--tokenizer", model, "--size", 8, "--merge-size", 4)
    status, out, err = run(*command, "--learning-rate", 0.02, "--position-mode", mode)
    assert status == 0, err
    assert json.loads(out)["bits_per_byte"] < json.loads(out)["bits_per_byte_before"]
    tuned, alone = answer(run, model, "--pack", "tuned.npz"), answer(run, model)
    assert tuned["prompt_ids"] < alone["prompt_ids"]
    assert "codebook_size" not in alone
    assert tuned["codebook_size"] == len(load_pack("tuned.npz").entries)
    status, out, err = run(
        "evaluate",
        "--model",
        plain_folder(Path("other"), seed=1),
        "--model",
        model,
        "--data",
        "text.txt",
        "--pack",
        "tuned.npz",
        "--out",
        "e.json",
    )
    assert status == 0, err
    kinds = [one["kind"] for one in json.loads(Path("e.json").read_text())["models"]]
    assert kinds == ["plain", "plain with a pack"]
    status, _, err = run("generate", "--model", "other", "--prompt", "the", "--pack", "tuned.npz")
    assert status == 2
    assert "tuned for another model" in err
    assert run("generate", "--model", model, "--prompt", "the", "--pack", "a.npz")[0] == 2


def test_a_plain_model_with_its_pack_is_the_same_model_where_no_entry_is_used(run):
    folder = plain_folder(Path("plain"))
    status, _, err = run(*learned(run, folder, "--tokenizer", folder, "--size", 8))
    assert status == 0, err
    model, tokenizer = load(folder, pack=load_pack("tuned.npz"))
    plain, _ = load(folder)
    assert model.is_plain
    ids = mx.array([[9, 5, 11, 4]])
    got, want = np.array(model(ids)[0]), np.array(plain(ids)[0])
    vocab = model.layout.vocab_size
    np.testing.assert_allclose(got[:, :vocab], want[:, :vocab], atol=1e-5)
    assert np.isfinite(got[:, vocab : vocab + model.layout.codebook_size]).all()
    assert generate(model, tokenizer, TEXT[:20], max_tokens=5)
    with pytest.raises(ModelError, match="no hyper-encoder"):
        model.make_cache(pack=())


def test_what_cannot_be_tuned_is_an_error_and_nothing_is_written(run):
    model = tiny_text.converted(ZIP_MODEL)
    command = learned(run, model, "--model", model, "--size", 8)
    for flags, told in (
        (("--codebook-size", 2), "2"),
        (("--context", 1), "context"),
        (("--valid-ids", 0), "--valid-ids"),
        (("--iters", 0), "iters"),
        (("--most-ids", 5), "at least 20 are needed: give more text, or name validation texts with --valid"),
        (("--position-mode", "compressed"), "plain models"),
        (("--out", "no/x.npz"), "--out no/x.npz"),
        (("--valid", "nowhere.txt"), "nowhere.txt"),
        (("--out", "a.npz"), "the same command reads"),
        (("--run", "tuned.npz"), "--run tuned.npz"),
        (("--run", "tuned.npz/run"), "choose another --run"),
        (("--run", model), "choose another --run"),
    ):
        status, _, err = run(*command, *flags)
        assert (status, err.count("\n")) == (2, 1), (flags, err)
        assert told in err
    assert not Path("tuned.npz").exists()


@pytest.mark.slow
def test_a_pack_in_the_models_folder_does_not_stand_in_anothers_way(run):
    model = tiny_text.converted(ZIP_MODEL)
    command = learned(run, model, "--model", model, "--size", 8)
    assert run(*command)[0] == 0
    assert run("convert", "--hf-path", model, "--pack", "tuned.npz", "--mlx-path", "whole")[0] == 0
    for file, new in (("tuned.npz", "small.npz"), ("a.npz", "bare.npz")):
        assert run("vocab", "pack", "merge", file, "--size", 2, "--out", new)[0] == 0
    Path("whole/pack.npz").write_bytes(b"no pack any more")
    for file in ("small.npz", "bare.npz"):
        for size in ((), ("--codebook-size", 4)):  # fewer than the folder's own pack has entries
            flags = ("--pack", file, *size)
            got, want = answer(run, "whole", *flags), answer(run, model, *flags)
            assert [got[name] for name in ("text", "steps", "prompt_ids")] == [
                want[name] for name in ("text", "steps", "prompt_ids")
            ]
    status, _, err = run(*command, "--model", "whole", "--out", "anew.npz", "--iters", 1)
    assert status == 0, err
    status, _, err = run("generate", "--model", "whole", "--prompt", "a")
    assert (status, err.count("\n")) == (2, 1)
    assert "whole/pack.npz cannot be read" in err
    assert "delete it" in err


def test_a_model_runs_with_more_or_fewer_slots_than_its_config_says():
    folder = tiny_text.converted(ZIP_MODEL)
    own = load(folder)[0]
    slots = own.config.codebook_size
    ids = mx.array([[5, 6, 7, 5, 6, 7, 5, 6]])
    want = np.array(own(ids))
    vocab, tail = own.layout.vocab_size, own.layout.tail
    for size in (slots + 9, 2):
        model = load(folder, codebook_size=size)[0]
        got = np.array(model(ids))
        assert got.shape[-1] == want.shape[-1] + size - slots
        both = vocab + min(size, slots)
        installed = np.isfinite(got[..., :both])
        np.testing.assert_allclose(got[..., :both][installed], want[..., :both][installed], atol=1e-5)
        assert np.isinf(got[..., got.shape[-1] - tail :]).all() or not tail
        assert np.isfinite(got[0, -1, vocab:]).sum() == min(size, np.isfinite(want[0, -1, vocab:]).sum())
    with pytest.raises(ConfigError, match=r"--codebook-size\) must be from 0 to 1048576, got -1"):
        load(folder, codebook_size=-1)


def test_the_number_of_slots_is_chosen_per_run_and_told(run):
    model = tiny_text.converted(ZIP_MODEL)
    learned(run, model, "--model", model, "--size", 8)
    entries = len(load_pack("a.npz").entries)
    told = answer(run, model, "--pack", "a.npz", "--codebook-size", entries)
    assert told["codebook_size"] == entries
    assert answer(run, model)["codebook_size"] == load(model)[0].config.codebook_size
    status, _, err = run("generate", "--model", model, "--prompt", "a", "--pack", "a.npz", "--codebook-size", 1)
    assert (status, err.count("\n")) == (2, 1)
    assert "--codebook-size" in err
    status, _, err = run("generate", "--model", plain_folder(Path("plain")), "--prompt", "a", "--codebook-size", 5)
    assert status == 2
    assert "plain model" in err


def test_rows_of_float64_are_no_rows_of_a_pack():
    with pytest.raises(DataError, match="float16 or float32"):
        TunedRows(np.zeros((5, 2)), np.zeros((5, 2)), "")
