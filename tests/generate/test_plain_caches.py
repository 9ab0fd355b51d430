"""Plain models with every kind of cache: batches and bounded caches give mlx-lm's ids."""

import functools

import mlx.core as mx
import pytest
from mlx_lm.generate import batch_generate as mlx_lm_batch
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_zip.engine.mlx.generate import stream_batch, stream_generate
from mlx_zip.engine.mlx.served import make_bounded_cache
from mlx_zip.errors import GenerationError
from support import tiny
from support.generating import ENDLESS, MODEL
from support.plain_families import FAMILIES, plain_family
from support.slow_cases import slow_but

PROMPTS = [tiny.base_ids(n, n) for n in (5, 40, 1, 17)]


@functools.cache
def family(name):
    return plain_family(name)


def mlx_lm(model, ids, max_tokens=24, **options):
    options["sampler"] = lambda logprobs: mx.argmax(logprobs, axis=-1)
    return [int(token) for token, _ in generate_step(mx.array(ids), model, max_tokens=max_tokens, **options)]


@functools.cache
def ids_of_mlx_lm_s_batch(name):
    return mlx_lm_batch(family(name), ENDLESS, PROMPTS, max_tokens=12, return_token_ids=True).token_ids


@pytest.mark.parametrize("chunk", [4, 2048])
@pytest.mark.parametrize("name", slow_but(FAMILIES, "llama", "mamba2"))
def test_a_batch_has_the_ids_of_mlx_lm_s_batch(name, chunk):
    found = [[] for _ in PROMPTS]
    for row, response in stream_batch(family(name), ENDLESS, PROMPTS, 12, prefill_step_size=chunk):
        found[row].append(response.token)
    assert found == ids_of_mlx_lm_s_batch(name)


@pytest.mark.parametrize("name", slow_but(["gemma3", "qwen3_next"], "qwen3_next"))
def test_rows_of_a_batch_may_end_at_any_time_and_have_penalties(name):
    options = {"repetition_penalty": 1.3, "stop": ["q", "Z"]}
    found = ["" for _ in PROMPTS]
    for row, response in stream_batch(family(name), ENDLESS, PROMPTS, 25, **options):
        found[row] += response.text
    alone = [
        "".join(one.text for one in stream_generate(family(name), ENDLESS, prompt, 25, **options)) for prompt in PROMPTS
    ]
    assert found == alone
    assert len(set(map(len, found))) > 1


def test_requests_whose_caches_do_not_batch_take_their_steps_one_by_one(monkeypatch):
    class Own(KVCache):
        """A kind that nobody knows how to batch."""

    model = family("llama")
    monkeypatch.setattr(type(model), "make_cache", lambda self: [Own() for _ in self.layers])
    expected = [[one.token for one in stream_generate(model, ENDLESS, prompt, 9)] for prompt in PROMPTS]
    found = [[] for _ in PROMPTS]
    for row, response in stream_batch(model, ENDLESS, PROMPTS, 9):
        found[row].append(response.token)
    assert found == expected


@pytest.mark.parametrize("size", [5, 16, 60])
@pytest.mark.parametrize("name", slow_but(["llama", "qwen2"], "llama"))
def test_a_bounded_cache_gives_mlx_lm_s_ids(name, size):
    model = family(name)
    for prompt in PROMPTS:
        cache = [RotatingKVCache(size, keep=4) for _ in make_prompt_cache(model)]
        expected = mlx_lm(model, prompt, prompt_cache=cache)
        if name == "qwen2":  # mlx-lm ignores the bound for models that make their caches themselves, as llama
            assert expected == mlx_lm(model, prompt, max_kv_size=size)
        found = stream_generate(model, ENDLESS, prompt, 24, max_kv_size=size)
        assert [one.token for one in found] == expected
    assert expected != mlx_lm(model, prompt) or size == 60


def test_a_bounded_cache_holds_no_more_than_its_bound():
    cache = make_bounded_cache(family("llama"), 16)
    list(stream_generate(family("llama"), ENDLESS, PROMPTS[1], 30, prompt_cache=cache))
    assert {entry.keys.shape[2] for entry in cache} == {16}
    assert {entry.offset for entry in cache} == {len(PROMPTS[1]) + 30}


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (MODEL, {"max_kv_size": 16}, "the codebook still knows"),
        ("llama", {"max_kv_size": 4}, "at least 5, got 4"),
        ("llama", {"max_kv_size": True}, "at least 5, got True"),
        ("llama", {"max_kv_size": 16.0}, "at least 5, got 16.0"),
        ("gemma3", {"max_kv_size": 16}, "bounds its caches itself (KVCache, RotatingKVCache)"),
        ("qwen3_next", {"max_kv_size": 16}, "bounds its caches itself (ArraysCache, KVCache)"),
        ("llama", {"max_kv_size": 16, "kv_bits": 4}, "--kv-bits"),
        ("llama", {"max_kv_size": 16, "prompt_cache": "new"}, "the prompt cache given"),
    ],
)
def test_a_bound_that_cannot_be_is_refused_before_anything_runs(model, options, words):
    model = family(model) if isinstance(model, str) else model
    if "prompt_cache" in options:
        options = {**options, "prompt_cache": make_prompt_cache(model)}
    with pytest.raises(GenerationError) as error:
        stream_generate(model, ENDLESS, PROMPTS[0], 3, **options)
    assert words in str(error.value)
