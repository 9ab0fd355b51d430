"""Caches of conversations: recurrent and quantized ones, copies, and a cache that two requests use."""

import copy
from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, make_prompt_cache

from mlx_zip import stream_generate
from mlx_zip.engine.mlx.prompt_caches import notes_on
from mlx_zip.errors import GenerationError
from support.conversing import (
    ASKED,
    answer,
    both,
    continues_as_fresh,
    first_turn,
    held,
    loaded,
    message,
    new_cache,
)


class Recurrent:
    """A plain model with a recurrent state, which nothing can trim: the sum of the embeddings read so far.

    kinds: what each entry of its cache is; the first of them holds the state.
    """

    def __init__(self, kinds):
        self.inner, _ = loaded("plain")
        self.args, self.layers, self.kinds = self.inner.args, list(kinds), kinds

    def make_cache(self):
        return [kind() for kind in self.kinds]

    def __call__(self, ids, cache):
        first = cache[0].caches[0] if isinstance(cache[0], CacheList) else cache[0]
        embedded = self.inner.model.embed_tokens(ids)
        h = mx.cumsum(embedded, axis=1) + (0 if first[0] is None else first[0])
        first[0] = h[:, -1:]
        for entry in (one for top in cache for one in getattr(top, "caches", (top,))):
            if isinstance(entry, KVCache):
                entry.update_and_fetch(*[embedded[:, None]] * 2)
        return self.inner.model.embed_tokens.as_linear(h)


RECURRENT = {
    "with attention": (lambda: ArraysCache(2), KVCache),
    "in a list": (lambda: CacheList(ArraysCache(2), KVCache()),),
    "alone": (lambda: ArraysCache(2), lambda: ArraysCache(2)),
}
each_recurrent = pytest.mark.parametrize("kinds", RECURRENT.values(), ids=list(RECURRENT))


def recurrent_turns(kinds):
    """(model, tokenizer, cache that holds one turn, messages with the second question)."""
    model, tokenizer = Recurrent(kinds), loaded("plain")[1]
    cache, messages = model.make_cache(), [message("user", ASKED)]
    responses = list(stream_generate(model, tokenizer, messages, 6, prompt_cache=cache))
    messages += [message("assistant", "".join(r.text for r in responses)), message("user", "And then?")]
    return model, tokenizer, cache, messages


@each_recurrent
def test_a_recurrent_models_second_turn_reads_only_what_is_new(kinds):
    model, tokenizer, cache, messages = recurrent_turns(kinds)
    had = len(notes_on(cache).ids)
    responses = list(stream_generate(model, tokenizer, messages, 6, prompt_cache=cache))
    assert responses[-1].cached_tokens == had
    prompt = notes_on(cache).ids[: -len(responses)]
    fresh = stream_generate(model, tokenizer, prompt, 6, prompt_cache=model.make_cache())
    assert [r.token for r in responses] == [r.token for r in fresh]


@each_recurrent
def test_an_edited_message_is_refused_where_a_recurrent_state_cannot_be_trimmed(kinds):
    model, tokenizer, cache, messages = recurrent_turns(kinds)
    with pytest.raises(GenerationError, match="begin with a new cache"):
        stream_generate(model, tokenizer, [message("user", "Where?"), *messages[1:]], 6, prompt_cache=cache)


@each_recurrent
def test_a_conversation_is_refused_for_a_recurrent_state_that_nobody_noted(kinds):
    model, tokenizer = Recurrent(kinds), loaded("plain")[1]
    cache = model.make_cache()
    model(mx.array([[1, 2, 3]]), cache)
    with pytest.raises(GenerationError, match="begin with a new cache"):
        stream_generate(model, tokenizer, [message("user", ASKED)], 6, prompt_cache=cache)


@both
def test_a_stream_that_nobody_reads_leaves_the_cache_as_it_was(kind):
    cache, messages, _ = first_turn(kind)
    had = held(cache)
    edited = [message("user", "Where is the dog?")]
    stream = stream_generate(*loaded(kind), edited, 12, prompt_cache=cache)
    assert held(cache) == had
    text, _ = answer(kind, messages, cache)
    assert text == answer(kind, messages, first_turn(kind)[0])[0]
    with pytest.raises(GenerationError, match="was used since"):
        next(stream)


