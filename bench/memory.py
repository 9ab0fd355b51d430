"""Tracks memory during a long generation: what a request holds apart from KV caches and rows must not grow.

Runs a tiny random model for many steps through mlx-lm's own loop, with and without hypertokens.
`other_active_bytes` is the memory that MLX holds for everything but KV caches and rows, mostly weights. `rss_bytes`
also counts pages that MLX's allocator keeps for reuse, and Python's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.arguments import check_at_least

from .record import load_before, surroundings

VOCAB, SLOTS = 256, 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench memory`."""
    parser.add_argument(
        "--steps", type=int, default=20_000, help="number of decoding steps of each model (default: 20000)"
    )
    parser.add_argument(
        "--every",
        type=int,
        default=2_000,
        help="number of decoding steps between two readings of memory (default: 2000)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints for each model a JSON line per reading, and one with the growth from the second to the last reading.

    Raises `DataError` for a number below 1.
    """
    check_at_least(args, 1, "steps", "every")
    load_before()
    for engine, model in (("mlx-lm", _plain_model()), ("mlx-zip", _zip_model())):
        readings = []
        for reading in _readings(model, args.steps, args.every):
            print(json.dumps({"bench": "memory", "engine": engine, **reading}), flush=True)
            readings.append(reading)
        if len(readings) > 2:
            names = ("rss_bytes", "kv_bytes", "row_bytes", "other_active_bytes")
            growth = {name: readings[-1][name] - readings[1][name] for name in names}
            print(
                json.dumps({"bench": "memory", "engine": engine, "growth": growth, **surroundings("mlx", "mlx-lm")}),
                flush=True,
            )
    return 0


def _readings(model: Any, steps: int, every: int) -> Iterator[dict[str, Any]]:
    """Generates `steps` ids with a model and yields its memory figures every `every` steps."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    started = time.perf_counter()
    prompt = mx.array([5, 6, 7, 8, 5, 6, 7, 8])
    for step, _ in enumerate(generate_step(prompt, model, max_tokens=steps, prompt_cache=cache), start=1):
        if step % every == 0:
            state = cache[-1] if type(cache[-1]).__name__ == "ZipState" else None
            kv = sum(entry.nbytes for entry in cache if entry is not state)
            rows = state.nbytes if state is not None else 0
            yield {
                "step": step,
                "rss_bytes": rss_bytes(),
                "kv_bytes": kv,
                "row_bytes": rows,
                "other_active_bytes": mx.get_active_memory() - kv - rows,
                "entries": len(state.books[0]) if state is not None else 0,
                "elapsed_s": round(time.perf_counter() - started, 2),
            }


def rss_bytes() -> int:
    """Returns this process's resident memory in bytes: the current one on Linux, the peak elsewhere."""
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _tiny_config() -> dict[str, Any]:
    """Returns the config.json of a tiny Llama."""
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1 << 20,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    }


def _plain_model() -> Any:
    """Makes the tiny Llama with random weights in mlx-lm."""
    from mlx_lm.models.llama import Model, ModelArgs

    return _with_random_weights(Model(ModelArgs.from_dict(_tiny_config())))


def _zip_model() -> Any:
    """Makes the tiny Llama with hypertokens and random weights in mlx_zip."""
    from mlx_zip.models import Model, ModelArgs

    section = {
        "base_model_type": "llama",
        "encoder_type": "res_latent_attn",
        "encoder": {"hidden_size": 64, "num_heads": 4, "num_hidden_layers": 1},
        "compression": {
            "initial_vocab_size": VOCAB,
            "max_codebook_size": SLOTS,
            "max_subtokens": 4,
            "disabled_ids": [0],
        },
        "pad_token_id": 0,
    }
    config = {**_tiny_config(), "model_type": "zip2zip", "zip2zip": section}
    return _with_random_weights(Model(ModelArgs.from_dict(config)))


def _with_random_weights(model: Any) -> Any:
    """Fills a model with random weights, always the same ones, and returns it."""
    from mlx.utils import tree_flatten

    rng = np.random.default_rng(0)
    shapes = [(name, weight.shape) for name, weight in dict(tree_flatten(model.parameters())).items()]
    model.load_weights([(name, mx.array(rng.normal(0, 0.3, shape).astype(np.float32))) for name, shape in shapes])
    return model
