"""`GenerationResponse`: one emitted id with its text and figures. `Answer` turns a request's events into responses."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_zip.engine.interface import Emitted, Engine, Event, Failed, Finished, Started, Submission
from mlx_zip.text.stream import TextPiece, TextStream

RULE = "=" * 10  # the line that `generate(verbose=True)` prints before and after the text, as mlx-lm does


@dataclass(frozen=True)
class GenerationResponse:
    """One emitted id, and the figures up to and including it.

    text: the next piece of text, possibly empty. token: the emitted id. base_ids: the base ids of `token`, without
    those after an eos id, a stop string or the limit. logprobs [W]: the log-probabilities that `token` was chosen from;
    None in responses from an engine.
    prompt_tokens, generation_tokens: base tokens of the prompt, and of the output so far. prompt_ids, steps: ids of the
    prompt, and of the output so far. hypertokens: hypertokens emitted so far. *_tps: base tokens per second. bytes:
    UTF-8 bytes of text so far. peak_memory: in GB. finish_reason: "stop" or "length" in the last response, else None.
    cached_tokens: base tokens of a conversation that the prompt cache already held, not counted in prompt_tokens.
    from_draft: whether a draft proposed `token`; such an id takes no pass of its own. accepted: ids emitted so far that
    a draft proposed.
    """

    text: str
    token: int
    base_ids: tuple[int, ...]
    logprobs: Any
    prompt_tokens: int
    prompt_ids: int
    prompt_tps: float
    generation_tokens: int
    steps: int
    hypertokens: int
    generation_tps: float
    bytes: int
    peak_memory: float
    finish_reason: str | None = None
    cached_tokens: int = 0
    from_draft: bool = False
    accepted: int = 0

    @property
    def base_tokens_per_step(self) -> float:
        """Base tokens per emitted id."""
        return self.generation_tokens / self.steps

    @property
    def base_tokens_per_pass(self) -> float:
        """Base tokens per pass of the model. An id from a draft takes no pass of its own."""
        return self.generation_tokens / max(1, self.steps - self.accepted)

    @property
    def hyper_share(self) -> float:
        """Share of the emitted ids that are hypertokens."""
        return self.hypertokens / self.steps

    def figures(self) -> dict[str, Any]:
        """Returns the figures by name, with units. *_tokens count base tokens; steps and prompt_ids count ids."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_ids": self.prompt_ids,
            "prompt_tokens_per_s": self.prompt_tps,
            "generation_tokens": self.generation_tokens,
            "steps": self.steps,
            "hypertokens": self.hypertokens,
            "base_tokens_per_step": self.base_tokens_per_step,
            "accepted": self.accepted,
            "base_tokens_per_pass": self.base_tokens_per_pass,
            "hyper_share": self.hyper_share,
            "generation_tokens_per_s": self.generation_tps,
            "text_bytes": self.bytes,
            "peak_memory_gb": self.peak_memory,
        }


def format_footer(response: GenerationResponse) -> str:
    """Returns mlx-lm's three lines of figures, in base tokens, one on hypertokens and, with drafts, one on drafts."""
    last = response
    drafts = (
        f"\nDrafts: {last.accepted} of {last.steps} ids proposed and accepted, "
        f"{last.base_tokens_per_pass:.3f} base tokens per pass"
    )
    return (
        f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {last.peak_memory:.3f} GB\n"
        f"Hypertokens: {last.generation_tokens} base tokens in {last.steps} steps "
        f"({last.base_tokens_per_step:.3f} per step), {last.hyper_share:.1%} of steps hypertokens; "
        f"prompt {last.prompt_tokens} base tokens in {last.prompt_ids} ids" + (drafts if last.accepted else "")
    )


# ---- responses from a request's events


