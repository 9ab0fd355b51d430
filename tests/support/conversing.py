"""Conversations with tiny models, turn by turn on one cache, and what a fresh cache would generate."""

import copy
from functools import cache

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_zip import load, stream_generate
from mlx_zip.engine.mlx.prompt_caches import attach_notes, notes_on
from mlx_zip.layout import has_hypertokens
from mlx_zip.models.rows.zip_state import find_zip_state
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
    return model.make_cache() if has_hypertokens(model) else make_prompt_cache(model)


def message(role, content):
    return {"role": role, "content": content}


def answer(kind, messages, cache, max_tokens=24, **options):
    """(text, last response) of the next answer."""
    responses = list(stream_generate(*loaded(kind), messages, max_tokens, prompt_cache=cache, **options))
    return "".join(r.text for r in responses), responses[-1]


def held(cache):
    """The ids that a cache holds."""
    return cache[0].offset


def first_turn(kind, seed=None, **options):
    """(cache, messages up to the second question, how many base tokens the cache holds)."""
    made, messages, had = _first_turn(kind, seed, **options)
    cache = copy.deepcopy(made)
    attach_notes(cache, copy.deepcopy(notes_on(made)))
    return cache, [dict(one) for one in messages], had


@cache
def _first_turn(kind, seed, **options):
    """What `first_turn` returns, generated once: each test gets a copy of the cache."""
    cache, messages = new_cache(loaded(kind)[0]), [message("user", ASKED)]
    sampling = {} if seed is None else {"seed": seed, "temp": 1.0}
    options = {name: list(one) if isinstance(one, tuple) else one for name, one in options.items()}
    text, last = answer(kind, messages, cache, **sampling, **options)
    messages += [message("assistant", text), message("user", "And then?")]
    return cache, messages, last.prompt_tokens + last.generation_tokens


def fresh_ids(kind, cache, n, max_tokens):
    """Greedy ids of a model that reads the first n ids of a cache's log anew, as one prompt."""
    model, _ = loaded(kind)
    log = find_zip_state(cache).books[0].ids.tolist()[:n]
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
    if has_hypertokens(model):
        return steps == fresh_ids(kind, cache, held(cache) - len(steps), len(steps))
    read = notes_on(cache).ids[: -len(steps)]
    assert len(read) == held(cache) - len(steps)
    return steps == [r.token for r in stream_generate(model, tokenizer, read, len(steps))]
