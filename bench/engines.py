"""Engines with one interface: each reads a prompt and emits ids, and records the time of every id.

`mlx-lm` and `mlx-zip` run through the functions that their users call, detokenizing included, so users see the times
measured here. Forced ids (replay) still wait for the sampler's choice, so that the loop does all of its usual work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.codec import Codebook, compress_next
from mlx_zip.config import SIDES

from . import machine
from .shapes import Models

ENGINES = {
    "mlx-lm": "the plain model in mlx-lm",
    "mlx-zip": "the model with hypertokens in mlx_zip",
    "mlx-lm+lookup": "the plain model with prompt-lookup decoding, greedy, exact",
    "mlx-zip+lookup": "the model with hypertokens with prompt-lookup decoding, greedy, exact",
    "hf": "the plain model in transformers, eager",
    "hf-compiled": "the plain model in transformers, compiled, static cache",
    "zip2zip": "the published package (PyTorch)",
}


@dataclass
class Run:
    """One timed request.

    prompt_ids: length of the prompt in the engine's ids. times: seconds from the request to the end of each step. ids:
    those emitted at each step, one except with prompt lookup. base_ids: the base ids of all of them, cut where the text
    ends; the first `first_base` came with the first step. text_bytes: UTF-8 bytes of the text. kv_ids: ids in the KV
    cache at the end. row_bytes: bytes of hyper rows that a step reads at the end. second_bodies: how many steps ran the
    decoder's body twice. peak_bytes: peak memory, None if not known.
    """

    prompt_ids: int
    times: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    base_ids: list[int] = field(default_factory=list)
    first_base: int = 0
    text_bytes: int = 0
    kv_ids: int = 0
    row_bytes: int = 0
    second_bodies: int = 0
    peak_bytes: int | None = None

    def step(self, seconds: float, ids: Iterable[int], base_ids: Iterable[int]) -> None:
        """Records a step: seconds since the request, the ids emitted, and the base ids they stand for."""
        self.times.append(seconds)
        self.ids.append(list(ids))
        self.base_ids += base_ids
        if len(self.times) == 1:
            self.first_base = len(self.base_ids)


class Engine:
    """The interface of an engine.

    weight_bytes: bytes of weights that every step reads. kv_bytes: bytes of one id's keys and values in all layers.
    """

    name = ""
    weight_bytes = 0
    kv_bytes = 0

    @property
    def device(self) -> dict[str, Any]:
        """The device that the engine runs on, as the records' section `device`."""
        return machine.device()

    def bandwidth(self) -> float:
        """Measures how many bytes per second a matrix-vector product reads on the engine's device."""
        return machine.bandwidth()

    def fresh(self) -> None:
        """Drops what earlier requests left in the model, such as encoded hyper rows."""

    def start(self) -> Any:
        """Returns the state of a new conversation, which `run` takes as `held`."""
        raise NotImplementedError

    def run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None = None, held: Any = None) -> Run:
        """Reads prompt [n] base ids, emits at most `tokens` base ids, and returns the timed run.

        replay [m]: base ids to emit instead, exactly these. held: state of the conversation to continue, from `start`;
        None begins a new one.
        """
        raise NotImplementedError


class Forced:
    """A sampler that returns given ids in order, each after the model's own choice has been computed."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.at = list(ids), 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Returns the next forced id [1], after the model's own choice from logprobs [1, W] has been computed.

        After the last id it repeats that one, because the decoding loop begins one step more than it emits.
        """
        chosen = mx.argmax(logprobs, axis=-1)
        forced = self.ids[min(self.at, len(self.ids) - 1)]
        self.at += 1
        return mx.minimum(chosen, 0) + mx.array([forced], chosen.dtype)


class MlxEngine(Engine):
    """What the engines on MLX share. make: returns a new model object over the same weights."""

    def __init__(self, models: Models, make: Callable[[], Any]) -> None:
        self.make, self.tokenizer = make, models.tokenizer
        self.model = make()
        self.weight_bytes = weight_bytes(self.model)
        self.kv_bytes = kv_bytes(models.base_config, activation_bytes(self.model))

    def fresh(self) -> None:
        """Makes a new model object over the same weights, so that nothing of earlier requests is left."""
        self.model = self.make()

    def start(self) -> Any:
        """Returns the caches of a new conversation."""
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.model)

    def run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None = None, held: Any = None) -> Run:
        """See `Engine.run`. Waits for the device to be idle before the clock starts and after the run.

        peak_bytes: peak memory of this engine and its weights, without other engines' weights in memory.
        """
        held = self.start() if held is None else held
        settle()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        run = self._run(prompt, tokens, replay, held)
        settle()
        own = sum(value.nbytes for _, value in parameters(self.model))
        run.peak_bytes = own + max(0, mx.get_peak_memory() - before)
        return run

    def _run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None, held: Any) -> Run:
        """Runs a request as `run` does, without waiting for the device and without peak_bytes."""
        raise NotImplementedError


