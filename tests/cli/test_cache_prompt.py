"""`mlx_zip cache-prompt` and `mlx_zip sessions`."""

import json
import shutil
import stat

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache, load_prompt_cache

from mlx_zip import cli
from mlx_zip.engine.mlx.generate import load, stream_generate
from mlx_zip.engine.sessions.mlx_caches import open_session_store
from mlx_zip.models.rows.zip_state import find_zip_state
from support import tiny_text
from support.cli_cases import MODEL
from support.places import GOLDEN_MODELS

pytestmark = pytest.mark.usefixtures("home")
TEXT = "The cat sat on the mat. The cat sat on the mat."
PLAIN = GOLDEN_MODELS / MODEL / "base"


def cached(run, file, *flags, model=None):
    model = tiny_text.converted(MODEL) if model is None else model
    return run("cache-prompt", "--model", model, "--prompt", TEXT, "--prompt-cache-file", file, *flags)


@pytest.mark.parametrize("plain", [False, True])
def test_generate_goes_on_from_a_cached_prompt_as_from_the_whole_text(run, tmp_path, plain):
    file, model = tmp_path / "p.safetensors", PLAIN if plain else tiny_text.converted(MODEL)
    status, out, err = cached(run, file, model=model)
    assert (status, "Processed" in err) == (0, True)
    assert [line.split(":")[0] for line in out.splitlines()] == ["Peak memory", "Saving...", "Prompt"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    loaded, tokenizer = load(model)
    given, metadata = load_prompt_cache(str(file), return_metadata=True)
    assert metadata["model"] == str(model)
    flags = ("--ignore-chat-template", "-m", 12, "--json", "--prompt-cache-file", file, "--prompt", " The dog.")
    text = json.loads(run("generate", *flags)[1])["text"]
    responses = stream_generate(loaded, tokenizer, " The dog.", 12, prompt_cache=given)
    assert text == "".join(response.text for response in responses)


def test_a_server_finds_a_cached_prompt_by_its_base_ids(run, tmp_path):
    cached(run, tmp_path / "p.safetensors")
    model, tokenizer = load(tiny_text.converted(MODEL))
    store = open_session_store(model, tokenizer)
    info = store.load(tmp_path / "p.safetensors")
    state = find_zip_state(load_prompt_cache(str(tmp_path / "p.safetensors")))
    prompt = [*state.books[0].base_ids(0).tolist(), 5, 6]
    assert store.checkout(prompt, "").base_tokens == info.base_tokens == len(prompt) - 2


def test_a_cached_prompt_is_refused_when_the_models_rotary_settings_have_changed(run, tmp_path):
    file, model = tmp_path / "p.safetensors", tmp_path / "model"
    shutil.copytree(PLAIN, model)
    cached(run, file, model=model)
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 5e6}))
    _, _, err = run("generate", "--prompt-cache-file", file, "--prompt", "a", "-m", 1)
    assert "was made with another position mode, rotary setting or attention window" in err


def test_cuda_is_refused_with_what_to_do(run, tmp_path):
    status, _, err = cached(run, tmp_path / "p.safetensors", "--engine", "cuda")
    assert status
    assert err.count("\n") == 1
    assert "--engine cuda cannot be used" in err
    assert "mlx_zip serve --session-files" in err


@pytest.mark.parametrize("engine", ["mlx", "auto"])
def test_the_device_of_the_environment_is_used_with_each_engine(run, tmp_path, monkeypatch, engine):
    monkeypatch.setenv("MLX_ZIP_DEVICE", "tpu")
    status, _, err = cached(run, tmp_path / "p.safetensors", "--engine", engine)
    assert status
    assert "MLX_ZIP_DEVICE=tpu: it is one of cpu, gpu" in err


def test_a_cached_prompt_of_another_model_is_refused_by_a_server(run, tmp_path):
    cached(run, tmp_path / "p.safetensors")
    store = open_session_store(*load(PLAIN))
    with pytest.raises(Exception, match="another model than the one that is loaded"):
        store.load(tmp_path / "p.safetensors")


