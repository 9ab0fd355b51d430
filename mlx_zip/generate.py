"""Generation: `load`, `stream_generate`, `generate`, `batch_generate`, for zip2zip models and plain mlx-lm ones.

mlx-lm's `generate_step` runs the loop; here a prompt is compressed before it, and emitted ids become text after it.
Limits, counts and penalties are in base tokens. For a plain model every id is one base token.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import signature
from typing import Any, TypeVar, Unpack

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step, generation_stream, maybe_quantize_kv_cache, wired_limit
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import LogitsProcessor, Sampler

from mlx_zip.decode import decode_steps
from mlx_zip.errors import GenerationError
from mlx_zip.layout import is_zip
from mlx_zip.loading import load
from mlx_zip.request import GenerationResponse, Request, base_config
from mlx_zip.sampling import Sampling, SamplingOptions
from mlx_zip.state import find_state, split_packs
from mlx_zip.vocab.first_stage import tokenizer_fingerprint
from mlx_zip.vocab.packs import PackLike, as_pack

__all__ = ["GenerationResponse", "batch_generate", "generate", "load", "stream_generate"]

T = TypeVar("T")
RULE = "=" * 10
PREFILL_STEP_SIZE = 2048
KV_BITS, KV_GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)


class BatchOptions(SamplingOptions, total=False):
    """Keyword arguments of `stream_batch`, for type checkers."""

    stop: str | Sequence[str] | None
    sampler: Sampler | None
    pack: Any
    start: Sequence[Any] | None
    prefill_step_size: int


class GenerateOptions(BatchOptions, total=False):
    """Keyword arguments of `stream_generate`, for type checkers."""

    max_tokens: int
    logits_processors: Sequence[LogitsProcessor] | None
    prompt_cache: list[Any] | None
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
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
    pack: PackLike | Sequence[Sequence[int]] | None = None,
    start: Sequence[Sequence[int]] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Iterator[GenerationResponse]:
    """Generates text, one response per emitted id.

    prompt: text, a conversation (chat messages or `Chat`), or base ids. max_tokens: base tokens, -1 for no limit but
    the context's. stop: text that ends the output and is not part of it. prompt_cache: from `model.make_cache()` or
    mlx-lm's `make_prompt_cache(model)`; it is updated in place when the first response is asked for. Text and base ids
    follow what the cache holds; text then gets no special tokens. A conversation is always given whole: the cache is
    trimmed to the common prefix, and only the rest is read; an unchanged answer of the model is represented by the ids
    that were emitted for it.
    pack: the pack (a path, a `Pack`, or entries of base ids) that a new cache begins with in place of the model's own;
    for a given prompt_cache the pack that it was begun with, whose rows a saved cache does not hold. start: former name
    of `pack`. sampling: fields of `Sampling` (temp, top_p, seed, repetition_penalty, logit_bias, ...),
    unless a `sampler` is given. logits_processors see the ids as the model does, hypertokens included.
    prompt_progress_callback(ids done, ids in all).

    At the end the cache holds what the model has read: the prompt and every emitted id, the last one included (the
    next step is always under way), also where the text was cut before it.

    Raises `GenerationError` before anything runs when the request cannot be met, `DataError` for a pack that cannot be
    read or is of another tokenizer.
    """
    options = Sampling.of(sampling, signature(stream_generate).parameters)
    start = _start_of(pack, start, tokenizer)
    cache = _new_cache(model, start)
    if prompt_cache is not None:
        if len(prompt_cache) != len(cache) or (find_state(prompt_cache) is None) != (find_state(cache) is None):
            raise GenerationError("the prompt cache was not made for this model")
        cache = prompt_cache
        if is_zip(model):
            model.check_cache(cache)[1].begun_with([start])
    _check_kv(model, cache, kv_bits, kv_group_size, prefill_step_size)
    request = Request(model, tokenizer, prompt, cache, max_tokens=max_tokens, stop=stop)
    sampler = _make_sampler(options, sampler, model, tokenizer)
    processors = request.processors(options, logits_processors or ())
    kv = {"kv_bits": kv_bits, "kv_group_size": kv_group_size, "quantized_kv_start": quantized_kv_start}
    if is_zip(model):
        steps = decode_steps(
            model,
            request.prompt_ids,
            cache,
            max_steps=request.max_steps,
            sampler=sampler,
            processors=processors,
            prefill_step_size=prefill_step_size,
            after_call=partial(maybe_quantize_kv_cache, **kv),
            progress=prompt_progress_callback,
        )
    else:
        steps = generate_step(
            mx.array(request.prompt_ids.astype(np.int32)),
            model,
            max_tokens=request.max_steps,
            sampler=sampler,
            logits_processors=processors,
            prompt_cache=cache,
            prefill_step_size=prefill_step_size,
            prompt_progress_callback=prompt_progress_callback,
            **kv,
        )
    return _wired(model, _responses(request, tokenizer, steps, options.seed))


def _responses(
    request: Request, tokenizer: Any, steps: Iterator[Any], seed: int | None
) -> Iterator[GenerationResponse]:
    _seed(seed)
    request.take_cache()
    request.start()
    finish_reason = None
    try:
        for token, logprobs in steps:
            response = request.emit(token, logprobs)
            finish_reason = response.finish_reason
            yield response
            if finish_reason is not None:
                return
    finally:
        request.note(tokenizer, finish_reason)


def _wired(model: Any, responses: Iterator[T]) -> Iterator[T]:
    """Keeps a Mac's memory wired while responses come, as mlx-lm does."""
    streams: Any = [generation_stream, mx.default_stream(mx.default_device())]  # to wait for, at the end
    with wired_limit(model, streams):
        yield from responses


