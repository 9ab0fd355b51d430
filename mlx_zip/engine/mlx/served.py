"""`Served`: a model on MLX, with the caches and samplers of its requests. Used in one thread only."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.metadata import version
from numbers import Integral
from typing import Any

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from mlx_zip.codec.ids import Uint32s
from mlx_zip.device import default_device_is_gpu
from mlx_zip.engine.draft_sources import make_text_sources
from mlx_zip.engine.drafts import Drafter
from mlx_zip.engine.mlx.draft_model import DraftModel, DraftModelSource, HeadSource
from mlx_zip.engine.options import RunOptions
from mlx_zip.engine.pass_costs import SAVE_EVERY_S, CostFile, PassCosts
from mlx_zip.engine.sampling.options import Sampling
from mlx_zip.engine.sampling.processors import make_penalty_processors
from mlx_zip.engine.submissions import ModelFacts
from mlx_zip.errors import GenerationError
from mlx_zip.layout import decoder_config, has_hypertokens
from mlx_zip.models.batching import can_batch, flatten_cache_lists
from mlx_zip.models.draft_head import make_head_proposer
from mlx_zip.models.rows.fingerprints import fingerprint_of_model, named_arrays
from mlx_zip.models.rows.zip_state import ZipState, find_zip_state, kv_caches
from mlx_zip.vocab.first_stage import tokenizer_fingerprint

PREFILL_STEP_SIZE = 2048
KEPT = 4  # ids that a bounded KV cache always keeps, as in mlx-lm
KV_BITS, KV_GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)


class Served:
    """A loaded model. `mlx_zip.engine.parts.Served` describes the members without a docstring.

    ahead: whether steps begin before the host has read their ids. width: see `ModelFacts`. never_excluded: ids that XTC
    never excludes. kv_bytes_per_id: 0 until `make_facts`. draft_model: a model that proposes ids, or None.
    """

    kv_bytes_per_id = 0

    def __init__(self, model: Any, tokenizer: Any, options: RunOptions, draft_model: Any = None) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.hyper, self.machines = has_hypertokens(model), getattr(model, "machines", None)
        if draft_model is not None and self.machines is not None:
            raise GenerationError("draft_model (--draft-model): only a model that is on one machine can check drafts")
        self.draft_model = None if draft_model is None else DraftModel(draft_model)
        self._head = make_head_proposer(model) if options.draft in ("head", "auto") else None
        if options.draft == "head" and self._head is None:
            raise GenerationError("draft (--draft head): this model has no draft head (mlx_zip train --draft-head)")
        self.ahead = default_device_is_gpu() if options.ahead is None else options.ahead
        config = decoder_config(model)
        self.context: int | None = config.get("max_position_embeddings")
        self.by_base = self.hyper and model.config.by_base
        self.vocab_size = model.layout.vocab_size if self.hyper else config.get("vocab_size") or len(tokenizer)
        if self.draft_model is not None:
            self.draft_model.check_vocabulary(self.vocab_size)
        self.width = model.layout.width if self.hyper else config.get("vocab_size")
        self.canonical = self.hyper and model.config.canonical
        self.long_context = model.traits.long_context if self.hyper else None
        self._batches: bool | None = None  # known with the first cache

    @cached_property
    def never_excluded(self) -> list[int]:
        return [*self.tokenizer.encode("\n"), *self.tokenizer.eos_token_ids]

    @property
    def batches(self) -> bool:
        return bool(self._batches)

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    @cached_property
    def _weight_bytes(self) -> int:
        return sum(array.nbytes for _, array in named_arrays(self.model.parameters()))

    def quantize(self, cache: list[Any]) -> None:
        """Quantizes one request's KV caches in place once they hold `quantized_kv_start` ids."""
        options = self.options
        maybe_quantize_kv_cache(
            cache,
            kv_bits=options.kv_bits,
            kv_group_size=options.kv_group_size,
            quantized_kv_start=options.quantized_kv_start,
        )

    def new_cache(self, start: Any) -> list[Any]:
        if self.options.max_kv_size is not None:
            cache = make_bounded_cache(self.model, self.options.max_kv_size)
        else:
            cache = self.model.make_cache(pack=start) if start is not None else make_prompt_cache(self.model)
        if self._batches is None:
            self._batches = self.options.kv_bits is None and can_batch(kv_caches(cache))
        return cache

    def state_of(self, cache: list[Any]) -> ZipState | None:
        """Returns the `ZipState` of a cache, None for a plain model's."""
        return find_zip_state(cache)

    def make_request_sampler(self, options: Sampling, state: mx.array | None) -> Draws:
        return Draws(options, self.never_excluded, state)

    def make_penalties(self, options: Sampling, state: ZipState | None) -> list[Any]:
        return list(make_penalty_processors(options, self.vocab_size, state))

    def make_drafter(
        self, text: Callable[[], Sequence[int]], prediction: Sequence[int] | Uint32s = ()
    ) -> Drafter | None:
        options, own = self.options, self.draft_model
        if (options.draft == "off" and own is None) or self.machines is not None:
            return None
        self._cost_file.save(SAVE_EVERY_S)
        base_ids = text()
        sources = make_text_sources(base_ids, prediction) if options.draft in ("lookup", "auto") else []
        if own is not None:
            sources.append(DraftModelSource(own, base_ids, options.num_draft_tokens, self.vocab_size))
        head = None if self._head is None else HeadSource(self._head, self.pass_costs)
        return Drafter(sources, self.pass_costs if options.draft == "auto" else None, head)

    def read(self, ids: mx.array, cache: Sequence[Any], **options: Any) -> tuple[mx.array, mx.array | None]:
        """Returns logits [B, L, W] of ids [B, L], and the body's output [B, L, D], None if no draft head is used.

        options: keyword arguments for the call of a model with hypertokens.
        """
        if self._head is not None:
            return self._head.model.read(ids, cache, **options)
        return self.model(ids, cache=cache, **options), None

    @property
    def pass_costs(self) -> PassCosts:
        """The costs of this model's passes that were timed in this process or an earlier one."""
        return self._cost_file.costs

    @pass_costs.setter
    def pass_costs(self, costs: PassCosts) -> None:
        """Replaces the pass costs, between two requests. Figures in the file stay until newer ones replace them."""
        self._cost_file.costs = costs

    @cached_property
    def _cost_file(self) -> CostFile:
        """The file of `pass_costs`. Read only when needed, because its name requires the model's fingerprint."""
        return _cost_file_of(self.model, self.options.kv_bits)

    def clear_draft_cache(self) -> None:
        if self.draft_model is not None:
            self.draft_model.clear_draft_cache()

    def free(self, cache: list[Any]) -> None:
        """Does nothing: Python frees the memory once nothing refers to the cache."""

    def free_unused_memory(self) -> None:
        """Returns MLX's cached buffers to the device."""
        mx.clear_cache()

    def settle(self) -> None:
        """Stores the hyper rows that the last call encoded, which only this thread can evaluate, and the pass costs."""
        if self.hyper:
            self.model.row_source.store_all_rows()
        if self.options.draft != "off":
            self._cost_file.save()

    def make_facts(self) -> ModelFacts:
        """Returns what checks of submissions need. First runs the model on one id, and sets `kv_bytes_per_id`.

        Thus a model that cannot run fails at loading, and the first request does not have to wait for compilation.
        """
        cache = self.new_cache(None)
        check_kv_options(self, cache)
        mx.eval(self.model(mx.array([[0]]), cache=cache))
        plain = [entry for entry in flatten_cache_lists(kv_caches(cache)) if type(entry) is KVCache]
        self.kv_bytes_per_id = sum(entry.nbytes // entry.keys.shape[2] for entry in plain if entry.keys is not None)
        model = self.model
        return ModelFacts(
            vocab_size=self.vocab_size,
            width=self.width,
            context=self.context,
            by_base=self.by_base,
            params=model.config.codec_params if self.hyper else None,
            model=fingerprint_of_model(model),
            tokenizer=tokenizer_fingerprint(self.tokenizer),
            kv_bytes_per_id=self.kv_bytes_per_id,
            sides_are_one=self.hyper and model.sides_are_one,
            row_width=model.config.encoder.model_size if self.hyper else 0,
        )


_COST_FILES: dict[tuple[int, int | None], CostFile] = {}  # by (`id()` of a model in memory, `kv_bits`)


def _cost_file_of(model: Any, kv_bits: int | None) -> CostFile:
    """Returns the `CostFile` of a model. The file is saved when the model is freed or the process ends."""
    key = id(model), kv_bits
    if key not in _COST_FILES:
        _COST_FILES[key] = CostFile(_cost_key(model, kv_bits))
        weakref.finalize(model, _save_costs, key)
    return _COST_FILES[key]


def _save_costs(key: tuple[int, int | None]) -> None:
    _COST_FILES.pop(key).save()


def _cost_key(model: Any, kv_bits: int | None) -> dict[str, str]:
    """Returns everything that pass times depend on, including preloaded libraries, such as a faster BLAS."""
    device = mx.default_device()
    return {
        "model": fingerprint_of_model(model),
        "kv_bits": str(kv_bits),
        "device": str(device),
        "chip": str(mx.device_info(device).get("device_name")),
        "mlx": version("mlx"),
        "preloaded": os.environ.get("LD_PRELOAD", os.environ.get("DYLD_INSERT_LIBRARIES", "")),
    }


# ---- the caches of a request


def make_bounded_cache(model: Any, max_kv_size: int) -> list[Any]:
    """Makes a plain model's cache for one request, whose layers keep the first four ids and the latest ids.

    max_kv_size: maximum number of ids per layer, as in mlx-lm. Unlike mlx-lm, this function also bounds the caches of
    models that make full KV caches themselves. Raises `GenerationError` if `max_kv_size` is below 5, the model has
    hypertokens, or a layer's cache is not a full KV cache (windows, recurrent states).
    """
    if has_hypertokens(model):
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


def check_kv_options(served: Served, cache: Sequence[Any]) -> None:
    """Raises `GenerationError` if the options of `served` have an invalid prefill chunk or KV quantization."""
    options = served.options
    chunk, bits, group_size = options.prefill_step_size, options.kv_bits, options.kv_group_size
    quantized_from = options.quantized_kv_start
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
    config = decoder_config(served.model)
    heads = config.get("num_attention_heads")
    width = config.get("head_dim") or (config["hidden_size"] // heads if heads else group_size)
    if width % group_size:
        raise GenerationError(f"kv_group_size (--kv-group-size): {group_size} does not divide the head width {width}")


# ---- how ids are drawn


class Draws:
    """One request's sampler: called with log-probabilities [1, W], returns the chosen id [1].

    mlx-lm's samplers draw from MLX's global random state, which all requests would share. Here each request has its own
    random state, which begins with the request's seed and is split once per draw, as MLX splits its global state. So a
    seed gives the same ids as in `stream_generate`, whether the request runs alone or in a batch.

    special_ids: ids that XTC never excludes. state: random state to continue from if the options have no seed. The
    attribute `state` is the random state of the next draw.
    """

    def __init__(self, options: Sampling, special_ids: Sequence[int], state: mx.array | None = None) -> None:
        self.options, self.special_ids = options, list(special_ids)
        self.greedy = options.temp == 0
        self.state = state if options.seed is None and not self.greedy else None

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Returns the id [1] chosen from log-probabilities [1, W]."""
        if self.greedy:
            return mx.argmax(logprobs, axis=-1)
        return _draw(self._leave_out_unlikely(logprobs), self.options.temp, self._next_key())

    def scores(self, logprobs: mx.array) -> mx.array:
        """Returns scores [1, W] for log-probabilities [1, W]: the id with the highest score is a draw.

        If a constraint refuses that id, the id with the next highest score is a draw from all other ids. With one seed,
        `scores` and `__call__` draw different ids.
        """
        if self.greedy:
            return logprobs
        return _gumbel_scores(self._leave_out_unlikely(logprobs), self.options.temp, self._next_key())

    def _leave_out_unlikely(self, logprobs: mx.array) -> mx.array:
        """Returns logprobs [1, W] with -inf for the ids that top-p, min-p, XTC and top-k leave out."""
        options = self.options
        if 0 < options.top_p < 1:
            logprobs = apply_top_p(logprobs, options.top_p)
        if options.min_p:
            logprobs = apply_min_p(logprobs, options.min_p, options.min_tokens_to_keep)
        if options.xtc_probability > 0:
            logprobs = self._without_top_choices(logprobs, self._next_key())
        if options.top_k > 0:
            logprobs = apply_top_k(logprobs, options.top_k)
        return logprobs

    def _next_key(self) -> mx.array:
        """Returns the key of the next draw and advances the request's random state."""
        if self.state is None:
            seed = self.options.seed
            self.state = mx.random.key(secrets.randbits(64) if seed is None else int(seed))
        both = mx.random.split(self.state)
        self.state = both[0]
        return both[1]

    def _without_top_choices(self, logprobs: mx.array, key: mx.array) -> mx.array:
        """Returns logprobs [1, W] after XTC.

        With probability `xtc_probability`, all ids more probable than `xtc_threshold`, except the least probable of
        them, are at -inf.
        """
        options, probabilities = self.options, mx.softmax(logprobs, -1)
        likely = mx.where(probabilities > options.xtc_threshold, probabilities, mx.inf)
        excluded = probabilities > likely.min(axis=-1, keepdims=True)
        if self.special_ids:
            excluded[..., self.special_ids] = False
        keep = mx.random.uniform(0, 1, key=key) > options.xtc_probability
        return mx.where(keep, logprobs, mx.where(excluded, -mx.inf, logprobs))


@mx.compile
def _draw(logprobs: mx.array, temp: float, key: mx.array) -> mx.array:
    """Returns ids [1] drawn from log-probabilities [1, W] at this temperature."""
    return mx.random.categorical(logprobs * (1.0 / temp), key=key)


@mx.compile
def _gumbel_scores(logprobs: mx.array, temp: float, key: mx.array) -> mx.array:
    """Returns scores [1, W] whose highest is a draw at this temperature (Gumbel's trick)."""
    return logprobs * (1.0 / temp) + mx.random.gumbel(logprobs.shape, key=key)
