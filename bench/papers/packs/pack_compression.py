"""Measures the compression by codebook packs as rates, base ids per id, on held-out text of a pack's and other domains.

A pack is learned from the training texts of one domain and tried on the held-out texts of every domain. Held-out texts
are cut into windows that are compressed separately. A window's codebook begins with the pack and grows by at most
`GROWTH` entries; `static` is the rate of a codebook that begins with the pack and does not grow.

Three ways to make a pack are compared: `learn_pack` (`mlx_zip vocab pack learn`), `multitok` (`mlx_zip vocab multitok
export`) and `bpe` (plain byte pair encoding over base ids). `retokenized` uses no pack and no codebook, but a larger
tokenizer: the given one with as many merges of plain byte pair encoding, of any length. Rates depend only on text,
tokenizer and codec; the seconds of learning depend on the machine and its load.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.arguments import check_flags_at_least, default_flags
from mlx_zip.bench.recording import load_before_bench
from mlx_zip.bench.tokens import corpus_record, read_domains
from mlx_zip.codec import CodecParams, compress
from mlx_zip.codec.ids import Uint32s, as_ids
from mlx_zip.errors import MlxZipError
from mlx_zip.packs.learner import learn_pack
from mlx_zip.packs.phrases import pack_of_phrases
from mlx_zip.text.formats import KINDS
from mlx_zip.text.vocabularies import Vocabulary, read_vocabulary
from mlx_zip.vocab.multitok import Dictionary, Samples, Settings, Tokens

SIZES, GROWTH = (256, 1024, 4096), 2048  # entries of a pack; most entries that a codebook adds to its pack
Entries = Sequence[tuple[int, ...]]
Learner = Callable[[CodecParams, Sequence[Uint32s], int, int], Entries]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench packs` to a parser."""
    add = parser.add_argument
    flag = default_flags(add)
    add("--tokenizer", type=Path, required=True, metavar="FILE", help=f"vocabulary file of the base ids: {KINDS}")
    add(
        "--train",
        nargs="+",
        required=True,
        metavar="DOMAIN=FILE",
        help="texts to learn packs from; one pack is learned from all files of a DOMAIN",
    )
    add(
        "--test",
        nargs="+",
        required=True,
        metavar="DOMAIN=FILE",
        help="held-out texts to try every pack on; each DOMAIN of --train must be among them",
    )
    flag("--sizes", list(SIZES), "numbers of entries in a pack, tried one by one", metavar="N")
    flag("--merge-size", 4, "largest number of base ids in an entry")
    flag("--window", 256, "compress every N base ids separately", metavar="N")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Learns and tries packs; yields a record per domain of --train.

    Raises `MlxZipError` if a flag or file cannot be used, before any pack is learned.
    """
    check_flags_at_least(args, 1, "sizes", "window")
    load_before_bench()
    CodecParams(1, GROWTH + max(args.sizes), args.merge_size)  # checks the sizes before texts are read
    vocabulary, train, test = read_vocabulary(args.tokenizer), read_domains(args.train), read_domains(args.test)
    if untested := train.keys() - test.keys():
        raise MlxZipError(f"{min(untested)} has texts to learn from but none to try packs on: add it to --test")
    params = CodecParams(vocabulary.size, GROWTH + max(args.sizes), args.merge_size)
    held_out = {
        domain: cut_windows(tokenize_documents(vocabulary, corpus), args.window) for domain, corpus in test.items()
    }
    fixed = {
        "bench": "packs",
        "tokenizer": vocabulary.name,
        "merge_size": args.merge_size,
        "window": args.window,
        "growth": GROWTH,
        "tests": {domain: held_out_record(params, test[domain], windows) for domain, windows in held_out.items()},
    }
    for domain, corpus in train.items():
        texts = tokenize_documents(vocabulary, corpus)
        line = {**fixed, "domain": domain, "train": corpus_record(corpus), "train_ids": sum(map(len, texts))}
        sizes = sorted(args.sizes)
        line["packs"] = list(pack_records(params, texts, held_out, sizes, args.window))
        line["retokenized"] = [retokenized_record(params, texts, held_out, size, args.window) for size in sizes]
        yield line
        print(f"{domain}: {len(line['packs'])} packs", file=sys.stderr)


def pack_records(
    params: CodecParams,
    texts: Sequence[Uint32s],
    held_out: Mapping[str, Sequence[Uint32s]],
    sizes: Sequence[int],
    window: int,
) -> Iterator[dict[str, Any]]:
    """Learns a pack per size and learner from the texts of one domain; yields a record per pack.

    The record has the number of entries, base ids per id on every domain of `held_out` with growth ("rates") and
    without ("static"), and the seconds of learning. texts: base ids of each text. held_out: domain -> windows. window:
    base ids that learning compresses separately.
    """
    for size in sizes:
        for name, learner in LEARNERS.items():
            begun = time.perf_counter()
            pack = learner(params, texts, size, window)
            took = time.perf_counter() - begun
            yield {
                "size": size,
                "learner": name,
                "entries": len(pack),
                "learned_s": round(took, 2),
                "rates": {domain: base_ids_per_id(params, windows, pack) for domain, windows in held_out.items()},
                "static": {
                    domain: base_ids_per_id(params, windows, pack, growth=0) for domain, windows in held_out.items()
                },
            }


def retokenized_record(
    params: CodecParams, texts: Sequence[Uint32s], held_out: Mapping[str, Sequence[Uint32s]], size: int, window: int
) -> dict[str, Any]:
    """Returns the record of a larger tokenizer without a codebook: base ids per token on every domain of `held_out`.

    The tokenizer is the given one with `size` additional merges, learned from `texts`.
    """
    bpe = BaseIdBpe(params, texts, size, window)
    rates = {name: round(sum(map(len, ids)) / sum(map(bpe.count, ids)), 4) for name, ids in held_out.items()}
    return {"size": size, "merges": len(bpe.entries()), "rates": rates}


def learn_pack_entries(params: CodecParams, texts: Sequence[Uint32s], size: int, window: int) -> Entries:
    return learn_pack(params, texts, size, window=window).entries


def multitok_pack_entries(params: CodecParams, texts: Sequence[Uint32s], size: int, window: int) -> Entries:
    """Returns the entries of a pack made from a MultiTok dictionary of whole texts (`window` is ignored)."""
    dictionary = Dictionary(Settings(Tokens(params.vocab_size), params.merge_size))
    dictionary.train(Samples.from_sequences(texts))
    return pack_of_phrases(dictionary, size, params.merge_size, None, params.disabled_ids).entries


def bpe_pack_entries(params: CodecParams, texts: Sequence[Uint32s], size: int, window: int) -> Entries:
    return BaseIdBpe(params, texts, size, window, params.merge_size).entries()


LEARNERS: dict[str, Learner] = {"learn": learn_pack_entries, "multitok": multitok_pack_entries, "bpe": bpe_pack_entries}


def base_ids_per_id(
    params: CodecParams, windows: Sequence[Uint32s], pack: Sequence[Sequence[int]] = (), growth: int = GROWTH
) -> float:
    """Returns base ids per id of windows that are compressed separately.

    Each window's codebook begins with the entries of `pack` and has room for `growth` more.
    """
    codec = CodecParams(
        params.vocab_size, growth + len(pack), params.merge_size, params.disabled_ids, start=pack or None
    )
    return round(sum(map(len, windows)) / sum(len(compress(codec, ids)[0]) for ids in windows), 4)


def held_out_record(params: CodecParams, corpus: Any, windows: Sequence[Uint32s]) -> dict[str, Any]:
    return {"text": corpus_record(corpus), "ids": sum(map(len, windows)), "empty": base_ids_per_id(params, windows)}


def tokenize_documents(vocabulary: Vocabulary, corpus: Any) -> list[Uint32s]:
    return [as_ids(vocabulary.encode(document.text)) for document in corpus.documents]


def cut_windows(texts: Sequence[Uint32s], window: int) -> list[Uint32s]:
    """Joins all documents end to end and cuts them into windows of `window` base ids; the last may be shorter."""
    joined = np.concatenate(texts)
    return [joined[at : at + window] for at in range(0, len(joined), window)]


FIRST = 0x10000  # code point that stands for base id 0: above the surrogates
MOST = 0x110000 - FIRST  # number of base ids that have a code point


class BaseIdBpe:
    """Byte pair encoding with `size` merges over base ids, learned from texts that are cut into windows.

    texts: base ids of each text. window: base ids per window; no merge crosses the end of a window or a disabled id.
    longest: most base ids in a merge; None: no limit. The trainer sees each base id as a character. Raises `ValueError`
    if the vocabulary has more than `MOST` base ids.
    """

    def __init__(
        self, params: CodecParams, texts: Sequence[Uint32s], size: int, window: int, longest: int | None = None
    ) -> None:
        from tokenizers import Tokenizer, models, trainers

        if params.vocab_size > MOST:
            raise ValueError(f"{params.vocab_size} base ids have no characters of their own, {MOST} have")
        self.disabled = params.disabled_ids
        windows = [text[start : start + window] for text in texts for start in range(0, len(text), window)]
        words = [word for piece in windows for word in self._words_of_ids(piece)]
        self.tokenizer = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=len(set().union(*words)) + size,
            min_frequency=2,
            max_token_length=None if longest is None else longest + 1,  # the trainer's bound is exclusive
            show_progress=False,
        )
        self.tokenizer.train_from_iterator(words, trainer)

    def _words_of_ids(self, ids: Uint32s) -> Iterator[str]:
        for run in np.split(ids, np.flatnonzero(np.isin(ids, self.disabled))):
            if word := "".join(chr(FIRST + int(i)) for i in run if i not in self.disabled):
                yield word

    def entries(self) -> list[tuple[int, ...]]:
        """Returns the base ids of every merge, in the order of learning."""
        tokens = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        return [tuple(ord(character) - FIRST for character in token) for token, _ in tokens if len(token) > 1]

    def count(self, ids: Uint32s) -> int:
        """Returns the number of tokens that base ids are merged into; an id unseen in training is one token."""
        words = list(self._words_of_ids(ids))
        found = [self.tokenizer.encode(word).tokens for word in words]
        known = sum(len(token) for tokens in found for token in tokens)
        return sum(map(len, found)) + len(ids) - known
