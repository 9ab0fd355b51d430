"""Protocols through which the scheduler uses a loaded model. Each engine implements them.

Members with a default value or a body are for optional features; an engine without the feature inherits the default. A
cache is what one request owns: its KV cache and its codebook. Only implementations of these protocols look inside a
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from mlx_zip.codec import Codebook
from mlx_zip.codec.ids import Uint32s
from mlx_zip.engine.drafts import Drafter
from mlx_zip.engine.options import RunOptions
from mlx_zip.engine.sampling.options import Sampling
from mlx_zip.engine.submissions import ModelFacts


class State(Protocol):
    """The codebooks of a cache, one per row."""

    @property
    def books(self) -> Sequence[Codebook]: ...


class Group(Protocol):
    """Requests that take their steps together. requests: requests now in the group. length: ids in the longest cache.

    The scheduler calls the parts of a step in this order: `begin_step`, `hand_ids_to_requests`, `remove_ended`,
    `launch_pass`, `finish_choosing`; see `mlx_zip.engine.mlx.group`. In a step that merges groups, the scheduler does
    not call `begin_step`.
    """

    requests: list[Any]

    @property
    def length(self) -> int: ...

    def begin_step(self) -> None:
        """Starts the next step if that is possible before the host has read the chosen ids."""

    def hand_ids_to_requests(self) -> None: ...

    def remove_ended(self) -> list[Any]: ...

    def launch_pass(self) -> None: ...

    def finish_choosing(self) -> None: ...

    def drop_requests(self) -> None: ...

    def merge_key(self) -> bool | None:
        """Returns a key, equal for groups that may be merged now; None if this group must not be merged."""
        return None

    def rows_switching_factors(self) -> list[int]:
        """Returns the rows whose next step needs other LongRoPE factors than the group's, to be split off."""
        return []

    def split_off_rows(self, rows: Sequence[int]) -> Sequence[Any]:
        """Removes rows from the group and returns their requests. Each then gets a new `Reading`."""
        return []

    def merge_groups(self, others: Sequence[Any]) -> None:
        """Takes in the requests of other groups with an equal `merge_key`."""


class Reading(Protocol):
    """Prefill of one request: its cache reads the request's `next_ids`. left: number of ids not yet read.

    batch_key: readings with equal keys can be read in one call; None if this reading must be read alone.
    """

    request: Any

    @property
    def left(self) -> int: ...

    @property
    def batch_key(self) -> Hashable | None:
        return None

    def read(self, at_most: int, others: Sequence[Any] = ()) -> tuple[int, Any]:
        """Reads up to `at_most` ids of this reading; if `others` is not empty, all ids of this reading and of `others`.

        Returns the number of ids read and, once all ids are read, the group of the requests, None before.
        """
        ...


class Served(Protocol):
    """A loaded model. hyper: whether the model has hypertokens. batches: whether groups of requests may be merged.

    machines: the group of machines that the model is split over, None on one machine. context, by_base, vocab_size: see
    `ModelFacts`. canonical: whether canonical decoding is on. long_context: number of positions above which LongRoPE
    uses its long factors, None for models without LongRoPE. kv_bytes_per_id: bytes of KV cache per id of one request.
    weight_bytes: bytes of all weights, 0 if groups are never merged.
    """

    options: RunOptions
    hyper: bool
    machines: Any = None
    context: int | None
    by_base: bool
    vocab_size: int
    canonical: bool
    long_context: int | None = None
    kv_bytes_per_id: int

    @property
    def batches(self) -> bool:
        return False

    @property
    def weight_bytes(self) -> int:
        return 0

    def make_facts(self) -> ModelFacts:
        """Returns what checks of submissions need. Called once, when an engine has loaded the model."""
        ...

    def new_cache(self, start: Any) -> Any:
        """Returns an empty cache for a request. start: pack that the codebook begins with, None for the model's own."""
        ...

    def state_of(self, cache: Any) -> State | None:
        """Returns the codebooks of a cache, None for a plain model's cache."""
        ...

    def make_request_sampler(self, options: Sampling, state: Any) -> Any:
        """Returns a request's sampler. state: random state to continue from if `options` has no seed."""
        ...

    def make_penalties(self, options: Sampling, state: Any) -> list[Any]:
        """Returns a request's penalties and biases, in the form that the model's `Group` applies."""
        ...

    def make_drafter(self, text: Callable[[], Sequence[int]], prediction: Sequence[int] | Uint32s) -> Drafter | None:
        """Returns the drafter that proposes ids for a request, None if drafts are off.

        text: function that returns the request's base ids so far. prediction: as in `Submission`.
        """
        return None

    def free(self, cache: Any) -> None:
        """Frees a cache that neither a request nor a session uses any more."""

    def clear_draft_cache(self) -> None:
        """Empties the draft model's cache, which holds the text of a request."""

    def free_unused_memory(self) -> None:
        """Returns cached memory that is not in use to the device."""

    def settle(self) -> None:
        """Saves what only the engine's thread can save, such as pass costs. Called before the thread ends."""
