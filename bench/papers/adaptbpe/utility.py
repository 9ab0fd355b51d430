"""AdaptBPE: what a merge list loses when it is cut to N merges, and how fast adapting and encoding are.

Per text and N a line: compression utility (bytes saved per byte of the text that is not adapted to) of the first N
merges, of the N most frequent, of the list adapted by each rule, and of the whole list; and the seconds of adapting,
from text to swaps. Then a line per text for encoding, in millions of bytes per second on one core, compared with the
`tokenizers` library with the same list: trials alternate, "fresh" is an encoder that has seen nothing. The documents of
a text are joined by line breaks. Source: arXiv 2601.21665.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from mlx_zip.bench.record import summary, surroundings
from mlx_zip.bench.tokens import read_domains
from mlx_zip.errors import DataError, MlxZipError
from mlx_zip.vocab.adaptbpe.adapted import RULES, AdaptedVocabulary, adapted, words_of
from mlx_zip.vocab.adaptbpe.base import BaseVocabulary, read_base
from mlx_zip.vocab.adaptbpe.encoder import PIECES, Encoder
from mlx_zip.vocab.adaptbpe.learn import Swap, adapt
from mlx_zip.vocab.adaptbpe.plain import tokenizer_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench adaptbpe`."""
    add = parser.add_argument
    add(
        "--tokenizer",
        "--base",
        dest="base",
        required=True,
        metavar="FILE",
        help="tokenizer to adapt, as `mlx_zip vocab adapt learn` takes it",
    )
    add("--train", nargs="+", required=True, metavar="NAME=FILE", help="texts to adapt to, as `bench tokens --text`")
    add("--test", nargs="+", required=True, metavar="NAME=FILE", help="texts of the same names to count tokens in")
    add(
        "--merges",
        type=int,
        nargs="+",
        default=[2000, 5000, 15000],
        metavar="N",
        help="numbers of merges to keep (default: 2000 5000 15000)",
    )
    add("--margin", type=int, default=0, metavar="N", help="a swap must gain more than this (default: 0)")
    add("--trials", type=int, default=5, help="trials per timing (default: 5)")


def run(args: argparse.Namespace) -> int:
    """Prints a JSON line per text and N, and one per text for encoding. Raises `MlxZipError` before anything long."""
    if args.trials < 1:
        raise MlxZipError(f"--trials must be at least 1, got {args.trials}")
    train, test = _joined(args.train), _joined(args.test)
    if train.keys() != test.keys():
        raise DataError(f"--train and --test name different texts: {', '.join(sorted(train.keys() ^ test.keys()))}")
    base = read_base(args.base)
    if base.front.pieces not in PIECES:
        raise MlxZipError(f"{base.name}: its text is cut by the tokenizers library, so there is no speed to compare")
    for name in train:
        for n in args.merges:
            _print(name, base, utility(base, train[name], test[name], n, args.margin, args.trials))
        _print(name, base, encoding(base, train[name], min(args.merges), args.trials))
    return 0


def _joined(texts: list[str]) -> dict[str, str]:
    return {name: "\n".join(d.text for d in corpus.documents) for name, corpus in read_domains(texts).items()}


def utility(base: BaseVocabulary, train: str, test: str, n: int, margin: int, trials: int) -> dict[str, Any]:
    """Returns the record of one N: utilities on `test` to four digits, seconds of adapting to `train`."""
    seconds: list[float] = []
    swaps: tuple[Swap, ...] = ()
    for _ in range(trials):
        begun = time.perf_counter()
        swaps = adapt(base.merges, words_of(base.front, [train]), n, margin=margin).swaps
        seconds.append(time.perf_counter() - begun)
    words = words_of(base.front, [train])
    cut: dict[str, AdaptedVocabulary] = {
        "first_k": adapted(base, words, n, method="first-k"),
        "top_k": adapted(base, words, n, method="top-k"),
        **{rule: adapted(base, words, n, rule=rule, margin=margin) for rule in RULES},
    }
    n_bytes = len(test.encode("utf-8"))
    saved = lambda tokens: round(1 - tokens / n_bytes, 4)
    return {
        "what": "utility",
        "merges": n,
        "margin": margin,
        "swaps": len(swaps),
        "train_bytes": len(train.encode("utf-8")),
        "test_bytes": n_bytes,
        "utility": {name: saved(len(vocabulary.encode(test))) for name, vocabulary in cut.items()}
        | {"whole_list": saved(len(base.encode(test)))},
        "adapting_s": summary(seconds),
    }


def encoding(base: BaseVocabulary, text: str, n: int, trials: int) -> dict[str, Any]:
    """Returns the speeds of encoding one text as a whole. Raises `MlxZipError` where the libraries disagree on it."""
    data, kept = text.encode("utf-8"), adapted(base, words_of(base.front, [text]), n)
    plain, library = base.encoder(), _library(base)
    theirs = library.encode_batch_fast([text])[0].ids
    same = np.array_equal(_order(base)[plain.encode(data)], theirs)
    if not same:
        raise MlxZipError(f"{base.name}: the tokenizers library gives other ids, so speeds do not compare")
    ways: dict[str, Callable[[], float]] = {  # seconds
        "tokenizers": lambda: _seconds(lambda: library.encode_batch_fast([text])),
        "whole_list": lambda: _seconds(lambda: plain.encode(data)),
        "whole_list_fresh": lambda: _fresh(base.encoder(), data),
        "adapted": lambda: _seconds(lambda: kept.encoder.encode(data)),
        "adapted_fresh": lambda: _fresh(Encoder(kept.merges, kept.schedule, kept.encoder.pieces), data),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for trial in range(trials + 1):
        for name, way in ways.items():
            took = way()
            if trial:  # the first is a warm-up
                speeds[name].append(len(data) / took / 1e6)
    return {
        "what": "encoding",
        "merges": n,
        "bytes": len(data),
        "unit": "MB/s",
        "ids": len(theirs),
        "same_ids": same,
        **{name: summary(samples) for name, samples in speeds.items()},
    }


def _fresh(encoder: Encoder, data: bytes) -> float:
    return _seconds(lambda: encoder.encode(data))


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _library(base: BaseVocabulary) -> Any:
    """Returns the `tokenizers` library's tokenizer with the whole list, for one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    whole = adapted(base, Counter(), base.n_merges, method="first-k")
    return Tokenizer.from_str(json.dumps(tokenizer_json(whole, base.source)))


def _order(base: BaseVocabulary) -> Any:
    """Returns the library's id of each of our tokens."""
    return adapted(base, Counter(), base.n_merges, method="first-k").ids_of(base.ids)


def _print(name: str, base: BaseVocabulary, record: dict[str, Any]) -> None:
    line = {"bench": "adaptbpe", "text": name, "base": base.name, **record}
    print(json.dumps({**line, **surroundings("tokenizers")}), flush=True)
