"""Engines with one interface: each reads a prompt and emits ids, and every id is timed.

`mlx-lm` and `mlx-zip` are driven through the functions that their users call, with detokenizing, so that what is timed
is what one gets. Forced ids (replay) still wait for the sampler's choice, so the loop keeps its shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.codec import Codebook, compress
from mlx_zip.config import SIDES

from . import machine
from .shapes import Models

ENGINES = {
    "mlx-lm": "the plain model in mlx-lm",
    "mlx-zip": "the model with hypertokens in mlx_zip",
    "mlx-lm+lookup": "the plain model with prompt-lookup decoding, greedy, exact",
    "mlx-zip+lookup": "the same over hypertokens",
    "hf": "the plain model in transformers, eager",
    "hf-compiled": "the plain model in transformers, compiled, static cache",
    "zip2zip": "the published package (PyTorch)",
}


@dataclass
class Run:
    """One request, timed. prompt_ids: ids read before the first step. times: seconds from the request to each step.

    ids: per step the ids emitted, one but for lookup. base_ids: what they stand for, cut where the text ends;
    first_base of them came with the first step. kv_ids: ids in the KV cache at the end. row_bytes: output rows that a
    step reads, at the end. peak_bytes: memory, where known.
    """

    prompt_ids: int
    times: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    base_ids: list[int] = field(default_factory=list)
    first_base: int = 0
    text_bytes: int = 0
    kv_ids: int = 0
    row_bytes: int = 0
    peak_bytes: int | None = None

    def step(self, seconds: float, ids: Iterable[int], base_ids: Iterable[int]) -> None:
        """One more step of the model."""
        self.times.append(seconds)
        self.ids.append(list(ids))
        self.base_ids += base_ids
        if len(self.times) == 1:
            self.first_base = len(self.base_ids)


class Engine:
    """What an engine has to have.

    weight_bytes: what every step reads of the weights. kv_bytes: one id's keys and values in all layers.
    """

    name = ""
    weight_bytes = 0
    kv_bytes = 0

    @property
    def device(self) -> dict[str, Any]:
        """What it runs on, as records say it."""
        return machine.device()

    def bandwidth(self) -> float:
        """Bytes per second that a matrix-vector product reads there, measured now."""
        return machine.bandwidth()

    def fresh(self) -> None:
        """Drops whatever earlier requests have left in the model, such as encoded hyper rows."""

    def start(self) -> Any:
        """What a new conversation holds."""
        raise NotImplementedError

    def run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None = None, held: Any = None) -> Run:
        """Reads prompt [n] base ids and emits `tokens` base tokens at most; exactly `replay` [m] base ids if given.

        held: from `start`, to go on with a conversation.
        """
        raise NotImplementedError


class Forced:
    """A sampler that returns given ids in order, each after the model's own choice has been computed."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.at = list(ids), 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        """[1, W] -> [1]. Asked once more than there are ids (the step that is under way at the end), it repeats."""
        chosen = mx.argmax(logprobs, axis=-1)
        forced = self.ids[min(self.at, len(self.ids) - 1)]
        self.at += 1
        return mx.minimum(chosen, 0) + mx.array([forced], chosen.dtype)


class MlxEngine(Engine):
    """What the engines on MLX share: the model, its bytes, and a clean beginning and end of each run."""

    def __init__(self, models: Models, make: Callable[[], Any]) -> None:
        self.make, self.tokenizer = make, models.tokenizer
        self.model = make()
        self.weight_bytes = weight_bytes(self.model)
        self.kv_bytes = kv_bytes(models.base_config, activation_bytes(self.model))

    def fresh(self) -> None:
        """A model object of its own; the weights are the same."""
        self.model = self.make()

    def start(self) -> Any:
        """The caches of a new conversation."""
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.model)

    def run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None = None, held: Any = None) -> Run:
        """See `Engine.run`. What the machine still had under way is waited for before the clock starts and at the end.

        peak_bytes: this engine's own, its weights among them, though other engines' weights may be in memory too.
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
        raise NotImplementedError


class MlxLm(MlxEngine):
    """mlx-lm's `stream_generate`."""

    name = "mlx-lm"

    def _run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None, held: Any) -> Run:
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
    """`mlx_zip.stream_generate`; compression of the prompt is inside the clock. Rows are kept in memory."""

    name = "mlx-zip"

    def __init__(self, models: Models, make: Callable[[], Any]) -> None:
        super().__init__(models, lambda: _with_store(make()))

    def _run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None, held: Any) -> Run:
        from mlx_zip.generate import stream_generate

        book = held[-1].books[0]
        prompt_ids, ids = zip_ids(book, prompt, replay or ())
        sampler = Forced(ids.tolist()) if replay is not None else None
        run, begun = Run(len(prompt_ids)), time.perf_counter()
        for response in stream_generate(
            self.model, self.tokenizer, list(prompt), max_tokens=tokens, sampler=sampler, prompt_cache=held
        ):
            run.step(time.perf_counter() - begun, [response.token], response.base_ids)
            run.text_bytes += len(response.text.encode())
        run.kv_ids, run.row_bytes = held[-1].offset, installed_bytes(held[-1])
        return run


def _with_store(model: Any) -> Any:
    """A model as `mlx_zip.load` gives it: with a row store of its own."""
    from mlx_zip.hyper import RowStore

    model.session.store = model.session.store or RowStore()
    return model


def zip_ids(book: Codebook, prompt: Sequence[int], text: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of a prompt that continues a codebook, as a request compresses it, and of the text after it.

    prompt, text: base ids. The codebook is not changed.
    """
    ids = np.asarray(prompt, np.uint32)
    prompt_ids = book.compress(ids) if book.mark() else compress(book.params, ids)[0]
    then = book.copy()
    then.push(prompt_ids)
    return prompt_ids, then.compress(np.asarray(text, np.uint32))


def installed_bytes(state: Any) -> int:
    """Bytes of the output rows of installed entries."""
    rows = state.outputs.rows
    return 0 if rows is None else rows[0, 0].nbytes * len(state.books[0])


def parameters(model: Any) -> list[tuple[str, Any]]:
    """(name, array) of an MLX model's weights."""
    from mlx.utils import tree_flatten

    return list(tree_flatten(model.parameters()))  # type: ignore[arg-type]


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a step reads: all but the hyper-encoders and, if the head is a matrix of its own, the
    embedding, of which it reads a row.
    """
    weights = parameters(model)
    untied = any(name.startswith("lm_head.") for name, _ in weights)
    skipped = (*SIDES, "model.embed_tokens.") if untied else SIDES
    return sum(value.nbytes for name, value in weights if not name.startswith(skipped))


def kv_bytes(config: Mapping[str, Any], itemsize: int) -> int:
    """Bytes of one id's keys and values in all layers of a decoder's config, `itemsize` bytes a number."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width * itemsize


def activation_bytes(model: Any) -> int:
    """Bytes of a number in an MLX model's activations: those of its norms, which are never quantized."""
    return next(value for name, value in parameters(model) if name.endswith("norm.weight")).itemsize


def settle() -> None:
    """Waits for what the device still does, and gives its spare memory back."""
    from mlx_lm.generate import generation_stream

    mx.synchronize(generation_stream)
    mx.synchronize()
    mx.clear_cache()
