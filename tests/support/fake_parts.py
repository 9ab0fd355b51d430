"""What an engine's thread needs of a model, without any model: each step emits the id 1, and everything is noted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from mlx_zip.engine import EngineInfo, Progress
from mlx_zip.engine.job import Chosen, Job
from mlx_zip.engine.options import RunOptions
from mlx_zip.engine.submissions import ModelFacts
from mlx_zip.engine.threaded import ThreadedEngine

VOCAB = 1000
Notes = list[tuple[Any, ...]]  # ("read", request, ids) and ("step", request, ...); a request is named by its first id


class FakeServed:
    """A plain model whose requests run in groups of one. notes: what was read and stepped, in order."""

    hyper, batches, machines, context, by_base, canonical, long_context = False, False, None, None, False, False, None
    vocab_size, kv_bytes_per_id, weight_bytes = VOCAB, 1, 0
    info = EngineInfo("fake", VOCAB, None, 0, 0, "")
    facts = ModelFacts(VOCAB, None, None, False, None, "", lambda start: None, 1)

    def __init__(self, chunk: int = 10) -> None:
        self.options = RunOptions(prefill_step_size=chunk)
        self.notes: Notes = []
        self.free: Callable[[Any], None] = lambda cache: None
        self.make_reading: Callable[[Job], Any] = lambda job: FakeReading(self, job)

    def new_cache(self, start: Any) -> Any:
        return SimpleNamespace()

    def state_of(self, cache: Any) -> None:
        return None

    def make_draws(self, options: Any, state: Any) -> Any:
        return SimpleNamespace(state=None)

    def make_penalties(self, options: Any, state: Any) -> list[Any]:
        return []

    def free_unused(self) -> None:
        return

    def settle(self) -> None:
        return


class FakeReading:
    """A prompt that is being read."""

    def __init__(self, served: FakeServed, job: Job) -> None:
        self.served, self.job, self.left = served, job, len(job.prompt_ids)

    def read(self, at_most: int) -> tuple[int, Any]:
        count = min(at_most, self.left)
        self.left -= count
        self.served.notes.append(("read", name_of(self.job), count))
        total = len(self.job.prompt_ids)
        self.job.note_read(self.job.prompt_ids[total - self.left - count : total - self.left])
        self.job.send(Progress(total - self.left, total))
        return count, None if self.left else FakeGroup(self.served, [self.job])


class FakeGroup:
    """A request that takes steps."""

    def __init__(self, served: FakeServed, jobs: list[Job]) -> None:
        self.served, self.jobs = served, jobs

    @property
    def length(self) -> int:
        return max(job.held_ids for job in self.jobs)

    def begin(self) -> None:
        self.served.notes.append(("step", *map(name_of, self.jobs)))

    def read(self) -> None:
        for job in self.jobs:
            if job.handle.cancelled:
                job.reason = "cancelled"
            else:
                job.take(Chosen(1))

    def settle(self) -> list[Job]:
        leaving = [job for job in self.jobs if job.reason is not None]
        self.jobs = [job for job in self.jobs if job.reason is None]
        return leaving

    def launch(self) -> None:
        for job in self.jobs:
            job.note_read([1])

    def finish(self) -> None:
        return

    def key(self) -> None:
        return None

    def switching(self) -> list[int]:
        return []

    def split(self, rows: Sequence[int]) -> list[Any]:
        return []

    def join(self, others: Sequence[Any]) -> None:
        return

    def drop(self) -> None:
        self.jobs = []


class FakePartsEngine(ThreadedEngine):
    """An engine of these parts. load: returns a `FakeServed`."""

    def _served(self, load: Callable[[], Any], name: str) -> Any:
        self.tokenizer = None
        return load()

    def _reading(self, served: Any, job: Job) -> Any:
        return served.make_reading(job)

    def _scores(self, served: Any, row: Any, top: int) -> Iterator[Any]:
        raise AssertionError("these parts score nothing")

    def _memory(self) -> dict[str, int]:
        return {"memory_bytes": 0, "peak_memory_bytes": 0}


def name_of(job: Job) -> int:
    """A request's name: the first id of its prompt."""
    return int(job.checked.base_ids[0])
