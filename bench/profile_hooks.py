"""Clocks around the parts of a step: functions of mlx_zip, mlx-lm and MLX, wrapped while a tracer is open.

A function's time is its own: what it calls that has a clock too is taken out. A hook that finds no such function is an
error, so that this list follows the code.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import TracebackType
from typing import Any

import mlx.core as mx

from mlx_zip.errors import MlxZipError

PARTS = {  # in a step's order
    "wait": "reading the last id: waiting for the device",
    "call": "the model call besides what follows: checks, positions",
    "codec": "codebook: learning the id, listing entries, expanding",
    "rows": "hyper rows: from the store or the encoder, into their tables",
    "embedding": "embedding, with the rows that are read",
    "blocks": "the decoder's blocks and last norm",
    "head": "base and hyper logits, joined and masked",
    "canonical": "excluding ids that are not canonical, where the model does",
    "sampling": "normalizing the logits, choosing an id",
    "enqueue": "handing the graph to the device (mx.async_eval)",
    "text": "detokenizing",
    "response": "the response object and its figures",
    "replay": "forcing the id",
    "loop": "what is left: the loop, the bench itself",
}
OURS = ("call", "codec", "rows", "embedding", "head", "canonical", "text", "response")  # what mlx_zip adds on the host

Seconds = defaultdict[str, float]  # by part
Made = Callable[[tuple[Any, ...], Any], Any]


def _result(args: tuple[Any, ...], result: Any) -> Any:
    return result


def _table(args: tuple[Any, ...], result: Any) -> Any:
    return args[2].rows  # of `Model._encode(self, state, table, ...)`


@dataclass(frozen=True)
class Hook:
    """A function of a part. owner: module, class, or "module:Class". made(args, result): arrays it is to evaluate."""

    part: str
    owner: Any
    name: str
    made: Made | None = None

    def home(self) -> Any:
        """Module or class that has the function. Raises `MlxZipError` when there is none."""
        home = self.owner
        if isinstance(home, str):
            module, _, kind = home.partition(":")
            home = import_module(module)
            home = getattr(home, kind, None) if kind else home
        if not hasattr(home, self.name):
            raise MlxZipError(f"bench profile: {self.owner} has no {self.name}; PARTS no longer follow the code")
        return home


MODEL, STATE, REQUEST = "mlx_zip.models.zip_model:Model", "mlx_zip.state:ZipState", "mlx_zip.request:Request"
PLAIN_HOOKS = (
    Hook("sampling", mx, "logsumexp", _result),
    Hook("sampling", mx, "argmax", _result),
    Hook("enqueue", mx, "async_eval"),
    Hook("replay", "mlx_zip.bench.engines:Forced", "__call__"),
)
ZIP_HOOKS = (
    *PLAIN_HOOKS,
    Hook("wait", "mlx_zip.models.zip_model", "_host_ids"),
    Hook("call", MODEL, "__call__"),
    Hook("embedding", MODEL, "_embed", _result),
    Hook("rows", MODEL, "_encode", _table),
    Hook("rows", MODEL, "_settle"),
    Hook("blocks", MODEL, "run_layers", _result),
    Hook("head", MODEL, "_head", _result),
    Hook("canonical", "mlx_zip.canonical:CanonicalDecoding", "__call__", _result),
    Hook("text", "mlx_zip.tokenizer:TextStream", "feed"),
    Hook("response", REQUEST, "emit"),
    Hook("codec", REQUEST, "_expand"),
    *(Hook("codec", STATE, name) for name in ("advance", "missing_outputs", "missing_inputs", "entries")),
)


class Tracer:
    """While open, adds up seconds by part; a mark per id that is emitted. apart: evaluate each part before the next."""

    def __init__(self, hooks: tuple[Hook, ...], apart: bool = False) -> None:
        self.hooks, self.apart = hooks, apart
        self.totals: Seconds = defaultdict(float)
        self.marks: list[Seconds] = []
        self._inner: list[float] = []  # seconds of hooked functions inside each one that is running
        self._undo: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Tracer:
        mark = Hook("loop", "mlx_zip.bench.engines:Run", "step")
        hooks = [(hook, hook.home()) for hook in (*self.hooks, mark)]  # all are found before any is wrapped
        for hook, home in hooks:
            before = getattr(home, hook.name)
            self._undo.append((home, hook.name, before))
            setattr(home, hook.name, self._marking(before) if hook is mark else self._timed(hook, before))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            home, name, before = self._undo.pop()
            setattr(home, name, before)

    def _timed(self, hook: Hook, function: Callable[..., Any]) -> Callable[..., Any]:
        made = hook.made if self.apart else None

        def call(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            self._inner.append(0.0)
            try:
                result = function(*args, **options)
                if made is not None:
                    mx.eval(made(args, result))
            finally:
                took = time.perf_counter() - begun
                self.totals[hook.part] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took
            return result

        return call

    def _marking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.marks.append(self.totals.copy())
            return function(*args)

        return call
