"""The core of the server, which all APIs share: answers a `Turn` with `Delta`s."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import lru_cache, partial
from typing import Any, TypeVar

from mlx_zip.engine import Engine, Event, PromptId, Submission, Ticket
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
from mlx_zip.server.metrics import Metrics
from mlx_zip.server.openai.responses_store import ResponseFiles, ResponseStore
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
_MOST_MERGED_PACKS = 16  # number of merged packs that are kept
_MOST_REPORTED = 100  # number of left-out tools that the log names


class Core:
    """Answers turns with an engine. Call all methods from one event loop; the engine may run in other threads.

    Attributes: `model`, name of the model in answers; `created`, start of the server in seconds since 1970; `tokens`,
    texts of ids; `metrics`, figures for Prometheus; `responses`, stored responses of OpenAI's Responses.
    """

    def __init__(self, engine: Engine, options: Options | None = None) -> None:
        self.engine, self.options = engine, options or Options()
        self.model = self.options.model or engine.info.name
        self.created = int(time.time())
        self.metrics = Metrics(engine)
        files = None if self.options.responses_folder is None else ResponseFiles(self.options.responses_folder)
        self.responses = ResponseStore(files=files)
        self.tokens = TokenTexts(engine.tokenizer)
        self._reported: set[str] = set()
        self._merge_packs = lru_cache(_MOST_MERGED_PACKS)(partial(_merge_named_packs, self.options.packs))
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
        return await self._await_encoding(turn, partial(self._encode_prompt, turn))

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
            for one in self.engine.score_prompt_ids(base_ids, turn.logprobs or 0, self.resolve_pack(turn.pack)):
                check()
                found.append(one)
            return found

        self._scoring_count += 1
        try:
            return await self._await_encoding(turn, work, self._scoring_pool)
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

    def resolve_pack(self, names: str | Sequence[str] | None) -> Any:
        """Returns the pack with this name, or the packs with these names merged in order; the default pack for None.

        Raises `GenerationError` if a name is unknown or the packs cannot be merged.
        """
        several, packs = (names,) if isinstance(names, str) else tuple(names or ()), self.options.packs
        for name in several:
            if name not in packs:
                known = ", ".join(sorted(packs)) or "none"
                raise GenerationError(f"pack: there is no pack {name!r:.80}; the server was started with: {known}")
        if len(several) < 2:
            return packs[several[0]] if several else self.options.pack
        return self._merge_packs(several)

    async def run_in_thread(self, work: Callable[..., Some], *args: Any) -> Some:
        """Calls a blocking function in a thread, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def close(self) -> None:
        """Closes the store of responses and ends the threads. Does not close the engine."""
        self.responses.close()
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
            pack=self.resolve_pack(turn.pack),
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

        return await self._await_encoding(turn, submit, undo=lambda submitted: self.engine.cancel(submitted[0]))

    async def _await_encoding(
        self,
        turn: Turn,
        work: Callable[[Check], Some],
        pool: ThreadPoolExecutor | None = None,
        undo: Callable[[Some], object] = lambda result: None,
    ) -> Some:
        """Calls `work`, which encodes a turn's prompt, in a thread, and returns its result.

        work: called with a function that raises `EngineStoppedError` once the task is cancelled or the engine has
        ended. pool: None to choose a pool by the length of the prompt. undo: see `result_or_undo`.
        """
        gone = threading.Event()

        def check() -> None:
            if gone.is_set():
                raise EngineStoppedError("nobody waits for this prompt any more")
            if not self.engine.alive:
                raise EngineStoppedError("the server is stopping, so this prompt was not read to its end")

        if pool is None:
            pool = self._long_prompts_pool if _has_long_text(turn) else self._pool
        try:
            return await result_or_undo(asyncio.get_running_loop().run_in_executor(pool, work, check), undo)
        except asyncio.CancelledError:
            gone.set()
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
        self.metrics.observe_answer(done)


async def result_or_undo(work: asyncio.Future[Some], undo: Callable[[Some], object]) -> Some:
    """Returns the result of work in a thread. If the task is cancelled first, calls `undo` with the later result."""

    def ended(work: asyncio.Future[Some]) -> None:
        if not work.cancelled() and work.exception() is None:
            undo(work.result())

    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(ended)
        raise


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


def _merge_named_packs(packs: Mapping[str, Any], names: tuple[str, ...]) -> Pack:
    with errors_as(GenerationError, f"pack: {' and '.join(names)}", MlxZipError):
        return merge_packs([as_pack(packs[name]) for name in names])
