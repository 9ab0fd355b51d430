"""A zip2zip or plain mlx-lm model as a language model of lm-evaluation-harness. Needs the `eval` extra.

Log-likelihood requests are scored on compressed ids. With border "whole", context and continuation are compressed as
one text, and the score is the sum of log-probabilities of all ids that cover part of the continuation. An id that also
covers the context's last base ids counts in full. With border "split", the continuation is compressed separately after
the context, and no id crosses the border. For a plain model both borders give the usual score. `is_greedy` is true if
greedy generation takes exactly these ids. If a zip2zip model would write the same text with other ids, it is false.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]

from mlx_zip.engine.mlx.scoring import compress_row, context_limit, score_rows
from mlx_zip.engine.scored import Compressed
from mlx_zip.errors import DataError
from mlx_zip.evaluation.bits import check_context_fits, choose_prefix_id, cut_scored_windows, measure_bits
from mlx_zip.evaluation.rates import can_generate_batches, check_batch_size, stream_responses
from mlx_zip.layout import has_hypertokens
from mlx_zip.packs.pack import Pack
from mlx_zip.text.documents import Document
from mlx_zip.text.prompts import render_chat

BORDERS = ("whole", "split")
MAX_LENGTH, MAX_GEN_TOKS = 2048, 256
_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p"}


class ZipLM(TemplateLM):
    """A loaded model and its tokenizer for `lm_eval.simple_evaluate(model=ZipLM(model, tokenizer), ...)`.

    context: maximum number of base ids per request, None for the model's number of positions, or 2048 if the config
    does not limit it. batch_size: requests per model call. border: "whole" or "split", see the module. max_gen_toks:
    maximum number of base tokens to generate for a task that sets no maximum. pack: the pack whose entries every
    codebook begins with, None for the model's own. seed: seed of the first batch of sampled texts; each later batch
    adds one. The attribute `truncated` counts the requests whose beginning was cut off. Raises `DataError` if `border`,
    `batch_size` or `context` is out of range.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        context: int | None = None,
        batch_size: int = 8,
        border: str = "whole",
        max_gen_toks: int = MAX_GEN_TOKS,
        pack: Pack | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if border not in BORDERS:
            raise DataError(f"border (--border) {border!r} is not one of {', '.join(BORDERS)}")
        self.model, self.tokenizer, self.border, self.pack = model, tokenizer, border, pack
        check_batch_size(batch_size)
        self.max_length = _choose_max_length(model, context)
        self.batch_size, self.max_gen_toks, self.seed = batch_size, max_gen_toks, seed
        self.truncated = 0

    # ---- text and ids

    @property
    def eot_token_id(self) -> int:
        """Id of the eos token, else of the bos token."""
        eos = self.tokenizer.eos_token_id
        return self.prefix_token_id if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """Id to read before a text without a context: bos, else eos."""
        return choose_prefix_id(self.tokenizer)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the base ids of a text; prepends bos if the tokenizer adds bos and the text has none."""
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=False)
        bos = self.tokenizer.bos_token_id
        if bos is None or add_special_tokens is False or ids[:1] == [bos] or not self._adds_bos:
            return ids
        return [bos, *ids]

    @property
    def _adds_bos(self) -> bool:
        return self.tokenizer.encode("")[:1] == [self.tokenizer.bos_token_id]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encodes context and continuation as one text; returns the base ids of each.

        The context gets as many ids as it has when encoded alone. Spaces at the context's end go to the continuation.
        """
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        whole = self.tok_encode(bare + continuation)
        cut = min(len(self.tok_encode(bare)), len(whole) - 1)  # one id may stand for text on both sides of the cut
        return whole[:cut], whole[cut:]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns chat messages as text, rendered by the tokenizer's template."""
        return render_chat(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in the harness's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    # ---- log-likelihood

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Returns each continuation's log-probability, and whether greedy generation would write its ids.

        requests: ((context, continuation), base ids of the context, base ids of the continuation).
        """
        pairs = [self._compress_request(text, context, continuation) for (_, text), context, continuation in requests]
        scores = score_rows(self.model, [row for row, _ in pairs], self.batch_size)
        answers = []
        for request, (_, first), scored in zip(requests, pairs, scores, strict=True):
            part = slice(first - 1, None)
            answers.append((float(scored.logprobs[part].sum()), bool(scored.greedy[part].all())))
            self.cache_hook.add_partial("loglikelihood", request[0], answers[-1])
        return answers

    def _compress_request(self, text: str, context: list[int], continuation: list[int]) -> tuple[Compressed, int]:
        """Returns a compressed request, and the index of the first id that counts in the score.

        text: the continuation. context, continuation: base ids.
        """
        parts = [np.array(ids, np.uint32) for ids in (self._fit_context(context, continuation, text), continuation)]
        border = len(parts[0])
        if self.border == "whole":
            parts = [np.concatenate(parts)]
        row = compress_row(self.model, *parts, pack=self.pack)
        first = int(np.searchsorted(row.ends, border, side="right"))
        if first == 0:  # the first id, an entry of the pack, covers the whole context: no id predicts it
            row = compress_row(self.model, np.array([self.prefix_token_id], np.uint32), *parts, pack=self.pack)
            border += 1
            first = int(np.searchsorted(row.ends, border, side="right"))
        if row.ends[first - 1] == border:  # no id crosses the border, so generation would begin here
            row = replace(row, breaks=tuple({*row.breaks, first - 1}))
        return row, first

    def _fit_context(self, context: list[int], continuation: list[int], text: str) -> list[int]:
        """Returns the last ids of a context, as many as fit into the model with the continuation.

        The continuation's last base id takes no position, because it is predicted but not read. text: the continuation,
        for the message. Raises `DataError` if the continuation is empty or does not fit.
        """
        room = self.max_length + 1 - len(continuation)
        if room < 1 or not continuation:
            raise DataError(f"a continuation of {len(continuation)} base ids cannot be scored: {text[:60]!r}")
        return self._keep_last_ids(context or [self.prefix_token_id], room)

    def _keep_last_ids(self, context: list[int], room: int) -> list[int]:
        """Returns the last `room` ids of a context; adds 1 to `truncated` if the context is longer."""
        self.truncated += len(context) > room
        return context[-room:]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, scored in windows as by `mlx_zip evaluate --data`."""
        totals = []
        for request in requests:
            (text,) = request.args
            total = 0.0
            if text:
                windows = cut_scored_windows(self.tokenizer, [Document(text, "a document")], self.max_length)
                bits = measure_bits(self.model, windows, self.batch_size, pack=self.pack)
                total = float(-bits.bits.sum() * math.log(2))
            totals.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    # ---- generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the generated texts, each cut before its first stop string. `max_gen_toks` counts base tokens."""
        arguments: list[Any] = [request.args for request in requests]  # (context, generation arguments)
        options = [_generation_options(given, self.max_gen_toks) for _, given in arguments]
        keys = [json.dumps(option, sort_keys=True) for option in options]
        prompts = [self._make_prompt(text, o["max_tokens"]) for (text, _), o in zip(arguments, options, strict=True)]
        order = sorted(range(len(requests)), key=lambda i: (keys[i], -len(prompts[i])))
        texts, seeds = [""] * len(requests), count(self.seed)  # equal seeds would repeat answers
        for _, same in groupby(order, key=lambda i: keys[i]):
            rows = list(same)
            size = self.batch_size if can_generate_batches(self.model) else 1
            for batch in (rows[begin : begin + size] for begin in range(0, len(rows), size)):
                answers = self._generate_batch([prompts[i] for i in batch], options[batch[0]], next(seeds))
                for i, text in zip(batch, answers, strict=True):
                    texts[i] = text
                    self.cache_hook.add_partial("generate_until", arguments[i], text)
        return texts

    def _make_prompt(self, context: str, max_tokens: int) -> list[int]:
        """Returns the context's last base ids, leaving room for `max_tokens`. Raises `DataError` if no room is left."""
        room = self.max_length - max_tokens
        if room < 1:
            raise DataError(f"max_gen_toks {max_tokens} leaves no room in a context of {self.max_length} base ids")
        return self._keep_last_ids(self.tok_encode(context) or [self.prefix_token_id], room)

    def _generate_batch(self, prompts: Sequence[list[int]], options: Mapping[str, Any], seed: int) -> list[str]:
        options = {**options, "seed": seed, "pack": self.pack if has_hypertokens(self.model) else None}
        texts = [""] * len(prompts)
        for row, response in stream_responses(self.model, self.tokenizer, prompts, **options):
            texts[row] += response.text
        return texts


def _choose_max_length(model: Any, context: int | None) -> int:
    """Returns the maximum number of base ids per request. context: the user's choice, None for the model's maximum.

    Raises `DataError` if `context` is below 1 or exceeds the model's positions.
    """
    limit = context_limit(model)
    if context is None:
        return limit or MAX_LENGTH
    if context < 1:
        raise DataError(f"the context (--context) must be at least 1 base id, got {context}")
    check_context_fits("requests", context, limit)
    return context


def _generation_options(given: Mapping[str, Any], max_gen_toks: int) -> dict[str, Any]:
    """Returns a task's generation arguments as options of `stream_generate`; greedy unless the task asks for sampling.

    max_gen_toks: maximum number of base tokens if the task sets none. Raises `DataError` if an argument is unknown.
    """
    if unknown := sorted(given.keys() - _KNOWN):
        raise DataError(f"generation arguments {', '.join(unknown)} of this task are not supported")
    until = given.get("until") or []
    options: dict[str, Any] = {
        "max_tokens": int(given.get("max_gen_toks", max_gen_toks)),
        "stop": [stop for stop in ([until] if isinstance(until, str) else until) if stop],
        "temp": 0.0,
    }
    if given.get("do_sample", given.get("temperature", 0) > 0):
        sampling = {name: given[name] for name in ("top_p", "top_k", "min_p") if name in given}
        options |= {"temp": float(given.get("temperature", 1.0)), **sampling}
    return options
