"""Engines on MLX: each reads a prompt and emits ids, and records the time of every id.

`mlx-lm` and `mlx-zip` run through the functions that their users call, detokenizing included, so users see the times
measured here. Forced ids (replay) still wait for the sampler's choice, so that the loop does all of its usual work.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Container, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.config import SIDES
from mlx_zip.errors import MlxZipError

from .interface import DRAFT, Engine, Run, compress_prompt_and_text, kv_bytes_per_id
from .shape_table import Models


class ForcedIdSampler:
    """A sampler that returns given ids in order, each after the model's own choice has been computed."""

    greedy, state = False, None  # as an engine asks of a request's own sampler

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.at = list(ids), 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Returns the next forced id [1], after the model's own choice from logprobs [1, W] has been computed.

        After the last id it repeats that one, because the decoding loop begins one step more than it emits.
        """
        chosen = mx.argmax(logprobs, axis=-1)
        forced = self.ids[min(self.at, len(self.ids) - 1)]
        self.at += 1
        return mx.minimum(chosen, 0) + mx.array([forced], chosen.dtype)


class MlxEngine(Engine):
    """What the engines on MLX share. make: returns a new model object over the same weights."""

    def __init__(self, models: Models, make: Callable[[], Any]) -> None:
        self.make, self.tokenizer = make, models.tokenizer
        self.model = make()
        self.weight_bytes = weight_bytes(self.model)
        self.kv_bytes = kv_bytes_per_id(models.base_config, activation_dtype(self.model).size)
        self.kv_dtype = str(activation_dtype(self.model)).removeprefix("mlx.core.")

    def forget_encoded_rows(self) -> None:
        """Makes a new model object over the same weights, so that nothing of earlier requests is left."""
        self.model = self.make()

    def start_conversation(self) -> Any:
        """Returns the caches of a new conversation."""
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.model)

    def run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None = None, held: Any = None) -> Run:
        """See `Engine.run`. Waits for the device to be idle before the clock starts and after the run.

        peak_bytes: peak memory of this engine and its weights, without other engines' weights in memory.
        """
        held = self.start_conversation() if held is None else held
        wait_and_free_memory()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        run = self._run(prompt, tokens, replay, held)
        wait_and_free_memory()
        own = sum(value.nbytes for _, value in named_weights(self.model))
        run.peak_bytes = own + max(0, mx.get_peak_memory() - before)
        return run

    @abstractmethod
    def _run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None, held: Any) -> Run:
        """Runs a request as `run` does, without waiting for the device and without peak_bytes."""


class MlxLm(MlxEngine):
    """Runs the plain model through mlx-lm's `stream_generate`."""

    name = "mlx-lm"

    def _run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None, held: Any) -> Run:
        """See `MlxEngine._run`. held: the conversation's KV caches."""
        from mlx_lm import stream_generate

        sampler = ForcedIdSampler(replay) if replay is not None else None
        run, begun = Run(len(prompt)), time.perf_counter()
        for response in stream_generate(
            self.model, self.tokenizer, list(prompt), max_tokens=tokens, sampler=sampler, prompt_cache=held
        ):
            run.step(time.perf_counter() - begun, [response.token], [response.token])
            run.text_bytes += len(response.text.encode())
        run.kv_ids = held[0].offset
        return run


class MlxZip(MlxEngine):
    """Runs the model with hypertokens through `mlx_zip.stream_generate`, with a row store in memory.

    The compression of the prompt is timed too.
    """

    name = "mlx-zip"

    def __init__(self, models: Models, make: Callable[[], Any]) -> None:
        super().__init__(models, lambda: with_memory_row_store(make()))

    def _run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None, held: Any) -> Run:
        """See `MlxEngine._run`. held: the conversation's KV caches, and its `ZipState` last."""
        from mlx_zip.engine.mlx.generate import stream_generate

        book, bodies_before = held[-1].books[0], held[-1].second_bodies
        prompt_ids, ids = compress_prompt_and_text(book, prompt, replay or ())
        sampler = ForcedIdSampler(ids.tolist()) if replay is not None else None
        run, begun = Run(len(prompt_ids)), time.perf_counter()
        for response in stream_generate(
            self.model, self.tokenizer, list(prompt), max_tokens=tokens, sampler=sampler, prompt_cache=held
        ):
            run.step(time.perf_counter() - begun, [response.token], response.base_ids)
            run.text_bytes += len(response.text.encode())
        run.kv_ids, run.row_bytes = held[-1].offset, installed_row_bytes(held[-1])
        run.second_bodies = held[-1].second_bodies - bodies_before
        return run


def with_memory_row_store(model: Any) -> Any:
    from mlx_zip.models.rows.row_store import RowStore

    model.row_source.store = model.row_source.store or RowStore()
    return model


def installed_row_bytes(state: Any) -> int:
    """Returns the bytes of the output rows of all installed entries. state: a request's `ZipState`."""
    rows = state.outputs.rows
    return 0 if rows is None else rows[0, 0].nbytes * len(state.books[0])


