"""What codebook packs bring: base ids per id of held-out text, by pack size, beside an empty start.

A pack is learned from one set of files and tried on another, cut into windows that are compressed on their own, each
with a codebook that begins with the pack and grows. Nothing of the result is timed; how long learning took is told.
`multitok` is a pack of the same size as `mlx_zip vocab multitok export` makes it, of a dictionary that learned from the
same texts with phrases as long as entries may be.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.bench.record import surroundings
from mlx_zip.bench.tokens import read_domains
from mlx_zip.codec import CodecParams, compress
from mlx_zip.codec.ids import Uint32s, as_ids
from mlx_zip.errors import MlxZipError
from mlx_zip.text.formats import KINDS
from mlx_zip.text.vocabularies import Vocabulary, read_vocabulary
from mlx_zip.vocab.learner import learn
from mlx_zip.vocab.multitok import Dictionary, Samples, Settings, Tokens
from mlx_zip.vocab.multitok.export import as_pack

SIZES, GROWTH = (256, 1024, 4096), 2048
Entries = Sequence[tuple[int, ...]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench packs`."""
    add = parser.add_argument
    add("--tokenizer", type=Path, required=True, metavar="FILE", help=f"a vocabulary: {KINDS}")
    add(
        "--train",
        nargs="+",
        required=True,
        metavar="DOMAIN=FILE",
        help="texts to learn from, as --text of bench tokens",
    )
    add("--test", nargs="+", required=True, metavar="DOMAIN=FILE", help="texts of the same domains to try packs on")
    add("--sizes", type=int, nargs="+", default=list(SIZES), metavar="N", help=f"entries of a pack (default: {SIZES})")
    add("--merge-size", type=int, default=4, help="base ids per entry at most (default: 4)")
    add("--window", type=int, default=256, help="base ids compressed on their own (default: 256)")
    add("--disabled", choices=("none", "digits"), default="none", help="ids that never merge (default: none)")


def run(args: argparse.Namespace) -> int:
    """Prints one JSON line per domain. Raises `MlxZipError` before anything long."""
    for name, values in (("sizes", args.sizes), ("window", [args.window])):
        if low := [n for n in values if n < 1]:
            raise MlxZipError(f"--{name} must be at least 1, got {low[0]}")
    params = CodecParams(1, GROWTH + max(args.sizes), args.merge_size)
    vocabulary, train, test = read_vocabulary(args.tokenizer), read_domains(args.train), read_domains(args.test)
    if alone := train.keys() ^ test.keys():
        raise MlxZipError(f"{min(alone)} has texts to learn from or to try, but not both")
    disabled = vocabulary.digit_ids() if args.disabled == "digits" else []
    params = CodecParams(vocabulary.size, params.codebook_size, params.merge_size, disabled)
    for domain, corpus in train.items():
        texts, held_out = _ids(vocabulary, corpus), _windows(_ids(vocabulary, test[domain]), args.window)
        line = {
            "bench": "packs",
            "domain": domain,
            "tokenizer": vocabulary.name,
            "merge_size": args.merge_size,
            "window": args.window,
            "growth": GROWTH,
            "disabled": args.disabled,
            "train": _named(corpus),
            "test": _named(test[domain]),
            "train_ids": sum(map(len, texts)),
            "test_ids": sum(map(len, held_out)),
            "empty": rate(params, held_out),
            "packs": [],
        }
        for size in sorted(args.sizes):
            learner = lambda size=size, texts=texts: learn(params, texts, size, window=args.window).entries
            other = lambda size=size, texts=texts: multitok(params, texts, size)
            found = {"size": size, **_tried(params, held_out, learner), "multitok": _tried(params, held_out, other)}
            line["packs"].append(found)
            print(f"{domain}: {size}: {found['rate']:.3f} (empty {line['empty']:.3f})", file=sys.stderr)
        print(json.dumps({**line, **surroundings(vocabulary.library)}), flush=True)
    return 0


def multitok(params: CodecParams, texts: Sequence[Uint32s], size: int) -> Entries:
    """The entries of a pack made from a MultiTok dictionary."""
    dictionary = Dictionary(Settings(Tokens(params.vocab_size), params.merge_size))
    dictionary.train(Samples.of(texts))
    return as_pack(dictionary, size, params.merge_size, None, params.disabled_ids).entries


def _tried(params: CodecParams, held_out: Sequence[Uint32s], learned: Callable[[], Entries]) -> dict[str, Any]:
    begun = time.perf_counter()
    pack = learned()
    took = time.perf_counter() - begun
    return {"entries": len(pack), "rate": rate(params, held_out, pack), "learned_s": round(took, 2)}


def _named(corpus: Any) -> dict[str, Any]:
    """A corpus's record, with the names of its files alone."""
    record = corpus.record()
    return {**record, "files": [Path(name).name for name in record["files"]]}


def _ids(vocabulary: Vocabulary, corpus: Any) -> list[Uint32s]:
    """Base ids of each document."""
    return [as_ids(vocabulary.encode(document.text)) for document in corpus.documents]


def _windows(texts: Sequence[Uint32s], window: int) -> list[Uint32s]:
    """All documents end to end, cut."""
    joined = np.concatenate(texts)
    return [joined[at : at + window] for at in range(0, len(joined), window)]


def rate(params: CodecParams, windows: Sequence[Uint32s], pack: Sequence[Sequence[int]] = ()) -> float:
    """Base ids per id. A codebook has room for the pack and for `GROWTH` entries of its own."""
    codec = CodecParams(
        params.vocab_size, GROWTH + len(pack), params.merge_size, params.disabled_ids, start=pack or None
    )
    return round(sum(map(len, windows)) / sum(len(compress(codec, ids)[0]) for ids in windows), 4)
