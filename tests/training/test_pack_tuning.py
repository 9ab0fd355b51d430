"""`vocab pack tune`: only the rows are trained, by the loop that trains models, and what comes of it is used."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.utils import save_config, save_model

from mlx_zip import CodecParams, ConfigError, DataError, ModelError, TrainingError, load
from mlx_zip.evaluation.scoring import Compressed, score
from mlx_zip.generate import generate
from mlx_zip.training.batches import make_batch
from mlx_zip.training.checkpoint import checkpoints
from mlx_zip.training.metrics import FILE, read_metrics
from mlx_zip.training.objective import LossWeights, Trainee
from mlx_zip.training.pack_rows import PackTrainee
from mlx_zip.training.stepping import to_device
from mlx_zip.training.texts import Texts
from mlx_zip.training.tuning import tune
from mlx_zip.vocab.packs import Pack, load_pack
from mlx_zip.vocab.tuned import TunedRows, TunedStart
from support import tiny_text
from support.crashing import crash_after
from support.prepared import tokenizer_folder
from support.same_numbers import assert_same_losses, is_exact
from support.tiny import MERGE, PAD, VOCAB, tiny_config, tiny_model
from support.tiny_training import arrays_of, losses, make_sample, settings

WORDS = ((5, 6), (6, 7, 8), (9, 10), (11, 12, 13, 14), (7, 9))
CODEC = CodecParams(VOCAB, 24, MERGE, (0, 1, PAD), PAD, WORDS)
ZIP_MODEL = "llama_transformer_tied_lora"
TEXT = "the cat sat on the mat. the dog sat on the cat.\n"


def sentence(length, seed):
    """Base ids of which many are words of the pack."""
    rng, ids = np.random.default_rng(seed), [1]
    while len(ids) < length:
        ids += WORDS[rng.integers(len(WORDS))] if rng.random() < 0.7 else [int(rng.integers(3, 20))]
    return ids[:length]


def texts(params=CODEC, samples=24, seed=0):
    return Texts(params, [make_sample(params, sentence(20 + i % 9, 1000 * seed + i)) for i in range(samples)], "texts")


def model_of(family="llama", **changes):
    """A model whose codebook is CODEC's."""
    sizes = {"initial_vocab_size": VOCAB, "max_codebook_size": 24, "max_subtokens": MERGE, "disabled_ids": [0, 1, PAD]}
    return tiny_model(family, compression=sizes, **changes)


def rows_by_encoder(model):
    base_ids = np.array([[*run, *[PAD] * (MERGE - len(run))] for run in WORDS], np.uint32)
    return model.rows(base_ids, np.array([len(run) for run in WORDS]))


def random_rows(model, seed=0):
    rng = np.random.default_rng(seed)
    output = mx.array(rng.normal(0, 0.3, (len(WORDS), 64)).astype(np.float32))
    return (output if model.sides_are_one else output[::-1], output)


def sums_of(trainee, data):
    canonical = trainee.model.config.canonical
    batch = trainee.prepare_batch(make_batch(data.samples, data.params, range(len(data)), canonical=canonical))
    return {name: float(value) for name, value in trainee.losses(to_device(batch)).items()}


# ---- what is minimised


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gemma", True)])
def test_with_the_encoders_rows_the_loss_is_that_of_training_the_model(family, tied):
    model, data = model_of(family, tie_encoders=tied), texts()
    got = sums_of(PackTrainee(model, *rows_by_encoder(model)), data)
    want = sums_of(Trainee(model, LossWeights()), data)
    assert got["count"] == want["count"] > 100
    np.testing.assert_allclose(got["nats"], want["nats"], rtol=1e-5)


