"""The bundled models: found by name, the default of `mlx_zip generate`, small, and able to tell a story."""

import functools
import json
import tomllib
from pathlib import Path

import pytest

from mlx_zip import cli, named
from mlx_zip.engine.mlx.generate import load, stream_generate
from mlx_zip.errors import ModelError
from mlx_zip.models.model_folder import DRAFT_HEAD, find_model_folder
from mlx_zip.named import bundled_model_folder
from support.places import REPO

MOST_BYTES, MOST_HEAD_BYTES = 12_000_000, 1_000_000  # of both models, and of the draft head besides
ASKED = (
    ("cat", "ball"),
    ("frog", "pond"),
    ("girl", "kite"),
    ("bird", "tree"),
    ("boy", "boat"),
    ("bear", "cake"),
    ("dog", "bone"),
    ("fish", "river"),
    ("rabbit", "carrot"),
    ("duck", "pond"),
    ("dragon", "castle"),
    ("mouse", "cheese"),
)
there = pytest.mark.skipif(not named.FOLDER.is_dir(), reason="the bundled models are not in this tree (make model)")


@pytest.fixture
def empty(monkeypatch, tmp_path):
    """An installation without the bundle."""
    (tmp_path / "bundle").mkdir()
    monkeypatch.setattr(named, "FOLDER", tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def stories(empty):
    """One bundled model, as far as a look at its config.json goes -> its folder."""
    (empty / "stories").mkdir()
    (empty / "stories/config.json").write_text('{"model_type": "llama"}')
    return empty / "stories"


@pytest.fixture
def parsed(monkeypatch):
    """What `mlx_zip generate` asks for -> (model, prompt, max_tokens); nothing is loaded."""

    def parse(*flags):
        from mlx_zip.cli import generation

        seen = []

        def read(prompt):
            seen.append(prompt)
            raise ModelError("far enough")

        monkeypatch.setattr(generation, "read_prompt", read)
        args = cli.command_parser("generate", "x").parse_args([*flags, "--engine", "mlx"])
        with pytest.raises(ModelError):
            generation.run(args)
        return args.model, seen[0], args.max_tokens

    return parse


def test_a_missing_bundle_is_a_clear_error(empty):
    with pytest.raises(ModelError, match="the bundled model stories is not in this installation; name a model"):
        bundled_model_folder("stories")


def test_an_unknown_name_is_no_bundled_model(empty):
    with pytest.raises(ModelError, match="tales is not a bundled model; there are stories, stories-base"):
        bundled_model_folder("tales")


def test_a_model_is_found_by_its_bundled_name(stories):
    assert find_model_folder("stories") == stories


def test_a_model_of_that_name_in_this_folder_goes_before_the_bundled_one(stories, monkeypatch, tmp_path):
    (tmp_path / "here/stories").mkdir(parents=True)
    (tmp_path / "here/stories/config.json").write_text('{"model_type": "llama"}')
    monkeypatch.chdir(tmp_path / "here")
    assert find_model_folder("stories") == Path("stories")


def test_a_folder_of_that_name_without_a_model_is_passed_over(stories, monkeypatch, tmp_path):
    (tmp_path / "here/stories").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert find_model_folder("stories") == stories


def test_a_bundled_model_has_no_revision(stories):
    with pytest.raises(ModelError, match="stories is a folder, so revision"):
        find_model_folder("stories", "main")


def test_without_flags_the_bundled_model_tells_a_whole_story(parsed, stories):
    assert parsed() == (str(stories), named.PROMPT, named.MAX_TOKENS)


def test_flags_go_before_the_bundled_models_own(parsed, stories):
    assert parsed("--prompt", "hello", "-m", "100") == (str(stories), "hello", 100)


def test_another_model_keeps_mlx_lms_defaults(parsed):
    assert parsed("--model", "other") == ("other", "hello", 100)


def test_the_wheel_takes_the_bundle_along():
    data = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["mlx_zip"]
    assert {"bundle/*", "bundle/*/*"} <= set(data)


@there
def test_a_bundled_model_is_exported_by_its_name(tmp_path):
    command = ["export", "--model", "stories", "--out", str(tmp_path / "out")]
    assert cli.main(command) == 2  # the format has no place for its pack
    assert cli.main([*command, "--drop-start"]) == 0
    assert (tmp_path / "out/zip2zip_config.json").is_file()


@there
def test_the_bundle_is_small():
    files = [file for name in named.BUNDLED for file in (named.FOLDER / name).rglob("*")]
    heads = sum(file.stat().st_size for file in files if file.name == DRAFT_HEAD)
    assert sum(file.stat().st_size for file in files) - heads <= MOST_BYTES
    assert 0 < heads <= MOST_HEAD_BYTES


@functools.cache
def loaded(name):
    return load(name)


@functools.cache
def first_story(name):
    """The steps of a bundled model's story for the bundled prompt, once for the tests that look at it."""
    request = [{"role": "user", "content": named.PROMPT}]
    return list(stream_generate(*loaded(name), request, max_tokens=700))


@pytest.mark.slow
@there
@pytest.mark.parametrize("name", named.BUNDLED)
def test_a_bundled_model_ends_its_story_by_itself(name):
    last = first_story(name)[-1]
    assert last.finish_reason == "stop"
    assert last.generation_tokens > 50


@there
def test_the_bundled_models_story_is_about_what_was_asked_for(capsys):
    assert cli.main(["generate", "--verbose", "False"]) == 0
    told = capsys.readouterr().out.lower()
    assert "boy" in told
    assert "boat" in told


@pytest.mark.slow
@there
def test_most_of_what_is_asked_for_stands_in_the_stories():
    model, tokenizer = loaded("stories")
    found = []
    for words in ASKED:
        request = [{"role": "user", "content": f"Tell me a story about a {words[0]} and a {words[1]}."}]
        told = ""
        for step in stream_generate(model, tokenizer, request, max_tokens=320):
            told += step.text.lower()
            if all(word in told for word in words):
                break  # the rest of the story can only hold them again
        found += [word in told for word in words]
        if sum(found) > len(ASKED):
            break  # more than half of all words, whatever the other stories hold
    assert sum(found) > len(ASKED), dict(zip(ASKED, zip(found[::2], found[1::2], strict=True), strict=True))


@there
def test_the_bundled_model_begins_with_its_pack_whose_rows_are_at_hand():
    model = load("stories")[0]
    assert len(model.make_cache()[-1].books[0]) == len(model.row_source.pack.rows.output) == 1536


@there
def test_its_pack_is_not_in_the_way_of_others_nor_of_data_without(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the cat\n" * 40)
    model = ["--model", "stories", "--data", str(text)]
    learn = ["vocab", "pack", "learn", *model, "--merge-size", "3", "--codebook-size", "64", "--size", "8"]
    assert cli.main([*learn, "--out", str(tmp_path / "a.npz")]) == 0
    prepare = ["prepare", *model, "--workers", "1", "--empty-start"]
    assert cli.main([*prepare, "--out", str(tmp_path / "data")]) == 0
    assert json.loads((tmp_path / "data/index.json").read_text())["codec"].get("start") is None
    assert cli.main([*prepare, "--pack", str(tmp_path / "a.npz"), "--out", str(tmp_path / "other")]) == 2


@pytest.mark.slow
@there
def test_the_bundled_model_uses_hypertokens():
    first = first_story("stories")
    turns = [
        {"role": "user", "content": named.PROMPT},
        {"role": "assistant", "content": "".join(step.text for step in first)},
        {"role": "user", "content": "Another one, please."},
    ]
    second = list(stream_generate(*loaded("stories"), turns, max_tokens=700))
    assert min(story[-1].base_tokens_per_step for story in (first, second)) > 1.6
