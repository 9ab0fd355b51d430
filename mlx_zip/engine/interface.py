"""The engine's interface: all that a front (server, chat, app, harness) knows of a model. Imports no MLX, no PyTorch.

A front submits base ids with limits and sampling options, and receives events such as `Emitted` and `Finished`. The
front turns base ids into text and finds stop strings (`mlx_zip.text`).
"""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mlx_zip.errors import EngineError, MlxZipError


class Constraint(Protocol):
    """Restricts the base ids of an answer, for example to a grammar. `push` advances a constraint's state.

    Each request needs a constraint of its own. The engine calls all methods in the engine's thread.
    """

    def mask(self) -> np.ndarray:
        """Returns a bool array [V]: which base ids may come next. eos ids are True if the answer may end here."""
        ...

    def accepts(self, base_ids: Sequence[int]) -> bool:
        """Returns whether the answer may go on with all of `base_ids`, in this order. Does not change the state."""
        ...

    def push(self, base_ids: Sequence[int]) -> None:
        """Advances the state by emitted base ids. Raises `GenerationError` if the constraint does not accept them."""
        ...


@dataclass(frozen=True)
class Submission:
    """One request to an engine.

    base_ids: the whole prompt, including what a kept session may already hold. max_tokens: maximum number of base
    tokens in the answer, -1 if only the context limits the answer. eos_ids: base ids that end the answer, also inside a
    hypertoken; if empty, only a limit ends the answer. sampling: fields of `sampling.options.Sampling` by name.
    top_logprobs: number of most likely ids to report per step; with 0 only the chosen id's log-probability is reported,
    with None no log-probabilities. constraint: restricts the answer. pack: pack whose entries a new codebook begins
    with, a path or a `Pack`; None for the model's own. keep: whether the engine keeps the request's cache as a session,
    for later requests that begin with the same base ids. show: whether the engine sets `Emitted.learned` and
    `Emitted.origin`, and sends `Counted` events. prediction: base ids that the answer will probably begin with. The
    engine proposes them as drafts if `RunOptions.draft` is "lookup" or "auto". A prediction never changes the answer.
    """

    base_ids: Sequence[int]
    max_tokens: int = -1
    eos_ids: frozenset[int] = frozenset()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    top_logprobs: int | None = None
    constraint: Constraint | None = None
    pack: Any = None
    keep: bool = True
    show: bool = False
    prediction: Sequence[int] = ()


@dataclass(frozen=True)
class Likely:
    """One of the most likely ids at a position: its base ids and its natural log-probability."""

    base_ids: tuple[int, ...]
    logprob: float


@dataclass(frozen=True)
class PromptId:
    """One id of a compressed prompt. base_ids: expansion of the id. logprob: natural log-probability of the id given
    all earlier ids, None for the prompt's first id. likely: the most likely ids at this position, most likely first.
    """

    base_ids: tuple[int, ...]
    logprob: float | None = None
    likely: tuple[Likely, ...] = ()


@dataclass(frozen=True)
class Differing:
    """The first difference between a prompt and the kept session that has the longest common prefix with the prompt.

    at: number of base tokens before the difference. kept: the session's next few base ids. now: those of the prompt.
    """

    at: int
    kept: tuple[int, ...]
    now: tuple[int, ...]


@dataclass(frozen=True)
class Started:
    """Sent before a prompt is read. prompt_tokens: base tokens of the prompt. cached_tokens: base tokens of the prompt
    that a session already holds. prompt_ids: number of ids left to read. differing: where the prompt differs from a
    session; None if the prompt continues a whole session, or no session begins as the prompt does.
    """

    prompt_tokens: int
    cached_tokens: int
    prompt_ids: int
    differing: Differing | None = None


@dataclass(frozen=True)
class Held:
    """Sent before `Started` if the request must wait for the running answers of another engine, named `engine`."""

    engine: str


@dataclass(frozen=True)
class Progress:
    """Progress of prefill. read: ids read so far. total: ids to read.

    Also sent during an answer when LongRoPE switches to its long factors, because the context is then read again.
    """

    read: int
    total: int


class Origin(NamedTuple):
    """Where a codebook's entry was learned. kind: "pack", "prompt" or "answer".

    at: how many base tokens of prompt and answer had been read when the entry was installed, -1 for a pack's entry.
    """

    kind: str
    at: int


@dataclass(frozen=True)
class Emitted:
    """One emitted id. base_ids: expansion of the id, cut after an eos id or at the limit.

    logprob: natural log-probability of the id, None if `Submission.top_logprobs` is None. likely: the most likely ids
    of the step, most likely first. learned: base ids of each codebook entry installed since the previous `Emitted`; ()
    without `Submission.show`. origin: where a hypertoken's entry was learned; None for a base id, or without
    `Submission.show`. last: whether the answer ends with this id, at an eos id or a limit. from_draft: whether a draft
    proposed the id; such an id takes no pass of its own.
    """

    id: int
    base_ids: tuple[int, ...]
    logprob: float | None = None
    likely: tuple[Likely, ...] = ()
    learned: tuple[tuple[int, ...], ...] = ()
    origin: Origin | None = None
    last: bool = False
    from_draft: bool = False


