"""Engines with tiny models, and what `stream_generate` says to the same requests."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.engine import Emitted, Failed, Finished, Submission
from mlx_zip.engine.interface import SessionInfo
from mlx_zip.engine.mlx_engine import MlxEngine, ServeOptions
from mlx_zip.engine.served import RunOptions
from mlx_zip.errors import EngineError
from mlx_zip.generate import stream_generate
from support import tiny
from support.generating import ENDLESS, plain_model

WAIT_S = 60


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


class ListStore:
    """Sessions in a list, with the interface of the engine's store."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, Any]] = {}
        self.puts = 0

    def checkout(self, base_ids: Any, pack_key: Any) -> Any:
        best, length = None, 0
        for name, one in self.held.items():
            same = 0
            for a, b in zip(one["base_ids"], list(base_ids)[:-1], strict=False):
                if a != b:
                    break
                same += 1
            if one["pack_key"] == pack_key and same > length:
                best, length = name, same
        if best is None:
            return None
        from mlx_zip import sessions

        one = self.held[best]
        cache = copy.deepcopy(one["cache"])
        if cache[-1].__class__.__name__ == "ZipState":
            kept, kept_base = sessions.common_prefix(cache, list(base_ids))
        else:
            kept = kept_base = length
        if not kept:
            return None
        sessions.trim_to(cache, kept)
        whole = kept_base == len(one["base_ids"])
        if whole:
            del self.held[best]
        return cache, kept, kept_base, best if whole else None

    def put(self, cache: Any, *, base_ids: Any, pack_key: Any, name: Any = None, answers: Any) -> str:
        self.puts += 1
        name = name or f"session-{self.puts}"
        self.held[name] = {"cache": cache, "base_ids": list(base_ids), "pack_key": pack_key, "answers": dict(answers)}
        return name

    def answers(self) -> dict[str, Any]:
        return {key: ids for one in self.held.values() for key, ids in one["answers"].items()}

    def note_answer(self, name: str, key: str, base_ids: Any) -> None:
        if name in self.held:
            self.held[name]["answers"][key] = tuple(base_ids)

    def sessions(self) -> list[SessionInfo]:
        return [SessionInfo(name, len(one["base_ids"]), 0, 0, False, 0.0) for name, one in self.held.items()]

    def drop(self, name: str) -> None:
        if self.held.pop(name, None) is None:
            raise EngineError(f"there is no session {name!r}")

    def purge(self) -> int:
        n = len(self.held)
        self.held.clear()
        return n

    def figures(self) -> Any:
        return None


def tiny_engine(
    family: str = "llama",
    store: ListStore | None = None,
    tokenizer: Any = ENDLESS,
    change: Any = None,
    run: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> MlxEngine:
    """An engine with the tiny model of a family, or "plain". change: called with the model when it is loaded."""

    def load() -> Any:
        made = plain_model() if family == "plain" else tiny.tiny_model(family, **(model or {}))
        made.eval()
        if change is not None:
            change(made)
        return made, tokenizer

    bounds = ServeOptions(**options, run=RunOptions(**(run or {})))
    return MlxEngine(load, "tiny", bounds, None if store is None else lambda served: store)


def ask(engine: MlxEngine, prompt: Any, **fields: Any) -> tuple[Any, Watch]:
    """Submits a request; returns its ticket and what receives its events."""
    watch = Watch()
    fields.setdefault("max_tokens", 40)
    return engine.submit(Submission(prompt, **fields), watch), watch


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


def logprobs_of(response: Any) -> np.ndarray:
    return np.array(response.logprobs.astype(mx.float32))
