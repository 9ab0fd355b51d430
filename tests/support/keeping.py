"""Kept sessions of tiny models: caches that were read, stores, and greedy answers with and without them."""

from functools import cache

import mlx.core as mx
import numpy as np
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from mlx_zip.codec import compress_next
from mlx_zip.engine.session_options import SessionOptions
from mlx_zip.engine.session_store import SessionStore
from mlx_zip.layout import is_zip
from mlx_zip.state import find_state
from support import generating, tiny

KINDS = ("zip", "base positions", "LongRoPE", "evicting", "plain", "sliding window")
TRIMMED = KINDS[:-1]
OWN = "own pack"


@cache
def model(kind):
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


def sliding_model():
    """A plain model whose caches forget ids, so that they cannot be trimmed once they are full."""
    from mlx_lm.models import gemma3_text

    config = {**tiny.tiny_config("gemma3_text"), "model_type": "gemma3_text", "vocab_size": 40}
    mx.random.seed(0)
    return gemma3_text.Model(gemma3_text.ModelArgs.from_dict(config))


def store(kind="zip", **options):
    return SessionStore(model(kind), generating.TOKENIZER, SessionOptions(**options))


def new_cache(kind):
    return model(kind).make_cache() if is_zip(model(kind)) else make_prompt_cache(model(kind))


def read(kind, cache, base_ids):
    """Has a cache read base ids as a request does, after what it holds; returns the logits after the last."""
    state = find_state(cache)
    ids = np.asarray(base_ids, np.uint32) if state is None else compress_next(state.books[0], np.asarray(base_ids))
    return model(kind)(mx.array(ids.astype(np.int32))[None], cache=cache)[0, -1]


def greedy(kind, cache, base_ids, steps=12, bits=None):
    """Reads base ids and returns the greedy ids after them, and the base ids that they stand for; all are read."""
    state, out, base = find_state(cache), [], []
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
    cache, prompt = new_cache(kind), tiny.base_ids(length, seed)
    _, answer = greedy(kind, cache, prompt)
    given = {"base_ids": prompt + answer} if find_state(cache) is None else {}
    return kept.put(cache, pack_key=OWN, **given, **options), prompt + answer


def continued(kind, checkout, prompt, steps=12):
    """The greedy ids after a prompt, of which a checkout's cache holds the beginning."""
    return greedy(kind, checkout.cache, prompt[checkout.base_tokens :], steps)[0]


def as_read_at_once(kind, held, prompt, steps=12):
    """The greedy ids after a prompt whose beginning was read as the ids `held`, by a new cache in one call."""
    cache = new_cache(kind)
    model(kind)(mx.array([held]), cache=cache)
    state = find_state(cache)
    n = len(held) if state is None else state.books[0].base_length
    return greedy(kind, cache, prompt[n:], steps)[0]


def log(kind, checkout, prompt):
    """The ids that a checkout's cache holds."""
    state = find_state(checkout.cache)
    return list(prompt[: checkout.base_tokens]) if state is None else state.books[0].ids.tolist()
