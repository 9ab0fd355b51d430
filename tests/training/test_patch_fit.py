"""Models over patches from text files to a folder and back to text: what is saved, what is refused, the commands."""

import json
import os
import shutil
import signal
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from tokenizers.normalizers import Lowercase

from mlx_zip import cli
from mlx_zip.errors import DataError, MlxZipError, TrainingError
from mlx_zip.models.patch_model import (
    PatchConfig,
    PatchModel,
    SavedPatchModel,
    generate_patches,
    generate_text,
    load_patch_model,
)
from mlx_zip.training import patch_training as hbpe_fit
from mlx_zip.training.checkpoints import list_checkpoints
from mlx_zip.training.patch_training import (
    PatchCorpus,
    PatchFitOptions,
    cut_patch_windows,
    evaluate_patch_corpus,
    evaluate_patch_texts,
    fit_patch_model,
    train_patch_model,
)
from mlx_zip.training.run_folder import MetricsLog, read_metrics
from mlx_zip.training.settings import TrainSettings
from mlx_zip.vocab.hbpe.measures import Tower, hierarchical_flops
from mlx_zip.vocab.hbpe.patch_text import (
    END,
    PatchText,
    learn_tokenizer,
    read_hf_tokenizer,
    read_text_encoder,
    token_bytes_by_id,
)
from support.command_line import shown
from support.tiny_vocabularies import write_folder, write_pair

