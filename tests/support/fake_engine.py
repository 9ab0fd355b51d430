"""An engine without a model: it replays answers that a test has written, with a real tokenizer."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from mlx_zip.codec import CodecParams, compress
from mlx_zip.engine import (
    Counted,
    Counts,
    Differing,
    Emitted,
    Engine,
    EngineInfo,
    Event,
    Failed,
    Figures,
    Finished,
    Likely,
    Origin,
    Progress,
    PromptId,
    SessionInfo,
    Started,
    Submission,
    Ticket,
)
from mlx_zip.errors import (
    EngineBusyError,
    EngineError,
    EngineStoppedError,
    GenerationError,
    PromptTooLongError,
    UnknownSessionError,
)
from mlx_zip.named import bundled_model_folder
from mlx_zip.text.tokenizers import load_tokenizer

CONTEXT = 2000
GATE_S = 60.0


@dataclass
class Script:
    """An answer to replay. text: it is encoded, and every two base ids are emitted as one hypertoken.

    ids: base ids of each emitted id, in place of text. ends: whether an eos follows. delay_s: between ids, on
    average. progress: chunks in which the prompt is read. fails: raised as `Failed` after the ids. gate: must be set
    before the answer ends. differing: what is told of the prompt. drafted: numbers of the ids that drafts had proposed.
    refused: how many more ids drafts have proposed, each of one base token.
    """

    text: str = "Once upon a time there was a boat."
    ids: Sequence[Sequence[int]] | None = None
    ends: bool = True
    delay_s: float = 0.0
    progress: int = 1
    fails: EngineError | GenerationError | None = None
    gate: threading.Event | None = None
    differing: Differing | None = None
    drafted: Sequence[int] = ()
    refused: int = 0


class Running(Ticket):
    """A request that is replayed."""

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.cancelled = threading.Event()
        self.ended = threading.Event()


@dataclass
class Told:
    """What the engine was told. notes: (key, base ids) of each noted answer."""

    submissions: list[Submission] = field(default_factory=list)
    tickets: list[Running] = field(default_factory=list)
    notes: list[tuple[str, list[int]]] = field(default_factory=list)


@cache
def tokenizer() -> Any:
    """The bundled model's tokenizer."""
    return load_tokenizer(bundled_model_folder("stories"))


def any_role() -> Any:
    """The bundled model's tokenizer with a chat template that takes system messages, unlike its own."""
    vocab = load_tokenizer(bundled_model_folder("stories"))
    vocab._tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    return vocab


