"""The engine's interface: all that a front (server, chat, app, harness) knows of a model. Imports no MLX, no PyTorch.

A front submits base ids with limits and sampling options, and gets events: emitted ids with their expansions,
log-probabilities and counts. Text is the front's work: `mlx_zip.text` turns base ids into text and finds stop strings.
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
    """Restricts what an answer may consist of, for example to a grammar. Its state follows the answer's base ids.

    The engine calls a constraint in its own thread. Each request needs a constraint of its own.
    """

    def mask(self) -> np.ndarray:
        """Returns which base ids may come next, [V] bool; True for the eos ids if the answer may end here."""
        ...

    def accepts(self, base_ids: Sequence[int]) -> bool:
        """Returns whether all these base ids may come next, one after the other. The state does not change."""
        ...

    def push(self, base_ids: Sequence[int]) -> None:
        """Advances the state by emitted base ids. Raises `GenerationError` for ids that are not accepted."""
        ...


@dataclass(frozen=True)
class Submission:
    """One request to an engine.

    base_ids: the whole prompt; the engine finds by itself how much of it a kept session holds. max_tokens: base tokens
    of the answer, -1 for no limit but the context's. eos_ids: base ids that end the answer, also inside a hypertoken;
    empty to end at the limit only. sampling: fields of `mlx_zip.sampling.options.Sampling` by name. top_logprobs:
    None for no log-probabilities, else how many of the most likely ids to report per step, next to the chosen one.
    constraint: restricts the answer. pack: pack that a new codebook begins with, a path or a `Pack`; None for the
    model's own. keep: whether the engine keeps the request's state as a session, for later requests that begin with the
    same base ids. show: whether events tell where entries were learned (`Emitted.origin`) and count the answer so far
    (`Counted`). prediction: base ids that the answer will probably begin with. They are proposed as drafts if the
    engine looks for drafts in the text (`RunOptions.draft`), and never change the answer.
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
    """An id that could have been emitted: its base ids and its natural log-probability."""

    base_ids: tuple[int, ...]
    logprob: float


@dataclass(frozen=True)
class PromptId:
    """One id of a compressed prompt. base_ids: what it expands to. logprob: natural log-probability of the id given all
    ids before it, None for the first one. likely: the most likely ids at its position, most likely first.
    """

    base_ids: tuple[int, ...]
    logprob: float | None = None
    likely: tuple[Likely, ...] = ()


@dataclass(frozen=True)
class Differing:
    """Where a prompt first differs from the kept session that has most in common with it.

    at: number of base tokens before the difference. kept, now: the next few base ids of the session, and of the prompt.
    """

    at: int
    kept: tuple[int, ...]
    now: tuple[int, ...]


@dataclass(frozen=True)
class Started:
    """The prompt is about to be read. prompt_tokens: its base tokens. cached_tokens: how many of these a session
    already holds. prompt_ids: ids left to read. differing: None if the prompt continues a whole session, or shares its
    beginning with no session.
    """

    prompt_tokens: int
    cached_tokens: int
    prompt_ids: int
    differing: Differing | None = None


@dataclass(frozen=True)
class Held:
    """The request waits until running answers of another engine, named `engine`, end. Comes before `Started`."""

    engine: str


@dataclass(frozen=True)
class Progress:
    """Progress of prefill. read: ids read so far. total: ids to read.

    Also comes in the middle of an answer, when LongRoPE changes its factors and the context is read again.
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
    """One emitted id. base_ids: what it expands to, without what follows an eos or the limit.

    logprob: natural log-probability of the id, None unless asked for. likely: the most likely ids of the step, most
    likely first. learned: base ids of each entry that was installed in the codebook since the last `Emitted`, usually
    by this id. origin: with `Submission.show`, where a hypertoken's entry was learned, None for a base id. last:
    whether the answer ends with this id, at an eos or a limit. from_draft: whether a draft had proposed the id, which
    then took no pass of its own.
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
    cache saved, compared with the base model on the same text. proposed, accepted: draft ids, and how many of them were
    emitted; each accepted id saved a pass of the model. proposed_tokens, accepted_tokens: base tokens of these ids.
    queued_s, first_id_s, total_s: from submission until the request began, until its first id, and until now.
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
        """Passes of the model that the emitted ids took: one each, but none for an accepted draft id."""
        return self.steps - self.accepted

    @property
    def base_tokens_per_pass(self) -> float:
        """Base tokens per pass of the model, 0 before the first one."""
        return self.base_tokens / self.passes if self.passes else 0.0


@dataclass(frozen=True)
class Counted:
    """The figures of an answer so far; with `Submission.show` only, about ten times per second."""

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
    """Facts about an engine's model. name: the name that it was opened by. vocab_size: number of base ids. context:
    positions, None without a limit. merge_size, codebook_size: 0 for a model without hypertokens. fingerprint: of
    weights and tokenizer. max_prompt_tokens: upper bound on the base tokens of a prompt, however well it compresses;
    None without a limit. max_requests: how many requests can run and wait at one time, None without a limit.
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
    """A kept session. base_tokens, ids: how many it holds. bytes: in memory, 0 if it is on disk only. used: time of its
    last use, seconds since 1970.
    """

    name: str
    base_tokens: int
    ids: int
    bytes: int
    on_disk: bool
    used: float


@dataclass(frozen=True)
class Figures:
    """An engine's counts since it started. Current values: running, waiting, sessions, and *_bytes except the peak.

    proposed, accepted: as in `Counts`. passes: passes of the model for emitted ids, counted once per request in a pass.
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
    """Upper bound on a model's speed by memory bandwidth: steps per second, measured bandwidth, and bytes per step.

    bytes_per_step counts the weights only; a step also reads KV caches and hyper rows, so the bound is never reached.
    """

    steps_per_s: float
    bytes_per_s: float
    bytes_per_step: int


