"""AdaptBPE: what a merge list loses when it is cut to N merges, and how fast adapting and encoding are.

A line per text and N gives the compression utility, 1 - tokens / bytes of held-out text, of the first N merges, of the
N most frequent merges, of the list adapted by each rule, and of the whole list. It also gives the seconds of adapting,
from text to swaps. One more line per text gives encoding speeds in MB/s on one core, for our encoders and for the
`tokenizers` library with the same list; trials alternate, and "fresh" is an encoder with an empty cache. The documents
of a text are joined by line breaks. Source: arXiv 2601.21665.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mlx_zip.arguments import check_flags_at_least, default_flags
from mlx_zip.bench.recording import run_in_turns, summarize_samples, time_call
from mlx_zip.bench.tokens import read_domains
from mlx_zip.errors import DataError, MlxZipError
from mlx_zip.vocab.adaptbpe.adapted import RULES, AdaptedVocabulary, adapt_vocabulary, count_words
from mlx_zip.vocab.adaptbpe.base_vocabulary import BaseVocabulary, read_base_vocabulary
from mlx_zip.vocab.adaptbpe.learn import Swap, adapt_merges
from mlx_zip.vocab.adaptbpe.merge_list import PIECES, BpeEncoder
from mlx_zip.vocab.adaptbpe.tokenizer_json import exact_tokenizer_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench adaptbpe` to a parser."""
    add = parser.add_argument
    flag = default_flags(add)
    add(
        "--tokenizer",
        required=True,
        metavar="FILE",
        help="tokenizer to adapt, of any kind that `mlx_zip vocab adapt learn` reads",
    )
    add(
        "--train",
        nargs="+",
        required=True,
        metavar="NAME=FILE",
        help="texts to adapt to, each with a name; FILE as in `bench tokens --text`",
    )
    add(
        "--test",
        nargs="+",
        required=True,
        metavar="NAME=FILE",
        help="held-out texts to count tokens in; each NAME must also be in --train",
    )
    flag("--merges", [2000, 5000, 15000], "numbers of merges to keep, measured one by one", metavar="N")
    flag("--margin", 0, "make a swap of merges only if it saves more than N tokens of --train", metavar="N")
    flag("--trials", 5, "timed calls per measurement")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a record per text and number of merges, and one per text for the speed of encoding.

    Raises `MlxZipError` if a flag is invalid, before anything is measured.
    """
    check_flags_at_least(args, 1, "trials")
    train, test = join_texts(args.train), join_texts(args.test)
    if train.keys() != test.keys():
        raise DataError(f"--train and --test name different texts: {', '.join(sorted(train.keys() ^ test.keys()))}")
    base = read_base_vocabulary(args.tokenizer)
    if base.splitter.pieces not in PIECES:
        raise MlxZipError(f"{base.name}: its text is cut by the tokenizers library, so there is no speed to compare")
    for name in train:
        head = {"bench": "adaptbpe", "text": name, "base": base.name}
        for n in args.merges:
            yield head | measure_utility(base, train[name], test[name], n, args.margin, args.trials)
        yield head | measure_encoding(base, train[name], min(args.merges), args.trials)


def join_texts(texts: list[str]) -> dict[str, str]:
    return {name: "\n".join(d.text for d in corpus.documents) for name, corpus in read_domains(texts).items()}


def measure_utility(base: BaseVocabulary, train: str, test: str, n: int, margin: int, trials: int) -> dict[str, Any]:
    """Adapts the merge list to `train`, keeping `n` merges; returns a record with seconds and the utility on `test`.

    margin: see --margin. trials: how often adapting is timed.
    """
    seconds: list[float] = []
    swaps: tuple[Swap, ...] = ()
    for _ in range(trials):
        begun = time.perf_counter()
        swaps = adapt_merges(base.merges, count_words(base.splitter, [train]), n, margin=margin).swaps
        seconds.append(time.perf_counter() - begun)
    words = count_words(base.splitter, [train])
    cut: dict[str, AdaptedVocabulary] = {
        "first_k": adapt_vocabulary(base, words, n, method="first-k"),
        "top_k": adapt_vocabulary(base, words, n, method="top-k"),
        **{rule: adapt_vocabulary(base, words, n, rule=rule, margin=margin) for rule in RULES},
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
        "adapting_s": summarize_samples(seconds),
    }


def measure_encoding(base: BaseVocabulary, text: str, n: int, trials: int) -> dict[str, Any]:
    """Times the encoding of `text` by the `tokenizers` library and by our encoders; returns the record.

    n: number of merges of the adapted list. Raises `MlxZipError` if, with the whole list, the library's ids differ from
    our encoder's.
    """
    data, kept = text.encode("utf-8"), adapt_vocabulary(base, count_words(base.splitter, [text]), n)
    whole = adapt_vocabulary(base, Counter(), base.n_merges, method="first-k")
    plain, library = base.encoder(), build_library_tokenizer(whole, base)
    theirs = library.encode_batch_fast([text])[0].ids
    if not np.array_equal(whole.adapted_ids_of(base.ids)[plain.encode(data)], theirs):
        raise MlxZipError(f"{base.name}: the tokenizers library gives other ids, so speeds do not compare")
    ways: dict[str, Callable[[], float]] = {  # each encodes the text once and returns the seconds
        "tokenizers": lambda: time_call(library.encode_batch_fast, [text]),
        "whole_list": lambda: time_call(plain.encode, data),
        "whole_list_fresh": lambda: time_call(base.encoder().encode, data),
        "adapted": lambda: time_call(kept.encoder.encode, data),
        "adapted_fresh": lambda: time_call(BpeEncoder(kept.merges, kept.schedule, kept.encoder.pieces).encode, data),
    }
    speeds = run_in_turns({name: lambda trial, way=way: len(data) / way() / 1e6 for name, way in ways.items()}, trials)
    return {
        "what": "encoding",
        "merges": n,
        "bytes": len(data),
        "unit": "MB/s",
        "ids": len(theirs),
        "same_ids": True,
        **{name: summarize_samples(samples) for name, samples in speeds.items()},
    }


def build_library_tokenizer(whole: AdaptedVocabulary, base: BaseVocabulary) -> Any:
    """Returns a tokenizer of the `tokenizers` library with the whole merge list; limits the library to one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(exact_tokenizer_json(whole, base.source)))
