"""Protocols that the scheduler uses, for a loaded model and its requests; MLX and PyTorch each implement them.

A cache is what one request owns: its KV cache and its codebook. Only the classes behind these protocols look inside.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from mlx_zip.codec import Codebook
from mlx_zip.codec.ids import Uint32s
from mlx_zip.engine.drafts import Drafter
from mlx_zip.engine.interface import EngineInfo
from mlx_zip.engine.options import RunOptions
from mlx_zip.engine.submissions import ModelFacts
from mlx_zip.sampling.options import Sampling


class State(Protocol):
    """The codebooks of a cache, one per row."""

    @property
    def books(self) -> Sequence[Codebook]: ...


class Group(Protocol):
    """Requests that take their steps together. requests: the current ones. length: ids in the longest cache.

    The parts of a step are called in this order: `begin`, `read`, `settle`, `launch`, `finish`; see
    `mlx_zip.engine.mlx.group`. A step that merges groups leaves out `begin`.
    """

    requests: list[Any]

    @property
    def length(self) -> int: ...

    def begin(self) -> None: ...

    def read(self) -> None: ...

    def settle(self) -> list[Any]: ...

    def launch(self) -> None: ...

    def finish(self) -> None: ...

    def key(self) -> bool | None: ...

    def switching(self) -> list[int]: ...

    def split(self, rows: Sequence[int]) -> Sequence[Any]:
        """Removes rows and returns their requests; a `Reading` then continues each of them."""
        ...

    def join(self, others: Sequence[Any]) -> None: ...

    def drop(self) -> None: ...


class Reading(Protocol):
    """Prefill of one request, whose cache reads its `next_ids`. left: number of ids not yet read.

    key: readings with equal keys can be read in one call; None for one that must be read alone.
    """

    request: Any

    @property
    def left(self) -> int: ...

    @property
    def key(self) -> Hashable | None: ...

    def read(self, at_most: int, others: Sequence[Any] = ()) -> tuple[int, Any]:
        """Reads up to `at_most` ids or, if there are others, all ids of all of these readings.

        Returns the number of ids read, and the group of the requests once all their ids are read, None before.
        """
        ...


class Served(Protocol):
    """A loaded model. hyper: whether it has hypertokens. batches: whether groups of requests may be merged.

    machines: those that the model is split over, None if it is whole. context, by_base, vocab_size: see `ModelFacts`.
    canonical: whether canonical decoding is on. long_context: positions beyond which LongRoPE uses its long factors,
    None for models without. kv_bytes_per_id: bytes of the KV caches per id and row. weight_bytes: of all weights.
    """

    options: RunOptions
    hyper: bool
    machines: Any
    context: int | None
    by_base: bool
    vocab_size: int
    canonical: bool
    long_context: int | None
    kv_bytes_per_id: int

    @property
    def batches(self) -> bool: ...

    @property
    def weight_bytes(self) -> int: ...

    def new_cache(self, start: Any) -> Any:
        """Returns the cache of a new request. start: pack that its codebook begins with, None for the model's own."""
        ...

    def state_of(self, cache: Any) -> State | None:
        """Returns the codebooks of a cache, None for a cache without."""
        ...

    def make_draws(self, options: Sampling, state: Any) -> Any:
        """Returns a request's sampler. state: random state to continue from if the options have no seed."""
        ...

    def make_penalties(self, options: Sampling, state: Any) -> list[Any]:
        """Returns a request's penalties and biases, in the form that the model's `Group` applies."""
        ...

    def make_drafter(self, text: Callable[[], Sequence[int]], prediction: Sequence[int] | Uint32s) -> Drafter | None:
        """Returns the drafter that proposes ids for a request, None if nothing is to be proposed.

        text: returns the request's base ids so far. prediction: as in `Submission`.
        """
        ...

    def free(self, cache: Any) -> None:
        """Frees a cache that neither a request nor a session uses any more."""
        ...

    def forget_text(self) -> None:
        """Empties the draft model's cache, which holds a request's text outside the sessions."""
        ...

    def free_unused(self) -> None:
        """Returns cached memory that is not in use to the device."""
        ...

    def settle(self) -> None:
        """Does the last work of the engine's thread, such as saving pass costs; called before the thread ends."""
        ...


class ServedByEngine(Served, Protocol):
    """A loaded model that an engine serves. facts: for the checks of submissions. info: for fronts."""

    facts: ModelFacts
    info: EngineInfo
