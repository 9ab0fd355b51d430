"""Conversations that a model writes itself, and the recipe's data and packs at small size with a tiny random model."""

import gzip
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from shutil import copytree
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
import yaml

from mlx_zip import cli, named
from mlx_zip.arguments import Parser
from mlx_zip.bench.generation import generate
from mlx_zip.bench.recording import add_record_flag
from mlx_zip.errors import DataError, TrainingError
from mlx_zip.packs.pack import load_pack
from mlx_zip.text.tokenizers import load_tokenizer
from support.chat_toy import chat_model, chat_tokenizer
from support.once import once

torch = pytest.importorskip("torch", reason="needs PyTorch (pip install -e '.[torch]')")

from safetensors.torch import load_file  # noqa: E402

from mlx_zip.files import read_json_object  # noqa: E402
from mlx_zip.training.checkpoints import hash_trained_weights  # noqa: E402
from recipes.smollm2 import __main__ as main  # noqa: E402
from recipes.smollm2 import conversations as made  # noqa: E402
from recipes.smollm2 import frontier, labels, training  # noqa: E402
from recipes.smollm2.settings import SMALL, TalkSettings  # noqa: E402


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny random chat model -> (folder, mlx-lm's model)."""
    return chat_model(tmp_path_factory.mktemp("base"))


# ---- texts side by side


def test_rows_that_begin_at_different_times_get_the_logits_of_each_text_alone(base):
    folder, model = base
    rows = made.ParallelTexts(folder, 3, 16)
    texts = [np.random.default_rng(n).integers(3, 90, 9) for n in range(3)]
    expected = [np.array(model(mx.array(text)[None]))[0] for text in texts]
    begins = (0, 2, 5)
    for step in range(14):
        for row, begin in enumerate(begins):
            if step == begin:
                rows.clear(row)
        places = [min(step - begin, 8) if step >= begin else 0 for begin in begins]
        logits = rows.step(
            torch.tensor([int(text[at]) for text, at in zip(texts, places, strict=True)]), torch.arange(3)
        )
        for row, begin in enumerate(begins):
            if 0 <= step - begin < 9:
                np.testing.assert_allclose(logits[row], expected[row][step - begin], atol=2e-4)


def test_a_cleared_row_forgets_its_text(base):
    folder, _ = base
    used, new = made.ParallelTexts(folder, 2, 8), made.ParallelTexts(folder, 2, 8)
    for word in (5, 6, 7):
        used.step(torch.tensor([word, word]), torch.arange(2))
    used.clear(0)
    wanted = torch.tensor([0])
    torch.testing.assert_close(used.step(torch.tensor([9, 9]), wanted), new.step(torch.tensor([9, 9]), wanted))


# ---- drawing


def test_ids_beyond_the_most_likely_part_are_never_drawn():
    logits = torch.log(torch.tensor([[0.6, 0.25, 0.1, 0.05]])).expand(5, 4)
    assert made.draw_ids(logits, [1.0] * 5, 0.85, [0.0, 0.7, 0.71, 0.99, 0.999999]) == [0, 0, 1, 1, 1]


def test_a_low_temperature_draws_the_most_likely_id():
    logits = torch.tensor([[1.0, 1.2, 0.9]])
    assert made.draw_ids(logits, [0.01], 0.95, [0.99]) == [1]


@pytest.mark.parametrize(
    ("ids", "part"), [([1, 2, 3], 0.0), (list(range(20)), 0.0), ([7] * 8, 0.8), ([1, 2, 3, 4, 1, 2, 3, 4], 0.2)]
)
def test_repeated_four_grams_are_counted(ids, part):
    assert made.repeated_share(ids) == pytest.approx(part)


@pytest.mark.parametrize(
    ("text", "why"), [(" \n", "empty"), ("a\ufffdb", "not text"), ("<|im_start|>", "not text"), ("fine", "")]
)
def test_a_turn_that_is_no_text_is_not_kept(text, why):
    assert made.find_fault([1, 2, 3], text, 0.5) == why


# ---- one conversation


def told(writing, answers):
    """Reads what a conversation gives, and answers with texts in turn -> the text of all that was read."""
    read, words = [], []
    while True:
        if not writing.given and not words:
            words = [*writing.tokenizer.encode(answers.pop(0)), writing.end] if answers else [9] * 1000
        chosen = writing.next_id(None if writing.given else words.pop(0))
        if chosen is None:
            return writing.tokenizer.decode(read, skip_special_tokens=False)
        read.append(chosen)


def writing(user=None, **talk):
    settings = TalkSettings(**{"second": 0.0, **talk})
    return made.ConversationWriter(3, "a kind", "Be kind.", user, settings, chat_tokenizer())


def test_a_conversation_reads_as_the_chat_template_writes_it():
    one = writing(second=1.0)
    read = told(one, ["Hello?", "Good day.", "And now?", "Good night."])
    record = one.record()
    rendered = chat_tokenizer().apply_chat_template(record["messages"], tokenize=False)
    assert read + "<|im_end|>\n" == rendered
    assert [turn["content"] for turn in record["messages"]] == [
        "Be kind.",
        "Hello?",
        "Good day.",
        "And now?",
        "Good night.",
    ]


def test_a_given_question_is_read_and_answered():
    one = writing("What is it?")
    told(one, ["It is that."])
    assert [turn["role"] for turn in one.record()["messages"]] == ["system", "user", "assistant"]


def test_a_first_answer_stays_when_the_second_question_does_not_end():
    one = writing("What is it?", second=1.0)
    told(one, ["It is that."])
    assert one.record()["messages"][-1] == {"role": "assistant", "content": "It is that."}
    assert not one.record()["cut"]


def test_an_answer_at_its_limit_is_marked_as_cut():
    one = writing("What is it?", answer=5, repeated=1.0)
    told(one, ["It is that."])
    record = one.record()
    assert record["cut"]
    assert record["messages"][-1]["content"] == "It is "


def test_a_question_longer_than_the_conversation_may_be_is_dropped():
    one = writing("What is it?" * 20, total=50)
    told(one, [])
    assert one.record() == {"number": 3, "kind": "a kind", "length": 50, "dropped": "empty"}


# ---- beginnings


@pytest.mark.slow
def test_beginnings_repeat_and_skip_the_numbers_that_are_there():
    pools = made.make_pools(None, "train")
    talk, tokenizer = TalkSettings(alone=0.5), chat_tokenizer()
    begun = list(islice(made.begin_conversations(pools, "train", talk, tokenizer, set()), 20))
    again = list(islice(made.begin_conversations(pools, "train", talk, tokenizer, {1, 2}), 3))
    assert again == [begun[0], begun[3], begun[4]]
    assert {one.user is None for one in begun} == {True, False}


@pytest.mark.slow
def test_no_function_of_the_training_part_is_asked_about_in_the_held_out_part():
    train, held_out = set(made.list_library_functions("train")), set(made.list_library_functions("held_out"))
    assert len(train) > 20
    assert len(held_out) > 5
    assert not train & held_out


# ---- the whole


def here(module, arguments, folder):
    """Runs the commands of mlx_zip and mlx-lm in this process, without workers: that spares starts of Python."""
    if module == "mlx_zip":
        return cli.main([*arguments, *(["--workers", "1"] if arguments[0] == "prepare" else [])])
    with mock.patch.object(sys, "argv", list(arguments)):
        import_module(f"{module}.{arguments[0]}").main()
    return 0


class TrainedHere:
    """Stands for a process that trains: runs its command in this process, at once, and writes its output to its log."""

    def __init__(self, command, *, stdout, stderr, **options):
        assert command[:3] == [sys.executable, "-m", "mlx_zip"]
        assert stdout is stderr
        log = io.TextIOWrapper(stdout, encoding="utf-8", write_through=True)
        with redirect_stdout(log), redirect_stderr(log):
            self._status = cli.main(command[3:])
        log.detach()

    def wait(self):
        return self._status


@pytest.fixture
def trained_here(monkeypatch):
    """Trains in this process, which spares starts of PyTorch; one test below has the processes."""
    monkeypatch.setattr(training.subprocess, "Popen", TrainedHere)


def make_run(out):
    """Writes a tiny model to out/model and runs the whole recipe at small size in out/run."""
    folder, _ = chat_model(out / "model")
    with (
        mock.patch.object(training.subprocess, "Popen", TrainedHere),
        mock.patch.object(frontier, "_measure_step_s", return_value=0.25),  # times are taken on quiet machines only
    ):
        main.run_stages(main.Recipe(SMALL, folder, out / "run", call=here))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder that `make_run` has filled; no test may change it."""
    return once(tmp_path_factory, "smollm2", make_run)


@pytest.fixture(scope="module")
def run(small):
    """The folder of a finished small run."""
    return small / "run"


@pytest.fixture
def own_run(small, tmp_path, monkeypatch):
    """A copy of the run, and the words that name it; the recipe's commands run in this process."""
    monkeypatch.setattr(main, "Recipe", partial(main.Recipe, call=here))
    out = Path(copytree(small / "run", tmp_path / "run"))
    return out, ["--model", str(small / "model"), "--out", str(out), "--small"]


def lines(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.mark.slow
def test_the_small_run_samples_as_much_as_was_asked(run):
    for part in ("train", "held_out"):
        records = lines(run / "sampled" / f"{part}.jsonl")
        assert sum(one["length"] for one in records if "messages" in one) >= getattr(SMALL.talk, part)
        kept = lines(run / "data" / part / "chat.jsonl") + lines(run / "data" / part / "chat_cut.jsonl")
        assert len(kept) == len([one for one in records if "messages" in one])


@pytest.mark.slow
def test_the_small_run_learns_a_pack_of_each_domain_and_of_all(run):
    packs = {file.stem: load_pack(file) for file in (run / "packs").glob("*.npz")}
    assert packs.keys() == {"chat", "code", "mixed"}
    assert all(2 <= len(pack.entries) <= SMALL.packs.size for pack in packs.values())
    assert packs["mixed"].entries != packs["code"].entries


def test_the_mixed_pack_is_learned_from_the_mixture(tmp_path):
    for part in ("train", "held_out"):
        for name in ("chat", "chat_cut", "code"):
            file = tmp_path / "data" / part / f"{name}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{}\n")
    (tmp_path / "data" / "README.md").touch()
    asked = []
    recipe = main.Recipe(SMALL, tmp_path / "model", tmp_path, call=lambda *call: asked.append(call) or 0)
    main.make_packs(recipe)
    words = {Path(call[1][call[1].index("--out") + 1]).stem: call[1] for call in asked}
    assert {*words} == {"chat", "code", "mixed"}
    assert words["mixed"][words["mixed"].index("--mixture") + 1] == str(tmp_path / "packs" / "mixed.yaml")
    assert "--mixture" not in words["chat"]
    mixture = yaml.safe_load((tmp_path / "packs" / "mixed.yaml").read_text())
    assert [source["share"] for source in mixture["sources"]] == [0.5, 0.5]
    assert [len(source["data"]) for source in mixture["sources"]] == [2, 1]  # chat with its cut conversations


@pytest.mark.slow
def test_the_small_run_trains_the_model_and_its_control_in_legs(own_run):
    run, named_by = own_run
    for name, files in (("zip", 5), ("control", 2)):
        assert len(list((run / "leg-1" / name / "adapter").iterdir())) == files
    assert read_json_object(run / "leg-1" / "data" / "control" / "index.json")["codec"]["codebook_size"] == 0
    words = ["train", *named_by, "--leg", "2"]  # by processes, as the recipe's user has them
    assert main.main(words) == 0
    record = read_json_object(run / "leg-2" / "zip" / "train.json")
    assert record["fixed"]["init_from"] == hash_trained_weights(run / "leg-1" / "zip")
    log = (run / "leg-2" / "zip.log").read_bytes()
    assert main.main(words) == 0  # nothing is left to do
    assert (run / "leg-2" / "zip.log").read_bytes() == log


@pytest.mark.slow
def test_the_small_run_is_measured_against_its_control_and_its_base(run):
    measured = run / "leg-1" / "measured"
    bits = read_json_object(measured / "bits-code.json")["models"]
    assert [Path(one["model"]).name for one in bits] == ["model", "control", "masked", "zip"]
    assert [one["text"]["base_ids_per_id"] > 1 for one in bits] == [False, False, False, True]
    assert bits[1]["text"]["bits_per_byte"] != bits[0]["text"]["bits_per_byte"] != bits[2]["text"]["bits_per_byte"]
    (packed,) = read_json_object(measured / "bits-chat-pack.json")["models"]
    assert packed["text"]["bytes"] == read_json_object(measured / "bits-chat.json")["models"][3]["text"]["bytes"]
    rates = read_json_object(measured / "rates.json")["models"]
    assert [one["generation"]["stories"] for one in rates] == [len(lines(measured / "requests.jsonl"))] * 3
    assert rates[2]["generation"]["invalid_ids"] == 0
    record = {line["part"]: line for line in lines(measured / "record.jsonl")}
    assert {*record} == {"curve", "bits-chat", "bits-code", "bits-chat-pack", "rates"}
    assert [len(record["curve"][name]) for name in ("zip", "control")] == [SMALL.legs[0].iters] * 2
    assert {*record["bits-code"]["models"]} == {"base", "control", "masked", "zip"}
    assert str(run.parent) not in (measured / "record.jsonl").read_text()


@pytest.mark.slow
def test_the_frontier_has_a_point_of_every_model_and_pack(run):
    points = read_json_object(run / "leg-1" / "frontier" / "points.json")["points"]
    named = [(one["model"], one["pack"]) for one in points]
    assert named == [("base", None), ("control", None), ("layers-1 healed", None), ("zip", None), ("zip", "chat")]
    assert [one["step_s"] for one in points] == [0.25] * 5
    assert len({one["bits_per_byte"] for one in points}) == 5
    assert points[3]["ids_per_byte"] < points[0]["ids_per_byte"] == points[1]["ids_per_byte"]


def test_the_layers_that_change_least_are_dropped(base, tmp_path):
    weights = load_file(base[0] / "model.safetensors")
    layers = read_json_object(base[0] / "config.json")["num_hidden_layers"]
    assert len(frontier.measure_layer_distances(base[0], ["one text", "and another"], 1)) == layers
    frontier.drop_layers(base[0], 0, 1, tmp_path / "cut")
    cut = load_file(tmp_path / "cut" / "model.safetensors")
    name = "self_attn.q_proj.weight"
    assert torch.equal(cut[f"model.layers.0.{name}"], weights[f"model.layers.1.{name}"])
    assert read_json_object(tmp_path / "cut" / "config.json")["num_hidden_layers"] == layers - 1
    assert f"model.layers.{layers - 1}.{name}" not in cut


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """A folder with the data sets of classes, eight examples of each."""
    folder = tmp_path_factory.mktemp("cls")
    for task in labels.LABEL_TASKS:
        texts = [(f"A text\u2028of class {n % len(task.words)}.", n % len(task.words)) for n in range(8)]
        one = "{}\t{}" if ".tsv" in task.file else '{{"text": "{}", "label": {}}}'
        with gzip.open(folder / task.file, "wt") as file:
            file.write("".join(one.format(*text) + "\n" for text in texts))
    return folder


@pytest.mark.slow
def test_labels_are_compared_by_example_with_the_control(small, run, classes):
    models = {name: run / "leg-1" / "models" / name for name in ("control", "zip")} | {"base": small / "model"}
    found = labels.measure_labels(models, "control", classes, 4, 6)
    assert found["examples"] == {"agnews": 4, "sst2": 4, "imdb": 4}
    accuracies = {name: [one["accuracy"] for one in tasks.values()] for name, tasks in found["models"].items()}
    for name, (*each, together) in accuracies.items():
        assert together == pytest.approx(np.mean(each))
        expected = together - accuracies["control"][-1]
        assert found["models"][name]["all"].get("difference", 0) == pytest.approx(expected)


def test_examples_are_taken_at_even_distances_and_a_class_that_does_not_exist_is_refused(classes, tmp_path):
    assert [label for _, label in labels.read_examples(labels.LABEL_TASKS[1], classes, 3)] == [
        0,
        1,
        1,
    ]  # of 0 1 0 1 0 1 0 1
    with gzip.open(tmp_path / labels.LABEL_TASKS[1].file, "wt") as file:
        file.write("text\t7\n")
    with pytest.raises(DataError, match="there is no class 7"):
        labels.read_examples(labels.LABEL_TASKS[1], tmp_path, 3)


def test_labels_that_begin_alike_are_refused(base):
    with pytest.raises(DataError, match="different ids"):
        labels.first_label_ids(load_tokenizer(base[0]), ("same", "same"))


@pytest.mark.slow
def test_the_adapter_is_shipped_with_the_bases_name_and_its_own_weights(run):
    shipped, trained = run / "leg-1" / "adapter", run / "leg-1" / "zip" / "adapter"
    assert {file.name for file in shipped.iterdir()} == {file.name for file in trained.iterdir()}
    assert all(str(run.parent) not in file.read_text() for file in shipped.glob("*.json"))
    assert all(read_json_object(file)["base_model_name_or_path"] == named.HUB for file in shipped.glob("*.json"))
    weights = "adapter_model.safetensors"
    assert (shipped / weights).read_bytes() == (trained / weights).read_bytes()
    ours, theirs = (read_json_object(folder / "zip2zip_config.json") for folder in (shipped, trained))
    size = len(ours["start"]) + SMALL.packs.shipped_growth
    assert ours["compression"]["max_codebook_size"] == size < theirs["compression"]["max_codebook_size"]
    assert (
        read_json_object(run / "leg-1" / "models" / "zip" / "config.json")["zip2zip"]["compression"][
            "max_codebook_size"
        ]
        == size
    )


@pytest.mark.slow
def test_a_leg_that_was_measured_with_another_codebook_is_refused(own_run, capsys):
    run, named_by = own_run
    config = read_json_object(run / "leg-1" / "models" / "zip" / "config.json")
    config["zip2zip"]["compression"]["max_codebook_size"] += 1
    (run / "leg-1" / "models" / "zip" / "config.json").write_text(json.dumps(config))
    assert main.main(["measure", *named_by, "--leg", "1"]) == 2
    assert "was measured with" in capsys.readouterr().err


@pytest.mark.slow
def test_a_leg_that_fails_names_its_log(own_run, trained_here, capsys):
    run, named_by = own_run
    copytree(run / "leg-1" / "zip" / "adapter", run / "leg-3" / "zip" / "adapter")
    assert main.main(["train", *named_by, "--leg", "4"]) == 2
    assert "zip.log" in capsys.readouterr().err
    assert "no checkpoint" in (run / "leg-4" / "zip.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["packs", "--out", "new"], "run the stage data first"),
        (["train", "--out", "new"], "run the stage packs first"),
        (["train", "--out", "run", "--leg", "3"], "train leg 2 first"),
        (["measure", "--out", "new"], "run the stage train first"),
        (["frontier", "--out", "new"], "run the stage measure first"),
        (["packs", "--out", ""], "--out names no folder"),
        (["packs", "--out", "run", "--model", "new"], "name a model folder with --model"),
    ],
)
def test_a_stage_says_what_has_to_be_done_before(own_run, monkeypatch, capsys, words, said):
    run, (_, model, *_) = own_run
    monkeypatch.chdir(run.parent)
    assert main.main(["--small", "--model", model, *words]) == 2
    assert said in capsys.readouterr().err
    assert not (run.parent / "new").exists()