@pytest.mark.parametrize("codebook_size", [24, len(WORDS)])
@pytest.mark.parametrize(("family", "tied", "canonical"), [("llama", False, False), ("gemma", True, True)])
def test_the_loss_is_what_generation_gives_the_ids_with_these_rows(family, tied, canonical, codebook_size):
    params = replace(CODEC, codebook_size=codebook_size)
    sizes = {
        "initial_vocab_size": VOCAB,
        "max_codebook_size": codebook_size,
        "max_subtokens": MERGE,
        "disabled_ids": [0, 1, PAD],
    }
    model = tiny_model(family, compression=sizes, tie_encoders=tied, canonical=canonical)
    rows, data = random_rows(model), texts(params, samples=6)
    got = sums_of(PackTrainee(model, *rows), data)
    output = np.array(rows[1])
    start = TunedStart(WORDS, TunedRows(output if tied else np.array(rows[0]), output, model.fingerprint))
    spans = [np.ones(len(sample.ids), np.int64) for sample in data.samples]
    scored = score(model, [Compressed(s.ids, n, start) for s, n in zip(data.samples, spans, strict=True)])
    np.testing.assert_allclose(got["nats"], -sum(one.logprobs.sum() for one in scored), rtol=1e-5)


def test_gradients_are_of_the_rows_alone_and_right():
    model, data = model_of(), texts(samples=4)
    trainee = PackTrainee(model, *random_rows(model))
    assert set(dict(trainee.trainable_parameters())) >= {"input_rows", "output_rows"}
    assert not trainee.trainable_parameters()["model"].get("layers")
    batch = to_device(trainee.prepare_batch(make_batch(data.samples, data.params, range(4))))

    def nats(name, rows):
        setattr(trainee, name, rows)
        return trainee.losses(batch)["nats"]

    for name in ("input_rows", "output_rows"):
        rows = getattr(trainee, name)
        slope = mx.grad(lambda rows, name=name: nats(name, rows))(rows)
        way = slope / mx.linalg.norm(slope)
        ahead, behind = (float(nats(name, rows + step * way)) for step in (2e-3, -2e-3))
        np.testing.assert_allclose((ahead - behind) / 4e-3, float((slope * way).sum()), rtol=2e-2)
        setattr(trainee, name, rows)


# ---- tuning


def run_tuning(run, model=None, pack=None, **changes):
    model = model_of() if model is None else model
    options = settings(**{"optimizer": "adam", "iters": 12, "val_batches": 0, "steps_per_eval": 100, **changes})
    return tune(pack or Pack(WORDS), model, texts(), texts(samples=8, seed=1), options, run, quiet=True)


def test_rows_become_better_and_the_model_stays(tmp_path):
    model = model_of()
    before = arrays_of(model)
    found = run_tuning(tmp_path / "run", model, iters=40)
    assert found.after < found.before - 0.05
    assert all(np.array_equal(before[name], value) for name, value in arrays_of(model).items())
    assert found.rows.model == model_of().fingerprint
    lines = losses(tmp_path / "run")
    assert lines[-1][1] < lines[0][1]


def test_a_tuning_goes_on_as_if_it_had_never_stopped_and_depends_on_its_seed_alone(tmp_path, monkeypatch):
    whole = run_tuning(tmp_path / "whole")
    with monkeypatch.context() as patched:
        crash_after(patched, 7)
        with pytest.raises(RuntimeError, match="crashed"):
            run_tuning(tmp_path / "cut")
    resumed = run_tuning(tmp_path / "cut")
    if is_exact():
        assert resumed.rows.fingerprint == whole.rows.fingerprint
    assert_same_losses([resumed.before, resumed.after], [whole.before, whole.after])
    assert_same_losses(losses(tmp_path / "cut"), losses(tmp_path / "whole"))
    assert run_tuning(tmp_path / "whole").rows.fingerprint == whole.rows.fingerprint  # it was finished
    assert run_tuning(tmp_path / "other", seed=1).rows.fingerprint != whole.rows.fingerprint


