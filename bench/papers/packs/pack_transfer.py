"""Measures packs on text unlike the training text: gain and cost in reading and writing, compared with no pack.

The pack is learned from the first half of the documents; the second half is held out. Bits per byte are strict, as in
`bench pack_quality`. The model also continues the openings of held-out documents. The gain in writing is compared with
two possible gains: the gain of the canonical ids of the written text, and that of the canonical ids of the documents'
own continuations.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from mlx_zip.arguments import add_separator_flag, check_flags_at_least, default_flags
from mlx_zip.codec import Codebook
from mlx_zip.engine.mlx.generate import load
from mlx_zip.engine.mlx.scoring import codec_of_model
from mlx_zip.errors import MlxZipError
from mlx_zip.evaluation.bits import cut_scored_windows
from mlx_zip.evaluation.rates import RateSettings, count_canonical_steps, measure_rates
from mlx_zip.packs.learner import WINDOW, learn_pack
from mlx_zip.packs.pack import Pack, merge_packs
from mlx_zip.text.conversations import Prompt, document_openings
from mlx_zip.text.documents import Document, read_corpus
from mlx_zip.text.prompts import encode_prompt
from mlx_zip.text.token_facts import encode_with_bytes
from mlx_zip.vocab.first_stage import tokenizer_fingerprint

from .pack_quality import CONTEXT, Named, add_models, check_packs, read_packs, record_names, score_packs

SIZES, OPENING, TOKENS, STORIES = (256, 1024), 32, 128, 24
TEMPERATURES = {"greedy": 0.0, "sampled": 0.7}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench pack_transfer` to a parser."""
    add = parser.add_argument
    flag = default_flags(add)
    add_models(add)
    add(
        "--codebook-size",
        type=int,
        metavar="N",
        help="maximum number of hypertokens in the codebook of --model (default: the model's own)",
    )
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="texts of a kind that training never saw, .txt or .jsonl files, also with .gz: a pack is learned from the "
        "first half of the documents, the second half is held out",
    )
    add_separator_flag(add)
    add(
        "--limit-bytes",
        type=int,
        metavar="N",
        help="score at most N bytes of held-out text, in whole documents (default: all)",
    )
    flag("--sizes", list(SIZES), "numbers of entries in a pack, measured one by one", metavar="N")
    flag("--window", WINDOW, "compress every N base ids separately while a pack is learned", metavar="N")
    add(
        "--pack",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="other pack files to measure at the same --sizes, for example one learned from the training text "
        "(default: none)",
    )
    flag("--stories", STORIES, "number of held-out documents whose opening the model continues", metavar="N")
    flag("--opening", OPENING, "base ids in each opening", metavar="N")
    flag("--tokens", TOKENS, "number of base ids to write after each opening", metavar="N")
    flag("--batch-size", 8, "windows or openings per model call")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the record of the model without a pack, then for each size those of the learned pack and each --pack.

    Raises `MlxZipError` if a flag or file cannot be used, before anything is measured.
    """
    check_flags_at_least(args, 1, "sizes", "window", "stories", "opening", "tokens")
    given = read_packs(args.pack)
    (model, tokenizer), (base, _) = load(args.model, codebook_size=args.codebook_size), load(args.base)
    known, held_out = split_at_half_of_bytes(read_corpus(args.data, args.separator).documents)
    opened = cut_openings(tokenizer, held_out, args)
    sizes = sorted(set(args.sizes))
    packs = [pack for size in sizes for pack in learn_packs_of_size(size, model, tokenizer, known, given, args.window)]
    check_packs(packs, model, tokenizer)
    read = documents_within_limit(held_out, args.limit_bytes)
    windows = cut_scored_windows(tokenizer, read, CONTEXT)
    fixed = {
        "bench": "pack_transfer",
        **record_names(args),
        "learned_documents": len(known),
        "learned_bytes": sum(document.n_bytes for document in known),
        "documents": len(read),
        "codebook_size": model.config.codec_params.codebook_size,
        "window": args.window,
        "stories": args.stories,
        "opening": args.opening,
        "tokens": args.tokens,
    }
    for pack, line in score_packs(model, base, windows, packs, args.batch_size):
        line |= measure_writing(model, tokenizer, opened, pack, args)
        rates = ", ".join(f"{name} {line[name]['base_tokens_per_step']:.3f}" for name in TEMPERATURES)
        print(f"{line['curve']} {line['entries']}: {line['bits_per_byte']:.4f} bits/byte; {rates}", file=sys.stderr)
        yield {**fixed, **line}


def split_at_half_of_bytes(documents: Sequence[Document]) -> tuple[Sequence[Document], Sequence[Document]]:
    """Splits documents at half of their bytes, with at least one document on each side.

    Raises `MlxZipError` if there is only one document.
    """
    if len(documents) < 2:
        raise MlxZipError("--data holds one document: one to learn from and one to try are needed (--separator?)")
    ends = list(accumulate(document.n_bytes for document in documents))
    at = sum(2 * end <= ends[-1] for end in ends)
    at = min(max(at, 1), len(documents) - 1)
    return documents[:at], documents[at:]


def documents_within_limit(documents: Sequence[Document], limit: int | None) -> Sequence[Document]:
    ends = accumulate(document.n_bytes for document in documents)
    return documents if limit is None else documents[: max(1, sum(end <= limit for end in ends))]


def learn_packs_of_size(
    size: int, model: Any, tokenizer: Any, known: Sequence[Document], given: Sequence[Named], window: int
) -> list[Named]:
    """Returns a pack of `size` entries learned from `known`, then each given pack cut to its first `size` entries.

    window: learning compresses every `window` base ids separately.
    """
    texts = [encode_with_bytes(tokenizer, document.text)[0] for document in known]
    found = learn_pack(model.config.codec_params, texts, size, window=window)
    learned = Pack(found.entries, tokenizer_fingerprint(tokenizer))
    return [("learned", None, learned), *((curve, file, merge_packs([pack], size)) for curve, file, pack in given)]


Opened = tuple[Prompt, list[int]]  # a document's opening, and the base ids that follow it


def cut_openings(tokenizer: Any, documents: Sequence[Document], args: argparse.Namespace) -> list[Opened]:
    """Returns opening and continuation of the first --stories documents with at least --opening + --tokens base ids.

    Raises `MlxZipError` if there are fewer than --stories such documents.
    """
    opened: list[Opened] = []
    for document in documents:
        ids = encode_with_bytes(tokenizer, document.text)[0][args.opening : args.opening + args.tokens].tolist()
        if len(ids) == args.tokens and len(opened) < args.stories:
            opened.append((document_openings(tokenizer, [document], args.opening)[0], ids))
    if len(opened) < args.stories:
        raise MlxZipError(
            f"{len(opened)} held-out documents are {args.opening} + {args.tokens} base ids long, not {args.stories}: "
            "lower --stories, --opening or --tokens"
        )
    return opened


def measure_writing(
    model: Any, tokenizer: Any, opened: Sequence[Opened], pack: Pack, args: argparse.Namespace
) -> dict[str, Any]:
    """Continues the openings with a pack; returns base tokens per step and shares of the possible gain, by temperature.

    A gain is base tokens per step minus 1. of_gain: the model's gain divided by the gain of the canonical ids of the
    written text. of_own_gain: the model's gain divided by the gain of the canonical ids of the documents' own
    continuations. A share is None if no gain was possible.
    """
    own = sum(
        count_canonical_steps(Codebook(codec_of_model(model, pack)), encode_prompt(tokenizer, prompt), ids)
        for prompt, ids in opened
    )
    own_rate = sum(len(ids) for _, ids in opened) / own
    line: dict[str, Any] = {"own_base_tokens_per_step": own_rate}
    for name, temp in TEMPERATURES.items():
        settings = RateSettings(max_tokens=args.tokens, temp=temp, batch_size=args.batch_size, pack=pack)
        record = measure_rates(model, tokenizer, [[prompt] for prompt, _ in opened], settings).record()
        names = (
            "stories",
            "base_tokens",
            "steps",
            "base_tokens_per_step",
            "canonical_base_tokens_per_step",
            "hyper_share",
            "invalid_ids",
            "repeated_4grams",
            "ended",
        )
        found = {key: record[key] for key in names}
        rate = found["base_tokens_per_step"]
        line[name] = {
            **found,
            "of_gain": share_of_possible_gain(rate, found["canonical_base_tokens_per_step"]),
            "of_own_gain": share_of_possible_gain(rate, own_rate),
        }
    return line


def share_of_possible_gain(rate: float, possible: float) -> float | None:
    """Returns (rate - 1) / (possible - 1); None if `possible` is at most 1."""
    return (rate - 1) / (possible - 1) if possible > 1 else None