@pytest.mark.slow
def test_the_card_names_every_file_and_licence(run):
    card = (run / "data" / "README.md").read_text()
    for file in (run / "data").glob("*/*.jsonl"):
        assert f"| {file.parent.name}/{file.name} | {len(lines(file))} |" in card
    assert "PSF-2.0" in card
    assert "Apache-2.0" in card


@pytest.mark.slow
def test_a_pack_that_cannot_be_learned_is_named(own_run):
    run, _ = own_run
    (run / "packs" / "code.npz").unlink()
    with pytest.raises(TrainingError, match=r"exit status 2 of: mlx_zip vocab pack learn .*code\.npz"):
        main.run_stages(main.Recipe(SMALL, run, run, call=lambda *_: 2), ["packs"])


@pytest.mark.slow
def test_legs_are_numbered_from_1(own_run, capsys):
    assert main.main(["train", *own_run[1], "--leg", "0"]) == 2
    assert "--leg must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(("engine", "flag"), [("torch-base", "--base"), ("torch-zip", "--model")])
def test_a_step_is_timed_by_the_command_that_times_engines(engine, flag, tmp_path):
    def timed(module, words, folder):
        parser = Parser()
        generate.add_arguments(parser)
        add_record_flag(parser)
        args = parser.parse_args(words[2:])
        assert (args.engines, getattr(args, flag[2:])) == ([engine], str(tmp_path / "plain"))
        (tmp_path / "leg-1" / "frontier").mkdir(parents=True)
        Path(args.record).write_text('{"figures": {"step_ms": {"median": 20}}}\n')
        return 0

    recipe = main.Recipe(SMALL, tmp_path / "base", tmp_path, call=timed)
    step = frontier._measure_step_s(recipe, tmp_path / "plain", engine)
    assert step == 0.02


