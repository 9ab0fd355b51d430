"""Engines with tiny models, and what `stream_generate` says to the same requests."""

from __future__ import annotations

import ast
import threading
import time
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_zip.engine import Emitted, Engine, Failed, Finished, Submission
from mlx_zip.engine.mlx.generate import stream_generate
from mlx_zip.engine.mlx.mlx_engine import MlxEngine, ServeOptions
from mlx_zip.engine.options import RunOptions
from mlx_zip.engine.sessions.mlx_caches import open_session_store
from mlx_zip.engine.sessions.store import SessionOptions, SessionStore
from support import tiny
from support.generating import ENDLESS, plain_model

WAIT_S = 60
MISSING = [name for name in ("torch", "triton") if find_spec(name) is None]
NEEDS_TORCH = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
both = pytest.mark.parametrize("kind", ["mlx", pytest.param("cuda", marks=NEEDS_TORCH)])  # engines


class Watch:
    """Receives the events of one request. raise_at: number of the event, from 0, at which it raises."""

    def __init__(self, raise_at: int | None = None) -> None:
        self.events: list[Any] = []
        self.times: list[float] = []
        self._done, self._raise_at = threading.Event(), raise_at

    def __call__(self, event: Any) -> None:
        self.events.append(event)
        self.times.append(time.perf_counter())
        if isinstance(event, Finished | Failed):
            self._done.set()
        if len(self.events) - 1 == self._raise_at:
            raise RuntimeError("a receiver that fails")

    def wait(self) -> Watch:
        assert self._done.wait(WAIT_S), "the request did not end"
        return self

    @property
    def emitted(self) -> list[Emitted]:
        return [event for event in self.events if isinstance(event, Emitted)]

    @property
    def ids(self) -> list[int]:
        return [event.id for event in self.emitted]

    @property
    def base_ids(self) -> list[int]:
        return [one for event in self.emitted for one in event.base_ids]

    @property
    def end(self) -> Any:
        return self.events[-1]


class Broken:
    """A constraint that fails at one of its methods after some steps."""

    def __init__(self, method: str, after: int = 3, error: type[BaseException] = ValueError) -> None:
        self.method, self.left, self.error = method, after, error

    def _count(self, method: str) -> None:
        self.left -= 1
        if method == self.method and self.left < 0:
            raise self.error("broken")

    def mask(self) -> np.ndarray:
        self._count("mask")
        return np.ones(tiny.VOCAB, bool)

    def accepts(self, base_ids: Any) -> bool:
        return True

    def push(self, base_ids: Any) -> None:
        self._count("push")


def tiny_engine(
    family: str = "llama",
    sessions: SessionOptions | None = None,
    tokenizer: Any = ENDLESS,
    change: Any = None,
    run: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    kind: str = "mlx",
    **options: Any,
) -> Any:
    """An engine with the tiny model of a family, or "plain". change: called with the model when it is loaded.

    kind: "mlx" or "cuda", which runs on the CPU here.
    """
    if kind == "cuda":
        return _cuda_engine(family, sessions, tokenizer, change, run or {}, model or {}, options)

    def load() -> Any:
        made = plain_model() if family == "plain" else tiny.tiny_model(family, **(model or {}))
        made.eval()
        if change is not None:
            change(made)
        return made, tokenizer

    bounds = ServeOptions(**options, run=RunOptions(**(run or {})))
    made = None if sessions is None else partial(_store, options=sessions)
    return MlxEngine(load, "tiny", bounds, made)


def _cuda_engine(
    family: str, sessions: SessionOptions | None, tokenizer: Any, change: Any, run: Any, model: Any, options: Any
) -> Engine:
    """Does what `tiny_engine` does, for PyTorch."""
    from mlx_zip.cuda.engine import CudaEngine, make_session_store
    from mlx_zip.cuda.model import open_model

    def load() -> Any:
        made = open_model(_folder(family, repr(sorted(model.items()))), "cpu", "float32")
        if change is not None:
            change(made)
        return made, tokenizer

    bounds = ServeOptions(**options, run=RunOptions(**run))
    store = None if sessions is None else partial(make_session_store, options=sessions)
    return CudaEngine(load, "tiny", bounds, store)


@cache
def _folder(family: str, changes: str) -> Path:
    """The folder of a tiny model, saved once. changes: as `repr` writes them."""
    from support.torch_folders import save, save_weights

    folder = Path(mkdtemp())
    if family != "plain":
        return save(tiny.tiny_model(family, **dict(ast.literal_eval(changes))), folder)
    config = {key: value for key, value in tiny.tiny_config().items() if key != "zip2zip"}
    model = plain_model()
    return save_weights(model, folder, {**config, "model_type": "llama", "vocab_size": 40})


def _store(served: Any, options: SessionOptions) -> SessionStore:
    return open_session_store(served.model, served.tokenizer, options)


def ask(engine: Engine, prompt: Any, **fields: Any) -> tuple[Any, Watch]:
    """Submits a request; returns its ticket and what receives its events."""
    watch = Watch()
    fields.setdefault("max_tokens", 40)
    return engine.submit(Submission(prompt, **fields), watch), watch


def at_once(engine: Any, submit: Any) -> Any:
    """Calls `submit` between two rounds of the engine, so that its requests come together; returns what it returns."""
    return engine._inbox.ask(submit)


def alone(model: Any, prompt: Any, max_tokens: int = 40, tokenizer: Any = ENDLESS, **options: Any) -> list[Any]:
    """What `stream_generate` yields."""
    return list(stream_generate(model, tokenizer, prompt, max_tokens=max_tokens, **options))


def prompts(n: int, lengths: tuple[int, ...] = (5, 17, 50, 9)) -> list[list[int]]:
    """n prompts of several lengths."""
    return [tiny.base_ids(lengths[i % len(lengths)], i) for i in range(n)]


def same(watch: Watch, responses: list[Any]) -> None:
    """Asserts that a request gave what `stream_generate` gave."""
    assert watch.ids == [one.token for one in responses]
    assert [one.base_ids for one in watch.emitted] == [one.base_ids for one in responses]
    assert watch.end.reason == responses[-1].finish_reason


def same_until_a_tie(watch: Watch, responses: list[Any]) -> None:
    """Asserts what `same` asserts, up to the first step whose two best ids are equally likely but for rounding.

    Two libraries round differently, and may go on with one or the other of such ids.
    """
    gaps = [np.diff(np.partition(logprobs_of(one), -2)[-2:])[0] for one in responses]
    end = next((step for step, gap in enumerate(gaps) if gap < 1e-4), len(gaps))
    assert watch.ids[:end] == [one.token for one in responses[:end]]
    assert end
    if end == len(gaps):
        same(watch, responses)


SAME = {"mlx": same, "cuda": same_until_a_tie}


def logprobs_of(response: Any) -> np.ndarray:
    return np.array(response.logprobs.astype(mx.float32))
