"""What an engine's thread needs of a model, without any model: each step emits the id 1, and everything is noted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from mlx_zip.engine import Progress
from mlx_zip.engine.options import RunOptions
from mlx_zip.engine.parts import Group, Served
from mlx_zip.engine.request import Chosen, Request
from mlx_zip.engine.submissions import ModelFacts
from mlx_zip.engine.threaded import ThreadedEngine

VOCAB = 1000
Notes = list[tuple[Any, ...]]  # ("read", request, ids) and ("step", request, ...); a request is named by its first id


class FakeServed(Served):
    """A plain model whose requests run in groups of one, or of those whose prompts were read in one call.

    notes: what was read and stepped, in order. key: what readings have in common that can be read in one call.
    """

    key: object = None

    hyper, context, by_base, canonical = False, None, False, False
    vocab_size, kv_bytes_per_id = VOCAB, 1

    def __init__(self, chunk: int = 10) -> None:
        self.options = RunOptions(prefill_step_size=chunk)
        self.notes: Notes = []
        self.free: Callable[[Any], None] = lambda cache: None
        self.make_reading: Callable[[Request], Any] = lambda request: FakeReading(self, request)

    def make_facts(self) -> ModelFacts:
        return ModelFacts(VOCAB, None, None, False, None, "", "", 1)

    def new_cache(self, start: Any) -> Any:
        return SimpleNamespace()

    def state_of(self, cache: Any) -> None:
        return None

    def make_request_sampler(self, options: Any, state: Any) -> Any:
        return SimpleNamespace(state=None)

    def make_penalties(self, options: Any, state: Any) -> list[Any]:
        return []


class FakeReading:
    """A prompt that is being read."""

    def __init__(self, served: FakeServed, request: Request) -> None:
        self.served, self.request, self.left = served, request, len(request.prompt_ids)

    @property
    def batch_key(self) -> object:
        return self.served.key if self.left == len(self.request.prompt_ids) else None

    def read(self, at_most: int, others: Sequence[FakeReading] = ()) -> tuple[int, Any]:
        if others:
            requests = [one.request for one in (self, *others)]
            self.served.notes.append(("read", *map(name_of, requests)))
            return sum(one.left for one in (self, *others)), FakeGroup(self.served, requests)
        count = min(at_most, self.left)
        self.left -= count
        self.served.notes.append(("read", name_of(self.request), count))
        total = len(self.request.prompt_ids)
        self.request.note_read_ids(self.request.prompt_ids[total - self.left - count : total - self.left])
        self.request.send(Progress(total - self.left, total))
        return count, None if self.left else FakeGroup(self.served, [self.request])


class FakeGroup(Group):
    """A request that takes steps."""

    def __init__(self, served: FakeServed, requests: list[Request]) -> None:
        self.served, self.requests = served, requests

    @property
    def length(self) -> int:
        return max(request.held_ids for request in self.requests)

    def begin_step(self) -> None:
        self.served.notes.append(("step", *map(name_of, self.requests)))

    def hand_ids_to_requests(self) -> None:
        for request in self.requests:
            if request.cancelled:
                request.reason = "cancelled"
            else:
                request.count_chosen(Chosen(1))

    def remove_ended(self) -> list[Request]:
        leaving = [request for request in self.requests if request.reason is not None]
        self.requests = [request for request in self.requests if request.reason is None]
        return leaving

    def launch_pass(self) -> None:
        for request in self.requests:
            request.note_read_ids([1])

    def finish_choosing(self) -> None:
        return

    def drop_requests(self) -> None:
        self.requests = []


class FakePartsEngine(ThreadedEngine):
    """An engine of these parts. load: returns a `FakeServed`."""

    def _make_served(self, load: Callable[[], Any], name: str) -> Any:
        self.tokenizer = None
        return load()

    def _make_reading(self, served: Any, request: Request) -> Any:
        return served.make_reading(request)

    def _score_in_parts(self, served: Any, row: Any, top: int) -> Iterator[Any]:
        raise AssertionError("these parts score nothing")

    def _memory_figures(self) -> dict[str, int]:
        return {"memory_bytes": 0, "peak_memory_bytes": 0}


def name_of(request: Request) -> int:
    """A request's name: the first id of its prompt."""
    return int(request.checked.base_ids[0])
