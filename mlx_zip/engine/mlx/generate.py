"""Generation: `load`, `stream_generate`, `generate`, `batch_generate`, for zip2zip models and plain mlx-lm ones.

Requests run in the caller's thread, with the scheduler that engines use too, and their events become responses. Limits,
counts and penalties are in base tokens. For a plain model every id is one base token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, Unpack

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.sample_utils import LogitsProcessor, Sampler

from mlx_zip.codec import CodecParams
from mlx_zip.codec.ids import as_ids
from mlx_zip.engine.drafts import DRAFT_TOKENS, check_draft_options
from mlx_zip.engine.interface import Emitted, Event, SessionInfo, Submission
from mlx_zip.engine.mlx.group import Group, Reading
from mlx_zip.engine.mlx.prompt_caches import CacheTurn, check_prompt
from mlx_zip.engine.mlx.served import PREFILL_STEP_SIZE, Served, check_kv_options
from mlx_zip.engine.options import RunOptions
from mlx_zip.engine.request import Inline, Request
from mlx_zip.engine.responses import RULE, Answer, GenerationResponse, format_footer
from mlx_zip.engine.sampling.options import Sampling, SamplingOptions
from mlx_zip.engine.sampling.processors import make_sampler
from mlx_zip.engine.scheduler import Scheduler
from mlx_zip.engine.sessions.mlx_caches import open_session_store
from mlx_zip.engine.sessions.store import Checkout, NoSessions, SessionOptions, SessionStore
from mlx_zip.engine.submissions import Checked, check_max_tokens
from mlx_zip.errors import GenerationError
from mlx_zip.layout import has_hypertokens
from mlx_zip.models.loading import load
from mlx_zip.models.longrope_refill import LongRopeRefill
from mlx_zip.models.machines import raise_unless_machines_agree
from mlx_zip.models.rows.zip_state import find_zip_state
from mlx_zip.packs.pack import Pack, PackLike, PackOrEntries, as_pack, split_packs
from mlx_zip.text.tokenizers import as_tokenizer

__all__ = ["GenerationResponse", "batch_generate", "generate", "load", "stream_generate"]


class BatchOptions(SamplingOptions, total=False):
    """Keyword arguments of `stream_batch`, for type checkers."""

    stop: str | Sequence[str] | None
    sampler: Sampler | None
    pack: Any
    prefill_step_size: int


class GenerateOptions(BatchOptions, total=False):
    """Keyword arguments of `stream_generate`, for type checkers."""

    max_tokens: int
    logits_processors: Sequence[LogitsProcessor] | None
    prompt_cache: list[Any] | None
    max_kv_size: int | None
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    draft: str
    draft_model: Any
    num_draft_tokens: int
    draft_exact: bool
    prompt_progress_callback: Callable[[int, int], None] | None


def stream_generate(
    model: Any,
    tokenizer: Any,
    prompt: Any,
    max_tokens: int = 256,
    *,
    stop: str | Sequence[str] | None = None,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prompt_cache: list[Any] | None = None,
    pack: PackOrEntries | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    draft: str = "off",
    draft_model: Any = None,
    num_draft_tokens: int = DRAFT_TOKENS,
    draft_exact: bool = False,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Iterator[GenerationResponse]:
    """Generates text and yields one response per emitted id.

    prompt: text, a conversation (chat messages or `Chat`), or base ids. max_tokens: maximum base tokens of the output,
    -1 if only the context limits the output. stop: one or several texts; the output ends before the first of them.
    sampling: fields of `Sampling` (temp, top_p, seed, repetition_penalty, logit_bias, ...), if no `sampler` is given.
    logits_processors: as in mlx-lm; they get the ids that the model has read, hypertokens included.

    prompt_cache: from `model.make_cache()` or mlx-lm's `make_prompt_cache(model)`; updated in place from the first
    response on. A prompt of text or base ids continues what the cache holds; text then gets no special tokens. A
    conversation must always be given whole: the cache is trimmed to the common prefix of cache and conversation, and
    only the rest is read. Answers of the model in the conversation are read as the ids that the model emitted. At the
    end the cache holds the prompt and every emitted id, the last one included, even if the text ends before that id.

    pack: the pack (a path, a `Pack`, or entries of base ids) that a new cache begins with in place of the model's own.
    With a prompt_cache that was saved and loaded, give the pack that the cache began with, because the file does not
    hold the pack's rows. prompt_progress_callback: called with (number of prompt ids read so far, number of all prompt
    ids), also if LongRoPE's switch of factors has the context read again. max_kv_size: as in `make_bounded_cache`, for
    a new cache. kv_bits, kv_group_size, quantized_kv_start: KV cache quantization as in mlx-lm.

    draft: source of proposed ids, of which one pass of the model checks several. "lookup": ids that followed an earlier
    place of the text that matches the text's end; "head": the model's draft head; "auto": lookup or draft head, with as
    many ids as save time; "off": no proposed ids. Drafts do not change the emitted ids, unless two logits differ by
    less than the rounding of a pass over several ids. draft_exact: as in `RunOptions`; if True, processors and samplers
    may be called more than once for one id. draft_model: a loaded model of the same vocabulary, plain or with
    hypertokens, that proposes ids: num_draft_tokens per pass, as in mlx-lm, or as many as save time if draft is "auto".
    The draft model has no prompt cache: if a plain model continues a prompt_cache, the draft model reads only the new
    part of the text.

    Raises before anything runs: `GenerationError` if the request cannot be met, `DataError` if the pack cannot be read
    or is of another tokenizer.
    """
    options = Sampling.from_options(sampling, signature(stream_generate).parameters)
    _check_function_arguments(
        sampler=sampler, logits_processors=logits_processors, prompt_progress_callback=prompt_progress_callback
    )
    tokenizer, kept = as_tokenizer(tokenizer), prompt_cache is not None
    start = _checked_pack_argument(pack, tokenizer, model)
    check_draft_options(draft, num_draft_tokens)
    how = RunOptions(
        kv_bits,
        kv_group_size,
        quantized_kv_start,
        prefill_step_size,
        max_kv_size=max_kv_size,
        ahead=_ahead_option(model),
        draft=draft,
        num_draft_tokens=num_draft_tokens,
        draft_exact=draft_exact,
    )
    served = Served(model, tokenizer, how, draft_model)
    cache = served.new_cache(start)
    if prompt_cache is not None:
        if max_kv_size is not None:
            raise GenerationError("max_kv_size (--max-kv-size): the prompt cache given keeps the size that it has")
        cache = _checked_prompt_cache(prompt_cache, model, cache, start)
    check_kv_options(served, cache)
    turn = CacheTurn(tokenizer, prompt, cache)
    check_prompt(served, cache, turn)
    check_max_tokens(max_tokens, "max_tokens (--max-tokens)")
    draws = _make_request_sampler(options, sampler, served)
    options.check_biases(served.vocab_size)
    own = Checkout(cache, turn.kept_ids, 0, "")  # 0 base tokens: the ids to read do not repeat what the cache holds
    run = CallersRun(served, Inline(draws, tuple(logits_processors or ()), True, kept, checkout=own))
    run.add(turn.base_ids, options, max_tokens, tokenizer.eos_token_ids)
    answer = Answer(tokenizer, served.vocab_size, _as_stop_strings(stop), mx.get_peak_memory, turn.cached_tokens)
    facts = turn.base_ids, turn.kept_ids, _codec_of_cache(cache), max_tokens, stop, options, how
    return _stream_on_cache(run, turn, run.responses([answer], facts, turn.begin, prompt_progress_callback))


def _stream_on_cache(
    run: CallersRun, turn: CacheTurn, responses: Generator[tuple[int, GenerationResponse], None, None]
) -> Iterator[GenerationResponse]:
    """Yields the responses of one request. At the end records on the request's cache what the cache has read."""
    ids, pieces, reason = list[int](), list[tuple[str, Sequence[int]]](), None
    try:
        with closing(responses):  # an exception that is kept would otherwise keep the run's memory
            for _, response in responses:
                ids.append(response.token)
                pieces.append((response.text, response.base_ids))
                reason = response.finish_reason
                yield response
                if reason is None:
                    turn.check_cache_unchanged()
    finally:
        turn.end([*run.requests[0].prompt_ids.tolist(), *ids] if ids else [], pieces, reason)