def named_weights(model: Any) -> list[tuple[str, Any]]:
    """Returns (name, array) of every weight of an MLX model."""
    from mlx.utils import tree_flatten

    return list(tree_flatten(model.parameters()))  # type: ignore[arg-type]


def weight_bytes(model: Any) -> int:
    """Returns the bytes of weights that a step reads.

    These are all weights but the hyper-encoders' and, unless it is also the head, the embedding, of which a step reads
    only one row.
    """
    weights = named_weights(model)
    untied = any(name.startswith("lm_head.") for name, _ in weights)
    skipped = (*SIDES, "model.embed_tokens.") if untied else SIDES
    return sum(value.nbytes for name, value in weights if not name.startswith(skipped))


def activation_dtype(model: Any) -> mx.Dtype:
    """Returns the dtype of a model's activations, which is that of its norms: they are never quantized."""
    return next(value for name, value in named_weights(model) if name.endswith("norm.weight")).dtype


def wait_and_free_memory() -> None:
    """Waits until the device is idle, then frees the memory that MLX keeps for reuse."""
    from mlx_lm.generate import generation_stream

    mx.synchronize(generation_stream)
    mx.synchronize()
    mx.clear_cache()


# ---- prompt lookup
#
# The text itself proposes what comes next, and one pass of the model checks the proposal. The last ids are looked up
# earlier in the text; the ids that followed them there are the draft. One pass over the last id and the draft gives the
# model's own choice after each. The draft is kept up to the first difference, and the model's choice there is one more
# id. The output is that of greedy decoding, except for rounding, which differs with the length of a pass. Source:
# Saxena 2023, "Prompt Lookup Decoding"; mlx-lm 0.32 has none.

GRAMS = (3, 2)  # lengths of the runs of ids that are looked up, longest first


class PromptLookupIndex:
    """Index of a growing text: where each run of 3 or 2 ids occurred last."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._done = 0
        self.add(ids)

    def add(self, ids: Sequence[int]) -> None:
        """Appends ids to the text. A run of ids can be found once another id follows it."""
        self.ids += ids
        for end in range(self._done, len(self.ids)):
            for n in GRAMS:
                if end >= n:
                    self._ends[tuple(self.ids[end - n : end])] = end
        self._done = len(self.ids)

    def propose(self, most: int) -> list[int]:
        """Returns at most `most` ids: those after the last earlier place of the longest run that the text ends with."""
        for n in GRAMS:
            end = self._ends.get(tuple(self.ids[-n:])) if len(self.ids) >= n else None
            if end is not None:
                return self.ids[end : end + most]
        return []


def accepted_draft_ids(draft: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Returns the ids to emit for draft [k]: the model's choices up to and including the first unlike the draft.

    chosen: the model's choices [k + 1] after the last id and after each draft id.
    """
    agreed = next((i for i, (a, b) in enumerate(zip(draft, chosen, strict=False)) if a != b), len(draft))
    return list(chosen[: agreed + 1])


def cut_at_eos_or_limit(pieces: Sequence[Sequence[int]], room: int, eos: Container[int]) -> tuple[int, list[int]]:
    """Returns how many of the emitted ids count, and their base ids, cut after an eos or after `room` base ids.

    pieces: the base ids of each emitted id. eos: the ids that end a text.
    """
    base_ids: list[int] = []
    for n, piece in enumerate(pieces, 1):
        for one in piece:
            base_ids.append(one)
            if one in eos or len(base_ids) == room:
                return n, base_ids
    return len(pieces), base_ids


