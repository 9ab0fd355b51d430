"""The core of the server, which all APIs share: answers a `Turn` with `Delta`s.

`Cores` holds the cores of the main model and of one other model; `NamedPacks` holds the packs that requests can choose.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

from mlx_zip.engine import Engine, Event, PromptId, Submission, Ticket
from mlx_zip.engine.engines import Engines
from mlx_zip.engine.submissions import prediction_too_long_error
from mlx_zip.errors import (
    EngineBusyError,
    EngineStoppedError,
    GenerationError,
    MlxZipError,
    PromptTooLongError,
    errors_as,
)
from mlx_zip.packs.pack import Pack, as_pack, merge_packs
from mlx_zip.server.answers.answer_deltas import AnswerDeltas, mask_letters_and_digits
from mlx_zip.server.answers.constraint import make_grammar_constraint
from mlx_zip.server.answers.tool_formats import messages_for_template, openai_tools
from mlx_zip.server.answers.turn import Delta, Done, Turn, Waiting
from mlx_zip.server.options import Options
from mlx_zip.text.long_texts import Check, LongEncoding, LongTexts, utf8_size
from mlx_zip.text.prompts import Chat, check_unicode, encode_prompt
from mlx_zip.text.token_facts import TokenTexts

log = logging.getLogger(__name__)
Some = TypeVar("Some")
Inbox = asyncio.Queue[tuple[int, Event] | None]  # events of answers, with the index of the turn
_THREAD_COUNT = 4
_LONG_CHARACTERS = (
    1 << 18
)  # turns with more characters are encoded one by one in a thread of their own, so that shorter ones do not wait
_UNSHORTENED_ROLES = ("system", "user", "tool")  # roles of messages that chat templates never shorten
_MOST_REPORTED = 100  # number of left-out tools that the log names


class Core:
    """Answers turns with an engine. Call all methods from one event loop; the engine may run in other threads.

    Attributes: `model`, name of the model in answers; `created`, start of the server in seconds since 1970; `tokens`,
    texts of ids; `named_packs`, the packs that requests can choose.
    """

    def __init__(self, engine: Engine, options: Options | None = None) -> None:
        self.engine, self.options = engine, options or Options()
        self.model = self.options.model or engine.info.name
        self.created = int(time.time())
        self.on_close: list[Callable[[], None]] = []  # called when the server ends
        self.on_purge: list[Callable[[], int]] = []  # each deletes kept answers and returns their number
        self.on_done: list[Callable[[Done], None]] = []  # called with the `Done` of each answer
        self.tokens = TokenTexts(engine.tokenizer)
        self._reported: set[str] = set()
        self.named_packs = NamedPacks(self.options.packs, self.options.pack)
        self._texts = LongTexts(engine.tokenizer, engine.info.max_prompt_tokens)
        self._pool = ThreadPoolExecutor(_THREAD_COUNT, thread_name_prefix="mlx_zip-server")
        self._long_prompts_pool = ThreadPoolExecutor(1, thread_name_prefix="mlx_zip-long-prompts")
        self._scoring_pool = ThreadPoolExecutor(1, thread_name_prefix="mlx_zip-scored-prompts")
        self._scoring_count = 0  # number of prompts in this pool, running or queued, for which a client waits

    async def answer(self, turn: Turn, inbox: Inbox | None = None) -> AsyncGenerator[Delta, None]:
        """Yields the deltas of one answer. inbox: queue for the answer's events, in which None ends the answer.

        Otherwise like `answers`. An answer that None has ended has no `Done`.
        """
        async with aclosing(self.answers([turn], inbox)) as deltas:
            async for _, delta in deltas:
                yield delta

    async def answers(
        self, turns: Sequence[Turn], inbox: Inbox | None = None
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yields the deltas of all answers as they arrive, as (index of the turn, delta).

        The first delta of each answer is `Waiting(0, 0)`, yielded when the engine has accepted all turns; the last one
        is a `Done`. inbox: see `answer`. Raises `GenerationError` if there are more turns than the engine takes at a
        time and, before the first delta, what `Engine.submit` and the chat template raise; later, the error of a failed
        request, which ends all answers. Closing the generator, or cancelling the task, cancels the engine's requests at
        once.
        """
        self._check_turn_count(len(turns))
        inbox = asyncio.Queue() if inbox is None else inbox
        running: list[tuple[Ticket, AnswerDeltas]] = []
        try:
            for index, turn in enumerate(turns):
                self._log_left_out_tools(turn.left_out)
                running.append(await self._submit(turn, _make_deliver(inbox, index)))
            for index in range(len(turns)):
                yield index, Waiting(0, 0)
            left = len(turns)
            while left and (arrived := await inbox.get()) is not None:
                index, event = arrived
                for delta in self._add_event(*running[index], event):
                    left -= isinstance(delta, Done)
                    yield index, delta
        finally:
            for ticket, _ in running:
                self.engine.cancel(ticket)

    def _check_turn_count(self, count: int) -> None:
        most = self.engine.info.max_requests
        if most is not None and count > most:
            raise GenerationError(
                f"this request asks for {count} answers, and this server takes at most {most} at a time: ask for "
                "fewer (prompts, n)"
            )

    def _add_event(self, ticket: Ticket, answering: AnswerDeltas, event: Event) -> list[Delta]:
        """Returns the deltas of an event. Cancels the request if a stop string has ended the answer's text."""
        deltas = answering.add_event(event)
        if answering.hit_stop_string:
            self.engine.cancel(ticket)
        if deltas and isinstance(deltas[-1], Done):
            self._finish_answer(ticket, answering, deltas[-1])
        return deltas

    async def prompt_ids(self, turn: Turn) -> list[int]:
        """Returns the base ids of a turn's prompt; stops if the task is cancelled. Raises `GenerationError`."""
        return await self._await_encoding(turn, partial(self._encode_prompt, turn), lambda ids: None)

    async def score_prompt(self, turn: Turn, base_ids: Sequence[int]) -> list[PromptId]:
        """Compresses a turn's prompt to ids, as for generation, and returns the ids with their log-probabilities.

        base_ids: base ids of the prompt. Scores one prompt at a time; stops if the task is cancelled. Raises what
        `Engine.score_prompt_ids` raises, and `EngineBusyError` if as many prompts wait as the engine takes requests.
        """
        most = self.engine.info.max_requests
        if most is not None and self._scoring_count >= most:
            raise EngineBusyError(
                f"{self._scoring_count} prompts wait for their log-probabilities already; ask again later"
            )

        def work(check: Check) -> list[PromptId]:
            check()
            found = []
            for one in self.engine.score_prompt_ids(base_ids, turn.logprobs or 0, self.named_packs.resolve(turn.pack)):
                check()
                found.append(one)
            return found

        self._scoring_count += 1
        try:
            return await self._await_encoding(turn, work, lambda ids: None, self._scoring_pool)
        finally:
            self._scoring_count -= 1

    async def check_body_size(self, size: int, prompts: int) -> None:
        """Raises `PromptTooLongError` if a body of `size` bytes must hold a prompt that is too long.

        prompts: maximum number of prompts in the body, 0 to check nothing.
        """
        if prompts:
            await self.run_in_thread(self._texts.check_request_size, size, prompts)

    def answer_max_tokens(self, given: int | None, tools: bool = False) -> int:
        """Returns the maximum number of base tokens of an answer; -1: the rest of the context.

        given: the request's own maximum. tools: whether the request has tools, or is one for OpenAI's Responses.
        """
        if given is not None:
            return given
        long = tools and self.engine.info.context is not None  # without a context length it might not end
        return self.options.max_tokens_with_tools if long else self.options.max_tokens

    async def packs(self) -> list[PackInfo]:
        """Returns the packs that a `Turn` can name."""
        return await self.run_in_thread(self.named_packs.pack_infos, self.engine)

    async def run_in_thread(self, work: Callable[..., Some], *args: Any) -> Some:
        """Calls a blocking function in a thread, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def close(self) -> None:
        """Calls the functions in `on_close` and ends the threads. Does not close the engine."""
        for call in self.on_close:
            call()
        for pool in (self._pool, self._long_prompts_pool, self._scoring_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _make_submission(self, turn: Turn, prompt_ids: Sequence[int], prediction: Sequence[int]) -> Submission:
        """Returns a turn's request to the engine. prompt_ids, prediction: base ids of the prompt and the prediction."""
        return Submission(
            base_ids=prompt_ids,
            max_tokens=turn.max_tokens,
            eos_ids=frozenset(self.engine.tokenizer.eos_token_ids),
            sampling={**self.options.sampling, **turn.sampling},
            top_logprobs=turn.logprobs,
            constraint=make_grammar_constraint(self.engine.tokenizer, turn, prompt_ids, self.engine.info.vocab_size),
            pack=self.named_packs.resolve(turn.pack),
            show=turn.show,
            prediction=prediction,
        )

    def _encode_prompt(self, turn: Turn, check: Check) -> list[int]:
        """Returns the base ids of a turn's prompt. Raises `GenerationError`, and what `check` raises."""
        check()
        tokenizer, encode = self.engine.tokenizer, LongEncoding(self._texts, check)
        if turn.prompt is not None:
            return encode_prompt(tokenizer, turn.prompt, encode=encode)
        as_written = [one["content"] for one in turn.messages if one["role"] in _UNSHORTENED_ROLES]
        self._texts.check_text_size(sum(utf8_size(text) for text in as_written if isinstance(text, str)))
        options = {**self.options.template_options, **turn.template_options}
        if turn.tools and turn.tool_choice != "none":
            options["tools"] = openai_tools(turn.tools)
        chat = Chat(messages_for_template(tokenizer, turn.messages), prefill=turn.prefill, options=options)
        return encode_prompt(tokenizer, chat, answers=self.engine.answers(), encode=encode)

    def _encode_prediction(self, text: str, check: Check) -> list[int]:
        """Returns the base ids of a prediction. Raises `GenerationError` if it is too long, and what `check` raises."""
        check_unicode("prediction", text)
        try:
            return LongEncoding(self._texts, check)(self.engine.tokenizer, text)
        except PromptTooLongError as error:
            assert self._texts.most is not None
            raise prediction_too_long_error(self._texts.most) from error

    async def _submit(self, turn: Turn, deliver: Callable[[Event], None]) -> tuple[Ticket, AnswerDeltas]:
        """Submits a turn; if the task is cancelled meanwhile, cancels the request as soon as its ticket is known.

        Returns the ticket, and what turns the request's events into deltas.
        """
        hide = str if self.options.show_text else mask_letters_and_digits

        def submit(check: Check) -> tuple[Ticket, AnswerDeltas]:
            prompt_ids = self._encode_prompt(turn, check)
            prediction = self._encode_prediction(turn.prediction, check)
            answering = AnswerDeltas(self.engine.tokenizer, turn, prompt_ids, self.tokens, hide)
            return self.engine.submit(self._make_submission(turn, prompt_ids, prediction), deliver), answering

        return await self._await_encoding(turn, submit, lambda submitted: self.engine.cancel(submitted[0]))

    async def _await_encoding(
        self,
        turn: Turn,
        work: Callable[[Check], Some],
        undo: Callable[[Some], None],
        pool: ThreadPoolExecutor | None = None,
    ) -> Some:
        """Calls `work`, which encodes a turn's prompt, in a thread, and returns its result.

        work: called with a function that raises `EngineStoppedError` once the task is cancelled or the engine has
        ended. undo: called with the result of `work` if the task is cancelled before `work` returns. pool: None to
        choose a pool by the length of the prompt.
        """
        gone = threading.Event()

        def check() -> None:
            if gone.is_set():
                raise EngineStoppedError("nobody waits for this prompt any more")
            if not self.engine.alive:
                raise EngineStoppedError("the server is stopping, so this prompt was not read to its end")

        def ended(future: asyncio.Future[Some]) -> None:
            if not future.cancelled() and future.exception() is None:
                undo(future.result())

        if pool is None:
            pool = self._long_prompts_pool if _has_long_text(turn) else self._pool
        future = asyncio.get_running_loop().run_in_executor(pool, work, check)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            gone.set()
            future.add_done_callback(ended)
            raise

    def _log_left_out_tools(self, left_out: tuple[str, ...]) -> None:
        """Logs the tools of a request that this server cannot run, each tool once."""
        new = [label for label in dict.fromkeys(left_out) if label not in self._reported]
        if new := new[: _MOST_REPORTED - len(self._reported)]:
            self._reported.update(new)
            log.warning("tools that this server cannot run are left out: %s", ", ".join(map(repr, new)))

    def _finish_answer(self, ticket: Ticket, answering: AnswerDeltas, done: Done) -> None:
        if answering.turn.prompt is None and answering.whole and answering.text:
            with contextlib.suppress(EngineStoppedError):  # the answer was the last one before the server stops
                self.engine.note_answer(ticket, answering.text, answering.base_ids)
        for call in self.on_done:
            call(done)