def cache_prompt(
    model: Any,
    tokenizer: Any,
    base_ids: Sequence[int],
    options: SessionOptions,
    run: RunOptions,
    progress: Callable[[int], None] = lambda read: None,
) -> tuple[SessionStore, SessionInfo]:
    """Has the model read a prompt. Returns a store whose only session holds the prompt, and the session's info.

    The session's file is for `mlx_zip generate --prompt-cache-file` and for engines. options: options of the store.
    run: how the model is run. progress: called with the number of base tokens read so far. Raises `GenerationError` if
    the prompt or the KV quantization is invalid.
    """
    served = Served(model, tokenizer, replace(run, ahead=False))  # the cache must not read the id after the prompt
    cache = served.new_cache(None)
    check_kv_options(served, cache)
    check_prompt(served, cache, CacheTurn(tokenizer, base_ids, cache))
    state, own = find_zip_state(cache), CallersRun(served, Inline(checkout=Checkout(cache, 0, 0, "")))
    own.add(base_ids, Sampling(), 1, ())
    for _ in own.events(lambda read, total: progress(read if state is None else state.books[0].base_length)):
        pass
    store = open_session_store(model, tokenizer, options)
    store.put(cache, pack_key="", base_ids=base_ids if state is None else None)
    return store, store.sessions()[0]


