"""Evaluation on PyTorch gives the figures that it gives on MLX: bits, greedy ids, probabilities, texts and rates."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama

torch = pytest.importorskip("torch")

from mlx_zip import cli  # noqa: E402
from mlx_zip.cuda import scorer  # noqa: E402
from mlx_zip.cuda.evaluation_model import EvaluatedModel, load_evaluated_model  # noqa: E402
from mlx_zip.cuda.model import open_model  # noqa: E402
from mlx_zip.engine.mlx.scoring import compress_row, score_rows  # noqa: E402
from mlx_zip.errors import DataError  # noqa: E402
from mlx_zip.evaluation.bits import measure_bits  # noqa: E402
from mlx_zip.evaluation.rates import RateSettings, measure_rates  # noqa: E402
from mlx_zip.packs.pack import Pack  # noqa: E402
from support import tiny, tiny_text  # noqa: E402
from support.evaluating import windows  # noqa: E402
from support.torch_folders import save, save_weights  # noqa: E402

START = ((5, 6), (7, 8, 9), tuple(tiny.base_ids(3, 1)))
SIZES = {"initial_vocab_size": 40, "max_codebook_size": 6, "max_subtokens": 4, "disabled_ids": [0, 1, 2]}
CASES = {
    "llama": ("llama", {}),
    "mistral window": ("mistral", {}),
    "tied qwen3": ("qwen3", {"tie_encoders": True}),
    "base positions": ("llama", {"position_mode": "base_token_end"}),
    "longrope": ("phi3", {}),
    "longrope base positions": ("phi3", {"position_mode": "base_token_end"}),
    "canonical": ("llama", {"canonical": True}),
    "start": ("llama", {"start": [list(entry) for entry in START]}),
    "start canonical": ("llama", {"start": [list(entry) for entry in START], "canonical": True}),
    "evictions": ("llama", {"compression": {**SIZES, "policy": "lru"}}),
    "full table": ("llama", {"compression": SIZES}),
}


def both(family, folder, **changes):
    """The same tiny model on MLX and on PyTorch."""
    mlx = tiny.tiny_model(family, "res_latent_attn", **changes)
    return mlx, EvaluatedModel(open_model(save(mlx, folder), "cpu"))


def assert_equal_scores(model, other, found, **options):
    expected, got = measure_bits(model, found, **options), measure_bits(other, found, **options)
    np.testing.assert_allclose(got.bits / got.n_bytes, expected.bits / expected.n_bytes, rtol=0, atol=2e-5)
    assert (got.ids, got.hypertokens) == (expected.ids, expected.hypertokens)
    assert got.hyper_mass == pytest.approx(expected.hyper_mass, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_mlx(case, tmp_path):
    family, changes = CASES[case]
    model, other = both(family, tmp_path / "m", **changes)
    assert_equal_scores(model, other, windows(70, 25, 33, 1))


@pytest.mark.parametrize("availability", ["causal", "legacy"])
def test_a_pack_may_be_given_and_all_entries_may_be_open_at_once(availability, tmp_path):
    model, other = both("llama", tmp_path / "m")
    # one row at a time: among others MLX also opens the entry of the last id of a row that is padded
    assert_equal_scores(model, other, windows(40, 50), pack=Pack(START), availability=availability, batch_size=1)


def test_a_plain_model_s_bits_are_those_of_mlx(tmp_path):
    mx.random.seed(0)
    config = {**tiny.tiny_config(), "model_type": "llama", "vocab_size": 40}
    del config["zip2zip"]
    model = llama.Model(llama.ModelArgs.from_dict(config))
    other = EvaluatedModel(open_model(save_weights(model, tmp_path / "m", config), "cpu"))
    assert_equal_scores(model, other, windows(40, 25, 33))


@pytest.mark.parametrize("logits", [1, 500])
def test_parts_small_enough_for_the_memory_give_the_same_scores(monkeypatch, logits, tmp_path):
    _, other = both("llama", tmp_path / "m", canonical=True)
    rows = [compress_row(other, np.array(tiny.base_ids(50, seed), np.uint32)) for seed in range(2)]
    expected = score_rows(other, rows)
    monkeypatch.setattr(scorer, "LOGITS", logits)
    monkeypatch.setattr(scorer, "CHUNK", 16)
    for one, before in zip(score_rows(other, rows), expected, strict=True):
        np.testing.assert_allclose(one.logprobs, before.logprobs, atol=1e-4)
        assert one.greedy.tolist() == before.greedy.tolist()


def test_an_id_is_greedy_where_it_is_with_mlx(tmp_path):
    model, other = both("llama", tmp_path / "m")
    rows = [compress_row(model, np.array(tiny.base_ids(60, seed), np.uint32)) for seed in range(4)]
    expected, got = score_rows(model, rows), score_rows(other, rows)
    assert [one.greedy.tolist() for one in got] == [one.greedy.tolist() for one in expected]
    assert any(one.greedy.any() for one in got)


@pytest.mark.parametrize("case", ["llama", "start canonical", "evictions", "longrope"])
def test_ids_after_a_whole_row_are_as_likely_as_in_a_row_of_their_own(case, tmp_path):
    family, changes = CASES[case]
    _, other = both(family, tmp_path / "m", **changes)
    first, ids = np.array(tiny.base_ids(60, 5), np.uint32), [4, 9, 20]
    whole = [compress_row(other, first, np.array([one], np.uint32)) for one in ids]
    expected = [one.logprobs[-1] for one in score_rows(other, whole)]
    np.testing.assert_allclose(other.score_next(compress_row(other, first), ids), expected, atol=1e-5)


# ---- texts


TOKENIZER = tiny_text.byte_level()
PROMPTS = [[text] for text in ("once upon a time", "a time, a time, a time", "x", "no no no no")]


def test_rates_of_greedy_texts_are_those_of_mlx(tmp_path):
    model, other = both("llama", tmp_path / "m")
    settings = RateSettings(max_tokens=24, batch_size=3)
    expected, got = (measure_rates(one, TOKENIZER, PROMPTS, settings).record() for one in (model, other))
    for name in ("texts", "base_tokens", "steps", "canonical_steps", "hyper_share", "invalid_ids", "ended"):
        assert got[name] == expected[name]
    other.close()


def test_a_seed_gives_sampled_texts_again_and_each_conversation_has_its_own(tmp_path):
    _, other = both("llama", tmp_path / "m")
    same = [["once upon a time"]] * 3
    settings = RateSettings(max_tokens=24, batch_size=2, temp=1.0, seed=5, pack=Pack(START))
    first, second = (measure_rates(other, TOKENIZER, same, settings).record()["texts"] for _ in range(2))
    assert first == second
    assert len(set(first)) == 3
    other.close()


def test_turns_that_go_on_from_a_cache_are_mlx_s_alone(tmp_path):
    _, other = both("llama", tmp_path / "m")
    with pytest.raises(DataError, match=r"--keep-cache.* needs a model on MLX"):
        measure_rates(other, TOKENIZER, PROMPTS, RateSettings(keep_cache=True))


# ---- the command


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_the_command_measures_on_pytorch_what_it_measures_on_mlx(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("The cat sat on the mat. The cat sat on the mat. Once upon a time a cat sat.")
    models = ("stories-base", "stories")
    records = {}
    for engine in ("mlx", "torch"):
        file = tmp_path / f"{engine}.json"
        flags = ["--model", models[0], "--model", models[1], "--data", str(tmp_path / "text.txt"), "--out", str(file)]
        flags += ["--engine", engine, "--generate", "1", "--max-tokens", "20"]
        assert cli.main(["evaluate", *flags]) == 0
        records[engine] = json.loads(file.read_text())
        assert f"engine: {engine}; device: " in capsys.readouterr().err
    assert [record["settings"]["engine"] for record in records.values()] == ["mlx", "torch"]
    for expected, got in zip(records["mlx"]["models"], records["torch"]["models"], strict=True):
        assert got["text"]["bits_per_byte"] == pytest.approx(expected["text"]["bits_per_byte"], abs=1e-5)
        assert got["generation"]["texts"] == expected["generation"]["texts"]
        assert (got["kind"], got.get("codebook_fingerprint")) == (
            expected["kind"],
            expected.get("codebook_fingerprint"),
        )


def test_on_a_cpu_a_model_is_evaluated_in_float32(tmp_path):
    folder = save(tiny.tiny_model(), tmp_path / "m", dtype=mx.bfloat16)
    tiny_text.byte_level().save_pretrained(folder)
    model, tokenizer = load_evaluated_model(folder, device=torch.device("cpu"), trust_remote_code=False)
    assert model._model.dtype == torch.float32
    assert model._model.folder.kernels is False
    assert tokenizer.eos_token_ids
