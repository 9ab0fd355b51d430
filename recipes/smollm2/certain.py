"""The mixed pack: entries that save ids and cost few bits, by what the base itself predicts.

A model without hypertokens spells an entry id by id, each given those before. One output row has to say at once how
likely the whole entry is. That is nearly free if the ids after the first one follow it almost always, or as often in
one context as in another. It costs bits if the context decides: those that are lost when "the rest follows" is
predicted with one probability for all contexts in which the entry's first id occurs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mlx_zip.codec import CodecParams
from mlx_zip.cuda.cpu_products import multiplies_bfloat16
from mlx_zip.errors import DataError
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.vocab.first_stage import tokenizer_fingerprint
from mlx_zip.vocab.learner import learn
from mlx_zip.vocab.packs import Pack

from .settings import Packs

Entry = tuple[int, ...]
BATCH = 4  # windows that the base reads together
END = "<|im_end|>"


def mixed_pack(model: Path, files: Mapping[str, Sequence[Path]], packs: Packs, say: Callable[[str], object]) -> Pack:
    """Learns the mixed pack. files: training texts of each domain. say: is given lines of progress.

    Raises `DataError` for a domain without a whole window of text.
    """
    tokenizer = load_tokenizer(model)
    disabled, pad = sorted(tokenizer.all_special_ids), tokenizer.pad_token_id
    windows = {name: windows_of(tokenizer, files[name], int(packs.most_mixed * share)) for name, share in packs.mixed}
    rng = np.random.default_rng(0)
    chosen, together = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    for name, share in packs.mixed:
        mine, window = windows[name], windows[name].shape[1]
        if not len(mine):
            raise DataError(f"the texts of {name} are shorter than {window} base ids")
        chosen.append(mine[rng.permutation(len(mine))[: max(1, int(packs.predicted * share) // window)]])
        together += [mine] * max(1, round(packs.most_mixed * share / mine.size))  # a small domain keeps its share
    sample, corpus = np.concatenate(chosen), np.concatenate(together)
    say(f"the base reads {sample.size:,} base ids, to say which entries cost few bits")
    cost = costs(corpus, sample, log_probabilities(model, sample), packs.merge_size, disabled, packs.least)
    params = CodecParams(len(tokenizer), packs.mixed_size, packs.merge_size, disabled_ids=tuple(disabled), pad_id=pad)
    found = learn(
        params,
        list(corpus[:: packs.every]),
        packs.mixed_size,
        window=corpus.shape[1],
        allowed=lambda entry: cost.get(entry, np.inf) < packs.most_bits,
    )
    say(
        f"mixed pack: {len(found.entries):,} entries, {found.base_ids / found.ids:.3f} base ids per id of training text"
    )
    return Pack(found.entries, tokenizer_fingerprint(tokenizer))


def windows_of(tokenizer: Any, files: Sequence[Path], most: int, length: int = 512) -> NDArray[np.int64]:
    """Returns the first `most` base ids of documents in files of JSON lines, in windows [N, length]."""
    ids = list[int]()
    for file in files:
        for line in file.read_text(encoding="utf-8").split("\n")[:-1]:  # a text may hold other ends of lines
            one = json.loads(line)
            talk = "messages" in one
            text = tokenizer.apply_chat_template(one["messages"], tokenize=False) if talk else one["text"] + END
            ids += tokenizer.encode(text, add_special_tokens=False)
            if len(ids) >= most:
                break
    kept = np.array(ids[:most], np.int64)
    return kept[: len(kept) // length * length].reshape(-1, length)


def log_probabilities(model: Path, windows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns the natural logarithm of each id's probability given those before it in its window [N, L].

    The first id of a window gets 0. model: folder of the base, which is read by transformers.
    """
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager").eval()
    found = np.zeros(windows.shape, np.float32)
    with torch.inference_mode():
        for at in range(0, len(windows), BATCH):
            ids = torch.from_numpy(windows[at : at + BATCH].astype(np.int64))
            for row, h in enumerate(base.model(ids).last_hidden_state):
                logits = base.lm_head(h[:-1]).float()
                chosen = logits.gather(1, ids[row, 1:, None])[:, 0] - logits.logsumexp(1)
                found[at + row, 1:] = chosen.numpy()
    return found


@dataclass(frozen=True)
class Runs:
    """Runs of ids that recur in windows, all of one length n.

    ids [R, n]; counts [R]; tails [R] float64: mean log probability, natural, of the ids after the first one.
    """

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]
    tails: NDArray[np.float64]


def runs_of(windows: NDArray[np.int64], n: int, disabled: Sequence[int], least: int, logs: Any = None) -> Runs:
    """Returns the runs of n ids without a disabled id that occur at least `least` times. logs: as windows, or None."""
    ids = np.lib.stride_tricks.sliding_window_view(windows, n, axis=1).reshape(-1, n)
    kept = ~np.isin(ids, disabled).any(1)
    tails = np.zeros(len(ids))
    if logs is not None:
        tails = np.lib.stride_tricks.sliding_window_view(logs, n, axis=1).reshape(-1, n)[:, 1:].sum(1, dtype=np.float64)
    ids, tails = ids[kept], tails[kept]
    key = ids[:, 0]
    for column in range(1, n):  # numbers of distinct runs, one id longer each time
        _, key = np.unique(key * (int(windows.max()) + 1) + ids[:, column], return_inverse=True)
    _, first, counts = np.unique(key, return_index=True, return_counts=True)
    often = counts >= least
    means = np.bincount(key, weights=tails) / counts
    return Runs(ids[first[often]], counts[often], means[often])


def entropy(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the entropy in bits of events with probability p."""
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return -(p * np.log2(p) + (1 - p) * np.log2(1 - p))


def costs(
    windows: NDArray[np.int64],
    sample: NDArray[np.int64],
    logs: NDArray[np.float32],
    merge_size: int,
    disabled: Sequence[int],
    least: int,
    least_in_sample: int = 4,
) -> dict[Entry, float]:
    """Returns the bits that each recurring entry of 2 to merge_size ids costs for each id that it saves.

    windows [N, L]: a large part of the corpus, in which entries are counted. sample [S, L], logs [S, L]: a smaller
    part, and its `log_probabilities`. Entries that are rarer than `least` or `least_in_sample` are left out.

    The rest of an entry follows the first id in a share of its occurrences. A predictor that knows the context is taken
    to give it the probability that the base gives it where it does follow, and 0 elsewhere.
    """
    firsts = np.bincount(windows.reshape(-1))
    found: dict[Entry, float] = {}
    for n in range(2, merge_size + 1):
        seen = runs_of(sample, n, disabled, least_in_sample, logs)
        tails = dict(zip(map(tuple, seen.ids.tolist()), seen.tails.tolist(), strict=True))
        all_runs = runs_of(windows, n, disabled, least)
        for ids, count in zip(map(tuple, all_runs.ids.tolist()), all_runs.counts.tolist(), strict=True):
            if (tail := tails.get(ids)) is not None:
                often = int(firsts[ids[0]])
                share = count / often
                known = max(np.exp(tail), share)
                lost = often * entropy(np.array(share)) - count / known * entropy(np.array(known))
                found[ids] = max(0.0, float(lost)) / (count * (n - 1))
    return found