@pytest.mark.parametrize("log", ["lost", "damaged"])
def test_a_resumed_tuning_without_its_log_still_tells_what_was_before_its_first_step(log, tmp_path, monkeypatch):
    whole = run_tuning(tmp_path / "whole")
    with monkeypatch.context() as patched:
        crash_after(patched, 7)
        with pytest.raises(RuntimeError, match="crashed"):
            run_tuning(tmp_path / "cut")
    assert checkpoints(tmp_path / "cut")
    if log == "lost":
        (tmp_path / "cut" / FILE).unlink()
    else:
        (tmp_path / "cut" / FILE).write_text('{"step": 0, "val_bits_per_byte": ')
    resumed = run_tuning(tmp_path / "cut")
    assert (resumed.before, resumed.rows.fingerprint) == (whole.before, whole.rows.fingerprint)
    assert read_metrics(tmp_path / "cut")[0] == read_metrics(tmp_path / "whole")[0]


def test_windows_longer_than_the_models_context_are_refused(tmp_path):
    model = model_of()
    model.args.config["max_position_embeddings"] = 24
    with pytest.raises(TrainingError, match=r"windows of 28 base ids .* 24 positions"):
        run_tuning(tmp_path / "run", model)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", ["model", "pack", "settings"])
def test_anothers_run_is_refused(change, tmp_path):
    run_tuning(tmp_path / "run", iters=2)
    options = {
        "model": {"model": tiny_model(seed=1)},
        "pack": {"pack": Pack(WORDS, "ab" * 32)},
        "settings": {"learning_rate": 1e-3},
    }[change]
    with pytest.raises(TrainingError, match="holds another run"):
        run_tuning(tmp_path / "run", **{"iters": 2, **options})


def test_tuning_a_tuned_pack_goes_on_from_its_rows(tmp_path):
    first = run_tuning(tmp_path / "a", iters=20)
    again = run_tuning(tmp_path / "b", pack=Pack(WORDS, rows=first.rows), iters=1)
    assert again.before == pytest.approx(first.after, abs=1e-6)
    of_another = replace(first.rows, model="of another")
    anew = run_tuning(tmp_path / "c", pack=Pack(WORDS, rows=of_another), iters=1)
    assert anew.before == first.before


@pytest.mark.parametrize("log", [None, "", '{"step": 0, "val_bits_per_byte": "x"}'])
def test_what_the_rows_were_worth_before_is_right_also_where_the_log_is_lost(tmp_path, log):
    first = run_tuning(tmp_path / "run", iters=2)
    path = tmp_path / "run" / "metrics.jsonl"
    path.unlink() if log is None else path.write_text(log)
    again = run_tuning(tmp_path / "run", iters=2)
    assert again.before == pytest.approx(first.before, abs=1e-9)
    assert (again.after, again.rows.fingerprint) == (first.after, first.rows.fingerprint)


@pytest.mark.parametrize(("name", "error"), [("train.json", TrainingError), ("metrics.jsonl", DataError)])
def test_a_pipe_in_a_runs_folder_is_an_error_and_not_waited_for(tmp_path, name, error):
    run_tuning(tmp_path / "run", iters=1)
    (tmp_path / "run" / name).unlink()
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(error, match=name):
        run_tuning(tmp_path / "run", iters=1)


def test_a_batch_that_cannot_be_filled_is_told_before_there_is_a_run(tmp_path):
    with pytest.raises(TrainingError, match="24 usable samples do not fill a batch of 25"):
        run_tuning(tmp_path / "run", batch_size=25)
    assert not (tmp_path / "run").exists()


# ---- the command


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
            "--json",
            "e.json",
        )
        assert status == 0, err
        found[file] = json.loads(Path("e.json").read_text())["models"][0]["text"]["bits_per_byte"]
    assert found["tuned.npz"] < found["a.npz"]
    plain_folder(Path("plain"))
    status, _, err = run("generate", "--model", "plain", "--prompt", "the", "--pack", "tuned.npz")
    assert (status, err.count("\n")) == (2, 1)
    assert "was tuned for a zip2zip model" in err


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
        "--json",
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
    with pytest.raises(ConfigError, match="max_codebook_size"):
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
