"""Generation: `load`, `stream_generate`, `generate`, `batch_generate`, for zip2zip models and plain mlx-lm ones.

The prompt is compressed, the decode loop (`mlx_zip.generation.decode`, or mlx-lm's `generate_step` for a plain model)
emits ids, and these become text. Limits, counts and penalties are in base tokens. For a plain model every id is one
base token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from inspect import signature
from numbers import Integral
from typing import Any, TypeVar, Unpack

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step, generation_stream, maybe_quantize_kv_cache, wired_limit
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import LogitsProcessor, Sampler

from mlx_zip.errors import GenerationError
from mlx_zip.generation.decode import decode_steps
from mlx_zip.generation.decode_batch import BatchLoop
from mlx_zip.generation.request import Request, base_config
from mlx_zip.generation.response import RULE, GenerationResponse, footer
from mlx_zip.generation.sampling import Sampling, SamplingOptions, make_sampler
from mlx_zip.layout import is_zip
from mlx_zip.models.batching import batches
from mlx_zip.models.loading import load
from mlx_zip.models.machines import check_equal
from mlx_zip.models.sharding import chosen_by_first, machines_of
from mlx_zip.packs.pack import PackLike, PackOrEntries, as_pack, split_packs
from mlx_zip.state import find_state
from mlx_zip.text.tokenizer import as_tokenizer

__all__ = ["GenerationResponse", "batch_generate", "generate", "load", "stream_generate"]

T = TypeVar("T")
PREFILL_STEP_SIZE = 2048
KEPT = 4  # ids that a bounded KV cache always keeps, as in mlx-lm
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
    max_kv_size: int | None
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
    pack: PackOrEntries | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Iterator[GenerationResponse]:
    """Generates text and yields one response per emitted id.

    prompt: text, a conversation (chat messages or `Chat`), or base ids. max_tokens: base tokens, -1 for no limit but
    the context's. stop: text, or several, that ends the output and is not part of it. prompt_cache: from
    `model.make_cache()` or mlx-lm's `make_prompt_cache(model)`; it is updated in place, from the first response on. A
    prompt of text or base ids continues what the cache holds; text then gets no special tokens. A conversation is
    always given whole: the cache is trimmed to what both have in common, and only the rest is read; an answer that the
    model gave is read as the ids that the model emitted. pack: the pack (a path, a `Pack`, or entries of base ids) that
    a new cache begins with in place of the model's own. With a prompt_cache that was saved and loaded, give the pack
    that the cache began with, because the file does not hold the pack's rows. sampling:
    fields of `Sampling` (temp, top_p, seed, repetition_penalty, logit_bias, ...), if no `sampler` is given.
    logits_processors: they get the ids as the model reads them, hypertokens included. prompt_progress_callback: called
    with the number of prompt ids read so far and of all, and so again when LongRoPE's switch of factors has the context
    read again. max_kv_size: as in `bounded_cache`, for a new cache. kv_bits, kv_group_size, quantized_kv_start: KV
    cache quantization as in mlx-lm.

    At the end the cache holds the prompt and every emitted id, the last one included (the next step has always begun),
    even if the text ends before that id.

    Raises `GenerationError` before anything runs when the request cannot be met, `DataError` for a pack that cannot be
    read or is of another tokenizer.
    """
    options = Sampling.of(sampling, signature(stream_generate).parameters)
    _check_functions(
        sampler=sampler, logits_processors=logits_processors, prompt_progress_callback=prompt_progress_callback
    )
    tokenizer = as_tokenizer(tokenizer)
    start = _start_of(pack, tokenizer)
    cache = _new_cache(model, start, max_kv_size)
    if prompt_cache is not None:
        if max_kv_size is not None:
            raise GenerationError("max_kv_size (--max-kv-size): the prompt cache given keeps the size that it has")
        if (
            not isinstance(prompt_cache, Sequence)
            or len(prompt_cache) != len(cache)
            or (find_state(prompt_cache) is None) != (find_state(cache) is None)
        ):
            raise GenerationError("the prompt cache was not made for this model")
        cache = prompt_cache
        if is_zip(model):
            state = model.check_cache(cache)[1]
            if len(state.books) > 1:
                raise GenerationError(f"the prompt cache is of a batch of {len(state.books)} sequences, not of one")
            state.begun_with([start])
    check_kv(model, cache, kv_bits, kv_group_size, prefill_step_size, quantized_kv_start)
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
    facts = request.prompt_ids.tolist(), request.max_steps, stop, options, kv
    return _with_wired_memory(model, _responses(request, tokenizer, steps, options.seed, partial(_agree, model, facts)))


def _responses(
    request: Request, tokenizer: Any, steps: Iterator[Any], seed: int | None, agree: Callable[[], None]
) -> Iterator[GenerationResponse]:
    """Yields the responses for the ids that a decode loop emits, and at the end notes on the cache what was read.

    agree: makes sure that all machines of a run have this request.
    """
    agree()
    _seed_random(seed)
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
            request.check_cache()
    finally:
        request.note(tokenizer, finish_reason)


def _agree(model: Any, facts: object) -> None:
    """Raises `MachineError` if the model is on several machines and another one has other facts of this request."""
    group = machines_of(model)
    if group is not None:
        mx.synchronize(generation_stream)  # the step that the last request had begun must be over on all machines
        check_equal(group, sha256(repr(facts).encode()).hexdigest(), "the request")


def _with_wired_memory(model: Any, responses: Iterator[T]) -> Iterator[T]:
    """Yields the responses, and keeps the model in wired memory on a Mac meanwhile, as mlx-lm does."""
    streams: Any = [generation_stream, mx.default_stream(mx.default_device())]  # to be waited for at the end
    with wired_limit(model, streams):
        yield from responses


def generate(model: Any, tokenizer: Any, prompt: Any, verbose: bool = False, **options: Unpack[GenerateOptions]) -> str:
    """Generates text and returns it whole.

    verbose: also print the text while it is generated, and figures at the end. options: those of `stream_generate`.
    """
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


def batch_generate(
    model: Any, tokenizer: Any, prompts: Sequence[Any], max_tokens: int = 256, **options: Unpack[BatchOptions]
) -> list[str]:
    """Generates texts for several prompts together, and returns one text per prompt.

    options: those of `stream_batch`. Each prompt has a codebook of its own. With greedy decoding the texts equal those
    of the prompts generated one by one, except that under LongRoPE the longest row chooses the factors for all (as in
    transformers). Raises `GenerationError` before anything runs.
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

    Options are as in `stream_generate`, but pack may also be a list of one pack per prompt, None for the model's own.
    """
    if not isinstance(prompts, Sequence) or isinstance(prompts, str) or not prompts:
        raise GenerationError("no prompts: give a list of at least one")
    options = Sampling.of(sampling, signature(stream_batch).parameters)
    _check_functions(sampler=sampler)
    tokenizer = as_tokenizer(tokenizer)
    start = _start_of(pack, tokenizer)
    check_kv(model, (), None, KV_GROUP_SIZES[0], prefill_step_size)
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
    loop = BatchLoop(
        model,
        cache,
        ids,
        sampler=sampler,
        processors=[request.processors(options) for request in requests],
        prompts=[request.prompt_ids.tolist() for request in requests],
        pad_id=pad_id,
        chunk=prefill_step_size,
    )
    facts = ids.tolist(), [request.max_steps for request in requests], stop, options
    return _with_wired_memory(model, _batch_responses(requests, loop, options.seed, partial(_agree, model, facts)))


def _batch_responses(
    requests: Sequence[Request], loop: BatchLoop, seed: int | None, agree: Callable[[], None]
) -> Iterator[tuple[int, GenerationResponse]]:
    """Yields (row, response) per emitted id until all rows have ended. agree: as in `_responses`."""
    agree()
    _seed_random(seed)
    for request in requests:
        request.start()
    open_rows = list(range(len(requests)))
    for tokens, logprobs in loop:
        for row in open_rows:
            response = requests[row].emit(tokens[row], logprobs[row])
            yield row, response
            if response.finish_reason is not None:
                loop.end(row)
        open_rows = loop.open_rows()
        if not open_rows:
            return


def _start_of(pack: Any, tokenizer: Any) -> Any:
    """Returns what a new cache begins with. Raises `DataError` for a pack of another tokenizer."""
    if isinstance(pack, list | tuple) and any(isinstance(one, PackLike) for one in pack):
        return [_start_of(one, tokenizer) for one in pack]
    if not isinstance(pack, PackLike):
        return pack
    found = as_pack(pack)
    found.check_made_for(tokenizer, found.name or "the pack (--pack)")
    return found


def bounded_cache(model: Any, max_kv_size: int) -> list[Any]:
    """Makes a plain model's cache of one request, whose layers keep the first four ids and the latest ones.

    max_kv_size: ids per layer in all, as in mlx-lm. mlx-lm ignores it for models that make their caches themselves;
    here it also bounds those of them that make full KV caches. Raises `GenerationError` for a number below 5, a model
    with hypertokens, and one whose layers have windows or states.
    """
    if is_zip(model):
        raise GenerationError(
            "max_kv_size (--max-kv-size): a rotating KV cache forgets ids that the codebook still knows; only models "
            "without hypertokens can have one"
        )
    if not isinstance(max_kv_size, Integral) or isinstance(max_kv_size, bool) or max_kv_size <= KEPT:
        raise GenerationError(
            f"max_kv_size (--max-kv-size) must be an integer of at least {KEPT + 1}, got {max_kv_size!r}"
        )
    cache = make_prompt_cache(model)
    if any(type(entry) is not KVCache for entry in cache):
        kinds = ", ".join(sorted({type(entry).__name__ for entry in cache}))
        raise GenerationError(f"max_kv_size (--max-kv-size): this model bounds its caches itself ({kinds})")
    return [RotatingKVCache(max_size=int(max_kv_size), keep=KEPT) for _ in cache]


def _new_cache(model: Any, start: Sequence[Any] | None, max_kv_size: int | None = None) -> list[Any]:
    """Makes the cache of one request. Raises `GenerationError` for a pack if the model has no hypertokens."""
    if max_kv_size is not None:
        return bounded_cache(model, max_kv_size)
    if start is None:
        return make_prompt_cache(model)
    if not is_zip(model):
        raise GenerationError(
            "the pack (--pack): this model has no hypertokens, so nothing could use it; load it with a pack that was "
            "tuned for it (mlx_zip vocab pack tune)"
        )
    return model.make_cache(pack=start)


def _batch_cache(model: Any, left_padding: list[int], starts: Sequence[Any]) -> list[Any]:
    """Makes the cache of a batch, [] if its prompts must be read one by one.

    Raises `GenerationError` for a plain model whose caches do not batch.
    """
    if is_zip(model):
        return model.make_cache(left_padding=left_padding, pack=starts)
    kv = make_prompt_cache(model)
    if not batches(kv):
        raise GenerationError("this model's caches do not batch; generate the prompts one by one")
    if any(type(entry) is not KVCache for entry in kv):
        return []
    return [BatchKVCache(left_padding) for _ in kv]


def _pad_id(model: Any, tokenizer: Any) -> int:
    """Returns the id that fills the left padding and ended rows; for a plain model any id would do."""
    if is_zip(model):
        return model.config.pad_id
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def _seed_random(seed: int | None) -> None:
    """Seeds MLX's random numbers, unless seed is None."""
    if seed is not None:
        mx.random.seed(seed)


