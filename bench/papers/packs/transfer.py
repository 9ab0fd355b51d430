"""A pack for text that training never saw: what it brings and costs, read and written, compared with an empty start.

The documents' first half is learned from, the second is held out. Bits per byte are strict, as in `bench pack_quality`.
The model also continues the openings of held-out documents. The steps it takes are compared with the canonical ids of
what it wrote, and with those of how the documents themselves continue: both say what gain was possible.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from mlx_zip.bench.record import surroundings
from mlx_zip.codec import Codebook
from mlx_zip.errors import MlxZipError
from mlx_zip.evaluation.bits import measure_bits
from mlx_zip.evaluation.rates import Settings, canonical_steps, measure_rates
from mlx_zip.evaluation.scoring import codec
from mlx_zip.evaluation.windows import cut_windows
from mlx_zip.text.conversations import Prompt, openings
from mlx_zip.text.documents import Document, read_corpus
from mlx_zip.text.prompts import encode_prompt
from mlx_zip.text.token_facts import encode_with_bytes
from mlx_zip.vocab.first_stage import tokenizer_fingerprint
from mlx_zip.vocab.learner import WINDOW, learn
from mlx_zip.vocab.packs import Pack, merge_packs
from mlx_zip.vocab.tuned import AnyStart

from .quality import CONTEXT, Named, add_models, check_packs, names_of, read_packs, scored

SIZES, OPENING, TOKENS, STORIES = (256, 1024), 32, 128, 24
TEMPERATURES = {"greedy": 0.0, "sampled": 0.7}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench pack_transfer`."""
    add = parser.add_argument
    add_models(add, required=True)
    add("--codebook-size", type=int, metavar="N", help="slots of the codebook (default: as in the model's config)")
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="documents of the other kind, as `mlx_zip evaluate --data`: the first half is learned from",
    )
    add("--separator", help="line that ends a document of a text file (default: a file is one document)")
    add(
        "--limit-bytes",
        type=int,
        metavar="N",
        help="bytes of held-out text to score at most, whole documents (default: all)",
    )
    add("--sizes", type=int, nargs="+", default=list(SIZES), metavar="N", help="entries of a pack (default: 256 1024)")
    add("--window", type=int, default=WINDOW, help=f"base ids compressed on their own in learning (default: {WINDOW})")
    add(
        "--pack",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="packs of other texts, for example of the training's, to measure at the same sizes",
    )
    add("--stories", type=int, default=STORIES, metavar="N", help=f"documents to continue (default: {STORIES})")
    add("--opening", type=int, default=OPENING, metavar="N", help=f"base ids of each opening (default: {OPENING})")
    add(
        "--tokens",
        type=int,
        default=TOKENS,
        metavar="N",
        help=f"base ids to write after an opening (default: {TOKENS})",
    )
    add("--batch-size", type=int, default=8, help="texts scored or written at a time (default: 8)")