@pytest.mark.slow
def test_sampling_goes_on_where_it_was_stopped(base, tmp_path):
    folder, _ = base
    file, talk = tmp_path / "train.jsonl", replace(SMALL.talk, train=300)
    pools = {"questions": made.RequestPool(["What is it?"], ("{}",), ("general",), 1.0)}
    arguments = (folder, load_tokenizer(folder), pools, "train")
    made.sample_conversations(*arguments, talk, file)
    before = lines(file)
    with open(file, "a", encoding="utf-8") as out:
        out.write('{"number": 99, "mess')  # the process was killed here
    made.sample_conversations(*arguments, replace(talk, train=700), file)
    after = lines(file)
    assert after[: len(before)] == before
    assert len({one["number"] for one in after}) == len(after)
    assert sum(one["length"] for one in after if "messages" in one) >= 700


def test_a_repeated_question_is_left_out_and_a_cut_answer_gets_no_end(tmp_path):
    turns = [("system", "Be kind."), ("user", "Why?"), ("assistant", "Because")]
    messages = [{"role": role, "content": text} for role, text in turns]
    records = [
        {"number": 0, "kind": "tasks", "length": 9, "messages": messages, "cut": True},
        {"number": 1, "kind": "tasks", "length": 9, "messages": messages, "cut": False},
        {"number": 2, "kind": "tasks", "length": 9, "dropped": "empty"},
    ]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    made.write_chat_files(tmp_path / "all.jsonl", tmp_path / "train", set())
    assert lines(tmp_path / "train" / "chat.jsonl") == []
    (cut,) = lines(tmp_path / "train" / "chat_cut.jsonl")
    assert cut["text"].endswith("<|im_end|>\n<|im_start|>assistant\nBecause")
    assert cut["licence"] == "Apache-2.0 and CC BY 4.0"


@pytest.mark.parametrize(("line", "reason"), [("no JSON", ""), ("9" * 5000, ".* 5000 digits; delete")])
def test_a_file_that_holds_other_lines_is_refused(tmp_path, line, reason):
    (tmp_path / "train.jsonl").write_text(f"{line}\n")
    with pytest.raises(DataError, match=rf"train\.jsonl holds a line that is no JSON: {reason}"):
        made.read_records(tmp_path / "train.jsonl")


def test_an_unknown_stage_is_named(base, tmp_path, capsys):
    words = ["--model", str(base[0]), "--out", str(tmp_path)]
    assert main.main(["cook", "--small", *words]) == 2
    assert "cook is none of the stages data, packs" in capsys.readouterr().err
    assert main.main(["data", *words]) == 2
    assert capsys.readouterr().err == "error: --shared names no folder of data sets, which only --small does without\n"