class _PromptLookupEngine(MlxEngine):
    """The decoding loop of `PlainLookup` and `ZipLookup`. `held`: (caches, index of the conversation's base ids)."""

    def __init__(self, models: Models, make: Any, draft: int = DRAFT) -> None:
        super().__init__(models, make)
        self.draft = draft

    def start_conversation(self) -> tuple[list[Any], PromptLookupIndex]:
        """Returns the caches of a new conversation and an empty `PromptLookupIndex`.

        Raises `MlxZipError` for caches that cannot be trimmed, because rejected drafts must be removed.
        """
        from mlx_lm.models.cache import can_trim_prompt_cache

        cache = super().start_conversation()
        if not can_trim_prompt_cache(cache):
            raise MlxZipError(f"{self.name}: this model's caches cannot be trimmed, so no draft could be rejected")
        return cache, PromptLookupIndex([])

    def _run(self, prompt: Sequence[int], tokens: int, replay: Sequence[int] | None, held: Any) -> Run:
        """See `MlxEngine._run`. `last` is the id that the caches still lack, `done` counts the forced ids emitted."""
        from mlx_lm.models.cache import trim_prompt_cache

        begun = time.perf_counter()
        cache, lookup = held
        detokenizer, eos = self.tokenizer.detokenizer, self.tokenizer.eos_token_ids
        ids, forced = self._compress_prompt_and_replay(cache, prompt, replay)
        run, done, last = Run(len(ids)), 0, ids[-1]
        lookup.add(prompt)
        self._prefill(cache, ids[:-1])
        while len(run.base_ids) < tokens and (replay is None or done < len(forced)):
            left = tokens - len(run.base_ids) if replay is None else len(forced) - done
            draft = self._compress_draft(cache, last, lookup.propose(min(self.draft, left - 1)))[: left - 1]
            chosen = self._greedy_ids(cache, [last, *draft])
            emitted = accepted_draft_ids(draft, chosen if replay is None else forced[done : done + len(draft) + 1])
            pieces = self._base_ids_of(cache, emitted)
            counted, base_ids = cut_at_eos_or_limit(pieces, tokens - len(run.base_ids), eos)
            trim_prompt_cache(cache, 1 + len(draft) - counted)
            ended = base_ids[-1] in eos
            for one in base_ids[:-1] if ended else base_ids:
                detokenizer.add_token(one)
            run.step(time.perf_counter() - begun, emitted[:counted], base_ids)
            lookup.add(base_ids)
            done, last = done + counted, emitted[counted - 1]
            if ended:
                break
        self._prefill(cache, [last])  # the caches then hold every emitted id, as in the other engines
        detokenizer.finalize()
        run.text_bytes = len(detokenizer.text.encode())
        return self._with_cache_sizes(run, cache)

    def _prefill(self, cache: list[Any], ids: Sequence[int]) -> None:
        for begin in range(0, len(ids), 2048):
            self.model(mx.array([ids[begin : begin + 2048]]), cache=cache)
            mx.eval([entry.state for entry in cache])

    def _greedy_ids(self, cache: list[Any], ids: list[int]) -> list[int]:
        return mx.argmax(self._logits(cache, mx.array([ids]))[0], axis=-1).tolist()  # type: ignore[return-value]

    def _compress_prompt_and_replay(
        self, cache: list[Any], prompt: Sequence[int], replay: Sequence[int] | None
    ) -> tuple[list, list]:
        return list(prompt), list(replay or ())

    def _logits(self, cache: list[Any], ids: mx.array) -> mx.array:
        """Returns logits [1, n, W] of the model after each of ids [1, n]."""
        return self.model(ids, cache=cache)

    def _compress_draft(self, cache: list[Any], last: int, base_ids: list[int]) -> list[int]:
        return base_ids

    def _base_ids_of(self, cache: list[Any], emitted: list[int]) -> list[list[int]]:
        return [[one] for one in emitted]

    def _with_cache_sizes(self, run: Run, cache: list[Any]) -> Run:
        run.kv_ids = cache[0].offset
        return run


class PlainLookup(_PromptLookupEngine):
    """Prompt lookup over base ids, with any plain model whose caches can be trimmed."""

    name = "mlx-lm+lookup"

    def __init__(self, models: Models, draft: int = DRAFT) -> None:
        super().__init__(models, models.plain, draft)


class ZipLookup(_PromptLookupEngine):
    """Prompt lookup over hypertokens: base ids are looked up, and the draft is compressed with the current codebook."""

    name = "mlx-zip+lookup"

    def __init__(self, models: Models, draft: int = DRAFT) -> None:
        super().__init__(models, models.zipped, draft)
        if self.model.config.canonical:
            raise MlxZipError(f"{self.name}: the model excludes ids that are not canonical; lookup does not")
        if self.model.config.policy != "freeze":
            raise MlxZipError(f"{self.name}: it needs a codebook of policy freeze")

    def _compress_prompt_and_replay(
        self, cache: list[Any], prompt: Sequence[int], replay: Sequence[int] | None
    ) -> tuple[list, list]:
        prompt_ids, forced = compress_prompt_and_text(cache[-1].books[0], prompt, replay or ())
        return prompt_ids.tolist(), forced.tolist()

    def _logits(self, cache: list[Any], ids: mx.array) -> mx.array:
        return self.model(ids, cache=cache, causal=True)  # at each id only the entries that are installed by then count

    def _compress_draft(self, cache: list[Any], last: int, base_ids: list[int]) -> list[int]:
        """See the base class. The draft is what the codebook writes for these base ids once `last` is pushed."""
        book = cache[-1].books[0]
        mark = book.mark()
        book.push(last)
        draft = book.compress(np.array(base_ids, np.uint32)).tolist() if base_ids else []
        book.rewind(mark)
        return draft

    def _base_ids_of(self, cache: list[Any], emitted: list[int]) -> list[list[int]]:
        """See the base class. An entry never changes (policy freeze), so entries of rejected drafts may be there."""
        return [cache[-1].books[0].expand([one]).tolist() for one in emitted]

    def _with_cache_sizes(self, run: Run, cache: list[Any]) -> Run:
        run.kv_ids, run.row_bytes = cache[-1].offset, installed_row_bytes(cache[-1])
        return run
