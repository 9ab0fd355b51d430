"""A whole conversation given with its cache: only what is new is read, and the text is that of a fresh full prompt."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import trim_prompt_cache

from mlx_zip import stream_generate
from mlx_zip.engine.mlx.prompt_caches import answers_in_cache, notes_on
from mlx_zip.errors import GenerationError
from mlx_zip.models.rows.zip_state import find_zip_state
from mlx_zip.text.prompts import Chat
from support.conversing import (
    ASKED,
    NAMES,
    answer,
    as_fresh,
    both,
    continues_as_fresh,
    first_turn,
    fresh_ids,
    held,
    loaded,
    message,
    new_cache,
)
from support.slow_cases import slow_but


@both
@pytest.mark.parametrize("seed", slow_but([None, 1, 2], None))
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


@pytest.mark.slow
@settings(max_examples=8, derandomize=True)
@given(
    kind=st.sampled_from(list(NAMES)),
    edits=st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0, 9)), min_size=2, max_size=5),
)
def test_after_any_edits_the_cache_begins_with_the_conversation_and_goes_on_as_a_fresh_one(kind, edits):
    model, tokenizer = loaded(kind)
    cache, messages = new_cache(model), [message("user", ASKED)]
    for edit, n in [("ask", 0), *edits]:
        cache, messages = edited(edit, n, cache, messages)
        wanted = Chat(messages).ids(tokenizer, answers_in_cache(cache))
        responses = list(stream_generate(model, tokenizer, messages, 6, prompt_cache=cache))
        state = find_zip_state(cache)
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
    cache, messages, _ = first_turn("zip2zip", stop=("e",))
    assert "e" not in messages[1]["content"]
    assert continues_as_fresh("zip2zip", messages, cache)


def test_a_request_that_cannot_be_met_leaves_the_cache_as_it_was():
    cache, _, _ = first_turn("zip2zip")
    before = find_zip_state(cache).books[0].ids.tolist()
    with pytest.raises(GenerationError, match="positions"):
        stream_generate(*loaded("zip2zip"), [message("user", ASKED * 200)], prompt_cache=cache)
    np.testing.assert_array_equal(before, find_zip_state(cache).books[0].ids)


def test_a_saved_cache_goes_on_from_its_codebook(tmp_path):
    from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

    cache, messages, had = first_turn("zip2zip")
    save_prompt_cache(str(tmp_path / "c.safetensors"), cache)
    read = load_prompt_cache(str(tmp_path / "c.safetensors"))
    _, last = answer("zip2zip", messages, read)
    assert 20 < last.cached_tokens <= had
