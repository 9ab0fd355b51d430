"""Sources of drafts that compute: a second, smaller model (`DraftModelSource`) and a draft head (`HeadSource`).

The second model proposes its greedy continuation (speculative decoding). The draft head is the model's own
(`mlx_zip.models.draft_head`).
"""

from __future__ import annotations

import math
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice, takewhile
from operator import mul
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_zip.codec.codebook import base_ids_of_next_id
from mlx_zip.codec.ids import Uint32s, common_prefix_length
from mlx_zip.engine.draft_sources import MOST_PROPOSED
from mlx_zip.engine.pass_costs import KEPT, SURE, PassCosts, Share
from mlx_zip.errors import EngineError, GenerationError, first_message_line
from mlx_zip.layout import decoder_config, has_hypertokens
from mlx_zip.models.batching import flatten_cache_lists
from mlx_zip.models.draft_head import DEPTH, Proposer
from mlx_zip.models.loading import load
from mlx_zip.models.rows.zip_state import find_zip_state, kv_caches

CHUNK = 512  # ids of a text read per pass
FIRST_PASS = 16  # maximum number of ids that the first pass of a draft reads
LEAST_LIKELY = 0.1  # minimum joint probability of the ids of a head's draft; a draft is cut where it falls below
MOST_PADDING = 1024  # rows by which models' embeddings may differ for one vocabulary, because of padding


def load_draft_model(name: str | Path, tokenizer: Any, trust_remote_code: bool = False) -> Any:
    """Loads a model, plain or with hypertokens, that drafts for the model that `tokenizer` belongs to.

    Raises `GenerationError` if the two models have different vocabularies, and what `mlx_zip.load` raises.
    """
    model, own = load(name, trust_remote_code=trust_remote_code)
    if own.get_vocab() != tokenizer.get_vocab():  # eos ids may differ, as between a base model and its chat model
        raise GenerationError(
            f"draft_model (--draft-model): {name} has another vocabulary than the model that it would draft for; "
            "choose one with the same tokenizer"
        )
    return model


