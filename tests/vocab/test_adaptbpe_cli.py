"""`mlx_zip vocab adapt`: learn, show and encode, from the command line."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mlx_zip import cli
from support.adaptbpe_cases import ADAPTBPE, HEAD
from support.command_line import shown
from support.places import GOLDEN

FIXTURE = GOLDEN / "models" / "llama_transformer_tied_lora" / "base" / "tokenizer.json"
TEXT = ADAPTBPE["gpt2"]["test_text"][:3000] + " café 日本\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a list of merges, texts to adapt to and a text to encode lie; the working folder."""
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(HEAD["merges"]) + "\n")
    (tmp_path / "train.txt").write_text(ADAPTBPE["gpt2"]["train_text"][:8000])
    (tmp_path / "new.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder, capsysbinary):
    """Runs `mlx_zip vocab adapt` -> (status, stdout, stderr)."""

    def command(*words):
        try:
            status = cli.main(["vocab", "adapt", *map(str, words)])
        except SystemExit as stopped:
            status = stopped.code
        out, err = capsysbinary.readouterr()
        return status, out.decode(), err.decode()

    return command


LEARN = ("learn", "--tokenizer", "vocab.bpe", "--data", "train.txt", "--merges", 300, "--out", "adapted.json")


@pytest.fixture
def learn(run):
    """Learns, with more flags -> the record."""

    def command(*flags):
        status, out, err = run(*LEARN, "--json", *flags)
        assert (status, err) == (0, "")
        return json.loads(out)

    return command


def test_learn_tells_what_it_kept_and_saved(learn):
    adapted, first = learn(), learn("--method", "first-k")
    assert adapted["ids"] == first["ids"] == 256 + 300
    assert adapted["virtual"] == adapted["promoted"] > 0 == first["virtual"]
    assert adapted["base_utility"] > adapted["utility"] > first["utility"]
    assert adapted["bytes"] == 8000
    assert adapted["utility"] == round(1 - adapted["tokens"] / 8000, 4)


def test_every_flag_of_learn_is_heard(learn):
    plain = learn()
    assert learn("--max-swaps", 2)["promoted"] == 2
    assert learn("--margin", 5)["promoted"] < plain["promoted"]
    assert learn("--limit-bytes", 500)["bytes"] == 500
    assert learn("--rule", "final")["rule"] == "final"
    assert learn("--method", "top-k")["rule"] == "final"
    for flag, value in (("--tie", "low"), ("--counting", "firing")):
        assert learn(flag, value)["settings"][flag.strip("-")] == value
    learn("--pieces", "whole")
    assert json.loads(Path("adapted.json").read_text())["front"]["pieces"] == "whole"


def test_without_json_it_is_a_few_lines(run):
    status, out, _ = run(*LEARN)
    assert status == 0
    figures = shown(out)
    assert (figures["ids"], figures["base ids"], figures["file"]) == ("556", "2,256", "adapted.json")


def test_show_counts_the_tokens_of_texts_and_checks_the_base(run, learn, folder):
    learn()
    status, out, _ = run("show", "adapted.json", "--tokenizer", "vocab.bpe", "--data", "new.txt", "--json")
    shown = json.loads(out)
    assert status == 0
    assert shown["bytes"] == len(TEXT.encode())
    assert shown["base_tokens"] < shown["tokens"] < shown["bytes"]
    (folder / "vocab.bpe").write_text("a b\n")
    status, out, err = run("show", "adapted.json", "--tokenizer", "vocab.bpe")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "whose merges differ" in err


def test_what_is_lost_of_a_base_besides_its_merges_is_reported(run, folder):
    data = json.loads(FIXTURE.read_text())
    data["model"] |= {"vocab": data["model"]["vocab"] | {"never made": 512, "nor this": 513}, "ignore_merges": True}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    words = ("--tokenizer", "tokenizer.json", *LEARN[3:6], 90, *LEARN[7:])
    status, out, _ = run("learn", *words)
    record = json.loads(run("show", "adapted.json", "--tokenizer", "tokenizer.json", "--json")[1])
    assert status == 0
    assert (record["unreachable"], record["ignore_merges"]) == (2, True)
    assert (shown(out)["unreachable"], shown(out)["ignore merges"]) == ("2", "yes")


def test_held_out_texts_are_counted_in_addition_to_those_adapted_to(run, learn, folder):
    told = learn("--held-out", "new.txt", "--plot", "rates.svg")
    shown = json.loads(run("show", "adapted.json", "--tokenizer", "vocab.bpe", "--data", "new.txt", "--json")[1])
    assert told["held_out"] == {name: shown[name] for name in told["held_out"]}
    assert told["held_out"]["bytes"] == len(TEXT.encode()) != told["bytes"]
    assert (folder / "rates.svg").read_text().startswith("<?xml")
    assert "\nheld out:\n" in run(*LEARN, "--held-out", "new.txt")[1]
    assert "--held-out FILE counts others" in run(*LEARN)[1]


@pytest.mark.parametrize("flags", [(), ("--base-ids",)])
def test_encode_gives_ids_that_decode_to_the_text(run, learn, folder, flags):
    learn()
    status, ids, _ = run("encode", "adapted.json", "--data", "new.txt", *flags)
    assert status == 0
    (folder / "ids.txt").write_text(ids)
    assert run("encode", "adapted.json", "--data", "ids.txt", "--decode", *flags) == (0, TEXT, "")
    record = json.loads(run("encode", "adapted.json", "--data", "new.txt", "--json", *flags)[1])
    assert record == {"ids": list(map(int, ids.split())), "bytes": len(TEXT.encode())}
    decoded = json.loads(run("encode", "adapted.json", "--data", "ids.txt", "--decode", "--json", *flags)[1])
    assert decoded == {"text": TEXT, "bytes": len(TEXT.encode())}


def test_a_tokenizer_json_is_written_where_it_can_be_exact(run, learn, folder):
    learn("--method", "first-k", "--tokenizer-json", "plain.json")
    ids = Tokenizer.from_file("plain.json").encode(TEXT).ids
    assert ids == json.loads(run("encode", "adapted.json", "--data", "new.txt", "--json")[1])["ids"]


def test_a_tokenizer_json_that_cannot_be_exact_is_refused_and_nothing_written(run, folder):
    before = set(folder.iterdir())
    status, out, err = run(*LEARN, "--tokenizer-json", "plain.json")
    assert (status, out) == (2, "")
    assert "merges are virtual, which a tokenizer.json cannot express" in err
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("learn", "--tokenizer", "nowhere.json", *LEARN[3:]), "nowhere.json cannot be read"),
        ((*LEARN[:6], 9999, *LEARN[7:]), "9999 merges to keep are not 0..2000"),
        ((*LEARN[:8], "no/such/folder.json"), "--out no/such/folder.json: no such folder"),
        ((*LEARN[:8], "."), "--out .: is a folder or device"),
        ((*LEARN[:4], "nowhere.txt", *LEARN[5:]), "nowhere.txt"),
        (("show", "vocab.bpe"), "vocab.bpe cannot be read: "),
        (("encode", "train.txt", "--data", "new.txt"), "train.txt cannot be read: "),
    ],
)
def test_bad_input_is_one_line_and_status_2(run, folder, words, told):
    before = set(folder.iterdir())
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize(("ids", "told"), [("1 x", "'x' is not an id"), ("556", "id 556 is not below 556")])
def test_ids_that_are_none_are_refused(run, learn, folder, ids, told):
    learn()
    (folder / "ids.txt").write_text(ids)
    status, out, err = run("encode", "adapted.json", "--data", "ids.txt", "--decode")
    assert (status, out) == (2, "")
    assert told in err


def test_a_column_without_a_name_is_refused(run):
    status, out, err = run(*LEARN, "--columns", "text")
    assert (status, out, err) == (2, "", "error: --columns 'text' is not of the form FIELD=COLUMN\n")


def test_two_columns_for_one_field_are_refused(run):
    status, out, err = run(*LEARN, "--columns", "text=body", "text=title")
    assert (status, out, err) == (2, "", "error: --columns gives the field 'text' two columns: body and title\n")