class FakeEngine(Engine):
    """Replays `script`, one thread per request. most: requests at a time; more are refused as busy."""

    def __init__(self, script: Script | None = None, most: int = 100, vocab: Any = None) -> None:
        self.tokenizer = vocab or tokenizer()
        self.info = EngineInfo("stories", len(self.tokenizer), CONTEXT, 2, 64, "0123456789abcdef0123")
        self.script, self.most, self.told = script or Script(), most, Told()
        self.kept: dict[str, SessionInfo] = {}
        self._alive, self._deaths, self._closing = True, [], False
        self._figures = Figures()
        self._lock = threading.Lock()

    def submit(self, submission: Submission, deliver: Callable[[Event], None]) -> Ticket:
        self._check(submission)
        ticket = Running(submission)
        self.told.submissions.append(submission)
        self.told.tickets.append(ticket)
        threading.Thread(target=self._replay, args=(ticket, self.script, deliver), daemon=True).start()
        return ticket

    def _check(self, submission: Submission) -> None:
        if not self._alive or self._closing:
            raise EngineStoppedError("the engine has stopped")
        context = self.info.context or CONTEXT
        if len(submission.base_ids) > context:
            raise PromptTooLongError(f"the prompt has {len(submission.base_ids)} base tokens; {context} fit")
        if submission.sampling.get("top_k", 0) >= self.info.vocab_size:
            raise GenerationError("top_k is as large as the vocabulary")
        with self._lock:
            if sum(not ticket.ended.is_set() for ticket in self.told.tickets) >= self.most:
                raise EngineBusyError("too many requests wait", 2.5)

    def _replay(self, ticket: Running, script: Script, deliver: Callable[[Event], None]) -> None:
        began, prompt = time.monotonic(), len(ticket.submission.base_ids)
        counts = Counts(prompt_tokens=prompt, cached_tokens=3, prompt_ids=prompt - 3, codebook_size=64)
        counts = replace(counts, proposed=script.refused, proposed_tokens=script.refused)
        deliver(Started(prompt, 3, prompt - 3, script.differing))
        for nth in range(script.progress):
            deliver(Progress((nth + 1) * (prompt - 3) // script.progress, prompt - 3))
        reason = "length"
        for nth, emitted in enumerate(self._emitted(ticket.submission, script), start=1):
            if ticket.cancelled.wait(max(0.0, began + nth * script.delay_s - time.monotonic())):
                reason = "cancelled"
                break
            eos = ticket.submission.eos_ids & set(emitted.base_ids)
            more = len(emitted.base_ids)
            counts = replace(counts, base_tokens=counts.base_tokens + more, steps=counts.steps + 1)
            if emitted.from_draft:
                accepted, tokens = counts.accepted + 1, counts.accepted_tokens + more
                counts = replace(counts, accepted=accepted, accepted_tokens=tokens, proposed=script.refused + accepted)
                counts = replace(counts, proposed_tokens=script.refused + tokens)
            now_s = time.monotonic() - began
            counts = replace(counts, hypertokens=counts.hypertokens + (more > 1), total_s=now_s)
            counts = replace(counts, first_id_s=counts.first_id_s or now_s, entries=min(nth, counts.codebook_size))
            deliver(emitted)
            if ticket.submission.show:
                deliver(Counted(counts))
            if eos:
                reason = "stop"
        if script.gate is not None:
            script.gate.wait(GATE_S)
        with self._lock:
            name = {"cancelled": "cancelled"}.get(reason, "requests")
            self._figures = replace(self._figures, **{name: getattr(self._figures, name) + 1})
        ticket.ended.set()
        deliver(Failed(script.fails) if script.fails and reason != "cancelled" else Finished(reason, counts))

    def _emitted(self, submission: Submission, script: Script) -> list[Emitted]:
        """The ids of an answer, up to the limit; odd ones are hypertokens of two base ids."""
        ids = script.ids
        if ids is None:
            base = self.tokenizer.encode(script.text, add_special_tokens=False)
            ids = [base[i : i + 2] for i in range(0, len(base), 2)]
            ids = [*ids, [self.tokenizer.eos_token_id]] if script.ends else ids
        left = submission.max_tokens if submission.max_tokens >= 0 else CONTEXT
        found = []
        for nth, one in enumerate(ids):
            one = tuple(one)[:left]
            left -= len(one)
            if one:
                emitted = replace(self._one(nth, one, submission.top_logprobs), from_draft=nth in script.drafted)
                found.append(self._shown(nth, emitted, submission))
        return found

    def _shown(self, nth: int, emitted: Emitted, submission: Submission) -> Emitted:
        """Hypertokens are from the pack, the prompt and the answer in turn; each id but the first installs an entry."""
        if not submission.show:
            return emitted
        origins = Origin("pack", -1), Origin("prompt", 2), Origin("answer", len(submission.base_ids) + 1)
        origin = origins[nth % 3] if emitted.id >= self.info.vocab_size else None
        return replace(emitted, origin=origin, learned=((5, 6 + nth),) if nth else ())

    def _one(self, nth: int, base_ids: tuple[int, ...], top: int | None) -> Emitted:
        emitted_id = base_ids[0] if len(base_ids) == 1 else self.info.vocab_size + nth
        if top is None:
            return Emitted(emitted_id, base_ids)
        likely = [Likely(base_ids, -0.5), *(Likely((i,), -math.inf if i > 8 else -1.0 - i) for i in range(5, 25))]
        return Emitted(emitted_id, base_ids, -0.5, tuple(likely[:top]))

    def cancel(self, ticket: Ticket) -> None:
        assert isinstance(ticket, Running)
        ticket.cancelled.set()

    def check_pack(self, pack: Any) -> None:
        if pack is not None and any(one >= self.info.vocab_size for entry in pack.entries for one in entry):
            raise GenerationError("pack: an entry holds an id that is no base id")

    def count_prompt_ids(self, base_ids: Sequence[int], pack: Any = None) -> int:
        self.check_pack(pack)
        params = CodecParams(self.info.vocab_size, 4096, 4, start=None if pack is None else pack.entries)
        return len(compress(params, base_ids)[0])

    def score_prompt_ids(self, base_ids: Sequence[int], top_logprobs: int = 0, pack: Any = None) -> Iterator[PromptId]:
        """The first id alone, then hypertokens of two base ids; the second of `likely` is id 5."""
        self._check(Submission(base_ids))
        yield PromptId((base_ids[0],))
        for at in range(1, len(base_ids), 2):
            one = tuple(base_ids[at : at + 2])
            likely = (Likely(one, -0.5), Likely((5,), -math.inf))
            yield PromptId(one, -0.5, likely[:top_logprobs])

    def note_answer(self, ticket: Ticket, key: str, base_ids: Sequence[int]) -> None:
        self.told.notes.append((key, list(base_ids)))

    def answers(self) -> Mapping[str, Sequence[int]]:
        return dict(self.told.notes)

    def sessions(self) -> list[SessionInfo]:
        self._check_alive()
        return list(self.kept.values())

    def save_session(self, name: str, file: Path) -> None:
        self._known(name)
        file.write_text(name)

    def load_session(self, file: Path) -> SessionInfo:
        if not file.is_file():
            raise EngineError(f"{file.name}: there is no such file")
        name = file.read_text()
        self.kept[name] = SessionInfo(name, 10, 8, 1000, False, 1.0)
        return self.kept[name]

    def drop_session(self, name: str) -> None:
        self._known(name)
        del self.kept[name]

    def purge_sessions(self) -> int:
        self._check_alive()
        count = len(self.kept)
        self.kept.clear()
        return count

    def _check_alive(self) -> None:
        if not self._alive:
            raise EngineStoppedError("the engine has stopped")

    def _known(self, name: str) -> None:
        self._check_alive()
        if name not in self.kept:
            raise UnknownSessionError(f"there is no session {name!r}")

    def figures(self) -> Figures:
        running = sum(not ticket.ended.is_set() for ticket in self.told.tickets)
        return replace(self._figures, running=running)

    @property
    def alive(self) -> bool:
        return self._alive

    def call_on_fault(self, call: Callable[[BaseException], None]) -> None:
        self._deaths.append(call)

    def die(self) -> None:
        """Ends the engine as a fault would."""
        self._alive = False
        for call in self._deaths:
            call(RuntimeError("a fault"))

    def close(self, drain_s: float = 0.0) -> None:
        self._closing = True
        end = time.monotonic() + drain_s
        for ticket in self.told.tickets:
            ticket.ended.wait(max(0.0, end - time.monotonic()))
            ticket.cancelled.set()
        self._alive = False