TEXTS = ["the cat and the dog: ¿qué?", "the dog and 12 cats", "a cat, a dog, 😀 and 123"] * 4
OPTIONS = PatchFitOptions(None, 270, 4, context=8, latent=Tower(1, 16, 24, 2), local=Tower(1, 8, 12, 2))
SETTINGS = TrainSettings(iters=4, batch_size=2, learning_rate=0.01, save_every=2, keep=9, steps_per_report=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run, which tests copy before they change it."""
    out = tmp_path_factory.mktemp("fit") / "run"
    fit_patch_model(TEXTS, OPTIONS, SETTINGS, out)
    return out


@pytest.fixture
def folder(run, tmp_path):
    return shutil.copytree(run / "model", tmp_path / "model")


# ---- first stage


def test_a_learned_first_stage_spells_every_text():
    tokenizer = learn_tokenizer(TEXTS, 270)
    tokens = token_bytes_by_id(tokenizer)
    assert 256 < len(tokens) <= 270
    for text in TEXTS:
        assert b"".join(tokens[i] for i in tokenizer.encode(text).ids) == text.encode()
    with pytest.raises(DataError, match="256 tokens or more, got 255"):
        learn_tokenizer(TEXTS, 255)


def test_no_memory_is_taken_for_tokens_that_a_text_cannot_give():
    assert token_bytes_by_id(learn_tokenizer(TEXTS, 1 << 60)) == token_bytes_by_id(learn_tokenizer(TEXTS, 4096))


def test_a_first_stage_without_a_token_for_the_end_gets_one_that_texts_do_not_use(tmp_path):
    write_pair(tmp_path)
    text = PatchText.learn(read_hf_tokenizer(tmp_path / "vocab.bpe"), 4)
    assert text.tokenizer.token_to_id(END) == text.end == len(text.table) - 1
    assert text.unit_bytes[text.end] == 0
    assert list(text.ids("the cat")) == list(read_text_encoder(tmp_path / "vocab.bpe")("the cat"))
    own = PatchText.learn(read_hf_tokenizer(write_folder(tmp_path / "mini")), 4)
    assert own.tokenizer.token_to_id("<end>") == own.end
    assert own.tokenizer.token_to_id(END) is None


def test_a_table_of_another_tokenizer_is_refused():
    text = PatchText.learn(learn_tokenizer(TEXTS, 270), 4)
    other = PatchText.learn(learn_tokenizer(TEXTS, 262), 4)
    with pytest.raises(DataError, match="another tokenizer"):
        PatchText(text.tokenizer, other.table)


# ---- the folder


def test_a_folder_holds_the_model_that_was_trained(run):
    saved, again = fit_patch_model(TEXTS, OPTIONS, SETTINGS, run), load_patch_model(run / "model")
    patches = mx.array(saved.text.table.rows[:12].reshape(2, 6, 4).astype(np.int32))
    assert np.array_equal(np.array(saved.model(patches)), np.array(again.model(patches)))
    assert (again.context, again.source["progress"]["step"]) == (8, 4)
    assert again.text.patches(TEXTS[0]) == saved.text.patches(TEXTS[0])
    assert again.text.end == saved.text.end


def test_a_run_that_was_stopped_goes_on_and_leaves_the_same_model(run, tmp_path, monkeypatch):
    def stopped(*args, **kwargs):
        train_patch_model(*args, **kwargs, until=2)
        raise KeyboardInterrupt

    monkeypatch.setattr(hbpe_fit, "train_patch_model", stopped)
    with pytest.raises(KeyboardInterrupt):
        fit_patch_model(TEXTS, OPTIONS, SETTINGS, tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()
    monkeypatch.setattr(hbpe_fit, "train_patch_model", train_patch_model)
    fit_patch_model(TEXTS, OPTIONS, SETTINGS, tmp_path / "run")
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (run, tmp_path / "run")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("texts", "options", "settings", "culprits"),
    [
        (TEXTS[:-1], {}, {}, "data"),
        (TEXTS, {"context": 4, "mode": "full"}, {}, "context, mode"),
        (TEXTS, {"latent": Tower(1, 32, 24, 2)}, {}, "latent"),
        (TEXTS, {}, {"iters": 5, "seed": 1}, "iters, seed"),
    ],
)
def test_a_run_of_other_texts_or_settings_is_not_gone_on_with(run, texts, options, settings, culprits):
    with pytest.raises(TrainingError, match=rf"holds another run \({culprits}\); choose another RUN"):
        fit_patch_model(texts, replace(OPTIONS, **options), replace(SETTINGS, **settings), run)


def test_what_a_folder_holds_that_is_no_run_stays(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("of another kind")
    with pytest.raises(TrainingError, match="is not empty and holds no run; choose another RUN"):
        fit_patch_model(TEXTS, OPTIONS, SETTINGS, tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["model", "model/weights"]


def test_what_killed_processes_left_half_written_is_removed(run, tmp_path):
    again = shutil.copytree(run, tmp_path / "run")
    for name in (".model.partial-1", ".model.old-1"):
        shutil.copytree(again / "model", again / name)
    (again / ".metrics.jsonl.partial-1").write_text("{")
    fit_patch_model(TEXTS, OPTIONS, SETTINGS, again)
    assert sorted(os.listdir(again)) == sorted(os.listdir(run))


def changed(name, change):
    def apply(folder):
        data = json.loads((folder / name).read_text())
        change(data)
        (folder / name).write_text(json.dumps(data))

    return apply


def flipped(name, at):
    def apply(folder):
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 1
        (folder / name).write_bytes(data)

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read: No such file"),
        (lambda folder: (folder / "table.npz").unlink(), "table.npz cannot be read"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json.*[Nn]o such file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors cannot be read: No such file"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "holds no JSON object"),
        (flipped("model.safetensors", -1), "model.safetensors is damaged"),
        (flipped("table.npz", 300), "table.npz"),
        (changed("config.json", lambda c: c.update(model_type="llama")), "its model_type is 'llama', not 'hbpe'"),
        (changed("config.json", lambda c: c.update(version=2)), "has version 2"),
        (changed("config.json", lambda c: c.update(version=True)), "has version True"),
        (changed("config.json", lambda c: c.update(context=True)), "context missing or of another type"),
        (changed("config.json", lambda c: c.pop("context")), "context missing"),
        (changed("config.json", lambda c: c.update(context=0)), "context must be at least 1"),
        (changed("config.json", lambda c: c["sizes"].update(symbols=0)), "symbols must be an integer from 257"),
        (changed("config.json", lambda c: c["sizes"].update(patch_size=5)), "patches of 5 out of"),
        (changed("config.json", lambda c: c["sizes"]["latent"].update(width=32)), "does not hold the weights"),
        (
            lambda folder: PatchText.learn(learn_tokenizer(TEXTS, 262), 4).tokenizer.save(
                str(folder / "tokenizer.json")
            ),
            "model: the table was made for another tokenizer",
        ),
    ],
)
def test_a_damaged_or_foreign_folder_is_one_line(folder, capsys, damage, message):
    damage(folder)
    with pytest.raises(MlxZipError, match=message):
        load_patch_model(folder)
    assert cli.main(["vocab", "hbpe", "generate", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_the_folder_of_a_run_names_the_folder_of_its_model(run, capsys):
    assert cli.main(["vocab", "hbpe", "generate", str(run)]) == 2
    told = capsys.readouterr().err
    assert told.endswith(
        f"config.json cannot be read: No such file or directory; the model's folder may be {run}/model\n"
    )


# ---- text, measured and generated


def test_bits_per_byte_count_every_byte_of_every_text(run):
    saved = load_patch_model(run / "model")
    told = evaluate_patch_texts(saved, TEXTS[:3], batch_size=2)
    ids = cut_patch_windows([saved.text.ids(text) for text in TEXTS[:3]], saved.text.end, 1).reshape(-1)
    assert len(ids) % saved.context  # the last window is a shorter one
    parts = [ids[at : at + saved.context] for at in range(0, len(ids), saved.context)]
    corpora = [PatchCorpus(part[None], saved.text.unit_bytes, saved.text.table.rows) for part in parts]
    nats = sum(evaluate_patch_corpus(saved.model, corpus)["nats"] for corpus in corpora)
    n_bytes = sum(len(text.encode()) for text in TEXTS[:3])
    assert (told["bytes"], told["patches"], told["documents"]) == (n_bytes, len(ids), 3)
    assert told["exact"] is True
    assert told["bits_per_byte"] == pytest.approx(nats / np.log(2) / n_bytes, rel=1e-5)
    assert told["fertility"] == pytest.approx(len(ids) / sum(len(text.split()) for text in TEXTS[:3]))
    config, rate = saved.model.config, n_bytes / len(ids)
    whole = hierarchical_flops(
        saved.context * rate, rate, config.latent, config.local, config.symbols, told["symbols_per_patch"]
    )
    assert told["forward_flops_per_byte"] == pytest.approx(whole / (saved.context * rate))


def test_patches_that_spell_another_text_of_as_many_bytes_are_told():
    tokenizer = learn_tokenizer(TEXTS, 270)
    tokenizer.normalizer = Lowercase()
    text = PatchText.learn(tokenizer, 4)
    model = PatchModel(PatchConfig(text.table.merges.symbols, 4, OPTIONS.latent, OPTIONS.local))
    for told, exact in (("a cat", True), ("A Cat", False)):
        found = evaluate_patch_texts(SavedPatchModel(model, text, 8, {}), [told])
        assert (found["bytes"], found["exact"]) == (5, exact)


@pytest.mark.slow
def test_generated_text_is_the_bytes_of_the_patches_in_whole_characters(run):
    saved = load_patch_model(run / "model")
    table = saved.text.table
    for seed in range(6):
        flags = {"max_patches": 12, "temperature": 1.5, "seed": seed}
        prompt = saved.text.patches("the ")
        patches = list(generate_patches(saved.model, table.merges, prompt, **flags, mode=table.mode))
        written = list(generate_text(saved, "the ", **flags))
        assert [part.patch for part in written if part.patch] == patches
        data = b"".join(table.merges.decode(patch) for patch in patches)
        assert "".join(part.text for part in written) == data.decode("utf-8", "replace")


def test_hardly_any_temperature_is_none(run):
    saved = load_patch_model(run / "model")
    greedy = list(generate_text(saved, "the ", max_patches=4))
    assert list(generate_text(saved, "the ", max_patches=4, temperature=1e-40)) == greedy


def test_a_prompt_of_bytes_that_are_no_text_is_one_line(run, capsys):
    assert cli.main(["vocab", "hbpe", "generate", str(run / "model"), "--prompt", "a\udcff"]) == 2
    assert capsys.readouterr() == ("", "error: the prompt is not valid Unicode at character 1\n")


# ---- commands


@pytest.fixture
def command(capsys):
    def vocab(*flags):
        return (cli.main(["vocab", "hbpe", *map(str, flags)]), *capsys.readouterr())

    return vocab


SMALL = (
    "--vocab-size",
    270,
    "--patch-size",
    4,
    "--context",
    8,
    "--latent",
    "1,16,24,2",
    "--local",
    "1,8,12,2",
    "--iters",
    4,
    "--batch-size",
    2,
)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n<end>\n".join(TEXTS))
    return ["--data", path, "--separator", "<end>"]


def test_a_model_is_fitted_measured_and_writes(command, tmp_path, data):
    status, out, _ = command("fit", tmp_path / "run", *data, *SMALL, "--valid", data[1])
    model = tmp_path / "run" / "model"
    assert (status, out.splitlines()[0]) == (0, str(model))
    assert shown(out)["documents"] == "12"
    status, out, _ = command("evaluate", model, *data, "--json")
    assert status == 0
    assert json.loads(out)["bytes"] == sum(len(text.encode()) for text in TEXTS)
    flags = ("generate", model, "--prompt", "the ", "--max-patches", 5, "--temp", 1, "--seed", 3)
    status, out, err = command(*flags)
    _, printed, _ = command(*flags, "--json")
    record = json.loads(printed)
    assert (status, out) == (0, f"the {record['text']}\n")
    counted = "{patches} patches of {symbols} symbols and {text_bytes} bytes,".format(**record)
    assert err.startswith(counted)
    assert record["finish_reason"] == ("length" if record["patches"] == 5 else "stop")
    assert record["prompt_patches"] == len(load_patch_model(model).text.patches("the "))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_last_step_and_the_command_goes_on(command, tmp_path, monkeypatch, data, number, status):
    def add(log, **values):
        if values["step"] == 2:
            signal.raise_signal(number)
        whole(log, **values)

    whole, flags = MetricsLog.add, (*data, *SMALL, "--steps-per-report", 1)
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "add", add)
        told = command("fit", tmp_path / "run", *flags)
    assert told[:2] == (status, "")
    assert told[2].splitlines()[-1] == "stopped after step 3; the same command goes on from there"
    assert [step for step, _ in list_checkpoints(tmp_path / "run")] == [3]
    assert not (tmp_path / "run" / "model").exists()
    for name in ("run", "whole"):
        assert command("fit", tmp_path / name, *flags)[0] == 0
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]


def test_a_signal_in_the_last_step_leaves_the_model_all_the_same(command, tmp_path, monkeypatch, data):
    def add(log, **values):
        if values["step"] == 3:
            signal.raise_signal(signal.SIGTERM)
        whole(log, **values)

    whole = MetricsLog.add
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "add", add)
        assert command("fit", tmp_path / "run", *data, *SMALL, "--steps-per-report", 1)[0] == 0
    assert [step for step, _ in list_checkpoints(tmp_path / "run")][-1] == 4
    assert (tmp_path / "run" / "model").exists()


def test_a_named_first_stage_is_saved_with_the_model(command, tmp_path, data):
    write_pair(tmp_path)
    status, out, _ = command("fit", tmp_path / "run", *data, *SMALL, "--tokenizer", tmp_path / "vocab.bpe", "--json")
    assert status == 0
    assert json.loads(out)["step"] == 4
    saved = load_patch_model(tmp_path / "run" / "model")
    assert list(saved.text.ids("the 123")) == list(read_text_encoder(tmp_path / "vocab.bpe")("the 123"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("fit", "run", "--data", "none.txt"), "none.txt"),
        (("fit", "run", "--data", "texts.txt", "--context", "0"), "context must be at least 1"),
        (("fit", "run", "--data", "texts.txt", "--context", "9999"), "does not fill one window"),
        (("fit", "run", "--data", "texts.txt", "--iters", "0"), "iters"),
        (("fit", "run", "--data", "texts.txt", "--context", "4", "--batch-size", "999"), "do not fill a batch of 999"),
        (("fit", "texts.txt", "--data", "texts.txt", "--context", "4"), "cannot write texts.txt: "),
        (("fit", "run", "--data", "texts.txt", "--patch-size", "1"), "from 2 to 256"),
        (("fit", "run", "--data", "texts.txt", "--vocab-size", "9"), "256 tokens or more"),
        (("fit", "run", "--data", "texts.txt", "--context", "4", "--latent", "1,7,8,2"), "latent: width 7"),
        (("fit", "run", "--data", "texts.txt", "--tokenizer", "none.json"), "none.json"),
        (("generate", "none"), "none/config.json"),
        (("evaluate", "none", "--data", "texts.txt", "--batch-size", "0"), "--batch-size"),
    ],
)
def test_a_wrong_request_is_one_line_and_writes_nothing(command, tmp_path, monkeypatch, data, flags, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = command(*flags)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["texts.txt"]


def test_numbers_out_of_range_are_refused_before_anything_is_written(command, run):
    for flags, message in ((("--max-patches", 0), "max_patches"), (("--temp", -1), "temperature")):
        status, out, err = command("generate", run / "model", *flags)
        assert (status, out) == (2, "")
        assert message in err
