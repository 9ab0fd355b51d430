"""An engine without a model: it answers every request with one text, at a set speed. To measure and to try the page.

The text is compressed by the codec as a model would write it, so hypertokens, new entries and counts are real ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from mlx_zip.codec import Codebook, CodecParams, compress
from mlx_zip.engine import (
    Counted,
    Counts,
    Emitted,
    Engine,
    EngineInfo,
    Figures,
    Finished,
    Origin,
    Progress,
    SessionInfo,
    Started,
    Submission,
    Ticket,
)
from mlx_zip.engine.interface import Deliver
from mlx_zip.errors import EngineError, EngineStoppedError, GenerationError

CONTEXT = 1 << 20
CODEBOOK_SIZE, MERGE_SIZE = 2048, 4
KV_BYTES = 1 << 15  # bytes of KV cache that stand for one id
COUNTED_S = 0.1  # time between two `Counted`


class ReplayedTicket(Ticket):
    """A request that is replayed."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()


class ReplayEngine(Engine):
    """Answers every request with `text`, `tokens_per_s` base tokens per second, one thread per request.

    tokenizer: has the names of `mlx_zip.text.tokenizers.Tokenizer`.
    """

    def __init__(self, tokenizer: Any, text: str, tokens_per_s: float, name: str = "replay") -> None:
        self.tokenizer, self._speed = tokenizer, tokens_per_s
        self.info = EngineInfo(name, len(tokenizer), CONTEXT, MERGE_SIZE, CODEBOOK_SIZE, "replay")
        self._params = CodecParams(len(tokenizer), CODEBOOK_SIZE, MERGE_SIZE, tuple(sorted(tokenizer.eos_token_ids)))
        self._base_ids = [int(one) for one in tokenizer.encode(text, add_special_tokens=False)]
        self._running: set[ReplayedTicket] = set()
        self._figures, self._alive = Figures(), True

    def submit(self, submission: Submission, deliver: Deliver) -> Ticket:
        """Takes a request and returns at once. Raises `EngineStoppedError` after `close`."""
        self._check_alive()
        ticket = ReplayedTicket()
        self._running.add(ticket)
        threading.Thread(target=self._replay, args=(ticket, submission, deliver), daemon=True).start()
        return ticket

    def _replay(self, ticket: ReplayedTicket, submission: Submission, deliver: Deliver) -> None:
        """Delivers the events of one request, until the text or its limit ends or somebody cancels."""
        prompt = len(submission.base_ids)
        begun = counted = time.monotonic()
        counts = Counts(prompt_tokens=prompt, prompt_ids=prompt, codebook_size=CODEBOOK_SIZE)
        deliver(Started(prompt, 0, prompt))
        deliver(Progress(prompt, prompt))
        reason = "stop"
        for emitted in self._emitted(submission):
            due = begun + counts.base_tokens / self._speed
            if ticket.cancelled.wait(max(0.0, due - time.monotonic())):
                reason = "cancelled"
                break
            deliver(emitted)
            counts = _count_emitted(counts, emitted, time.monotonic() - begun)
            if submission.show and time.monotonic() - counted >= COUNTED_S:
                counted = time.monotonic()
                deliver(Counted(counts))
        if 0 <= submission.max_tokens <= counts.base_tokens:
            reason = "length"
        self._running.discard(ticket)
        self._figures = replace(self._figures, requests=self._figures.requests + 1)
        deliver(Finished(reason, counts))

    def _emitted(self, submission: Submission) -> Iterator[Emitted]:
        """Yields the ids of the text, as the codec writes it."""
        limit = submission.max_tokens if submission.max_tokens >= 0 else CONTEXT
        base_ids = self._base_ids[:limit]
        book = Codebook(self._params)
        known: dict[int, Origin] = {}
        read = len(submission.base_ids)
        for one in map(int, compress(self._params, base_ids)[0]):
            new = book.push([one])
            expansion = tuple(int(base) for base in book.expand([one]))
            read += len(expansion)
            learned = tuple(tuple(map(int, entry)) for _, entry in new)
            known |= {hyper_id: Origin("answer", read) for hyper_id, _ in new}
            origin = known.get(one) if submission.show else None
            yield Emitted(one, expansion, learned=learned, origin=origin)

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request soon."""
        if isinstance(ticket, ReplayedTicket):
            ticket.cancelled.set()

    def check_pack(self, pack: Any) -> None:
        """Lets every pack pass: the answer does not depend on it."""

    def prompt_size(self, base_ids: Sequence[int], pack: Any = None) -> int:
        """Returns how many ids a prompt is read as; no pack changes that."""
        return len(compress(self._params, base_ids)[0])

    def prompt_ids(self, base_ids: Sequence[int], top_logprobs: int = 0, pack: Any = None) -> NoReturn:
        raise GenerationError("there is no model, so nothing says how likely a prompt is")

    def note_answer(self, ticket: Ticket, key: str, base_ids: Sequence[int]) -> None:
        """Does nothing: no session is kept."""

    def answers(self) -> Mapping[str, Sequence[int]]:
        """Returns an empty mapping."""
        return {}

    def sessions(self) -> list[SessionInfo]:
        """Returns an empty list."""
        return []

    def save_session(self, name: str, file: Path) -> None:
        """Raises `EngineError`: no session is kept."""
        raise EngineError(f"there is no session {name!r}")

    def load_session(self, file: Path) -> SessionInfo:
        """Raises `EngineError`: no session is kept."""
        raise EngineError(f"{file}: an engine that replays keeps no sessions")

    def drop_session(self, name: str) -> None:
        """Raises `EngineError`: no session is kept."""
        raise EngineError(f"there is no session {name!r}")

    def purge_sessions(self) -> int:
        """Returns 0."""
        return 0

    def figures(self) -> Figures:
        """Returns how many requests there were and are."""
        return replace(self._figures, running=len(self._running))

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return self._alive

    def on_death(self, call: Any) -> None:
        """Does nothing: there is no thread that could die."""

    def close(self, drain_s: float = 0.0) -> None:
        """Takes no new requests, and cancels those under way."""
        self._alive = False
        for ticket in tuple(self._running):
            ticket.cancelled.set()

    def _check_alive(self) -> None:
        if not self._alive:
            raise EngineStoppedError("the engine has stopped")


def _count_emitted(counts: Counts, emitted: Emitted, seconds: float) -> Counts:
    more = len(emitted.base_ids)
    return replace(
        counts,
        base_tokens=counts.base_tokens + more,
        steps=counts.steps + 1,
        hypertokens=counts.hypertokens + (more > 1),
        entries=counts.entries + len(emitted.learned),
        kv_bytes_saved=counts.kv_bytes_saved + (more - 1) * KV_BYTES,
        first_id_s=counts.first_id_s or seconds,
        total_s=seconds,
    )