class MlxLm(MlxEngine):
    """Runs the plain model through mlx-lm's `stream_generate`."""

    name = "mlx-lm"

    def _run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None, held: Any) -> Run:
        """See `MlxEngine._run`. held: the conversation's KV caches."""
        from mlx_lm import stream_generate

        sampler = Forced(replay) if replay is not None else None
        run, begun = Run(len(prompt)), time.perf_counter()
        for response in stream_generate(
            self.model, self.tokenizer, list(prompt), max_tokens=tokens, sampler=sampler, prompt_cache=held
        ):
            run.step(time.perf_counter() - begun, [response.token], [response.token])
            run.text_bytes += len(response.text.encode())
        run.kv_ids = held[0].offset
        return run


class MlxZip(MlxEngine):
    """Runs the model with hypertokens through `mlx_zip.stream_generate`, with a row store in memory.

    The compression of the prompt is timed too.
    """

    name = "mlx-zip"

    def __init__(self, models: Models, make: Callable[[], Any]) -> None:
        super().__init__(models, lambda: _with_store(make()))

    def _run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None, held: Any) -> Run:
        """See `MlxEngine._run`. held: the conversation's KV caches, and its `ZipState` last."""
        from mlx_zip.generate import stream_generate

        book, bodies_before = held[-1].books[0], held[-1].second_bodies
        prompt_ids, ids = zip_ids(book, prompt, replay or ())
        sampler = Forced(ids.tolist()) if replay is not None else None
        run, begun = Run(len(prompt_ids)), time.perf_counter()
        for response in stream_generate(
            self.model, self.tokenizer, list(prompt), max_tokens=tokens, sampler=sampler, prompt_cache=held
        ):
            run.step(time.perf_counter() - begun, [response.token], response.base_ids)
            run.text_bytes += len(response.text.encode())
        run.kv_ids, run.row_bytes = held[-1].offset, installed_bytes(held[-1])
        run.second_bodies = held[-1].second_bodies - bodies_before
        return run


def _with_store(model: Any) -> Any:
    """Gives a model a row store in memory if it has none, as `mlx_zip.load` does, and returns the model."""
    from mlx_zip.hyper import RowStore

    model.session.store = model.session.store or RowStore()
    return model


def zip_ids(book: Codebook, prompt: Sequence[int], text: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (compressed ids of the prompt, compressed ids of the text after it), as a request that continues `book`.

    prompt, text: base ids. `book` is not changed.
    """
    prompt_ids = compress_next(book, np.asarray(prompt, np.uint32))
    following = book.copy()
    following.push(prompt_ids)
    return prompt_ids, following.compress(np.asarray(text, np.uint32))


def installed_bytes(state: Any) -> int:
    """Returns the bytes of the output rows of all installed entries. state: a request's `ZipState`."""
    rows = state.outputs.rows
    return 0 if rows is None else rows[0, 0].nbytes * len(state.books[0])


def parameters(model: Any) -> list[tuple[str, Any]]:
    """Returns (name, array) of every weight of an MLX model."""
    from mlx.utils import tree_flatten

    return list(tree_flatten(model.parameters()))  # type: ignore[arg-type]


def weight_bytes(model: Any) -> int:
    """Returns the bytes of weights that a step reads.

    These are all weights but the hyper-encoders' and, unless it is also the head, the embedding, of which a step reads
    only one row.
    """
    weights = parameters(model)
    untied = any(name.startswith("lm_head.") for name, _ in weights)
    skipped = (*SIDES, "model.embed_tokens.") if untied else SIDES
    return sum(value.nbytes for name, value in weights if not name.startswith(skipped))


def kv_bytes(config: Mapping[str, Any], itemsize: int) -> int:
    """Returns bytes of one id's keys and values in all layers. config: the decoder's; itemsize: bytes per number."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width * itemsize


def activation_bytes(model: Any) -> int:
    """Returns the bytes per number of a model's activations, which is that of its norms: they are never quantized."""
    return next(value for name, value in parameters(model) if name.endswith("norm.weight")).itemsize


def settle() -> None:
    """Waits until the device is idle, then frees the memory that MLX keeps for reuse."""
    from mlx_lm.generate import generation_stream

    mx.synchronize(generation_stream)
    mx.synchronize()
    mx.clear_cache()
