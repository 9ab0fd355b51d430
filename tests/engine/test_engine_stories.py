"""The engine with the bundled model, opened as a server opens it."""

import pytest

from mlx_zip import load, stream_generate
from mlx_zip.engine.mlx.mlx_engine import open_engine
from mlx_zip.errors import GenerationError
from support.serving import ask, same

TEXTS = ["Once upon a time", "The dog was", "One day, a girl named Lily went to the park with her mom."]


@pytest.fixture(scope="module")
def engine():
    with open_engine("stories") as engine:
        yield engine


@pytest.mark.slow
def test_the_bundled_model_tells_the_stories_of_generate(engine):
    model, tokenizer = load("stories")
    eos = frozenset(tokenizer.eos_token_ids)
    options = [{}, {"temp": 0.8, "top_p": 0.95, "seed": 4}, {"repetition_penalty": 1.2}]
    prompts = [tokenizer.encode(text) for text in TEXTS]
    asked = [
        ask(engine, prompt, max_tokens=40, eos_ids=eos, sampling=sampling)[1]
        for prompt, sampling in zip(prompts, options, strict=True)
    ]
    for watch, prompt, sampling in zip(asked, prompts, options, strict=True):
        same(watch.wait(), list(stream_generate(model, tokenizer, prompt, max_tokens=40, **sampling)))


def test_what_the_bundled_model_is(engine):
    info = engine.info
    assert (info.name, len(info.fingerprint)) == ("stories", 64)
    assert info.merge_size > 1
    assert info.codebook_size > 0
    assert info.vocab_size == len(engine.tokenizer)


def test_a_pack_can_be_named_by_a_request(engine):
    from mlx_zip.named import resolve_model_name

    pack = resolve_model_name("stories") / "pack.npz"
    prompt = engine.tokenizer.encode(TEXTS[0])
    watch = ask(engine, prompt, max_tokens=10, pack=pack)[1].wait()
    assert watch.end.reason == "length"
    again = ask(engine, [*prompt, *watch.base_ids[:5]], max_tokens=5, pack=str(pack))[1].wait()
    assert again.end.counts.cached_tokens > 0
    own = ask(engine, [*prompt, *watch.base_ids[:5]], max_tokens=5)[1].wait()
    assert own.end.counts.cached_tokens == 0 or own.end.counts.cached_tokens <= len(prompt) + 5
    with pytest.raises(GenerationError, match="no such pack"):
        ask(engine, prompt, pack="nothing.npz")
