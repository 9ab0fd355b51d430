"""The stories recipe from texts to bundle, on a toy corpus and at toy size, with the project's own commands."""

import contextlib
import gc
import importlib
import json
import shutil
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import takewhile

import pytest

from mlx_zip import cli
from mlx_zip.config import ZipConfig
from mlx_zip.engine.mlx.generate import generate, load
from mlx_zip.errors import DataError, GenerationError, TrainingError
from mlx_zip.packs.pack import load_pack
from recipes.stories import __main__ as main
from recipes.stories import packs, smaller
from recipes.stories.base import TRAIN_SETS
from recipes.stories.bundle import install_bundle, make_model_card
from recipes.stories.commands import Recipe, run_command
from recipes.stories.recipe import STAGES, run_stages
from recipes.stories.settings import TINY
from recipes.stories.texts import SOURCES
from support.stories_toy import corpus

pytestmark = pytest.mark.slow  # the recipe is made once, on a small scale, and takes ten seconds

LEARN = ["vocab", "pack", "learn"]
CONTROL_RUNS = [f"runs/{run}" for run in packs.list_runs(TINY.packs)[packs.CONTROL]]


@dataclass
class Here:
    """Runs commands in this process, which spares a dozen starts of Python, and keeps what it ran."""

    ran: list[str] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)

    def __call__(self, module, arguments, folder):
        self.calls.append(arguments)
        self.ran.append(arguments[0] if module == "mlx_zip" else module)
        with contextlib.chdir(folder):
            if module == "mlx_zip":
                return cli.main(arguments)
            convert = importlib.import_module("mlx_lm.convert")  # the package has a function of that name

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", ["mlx_lm.convert", *arguments])
                convert.main()
            return 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run -> (recipe, names of what it ran); `recipe.call.calls` has them with their flags."""
    folder, here = tmp_path_factory.mktemp("stories"), Here()
    recipe = Recipe(TINY, corpus(folder / "data"), folder / "out", check=False, call=here, say=lambda _: None)
    run_stages(recipe, [name for name in STAGES if name not in ("measure", "smaller")])
    gc.freeze()  # `evaluate` collects garbage before each model; the libraries' own objects are none
    run_stages(recipe)
    return recipe, here.ran


@pytest.fixture
def again(made, tmp_path):
    """A copy of the finished run -> (recipe, what it runs from now on)."""
    here, done = Here(), made[0]
    shutil.copytree(done.out, tmp_path / "out")
    return replace(done, out=tmp_path / "out", call=here), here.ran


def figures(recipe, name):
    return json.loads((recipe.out / "figures" / f"{name}.json").read_text())["models"]


def values(call, flag):
    """The words after a flag of a command."""
    return list(takewhile(lambda word: not word.startswith("--"), call[call.index(flag) + 1 :]))


def canonical_lines(file):
    return [json.dumps(json.loads(line), sort_keys=True) for line in file.read_text().splitlines()]


# ---- the whole of it


def test_the_whole_recipe_runs_by_the_projects_own_commands(made):
    assert set(made[1]) == {"prepare", "train", "vocab", "convert", "mlx_lm convert", "evaluate"}


def test_training_reads_no_test_story(made):
    files = ("train", "asked", "conversations", "t1.test")
    read = {name: (made[0].out / f"texts/{name}.jsonl").read_text() for name in files}
    texts = [json.loads(line)["text"] for line in read["t1.test"].splitlines()]
    others = [text for text in texts if json.dumps(text)[1:-1] not in read["train"]]
    talks = read["asked"] + read["conversations"]
    assert [text for text in others if json.dumps(text)[1:-1] in talks] == []
    assert others


def test_training_runs_on_training_windows_alone(made):
    calls = made[0].call.calls
    texts = {values(call, "--out")[0]: values(call, "--data") for call in calls if call[0] == "prepare"}
    trained = [folder for call in calls if call[0] == "train" for folder in values(call, "--data")]
    assert {text for folder in trained for text in texts[folder]} == {
        "texts/train.jsonl",
        "texts/asked.jsonl",
        "texts/conversations.jsonl",
        *(
            f"pack-texts/{prefix}{name}.jsonl"
            for prefix in ("", "more-", "asked-")
            for name in ("empty", "own", "drawn-0", "drawn-1")
        ),
    }


def test_texts_of_the_packs_are_training_texts_each_in_one_part_alone(made):
    out = made[0].out
    sources = (out / f"texts/{name}.jsonl" for name in ("train", "conversations", "asked"))
    known = Counter(line for source in sources for line in canonical_lines(source))
    cut = Counter(line for file in (out / "pack-texts").iterdir() for line in canonical_lines(file))
    assert sum(cut.values()) == sum(map(sum, (counts for _, counts in packs.list_text_parts(TINY.packs))))
    assert cut <= known


def test_every_pack_is_learned_from_a_part_of_its_own_and_trained_with_another(made):
    calls = made[0].call.calls
    learned = {values(call, "--out")[0]: values(call, "--data")[0] for call in calls if call[:3] == LEARN}
    prepared = [call for call in calls if call[0] == "prepare" and "--pack" in call]
    rounds = len(TINY.packs.rounds)
    assert len(prepared) == rounds * (len(TINY.packs.sizes) + 1) + 1  # the bundled one, also for validation
    for call in prepared:
        assert learned[values(call, "--pack")[0]] not in values(call, "--data")
    assert not {"packs/unseen-8.npz"} & {values(call, "--pack")[0] for call in prepared}


def test_the_bundled_model_begins_with_its_own_pack_and_brings_tuned_rows_of_it(made):
    out = made[0].out
    (bundled, _), (trained, _) = (load(out / name) for name in ("bundle/stories", "runs/asked-packed/model"))
    own = load_pack(out / "packs/own.npz")
    assert bundled.config.start == own.entries
    assert trained.config.start is None
    assert bundled.config.merge_size == trained.config.merge_size == 4
    assert bundled.row_source.pack.rows.fingerprint == load_pack(out / "packs/own-tuned.npz").rows.fingerprint


def test_a_file_is_read_as_often_as_the_settings_say(made):
    lines = (made[0].out / "texts/train.jsonl").read_text().splitlines()
    wanted = Counter()
    for name, times in (("t1.train", 3), ("mixed.train", 1), ("real.train", 3)):
        wanted.update(SOURCES[name].stories(made[0].data, check=False) * times)
    assert Counter(json.loads(line)["text"] for line in lines) == wanted


def test_the_base_first_learns_to_answer_one_request(made):
    lines = (made[0].out / "texts/asked.jsonl").read_text().splitlines()
    roles = [[message["role"] for message in json.loads(line)["messages"]] for line in lines]
    assert len(roles) == TINY.asked
    assert {tuple(of_one) for of_one in roles} == {("user", "assistant")}


def test_the_bundled_pair_is_a_zip2zip_model_and_a_plain_one(made):
    kinds = {
        name: json.loads((made[0].out / "bundle" / name / "config.json").read_text())["model_type"]
        for name in TINY.bundled
    }
    assert kinds == {"stories": "zip2zip", "stories-base": "llama"}
    tokenizer = load(made[0].out / "bundle" / "stories")[1]
    assert tokenizer.model_max_length == TINY.model["max_position_embeddings"]


def test_in_the_bundled_model_digits_never_merge_and_decoding_is_canonical(made):
    model, tokenizer = load(made[0].out / "bundle" / "stories")
    digits = set(tokenizer.convert_tokens_to_ids(list("0123456789"))) - {tokenizer.unk_token_id}
    assert isinstance(model.config, ZipConfig)
    assert len(digits) == 10
    assert digits <= set(model.config.disabled_ids)
    assert model.config.canonical


@pytest.mark.parametrize("name", TINY.bundled)
def test_a_bundled_model_generates(made, name):
    model, tokenizer = load(made[0].out / "bundle" / name)
    messages = [{"role": "user", "content": "Tell me a story."}]
    assert isinstance(generate(model, tokenizer, messages, max_tokens=8), str)


def test_the_bundled_zip2zip_model_has_a_draft_head_that_changes_nothing(made):
    model, tokenizer = load(made[0].out / "bundle" / "stories")
    messages = [{"role": "user", "content": "Tell me a story."}]
    answers = [generate(model, tokenizer, messages, max_tokens=24, temp=0.0, draft=draft) for draft in ("off", "head")]
    assert answers[0] == answers[1]
    with pytest.raises(GenerationError, match="no draft head"):
        generate(load(made[0].out / "bundle" / "stories-base")[0], tokenizer, messages, max_tokens=8, draft="head")


def test_the_bundle_says_what_it_is_made_of(made):
    texts = (made[0].out / "bundle" / "README.md").read_text().split("The texts:")[1]
    assert "other texts than the recorded ones" in texts
    assert "sha256" not in texts


def test_of_recorded_texts_the_bundle_names_those_it_was_trained_on():
    texts = make_model_card(TINY, checked=True).split("The texts:")[1]
    assert [name for name in SOURCES if SOURCES[name].sha256 in texts] == list(TRAIN_SETS)


def test_nothing_in_the_bundle_names_a_folder_of_this_machine(made):
    bundle = made[0].out / "bundle"
    files = [file for file in bundle.rglob("*") if file.is_file() and file.suffix in (".json", ".md", ".jinja")]
    assert [file.name for file in files if str(made[0].out.parent) in file.read_text(encoding="utf-8")] == []


def test_bits_per_byte_of_control_base_zip_and_bundle_are_measured_on_every_text(made):
    for text in ("t1.test", "t1.test-packed", "real.test"):
        models = figures(made[0], f"bits-{text}")
        assert models[0]["model"] == "runs/control/model"
        assert [model["kind"] for model in models] == ["plain", "plain", "zip2zip", "plain", "zip2zip"]
        assert all(model["text"]["bits_per_byte"] > 0 for model in models)


def test_control_and_zip_model_see_the_same_text(made):
    seen = {}
    packed, control = (runs[-1] for runs in packs.list_runs(TINY.packs).values())
    for name in ("zip", "control", packed, control):
        lines = (made[0].out / f"runs/{name}/metrics.jsonl").read_text().splitlines()
        seen[name] = [json.loads(line)["seen_base_ids"] for line in lines if "seen_base_ids" in line][-1]
    assert seen["zip"] == seen["control"]
    assert seen[packed] == pytest.approx(seen[control], rel=0.2)  # as many windows, in another order


def test_a_round_goes_on_where_the_one_before_it_ended_and_the_last_two_are_canonical(made):
    trained = {values(call, "--out")[0]: call for call in made[0].call.calls if call[0] == "train"}
    for name, first in ((packs.PACKED, "zip"), (packs.CONTROL, "control")):
        runs = packs.list_runs(TINY.packs)[name]
        starts = [values(trained[f"runs/{run}"], "--model")[0] for run in runs]
        assert starts == [f"runs/{run}/model" for run in (first, *runs[:-1])]
    configs = [load(made[0].out / f"runs/{run}/model")[0].config for run in packs.list_runs(TINY.packs)[packs.PACKED]]
    assert [config.canonical for config in configs] == [False, True, True]


# ---- smaller plain models


@pytest.mark.parametrize("engine", ["mlx", "torch"])
def test_a_smaller_model_is_trained_like_the_control_and_measured(engine, made, again, monkeypatch):
    if engine == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    recipe = replace(again[0], engine=engine)
    shape = {**smaller.SMALLER["1m"], "num_hidden_layers": 1, "intermediate_size": 64}
    monkeypatch.setattr(smaller, "SMALLER", {"1m": shape})
    run_stages(recipe, ["smaller"])
    config = json.loads((recipe.out / "smaller/quantized/1m/config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["quantization"]["bits"]) == ("llama", 128, 8)
    assert [model["kind"] for model in figures(recipe, "bits-smaller")] == ["plain"]
    whole, small = (
        {values(call, "--out")[0]: call for call in of.call.calls if call[0] == "train"} for of in (made[0], recipe)
    )
    assert list(small) == ["runs/base-short", "runs/base", "runs/control", *CONTROL_RUNS]
    chosen = [] if engine == "mlx" else ["--engine", engine]
    assert small == {run: [*whole[run], *chosen] for run in small}

    shutil.rmtree(recipe.out / "smaller/1m/runs/control")
    (recipe.out / smaller.BITS).unlink()
    recipe.call.ran.clear()
    run_stages(recipe, ["smaller"])
    assert recipe.call.ran == ["train", "mlx_lm convert", "evaluate"]


# ---- going on


def test_a_finished_recipe_runs_nothing_again(again):
    recipe, ran = again
    run_stages(recipe)
    assert ran == []


def test_what_is_missing_is_made_again_and_nothing_else(again):
    recipe, ran = again
    shutil.rmtree(recipe.out / "runs/control/model")
    run_stages(recipe)
    assert ran == ["train"]


def test_one_stage_can_be_asked_for(again):
    recipe, ran = again
    shutil.rmtree(recipe.out / "figures")
    shutil.rmtree(recipe.out / "bundle")
    run_stages(recipe, ["bundle"])
    assert ran == ["convert"]  # with its pack; the control is copied


def test_an_unknown_stage_is_named(again):
    with pytest.raises(DataError, match="--stage: cook is none of texts, tokenizer"):
        run_stages(again[0], ["cook"])


def test_other_settings_do_not_mix_into_the_same_folder(again):
    with pytest.raises(DataError, match="holds what other settings made"):
        run_stages(replace(again[0], settings=replace(TINY, seed=1)))


def test_what_nothing_says_the_origin_of_is_not_taken_over(again):
    (again[0].out / "recipe.json").unlink()
    with pytest.raises(DataError, match=r"has bundle, but no recipe\.json"):
        run_stages(again[0])


def test_a_folder_in_which_nothing_was_made_takes_other_settings(tmp_path):
    out = tmp_path / "out"
    for settings in (TINY, replace(TINY, seed=1)):
        with pytest.raises(DataError, match=r"none.*synth_t1"):
            run_stages(Recipe(settings, tmp_path / "none", out, call=Here(), say=lambda _: None), ["texts"])
    assert json.loads((out / "recipe.json").read_text())["settings"]["seed"] == 1


def test_a_record_of_depth_without_end_is_told(again):
    (again[0].out / "recipe.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"recipe\.json cannot be read"):
        run_stages(again[0])


def test_checked_and_unchecked_texts_do_not_mix_into_the_same_folder(again):
    with pytest.raises(DataError, match="was begun with --no-checksum; call it so"):
        run_stages(replace(again[0], check=True))


def test_a_command_that_fails_ends_the_recipe(again):
    recipe, _ = again
    shutil.rmtree(recipe.out / "runs/zip/model")
    failing = replace(recipe, call=lambda *_: 2)
    with pytest.raises(TrainingError, match="exit status 2 of: mlx_zip train "):
        run_stages(failing)


@pytest.mark.parametrize("status", [130, 143, -signal.SIGINT, -signal.SIGTERM])
def test_a_command_that_was_told_to_stop_stops_the_recipe(again, status):
    recipe, _ = again
    shutil.rmtree(recipe.out / "runs/zip/model")
    with pytest.raises(KeyboardInterrupt):
        run_stages(replace(recipe, call=lambda *_: status))


@pytest.mark.parametrize("status", [130, -signal.SIGTERM])
def test_a_single_command_that_was_told_to_stop_is_no_error_of_its_own(status, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_command(lambda *_: status, "mlx_zip", ["train"], tmp_path)


def test_installing_puts_the_whole_bundle_in_place(again, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    (place / "old").write_text("old")
    install_bundle(again[0], place)
    assert sorted(file.name for file in place.iterdir()) == ["README.md", "recipe.json", "stories", "stories-base"]


def test_without_a_bundle_nothing_is_installed(again, tmp_path):
    with pytest.raises(TrainingError, match="run the stage bundle first"):
        install_bundle(replace(again[0], out=tmp_path / "empty"), tmp_path / "place")
    assert not (tmp_path / "place").exists()


# ---- commands


def test_the_command_installs_what_it_made(made, monkeypatch, tmp_path):
    monkeypatch.setattr(main, "run_stages", lambda *_: None)
    monkeypatch.setattr("mlx_zip.named.FOLDER", tmp_path / "bundle")
    flags = ["--data", str(made[0].data), "--out", str(made[0].out), "--scale", "tiny", "--install"]
    assert main.main(flags) == 0
    assert (tmp_path / "bundle/stories/config.json").exists()
