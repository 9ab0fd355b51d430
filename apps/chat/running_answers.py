"""Answers that are written to the store while they stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from importlib import import_module
from typing import Any

from mlx_zip.apps.chat.database_file import StoreError
from mlx_zip.apps.chat.store import Store, extend_message, new_id
from mlx_zip.errors import EngineStoppedError, MlxZipError
from mlx_zip.server.answers.turn import Delta, Done, LearnedEntries, LiveCounts, Reasoning, Text, Turn, Waiting
from mlx_zip.server.core import Core
from mlx_zip.server.errors import RequestError, as_request_error
from mlx_zip.server.http import event_bytes
from mlx_zip.server.vendor import live_counts_json, shown_token_json, vendor_notes

WRITE_S = 0.4  # seconds between writes to the store
STOPPED = "You stopped it."
LEFT = "The page was closed."


class RunningAnswers:
    """Writes running answers to the store, and can stop all running answers of a conversation."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._running: dict[str, set[asyncio.Event]] = {}
        self._written: set[str] = set()  # ids of the messages that are being written

    def stop(self, conversation: str | None = None) -> int:
        """Stops the running answers of a conversation (None: of all conversations); returns how many were stopped."""
        named = list(self._running) if conversation is None else [conversation]
        events = [event for one in named for event in self._running.get(one, ()) if not event.is_set()]
        for event in events:
            event.set()
        return len(events)

    async def frames(
        self, core: Core, conversation: str, turn: Turn, new: list[dict[str, Any]], message: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the frames of an answer; the last one is "done" or "error".

        new: messages to add to the conversation, the answer last; empty if an existing answer is extended. message: the
        answer. Nothing is written before the engine accepts the request. Before the first frame, raises the engine's
        error if the engine refuses the request, and `RequestError` if `message` is already being written.
        """
        if message["id"] in self._written:  # the store may not have it yet
            raise RequestError(409, "this answer is still being written", "running", "parent")
        stop = asyncio.Event()
        self._running.setdefault(conversation, set()).add(stop)
        self._written.add(message["id"])
        written = _StoredAnswer(self.store, core, conversation, message)
        try:
            async with aclosing(core.answer(turn)) as deltas:
                await anext(deltas)
                await written.begin(new)
                for one in new or [message]:
                    yield {"type": "message", "message": dict(one)}
                async with aclosing(_until_stopped(deltas, stop)) as coming:
                    async for frame in self._answer_frames(written, coming, stop):
                        yield frame
        except GeneratorExit:
            await written.end("stopped", LEFT)
            raise
        except asyncio.CancelledError:
            await asyncio.shield(written.end("stopped", LEFT))
            raise
        finally:
            self._written.discard(message["id"])
            self._running[conversation].discard(stop)
            if not self._running[conversation]:
                del self._running[conversation]

    async def _answer_frames(
        self, written: _StoredAnswer, deltas: AsyncGenerator[Delta | None, None], stop: asyncio.Event
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Writes the deltas to the store; yields the deltas' frames, then a frame "done" or "error"."""
        try:
            async for delta in deltas:
                if (frame := await written.add_delta(delta)) is not None:
                    yield frame
                for problem in written.problems():
                    yield problem
            await written.end("stopped" if stop.is_set() and not written.done else "whole", STOPPED)
        except MlxZipError as error:
            state = "cut" if isinstance(error, EngineStoppedError) else "failed"
            text = str(as_request_error(error))
            await written.end(state, text)
            yield {"type": "error", "message": text, "state": state}
            return
        for problem in written.problems():
            yield problem
        yield {"type": "done", "message": written.message, "leaf": written.message["id"]}


class _StoredAnswer:
    """An answer that is written to the store in pieces. done: whether the engine has finished the answer."""

    def __init__(self, store: Store, core: Core, conversation: str, message: dict[str, Any]) -> None:
        self._store, self._core, self._conversation, self.message = store, core, conversation, message
        self._piece: dict[str, Any] = {}  # the part of the answer that is not in the store yet
        self._at, self._begun, self._ended = time.monotonic(), False, False
        self._reported: str | None = None
        self._reason: str | None = None  # "length" if the engine ended the answer at its length limit
        self._problem: str | None = None
        self._last: asyncio.Future[Any] | None = None  # the newest job for the store
        self._before: dict[str, Any] | None = None  # earlier figures of an answer that is extended
        self.done = False

    async def begin(self, new: list[dict[str, Any]]) -> None:
        """Writes the messages in `new` to the store; if `new` is empty, marks the existing message as running."""
        self._begun = True
        self.message |= {"state": "running", "reason": None}
        if new:
            await self._run_in_store(self._store.begin, self._conversation, new)
        else:
            self._before = self.message["figures"]
            await self._run_in_store(self._store.resume, self._conversation, dict(self.message))

    async def add_delta(self, delta: Delta | None) -> dict[str, Any] | None:
        """Adds `delta`, if any, and returns its frame, if any; writes to the store every `WRITE_S` seconds."""
        frame = None if delta is None else make_frame(delta)
        if delta is not None:
            piece = make_piece(delta)
            extend_message(self.message, piece)
            for name, value in piece.items():
                self._piece[name] = self._piece[name] + value if name in self._piece else value
        if isinstance(delta, LiveCounts | Done) and frame is not None:
            frame |= _sum_figures(self._before, frame)
            self.message["figures"] = {name: value for name, value in frame.items() if name != "type"}
        if isinstance(delta, Done):
            self.done, self._reason = True, "length" if delta.reason == "length" else None
        if self._piece and time.monotonic() - self._at >= WRITE_S:
            await self._write_piece()
        return frame

    async def _write_piece(self) -> None:
        piece, self._piece, self._at = self._piece, {}, time.monotonic()
        await self._run_in_store(self._store.append, self._conversation, self.message["id"], piece)

    async def end(self, state: str, reason: str | None) -> None:
        if self._ended or not self._begun:
            return
        self._ended = True
        self.message |= {"state": state, "reason": self._reason if state == "whole" else reason}
        await self._run_in_store(self._store.finish, self._conversation, dict(self.message))

    async def _run_in_store(self, work: Callable[..., Any], *args: Any) -> None:
        """Runs `work` in a thread when the previous job has ended; the job completes even if this task is cancelled.

        A `StoreError` does not end the answer; `problems` reports it.
        """
        if self._last is not None:
            await asyncio.wait({self._last})
        self._last = asyncio.ensure_future(self._core.run_in_thread(work, *args))
        try:
            await asyncio.shield(self._last)
            self._problem = self._store.database.problem
        except StoreError as error:
            self._problem = str(error)

    def problems(self) -> list[dict[str, Any]]:
        """Returns [a frame that reports the store's problem] if the problem was not reported yet, else []."""
        if self._problem is None or self._problem == self._reported:
            return []
        self._reported = self._problem
        return [{"type": "storage", "message": self._problem}]


def _sum_figures(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of a continued answer: counts and times summed over both parts, and rates recomputed."""
    if not before:
        return {}
    counted = ("base_tokens", "steps", "hypertokens", "proposed", "accepted", "seconds")
    added = {name: before.get(name, 0) + now[name] for name in counted}  # older answers have no figures of drafts
    passes = added["steps"] - added["accepted"]
    rates = [(one["base_tokens"], one["base_tokens_per_s"]) for one in (before, now) if one["base_tokens_per_s"]]
    return {
        **added,
        "base_tokens_per_step": round(added["base_tokens"] / added["steps"], 3) if added["steps"] else 0.0,
        "base_tokens_per_pass": round(added["base_tokens"] / passes, 3) if passes else 0.0,
        "base_tokens_per_s": round(sum(n for n, _ in rates) / sum(n / rate for n, rate in rates), 1) if rates else 0.0,
    }


async def _until_stopped(
    deltas: AsyncGenerator[Delta, None], stop: asyncio.Event
) -> AsyncGenerator[Delta | None, None]:
    """Yields deltas until they end or `stop` is set; yields None after every `WRITE_S` seconds without a delta."""
    stopping = asyncio.ensure_future(stop.wait())
    coming: asyncio.Future[Delta | None] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(deltas, None))
            await asyncio.wait({coming, stopping}, timeout=WRITE_S, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return
            if not coming.done():
                yield None
                continue
            delta, coming = coming.result(), None
            if delta is None:
                return
            yield delta
    finally:
        for task in (stopping, coming):
            if task is not None:
                task.cancel()
        await asyncio.gather(stopping, *([coming] if coming else []), return_exceptions=True)


def new_message(role: str, parent: str | None, text: str, model: str | None = None) -> dict[str, Any]:
    """Returns a new message for the store; an assistant's message has the state "running"."""
    return {
        "id": new_id(),
        "parent": parent,
        "role": role,
        "text": text,
        "reasoning": "",
        "created": time.time(),
        "state": "running" if role == "assistant" else "whole",
        "reason": None,
        "tokens": None,
        "figures": None,
        "learned": [],
        "model": model,
    }


def strip_end(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message without trailing whitespace.

    Chat templates strip that whitespace, so a model that continues the message writes it again.
    """
    text = message["text"].rstrip()
    if message["tokens"] is None:
        return {**message, "text": text}
    left, tokens = len(text), []
    for token in message["tokens"]:
        part = token["t"][:left]
        left -= len(part)
        if part or not token["t"]:
            tokens.append({**token, "t": part})
    return {**message, "text": text, "tokens": tokens}


def turn_messages(system: str, path: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the system prompt and the messages of `path`, in order, as chat templates take them."""
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in path:
        reasoning = {"reasoning_content": message["reasoning"]} if message["reasoning"] else {}
        found.append({"role": message["role"], "content": message["text"], **reasoning})
    return found


async def encode_frames(frames: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """Yields each frame encoded for an event stream; keeps a Mac awake until the last frame."""
    with _stay_awake("writing an answer"):
        async with aclosing(frames):
            async for frame in frames:
                yield event_bytes(frame)


def failure_frame(failure: RequestError) -> bytes:
    """Returns the last frame of a stream that failed."""
    return event_bytes({"type": "error", "message": str(failure), "state": "failed"})


# ---- deltas as frames for the page and as pieces for the store


def make_frame(delta: Delta) -> dict[str, Any] | None:
    """Returns the frame of a delta, None if the page needs none."""
    match delta:
        case Waiting():
            names = ("read", "total", "cached_tokens", "waits_for")
            return {"type": "waiting", **{name: getattr(delta, name) for name in names}}
        case LiveCounts():
            return {"type": "figures", **live_counts_json(delta.counts)}
        case Done():
            return {"type": "figures", **live_counts_json(delta.counts), **vendor_notes(delta)}
        case Text():
            return {"type": "text", **make_piece(delta)}
        case Reasoning():
            return {"type": "reasoning", "text": delta.text}
        case LearnedEntries():
            return {"type": "learned", "entries": make_piece(delta)["learned"]}
    return None


def make_piece(delta: Delta) -> dict[str, Any]:
    """Returns what a delta adds to a message, in the form that `Store.append` takes."""
    match delta:
        case Text():
            return {"text": delta.text, "tokens": [shown_token_json(token) for token in delta.tokens]}
        case Reasoning():
            return {"reasoning": delta.text}
        case LearnedEntries():
            return {"learned": [list(parts) for parts in delta.entries]}
    return {}


# ---- macOS slows down hidden apps, and sleeps when idle

_USER_INITIATED = 0x00FFFFFF  # NSActivityUserInitiated: work that the user started; prevents idle sleep


@contextmanager
def _stay_awake(reason: str) -> Iterator[None]:
    """Context manager: keeps macOS from slowing this process down and from idle sleep; the display may still turn off.

    reason: shown by `pmset -g assertions`. Does nothing without PyObjC, which pywebview installs on a Mac. Source:
    NSProcessInfo's beginActivityWithOptions:reason:.
    """
    info = _mac_process_info()
    activity = None if info is None else info.beginActivityWithOptions_reason_(_USER_INITIATED, reason)
    try:
        yield
    finally:
        if info is not None:
            info.endActivity_(activity)


def _mac_process_info() -> Any | None:
    try:
        return import_module("Foundation").NSProcessInfo.processInfo()
    except ModuleNotFoundError:
        return None