def test_the_kv_cache_of_a_cached_prompt_can_be_quantized(run, tmp_path):
    file = tmp_path / "p.safetensors"
    flags = ("--kv-bits", 8, "--kv-group-size", 32, "--quantized-kv-start", 0)
    assert cached(run, file, *flags, model="stories")[0] == 0
    assert load_prompt_cache(str(file))[0].keys[0].dtype == mx.uint32
    assert run("generate", "--prompt-cache-file", file, "--prompt", "x", "-m", 3, "--verbose", "F")[0] == 0


def test_the_kv_cache_of_a_plain_model_can_be_bounded(run, tmp_path):
    file = tmp_path / "p.safetensors"
    assert cached(run, file, "--max-kv-size", 8, model=PLAIN)[0] == 0
    given = load_prompt_cache(str(file))
    assert {(type(entry), entry.max_size, entry.keep) for entry in given} == {(RotatingKVCache, 8, 4)}
    flags = ("--ignore-chat-template", "-m", 12, "--json", "--prompt", " The dog.")
    went_on = json.loads(run("generate", *flags, "--prompt-cache-file", file)[1])["text"]
    loaded, tokenizer = load(PLAIN)
    assert went_on == "".join(
        one.text for one in stream_generate(loaded, tokenizer, " The dog.", 12, prompt_cache=given)
    )
    at_once = json.loads(run("generate", *flags, "--model", PLAIN, "--max-kv-size", 8)[1])["text"]
    bounded = stream_generate(loaded, tokenizer, " The dog.", 12, max_kv_size=8)
    assert at_once == "".join(one.text for one in bounded)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--max-kv-size", 8), "--max-kv-size cannot be used: a rotating KV cache"),
        (("--kv-bits", 7), "must be one of"),
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt-cache-file", "no/p.safetensors"), "no such folder"),
        (("--prompt-cache-file", f"{'p' * 240}.safetensors"), "cannot be written: File name too long"),
        (("--eos-token", "nix"), "--eos-token 'nix' is not a token of this tokenizer"),
        (("--prompt-cache-file", "p"), "p: a prompt cache is a .safetensors file"),
        (("--model", ""), "the name of the model is empty"),
    ],
)
def test_a_request_that_cannot_be_met_writes_nothing(run, tmp_path, monkeypatch, flags, reason):
    monkeypatch.chdir(tmp_path)
    status, _, err = cached(run, "p.safetensors", *flags)
    assert status == 2
    assert reason in err
    assert not list(tmp_path.rglob("*.safetensors"))


def test_sessions_lists_what_is_in_a_folder_and_purges_it(run, tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    cached(run, folder / f"{'a' * 16}.safetensors")
    (folder / f"{'b' * 16}.safetensors").write_bytes(b"x" * 100)
    status, out, _ = run("sessions", "list", folder)
    first, second, total = out.splitlines()
    assert status == 0
    assert first.split()[2:] == [str(tiny_text.converted(MODEL)), f"{'a' * 16}.safetensors"]
    assert "cannot be used: its header" in second
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert total == f"2 files, {size} bytes"
    assert run("sessions", "purge", folder)[1] == f"removed: 2 files, {size} bytes\n"
    assert not folder.exists()
    assert "No such file" in run("sessions", "list", folder)[2]


def test_sessions_lists_and_purges_the_shares_of_several_machines(run, tmp_path):
    share = tmp_path / "kept" / "machine-2-of-2"
    share.mkdir(parents=True)
    (share / f"{'b' * 16}.safetensors").write_bytes(b"x" * 100)
    assert f"machine-2-of-2/{'b' * 16}.safetensors" in run("sessions", "list", tmp_path / "kept")[1]
    assert run("sessions", "purge", tmp_path / "kept")[1] == "removed: 1 file, 100 bytes\n"
    assert not (tmp_path / "kept").exists()


def test_both_commands_are_listed():
    assert {"cache-prompt", "sessions"} <= cli.COMMANDS.keys()
