"""Engines on MLX: each reads a prompt, emits ids and records the time of every step.

`mlx-lm` and `mlx-zip` run through the functions that their users call, detokenizing included, so the measured times are
those that users see. In replay, a forced id still waits for the model's own choice, so a step does all its usual work.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_zip.config import SIDES
from mlx_zip.errors import MlxZipError
from mlx_zip.models.rows.fingerprints import named_arrays

from .interface import Engine, Run, compress_prompt_and_text, kv_bytes_per_id
from .shape_table import Models


class ForcedIdSampler:
    """A sampler that returns given ids in order, each after the model's own choice has been computed."""

    greedy, state = False, None  # attributes that the engine reads from a sampler

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.at = list(ids), 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Returns the next forced id [1], after computing the model's own choice from logprobs [1, W].

        Repeats the last id if called again, because the decoding loop starts one step more than it emits.
        """
        chosen = mx.argmax(logprobs, axis=-1)
        forced = self.ids[min(self.at, len(self.ids) - 1)]
        self.at += 1
        return mx.minimum(chosen, 0) + mx.array([forced], chosen.dtype)


class MlxEngine(Engine):
    """Base class of engines on MLX. make: returns a new model object over the same weights."""

    def __init__(self, models: Models, make: Callable[[], Any]) -> None:
        self.make, self.tokenizer = make, models.tokenizer
        self.model = make()
        self.weight_bytes = weight_bytes(self.model)
        self.kv_bytes = kv_bytes_per_id(models.base_config, activation_dtype(self.model).size)
        self.kv_dtype = str(activation_dtype(self.model)).removeprefix("mlx.core.")

    def forget_encoded_rows(self) -> None:
        """Makes a new model object over the same weights, which has no state of earlier requests."""
        self.model = self.make()

    def start_conversation(self) -> Any:
        """Returns the caches of a new conversation."""
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.model)

    def run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None = None, held: Any = None) -> Run:
        """See `Engine.run`. Waits for the device to be idle before the clock starts and after the run.

        The run's peak_bytes include this engine's weights, but not the weights of other engines that are in memory.
        """
        held = self.start_conversation() if held is None else held
        wait_and_free_memory()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        run = self._run(prompt, tokens, replay, held)
        wait_and_free_memory()
        own = sum(value.nbytes for _, value in named_arrays(self.model.parameters()))
        run.peak_bytes = own + max(0, mx.get_peak_memory() - before)
        return run

    @abstractmethod
    def _run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None, held: Any) -> Run:
        """Runs a request as `run` does, but does not wait for the device and leaves peak_bytes unset."""


class MlxLm(MlxEngine):
    """Runs the plain model through mlx-lm's `stream_generate`."""

    name = "mlx-lm"

    def __init__(self, models: Models) -> None:
        super().__init__(models, models.plain)

    def _run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None, held: Any) -> Run:
        """See `MlxEngine._run`. held: the conversation's KV caches."""
        from mlx_lm import stream_generate

        sampler = ForcedIdSampler(replay) if replay is not None else None
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

    def __init__(self, models: Models) -> None:
        """Raises `MlxZipError` if there is no model with hypertokens."""
        zipped = models.zipped
        if zipped is None:
            raise MlxZipError(f"{self.name} needs a model with hypertokens: --model or --shape")
        super().__init__(models, lambda: with_memory_row_store(zipped()))

    def _run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None, held: Any) -> Run:
        """See `MlxEngine._run`. held: the conversation's KV caches, and its `ZipState` last."""
        from mlx_zip.engine.mlx.generate import stream_generate

        book, bodies_before = held[-1].books[0], held[-1].second_bodies
        prompt_ids, ids = compress_prompt_and_text(book, prompt, replay or ())
        sampler = ForcedIdSampler(ids.tolist()) if replay is not None else None
        run, begun = Run(len(prompt_ids)), time.perf_counter()
        for response in stream_generate(
            self.model, self.tokenizer, list(prompt), max_tokens=tokens, sampler=sampler, prompt_cache=held
        ):
            run.step(time.perf_counter() - begun, [response.token], response.base_ids)
            run.text_bytes += len(response.text.encode())
        run.kv_ids, run.row_bytes = held[-1].offset, installed_row_bytes(held[-1])
        run.second_bodies = held[-1].second_bodies - bodies_before
        return run


def with_memory_row_store(model: Any) -> Any:
    from mlx_zip.models.rows.row_store import RowStore

    model.row_source.store = model.row_source.store or RowStore()
    return model


def installed_row_bytes(state: Any) -> int:
    """Returns the bytes of the output rows of all installed entries. state: a request's `ZipState`."""
    rows = state.outputs.rows
    return 0 if rows is None else rows[0, 0].nbytes * len(state.books[0])


def weight_bytes(model: Any) -> int:
    """Returns the bytes of weights that a step reads.

    These are all weights except the hyper-encoders' and an untied embedding's, of which a step reads only one row.
    """
    weights = named_arrays(model.parameters())
    untied = any(name.startswith("lm_head.") for name, _ in weights)
    skipped = (*SIDES, "model.embed_tokens.") if untied else SIDES
    return sum(value.nbytes for name, value in weights if not name.startswith(skipped))


def activation_dtype(model: Any) -> mx.Dtype:
    """Returns the dtype of a model's activations: the dtype of its norms, which are never quantized."""
    return next(value for name, value in named_arrays(model.parameters()) if name.endswith("norm.weight")).dtype


def wait_and_free_memory() -> None:
    """Waits until the device is idle, then frees the memory that MLX caches for reuse."""
    from mlx_lm.generate import generation_stream

    mx.synchronize(generation_stream)
    mx.synchronize()
    mx.clear_cache()