def _make_sampler(options: Sampling, sampler: Sampler | None, model: Any, tokenizer: Any) -> Sampler:
    """Returns the given sampler, else one made from the options. Raises `GenerationError` if both are given."""
    if sampler is not None:
        if ignored := options.sampler_options():
            raise GenerationError(f"{', '.join(ignored)}: give either a sampler or options for one")
        return _shared(sampler, model)
    width = model.layout.width if is_zip(model) else base_config(model).get("vocab_size")
    never_excluded = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids] if options.xtc_probability else ()
    return _shared(make_sampler(options, width, never_excluded), model)


def _shared(sampler: Sampler, model: Any) -> Sampler:
    """Returns the sampler, or for a model on several machines one whose ids the first machine chooses for all."""
    group = machines_of(model)
    return sampler if group is None else lambda logprobs: chosen_by_first(sampler(logprobs), group)


def _check_functions(**given: Any) -> None:
    """Raises `GenerationError` for an argument that is neither None, a function nor a list of functions."""
    for name, value in given.items():
        if value is not None and not all(map(callable, value if isinstance(value, list | tuple) else [value])):
            raise GenerationError(f"{name}: {value!r:.80} is no function")


def check_kv(
    model: Any, cache: Sequence[Any], bits: int | None, group_size: int, chunk: int, quantized_from: int = 0
) -> None:
    """Raises `GenerationError` for a prefill chunk or a KV quantization that cannot be; bits: None for none."""
    if not isinstance(chunk, Integral) or isinstance(chunk, bool) or chunk < 1:
        raise GenerationError(
            f"prefill_step_size (--prefill-step-size) must be an integer of at least 1, got {chunk!r}"
        )
    if bits is None:
        return
    if not isinstance(quantized_from, Integral) or isinstance(quantized_from, bool) or quantized_from < 0:
        raise GenerationError(
            f"quantized_kv_start (--quantized-kv-start) must be an integer of at least 0, got {quantized_from!r}"
        )
    if bits not in KV_BITS:
        raise GenerationError(f"kv_bits (--kv-bits) must be one of {KV_BITS}, got {bits}")
    if group_size not in KV_GROUP_SIZES:
        raise GenerationError(f"kv_group_size (--kv-group-size) must be one of {KV_GROUP_SIZES}, got {group_size}")
    if any(isinstance(entry, RotatingKVCache) for entry in cache):
        raise GenerationError(
            "kv_bits (--kv-bits): rotating caches (--max-kv-size, sliding windows) cannot be quantized"
        )
    config = base_config(model)
    heads = config.get("num_attention_heads")
    width = config.get("head_dim") or (config["hidden_size"] // heads if heads else group_size)
    if width % group_size:
        raise GenerationError(f"kv_group_size (--kv-group-size): {group_size} does not divide the head width {width}")