def run(args: argparse.Namespace) -> int:
    """Prints one JSON line per start. Raises `MlxZipError` before anything long."""
    for name, values in (
        ("sizes", args.sizes),
        ("window", [args.window]),
        ("stories", [args.stories]),
        ("opening", [args.opening]),
        ("tokens", [args.tokens]),
    ):
        if low := [n for n in values if n < 1]:
            raise MlxZipError(f"--{name} must be at least 1, got {low[0]}")
    for line in measure(args):
        print(json.dumps(line), flush=True)
    return 0


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for the empty start, then one per size and pack, the learned one first."""
    from mlx_zip.generate import load

    given = read_packs(args.pack)
    (model, tokenizer), (base, _) = load(args.model, codebook_size=args.codebook_size), load(args.base)
    known, held_out = halves(read_corpus(args.data, args.separator).documents)
    told = begun(tokenizer, held_out, args)
    sizes = sorted(set(args.sizes))
    packs = [pack for size in sizes for pack in _of_size(size, model, tokenizer, known, given, args.window)]
    check_packs(packs, model, tokenizer)
    read = _within(held_out, args.limit_bytes)
    windows = cut_windows(tokenizer, read, CONTEXT)
    control = measure_bits(base, windows, args.batch_size)
    empty = measure_bits(model, windows, args.batch_size, start=())
    fixed = {
        "bench": "pack_transfer",
        **names_of(args),
        "learned_documents": len(known),
        "learned_bytes": sum(document.n_bytes for document in known),
        "documents": len(read),
        "codebook_size": model.config.codec_params.codebook_size,
        "window": args.window,
        "stories": args.stories,
        "opening": args.opening,
        "tokens": args.tokens,
        "base_bits_per_byte": control.bits_per_byte,
    }
    for curve, file, pack in [("empty", None, Pack(())), *packs]:
        bits = measure_bits(model, windows, args.batch_size, start=pack.start) if pack.entries else empty
        line = {"curve": curve, "pack": file or None, "entries": len(pack.entries), **scored(bits, control, empty)}
        line |= writing(model, tokenizer, told, pack.start, args)
        rates = ", ".join(f"{name} {line[name]['base_tokens_per_step']:.3f}" for name in TEMPERATURES)
        print(f"{curve} {line['entries']}: {bits.bits_per_byte:.4f} bits/byte; {rates}", file=sys.stderr)
        yield {**fixed, **line, **surroundings("mlx")}


def halves(documents: Sequence[Document]) -> tuple[Sequence[Document], Sequence[Document]]:
    """Documents up to half of the bytes, one at least, and the others. Raises `MlxZipError` for a single document."""
    if len(documents) < 2:
        raise MlxZipError("--data holds one document: one to learn from and one to try are needed (--separator?)")
    ends = list(accumulate(document.n_bytes for document in documents))
    at = sum(2 * end <= ends[-1] for end in ends)
    at = min(max(at, 1), len(documents) - 1)
    return documents[:at], documents[at:]


def _within(documents: Sequence[Document], limit: int | None) -> Sequence[Document]:
    """Returns the first documents that together have at most `limit` bytes, one at least."""
    ends = accumulate(document.n_bytes for document in documents)
    return documents if limit is None else documents[: max(1, sum(end <= limit for end in ends))]


def _of_size(
    size: int, model: Any, tokenizer: Any, known: Sequence[Document], given: Sequence[Named], window: int
) -> list[Named]:
    """Returns the learned pack, and the best `size` entries of each given pack."""
    texts = [encode_with_bytes(tokenizer, document.text)[0] for document in known]
    found = learn(model.config.codec_params, texts, size, window=window)
    learned = Pack(found.entries, tokenizer_fingerprint(tokenizer))
    return [("learned", "", learned), *((curve, file, merge_packs([pack], size)) for curve, file, pack in given)]


Told = tuple[Prompt, list[int]]  # a document's opening, and the base ids that follow it


def begun(tokenizer: Any, documents: Sequence[Document], args: argparse.Namespace) -> list[Told]:
    """Returns the first documents that are long enough. Raises `MlxZipError` when there are too few."""
    told: list[Told] = []
    for document in documents:
        ids = encode_with_bytes(tokenizer, document.text)[0][args.opening : args.opening + args.tokens].tolist()
        if len(ids) == args.tokens and len(told) < args.stories:
            told.append((openings(tokenizer, [document], args.opening)[0], ids))
    if len(told) < args.stories:
        raise MlxZipError(
            f"{len(told)} held-out documents are {args.opening} + {args.tokens} base ids long, not {args.stories}: "
            "lower --stories, --opening or --tokens"
        )
    return told


def writing(
    model: Any, tokenizer: Any, told: Sequence[Told], start: AnyStart, args: argparse.Namespace
) -> dict[str, Any]:
    """Rates of what the model writes, by temperature, and of what the documents themselves go on with.

    of_gain: what steps save, of what the canonical ids of the same text would save; of_own_gain: of what those of the
    documents' own text save. None where that is nothing.
    """
    own = sum(
        canonical_steps(Codebook(codec(model, start)), encode_prompt(tokenizer, prompt.content), ids)
        for prompt, ids in told
    )
    own_rate = sum(len(ids) for _, ids in told) / own
    line: dict[str, Any] = {"own_base_tokens_per_step": own_rate}
    for name, temp in TEMPERATURES.items():
        settings = Settings(max_tokens=args.tokens, temp=temp, batch_size=args.batch_size, start=start)
        record = measure_rates(model, tokenizer, [[prompt] for prompt, _ in told], settings).record()
        kept = (
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
        found = {key: record[key] for key in kept}
        rate = found["base_tokens_per_step"]
        line[name] = {
            **found,
            "of_gain": _share(rate, found["canonical_base_tokens_per_step"]),
            "of_own_gain": _share(rate, own_rate),
        }
    return line


def _share(rate: float, possible: float) -> float | None:
    return (rate - 1) / (possible - 1) if possible > 1 else None
