"""A whole conversation given with its cache: only what is new is read, and the text is that of a fresh full prompt."""

import copy
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import llama
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, make_prompt_cache, trim_prompt_cache

from mlx_zip import load, stream_generate
from mlx_zip.errors import GenerationError
from mlx_zip.layout import is_zip
from mlx_zip.sessions import answers_in, notes_on
from mlx_zip.state import find_state
from mlx_zip.text.prompts import Chat
from support import tiny_text
from support.places import GOLDEN_MODELS

NAMES = {
    "zip2zip": "llama_transformer_tied_lora",
    "zip2zip, base positions": "llama_transformer_untied_pos",
    "plain": None,
}
ASKED = "The cat sat on the mat, and the cat sat on the mat."
both = pytest.mark.parametrize("kind", NAMES)


@cache
def loaded(kind):
    name = NAMES[kind]
    folder = GOLDEN_MODELS / "llama_transformer_tied_lora" / "base" if name is None else tiny_text.converted(name)
    model, tokenizer = load(folder)
    model.set_dtype(mx.float32)
    if not tokenizer.has_chat_template:
        other = loaded("zip2zip")[1]
        tokenizer._tokenizer.chat_template, tokenizer.has_chat_template = other.chat_template, True
    return model, tokenizer


def new_cache(model):
    return model.make_cache() if is_zip(model) else make_prompt_cache(model)


def message(role, content):
    return {"role": role, "content": content}


def answer(kind, messages, cache, max_tokens=40, **options):
    """(text, last response) of the next answer."""
    responses = list(stream_generate(*loaded(kind), messages, max_tokens, prompt_cache=cache, **options))
    return "".join(r.text for r in responses), responses[-1]


def held(cache):
    """The ids that a cache holds."""
    return cache[0].offset


def first_turn(kind, seed=None, **options):
    """(cache, messages up to the second question, how many base tokens the cache holds)."""
    cache, messages = new_cache(loaded(kind)[0]), [message("user", ASKED)]
    sampling = {} if seed is None else {"seed": seed, "temp": 1.0}
    text, last = answer(kind, messages, cache, **sampling, **options)
    messages += [message("assistant", text), message("user", "And then?")]
    return cache, messages, last.prompt_tokens + last.generation_tokens


def fresh_ids(kind, cache, n, max_tokens):
    """Greedy ids of a model that reads the first n ids of a cache's log anew, as one prompt."""
    model, _ = loaded(kind)
    log = find_state(cache).books[0].ids.tolist()[:n]
    twin, out = model.make_cache(), []
    logits = model(mx.array([log]), cache=twin)[0, -1]
    for _ in range(max_tokens):
        out.append(int(logits.argmax().item()))
        logits = model(mx.array([[out[-1]]]), cache=twin)[0, -1]
    return out


def continues_as_fresh(kind, prompt, cache, **options):
    """Whether an answer's greedy ids are those of a new cache that reads the same ids as one prompt."""
    model, tokenizer = loaded(kind)
    return as_fresh(kind, cache, stream_generate(model, tokenizer, prompt, 12, prompt_cache=cache, **options))


def as_fresh(kind, cache, responses):
    """Whether the ids of an answer that has just been generated with a cache are those of a new cache."""
    model, tokenizer = loaded(kind)
    steps = [r.token for r in responses]
    if is_zip(model):
        return steps == fresh_ids(kind, cache, held(cache) - len(steps), len(steps))
    read = notes_on(cache).ids[: -len(steps)]
    assert len(read) == held(cache) - len(steps)
    return steps == [r.token for r in stream_generate(model, tokenizer, read, len(steps))]


@both
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_the_second_turn_reads_only_what_is_new(kind, seed):
    cache, messages, had = first_turn(kind, seed)
    _, last = answer(kind, messages, cache)
    assert had - 4 <= last.cached_tokens <= had
    assert last.prompt_tokens < 40


@pytest.mark.parametrize("kind", ["zip2zip", "zip2zip, base positions"])
def test_greedy_ids_are_those_of_a_fresh_prompt_with_the_same_ids(kind):
    cache, messages, _ = first_turn(kind, seed=3)
    model, tokenizer = loaded(kind)
    steps = [r.token for r in stream_generate(model, tokenizer, messages, 12, prompt_cache=cache)]
    read = held(cache) - len(steps)
    assert steps == fresh_ids(kind, cache, read, len(steps))


def test_a_plain_models_ids_are_those_of_a_fresh_prompt_with_the_same_ids():
    cache, messages, _ = first_turn("plain", seed=3)
    model, tokenizer = loaded("plain")
    steps = [r.token for r in stream_generate(model, tokenizer, messages, 12, prompt_cache=cache)]
    prompt = notes_on(cache).ids[: -len(steps)]
    assert len(prompt) == held(cache) - len(steps)
    assert steps == [r.token for r in stream_generate(model, tokenizer, prompt, 12)]