class Ticket:
    """Names one submitted request; compared by identity."""


Deliver = Callable[[Event], None]


class Engine(ABC):
    """A model that serves requests, any number at a time. All methods may be called from any thread.

    tokenizer: has the attributes of `mlx_zip.text.tokenizers.Tokenizer`. info: facts about the model. The `with`
    statement closes the engine at its end. Methods on answers and sessions raise `EngineStoppedError` once the engine
    is closed or a fault has ended it.
    """

    tokenizer: Any
    info: EngineInfo

    @abstractmethod
    def submit(self, submission: Submission, deliver: Deliver) -> Ticket:
        """Takes a request and returns at once. `deliver` is called with each event, in order, in the engine's thread.

        The last event is one `Finished` or one `Failed`. `deliver` must return soon and must not raise. Raises, before
        anything runs: `GenerationError` for a request that cannot be met, `PromptTooLongError` for a prompt beyond the
        context or the engine's bound, `EngineBusyError` if too many requests wait, `EngineStoppedError`.
        """

    @abstractmethod
    def cancel(self, ticket: Ticket) -> None:
        """Ends a request soon, with `Finished("cancelled", ...)`; does nothing if it has ended.

        The request's state is kept if `Submission.keep` is set.
        """

    @abstractmethod
    def check_pack(self, pack: Any) -> None:
        """Raises `GenerationError`, with the reason, if no request of this engine can begin with a pack.

        pack: as in `Submission`.
        """

    @abstractmethod
    def prompt_size(self, base_ids: Sequence[int], pack: Any = None) -> int:
        """Returns the number of ids of a prompt, compressed from `pack` on. Raises as `check_pack` does.

        pack: as in `Submission`.
        """

    @abstractmethod
    def prompt_ids(self, base_ids: Sequence[int], top_logprobs: int = 0, pack: Any = None) -> Iterator[PromptId]:
        """Yields the ids of a compressed prompt, with their log-probabilities; running requests go on meanwhile.

        top_logprobs: number of most likely ids to report per position. pack: as in `Submission`. Raises what `submit`
        raises, also `GenerationError` if the model is split over several machines.
        """

    @abstractmethod
    def note_answer(self, ticket: Ticket, key: str, base_ids: Sequence[int]) -> None:
        """Stores an answer's base ids under `key` (for example the answer's text) with the request's session.

        Does nothing if the request has ended and no session of it is kept.
        """

    @abstractmethod
    def answers(self) -> Mapping[str, Sequence[int]]:
        """Returns the noted answers of all kept sessions, by key; for `mlx_zip.text.prompts.Chat.ids`."""

    @abstractmethod
    def sessions(self) -> list[SessionInfo]:
        """Returns the kept sessions, the last used first."""

    @abstractmethod
    def save_session(self, name: str, file: Path) -> None:
        """Writes a session to a safetensors file. Raises `EngineError` for an unknown name or a failed write."""

    @abstractmethod
    def load_session(self, file: Path) -> SessionInfo:
        """Adds the session in a file. Raises `EngineError` for a file that is damaged or of another model."""

    @abstractmethod
    def drop_session(self, name: str) -> None:
        """Forgets a session, in memory and on disk. Raises `EngineError` for an unknown name."""

    @abstractmethod
    def purge_sessions(self) -> int:
        """Forgets all sessions, in memory and on disk, and returns how many there were."""

    def without_hypertokens(self, name: str) -> Engine:
        """Returns an engine on the same weights in memory that reads and emits base ids only.

        name: of the new engine, which must be closed before this one. Raises `EngineError` if the model cannot be run
        without its hypertokens.
        """
        raise EngineError(f"{self.info.name} cannot be run without its hypertokens")

    def unwire(self) -> bool:
        """Unwires an idle model's memory on a Mac until the next request, so that the system can page it out.

        Returns False and does nothing while requests run, else True, also where nothing is wired.
        """
        return True

    @abstractmethod
    def figures(self) -> Figures:
        """Returns the engine's figures."""

    def ceiling(self) -> Ceiling | None:
        """Returns the upper bound on the model's speed on this machine, None if unknown.

        The first call measures for up to a second. Call it before the first request: running ones would distort it.
        """
        return None

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the engine can still serve: False after `close`, and after a fault that ended its thread."""

    @abstractmethod
    def on_death(self, call: Callable[[BaseException], None]) -> None:
        """Calls `call` with the exception if a fault ends the engine's thread; at once if one has already ended it."""

    @abstractmethod
    def close(self, drain_s: float = 0.0) -> None:
        """Refuses new requests, lets the open ones go on for up to `drain_s` seconds, cancels the rest, and ends."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def events(engine: Engine, submission: Submission) -> Iterator[Event]:
    """Submits a request and yields its events; leaving the loop early cancels it. Raises what `submit` raises."""
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