def _has_long_text(turn: Turn) -> bool:
    tools = [(tool.description, tool.parameters) for tool in turn.tools]
    return (
        _count_characters([turn.prompt, turn.messages, turn.prefill, turn.prediction, tools, turn.template_options])
        > _LONG_CHARACTERS
    )


def _count_characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return _count_characters([*value.keys(), *value.values()])
    return sum(map(_count_characters, value)) if isinstance(value, list | tuple) else 0


def _make_deliver(inbox: Inbox, index: int) -> Callable[[Event], None]:
    """Returns a function that puts (`index`, event) into the inbox, for the engine's thread."""
    loop = asyncio.get_running_loop()

    def deliver(event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody listens
            loop.call_soon_threadsafe(inbox.put_nowait, (index, event))

    return deliver


class Cores:
    """The cores of several models by name, for one event loop. main: the core of `engines.main`."""

    def __init__(self, engines: Engines, main: Core) -> None:
        self.engines, self.main = engines, main
        self._other: Core | None = None

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Core]:
        """Context manager: opens the model `name` unless it is open, yields its core, and keeps it open in the block.

        Waits and raises as `Engines.acquire` does. The main model is always open.
        """
        if name in (self.main.model, self.main.engine.info.name):
            yield self.main
            return
        engine = await self._acquire_engine(name)
        try:
            yield self._get_core(name, engine)
        finally:
            self.engines.release(engine)

    async def _acquire_engine(self, name: str) -> Engine:
        """Returns the engine of a model. If the task is cancelled meanwhile, releases the engine once it has opened."""
        loop = asyncio.get_running_loop()
        waiting: Any = loop.run_in_executor(None, self.engines.acquire, name)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            waiting.add_done_callback(self._release_when_opened)
            raise

    def _release_when_opened(self, waiting: Future[Engine]) -> None:
        if not waiting.cancelled() and waiting.exception() is None:
            self.engines.release(waiting.result())

    def _get_core(self, name: str, engine: Engine) -> Core:
        """Returns the core of an engine, with the main core's options but no packs, which fit the main model only."""
        if self._other is None or self._other.engine is not engine:
            if self._other is not None:
                self._other.close()
            self._other = Core(engine, replace(self.main.options, model=name, packs={}, pack=None))
        return self._other

    def close(self) -> None:
        """Closes the model that is open besides the main one, if any, and ends the threads of its core."""
        self.engines.close()
        if self._other is not None:
            self._other.close()


