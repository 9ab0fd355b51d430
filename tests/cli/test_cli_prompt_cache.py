"""`mlx_zip generate` goes on from a saved prompt cache."""

import json
from pathlib import Path

import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from mlx_zip.engine.mlx.generate import load, stream_generate
from support import tiny_text
from support.cli_cases import MODEL, PROMPT, generate_command, raw
from support.places import GOLDEN_MODELS

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def model():
    return str(tiny_text.converted(MODEL))


@pytest.fixture
def run(capsys, model):
    return generate_command(capsys, model)


@pytest.fixture
def cache_file(tmp_path, model):
    loaded, tokenizer = load(model)
    cache = loaded.make_cache()
    list(stream_generate(loaded, tokenizer, PROMPT, prompt_cache=cache, max_tokens=1))
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, cache, {"model": model, "tokenizer_config": "{}"})
    return file


def test_a_saved_cache_brings_its_model_and_the_prompt_goes_on_from_it(run, cache_file, model):
    loaded, tokenizer = load(model)
    responses = stream_generate(
        loaded, tokenizer, " The dog.", prompt_cache=load_prompt_cache(cache_file), max_tokens=20
    )
    flags = ("--prompt", " The dog.", "--ignore-chat-template", "-m", 20, "--verbose", "F")
    assert run(*flags, "--prompt-cache-file", cache_file, name=None)[1] == "".join(r.text for r in responses) + "\n"


def test_with_a_saved_cache_only_the_message_and_what_follows_it_is_read(run, cache_file):
    whole = json.loads(run("--prompt", "a", "-m", 1, "--json")[1])
    rest = json.loads(run("--prompt", "a", "-m", 1, "--json", "--prompt-cache-file", cache_file)[1])
    assert rest["prompt_tokens"] < whole["prompt_tokens"]


def test_generating_does_not_change_the_cache_file(run, cache_file):
    before = Path(cache_file).read_bytes()
    run(*raw("--prompt-cache-file", cache_file))
    assert Path(cache_file).read_bytes() == before


def test_another_model_than_the_caches_is_refused(run, cache_file):
    base = str(GOLDEN_MODELS / MODEL / "base")
    assert "is not the model that made the prompt cache" in run("--prompt-cache-file", cache_file, name=base)[2]


def test_a_file_that_is_no_cache_is_refused(run, tmp_path):
    (tmp_path / "x").write_bytes(b"\x00" * 100)
    status, _, err = run("--prompt-cache-file", tmp_path / "x")
    assert (status, "is not a saved prompt cache" in err) == (2, True)
