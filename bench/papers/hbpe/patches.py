"""Measures hierarchical BPE's codec by patch size: merges, table of patches, a text in patches, FLOPs.

Times are processor times of one thread, for the C library's calls and the Python around them, after the tokens have
been read. The tokenizer may be any that `mlx_zip vocab hbpe learn` accepts. With a text, the record has the FLOPs of
the paper's small model with patches of this size, and the length of patches cut at blanks.

Patches over bytes are baselines: cut at blanks, or where the next byte is hard to predict. Source: arXiv 2510.15517
§3.2, which uses published code for both kinds. Here every patch ends with the end mark, so that one model can read
patches of every kind; the published code has no end mark.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_zip.arguments import check_flags_at_least, default_flags
from mlx_zip.bench.recording import summarize_samples, time_call
from mlx_zip.models.patches.patch_model import PlainModel
from mlx_zip.text.documents import read_corpus
from mlx_zip.text.vocabularies import read_vocabulary
from mlx_zip.vocab.hbpe.measures import Tower, fertility, hierarchical_flops, transformer_flops, word_count
from mlx_zip.vocab.hbpe.patch_merges import PatchMerges, learn_merges, tokens_too_long
from mlx_zip.vocab.hbpe.patch_table import PatchTable
from mlx_zip.vocab.hbpe.patch_text import read_text_encoder, read_token_bytes

SIZES = (4, 6, 8, 10, 12, 16)
CONTEXT_BYTES = 8192  # length of the text whose FLOPs the paper counts
SMALL = Tower(12, 768, 2048, 12)  # the paper's table 1
LOCAL = Tower(3, 512, 512, 8)  # local encoder; the local decoder is equal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench hbpe` to a parser."""
    flag = default_flags(parser.add_argument)
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="tokenizer whose ids are grouped into patches, of any kind that `mlx_zip vocab hbpe learn` reads, for "
        "example vocab.bpe",
    )
    parser.add_argument(
        "--text", help="text to encode into patches: .txt or .jsonl, also .gz (default: no text is encoded)"
    )
    flag("--sizes", list(SIZES), "largest numbers of symbols in a patch, measured one by one", metavar="S")
    flag("--trials", 5, "timed calls per measurement")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a record per patch size. Raises `MlxZipError` if a flag or file cannot be used."""
    check_flags_at_least(args, 1, "trials")
    tokens = read_token_bytes(args.tokenizer)
    text = None if args.text is None else "\n".join(one.text for one in read_corpus([args.text]).documents)
    ids = None if text is None else np.array(text_to_ids_function(args.tokenizer)(text), np.uint32)
    for size in args.sizes:
        line = measure_patch_size(tokens, size, args.trials)
        if text is not None and ids is not None:
            line |= measure_text(tokens, size, text, ids, args.trials)
        names = {"tokenizer": Path(args.tokenizer).name, "text": args.text and Path(args.text).name}
        yield {"bench": "hbpe", **names, **line}


def measure_patch_size(tokens: list[bytes], size: int, trials: int) -> dict[str, Any]:
    """Returns the record of one patch size: number of merges, size of the patch table, times of learning and building.

    tokens: the bytes of each first-stage token. size: most symbols in a patch.
    """
    merges = learn_merges(tokens, size).merges
    table = PatchTable.build(merges, tokens)
    return {
        "patch_size": size,
        "tokens": len(tokens),
        "too_long": len(tokens_too_long(tokens, size)),
        "merges": len(merges.pairs),
        "table_bytes": table.rows.nbytes,
        "longest_token_bytes": max(map(len, tokens)),
        "learn_ms": summarize_call_ms(trials, lambda: learn_merges(tokens, size)),
        "build_ms": summarize_call_ms(trials, lambda: PatchTable.build(merges, tokens)),
    }


def measure_text(tokens: list[bytes], size: int, text: str, ids: Any, trials: int) -> dict[str, Any]:
    """Returns the record's fields about a text: patch lengths by mode, time to look patches up, FLOPs.

    ids: the text's first-stage ids; each id is one patch. Modes `stop` and `full`: see `PatchTable.build`.
    """
    merges, n_bytes = learn_merges(tokens, size).merges, len(text.encode("utf-8"))
    stop, full = PatchTable.build(merges, tokens), PatchTable.build(merges, tokens, "full")
    rate, symbols = n_bytes / len(ids), float(stop.lengths[ids].mean())
    sizes = (CONTEXT_BYTES, rate, SMALL)
    return {
        "text_bytes": n_bytes,
        "patches": len(ids),
        "bytes_per_patch": rate,
        "bytes_per_patch_space": n_bytes / len(space_patches(text.encode("utf-8"))),
        "fertility": fertility(len(ids), word_count(text)),
        "symbols_per_patch_stop": symbols,
        "symbols_per_patch_full": float(full.lengths[ids].mean()),
        "encode_ns_per_patch": summarize_samples(
            [1e9 * s / len(ids) for s in call_seconds(trials, lambda: stop.encode(ids))]
        ),
        "flops_plain": plain_flops(*sizes, len(tokens)),
        "flops_patches_paper": hierarchical_flops(*sizes, LOCAL, len(merges.pairs)),
        "flops_patches_counted": hierarchical_flops(*sizes, LOCAL, merges.symbols, symbols),
        "flops_patches_padded": hierarchical_flops(*sizes, LOCAL, merges.symbols, size),
    }


def plain_flops(n_bytes: float, bytes_per_token: float, tower: Tower, vocabulary: int) -> float:
    """Returns the FLOPs of a plain token model on a text of `n_bytes` bytes.

    vocabulary: number of tokens in the model's softmax.
    """
    return transformer_flops(n_bytes / bytes_per_token, tower, vocabulary)


def text_to_ids_function(path: str) -> Callable[[str], Sequence[int]]:
    """Returns a function from text to a tokenizer's ids, without special ids.

    A path with .tiktoken in its name is read as tiktoken's format, any other as a tokenizer of `vocab hbpe`.
    """
    if ".tiktoken" in Path(path).name:
        return read_vocabulary(path).encode
    return read_text_encoder(path)


def summarize_call_ms(trials: int, call: Callable[[], Any]) -> dict[str, Any]:
    return summarize_samples([1e3 * seconds for seconds in call_seconds(trials, call)])


def call_seconds(trials: int, call: Callable[[], Any]) -> list[float]:
    """Returns the processor seconds of each of `trials` calls, after one warm-up call."""
    call()
    return [time_call(call, clock=time.process_time) for _ in range(trials)]


# ---- patches over bytes, as baselines

_WORD = re.compile(rb" ?[^\s]+|\s")
_LONGEST = 6  # maximum bytes of a patch, as in the paper
_WINDOWS_PER_CALL = 16  # windows per model call


def space_patches(data: bytes) -> list[bytes]:
    """Cuts bytes into patches: each word with the blank before it, and each other white-space byte.

    A word of more than `_LONGEST` bytes becomes several patches. Joined, the patches are `data`.
    """
    return [piece for word in _WORD.findall(data) for piece in _cut_long_patch(word)]


def entropy_patches(data: bytes, entropies: Any, threshold: float) -> list[bytes]:
    """Cuts n bytes into patches, before every byte whose entropy is above `threshold`.

    entropies [n]: entropy of a model's prediction of each byte from the preceding bytes. A stretch of more than
    `_LONGEST` bytes becomes several patches. Joined, the patches are `data`.
    """
    starts = np.flatnonzero(np.asarray(entropies) > threshold)
    cuts = sorted({0, *starts.tolist(), len(data)})
    return [piece for a, b in pairwise(cuts) for piece in _cut_long_patch(data[a:b])]


def byte_entropies(model: PlainModel, data: bytes, window: int) -> NDArray[np.float32]:
    """Returns the entropy, in nats, of a byte model's prediction of each byte, float32 [len(data)].

    window: number of bytes that the model reads at a time; predictions do not use the bytes before the window.
    """
    filled = np.frombuffer(data + bytes(-len(data) % window), np.uint8).reshape(-1, window).astype(np.int32)
    out = []
    for at in range(0, len(filled), _WINDOWS_PER_CALL):
        logits = model(mx.array(filled[at : at + _WINDOWS_PER_CALL]))
        logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        out.append(np.array(-(mx.exp(logs) * logs).sum(axis=-1)).reshape(-1))
    return np.concatenate(out)[: len(data)] if out else np.zeros(0, np.float32)


def number_patches(documents: Sequence[Iterable[bytes]], longest: int = _LONGEST) -> tuple[list[list[int]], PatchTable]:
    """Numbers distinct patches in order of appearance; returns (ids of each document, table of the patches).

    documents: the patches of each document, each of at most `longest` bytes. The table has no merges.
    """
    known: dict[bytes, int] = {}
    ids = [[known.setdefault(patch, len(known)) for patch in document] for document in documents]
    return ids, PatchTable.build(PatchMerges(longest + 1, ()), list(known))


def _cut_long_patch(data: bytes) -> list[bytes]:
    return [data[at : at + _LONGEST] for at in range(0, len(data), _LONGEST)]
