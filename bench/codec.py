"""Times our codec and the published codec, the package zip2zip-compression, on equal ids; prints JSON lines.

zip2zip-compression takes and returns Python lists; our codec takes lists or numpy arrays and returns arrays. So
compressing and decoding are each measured twice: with arrays on our side (`compress arrays`, `decode arrays`), and with
Python lists on both sides (`compress lists`, `decode lists`). On both sides, decoding includes making a codebook,
following the ids and expanding them to base ids. `push_one` is a single push from Python, as in each decoding step.

Trials of the two codecs alternate. A trial repeats a call for `TRIAL_S` seconds, so that the other codec's data in the
processor's caches hardly counts. Times are in ns: of compressing per base id, all others per compressed id.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.arguments import check_flags_at_least, default_flags
from mlx_zip.codec import Codebook, CodecParams, compress
from mlx_zip.codec.ids import Uint32s
from mlx_zip.errors import MlxZipError

from .recording import load_before_bench, run_in_turns, summarize_samples, time_call

try:
    import zip2zip_compression as upstream
except ImportError:
    upstream = None

WINDOW, MERGE_SIZE = 2048, 3
UNMERGED, MOST_IDS = 256, 1 << 24  # number of base ids that never merge; maximum of --vocab-size
TRIAL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `bench codec`."""
    flag = default_flags(parser.add_argument)
    parser.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="measure the ids of these texts (.txt, .jsonl, each also .gz); needs --tokenizer (default: made-up ids)",
    )
    parser.add_argument("--tokenizer", help="tokenizer for --text: folder, hub id or vocabulary file")
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=128_256,
        help="number of base ids of the vocabulary (default: 128256, as Llama-3's)",
    )
    flag("--length", 500_000, "number of base ids to use, the first of --text")
    flag("--windows", 60, f"number of windows of {WINDOW} base ids, each with its own codebook")
    flag("--trials", 9, "number of timed runs per measurement")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a record per measurement. Raises `MlxZipError` if a flag is out of range or a file cannot be read."""
    check_flags_at_least(args, 1, "length", "windows", "trials")
    if not UNMERGED < args.vocab_size <= MOST_IDS:
        raise MlxZipError(f"--vocab-size must be from {UNMERGED + 1} to {MOST_IDS}, got {args.vocab_size}")
    load_before_bench()
    ids, data = _read_ids(args)
    ids = np.ascontiguousarray(ids[: args.length], np.uint32)
    starts = np.linspace(0, max(0, len(ids) - WINDOW), args.windows).astype(int)
    windows = [ids[start : start + WINDOW].copy() for start in starts]
    for what, sequences, slots in (("windows", windows, WINDOW), ("sequence", [ids], 1 << 20)):
        setting = {
            "of": what,
            "sequences": len(sequences),
            "ids_each": len(sequences[0]),
            "codebook_size": slots,
            "trials": args.trials,
        }
        # the last base ids never merge, like a real tokenizer's special tokens
        disabled = range(args.vocab_size - UNMERGED, args.vocab_size)
        params = CodecParams(args.vocab_size, slots, MERGE_SIZE, disabled)
        for record in time_whole_sequences(params, sequences, args.trials):
            yield {"bench": "codec", **record, "setting": setting, "data": data}
        if what == "windows":
            for record in time_single_calls(params, sequences, args.trials):
                yield {"bench": "codec", **record, "setting": setting, "data": data}


def _read_ids(args: argparse.Namespace) -> tuple[Any, str]:
    if args.text is None:
        return synthetic_ids(args.length, args.vocab_size), "synthetic: Zipf ids with repeated phrases, not a real text"
    if args.tokenizer is None:
        raise MlxZipError("--text needs --tokenizer")
    from mlx_zip.text.documents import read_corpus
    from mlx_zip.text.vocabularies import read_vocabulary

    corpus = read_corpus(args.text)
    vocabulary = read_vocabulary(args.tokenizer)
    ids = [i for document in corpus.documents for i in vocabulary.encode(document.text)]
    return ids, f"{', '.join(Path(name).name for name in corpus.files)}; {vocabulary.name}"


def synthetic_ids(length: int, vocab_size: int) -> Uint32s:
    """Returns `length` made-up base ids, Zipf-distributed; about half of them are in phrases that recur."""
    rng = np.random.default_rng(0)
    phrases = [rng.zipf(1.3, rng.integers(2, 6)) for _ in range(4000)]
    pieces, left = [], length
    while left > 0:
        pieces.append(phrases[min(rng.zipf(1.2), 4000) - 1] if rng.random() < 0.3 else rng.zipf(1.3, 4))
        left -= len(pieces[-1])
    return (np.concatenate(pieces) % (vocab_size - UNMERGED))[:length].astype(np.uint32)


def upstream_sizes(params: CodecParams) -> tuple[Any, ...]:
    """Returns the arguments with which zip2zip-compression makes a codec of the same parameters."""
    pad = params.disabled_ids[0] if params.pad_id is None else params.pad_id
    return params.vocab_size, params.codebook_size, params.merge_size, pad, list(params.disabled_ids)


def time_whole_sequences(params: CodecParams, sequences: list[Uint32s], trials: int) -> Iterator[dict[str, Any]]:
    theirs = upstream and upstream.LZWCompressor(*upstream_sizes(params))
    compressed = [compress(params, ids)[0] for ids in sequences]
    base_lists, compressed_lists = [ids.tolist() for ids in sequences], [ids.tolist() for ids in compressed]
    encode = theirs and (lambda: [theirs.encode(ids) for ids in base_lists])
    decode = theirs and (lambda: [theirs.decode(ids) for ids in compressed_lists])
    calls: dict[str, tuple[Callable[[], Any], Any]] = {  # operation: (our call, theirs or None)
        "compress arrays": (lambda: [compress(params, ids) for ids in sequences], encode),
        "compress lists": (lambda: [compress(params, ids)[0].tolist() for ids in base_lists], encode),
        "decode arrays": (lambda: [decode_with_new_codebook(params, ids) for ids in compressed], decode),
        "decode lists": (lambda: [decode_with_new_codebook(params, ids).tolist() for ids in compressed_lists], decode),
        "push": (lambda: [Codebook(params).push(ids) for ids in compressed], None),
    }
    for what, (ours, other) in calls.items():
        count = sum(map(len, base_lists if "compress" in what else compressed_lists))
        yield time_ours_and_theirs(what, count, trials, ours, other)


def decode_with_new_codebook(params: CodecParams, ids: Any) -> Uint32s:
    book = Codebook(params)
    book.push(ids)
    return book.expand(ids)


def time_ours_and_theirs(what: str, count: int, trials: int, ours: Callable[[], Any], theirs: Any) -> dict[str, Any]:
    """Times `ours` and `theirs` (None: not measured) in alternating trials; returns a record in ns per id.

    what: the operation's name. count: number of ids that one call reads.
    """
    calls = {"ours": ours, "upstream": theirs} if theirs else {"ours": ours}
    ways = {name: lambda trial, call=call: mean_call_seconds(call) / count * 1e9 for name, call in calls.items()}
    found = {name: summarize_samples(samples) for name, samples in run_in_turns(ways, trials).items()}
    return {"what": what, "unit": "ns per id", "ids": count, "upstream": None, **found}


def mean_call_seconds(call: Callable[[], Any]) -> float:
    """Repeats a call until `TRIAL_S` seconds have passed and returns the mean seconds per call."""
    calls, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < TRIAL_S or not calls:
        call()
        calls += 1
    return elapsed / calls


def time_single_calls(params: CodecParams, sequences: list[Uint32s], trials: int) -> Iterator[dict[str, Any]]:
    samples: dict[str, list[list[int]]] = {name: [] for name in ("push_one", "mark", "rewind_one", "upstream")}
    for trial in range(trials):
        ids = compress(params, sequences[trial % len(sequences)])[0].tolist()
        book = Codebook(params)
        time_ns = partial(time_call, clock=time.perf_counter_ns)
        samples["push_one"].append([time_ns(book.push, x) for x in ids])
        samples["mark"].append([time_ns(book.mark) for _ in ids])
        samples["rewind_one"].append([time_ns(book.rewind, mark) for mark in reversed(range(len(ids)))])
        if upstream is not None:
            manager = upstream.CodebookManager(upstream.CompressionConfig(*upstream_sizes(params)))
            samples["upstream"].append([time_ns(manager.update_codebooks, [[x]]) for x in ids])
    theirs = samples.pop("upstream")
    for what, calls in samples.items():
        record = {
            "what": what,
            "unit": "ns per call",
            "calls": sum(map(len, calls)),
            "ours": summarize_call_times(calls),
        }
        yield {**record, "upstream": summarize_call_times(theirs) if what == "push_one" and theirs else None}


def summarize_call_times(calls: list[list[int]]) -> dict[str, Any]:
    """Summarizes the medians of the trials, and adds the 99th percentile of all calls. calls: ns, [trials][calls]."""
    flat = np.concatenate(calls)
    return {**summarize_samples([float(np.median(trial)) for trial in calls]), "p99": float(np.percentile(flat, 99))}
