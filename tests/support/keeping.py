"""Kept sessions of tiny models: caches that were read, stores, and greedy answers with and without them.

A kind that begins with "torch" is a model on PyTorch, which has no prompt caches but rows of a batch; the others are on
MLX.
"""

import copy
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from mlx_zip.codec import compress_next
from mlx_zip.engine.sessions.mlx_caches import open_session_store
from mlx_zip.engine.sessions.store import SessionOptions
from mlx_zip.layout import has_hypertokens
from mlx_zip.models.rows.zip_state import find_zip_state
from support import generating, tiny
from support.serving import NEEDS_TORCH


def on_torch(*kinds):
    """The kinds, to be skipped where PyTorch is not installed."""
    return [pytest.param(kind, marks=NEEDS_TORCH) for kind in kinds]


_ON_TORCH = on_torch("torch zip", "torch base positions", "torch LongRoPE", "torch evicting", "torch plain")
TRIMMED = ["zip", "base positions", "LongRoPE", "evicting", "plain", *_ON_TORCH]
KINDS = [*TRIMMED, "sliding window", *on_torch("torch bfloat16")]
ENGINES = ["zip", *on_torch("torch zip")]  # one kind for each engine
PLAIN = ("plain", "sliding window", "torch plain")
OWN = "own pack"
STEPS = 6  # of an answer, unless a test asks for more


def is_torch(kind):
    return kind.startswith("torch")


def _torch():
    """The same functions for PyTorch, which may not be installed."""
    from support import keeping_torch

    return keeping_torch


@cache
def model(kind):
    if is_torch(kind):
        return _on_torch(kind, kind.removeprefix("torch "))
    if kind == "plain":
        return generating.plain_model()
    if kind == "sliding window":
        return sliding_model()
    changes = {
        "zip": {},
        "base positions": {"position_mode": "base_token_end"},
        "LongRoPE": {"family": "phi3"},
        "wide heads": {"head_dim": 32},
        "evicting": {"policy": "lru"},
    }[kind]
    if kind == "evicting":
        changes = {"compression": {**tiny.tiny_config()["zip2zip"]["compression"], "policy": "lru"}}
        changes["compression"]["max_codebook_size"] = 12
    return tiny.tiny_model(**changes)


def _on_torch(kind, other):
    """The model of another kind on PyTorch."""
    if other == "bfloat16":
        return _torch().model(model("zip"), kind, dtype="bfloat16")
    if other != "plain":
        return _torch().model(model(other), kind)
    config = {key: value for key, value in tiny.tiny_config().items() if key != "zip2zip"}
    return _torch().model(model(other), kind, {**config, "model_type": "llama", "vocab_size": 40})


def sliding_model():
    """A plain model whose caches forget ids, so that they cannot be trimmed once they are full."""
    from mlx_lm.models import gemma3_text

    config = {**tiny.tiny_config("gemma3_text"), "model_type": "gemma3_text", "vocab_size": 40}
    mx.random.seed(0)
    return gemma3_text.Model(gemma3_text.ModelArgs.from_dict(config))


def store(kind="zip", **options):
    if is_torch(kind):
        return _torch().store(model(kind), generating.TOKENIZER, **options)
    return open_session_store(model(kind), generating.TOKENIZER, SessionOptions(**options))


def new_cache(kind, start=None):
    if is_torch(kind):
        return _torch().new_cache(model(kind), start)
    return model(kind).make_cache() if has_hypertokens(model(kind)) else make_prompt_cache(model(kind))


def read(kind, cache, base_ids):
    """Has a cache read base ids as a request does, after what it holds; returns the logits after the last.

    On PyTorch it returns the best id.
    """
    if is_torch(kind):
        return _torch().read(cache, base_ids, _torch().batch_of(model(kind)))
    state = find_zip_state(cache)
    ids = np.asarray(base_ids, np.uint32) if state is None else compress_next(state.books[0], np.asarray(base_ids))
    return model(kind)(mx.array(ids.astype(np.int32))[None], cache=cache)[0, -1]


def greedy(kind, cache, base_ids, steps=STEPS, bits=None):
    """Reads base ids and returns the greedy ids after them, and the base ids that they stand for; all are read."""
    if is_torch(kind):
        return _torch().greedy(model(kind), cache, base_ids, steps)
    state, out, base = find_zip_state(cache), [], []
    logits = read(kind, cache, base_ids)
    for _ in range(steps):
        if bits:
            maybe_quantize_kv_cache(cache, quantized_kv_start=0, kv_group_size=32, kv_bits=bits)
        out.append(int(logits.argmax().item()))
        base += [out[-1]] if state is None else list(state.books[0].base_ids_of(out[-1]))
        logits = model(kind)(mx.array([[out[-1]]]), cache=cache)[0, -1]
    return out, base


def conversation(kind, kept, seed=0, length=60, **options):
    """Puts a session of a prompt and its answer; returns (name, all its base ids)."""
    if is_torch(kind):
        cache, held = _read_conversation(kind, seed, length)
        return kept.put(cache, pack_key=OWN, **options), held
    read_once, held = _kept_conversation(kind, seed, length)
    cache = copy.deepcopy(read_once)
    given = {"base_ids": held} if find_zip_state(cache) is None else {}
    return kept.put(cache, pack_key=OWN, **given, **options), list(held)


def _read_conversation(kind, seed, length):
    """A cache that has read a prompt and its answer, and all its base ids."""
    cache, prompt = new_cache(kind), tiny.base_ids(length, seed)
    return cache, prompt + greedy(kind, cache, prompt)[1]


@cache
def _kept_conversation(kind, seed, length):
    """What `_read_conversation` returns, read once: every session gets a copy of the cache."""
    return _read_conversation(kind, seed, length)


def continued(kind, checkout, prompt, steps=STEPS):
    """The greedy ids after a prompt, of which a checkout's cache holds the beginning."""
    return greedy(kind, checkout.cache, prompt[checkout.base_tokens :], steps)[0]


def as_read_at_once(kind, held, prompt, steps=STEPS):
    """The greedy ids after a prompt whose beginning was read as the ids `held`, by a new cache in one call."""
    if is_torch(kind):
        return _torch().read_at_once(model(kind), held, prompt, steps)
    cache = new_cache(kind)
    model(kind)(mx.array([held]), cache=cache)
    state = find_zip_state(cache)
    n = len(held) if state is None else state.books[0].base_length
    return greedy(kind, cache, prompt[n:], steps)[0]


def log(kind, checkout, prompt):
    """The ids that a checkout's cache holds."""
    if is_torch(kind):
        return checkout.cache.book.ids.tolist()
    state = find_zip_state(checkout.cache)
    return list(prompt[: checkout.base_tokens]) if state is None else state.books[0].ids.tolist()


def random_state(kind):
    """What a sampler's random state could be: an array of 5 and 6."""
    return _torch().random_state() if is_torch(kind) else np.array([5, 6], np.uint32)


def write_without_end(folder, kind, began):
    """Keeps conversations in a folder, turn by turn, until the process is killed. began: set after the first."""
    kept = store(kind, folder=folder)
    held = conversation(kind, kept)[1]
    began.set()
    for turn in range(10000):
        prompt = held + tiny.base_ids(3, seed=turn)
        found = kept.checkout(prompt[:300], OWN)
        if found is None or len(prompt) > 300:
            held = conversation(kind, kept, seed=turn + 1)[1]
            continue
        held = prompt + greedy(kind, found.cache, prompt[found.base_tokens :], 2)[1]
        kept.put(found.cache, pack_key=OWN, name=found.name)
