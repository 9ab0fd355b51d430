"""AdaptBPE on a model with trained weights: bits per byte of held-out text before and after its vocabulary is adapted.

For each text, the model's tokenizer is adapted to the training part, `mlx_zip vocab adapt convert` writes the smaller
model, and the test part is scored strictly, as by `mlx_zip evaluate`; the adapted model's softmax is over the rows
kept. Models with the first N merges and with the N most frequent merges are scored for comparison; N is a share of the
merge list. The first line of each text is the whole model's.

A line's field `where` splits bits per byte in two: bits of tokens that both tokenizations of the test part share, and
bits of all other tokens, which the adapted tokenizer splits. Source of the method: arXiv 2601.21665, which reports
perplexities of other models.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip.arguments import add_limit_bytes_flag, add_separator_flag, default_flags
from mlx_zip.bench.engines.mlx_engines import weight_bytes
from mlx_zip.bench.tokens import corpus_record, read_domains
from mlx_zip.engine.mlx.scoring import compress_row, context_limit, score_rows
from mlx_zip.errors import DataError, MlxZipError
from mlx_zip.evaluation.bits import count_window_bits, cut_scored_windows, ratio_standard_error
from mlx_zip.layout import has_hypertokens
from mlx_zip.text.documents import Document
from mlx_zip.text.token_facts import encode_with_bytes
from mlx_zip.vocab.adaptbpe.adapted import METHODS, AdaptedVocabulary, adapt_vocabulary, count_words
from mlx_zip.vocab.adaptbpe.base_vocabulary import BaseVocabulary, read_base_vocabulary

CONTEXT = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench adapt_model` to a parser."""
    add = parser.add_argument
    flag = default_flags(add)
    flag("--model", "stories-base", "plain or zip2zip model to adapt: a folder or the name of a bundled model")
    add(
        "--train",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="texts to adapt to, each with a name; FILE as in `bench tokens --text`",
    )
    add(
        "--test",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="held-out texts to measure bits per byte on; each NAME must also be in --train",
    )
    add_separator_flag(add)
    flag("--shares", [0.25, 0.5, 0.75], "shares of the tokenizer's merges to keep, between 0 and 1", metavar="SHARE")
    add(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        help="which merges to keep: first-k: the first of the list; top-k: the most frequent ones in --train; adapt: "
        "those that AdaptBPE chooses (default: all three)",
    )
    add_limit_bytes_flag(add, "each text of --test")
    add_limit_bytes_flag(add, "each text of --train", "--limit-train-bytes")
    flag("--batch-size", 8, "windows per model call")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a record per text, share and method. Raises `MlxZipError` if a flag or file cannot be used."""
    if not args.train:
        raise MlxZipError("--train is missing")
    if wrong := [share for share in args.shares if not 0 < share < 1]:
        raise MlxZipError(f"--shares {wrong[0]:g} is not between 0 and 1")
    train = read_domains(args.train, args.limit_train_bytes, args.separator)
    test = read_domains(args.test, args.limit_bytes, args.separator)
    if train.keys() != test.keys():
        raise DataError(f"--train and --test name different texts: {', '.join(sorted(train.keys() ^ test.keys()))}")
    models = AdaptedModels(args)
    for name, corpus in train.items():
        words = count_words(models.base.splitter, [document.text for document in corpus.documents])
        whole = models.score(models.folder, test[name].documents)
        head = {"bench": "adapt_model", "model": models.folder.name, "text": name}
        texts = {"train_bytes": corpus.n_bytes, "test": corpus_record(test[name])}
        yield head | models.make_record(whole, whole) | texts
        for share in args.shares:
            for method in args.methods:
                yield head | models.adapt_and_score(words, share, method, test[name].documents, whole) | texts


@dataclass(frozen=True)
class ModelScore:
    """A model's score on a text. record: fields of the record, with the model's size. bits_per_byte: not rounded.

    spans: for each document, the (first byte, end) of each token. bits: for each document, the bits of each token. Both
    are empty for a zip2zip model, and if a document fills several windows.
    """

    bits_per_byte: float
    n_bytes: int
    record: Mapping[str, Any]
    spans: tuple[Any, ...] = ()
    bits: tuple[Any, ...] = ()


class AdaptedModels:
    """Adapts one model and scores the results. args: the flags. folder, base: the model's folder and vocabulary."""

    def __init__(self, args: argparse.Namespace) -> None:
        from mlx_zip.models.loading import find_model_folder

        self.args, self.folder = args, Path(find_model_folder(args.model))
        self.base: BaseVocabulary = read_base_vocabulary(self.folder)

    def adapt_and_score(
        self, words: Counter[bytes], share: float, method: str, documents: Any, whole: ModelScore
    ) -> dict[str, Any]:
        """Adapts the model to a share of its merges, scores it on the documents, and returns the record.

        words: how often each word occurs in the training text. whole: the unadapted model's score.
        """
        n = round(share * self.base.n_merges)
        kept = adapt_vocabulary(self.base, words, n, method=method)
        with tempfile.TemporaryDirectory() as folder:
            file, out = Path(folder, "adapted.json"), Path(folder, "model")
            kept.save(file)
            convert_model_for_vocabulary(self.folder, file, out)
            found = self.score(out, documents)
        return self.make_record(found, whole, kept) | {"share": share, "merges": n, "method": method}

    def score(self, folder: Path, documents: Sequence[Document]) -> ModelScore:
        """Loads the model in a folder and scores the documents with it, strictly."""
        from mlx_zip.engine.mlx.generate import load

        model, tokenizer = load(folder)
        windows = cut_scored_windows(tokenizer, documents, min(CONTEXT, context_limit(model) or CONTEXT))
        prefix = np.array([windows.prefix], np.uint32)
        rows = [compress_row(model, prefix, window.base_ids) for window in windows.windows]
        scored = score_rows(model, rows, self.args.batch_size)
        bits = np.array([count_window_bits(*parts) for parts in zip(windows.windows, rows, scored, strict=True)])
        n_bytes = np.array([window.n_bytes for window in windows.windows])
        by_document = not has_hypertokens(model) and len(windows.windows) == len(documents)
        whole, error = float(bits.sum() / n_bytes.sum()), ratio_standard_error(bits, n_bytes)
        tokens = sum(len(window.base_ids) for window in windows.windows)
        record = {
            "vocab_size": model.layout.vocab_size if has_hypertokens(model) else model.args.vocab_size,
            "bits_per_byte": round(whole, 5),
            "standard_error": None if error is None else round(error, 5),
            "utility": round(1 - tokens / int(n_bytes.sum()), 5),
            "tokens": tokens,
            "ids": sum(len(row.ids) - 1 for row in rows),
            "file_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
            "step_weight_bytes": weight_bytes(model),
        }
        spans = tuple(token_spans(tokenizer, document.text) for document in documents) if by_document else ()
        return ModelScore(
            whole,
            int(n_bytes.sum()),
            record,
            spans,
            tuple(-row.logprobs / math.log(2) for row in scored) if by_document else (),
        )

    def make_record(
        self, found: ModelScore, whole: ModelScore, kept: AdaptedVocabulary | None = None
    ) -> dict[str, Any]:
        """Returns the record of a model's result, with its differences from the unadapted model's result `whole`.

        kept: the adapted vocabulary; None for the unadapted model.
        """
        return {
            "share": 1,
            "merges": self.base.n_merges,
            "method": "whole list",
            "virtual": len(kept.virtual) if kept is not None and kept.method == "adapt" else 0,
            **found.record,
            "change": round(found.bits_per_byte / whole.bits_per_byte - 1, 5),
            "where": bits_on_split_tokens(found, whole) if found.bits and whole.bits else None,
        }