class DraftModel:
    """A model that drafts for another model, and the times of its drafts over all requests.

    most: maximum base tokens of a text that the draft model can read. vocab_size: number of its base ids. Raises
    `GenerationError` if the model's caches cannot be trimmed, because refused ids must be removed from them.
    """

    def __init__(self, loaded: object) -> None:
        if not isinstance(loaded, nn.Module):
            raise GenerationError(f"draft_model must be a loaded model (mlx_zip.load), got {loaded!r:.80}")
        model: Any = loaded
        config = decoder_config(model)
        self.most: float = config.get("max_position_embeddings") or math.inf
        self.vocab_size: float = (
            model.layout.vocab_size if has_hypertokens(model) else config.get("vocab_size") or math.inf
        )
        self.times = deque[float](maxlen=KEPT)  # seconds per proposed id in the latest drafts
        self.model, self._reader = model, _Reader(model)
        self._owner: Callable[[], object] = lambda: None
        if kinds := {type(entry).__name__ for entry in self._reader.kv if type(entry) is not KVCache}:
            raise GenerationError(
                f"draft_model (--draft-model): its caches ({', '.join(sorted(kinds))}) cannot be trimmed, "
                "so it could not forget ids that were refused; choose another model"
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises `GenerationError` if a model with `vocab_size` base ids must have another vocabulary than this one."""
        if MOST_PADDING < abs(self.vocab_size - vocab_size) < math.inf:
            raise GenerationError(
                f"draft_model (--draft-model): it has a vocabulary of {self.vocab_size} ids, the model that it would "
                f"draft for one of {vocab_size}; choose one with the same tokenizer"
            )

    def reader_for(self, source: object) -> _Reader:
        """Returns a reader for the text of a source.

        Reuses the shared reader, with its cache, if the source that had it before is gone: texts often begin as the
        previous one did. Otherwise returns a new reader.
        """
        if self._owner() is not None:
            return _Reader(self.model)
        self._owner = weakref.ref(source)
        return self._reader

    def clear_draft_cache(self) -> None:
        """Discards the shared reader, with its cache and the text in it."""
        self._reader = _Reader(self.model)


class DraftModelSource:
    """Proposes base ids for one request with a draft model.

    base_ids: the request's text so far. width: ids per draft if pass costs do not decide. vocab_size: number of base
    ids of the request's model.
    """

    most = MOST_PROPOSED

    def __init__(self, draft_model: DraftModel, base_ids: Sequence[int] | Uint32s, width: int, vocab_size: int) -> None:
        self._model, self._vocab_size = draft_model, vocab_size
        self.width: int | None = width
        self._text, self._readable = array("I"), True
        self._reader: _Reader | None = None  # made with the first draft
        self._accepted = Share(SURE)  # high enough for `PassCosts` to try a first draft
        self._took_s = 0.0
        self.append(base_ids)

    def append(self, base_ids: Sequence[int] | Uint32s) -> None:
        self._text.extend(map(int, base_ids))
        self._readable &= all(one < self._model.vocab_size for one in base_ids)

    def acceptance_share(self) -> float:
        fits = self._readable and 0 < len(self._text) < self._model.most
        return self._accepted.value if fits else 0.0

    def seconds_per_id(self) -> float:
        return _median_seconds(self._model.times)

    def propose(self, most: int) -> Iterator[int]:
        """Yields up to `most` base ids that may come next. The draft model takes one pass per id that it emits.

        Raises `EngineError` if the draft model fails.
        """
        most = int(min(most, self._model.most - len(self._text)))
        reader = self._reader = self._reader or self._model.reader_for(self)
        try:
            ids = reader.read_new_text(np.array(self._text, np.uint32))
            began = time.perf_counter()
            for one in islice(takewhile(lambda one: one < self._vocab_size, reader.generate_greedily(ids, most)), most):
                self._took_s = time.perf_counter() - began
                yield one
        except Exception as error:
            self._model.clear_draft_cache()
            raise EngineError(
                f"the draft model (--draft-model) failed: {type(error).__name__}: {first_message_line(error)}"
            ) from error

    def note_draft(self, proposed: int, accepted: int) -> None:
        self._accepted.note_draft(proposed, accepted)
        self._model.times.append(self._took_s / proposed)


class HeadSource:
    """Proposes ids with a model's draft head. The ids may be hypertokens, unlike those of other sources.

    Call `note_body_output` with the model's last output before each draft. costs: hold the head's times and its share
    of accepted ids over all requests.
    """

    width: int | None = DEPTH + 1
    most = DEPTH + 1

    def __init__(self, head: Proposer, costs: PassCosts) -> None:
        self._head, self._times, self._accepted = head, costs.head_times, costs.head_share
        self._accepted.fade()
        self._seen: tuple[mx.array, Sequence[Any]] | None = None
        self._last: int | None = None

    def note_body_output(self, h: mx.array | None, last: int | None, cache: Sequence[Any]) -> None:
        """Stores the output of the model's last pass, see `Head.note_body_output`."""
        self._seen, self._last = None if h is None else (h, cache), last

    def append(self, base_ids: Sequence[int] | Uint32s) -> None:
        """Does nothing: the head reads the body's output, not the text."""

    def acceptance_share(self) -> float:
        return 0.0 if self._seen is None else self._accepted.value

    def seconds_per_id(self) -> float:
        return _median_seconds(self._times)

    def propose(self, most: int) -> list[int]:
        """Returns up to `most` ids that may come after the id last passed to `note_body_output`."""
        assert self._seen is not None
        assert self._last is not None
        ask = partial(self._head.propose, self._seen[0], self._last, self._seen[1])
        if not self._times:
            ask(1)  # the first call may have to compile kernels, so it is not timed
        began = time.perf_counter()
        guesses, shares = ask(min(most, self.most))
        likely = takewhile(lambda share: share >= LEAST_LIKELY, accumulate(shares, mul))
        ids = [one for one, _ in zip(guesses, likely, strict=False)]
        if ids:
            self._times.append((time.perf_counter() - began) / len(ids))
        else:
            self._accepted.note_draft(1, 0)  # an empty draft counts as a refused id
        return ids

    def note_draft(self, proposed: int, accepted: int) -> None:
        self._accepted.note_draft(proposed, accepted)


def _median_seconds(times: Sequence[float]) -> float:
    """Returns the median of times, infinite if there are none."""
    return median(times) if times else math.inf


class _Reader:
    """A draft model with a cache that holds a text. kv: the KV caches in the cache."""

    def __init__(self, model: Any) -> None:
        self._model, self._cache = model, make_prompt_cache(model)
        self._state = find_zip_state(self._cache)
        self._plain_ids = array("I")  # ids that a plain model's cache holds; a codebook logs its ids itself
        self.kv = list(flatten_cache_lists(kv_caches(self._cache)))

    def read_new_text(self, text: Uint32s) -> Uint32s:
        """Trims the cache to its common prefix with a text of base ids, and reads the rest of the text but its end.

        Returns the ids that are left to read: at least 1, at most `FIRST_PASS`.
        """
        book = None if self._state is None else self._state.books[0]
        held = np.array(self._plain_ids, np.uint32) if book is None else book.base_ids()
        rest = text[self._trim_to_base_tokens(min(common_prefix_length(held, text), len(text) - 1)) :]
        ids = rest if book is None else book.compress(rest)
        end = max(0, len(ids) - FIRST_PASS)
        for begin in range(0, end, CHUNK):
            self._read_ids(ids[begin : min(begin + CHUNK, end)])
            mx.eval([entry.state for entry in self.kv])
            mx.clear_cache()
        return ids[end:]

    def _trim_to_base_tokens(self, base_tokens: int) -> int:
        """Trims the cache to the ids within the first `base_tokens` base tokens. Returns how many base tokens are left.

        After that all layers end at the same id, even if an interrupt had stopped a pass.
        """
        if self._state is None:
            for entry in self.kv:
                entry.trim(entry.offset - base_tokens)
            del self._plain_ids[base_tokens:]
            return base_tokens
        book = self._state.books[0]
        self._model.trim_cache(self._cache, int(np.searchsorted(book.ends(), base_tokens, side="right")))
        return book.base_length

    def generate_greedily(self, ids: Uint32s, most: int) -> Iterator[int]:
        """Reads ids, at least one, and yields the base ids of the draft model's greedy continuation.

        most: maximum number of base ids that the caller takes.
        """
        chosen = self._read_ids(ids)
        return self._generate_plain(chosen, most) if self._state is None else self._generate_with_hypertokens(chosen)

    def _generate_plain(self, chosen: mx.array, most: int) -> Iterator[int]:
        """Yields base ids. The device runs the pass over an id while the caller takes it. chosen [1]: the first id."""
        for left in range(most, 0, -1):
            after = self._likeliest_next_id(chosen) if left > 1 else chosen
            mx.async_eval(after)
            one = _read_id(chosen)
            if left > 1:
                self._plain_ids.append(one)
            yield one
            chosen = after

    def _generate_with_hypertokens(self, chosen: mx.array) -> Iterator[int]:
        """Yields the base ids of each id. Reads an id only when the caller wants more. chosen [1]: the first id."""
        assert self._state is not None
        while True:
            yield from base_ids_of_next_id(self._state.books[0], _read_id(chosen))
            chosen = self._likeliest_next_id(chosen)

    def _read_ids(self, ids: Uint32s) -> mx.array:
        """Reads ids [n], records them for a plain model, and returns the likeliest next id [1], not yet evaluated."""
        chosen = self._likeliest_next_id(mx.array(ids))
        if self._state is None:
            self._plain_ids.extend(ids.tolist())
        return chosen

    def _likeliest_next_id(self, ids: mx.array) -> mx.array:
        """Reads ids [n] and returns the likeliest next id [1], not yet evaluated."""
        return mx.argmax(self._model(ids[None], cache=self._cache)[:, -1], axis=-1)


def _read_id(chosen: mx.array) -> int:
    return int(np.array(chosen)[0])
