"""`Request`: the limits, counts and events of one request, from its submission to its last event."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mlx_zip.codec import Codebook, compress_next
from mlx_zip.codec.codebook import base_ids_of_next_id
from mlx_zip.engine.drafts import Draft, Drafter, choose_drafts
from mlx_zip.engine.interface import (
    Counted,
    Counts,
    Deliver,
    Differing,
    Emitted,
    Event,
    Failed,
    Figures,
    Finished,
    Likely,
    Origin,
    Started,
    Ticket,
)
from mlx_zip.engine.parts import Served, State
from mlx_zip.engine.sampling.exclusions import CanonicalIds
from mlx_zip.engine.sampling.penalties import PenaltyTerms
from mlx_zip.engine.sessions.store import Checkout
from mlx_zip.engine.submissions import Checked, context_exceeded_error, push_and_count_tokens
from mlx_zip.errors import EngineError, MlxZipError, first_message_line

log = logging.getLogger(__name__)
COUNT_S = 0.1  # minimum seconds between two `Counted` events of one request


@dataclass
class Chosen:
    """A chosen id. logprob, from_draft: as in `Emitted`. likely: (id, log-probability) pairs, most likely first.

    failed: whether the request failed on the first of several machines. logprobs [W]: the log-probabilities that the id
    was chosen from, None without `Inline.logprobs`.
    """

    id: int
    logprob: float | None = None
    likely: list[tuple[int, float]] = field(default_factory=list)
    failed: bool = False
    logprobs: Any = None
    from_draft: bool = False


@dataclass(frozen=True)
class Inline:
    """Options of a request that runs in its caller's thread, not in an engine's.

    draws: sampler, None to make one from the sampling options. processors: logits processors, called after the
    penalties with (ids read so far [n], logits [1, W]). logprobs: whether the log-probabilities of each choice are
    kept. reads_last: whether the cache also reads the last emitted id, because the caller goes on using the cache. ids:
    the ids of the prompt, hypertokens included; None to compress the prompt's base ids. checkout: the caller's cache,
    None for a new cache; only one request may have these options then.
    """

    draws: Any = None
    processors: Sequence[Any] = ()
    logprobs: bool = False
    reads_last: bool = False
    ids: Any = None
    checkout: Checkout | None = None


class Request(Ticket):
    """One request. The caller's thread creates it and may set `cancelled` and call `add_to`; only the engine's thread
    uses `begin` and all other members.

    cancelled: whether the request is to end. session: name of the request's session, None if there is none yet.
    answers: answers that were noted while there was no session, base ids by key.

    cache: cache of this request alone, None while the request is a row of a batch. reason: finish reason, None while
    the request goes on. error: exception that made the request fail. whole: False if an error left the cache in an
    unknown state. draws: sampler. penalties: logits processors, without canonical decoding. outgrown: whether the
    request must end because all KV caches together exceed their bound. ended: whether the last event was delivered.
    keep: whether the request leaves a session; False after a purge. next_ids: ids that the next `Reading` reads.
    max_steps: maximum number of emitted ids. logprobs [W]: log-probabilities that the last id was chosen from, None
    without `Inline.logprobs`.
    """

    def __init__(self, checked: Checked, deliver: Deliver, inline: Inline | None = None) -> None:
        self.checked, self.submission, self._deliver = checked, checked.submission, deliver
        self.inline = inline or Inline()
        self.cancelled = False
        self.session: str | None = None
        self.answers: dict[str, tuple[int, ...]] = {}
        self.submitted_s, self.begun_s, self.first_s = time.perf_counter(), 0.0, 0.0
        self.cache: Any = None
        self.reason: str | None = None
        self.error: BaseException | None = None
        self.prompt_ids: Any = np.zeros(0, np.uint32)
        self.next_ids: Any = self.prompt_ids
        self.cached_tokens = self.base_tokens = self.steps = self.hypertokens = 0
        self.passes = self.accepted = self.accepted_tokens = 0  # passes: steps whose id no draft proposed
        self._firsts = np.zeros(0, np.uint32)
        self.logprobs: Any = None
        self._read: list[int] = []  # ids that a plain model's cache holds
        self._begun_at = 0  # length of the codebook's log before this request
        self._state: State | None = None
        self._row = 0
        self._emitted: Emitted | None = None
        self.drafter: Drafter | None = None  # None if nothing is to be proposed
        self._origins: Origins | None = None  # made with the first id; None for a plain model, or without `show`
        self._counted_s = 0.0
        self._deaf = self._started = self.outgrown = self.ended = False
        self.whole = True
        self.keep = self.submission.keep

    # ---- from submission to the first id

    def begin(self, served: Served, checkout: Checkout, differing: Differing | None = None) -> None:
        """Starts the request and delivers `Started`.

        checkout: a cache that holds the beginning of the prompt or nothing. differing: as in `Started`. Raises
        `PromptTooLongError` if the prompt leaves no position of the context for an answer.
        """
        self.cache, self.cached_tokens = checkout.cache, checkout.base_tokens
        self.begun_s, self._state, self._row = time.perf_counter(), served.state_of(checkout.cache), 0
        self.draws = self.inline.draws or served.make_request_sampler(self.checked.sampling, checkout.random_state)
        base_ids, submission = self.checked.base_ids, self.submission
        self._by_base, self._context, self.vocab_size = served.by_base, served.long_context, served.vocab_size
        rest, book = base_ids[checkout.base_tokens :], self.book
        ids = rest if book is None or self.inline.ids is not None else compress_next(book, rest)
        self.prompt_ids = self.next_ids = np.asarray(ids if self.inline.ids is None else self.inline.ids)
        self._read = base_ids[: checkout.base_tokens].tolist() if book is None else []
        self._begun_at = 0 if book is None else book.mark()
        used = (
            book.base_length + len(rest) if book is not None and served.by_base else checkout.ids + len(self.prompt_ids)
        )
        context = served.context
        room = math.inf if context is None else context - used
        if context is not None and room < 1:
            raise context_exceeded_error(len(base_ids), self.prompt_tokens_fitting(context - 1 - checkout.ids), context)
        tokens = math.inf if submission.max_tokens == -1 else submission.max_tokens
        self._limit, self.max_steps = min(tokens, room if served.by_base else math.inf), min(tokens, room)
        self.canonical = CanonicalIds(self.book) if served.canonical and self.book is not None else None
        self.penalties = [*served.make_penalties(self.checked.sampling, self._state), *self.inline.processors]
        self._per_id = served.kv_bytes_per_id
        self.drafter = served.make_drafter(lambda: [*self.held_base_ids(), *rest.tolist()], self.checked.prediction)
        self._started = True
        self.send(Started(len(base_ids), checkout.base_tokens, len(self.prompt_ids), differing))

    def prompt_tokens_fitting(self, room: int) -> int:
        """Returns how many base tokens of the prompt fit into the context if `room` of the `prompt_ids` fit."""
        ids = self.prompt_ids[: max(0, room)]
        return self.cached_tokens + len(ids) if self.book is None else push_and_count_tokens(self.book.copy(), ids)

    @property
    def book(self) -> Any:
        """The request's codebook, None for a plain model."""
        return None if self._state is None else self._state.books[self._row]

    def bind_to_row(self, state: State | None, row: int) -> None:
        """Makes the request use the codebook of row `row` of `state`. state: None for a plain model's cache."""
        self._state, self._row = state, row
        if state is None:
            return
        if self.canonical is not None:
            self.canonical.follow_codebook(self.book)
        for processor in self.penalties:
            if isinstance(processor, PenaltyTerms):
                processor.bind_to_row(state, row)

    # ---- steps

    @property
    def first_base_ids_of_entries(self) -> np.ndarray:
        """The first base id of each entry of the codebook, [entries]."""
        if self.book is None:
            return np.zeros(0, np.uint32)
        known = 0 if self.book.params.policy != "freeze" else len(self._firsts)
        new = self.book.padded_entries(known, len(self.book) - known)[0][:, 0]
        self._firsts = np.concatenate([self._firsts[:known], new])
        return self._firsts

    def note_read_ids(self, ids: Sequence[int]) -> None:
        """Records ids that a plain model's cache has read. With hypertokens does nothing: the codebook logs all ids."""
        if self._state is None:
            self._read.extend(map(int, ids))

    def forget_last(self) -> None:
        """Removes the last id from those recorded by `note_read_ids`."""
        del self._read[-1:]

    @property
    def read_ids(self) -> Sequence[int] | np.ndarray:
        """Ids that the cache has read; with a codebook only ids read since the request began."""
        return self._read if self.book is None else self.book.ids[self._begun_at :]

    @property
    def takes_next_step(self) -> bool:
        """Whether the request takes part in the next step: it goes on, or the cache must still read the last id."""
        return self.error is None and (self.reason is None or self.inline.reads_last)

    @property
    def takes_best_id(self) -> bool:
        """Whether the next id is the one with the highest logit: greedy, and nothing changes or reports logits."""
        asked = self.submission.constraint is not None or self.submission.top_logprobs is not None
        return self.draws.greedy and not (asked or self.penalties or self.canonical is not None)

    def excluded_ids(self) -> list[int]:
        """Returns the ids that canonical decoding excludes next; [] without canonical decoding."""
        return [] if self.canonical is None else self.canonical.excluded()

    def expand(self, token: int) -> tuple[int, ...]:
        """Returns the base ids of an id that may come next. Raises `CodecError` if the codebook cannot read the id."""
        return (token,) if self.book is None else base_ids_of_next_id(self.book, token)

    def cut_at_end(self, expansion: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
        """Returns `expansion`, cut after an eos id or at the limit, and the finish reason, None if there is none."""
        for n, base_id in enumerate(expansion, start=1):
            if base_id in self.submission.eos_ids:
                return expansion[:n], "stop"
            if self.base_tokens + n >= self._limit:
                return expansion[:n], "length"
        return expansion, "length" if self.steps + 1 >= self.max_steps else None

    def count_chosen(self, chosen: Chosen) -> None:
        """Counts a chosen id and prepares its event. Sets `reason` if the answer ends with this id."""
        expansion = self.expand(chosen.id)
        base_ids, self.reason = self.cut_at_end(expansion)
        if self.outgrown and self.reason is None:
            self.reason = "length"
        likely = tuple(Likely(self.expand(one), logprob) for one, logprob in chosen.likely)
        if self.submission.constraint is not None:
            self.submission.constraint.push(base_ids)
        self.first_s = self.first_s or time.perf_counter()
        self.steps += 1
        self.accepted += chosen.from_draft
        self.passes += not chosen.from_draft
        self.accepted_tokens += len(base_ids) if chosen.from_draft else 0
        self.hypertokens += len(expansion) > 1
        self.base_tokens += len(base_ids)
        if self.drafter is not None:
            self.drafter.append(base_ids)
        self.logprobs = chosen.logprobs
        origin = None
        if self.submission.show and self.book is not None:
            self._origins = self._origins or Origins(self.book)
            origin = self._origins.origin_of_next_id(self.book, chosen.id, len(expansion))
        last = self.reason is not None
        self._emitted = Emitted(
            chosen.id, base_ids, chosen.logprob, likely, origin=origin, last=last, from_draft=chosen.from_draft
        )

    def max_proposed_ids(self, last: int, most: int) -> int:
        """Returns how many ids, at most `most`, may be proposed after `last`, the id chosen last.

        The answer's limits bound the number, and so does the position at which LongRoPE switches factors.
        """
        if self.drafter is None or self.reason is not None:
            return 0
        room = min(self._limit - self.base_tokens, self.max_steps - self.steps) - 1
        if self._context is not None:
            position, per_id = self.held_ids, 1
            if self._by_base:
                position = self.book.base_length + len(self.expand(last)) - 1
                per_id = self.book.params.merge_size
            if position < self._context:
                room = min(room, (self._context - position - 1) // per_id)
        return max(0, int(min(room, most)))

    def needs_long_factors_for(self, token: int) -> bool:
        """Returns whether the step that reads `token` uses LongRoPE's long factors."""
        if self._context is None:
            return False
        position = self.book.base_length + len(self.expand(token)) - 1 if self._by_base else self.book.mark()
        return position >= self._context

    # ---- events

    def send(self, event: Event) -> None:
        """Delivers an event. If the receiver raises, cancels the request and delivers no more events."""
        if self._deaf:
            return
        try:
            self._deliver(event)
        except Exception:
            log.exception("the receiver of a request's events failed: the request is cancelled")
            self._deaf = self.cancelled = True

    def send_emitted(self) -> None:
        """Delivers the last chosen id, if not yet delivered, with the entries installed since the previous delivery.

        When LongRoPE switches factors, the cache reads an id only after its delivery. An entry that this id installs
        comes with the next event.
        """
        emitted, self._emitted = self._emitted, None
        if emitted is None:
            return
        learned = () if self._origins is None else self._origins.installed(self.book)
        self.send(replace(emitted, learned=learned) if learned else emitted)
        if self.submission.show and (now := time.perf_counter()) - self._counted_s >= COUNT_S:
            self._counted_s = now
            self.send(Counted(self.counts()))

    def send_last_event(self) -> None:
        """Delivers the last event."""
        if self.error is not None:
            self.send(Failed(without_tracebacks(as_mlx_zip_error(self.error))))
        else:
            self.send(Finished(self.reason or "cancelled", self.counts()))

    def add_to(self, figures: Figures) -> None:
        """Adds what the request has counted so far to an engine's figures. May be called from any thread."""
        drafter = self.drafter
        if self.ended:
            figures.requests += 1
            figures.failed += self.error is not None
            figures.cancelled += self.error is None and self.reason in (None, "cancelled")
        if self._started:
            figures.prompt_tokens += len(self.checked.base_ids)
            figures.cached_tokens += self.cached_tokens
        figures.base_tokens += self.base_tokens
        figures.steps += self.steps
        figures.hypertokens += self.hypertokens
        figures.proposed += 0 if drafter is None else drafter.proposed
        figures.accepted += self.accepted
        figures.passes += self.passes

    def counts(self) -> Counts:
        """Returns the request's figures so far."""
        now, book = time.perf_counter(), self.book
        saved = 0 if book is None else (book.base_length - book.mark()) * self._per_id
        return Counts(
            prompt_tokens=len(self.checked.base_ids),
            cached_tokens=self.cached_tokens,
            prompt_ids=len(self.prompt_ids),
            base_tokens=self.base_tokens,
            steps=self.steps,
            hypertokens=self.hypertokens,
            entries=0 if book is None else len(book),
            codebook_size=0 if book is None else book.params.codebook_size,
            kv_bytes_saved=saved,
            proposed=0 if self.drafter is None else self.drafter.proposed,
            accepted=self.accepted,
            proposed_tokens=0 if self.drafter is None else self.drafter.proposed_tokens,
            accepted_tokens=self.accepted_tokens,
            queued_s=(self.begun_s or now) - self.submitted_s,
            first_id_s=self.first_s - self.submitted_s if self.first_s else 0.0,
            total_s=now - self.submitted_s,
        )

    # ---- the session

    @property
    def held_ids(self) -> int:
        """How many ids the request's cache holds."""
        return len(self._read) if self.book is None else self.book.mark()

    def held_base_ids(self) -> list[int]:
        """Returns the base ids that the request's cache holds."""
        return self._read if self.book is None else self.book.base_ids(0).tolist()

    def release_memory(self) -> None:
        """Drops the references to objects that take much memory, such as the cache."""
        self.cache = self._state = None
        self.canonical, self.penalties = None, []
        self._origins = self.drafter = None


def propose_drafts(requests: Sequence[Request], last: Sequence[int], most: Sequence[int]) -> list[Draft | None]:
    """Returns per request a draft or None. One pass of the model will read all these drafts.

    last: per request, the id chosen last. most: per request, the maximum number of ids to propose. If a request's
    source raises, the exception becomes the request's `error`, and the request gets no draft.
    """
    limits = [request.max_proposed_ids(*one) for request, *one in zip(requests, last, most, strict=True)]
    drafts = choose_drafts([request.drafter for request in requests], limits, max(one.held_ids for one in requests))
    proposed: list[Draft | None] = []
    for request, one, (source, width) in zip(requests, last, drafts, strict=True):
        proposed.append(None)
        if request.drafter is not None and source is not None:
            try:
                proposed[-1] = request.drafter.propose(source, one, request.book, width)
            except Exception as error:
                request.error = error
    return proposed


def without_tracebacks(error: MlxZipError) -> MlxZipError:
    """Removes the tracebacks from an error and its causes, because they keep arrays in memory. Returns the error."""
    log.debug("a request failed", exc_info=error)
    waiting, seen = list[BaseException | None]([error]), set[int]()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            waiting += [one.__cause__, one.__context__]
    return error


def as_mlx_zip_error(error: BaseException) -> MlxZipError:
    """Returns `error` itself if it is an `MlxZipError`, otherwise an `EngineError` caused by `error`."""
    if isinstance(error, MlxZipError):
        return error
    ours = EngineError(f"the request failed: {type(error).__name__}: {first_message_line(error)}")
    ours.__cause__ = error
    return ours


# ---- entries that an answer's ids install, and where they were learned

_Entry = tuple[int, ...]
_FROM_PACK = -1
_PACK = Origin("pack", _FROM_PACK)


class Origins:
    """Replays a request's ids in a second codebook to find out where each entry was learned.

    book: the request's codebook, which has read the prompt and nothing more. The whole log of `book` is replayed, so
    the origins are also right if the request continues a session, and if slots are reused.
    """

    def __init__(self, book: Codebook) -> None:
        self._book, self._first_id = Codebook(book.params), book.params.vocab_size
        new = self._book.push(book.ids)
        self._at = [_FROM_PACK] * book.params.codebook_size  # per slot: base tokens read when its entry was installed
        for slot, at in zip(new.slots.tolist(), self._book.ends()[new.at].tolist(), strict=True):
            self._at[slot] = at
        self._prompt = self._book.base_length
        self._learned: list[_Entry] = []  # installed since the last call of `installed`

    def origin_of_next_id(self, book: Codebook, one: int, length: int) -> Origin | None:
        """Returns where the entry of the next id was learned, None for a base id.

        book: the request's codebook, which has not read that id. one: the id. length: number of base ids of `one`.
        """
        self._replay_new_ids(book)
        slot = one - self._first_id
        if slot < 0:
            return None
        # an id beyond the installed entries installs its own entry
        at = self._at[slot] if slot < len(self._book) else self._book.base_length + length
        return _PACK if at == _FROM_PACK else Origin("prompt" if at <= self._prompt else "answer", at)

    def installed(self, book: Codebook) -> tuple[_Entry, ...]:
        """Returns the entries that were installed since the last call. book: the request's codebook now."""
        self._replay_new_ids(book)
        learned, self._learned = self._learned, []
        return tuple(learned)

    def _replay_new_ids(self, book: Codebook) -> None:
        """Replays the ids that the request's codebook has read since the last call."""
        more = book.mark() - self._book.mark()
        if more < 1:
            return
        for one in [book.last] if more == 1 else book.ids[-more:].tolist():
            for slot in self._book.push(one).slots.tolist():
                self._at[slot] = self._book.base_length
                self._learned.append(self._book.entry(slot))