def convert_model_for_vocabulary(model: Path, vocabulary: Path, out: Path) -> None:
    """Writes the model for an adapted vocabulary to `out` by `mlx_zip vocab adapt convert`, in a separate process.

    Raises `MlxZipError` with the error message of that process if it fails.
    """
    words = ["vocab", "adapt", "convert", str(vocabulary), "--model", str(model), "--out", str(out)]
    done = subprocess.run([sys.executable, "-m", "mlx_zip", *words], capture_output=True, text=True)
    if done.returncode:
        raise MlxZipError(f"mlx_zip {' '.join(words)}: {done.stderr.strip()}")


def token_spans(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    ends = np.cumsum(encode_with_bytes(tokenizer, text)[1]).tolist()
    return list(zip([0, *ends], ends, strict=False))


def bits_on_split_tokens(found: ModelScore, whole: ModelScore) -> dict[str, Any]:
    """Splits the bits per byte of the whole model (before) and of the adapted model (after) by kind of token.

    "same": tokens that both tokenizations have at the same place; "split": all other tokens. All bits are divided by
    the bytes of the whole text. Also counts the bytes of split tokens, and the split tokens before and after.
    """
    spent = np.zeros((2, 2))  # bits: rows whole model, adapted model; columns same, split
    others, split_bytes = [0, 0], 0  # split tokens of either model; bytes that they cover
    for document in range(len(whole.spans)):
        same = set(whole.spans[document]) & set(found.spans[document])
        for side, result in enumerate((whole, found)):
            split = np.array([span not in same for span in result.spans[document]])
            spent[side] += [result.bits[document][~split].sum(), result.bits[document][split].sum()]
            others[side] += int(split.sum())
        split_bytes += sum(end - begin for begin, end in whole.spans[document] if (begin, end) not in same)
    per_byte = np.round(spent / whole.n_bytes, 5).tolist()
    return {
        "split_bytes": split_bytes,
        "tokens_before": others[0],
        "tokens_after": others[1],
        "bits_per_byte_before": {"same": per_byte[0][0], "split": per_byte[0][1]},
        "bits_per_byte_after": {"same": per_byte[1][0], "split": per_byte[1][1]},
    }