@both
def test_an_edited_message_is_read_again_and_what_precedes_it_is_kept(kind):
    cache, messages, had = first_turn(kind)
    answer(kind, messages, cache)
    edited = [*messages[:2], message("user", "Where is the dog?")]
    text, last = answer(kind, edited, cache)
    assert had - 4 <= last.cached_tokens <= had + 12
    other = first_turn(kind)[0]
    assert text == answer(kind, edited, other)[0]


@both
def test_a_branch_from_the_first_message_gives_what_it_gave(kind):
    cache, messages, _ = first_turn(kind)
    answer(kind, messages, cache)
    again, last = answer(kind, messages[:1], cache)
    assert again == messages[1]["content"]
    assert last.prompt_tokens <= 4


@both
def test_another_system_message_is_read_from_where_it_differs(kind):
    model, _ = loaded(kind)
    cache, messages = new_cache(model), [message("system", "Be kind."), message("user", ASKED)]
    answer(kind, messages, cache)
    messages[0] = message("system", "Be rude.")
    text, last = answer(kind, messages, cache)
    assert 0 < last.cached_tokens < 24
    assert text == answer(kind, messages, new_cache(model))[0]


def edited(edit, n, cache, messages):
    """The cache and the messages after one edit; n says where, and what is written there."""
    at, text = n % len(messages), ("", " hi ", ASKED, "What?")[n % 4]
    if edit == "write":
        messages[at] = {**messages[at], "content": text}
    elif edit == "drop" and len(messages) > 1:
        del messages[at]
    elif edit == "branch":
        messages = messages[: at + 1]
    elif edit == "system":
        messages = [message("system", text), *(m for m in messages if m["role"] != "system")]
    elif edit == "copy":
        cache = copy.deepcopy(cache)
    elif edit == "trim" and held(cache) > n:
        trim_prompt_cache(cache, n)
    return cache, messages if messages[-1]["role"] == "user" else [*messages, message("user", text)]


EDITS = ("ask", "write", "drop", "branch", "system", "copy", "trim")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(list(NAMES)),
    edits=st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0, 9)), min_size=2, max_size=5),
)
def test_after_any_edits_the_cache_begins_with_the_conversation_and_goes_on_as_a_fresh_one(kind, edits):
    model, tokenizer = loaded(kind)
    cache, messages = new_cache(model), [message("user", ASKED)]
    for edit, n in [("ask", 0), *edits]:
        cache, messages = edited(edit, n, cache, messages)
        wanted = Chat(messages).ids(tokenizer, answers_in(cache))
        responses = list(stream_generate(model, tokenizer, messages, 6, prompt_cache=cache))
        state = find_state(cache)
        base_ids = notes_on(cache).ids if state is None else state.books[0].base_ids(0).tolist()
        assert base_ids[: len(wanted)] == wanted
        assert responses[-1].cached_tokens + responses[-1].prompt_tokens == len(wanted)
        assert as_fresh(kind, cache, responses)
        messages = [*messages, message("assistant", "".join(r.text for r in responses))]


@both
def test_a_cache_that_was_trimmed_by_hand_is_read_again_where_needed(kind):
    cache, messages, _ = first_turn(kind)
    trim_prompt_cache(cache, 5)
    assert continues_as_fresh(kind, messages, cache)


@both
def test_the_text_of_a_next_turn_still_continues_a_cache(kind):
    cache, _, _ = first_turn(kind)
    before = held(cache)
    assert continues_as_fresh(kind, "<|user|>\nmore", cache)
    assert held(cache) > before
    _, last = answer(kind, "<|user|>\nmore", first_turn(kind)[0])
    alone = loaded(kind)[1].encode("<|user|>\nmore", add_special_tokens=False)
    assert (last.cached_tokens, last.prompt_tokens) == (0, len(alone))


def test_a_stop_string_ends_the_answer_and_the_next_turn_has_its_text():
    cache, messages, _ = first_turn("zip2zip", stop=["e"])
    assert "e" not in messages[1]["content"]
    assert continues_as_fresh("zip2zip", messages, cache)


def test_a_request_that_cannot_be_met_leaves_the_cache_as_it_was():
    cache, _, _ = first_turn("zip2zip")
    before = find_state(cache).books[0].ids.tolist()
    with pytest.raises(GenerationError, match="positions"):
        stream_generate(*loaded("zip2zip"), [message("user", ASKED * 200)], prompt_cache=cache)
    np.testing.assert_array_equal(before, find_state(cache).books[0].ids)


def test_a_saved_cache_goes_on_from_its_codebook(tmp_path):
    from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

    cache, messages, had = first_turn("zip2zip")
    save_prompt_cache(str(tmp_path / "c.safetensors"), cache)
    read = load_prompt_cache(str(tmp_path / "c.safetensors"))
    _, last = answer("zip2zip", messages, read)
    assert 20 < last.cached_tokens <= had


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
