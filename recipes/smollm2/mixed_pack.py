"""The mixed pack: entries that save ids and cost few bits, by what the base itself predicts.

A model without hypertokens spells an entry id by id, each given those before. One output row has to say at once how
likely the whole entry is. That is nearly free if the ids after the first one follow it almost always, or as often in
one context as in another. It costs bits if the context decides: those that are lost when "the rest follows" is
predicted with one probability for all contexts in which the entry's first id occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp, log2
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mlx_zip.codec import CodecParams
from mlx_zip.cuda.network.linear import multiplies_bfloat16
from mlx_zip.errors import DataError
from mlx_zip.packs.pack import Pack
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.vocab.first_stage import tokenizer_fingerprint
from mlx_zip.vocab.learner import learn_pack, recurring_runs

from .settings import PackSettings
from .texts import read_json_lines, render_record

Entry = tuple[int, ...]
WINDOWS_PER_CALL = 4  # windows that the base reads together


def learn_mixed_pack(
    model: Path, files: Mapping[str, Sequence[Path]], packs: PackSettings, say: Callable[[str], object]
) -> Pack:
    """Learns the mixed pack. files: training texts of each domain. say: is given lines of progress.

    Raises `DataError` for a domain without a whole window of text.
    """
    chosen = packs.chosen
    assert chosen is not None
    tokenizer = load_tokenizer(model)
    disabled, pad = sorted(tokenizer.all_special_ids), tokenizer.pad_token_id
    windows = {name: read_windows(tokenizer, files[name], int(chosen.most_ids * share)) for name, share in packs.mixed}
    rng = np.random.default_rng(0)
    predicted, together = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    for name, share in packs.mixed:
        mine, window = windows[name], windows[name].shape[1]
        if not len(mine):
            raise DataError(f"the texts of {name} are shorter than {window} base ids")
        predicted.append(mine[rng.permutation(len(mine))[: max(1, int(chosen.predicted * share) // window)]])
        together += [mine] * max(1, round(chosen.most_ids * share / mine.size))  # a small domain keeps its share
    sample, corpus = np.concatenate(predicted), np.concatenate(together)
    say(f"the base reads {sample.size:,} base ids, to say which entries cost few bits")
    cost = compute_entry_costs(
        corpus, sample, compute_log_probabilities(model, sample), packs.merge_size, disabled, chosen.least
    )
    params = CodecParams(len(tokenizer), chosen.size, packs.merge_size, disabled_ids=tuple(disabled), pad_id=pad)
    found = learn_pack(
        params,
        list(corpus[:: chosen.every]),
        chosen.size,
        window=corpus.shape[1],
        allowed=lambda entry: cost.get(entry, np.inf) < chosen.most_bits,
    )
    say(
        f"mixed pack: {len(found.entries):,} entries, {found.base_ids / found.ids:.3f} base ids per id of training text"
    )
    return Pack(found.entries, tokenizer_fingerprint(tokenizer))


def read_windows(tokenizer: Any, files: Sequence[Path], most: int, length: int = 512) -> NDArray[np.int64]:
    """Returns the first `most` base ids of documents in files of JSON lines, in windows [N, length]."""
    ids = list[int]()
    for file in files:
        for one in read_json_lines(file):
            text = render_record(one, tokenizer) + ("" if "messages" in one else tokenizer.eos_token)
            ids += tokenizer.encode(text, add_special_tokens=False)
            if len(ids) >= most:
                break
    kept = np.array(ids[:most], np.int64)
    return kept[: len(kept) // length * length].reshape(-1, length)


def compute_log_probabilities(model: Path, windows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns the natural logarithm of each id's probability given those before it in its window [N, L].

    The first id of a window gets 0. model: folder of the base, which is read by transformers.
    """
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    found = np.zeros(windows.shape, np.float32)
    with torch.inference_mode():
        for at in range(0, len(windows), WINDOWS_PER_CALL):
            ids = torch.from_numpy(windows[at : at + WINDOWS_PER_CALL].astype(np.int64))
            for row, h in enumerate(base.model(ids).last_hidden_state):
                logits = base.lm_head(h[:-1]).float()
                chosen = logits.gather(1, ids[row, 1:, None])[:, 0] - logits.logsumexp(1)
                found[at + row, 1:] = chosen.numpy()
    return found


def binary_entropy(p: float) -> float:
    """Returns the entropy in bits of an event with probability p."""
    return -sum(q * log2(q) for q in (p, 1 - p) if q > 0)


def find_recurring_runs(
    windows: NDArray[np.int64], logs: NDArray[np.float32], merge_size: int, disabled: Sequence[int], least: int
) -> dict[Entry, tuple[int, float]]:
    """Returns the runs of 2 to merge_size ids that occur `least` times in windows [N, L], none with a disabled id.

    Of each: how often it occurs, and the mean log probability of its ids after the first one. logs [N, L]: of each id.
    """
    ids = np.pad(windows, ((0, 0), (0, 1)), constant_values=-1).reshape(-1)  # no run crosses the end of a window
    sums = np.concatenate([[0.0], np.cumsum(np.pad(logs, ((0, 0), (0, 1))).reshape(-1), dtype=np.float64)])
    found: dict[Entry, tuple[int, float]] = {}
    can_merge = (ids >= 0) & ~np.isin(ids, disabled)
    for n, (first, counts, runs) in enumerate(recurring_runs(ids, can_merge, merge_size, least), start=2):
        at = np.flatnonzero(runs >= 0)
        means = np.bincount(runs[at], weights=sums[at + n] - sums[at + 1]) / counts
        for place, count, mean in zip(first.tolist(), counts.tolist(), means.tolist(), strict=True):
            found[tuple(ids[place : place + n].tolist())] = count, mean
    return found


def compute_entry_costs(
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
    part, and its `compute_log_probabilities`. Entries that are rarer than `least` or `least_in_sample` are left out.

    The rest of an entry follows the first id in a share of its occurrences. A predictor that knows the context is taken
    to give it the probability that the base gives it where it does follow, and 0 elsewhere.
    """
    firsts = np.bincount(windows.reshape(-1))
    in_sample = find_recurring_runs(sample, logs, merge_size, disabled, least_in_sample)
    counted = find_recurring_runs(windows, np.zeros(windows.shape, np.float32), merge_size, disabled, least)
    found: dict[Entry, float] = {}
    for entry in counted.keys() & in_sample.keys():
        count, often = counted[entry][0], int(firsts[entry[0]])
        share = count / often
        known = max(exp(in_sample[entry][1]), share)
        lost = often * binary_entropy(share) - count / known * binary_entropy(known)
        found[entry] = max(0.0, lost) / (count * (len(entry) - 1))
    return found
