"""Times the parts of a step: wraps functions of mlx_zip and MLX with clocks while a tracer is open.

A function's time does not include the wrapped functions that it calls. There are two clocks: wall time, and the
thread's processor time, which does not count waiting for a core. A hook raises an error if its function does not exist,
so a renamed function is noticed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from types import TracebackType
from typing import Any

import mlx.core as mx

from mlx_zip.errors import MlxZipError

PARTS = {  # name: what the time is spent on, in the order of a step
    "wait": "reading the last id: waiting for the device",
    "call": "the model call without the parts in the next rows: checks, positions",
    "codec": "updating the codebook with the id, listing entries, expanding",
    "rows": "taking hyper rows from the store or the encoder and putting them into their tables",
    "embedding": "embedding the ids to read, with their hyper rows",
    "blocks": "the decoder's blocks and last norm",
    "head": "base and hyper logits, joined and masked",
    "canonical": "excluding ids that are not canonical, if the model uses canonical decoding",
    "sampling": "normalizing the logits, choosing an id",
    "enqueue": "handing the graph to the device (mx.async_eval)",
    "text": "detokenizing",
    "response": "making the response object and its figures",
    "replay": "replacing the chosen id with the text's id",
    "loop": "all other work: the loop, the bench itself",
}
# parts that mlx_zip adds to mlx-lm's on the host
OURS = ("call", "codec", "rows", "embedding", "head", "canonical", "text", "response")
CPU = " cpu"  # suffix of a part's name for its processor time

Seconds = defaultdict[str, float]  # part, or part + CPU: seconds
Made = Callable[[tuple[Any, ...], Any], Any]  # (arguments, result) of a call -> the arrays that it made


def arrays_in_result(args: tuple[Any, ...], result: Any) -> Any:
    return result


def arrays_in_row_tables(args: tuple[Any, ...], result: Any) -> Any:
    """Returns the arrays that `RowSource.fill_inputs(state, ...)` or `fill_outputs` filled, from argument `state`."""
    return [table.array for table in (args[1].inputs, args[1].outputs)]


@dataclass(frozen=True)
class Hook:
    """A function whose time counts for a part of the step.

    owner: module, class, or "module:Class". made: returns the arrays that a call made, to evaluate them when parts are
    timed separately; None if there are none.
    """

    part: str
    owner: Any
    name: str
    made: Made | None = None

    def find_owner(self) -> Any:
        """Returns the module or class of the function. Raises `MlxZipError` if the function does not exist."""
        home = self.owner
        if isinstance(home, str):
            module, _, kind = home.partition(":")
            home = import_module(module)
            home = getattr(home, kind, None) if kind else home
        if not hasattr(home, self.name):
            raise MlxZipError(f"bench profile: {self.owner} has no {self.name}; PARTS no longer follow the code")
        return home


MODEL, ROWS, AHEAD = (
    "mlx_zip.models.zip_model:Model",
    "mlx_zip.models.row_source:RowSource",
    "mlx_zip.models.two_part_step:TwoPartStep",
)
STATE = "mlx_zip.models.rows.zip_state:ZipState"
ZIP_HOOKS = (
    Hook("sampling", mx, "logsumexp", arrays_in_result),
    Hook("sampling", mx, "argmax", arrays_in_result),
    Hook("enqueue", mx, "async_eval"),
    Hook("replay", "mlx_zip.bench.engines.mlx_engines:ForcedIdSampler", "__call__"),
    *(Hook("wait", f"mlx_zip.models.{module}", "read_ids_on_host") for module in ("zip_model", "two_part_step")),
    Hook("wait", "mlx_zip.engine.mlx.choosing:Choice", "wait_for_ids"),
    Hook("sampling", "mlx_zip.engine.mlx.group:Group", "choose_next_ids"),
    Hook("call", MODEL, "__call__"),
    *(Hook("call", AHEAD, name) for name in ("run_body", "compute_logits")),
    Hook("embedding", MODEL, "embed", arrays_in_result),
    *(Hook("rows", ROWS, name, arrays_in_row_tables) for name in ("fill_inputs", "fill_outputs")),
    *(Hook("rows", ROWS, name) for name in ("store_computed_rows", "store_unsubmitted_rows")),
    Hook("blocks", MODEL, "run_layers", arrays_in_result),
    Hook("head", MODEL, "joint_head", arrays_in_result),
    Hook("canonical", "mlx_zip.engine.sampling.exclusions:CanonicalIds", "excluded"),
    Hook("canonical", "mlx_zip.engine.mlx.choosing", "exclude_ids", arrays_in_result),
    Hook("text", "mlx_zip.text.stream:TextStream", "feed"),
    Hook("response", "mlx_zip.engine.responses:Answer", "take_event"),
    Hook("codec", "mlx_zip.engine.request:Request", "expand"),
    *(Hook("codec", STATE, name) for name in ("advance", "entries")),
    *(Hook("codec", STATE, f"missing_{name}") for name in ("outputs", "inputs", "installed_inputs")),
    Hook("codec", STATE, "only_missing_output"),
    Hook("codec", "mlx_zip.codec:Codebook", "entry_words"),
)


STEP = Hook("loop", "mlx_zip.bench.engines.interface:Run", "step")  # called once per emitted id


class Tracer:
    """Context manager: adds up seconds by part in `totals`, and appends a copy of `totals` to `marks` at each id.

    A mark also holds the readings of the two clocks, as `at` and `at` + CPU. apart: evaluate the arrays of each part
    before the next part begins.
    """

    def __init__(self, hooks: tuple[Hook, ...], apart: bool = False) -> None:
        self.hooks, self.apart = hooks, apart
        self.totals: Seconds = defaultdict(float)
        self.marks: list[Seconds] = []
        # for each running wrapped call: (wall, processor) seconds of the wrapped calls inside it
        self._inner: list[tuple[float, float]] = []
        self._undo: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Tracer:
        hooks = [(hook, hook.find_owner()) for hook in (*self.hooks, STEP)]  # finds all before wrapping any
        for hook, home in hooks:
            before = getattr(home, hook.name)
            self._undo.append((home, hook.name, before))
            setattr(
                home,
                hook.name,
                self._wrap_with_marks(before) if hook is STEP else self._wrap_with_clocks(hook, before),
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            home, name, before = self._undo.pop()
            setattr(home, name, before)

    def _wrap_with_clocks(self, hook: Hook, function: Callable[..., Any]) -> Callable[..., Any]:
        made, cpu = hook.made if self.apart else None, hook.part + CPU

        def call(*args: Any, **options: Any) -> Any:
            begun, worked = time.perf_counter(), time.thread_time()
            self._inner.append((0.0, 0.0))
            try:
                result = function(*args, **options)
                if made is not None:
                    mx.eval(made(args, result))
            finally:
                worked, took = time.thread_time() - worked, time.perf_counter() - begun
                inner_took, inner_worked = self._inner.pop()
                self.totals[hook.part] += took - inner_took
                self.totals[cpu] += worked - inner_worked
                if self._inner:
                    took_before, worked_before = self._inner[-1]
                    self._inner[-1] = took_before + took, worked_before + worked
            return result

        return call

    def _wrap_with_marks(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function so that each call first appends a copy of `totals` to `marks`."""

        def call(*args: Any) -> Any:
            mark = self.totals.copy()
            mark["at"], mark["at" + CPU] = time.perf_counter(), time.thread_time()
            self.marks.append(mark)
            return function(*args)

        return call


def seconds_of_parts(marks: Sequence[Seconds]) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    """Yields (wall seconds, processor seconds) of each part in each step between two marks of a tracer.

    The part "loop" is the time of the step that no other part took.
    """
    for before, after in pairwise(marks):
        wall, cpu = ({part: after[part + end] - before[part + end] for part in PARTS} for end in ("", CPU))
        for found, clock in ((wall, "at"), (cpu, "at" + CPU)):
            found["loop"] += after[clock] - before[clock] - sum(found.values())
        yield wall, cpu
