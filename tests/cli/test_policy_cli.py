"""Policies of a full codebook on the command line: chosen, recorded, and told where a model with one cannot go."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_zip import load
from mlx_zip.cli import compression, main
from mlx_zip.codec import Codebook, CodecParams, compress
from mlx_zip.codec.params import POLICIES
from mlx_zip.converters import cli as conversion
from support.checkpoints import write_json
from support.converting import config_of, convert
from support.places import GOLDEN_MODELS
from support.tiny_training import write_shards

CHECKPOINT = GOLDEN_MODELS / "llama_transformer_untied_pos"
TURNS = ["lru", "use-count"]
SMALL = 4  # slots, so that a short text fills the codebook


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(CHECKPOINT, tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def turning(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(converted, tmp_path_factory.mktemp("turning") / "model", policy="lru")


def run(capsys: Any, *words: object) -> tuple[int, str, str]:
    status = main([*map(str, words)])
    return status, *capsys.readouterr()


@pytest.mark.parametrize("module", [conversion, compression])
def test_the_policies_offered_are_the_codecs(module: Any) -> None:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    assert next(list(a.choices) for a in parser._actions if a.dest == "policy" and a.choices) == list(POLICIES)


# ---- convert


@pytest.mark.parametrize("policy", TURNS)
def test_convert_records_the_policy_and_gives_it_up_again(policy: str, converted: Path, tmp_path: Path, capsys: Any):
    status, out, _ = run(capsys, "convert", "--hf-path", converted, "--mlx-path", tmp_path / "a", "--policy", policy)
    assert (status, out) == (0, f"{tmp_path / 'a'}\n")
    assert config_of(tmp_path / "a")["zip2zip"]["compression"]["policy"] == policy
    assert load(str(tmp_path / "a"))[0].config.codec_params.policy == policy
    kept = convert(tmp_path / "a", tmp_path / "b", quantize=True, q_group_size=32)
    assert config_of(kept)["zip2zip"]["compression"]["policy"] == policy
    assert config_of(convert(tmp_path / "a", tmp_path / "c", policy="freeze")) == config_of(converted)


@pytest.mark.parametrize("first", [{}, {"canonical": True}])
def test_canonical_decoding_and_another_policy_do_not_go_together(first: Any, tmp_path: Path, capsys: Any) -> None:
    made = convert(CHECKPOINT, tmp_path / "made", **first)
    flags = [] if first else ["--canonical"]
    status, out, err = run(
        capsys, "convert", "--hf-path", made, "--mlx-path", tmp_path / "out", "--policy", "lru", *flags
    )
    assert (status, out) == (2, "")
    assert "canonical decoding needs policy freeze, not lru" in err
    assert not (tmp_path / "out").exists()


# ---- commands that run such a model


def small(folder: Path, out: Path) -> Path:
    """The same model with so few slots that entries leave."""
    config = config_of(folder)
    config["zip2zip"]["compression"]["max_codebook_size"] = SMALL
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).symlink_to(file)
    (out / "config.json").unlink()
    write_json(out / "config.json", config)
    return out


TEXT = "the cat sat on the mat and the cat and the dog sat on the mat by the cat and the dog " * 4


def test_generate_goes_on_past_a_full_codebook(turning: Path, tmp_path: Path, capsys: Any) -> None:
    model = small(turning, tmp_path / "small")
    words = ["generate", "--model", model, "--prompt", TEXT, "--max-tokens", 24, "--json", "--ignore-chat-template"]
    status, out, err = run(capsys, *words)
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert told["codebook_size"] == SMALL
    params = load(str(model))[0].config.codec_params
    base_ids = load(str(model))[1].encode(TEXT)
    book = Codebook(params)
    came = book.push(compress(params, np.array(base_ids, np.uint32))[0])
    assert told["prompt_tokens"] == len(base_ids)
    assert told["prompt_ids"] == book.mark()
    assert len(came) > len(book) == SMALL


def test_evaluate_scores_and_generates_with_it(turning: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    model = small(turning, tmp_path / "small")
    words = [
        "evaluate",
        "--model",
        model,
        "--data",
        tmp_path / "text.txt",
        "--generate",
        1,
        "--opening",
        8,
        "--max-tokens",
        8,
        "--out",
        tmp_path / "report.json",
    ]
    assert run(capsys, *words)[0] == 0
    (row,) = json.loads((tmp_path / "report.json").read_text())["models"]
    assert row["text"]["ids"] < row["text"]["base_ids"]
    assert row["generation"]["invalid_ids"] == 0


def test_a_saved_cache_of_another_policy_is_refused(converted: Path, turning: Path, tmp_path: Path, capsys: Any):
    from mlx_lm.models.cache import save_prompt_cache

    from mlx_zip import generate

    model, tokenizer = load(str(turning))
    cache = model.make_cache()
    generate(model, tokenizer, TEXT, max_tokens=4, prompt_cache=cache)
    save_prompt_cache(str(tmp_path / "c.safetensors"), cache, {"model": str(turning), "tokenizer_config": "{}"})
    words = ["generate", "--prompt", "the dog", "--max-tokens", 4, "--prompt-cache-file", tmp_path / "c.safetensors"]
    assert run(capsys, *words, "--model", turning)[0] == 0
    status, _, err = run(capsys, *words, "--model", converted)
    assert status == 2
    assert err.startswith("error: ")


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--data", "DATA", "--out", "OUT", "--iters", "1"],
        ["prepare", "--data", "TEXT", "--out", "OUT"],
        ["vocab", "pack", "learn", "--data", "TEXT", "--out", "OUT.npz"],
    ],
)
def test_what_cannot_have_it_says_so_in_one_line(command: list[str], turning: Path, tmp_path: Path, capsys: Any):
    (tmp_path / "text.txt").write_text(TEXT)
    params = load(str(turning))[0].config.codec_params
    own = CodecParams(params.vocab_size, params.codebook_size, params.merge_size, params.disabled_ids, params.pad_id)
    write_shards(tmp_path / "data", own, samples=2)
    places = {"DATA": "data", "TEXT": "text.txt", "OUT": "out", "OUT.npz": "out.npz"}
    words = [tmp_path / places[word] if word in places else word for word in command]
    status, out, err = run(capsys, *words, "--model", turning)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "the model's codebook has the policy 'lru'" in err
    assert "mlx_zip convert --policy freeze" in err
    assert not list(tmp_path.glob("out*"))


# ---- commands that make codebooks of their own


@pytest.mark.parametrize("policy", POLICIES)
def test_compress_compresses_by_the_policy(policy: str, converted: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["compress", tmp_path / "text.txt", "--tokenizer", converted, "--codebook-size", SMALL, "--json"]
    told = json.loads(run(capsys, *words, "--policy", policy)[1])
    model, tokenizer = load(str(converted))
    own = model.config.codec_params
    params = CodecParams(own.vocab_size, SMALL, own.merge_size, own.disabled_ids, own.pad_id, policy=policy)
    ids, _ = compress(params, np.array(tokenizer.encode(TEXT, add_special_tokens=False), np.uint32))
    assert (told["ids"], told["policy"]) == (len(ids), policy)
    assert told["entries"] == len(Codebook(params).push(ids))


def test_compress_has_the_policy_of_a_converted_model(turning: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["compress", tmp_path / "text.txt", "--tokenizer", turning, "--json"]
    assert json.loads(run(capsys, *words)[1])["policy"] == "lru"
    assert json.loads(run(capsys, *words, "--policy", "freeze")[1])["policy"] == "freeze"