def generate(model: Any, tokenizer: Any, prompt: Any, verbose: bool = False, **options: Unpack[GenerateOptions]) -> str:
    """Returns the whole text; `options` are those of `stream_generate`. verbose prints it as it comes, and figures."""
    text, response = "", None
    if verbose:
        print(RULE)
    for response in stream_generate(model, tokenizer, prompt, **options):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        print(f"\n{RULE}\n{footer(response)}")
    return text


def footer(response: GenerationResponse) -> str:
    """mlx-lm's three footer lines, in base tokens, and one of ours."""
    last = response
    return (
        f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {last.peak_memory:.3f} GB\n"
        f"Hypertokens: {last.generation_tokens} base tokens in {last.steps} steps "
        f"({last.base_tokens_per_step:.3f} per step), {last.hyper_share:.1%} of steps hypertokens; "
        f"prompt {last.prompt_tokens} base tokens in {last.prompt_ids} ids"
    )


def batch_generate(
    model: Any, tokenizer: Any, prompts: Sequence[Any], max_tokens: int = 256, **options: Unpack[BatchOptions]
) -> list[str]:
    """Returns one text per prompt, generated together: left-padded, one codebook per row. options: of `stream_batch`.

    Greedy rows equal the same prompts generated one by one, but for LongRoPE, where the longest row chooses the factors
    of all (as transformers does). Raises `GenerationError` before anything runs.
    """
    texts = [""] * len(prompts)
    for row, response in stream_batch(model, tokenizer, prompts, max_tokens, **options):
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
    pack: PackLike | Sequence[Any] | None = None,
    start: Sequence[Any] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    **sampling: Unpack[SamplingOptions],
) -> Iterator[tuple[int, GenerationResponse]]:
    """Yields (index of the prompt, response) per emitted id of `batch_generate`; options as in `stream_generate`.

    pack: one pack for all prompts, or a list of one per prompt, None in it for the model's own.
    """
    if not prompts or isinstance(prompts, str):
        raise GenerationError("no prompts: give a list of at least one")
    options = Sampling.of(sampling, signature(stream_batch).parameters)
    start = _start_of(pack, start, tokenizer)
    _check_kv(model, (), None, KV_GROUP_SIZES[0], prefill_step_size)
    starts = split_packs(start, len(prompts))
    requests = [
        Request(model, tokenizer, prompt, _new_cache(model, own), max_tokens=max_tokens, stop=stop)
        for prompt, own in zip(prompts, starts, strict=True)
    ]
    width = max(len(request.prompt_ids) for request in requests)
    pad_id = _pad_id(model, tokenizer)
    ids = np.full((len(prompts), width), pad_id, dtype=np.int32)
    for row, request in enumerate(requests):
        ids[row, width - len(request.prompt_ids) :] = request.prompt_ids
    cache = _batch_cache(model, [width - len(request.prompt_ids) for request in requests], starts)
    for row, request in enumerate(requests):
        request.bind(cache, row)
    sampler = _make_sampler(options, sampler, model, tokenizer)
    processors = [request.processors(options) for request in requests]
    logits = _batch_logits(model, cache, ids, prefill_step_size)
    return _wired(model, _batch_responses(requests, logits, processors, sampler, pad_id, options.seed))


def _batch_logits(model: Any, cache: list[Any], ids: np.ndarray, chunk: int) -> Callable[[np.ndarray | None], mx.array]:
    """A function from the ids just emitted [B] (None at first: the prompts) to the next logits [B, W]."""

    def logits(emitted: np.ndarray | None) -> mx.array:
        if emitted is not None:
            return model(mx.array(emitted[:, None]), cache=cache)[:, -1]
        last = ids.shape[1] - 1
        for begin in range(0, last, chunk):
            model(mx.array(ids[:, begin : min(begin + chunk, last)]), cache=cache)
            mx.eval([entry.state for entry in cache])
        return model(mx.array(ids[:, last:]), cache=cache)[:, -1]

    return logits