@both
def test_an_answer_whose_cache_another_request_takes_ends_with_an_error(kind):
    model, tokenizer = loaded(kind)
    cache, messages, _ = first_turn(kind)
    first = stream_generate(model, tokenizer, messages, 40, prompt_cache=cache)
    next(first)
    other = [message("user", "Where is the dog?")]
    text, _ = answer(kind, other, cache)
    with pytest.raises(GenerationError, match="another request used the prompt cache"):
        next(first)
    assert text == answer(kind, other, new_cache(model))[0]
    assert continues_as_fresh(kind, [*other, message("assistant", text), message("user", "And then?")], cache)


@both
def test_a_request_whose_cache_another_one_took_before_it_began_ends_with_an_error(kind):
    model, tokenizer = loaded(kind)
    cache, messages, _ = first_turn(kind)
    waiting = stream_generate(model, tokenizer, messages, 40, prompt_cache=cache)
    had = held(cache)
    answer(kind, messages[:1], cache)
    assert held(cache) == had  # so only a mark can show that the cache was used
    with pytest.raises(GenerationError, match="the prompt cache was used since"):
        next(waiting)


def test_the_cache_of_a_batch_is_refused():
    model, tokenizer = loaded("zip2zip")
    with pytest.raises(GenerationError, match="of a batch of 2 sequences"):
        stream_generate(model, tokenizer, [message("user", ASKED)], prompt_cache=model.make_cache(left_padding=[0, 1]))


def test_a_copy_of_a_zip2zip_models_cache_knows_the_answers():
    cache, messages, had = first_turn("zip2zip", seed=3)
    twin = copy.deepcopy(cache)
    text, last = answer("zip2zip", messages, twin)
    other, reference = answer("zip2zip", messages, cache)
    assert (text, last.cached_tokens) == (other, reference.cached_tokens)
    assert last.cached_tokens >= had - 1


@cache
def wide_plain_model():
    """A plain model of random weights with heads wide enough for quantized caches."""
    mx.random.seed(0)
    return llama.Model(replace(loaded("plain")[0].args, head_dim=32))


def test_a_plain_models_second_turn_with_a_quantized_cache_gives_what_a_fresh_cache_gives():
    model, tokenizer = wide_plain_model(), loaded("plain")[1]
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    cache, messages = make_prompt_cache(model), [message("user", ASKED)]
    first = list(stream_generate(model, tokenizer, messages, 12, prompt_cache=cache, **options))
    had = held(cache)
    messages += [message("assistant", "".join(r.text for r in first)), message("user", "And then?")]
    steps = list(stream_generate(model, tokenizer, messages, 12, prompt_cache=cache, **options))
    assert had - 1 <= steps[-1].cached_tokens <= had
    prompt = notes_on(cache).ids[: -len(steps)]
    fresh = stream_generate(model, tokenizer, prompt, 12, prompt_cache=make_prompt_cache(model), **options)
    assert [r.token for r in steps] == [r.token for r in fresh]


def test_a_plain_models_cache_that_is_quantized_in_a_later_turn_knows_what_it_held_before():
    model, tokenizer = wide_plain_model(), loaded("plain")[1]
    cache, messages = make_prompt_cache(model), [message("user", ASKED)]
    for options in ({}, {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}):
        text = "".join(r.text for r in stream_generate(model, tokenizer, messages, 12, prompt_cache=cache, **options))
        messages += [message("assistant", text), message("user", "And then?")]
    had = held(cache)
    assert next(stream_generate(model, tokenizer, messages, 1, prompt_cache=cache)).cached_tokens >= had - 1


def test_a_plain_models_answer_that_was_left_early_is_continued_like_a_fresh_prompt():
    model, tokenizer = loaded("plain")
    cache, messages = make_prompt_cache(model), [message("user", ASKED)]
    stream = stream_generate(model, tokenizer, messages, 12, prompt_cache=cache)
    text = "".join(next(stream).text for _ in range(5))
    stream.close()
    assert len(notes_on(cache).ids) == held(cache)
    messages += [message("assistant", text), message("user", "And then?")]
    steps = list(stream_generate(model, tokenizer, messages, 12, prompt_cache=cache))
    assert steps[-1].cached_tokens > 24
    prompt = notes_on(cache).ids[: -len(steps)]
    assert [r.token for r in steps] == [r.token for r in stream_generate(model, tokenizer, prompt, 12)]