@dataclass(frozen=True)
class Counts:
    """Figures of one request. *_tokens count base tokens; prompt_ids and steps count ids; times are seconds.

    cached_tokens: base tokens of the prompt that were not read, because a session held them. hypertokens: steps that
    emitted a hypertoken. entries, codebook_size: used and available slots of the codebook. kv_bytes_saved: bytes of KV
    cache saved, compared with the base model on the same text. proposed: ids that drafts proposed. accepted: proposed
    ids that were emitted; each saved a pass of the model. proposed_tokens, accepted_tokens: base tokens of the proposed
    and of the accepted ids. queued_s: from submission until the request began. first_id_s: from submission until the
    first emitted id. total_s: from submission until now.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_ids: int = 0
    base_tokens: int = 0
    steps: int = 0
    hypertokens: int = 0
    entries: int = 0
    codebook_size: int = 0
    kv_bytes_saved: int = 0
    proposed: int = 0
    accepted: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    queued_s: float = 0.0
    first_id_s: float = 0.0
    total_s: float = 0.0

    @property
    def passes(self) -> int:
        """Number of passes of the model for the emitted ids: one per id, but none for an accepted draft id."""
        return self.steps - self.accepted

    @property
    def base_tokens_per_pass(self) -> float:
        """Base tokens per pass of the model, 0 before the first one."""
        return self.base_tokens / self.passes if self.passes else 0.0


@dataclass(frozen=True)
class Counted:
    """The figures of an answer so far. Sent about ten times per second if `Submission.show` is set."""

    counts: Counts


@dataclass(frozen=True)
class Finished:
    """The last event of a request that did not fail. reason: "stop" at an eos, "length" at a limit, or "cancelled"."""

    reason: str
    counts: Counts


@dataclass(frozen=True)
class Failed:
    """The last event of a request that failed; the engine keeps running."""

    error: MlxZipError


Event = Held | Started | Progress | Emitted | Counted | Finished | Failed


@dataclass(frozen=True)
class EngineInfo:
    """Facts about an engine's model. name: name that the model was opened by. vocab_size: number of base ids. context:
    maximum number of positions, None without a limit. merge_size, codebook_size: codec parameters, 0 for a model
    without hypertokens. fingerprint: hash of weights and tokenizer. max_prompt_tokens: upper bound on the base tokens
    of a prompt, however well the prompt compresses; None without a limit. max_requests: maximum number of requests that
    run or wait at one time, None without a limit.
    """

    name: str
    vocab_size: int
    context: int | None
    merge_size: int
    codebook_size: int
    fingerprint: str
    max_prompt_tokens: int | None = None
    max_requests: int | None = None


@dataclass(frozen=True)
class SessionInfo:
    """A kept session. base_tokens, ids: how many of each the session holds. bytes: memory that the session takes, 0 if
    the session is on disk only. used: time of the last use in seconds since 1970.
    """

    name: str
    base_tokens: int
    ids: int
    bytes: int
    on_disk: bool
    used: float


@dataclass
class Figures:
    """An engine's counts since its start. running, waiting, sessions and *_bytes (except the peak) are current values.

    proposed, accepted: as in `Counts`. passes: passes of the model for emitted ids; a pass over a batch counts once per
    request.
    """

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    base_tokens: int = 0
    steps: int = 0
    hypertokens: int = 0
    proposed: int = 0
    accepted: int = 0
    passes: int = 0
    sessions: int = 0
    session_bytes: int = 0
    disk_bytes: int = 0
    memory_bytes: int = 0
    peak_memory_bytes: int = 0


@dataclass(frozen=True)
class Ceiling:
    """Upper bound on a model's speed, set by the memory bandwidth. steps_per_s: the bound. bytes_per_s: the measured
    bandwidth. bytes_per_step: bytes of weights that a step reads. A step also reads KV caches and hyper rows, so no
    step reaches the bound.
    """

    steps_per_s: float
    bytes_per_s: float
    bytes_per_step: int


class Ticket:
    """Identifies one submitted request. Tickets are compared by identity."""


Deliver = Callable[[Event], None]


class Engine(ABC):
    """Serves requests with one model, any number at a time. All methods may be called from any thread.

    tokenizer: has the attributes of `mlx_zip.text.tokenizers.Tokenizer`. info: facts about the model. Context manager:
    closes the engine at the end. `note_answer` and the methods on sessions raise `EngineStoppedError` after `close` and
    after a fault that ended the engine's thread.
    """

    tokenizer: Any
    info: EngineInfo

    @abstractmethod
    def submit(self, submission: Submission, deliver: Deliver) -> Ticket:
        """Queues a request and returns at once. Calls `deliver` with each event, in order, in the engine's thread.

        The last event is `Finished` or `Failed`. `deliver` must return soon and must not raise. Raises before anything
        runs: `GenerationError` if the request cannot be met, `PromptTooLongError` if the prompt exceeds the context or
        the engine's bound, `EngineBusyError` if too many requests wait, `EngineStoppedError` if the engine has stopped.
        """

    @abstractmethod
    def cancel(self, ticket: Ticket) -> None:
        """Ends a request soon, with `Finished("cancelled", ...)`; does nothing if the request has already ended.

        If `Submission.keep` is set, the request's session is kept.
        """

    @abstractmethod
    def check_pack(self, pack: Any) -> None:
        """Raises `GenerationError`, with the reason, if requests of this engine cannot begin with `pack`.

        pack: as in `Submission`.
        """

    @abstractmethod
    def count_prompt_ids(self, base_ids: Sequence[int], pack: Any = None) -> int:
        """Returns how many ids a prompt is compressed to, with a codebook that begins with `pack` (see `Submission`).

        Raises `GenerationError` if requests of this engine cannot begin with `pack`.
        """

    @abstractmethod
    def score_prompt_ids(self, base_ids: Sequence[int], top_logprobs: int = 0, pack: Any = None) -> Iterator[PromptId]:
        """Yields each id of a compressed prompt with its log-probability, while running requests go on.

        top_logprobs: number of most likely ids to report per position. pack: as in `Submission`. Raises what `submit`
        raises, and `GenerationError` if the model is split over several machines.
        """

    @abstractmethod
    def note_answer(self, ticket: Ticket, key: str, base_ids: Sequence[int]) -> None:
        """Stores an answer's base ids under `key` (for example the answer's text) with the request's session.

        Does nothing if the request has ended and its session was not kept.
        """

    @abstractmethod
    def answers(self) -> Mapping[str, Sequence[int]]:
        """Returns the base ids of all kept sessions' noted answers, by key, for `mlx_zip.text.prompts.Chat.ids`."""

    @abstractmethod
    def sessions(self) -> list[SessionInfo]:
        """Returns the kept sessions, the most recently used first."""

    @abstractmethod
    def save_session(self, name: str, file: Path) -> None:
        """Writes a session to a safetensors file. Raises `EngineError` if the name is unknown or writing fails."""

    @abstractmethod
    def load_session(self, file: Path) -> SessionInfo:
        """Reads a session from a file and keeps it. Raises `EngineError` if the file is damaged or of another model."""

    @abstractmethod
    def drop_session(self, name: str) -> None:
        """Deletes a session from memory and disk. Raises `EngineError` if the name is unknown."""

    @abstractmethod
    def purge_sessions(self) -> int:
        """Deletes all sessions from memory and disk, and returns how many there were."""

    def without_hypertokens(self, name: str) -> Engine:
        """Returns a new engine that shares this engine's weights and reads and emits base ids only.

        name: name of the new engine, which must be closed before this engine. Raises `EngineError` if the model cannot
        be run without its hypertokens.
        """
        raise EngineError(f"{self.info.name} cannot be run without its hypertokens")

    def unwire_idle_memory(self) -> bool:
        """Unwires an idle model's memory on a Mac until the next request, so that the system can page it out.

        Returns False, without unwiring, if requests run. Otherwise returns True, even if no memory was wired.
        """
        return True

    @abstractmethod
    def figures(self) -> Figures:
        """Returns the engine's figures."""

    def ceiling(self) -> Ceiling | None:
        """Returns the upper bound on the model's speed on this machine, None if unknown.

        The first call measures the memory bandwidth for up to a second. Make this call before the first request,
        because running requests distort the result.
        """
        return None

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the engine can serve requests: False after `close`, and after a fault that ended its thread."""

    @abstractmethod
    def call_on_fault(self, call: Callable[[BaseException], None]) -> None:
        """Calls `call` with the exception once a fault ends the engine's thread, or at once if a fault already has."""

    @abstractmethod
    def close(self, drain_s: float = 0.0) -> None:
        """Refuses new requests, waits up to `drain_s` seconds for open ones, cancels the rest, and ends the thread."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def events(engine: Engine, submission: Submission) -> Iterator[Event]:
    """Submits a request and yields its events. Stopping early cancels the request. Raises what `submit` raises."""
    arrived: queue.SimpleQueue[Event] = queue.SimpleQueue()
    ticket = engine.submit(submission, arrived.put)
    try:
        while True:
            event = arrived.get()
            yield event
            if isinstance(event, Finished | Failed):
                return
    finally:
        engine.cancel(ticket)