class Answer:
    """Turns the events of one request into responses. The clock starts at construction and restarts with `start`.

    vocab_size: number of base ids. stops: texts that end the answer. cached_tokens: see `GenerationResponse`. memory:
    function that returns the peak memory in bytes.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        stops: Sequence[str],
        memory: Callable[[], int],
        cached_tokens: int = 0,
    ) -> None:
        self._text, self._vocab_size, self._memory = TextStream(tokenizer, None, stops), vocab_size, memory
        self._first_s = 0.0
        self._prompt_tokens = self._prompt_ids = self._tokens = self._steps = self._hypertokens = self._bytes = 0
        self._accepted = 0
        self._cached_tokens, self._last = cached_tokens, 0
        self.start()

    def start(self) -> None:
        """Restarts the clock."""
        self._begun_s = time.perf_counter()

    def take_event(self, event: Event, logprobs: Any = None) -> GenerationResponse | None:
        """Returns the response for an event, None if the event needs no response. Raises the error of a `Failed` event.

        logprobs [W]: the log-probabilities that an emitted id was chosen from.
        """
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Started):
            self._prompt_tokens = event.prompt_tokens - event.cached_tokens
            self._prompt_ids, self._cached_tokens = event.prompt_ids, self._cached_tokens + event.cached_tokens
        elif isinstance(event, Emitted):
            piece = self._text.feed(event.base_ids, event.last)
            return self._make_response(event.id, piece, logprobs, from_draft=event.from_draft)
        elif isinstance(event, Finished):  # no emitted id was marked as the last one
            return self._make_response(self._last, self._text.finish("length"), None, step=False)
        return None

    def _make_response(
        self, token: int, piece: TextPiece, logprobs: Any, step: bool = True, from_draft: bool = False
    ) -> GenerationResponse:
        """Returns a response. step: whether `token` was just emitted; False for a last response without a new id."""
        now = time.perf_counter()
        self._first_s, self._last = self._first_s or now, token
        self._steps += step
        self._accepted += from_draft
        self._hypertokens += step and token >= self._vocab_size
        self._tokens += len(piece.base_ids)
        self._bytes += len(piece.text.encode("utf-8", "replace"))
        return GenerationResponse(
            text=piece.text,
            token=token,
            base_ids=piece.base_ids,
            logprobs=logprobs,
            prompt_tokens=self._prompt_tokens,
            prompt_ids=self._prompt_ids,
            prompt_tps=self._prompt_tokens / max(self._first_s - self._begun_s, 1e-9),
            generation_tokens=self._tokens,
            steps=self._steps,
            hypertokens=self._hypertokens,
            generation_tps=self._tokens / max(time.perf_counter() - self._first_s, 1e-9),
            bytes=self._bytes,
            peak_memory=self._memory() / 1e9,
            finish_reason=piece.finish_reason,
            cached_tokens=self._cached_tokens,
            from_draft=from_draft,
            accepted=self._accepted,
        )


def stream_answers(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Mapping[str, Any]],
    pack: Any,
    max_tokens: int,
    stop: str | Sequence[str] | None,
) -> Iterator[tuple[int, GenerationResponse]]:
    """Submits prompts of base ids to an engine and yields (index of the prompt, response) for each id when it arrives.

    If an answer ends but no id was marked as its last, one more response, without a new id, has the finish reason.
    samplings: sampling options per prompt. pack, max_tokens: as in `Submission`. stop: texts that end an answer. Raises
    what `Engine.submit` raises, and the error of a request that fails; then cancels all other requests.
    """
    ends = frozenset(engine.tokenizer.eos_token_ids)
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    arrived: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    memory = lambda: engine.figures().peak_memory_bytes
    running: dict[int, Answer] = {}
    tickets = {}
    try:
        for at, (base_ids, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            submission = Submission(base_ids, max_tokens, ends, sampling, pack=pack, keep=False)
            running[at] = Answer(engine.tokenizer, engine.info.vocab_size, stops, memory)
            tickets[at] = engine.submit(submission, lambda event, at=at: arrived.put((at, event)))
        while running:
            at, event = arrived.get()
            if at not in running:  # the text has ended, and the request was cancelled below
                continue
            if (response := running[at].take_event(event)) is not None:
                yield at, response
            if isinstance(event, Finished) or (response is not None and response.finish_reason is not None):
                engine.cancel(tickets.pop(at))
                del running[at]
    finally:
        for ticket in tickets.values():
            engine.cancel(ticket)
