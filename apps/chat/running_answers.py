"""Answers that are written to the store while they stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from importlib import import_module
from typing import Any

from mlx_zip.apps.chat.database import StoreError
from mlx_zip.apps.chat.store import Store, extend_message, new_id
from mlx_zip.engine import Counted
from mlx_zip.errors import EngineStoppedError, MlxZipError
from mlx_zip.server.answers.turn import (
    Delta,
    Done,
    LearnedEntries,
    Reasoning,
    Text,
    Turn,
    Waiting,
    live_counts_json,
    shown_token_json,
    vendor_notes,
)
from mlx_zip.server.core import Core, Inbox
from mlx_zip.server.errors import RequestError, as_request_error
from mlx_zip.server.http import event_bytes

log = logging.getLogger("mlx_zip.app")

WRITE_S = 0.4  # seconds between writes to the store
STOPPED = "You stopped it."
LEFT = "The page was closed."


class RunningAnswers:
    """Writes running answers to the store, and can stop all running answers of a conversation."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._running: dict[str, _RunningAnswer] = {}  # by the id of the answer's message

    def stop(self, conversation: str | None = None) -> int:
        """Stops the running answers of a conversation (None: of all conversations); returns how many were stopped."""
        return sum(one.stop() for one in self._running.values() if conversation in (None, one.conversation))

    async def frames(
        self, core: Core, conversation: str, turn: Turn, new: list[dict[str, Any]], message: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the frames of an answer; the last one is "done" or "error".

        new: messages to add to the conversation, the answer last; empty if an existing answer is extended. message: the
        answer. Nothing is written before the engine accepts the request. Before the first frame, raises the engine's
        error if the engine refuses the request, `RequestError` if `message` is already being written, and `StoreError`
        if the messages cannot be stored. An answer whose text cannot be stored any more ends with an error.
        """
        if message["id"] in self._running:  # the store may not have it yet
            raise RequestError(409, "this answer is still being written", "running", "parent")
        running = self._running[message["id"]] = _RunningAnswer(self.store, core, conversation, message)
        try:
            async with aclosing(core.answer(turn, running.inbox)) as deltas:
                await anext(deltas)
                await running.begin(new)
                for one in new or [message]:
                    yield {"type": "message", "message": dict(one)}
                async for delta in deltas:
                    running.check_writer()
                    if (frame := running.add_delta(delta)) is not None:
                        yield frame
            await running.end("whole" if running.done else "stopped", STOPPED)
        except (GeneratorExit, asyncio.CancelledError):
            try:
                await running.end("stopped", LEFT)
            except StoreError as error:  # the page is gone, so the log tells it
                log.error("an answer was not stored whole: %s", error)
            raise
        except Exception as error:  # any error ends the answer, so that the store does not keep it as running
            state, text = "cut" if isinstance(error, EngineStoppedError) else "failed", str(as_request_error(error))
            await running.end(state, text)
            if not running.begun or not isinstance(error, MlxZipError):
                raise
            yield {"type": "error", "message": text, "state": state}
            return
        finally:
            del self._running[message["id"]]
        yield {"type": "done", "message": message, "leaf": message["id"]}


class _RunningAnswer:
    """An answer that is written to the store in pieces. inbox: see `Core.answer`. begun: whether the store has it.

    done: whether the engine has finished the answer.
    """

    def __init__(self, store: Store, core: Core, conversation: str, message: dict[str, Any]) -> None:
        self._store, self._core, self.conversation, self._message = store, core, conversation, message
        self.inbox: Inbox = asyncio.Queue()
        self._piece: dict[str, Any] = {}  # the part of the answer that is not in the store yet
        self._stopped = self.begun = self._ended = self.done = False
        self._reason: str | None = None  # "length" if the engine ended the answer at its length limit
        self._writer: asyncio.Task[None] | None = None
        self._last: asyncio.Future[Any] | None = None  # the newest job for the store
        self._before: dict[str, Any] | None = None  # earlier figures of an answer that is extended

    def stop(self) -> bool:
        """Ends the answer soon; returns False if it was stopped before."""
        if self._stopped:
            return False
        self._stopped = True
        self.inbox.put_nowait(None)
        return True

    async def begin(self, new: list[dict[str, Any]]) -> None:
        """Writes the messages in `new` to the store; if `new` is empty, marks the existing message as running."""
        self.begun = True
        self._message |= {"state": "running", "reason": None}
        try:
            if new:
                await self._run_in_store(self._store.begin, self.conversation, new)
            else:
                self._before = self._message["figures"]
                await self._run_in_store(self._store.resume, dict(self._message))
        except StoreError:
            self.begun = False
            raise
        self._writer = asyncio.create_task(self._write_pieces())

    def add_delta(self, delta: Delta) -> dict[str, Any] | None:
        """Adds a delta to the message and returns its frame, if any."""
        frame = make_frame(delta)
        if frame is None:
            return None
        piece = _make_piece(frame)
        extend_message(self._message, piece)
        for name, value in piece.items():
            self._piece[name] = self._piece[name] + value if name in self._piece else value
        if isinstance(delta, Counted | Done):
            frame |= _sum_figures(self._before, frame)
            self._message["figures"] = {name: value for name, value in frame.items() if name != "type"}
        if isinstance(delta, Done):
            self.done, self._reason = True, "length" if delta.reason == "length" else None
        return frame

    async def _write_pieces(self) -> None:
        """Writes the answer's new text to the store every `WRITE_S` seconds."""
        while True:
            await asyncio.sleep(WRITE_S)
            if self._piece:
                piece, self._piece = self._piece, {}
                await self._run_in_store(self._store.append, self._message["id"], piece)

    def check_writer(self) -> None:
        """Raises the error of a write to the store that failed."""
        if self._writer is not None and self._writer.done():
            self._writer.result()

    async def end(self, state: str, reason: str | None) -> None:
        """Writes the finished answer to the store if it was begun, even if this task is cancelled meanwhile."""
        if self._ended or not self.begun:
            return
        self._ended = True
        if self._writer is not None and not self._writer.cancel() and not self._writer.cancelled():
            self._writer.exception()  # marks a failed write as known: `finish` writes the whole answer
        self._message |= {"state": state, "reason": self._reason if state == "whole" else reason}
        await asyncio.shield(self._run_in_store(self._store.finish, self.conversation, dict(self._message)))

    async def _run_in_store(self, work: Callable[..., Any], *args: Any) -> None:
        """Runs `work` in a thread when the previous job has ended; the job completes even if this task is cancelled."""
        if self._last is not None:
            await asyncio.wait({self._last})
        self._last = asyncio.ensure_future(self._core.run_in_thread(work, *args))
        await asyncio.shield(self._last)


def _sum_figures(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of a continued answer: counts and times summed over both parts, and rates recomputed."""
    if not before:
        return {}
    counted = ("base_tokens", "steps", "hypertokens", "proposed", "accepted", "seconds")
    added = {name: before.get(name, 0) + now[name] for name in counted}  # older answers have no figures of drafts
    passes = added["steps"] - added["accepted"]
    rates = [(n, rate) for one in (before, now) if (n := one["base_tokens"]) and (rate := one["base_tokens_per_s"])]
    return {
        **added,
        "base_tokens_per_step": round(added["base_tokens"] / added["steps"], 3) if added["steps"] else 0.0,
        "base_tokens_per_pass": round(added["base_tokens"] / passes, 3) if passes else 0.0,
        "base_tokens_per_s": round(sum(n for n, _ in rates) / sum(n / rate for n, rate in rates), 1) if rates else 0.0,
    }


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


async def encode_frames(frames: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """Yields each frame encoded for an event stream; keeps a Mac awake until the last frame."""
    with _stay_awake("writing an answer"):
        async with aclosing(frames):
            async for frame in frames:
                yield event_bytes(frame)


def failure_frame(failure: RequestError) -> bytes:
    """Returns the last frame of a stream that failed."""
    return event_bytes({"type": "error", "message": str(failure), "state": "failed"})


# ---- deltas as frames for the page, and frames as pieces for the store


def make_frame(delta: Delta) -> dict[str, Any] | None:
    """Returns the frame of a delta, None if the page needs none."""
    match delta:
        case Waiting():
            names = ("read", "total", "cached_tokens", "waits_for")
            return {"type": "waiting", **{name: getattr(delta, name) for name in names}}
        case Counted():
            return {"type": "figures", **live_counts_json(delta.counts)}
        case Done():
            return {"type": "figures", **live_counts_json(delta.counts), **vendor_notes(delta)}
        case Text():
            return {"type": "text", "text": delta.text, "tokens": [shown_token_json(token) for token in delta.tokens]}
        case Reasoning():
            return {"type": "reasoning", "text": delta.text}
        case LearnedEntries():
            return {"type": "learned", "entries": [list(parts) for parts in delta.entries]}
    return None


def _make_piece(frame: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a frame adds to a message, in the form that `Store.append` takes."""
    match frame["type"]:
        case "text":
            return {"text": frame["text"], "tokens": frame["tokens"]}
        case "reasoning":
            return {"reasoning": frame["text"]}
        case "learned":
            return {"learned": frame["entries"]}
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
