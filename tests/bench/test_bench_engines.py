"""The engines of bench generate: what each emits and counts."""

from __future__ import annotations

from itertools import chain

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_zip.bench.engines.choice import make_engine
from mlx_zip.bench.engines.interface import Run, compress_prompt_and_text
from mlx_zip.bench.engines.mlx_engines import ForcedIdSampler, MlxZip
from mlx_zip.bench.engines.model_making import models_from_config, models_from_folders
from mlx_zip.bench.engines.shape_table import ZipOptions
from mlx_zip.bench.engines.workloads import read_tokenizer
from mlx_zip.codec import Codebook
from mlx_zip.engine.mlx.generate import stream_generate
from support import tiny, tiny_bench, tiny_text
from support.bench_engines import MLX_ENGINES
from support.places import GOLDEN_MODELS
from support.tiny_bench import SHAPE, parse

PROMPT = tiny.base_ids(60, seed=3)
TEXT = [i for i in tiny.base_ids(60, seed=3) if i > 2][:40]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    tiny_bench.small(monkeypatch)


def engine(name, seed=0):
    _, args = parse("generate")
    return make_engine(name, tiny_bench.models(seed), args)


# ---- engines


@pytest.mark.parametrize("name", MLX_ENGINES)
def test_replay_emits_exactly_the_forced_ids(name):
    made = engine(name)
    run = made.run(PROMPT, len(TEXT), TEXT)
    assert run.base_ids == TEXT
    assert isinstance(made, MLX_ENGINES[name])
    if name.startswith("mlx-zip"):
        prompt_ids, ids = compress_prompt_and_text(made.model.make_cache()[-1].books[0], PROMPT, TEXT)
        assert len(ids) < len(TEXT)
        assert (run.prompt_ids, list(chain(*run.ids))) == (len(prompt_ids), ids.tolist())
    else:
        assert (run.prompt_ids, list(chain(*run.ids))) == (len(PROMPT), TEXT)


@pytest.mark.parametrize("name", MLX_ENGINES)
def test_a_run_counts_steps_bytes_and_what_the_cache_holds(name):
    made = engine(name)
    run = made.run(PROMPT, len(TEXT), TEXT)
    assert len(run.times) == len(run.ids)
    assert run.times == sorted(run.times)
    assert run.text_bytes == len(made.tokenizer.decode(TEXT).encode())
    assert run.kv_ids == run.prompt_ids + sum(map(len, run.ids))
    assert (run.row_bytes > 0) == name.startswith("mlx-zip")
    assert run.peak_bytes > made.weight_bytes


def test_mlx_zip_runs_as_its_own_stream_generate_does():
    made = engine("mlx-zip")
    expected = list(stream_generate(made.model, made.tokenizer, PROMPT, max_tokens=30))
    run = made.run(PROMPT, 30)
    assert run.ids == [[response.token] for response in expected]
    assert run.text_bytes == expected[-1].bytes


def test_a_forced_sampler_gives_its_ids_and_then_the_last_again():
    forced = ForcedIdSampler([5, 9])
    assert [int(forced(mx.array([[0.0, 1.0]]))[0]) for _ in range(3)] == [5, 9, 9]
    assert forced(mx.zeros((1, 4))).dtype == mx.uint32


def test_a_fresh_engine_has_another_model_object_over_the_same_weights():
    options = ZipOptions(encoder_layers=1, codebook_size=64)
    made = MlxZip(models_from_config("tiny", SHAPE, "float32", read_tokenizer("stories"), options))
    before = made.model
    made.forget_encoded_rows()
    assert made.model is not before
    for (name, a), (other, b) in zip(*(tree_flatten(m.parameters()) for m in (before, made.model)), strict=True):
        assert name == other
        assert bool((a == b).all())


def test_zip_ids_leave_the_codebook_as_it_is():
    book = Codebook(tiny.tiny_model().config.codec_params)
    prompt_ids, ids = compress_prompt_and_text(book, PROMPT, TEXT)
    assert len(book) == book.mark() == 0
    book.push(prompt_ids)
    book.push(ids)
    assert book.expand(np.concatenate([prompt_ids, ids])).tolist() == [*PROMPT, *TEXT]


def test_a_run_knows_what_came_with_its_first_step():
    run = Run(3)
    run.step(0.1, [9], [4, 5])
    run.step(0.2, [6], [6])
    assert (run.first_base, run.base_ids, run.ids) == (2, [4, 5, 6], [[9], [6]])


# ---- engines on torch


def test_transformers_replays_and_chooses_as_mlx_lm_does():
    pytest.importorskip("torch", reason="the engine hf needs torch")
    _, args = parse("generate")
    found = models_from_folders(None, str(GOLDEN_MODELS / "llama_transformer_untied_pos" / "base"))
    plain, hf = (make_engine(name, found, args) for name in ("mlx-lm", "hf"))
    prompt, text = list(range(10, 40)) * 2, list(range(20, 50))
    replayed, expected = hf.run(prompt, 30, text), plain.run(prompt, 30, text)
    assert replayed.base_ids == text
    assert replayed.text_bytes == expected.text_bytes
    assert hf.run(prompt, 20).base_ids == plain.run(prompt, 20).base_ids
    assert (hf.weight_bytes, hf.kv_bytes) == (plain.weight_bytes, plain.kv_bytes)


def test_transformers_goes_on_with_a_conversation_as_mlx_lm_does():
    pytest.importorskip("torch", reason="the engine hf needs torch")
    _, args = parse("generate")
    found = models_from_folders(None, str(GOLDEN_MODELS / "llama_transformer_untied_pos" / "base"))
    said = []
    for made in (make_engine(name, found, args) for name in ("mlx-lm", "hf")):
        held = made.start_conversation()
        said.append([made.run(prompt, 12, None, held).base_ids for prompt in (list(range(10, 40)), [7, 8, 9])])
    assert said[0] == said[1]


def test_the_published_package_replays_and_chooses_as_we_do():
    for library in ("torch", "peft", "zip2zip"):
        pytest.importorskip(library, reason=f"the engine zip2zip needs {library}")
    name = "phi3_reslatent_mean_untied_v2"  # self-contained
    _, args = parse("generate", "--published", GOLDEN_MODELS / name)
    found = models_from_folders(str(tiny_text.converted(name)), None)
    ours, theirs = (make_engine(name, found, args) for name in ("mlx-zip", "zip2zip"))
    prompt = list(range(10, 30)) * 3
    text = list(range(10, 30)) * 2
    runs = [made.run(prompt, len(text), text) for made in (ours, theirs)]
    assert runs[0].base_ids == runs[1].base_ids == text
    assert runs[0].ids == runs[1].ids
    assert runs[0].prompt_ids == runs[1].prompt_ids < len(prompt)
    free = [made.run(prompt, 20) for made in (ours, theirs)]
    assert free[0].ids == free[1].ids