# ---- the packs that requests can choose, alone or merged

_MOST_MERGED_PACKS = 16


@dataclass(frozen=True)
class PackInfo:
    """A pack that requests can name. entries: number of entries. reason: why it cannot be used, None if it can."""

    name: str
    entries: int
    reason: str | None = None


class NamedPacks:
    """Packs by name, for any thread. packs: name -> path or `Pack`. default: pack of requests that name none."""

    def __init__(self, packs: Mapping[str, Any], default: Any) -> None:
        self._packs, self._default = packs, default
        self._merged = lru_cache(_MOST_MERGED_PACKS)(self._merge_named_packs)

    def resolve(self, names: str | Sequence[str] | None) -> Any:
        """Returns the pack with this name, or the packs with these names merged in order; the default pack for None.

        Raises `GenerationError` if a name is unknown or the packs cannot be merged.
        """
        several = (names,) if isinstance(names, str) else tuple(names or ())
        for name in several:
            if name not in self._packs:
                known = ", ".join(sorted(self._packs)) or "none"
                raise GenerationError(f"pack: there is no pack {name!r:.80}; the server was started with: {known}")
        if len(several) < 2:
            return self._packs[several[0]] if several else self._default
        return self._merged(several)

    def _merge_named_packs(self, names: tuple[str, ...]) -> Pack:
        with errors_as(GenerationError, f"pack: {' and '.join(names)}", MlxZipError):
            return merge_packs([as_pack(self._packs[name]) for name in names])

    def pack_infos(self, engine: Engine) -> list[PackInfo]:
        """Returns one `PackInfo` per pack, which says whether requests to `engine` can use the pack."""
        return [self._make_pack_info(name, pack, engine) for name, pack in self._packs.items()]

    def _make_pack_info(self, name: str, pack: Any, engine: Engine) -> PackInfo:
        entries = 0
        try:
            found = as_pack(pack)
            entries = len(found.entries)
            engine.check_pack(found)
        except MlxZipError as error:
            return PackInfo(name, entries, str(error))
        return PackInfo(name, entries)
