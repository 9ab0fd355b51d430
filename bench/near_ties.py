"""Measures how often a pass over several ids chooses another id than passes over one id, because of rounding.

The model writes answers one id per pass, greedily after the first ids, which are sampled so that answers differ. For
each width, another cache reads the written ids, `width` per pass, as if they had been proposed and accepted. Rounding
errors thus accumulate as they do with drafts, but a different choice does not change the ids that follow.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_zip.arguments import check_flags_at_least
from mlx_zip.codec import compress_next
from mlx_zip.codec.ids import as_ids
from mlx_zip.engine.pass_costs import WIDTHS
from mlx_zip.layout import has_hypertokens
from mlx_zip.models.loading import load
from mlx_zip.models.rows.zip_state import find_zip_state
from mlx_zip.progress import ProgressBar

from .engines.workloads import make_conversations, read_requests
from .machine import describe_mlx_device
from .recording import print_header, print_record
from .records import Record, Records, libraries_cell, table

BLOCK = WIDTHS[-1]  # ids compared at a time
DRAWN = BLOCK  # number of sampled ids at the beginning of an answer
MARGIN = 1e-4  # ids whose two largest logits differ by less are counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench near-ties`."""
    add = parser.add_argument
    add("--model", default="stories", help="model to run: model folder, hub id or bundled model (default: stories)")
    add("--ids", type=int, default=100_000, help="number of ids to compare per width (default: 100000)")
    add("--max-ids", type=int, default=256, help="maximum number of ids per answer (default: 256)")
    add("--seed", type=int, default=0, help="seed of the drawn ids (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Compares passes of all widths and prints one JSON line. Raises `MlxZipError` if a flag is out of range."""
    check_flags_at_least(args, BLOCK, "ids", "max_ids")
    model, tokenizer = load(args.model)
    device = describe_mlx_device()
    print_header("near-ties", args.model, device, f"{args.ids} ids by passes of {', '.join(map(str, WIDTHS))} ids")
    record = {
        "bench": "near-ties",
        "model": {"name": Path(args.model).name, "hypertokens": has_hypertokens(model)},
        "setting": {"ids": args.ids, "max_ids": args.max_ids, "seed": args.seed},
        **compare_widths(model, tokenizer, args),
        "device": device,
    }
    print_record(record)
    return 0


def compare_widths(model: Any, tokenizer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the differences of each width, and the number of ids whose two largest logits differ by < `MARGIN`."""
    requests = read_requests(None)
    prompts = [list(one.turns[0].prompt) for one in make_conversations(tokenizer, requests, len(requests), 1, 1)]
    found = {str(width): Differences() for width in WIDTHS[1:]}
    close = ids = answers = 0
    mx.random.seed(args.seed)
    with ProgressBar(args.ids, "id", "Comparing") as count:
        while ids < args.ids:
            prompt = prompts[answers % len(prompts)]
            for logits, others in read_answer(model, prompt, tokenizer.eos_token_ids, args.max_ids):
                best = np.sort(logits, axis=1)[:, -2:]
                close += int((best[:, 1] - best[:, 0] < MARGIN).sum())
                for name, other in others.items():
                    found[name].add(logits, other)
                ids += BLOCK
                count(BLOCK)
            answers += 1
    dtype = model(mx.array([[0]]), cache=make_prompt_cache(model)).dtype
    return {
        "dtype": str(dtype).rpartition(".")[2],
        "answers": answers,
        "margins": {f"{MARGIN:g}": close},
        "widths": {name: vars(one) for name, one in found.items()},
    }


class Differences:
    """Differences of the logits of other passes from the logits of passes over one id.

    ids: number of compared ids. differing: number of ids at which another logit is the largest. largest: largest
    absolute difference. largest_in_logits: largest quotient of an id's difference and its largest absolute logit.
    """

    def __init__(self) -> None:
        self.ids = self.differing = 0
        self.largest = self.largest_in_logits = 0.0

    def add(self, logits: np.ndarray, other: np.ndarray) -> None:
        """Compares two arrays of logits [n, W] of the same n ids. Ids that cannot be chosen have -inf in both."""
        possible = np.isfinite(logits)
        size = np.abs(logits, where=possible, out=np.zeros_like(logits)).max(axis=1)
        apart = np.abs(np.subtract(other, logits, where=possible, out=np.zeros_like(logits))).max(axis=1)
        self.ids += len(logits)
        self.differing += int((logits.argmax(axis=1) != other.argmax(axis=1)).sum())
        self.largest = max(self.largest, float(apart.max()))
        self.largest_in_logits = max(self.largest_in_logits, float((apart / size).max()))


def read_answer(
    model: Any, prompt: Sequence[int], ends: Sequence[int], most: int
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Yields logits [BLOCK, W] of passes over one id, and those of each other kind of pass, until the answer ends.

    prompt: base ids. ends: ids that end an answer. most: most ids of an answer.
    """
    cache = make_prompt_cache(model)
    state = find_zip_state(cache)
    ids = prompt if state is None else compress_next(state.books[0].copy(), as_ids(prompt)).tolist()
    model(mx.array([ids[:-1]]), cache=cache)
    caches, last = {width: copy.deepcopy(cache) for width in WIDTHS[1:]}, ids[-1]
    for at in range(0, most - BLOCK + 1, BLOCK):
        block, logits = [last], []
        while len(logits) < BLOCK:
            logits += read_ids(model, cache, block[-1:])
            scores = logits[-1] + (mx.random.gumbel(logits[-1].shape) if at < DRAWN else 0)
            block.append(cast(int, mx.argmax(scores).item()))
        last = block.pop()
        others = {
            str(width): [one for i in range(0, BLOCK, width) for one in read_ids(model, own, block[i : i + width])]
            for width, own in caches.items()
        }
        yield as_array(logits), {name: as_array(found) for name, found in others.items()}
        if not {last, *block[1:]}.isdisjoint(ends):
            return


def read_ids(model: Any, cache: list[Any], ids: Sequence[int]) -> list[mx.array]:
    """Runs one pass over `ids`, which appends the ids to the cache; returns the logits [W] after each id."""
    causal = {"causal": True} if len(ids) > 1 and has_hypertokens(model) else {}
    return list(model(mx.array([ids], mx.uint32), cache=cache, **causal)[0])


def as_array(rows: Sequence[mx.array]) -> np.ndarray:
    return np.array(mx.stack(list(rows)).astype(mx.float32))


def near_ties_table(records: Records) -> str:
    """Returns the table of the record `near-ties`; adds up the counts of lines of equal model, dtype and BLAS."""
    runs: dict[tuple[str, str, str], list[Record]] = {}
    for line in records.lines("near-ties"):
        runs.setdefault((line["model"]["name"], line["dtype"], libraries_cell(line)), []).append(line)
    heads = ["model", "logits", "preloaded; BLAS", "ids", f"margins below {MARGIN:g}", "other ids", "difference"]
    return table([*heads, "of the largest logit"], [[*run, *_near_ties_cells(lines)] for run, lines in runs.items()])


def _near_ties_cells(lines: Sequence[Record]) -> list[str]:
    widths = [line["widths"][str(width)] for line in lines for width in WIDTHS[1:]]
    return [
        f"{sum(line['widths'][str(BLOCK)]['ids'] for line in lines):,}",
        str(sum(line["margins"][f"{MARGIN:g}"] for line in lines)),
        str(sum(one["differing"] for one in widths)),
        f"{max(one['largest'] for one in widths):.1e}",
        f"{max(one['largest_in_logits'] for one in widths):.1e}",
    ]


TABLES, PICTURES = {"near ties": near_ties_table}, {}