def _batch_responses(
    requests: Sequence[Request],
    logits: Callable[[np.ndarray | None], mx.array],
    processors: Sequence[Sequence[LogitsProcessor]],
    sampler: Sampler,
    pad_id: int,
    seed: int | None,
) -> Iterator[tuple[int, GenerationResponse]]:
    """Steps all rows together until the last has ended; rows that have ended are fed `pad_id`."""
    _seed(seed)
    for request in requests:
        request.start()
    open_rows, emitted = set(range(len(requests))), None
    read = [request.prompt_ids.tolist() for request in requests]
    while open_rows:
        rows = logits(emitted)
        if any(processors):
            rows = _processed(rows, processors, read)
        logprobs = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
        emitted = np.array(sampler(logprobs)).astype(np.int32)
        for row in sorted(open_rows):
            read[row].append(int(emitted[row]))
            response = requests[row].emit(int(emitted[row]), logprobs[row])
            yield row, response
            if response.finish_reason is not None:
                open_rows.discard(row)
        emitted[[row for row in range(len(requests)) if row not in open_rows]] = pad_id


def _processed(
    logits: mx.array, processors: Sequence[Sequence[LogitsProcessor]], read: Sequence[list[int]]
) -> mx.array:
    rows = []
    for row, chain in enumerate(processors):
        one = logits[row : row + 1]
        for processor in chain:
            one = processor(mx.array(read[row]), one)
        rows.append(one)
    return mx.concatenate(rows)


def _start_of(pack: Any, start: Sequence[Any] | None, tokenizer: Any) -> Any:
    """What a new cache begins with, from `pack` or its former name. Raises `DataError` for another tokenizer's pack."""
    if start is not None:
        warnings.warn("start= is called pack= now; it takes a path or a Pack too", DeprecationWarning, stacklevel=3)
        if pack is not None:
            raise GenerationError("pack and start: give one of them; start is the former name of pack")
        return start
    if isinstance(pack, list | tuple) and any(isinstance(one, PackLike) for one in pack):
        return [_start_of(one, None, tokenizer) for one in pack]
    if not isinstance(pack, PackLike):
        return pack
    found = as_pack(pack)
    if found.tokenizer is not None:
        found.check_tokenizer(tokenizer_fingerprint(tokenizer), found.name or "the pack (--pack)")
    return found.start


def _new_cache(model: Any, start: Sequence[Any] | None) -> list[Any]:
    """The cache of one request. Raises `GenerationError` for a start codebook that the model cannot use."""
    if start is None:
        return make_prompt_cache(model)
    if not is_zip(model):
        raise GenerationError(
            "the pack (--pack): this model has no hypertokens, so nothing could use it; load it with a pack that was "
            "tuned for it (mlx_zip vocab pack tune)"
        )
    return model.make_cache(pack=start)


def _batch_cache(model: Any, left_padding: list[int], starts: Sequence[Any]) -> list[Any]:
    if is_zip(model):
        return model.make_cache(left_padding=left_padding, pack=starts)
    if any(type(entry) is not KVCache for entry in make_prompt_cache(model)):
        raise GenerationError("this model's caches do not batch; generate the prompts one by one")
    return [BatchKVCache(left_padding) for _ in model.layers]


def _pad_id(model: Any, tokenizer: Any) -> int:
    if is_zip(model):
        return model.config.pad_id
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def _seed(seed: int | None) -> None:
    if seed is not None:
        mx.random.seed(seed)


def _make_sampler(options: Sampling, sampler: Sampler | None, model: Any, tokenizer: Any) -> Sampler:
    if sampler is not None:
        if ignored := options.sampler_options():
            raise GenerationError(f"{', '.join(ignored)}: give either a sampler or options for one")
        return sampler
    width = model.layout.width if is_zip(model) else base_config(model).get("vocab_size")
    never_excluded = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids] if options.xtc_probability else ()
    return options.make_sampler(width, never_excluded)


def _check_kv(model: Any, cache: Sequence[Any], bits: int | None, group_size: int, chunk: int) -> None:
    if chunk < 1:
        raise GenerationError(f"prefill_step_size (--prefill-step-size) must be at least 1, got {chunk}")
    if bits is None:
        return
    if bits not in KV_BITS:
        raise GenerationError(f"kv_bits (--kv-bits) must be one of {KV_BITS}, got {bits}")
    if group_size not in KV_GROUP_SIZES:
        raise GenerationError(f"kv_group_size (--kv-group-size) must be one of {KV_GROUP_SIZES}, got {group_size}")
    if any(isinstance(entry, RotatingKVCache) for entry in cache):
        raise GenerationError("kv_bits (--kv-bits): this model's sliding-window caches cannot be quantized")
    config = base_config(model)
    heads = config.get("num_attention_heads")
    width = config.get("head_dim") or (config["hidden_size"] // heads if heads else group_size)
    if width % group_size:
        raise GenerationError(f"kv_group_size (--kv-group-size): {group_size} does not divide the head width {width}")