class CallersRun:
    """Requests that run in the caller's thread.

    inline: options of all requests. With a caller's cache (`Inline.checkout`) there is only one request.
    """

    def __init__(self, served: Served, inline: Inline) -> None:
        self.requests: list[Request] = []
        self._served, self._inline = served, inline
        own = inline.checkout
        self._cache, self._kept = (None, 0) if own is None else (own.cache, own.ids)
        self._arrived: deque[tuple[int, Event]] = deque()
        self._yielded: int | None = None  # ids that the caller's cache held when the last id was yielded

    def add(
        self,
        base_ids: Sequence[int],
        options: Sampling,
        max_tokens: int,
        ends: Iterable[int],
        start: Pack | None = None,
    ) -> None:
        """Adds a request. ends: ids that end the answer. start: pack that a new cache begins with."""
        row, submission = len(self.requests), Submission(base_ids, max_tokens, frozenset(ends), keep=False)
        checked, arrived = Checked(submission, as_ids(base_ids), options, start), self._arrived
        # the request must not refer to this object, so that the cache is freed as soon as nobody uses the responses
        self.requests.append(Request(checked, lambda event: arrived.append((row, event)), self._inline))

    def responses(
        self,
        answers: Sequence[Answer],
        facts: object,
        begin: Callable[[], None] = lambda: None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Generator[tuple[int, GenerationResponse], None, None]:
        """Yields (index of the request, response) per emitted id until all texts end.

        answers: one per request. facts: data of the requests that must be equal on all machines. begin: called before
        the first step. Until the end keeps the model in wired memory on a Mac, as mlx-lm does. Raises `MachineError` if
        the model is on several machines and their facts differ.
        """
        streams: Any = [generation_stream, mx.default_stream(mx.default_device())]  # to be waited for at the end
        with wired_limit(self._served.model, streams):
            if (group := self._served.machines) is not None:
                mx.synchronize(generation_stream)  # the last step of an earlier request must be over on all machines
                raise_unless_machines_agree(group, repr(facts), "the request")
            if (seed := self.requests[0].checked.sampling.seed) is not None:
                mx.random.seed(seed)
            begin()
            for answer in answers:
                answer.start()
            for row, event, logprobs in self.events(progress):
                if self.requests[row].cancelled:
                    continue  # the request's text has ended
                response = answers[row].take_event(event, logprobs)
                if response is None:
                    continue
                ended = response.finish_reason is not None
                self.requests[row].cancelled = ended
                yield row, response
                if ended and all(request.cancelled for request in self.requests):
                    return

    def events(self, progress: Callable[[int, int], None] | None = None) -> Iterator[tuple[int, Event, Any]]:
        """Yields (index of the request, event, log-probabilities [W] of an emitted id) until all requests have ended.

        At each yield, and after an interrupt, the caller's cache holds what was read of the prompt and every id that
        was yielded, and nothing else.
        """
        served = self._served
        reading = partial(_ReportingReading, served, progress or (lambda read, total: None))
        count = len(self.requests)
        scheduler = Scheduler(served, NoSessions(), count, None, lambda request: None, reading, raises=True)
        for request in self.requests:
            scheduler.add_request(request)
        try:
            while scheduler.busy:
                self._run_or_restore_cache(scheduler, scheduler.run_round)
                ready = [(row, event, self.requests[row].logprobs) for row, event in self._arrived]
                self._arrived.clear()
                if self._cache is not None and any(isinstance(event, Emitted) for _, event, _ in ready):
                    while scheduler.readings:  # LongRoPE's switch: the last id is yet to be read
                        self._run_or_restore_cache(scheduler, scheduler.read_prompts)
                yield from ready
        finally:
            for request in self.requests:
                request.release_memory()

    def _run_or_restore_cache(self, scheduler: Scheduler, part: Callable[[], None]) -> None:
        """Runs `part`, a round of the scheduler or a part of a round. If `part` raises, trims the caller's cache.

        The cache then holds what it held when the last id was yielded or, before the first id, what was read of the
        prompt.
        """
        state = None if self._cache is None else find_zip_state(self._cache)
        if state is not None and scheduler.groups and not scheduler.readings:
            self._yielded = state.offset
        try:
            part()
            for request in self.requests:
                if request.error is not None:
                    raise request.error
        except BaseException:
            if state is not None:
                of_prompt = min(state.offset, self._kept + len(self.requests[0].prompt_ids))
                self._served.model.trim_cache(self._cache, of_prompt if self._yielded is None else self._yielded)
            raise


class _ReportingReading(Reading):
    """A `Reading` that reports its progress to a function as mlx-lm does: before, after each chunk, and at the end."""

    def __init__(self, served: Served, progress: Callable[[int, int], None], request: Request) -> None:
        super().__init__(served, request)
        self._progress, self._total = progress, self._again + len(self._ids)
        if not request.steps:
            progress(0, len(self._ids))

    def _read_again(self, refill: LongRopeRefill, at_most: int) -> None:
        super()._read_again(refill, at_most)
        self._progress(refill.done, self._total)

    def _read_ids(self, begin: int, end: int) -> None:
        super()._read_ids(begin, end)
        self._progress(self._again + end, self._total)

    def _make_group(self, last: int) -> Group:
        group = super()._make_group(last)
        self._progress(self._total, self._total)
        return group


class SharedDraws:
    """Takes the place of `Draws`: one sampler for all requests, which draws from MLX's global random state."""

    def __init__(self, sampler: Sampler, greedy: bool) -> None:
        self._sampler, self.greedy = sampler, greedy

    @property
    def state(self) -> mx.array:
        """MLX's global random state."""
        states: Any = mx.random.state
        return states[0]

    @state.setter
    def state(self, state: mx.array) -> None:
        high, low = np.array(state).tolist()
        mx.random.seed(high << 32 | low)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Returns ids [B] drawn from log-probabilities [B, W]."""
        return self._sampler(logprobs)


def generate(model: Any, tokenizer: Any, prompt: Any, verbose: bool = False, **options: Unpack[GenerateOptions]) -> str:
    """Generates text and returns all of it.

    verbose: whether to print the text while it is generated, and figures at the end. options: as in `stream_generate`.
    """
    text, response = "", None
    if verbose:
        print(RULE)
    for response in stream_generate(model, tokenizer, prompt, **options):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        print(f"\n{RULE}\n{format_footer(response)}")
    return text


def batch_generate(
    model: Any, tokenizer: Any, prompts: Sequence[Any], max_tokens: int = 256, **options: Unpack[BatchOptions]
) -> list[str]:
    """Generates texts for several prompts together, and returns one text per prompt.

    options: as in `stream_batch`. Each prompt has a codebook of its own. With greedy decoding the texts equal those of
    the prompts generated one by one. Raises `GenerationError`, before anything runs, if a request cannot be met.
    """
    responses = stream_batch(model, tokenizer, prompts, max_tokens, **options)
    texts = [""] * len(prompts)
    for row, response in responses:
        texts[row] += response.text
    return texts


def stream_batch(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    max_tokens: int = 256,
    *,
    stop: str | Sequence[str] | None = None,
    sampler: Sampler | None = None,
    pack: PackOrEntries | Sequence[PackOrEntries | None] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    **sampling: Unpack[SamplingOptions],
) -> Iterator[tuple[int, GenerationResponse]]:
    """Generates texts for several prompts together; yields (index of the prompt, response) per emitted id.

    Options are as in `stream_generate`, but `pack` may also be a list with one pack per prompt, None for the model's.
    """
    if not isinstance(prompts, Sequence) or isinstance(prompts, str) or not prompts:
        raise GenerationError("no prompts: give a list of at least one")
    options = Sampling.from_options(sampling, signature(stream_batch).parameters)
    _check_function_arguments(sampler=sampler)
    tokenizer = as_tokenizer(tokenizer)
    start = _checked_pack_argument(pack, tokenizer, model)
    served = Served(model, tokenizer, RunOptions(prefill_step_size=prefill_step_size, ahead=_ahead_option(model)))
    check_kv_options(served, ())
    check_max_tokens(max_tokens, "max_tokens (--max-tokens)")
    options.check_biases(served.vocab_size)
    run, answers, codecs = (
        CallersRun(served, Inline(_make_request_sampler(options, sampler, served), logprobs=True)),
        [],
        [],
    )
    for prompt, own in zip(prompts, split_packs(start, len(prompts)), strict=True):
        cache = served.new_cache(own)
        turn = CacheTurn(tokenizer, prompt, cache)
        check_prompt(served, cache, turn)
        run.add(turn.base_ids, options, max_tokens, tokenizer.eos_token_ids, own)
        answers.append(Answer(tokenizer, served.vocab_size, _as_stop_strings(stop), mx.get_peak_memory))
        codecs.append(_codec_of_cache(cache))
    facts = [request.submission.base_ids for request in run.requests], codecs, max_tokens, stop, options
    return run.responses(answers, facts)


# ---- checks and parts of requests


def _checked_prompt_cache(given: Any, model: Any, like: Sequence[Any], start: Any) -> list[Any]:
    """Returns a caller's prompt cache. like: a new cache. Raises `GenerationError` if `given` is of another model."""
    if (
        not isinstance(given, Sequence)
        or len(given) != len(like)
        or (find_zip_state(given) is None) != (find_zip_state(like) is None)
    ):
        raise GenerationError("the prompt cache was not made for this model")
    if has_hypertokens(model):
        state = model.split_cache(given)[1]
        if len(state.books) > 1:
            raise GenerationError(f"the prompt cache is of a batch of {len(state.books)} sequences, not of one")
        state.bind_start_packs([start])
    return given  # type: ignore[return-value]


def _checked_pack_argument(pack: Any, tokenizer: Any, model: Any) -> Any:
    """Returns the pack or entries that a new cache begins with; if `pack` is a list of packs, a list with one each.

    Raises `DataError` if a pack is of another tokenizer, and `GenerationError` if the model has no hypertokens.
    """
    if isinstance(pack, list | tuple) and any(one is None or isinstance(one, PackLike) for one in pack):
        return [_checked_pack_argument(one, tokenizer, model) for one in pack]
    if pack is not None and not has_hypertokens(model):
        raise GenerationError(
            "the pack (--pack): this model has no hypertokens, so nothing could use it; load it with a pack that was "
            "tuned for it (mlx_zip vocab pack tune)"
        )
    if not isinstance(pack, PackLike):
        return pack
    found = as_pack(pack)
    found.check_made_for(tokenizer, found.name or "the pack (--pack)")
    return found


def _codec_of_cache(cache: Sequence[Any]) -> CodecParams | None:
    """Returns the codec parameters of a cache, including the entries that it began with; None for a plain model."""
    state = find_zip_state(cache)
    return None if state is None else state.books[0].params


def _as_stop_strings(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """Returns stop strings as a tuple. Raises `GenerationError` if `stop` is neither text nor a list."""
    if stop is None or isinstance(stop, str):
        return () if stop is None else (stop,)
    if not isinstance(stop, Iterable) or isinstance(stop, bytes):
        raise GenerationError(f"stop (--stop) must be text or a list of texts, got {stop!r:.80}")
    return tuple(stop)


def _ahead_option(model: Any) -> bool | None:
    """Returns `RunOptions.ahead`: True for a plain model, whose steps then begin as early as in mlx-lm, else None."""
    return None if has_hypertokens(model) else True


def _make_request_sampler(options: Sampling, sampler: Sampler | None, served: Served) -> SharedDraws:
    """Returns `sampler`, or one made from `options` if it is None. Raises `GenerationError` if both are given."""
    if sampler is not None:
        if ignored := options.changed_sampler_options():
            raise GenerationError(f"{', '.join(ignored)}: give either a sampler or options for one")
        return SharedDraws(sampler, False)
    never_excluded = served.never_excluded if options.xtc_probability else ()
    return SharedDraws(make_sampler(options, served.width, never_excluded), options.temp == 0)


def _check_function_arguments(**given: Any) -> None:
    """Raises `GenerationError` unless each argument is None, a function or a list of functions."""
    for name, value in given.items():
        if value is not None and not all(map(callable, value if isinstance(value, list | tuple) else [value])):
            raise GenerationError(f"{name}: {value!r:.80} is no function")
