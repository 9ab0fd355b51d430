"""`mlx_zip vocab pack` and --pack: from a text to a pack to a generation that begins with it."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_zip.cli.vocab.packs import _make_learn_progress
from mlx_zip.engine.mlx.generate import load
from mlx_zip.errors import DataError
from mlx_zip.packs.entries import write_entries
from mlx_zip.packs.pack import Pack, load_pack, save_pack
from mlx_zip.packs.tuned import TunedRows
from mlx_zip.text.sources import Source
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.training.prepare.text_windows import encode_sources
from support import tiny_text
from support.command_line import shown
from support.prepared import tokenizer_folder

MODEL = "llama_transformer_tied_lora"
TEXT = "the cat sat on the mat. the dog sat on the cat.\n" * 30


@pytest.fixture(autouse=True)
def in_home(home, monkeypatch):
    """Runs every test in its own home folder."""
    monkeypatch.chdir(home)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def learn(run, text):
    """Learns a pack -> what the command printed."""

    def command(out, *flags):
        status, printed, err = run("vocab", "pack", "learn", "--data", text, "--out", out, "--json", *flags)
        assert (status, err) == (0, "")
        return json.loads(printed)

    return command


def test_a_pack_is_learned_shown_and_merged(run, learn, tmp_path):
    tokenizer = tokenizer_folder()
    told = learn("a.npz", "--tokenizer", tokenizer, "--size", 20, "--merge-size", 4)
    pack = load_pack("a.npz")
    assert 5 < told["entries"] == len(pack.entries) <= 20
    assert told["fingerprint"] == pack.fingerprint
    assert told["learned_from"] == [str(tmp_path / "text.txt")]
    assert told["ids"] < 0.6 * told["base_ids"]
    assert told == {**told, "window": 256, "merge_size": 4, "longest": 4}
    status, out, _ = run("vocab", "pack", "show", "a.npz", "--tokenizer", tokenizer, "--show", 3, "--json")
    assert status == 0
    best = json.loads(out)["best"]
    assert [one["base_ids"] for one in best] == [list(entry) for entry in pack.entries[:3]]
    assert all(one["text"] in TEXT and one["uses"] > 1 for one in best)
    figures = shown(run("vocab", "pack", "show", "a.npz")[1])
    assert (figures["entries"], figures["longest"]) == (str(len(pack.entries)), "4")
    learn("b.npz", "--tokenizer", tokenizer, "--size", 5, "--merge-size", 2)
    status, out, _ = run("vocab", "pack", "merge", "a.npz", "b.npz", "--out", "c.npz", "--size", 8, "--json")
    assert (status, json.loads(out)["entries"]) == (0, 8)
    assert load_pack("c.npz").entries[0] == pack.entries[0]


def test_held_out_texts_are_measured_and_drawn(run, learn, tmp_path):
    (tmp_path / "new.txt").write_text("the cat sat on the dog. " * 9)
    flags = ("--tokenizer", tokenizer_folder(), "--size", 8)
    told = learn("a.npz", *flags, "--held-out", "new.txt", "--plot", "a.svg")
    held_out = told["held_out"]
    assert held_out["base_ids"] < told["base_ids"]
    assert held_out["ids"] < held_out["ids_without"] < held_out["base_ids"]
    assert held_out["texts"] == ["new.txt"]
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    assert "\nheld out:\n" in run("vocab", "pack", "show", "a.npz", "--plot", "b.png")[1]
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    told = learn("b.npz", *flags)
    assert load_pack("b.npz").entries == load_pack("a.npz").entries
    assert "learn with --held-out FILE" in run("vocab", "pack", "show", "b.npz")[1]


def test_entries_are_shown_as_text_without_a_tokenizer(run, learn):
    learn("a.npz", "--tokenizer", tokenizer_folder(), "--size", 4)
    shown = [
        json.loads(run("vocab", "pack", "show", "a.npz", *flags, "--json")[1])["best"]
        for flags in ((), ("--tokenizer", tokenizer_folder()))
    ]
    assert shown[0] == shown[1]
    assert all(one["text"] in TEXT for one in shown[0])
    write_entries("b.json", [(5, 7)], merge_size=4)
    assert json.loads(run("vocab", "pack", "show", "b.json", "--json")[1])["best"][0]["text"] == "5 7"


def test_a_long_text_is_read_up_to_a_bound(learn):
    assert learn("a.npz", "--tokenizer", tokenizer_folder(), "--most-ids", 100)["base_ids"] == 100


def test_a_bound_beyond_all_integers_of_the_machine_is_none(learn):
    flags = "--tokenizer", tokenizer_folder(), "--most-ids"
    assert learn("a.npz", *flags, 10**20)["base_ids"] == learn("b.npz", *flags, 10**9)["base_ids"] > 100


def test_each_source_of_a_mixture_gives_its_share_of_the_ids(text, tmp_path):
    (tmp_path / "more.txt").write_text(TEXT[::-1])
    sources = [Source((str(text),), 1.0), Source((str(tmp_path / "more.txt"),), 3.0)]
    found = encode_sources(sources, load_tokenizer(tokenizer_folder()), 400, pytest.fail)
    assert [len(one.ids) for one in found] == [100, 300]  # the first text alone has more than 400


def test_a_pack_ends_where_a_row_of_the_head_costs_more_than_it_saves(run, learn, text):
    model = tiny_text.converted(MODEL)
    whole = learn("a.npz", "--model", model, "--size", 12)
    priced = learn("b.npz", "--model", model, "--size", 12, "--head-cost", "0.05")
    assert priced["entries"] < whole["entries"]
    assert priced["steps_cost"] == pytest.approx(priced["ids"] * (1 + 0.05 * priced["entries"]))
    assert "head_cost" not in whole
    figures = shown(run("vocab", "pack", "show", "b.npz")[1])
    assert (figures["head cost"], "speedup" in figures) == ("0.05", True)
    by_model = learn("c.npz", "--model", model, "--size", 12, "--head-cost", "model")
    arrays = load_file(model / "model.safetensors")
    read = sum(x.nbytes for name, x in arrays.items() if not name.startswith(("input_enc", "output_enc")))
    assert by_model["head_cost"] == pytest.approx(arrays["model.norm.weight"].nbytes / read)  # tied: all is read
    learn_flags = ("vocab", "pack", "learn", "--data", text, "--out", "d.npz")
    for cost in ("model", "much", "-1"):
        status, _, err = run(*learn_flags, "--tokenizer", tokenizer_folder(), "--head-cost", cost)
        assert (status, err.count("\n")) == (2, 1)
        assert "--head-cost" in err


def test_tuned_packs_are_merged_with_their_rows_or_without(run):
    rows = [np.full((2, 4), x, np.float32) for x in (1, 2, 3)]
    packs = {
        "a.npz": (((5, 6), (6, 7)), rows[0], "m"),
        "b.npz": (((7, 8), (5, 6)), rows[1], "m"),
        "c.npz": (((8, 9), (9, 9)), rows[2], "n"),
    }
    for file, (entries, output, model) in packs.items():
        save_pack(file, Pack(entries, None, {}, TunedRows(output, output, model)))
    assert run("vocab", "pack", "merge", "a.npz", "b.npz", "--out", "ab.npz")[0] == 0
    assert load_pack("ab.npz").rows.output[:, 0].tolist() == [1, 2, 1]
    status, _, err = run("vocab", "pack", "merge", "a.npz", "c.npz", "--out", "ac.npz")
    assert (status, "--drop-rows" in err) == (2, True)
    assert run("vocab", "pack", "merge", "a.npz", "c.npz", "--drop-rows", "--out", "ac.npz")[0] == 0
    assert load_pack("ac.npz").rows is None


def test_a_text_that_repeats_too_little_for_the_size_is_reported(run, text):
    flags = ("vocab", "pack", "learn", "--tokenizer", tokenizer_folder(), "--data", text, "--out", "a.npz")
    assert "give more text" not in run(*flags, "--size", 8)[2]
    text.write_text("cat")
    status, _, err = run(*flags, "--size", 8)
    assert status == 0
    assert "for 0 of the 8 entries of --size; give more text for more entries" in err


def test_each_round_of_learning_is_counted_with_its_figures():
    class Bar:
        def __init__(self):
            self.notes, self.rounds = [], 0

        def show_figures(self, figures):
            self.notes.append(figures)

        def __call__(self):
            self.rounds += 1

    show = _make_learn_progress(bar := Bar())
    show("prune", 1024, -1)
    show("refine", 1, 33000)
    assert (bar.notes, bar.rounds) == (["prune: 1,024 entries", "refine: 1 entry, 33,000 ids"], 2)


def test_protected_ids_are_in_no_entry(learn, text):
    text.write_text("12 cats and 12 dogs and 12 cats. " * 20)
    learn("a.npz", "--tokenizer", tokenizer_folder(), "--protect", "digits", "--merge-size", 3)
    digits = {i for i, token in enumerate("0123456789")}
    shown = load_pack("a.npz").entries
    assert shown
    assert not any(digits & set(map(int, filter(str.isdigit, spelled))) for spelled in map(spell, shown))


def spell(entry):
    from mlx_zip.text.tokenizers import load_tokenizer

    return load_tokenizer(tokenizer_folder()).decode(list(entry))


def test_a_model_takes_a_pack_of_its_tokenizer_and_begins_with_it(run, learn, tmp_path):
    model = tiny_text.converted(MODEL)
    learn("a.npz", "--model", model, "--size", 8)
    status, out, _ = run("vocab", "pack", "check", "a.npz", "--model", model)
    assert (status, out.splitlines()[-1]) == (0, f"{model} can use this pack")
    prompt = ("generate", "--model", model, "--prompt", TEXT[:48], "--ignore-chat-template", "--json")
    prompt = (*prompt, "--max-tokens", 8)
    plain, packed = (json.loads(run(*prompt, *flags)[1]) for flags in ((), ("--pack", "a.npz")))
    assert packed["prompt_ids"] < plain["prompt_ids"]
    entries = load_pack("a.npz").entries
    write_entries("one.json", entries[:4], merge_size=4)
    write_entries("two.json", entries[4:], merge_size=4)
    both = json.loads(run(*prompt, "--pack", "one.json", "--pack", "two.json")[1])
    assert both["prompt_ids"] == packed["prompt_ids"]


@pytest.mark.parametrize("command", ["generate", "evaluate", "check", "prepare", "prepare, drawn", "several"])
def test_a_pack_of_another_tokenizer_is_refused_by_every_command(command, run, text):
    model = tiny_text.converted(MODEL)
    save_pack("other.npz", Pack(((5, 6), (6, 7)), "ab" * 32))
    flags = {
        "generate": ("generate", "--model", model, "--prompt", "the", "--pack", "other.npz"),
        "evaluate": ("evaluate", "--model", model, "--data", text, "--pack", "other.npz"),
        "check": ("vocab", "pack", "check", "other.npz", "--model", model),
        "prepare": ("prepare", "--model", model, "--data", text, "--out", "data", "--pack", "other.npz"),
        "prepare, drawn": (
            "prepare",
            "--model",
            model,
            "--data",
            text,
            "--out",
            "data",
            "--pack",
            "other.npz",
            "--start-draw",
            1,
        ),
        "several": (
            "generate",
            "--model",
            model,
            "--prompt",
            "the",
            "--pack",
            "any.json",
            "--pack",
            "other.npz",
        ),
    }[command]
    write_entries("any.json", [(5, 7)], merge_size=4)
    status, _, err = run(*flags)
    assert status == 2
    assert "other.npz was learned with another tokenizer" in err


def test_a_model_is_not_loaded_with_a_pack_of_another_tokenizer():
    with pytest.raises(DataError, match=r"the pack \(--pack\) was learned with another tokenizer"):
        load(tiny_text.converted(MODEL), pack=Pack(((40, 41), (41, 42)), "ab" * 32))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("learn", "--tokenizer", "T", "--data", "text.txt", "--out", "a.npz", "--size", "0"), "--size must be"),
        (("learn", "--tokenizer", "T", "--data", "text.txt", "--out", "a.npz", "--size", "9999"), "does not fit"),
        (("learn", "--tokenizer", "T", "--data", "text.txt", "--out", "a.json"), "a pack is a .npz file"),
        (("learn", "--tokenizer", "T", "--data", "none.txt", "--out", "a.npz"), "none.txt"),
        (("learn", "--tokenizer", "T", "--data", "empty.txt", "--out", "a.npz"), "the corpus is empty"),
        (("learn", "--tokenizer", "T", "--data", "text.txt", "--out", "no/a.npz"), "no/a.npz"),
        (
            ("learn", "--tokenizer", "T", "--data", "text.txt", "--held-out", "empty.txt", "--out", "a.npz"),
            "--held-out empty.txt: no text to measure on",
        ),
        (("learn", "--data", "text.txt", "--out", "a.npz"), "name either a model or a tokenizer"),
        (("show", "none.npz"), "none.npz"),
        (("show", "good.npz", "--show", "-3"), "--show must be at least 0"),
        (("show", "text.txt"), "text.txt"),
        (("show", "big.json", "--tokenizer", "T"), "big.json holds the id 99999999, and"),
        (("merge", "none.npz", "--out", "a.npz"), "none.npz"),
        (("merge", "good.npz", "--out", "a.npz", "--size", "0"), "--size must be at least"),
        (("check", "good.npz", "--model", "T"), "config.json"),
    ],
)
def test_what_cannot_be_is_said_in_a_line_and_nothing_is_written(flags, told, run, text, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "big.json").write_text("[[5, 99999999]]")
    save_pack("good.npz", Pack(((5, 6),)))
    status, out, err = run("vocab", "pack", *(tokenizer_folder() if flag == "T" else flag for flag in flags))
    assert (status, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1
    assert not (tmp_path / "a.npz").exists()


def test_a_pack_with_more_entries_than_slots_is_refused_with_the_cure(run):
    from mlx_zip.models.loading import read_model_config

    model = tiny_text.converted(MODEL)
    slots = read_model_config(model)["zip2zip"]["compression"]["max_codebook_size"]
    pairs = [(a, b) for a in range(5, 60) for b in range(5, 60)]
    assert slots < len(pairs)
    save_pack("many.npz", Pack(tuple(pairs)))
    status, _, err = run("generate", "--model", model, "--prompt", "the", "--pack", "many.npz")
    assert status == 2
    assert f"the model's codebook has {slots} slots; give it more (--codebook-size)" in err
    assert "make a smaller pack" in err


def test_a_pack_that_is_too_long_for_a_model_is_refused(run):
    save_pack("long.npz", Pack(((5, 6, 7, 8, 9, 5, 6, 7),)))
    status, _, err = run("vocab", "pack", "check", "long.npz", "--model", tiny_text.converted(MODEL))
    assert status == 2
    assert "long.npz does not fit" in err
