"""Makes a patch model from texts: tokenizer, patch table, training, model folder; and measures it on other texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlx_zip
from mlx_zip.errors import DataError, TrainingError
from mlx_zip.files import remove_partials, sole_user
from mlx_zip.models.patches.patch_model import PatchConfig, PatchModel, SavedPatchModel, parameters_of, save_patch_model
from mlx_zip.training.hbpe import Corpus, check_run, evaluate, train, windows
from mlx_zip.training.loop import stop_signals
from mlx_zip.training.run_folder import open_run
from mlx_zip.training.settings import TrainSettings
from mlx_zip.vocab.hbpe.measures import (
    FIT_LATENT,
    FIT_LOCAL,
    Tower,
    bits_per_byte,
    fertility,
    hierarchical_flops,
    words_of,
)
from mlx_zip.vocab.hbpe.text import PatchText, learn_tokenizer, read_tokenizer

MODEL = "model"  # folder inside the run's folder that a finished run writes


@dataclass(frozen=True)
class FitOptions:
    """The patch model to train.

    tokenizer: file of the tokenizer whose tokens become patches; None: a byte-level BPE of `vocab_size` tokens is
    learned. patch_size: maximum symbols per patch. mode: "stop" or "full", see `Merges`. context: patches per window.
    latent, local: sizes of the large transformer, and of the local encoder and decoder.
    """

    tokenizer: Path | None = None
    vocab_size: int = 4096
    patch_size: int = 10
    mode: str = "stop"
    context: int = 128
    latent: Tower = FIT_LATENT
    local: Tower = FIT_LOCAL

    def __post_init__(self) -> None:
        if self.context < 1:
            raise DataError(f"context must be at least 1, got {self.context}")


def fit(
    texts: Sequence[str], options: FitOptions, settings: TrainSettings, out: Path, quiet: bool = True
) -> SavedPatchModel:
    """Trains a patch model on documents, writes `out/model` and returns the saved model.

    texts: the documents. out: the run's folder; a run found there is continued from its last checkpoint. The first
    Ctrl-C or SIGTERM ends training after the current step, saves it and raises `Stopped`. Raises `DataError`,
    `ConfigError`, and `TrainingError` as `hbpe.train` does, if the folder holds something else, or if another process
    trains there.
    """
    text = _first_stage(texts, options)
    ids = windows([text.ids(one) for one in texts], text.end, options.context)
    corpus = Corpus(ids, text.unit_bytes, text.table.rows)
    mx.random.seed(settings.seed)
    merges = text.table.merges
    model = PatchModel(PatchConfig(merges.symbols, merges.patch_size, options.latent, options.local))
    check_run(model, corpus, settings)
    record = _record(texts, text, options, settings)
    open_run(out, record, sha256(json.dumps(record["fixed"], sort_keys=True).encode()).hexdigest(), "RUN")
    try:
        with sole_user(out) as alone:
            if not alone:
                raise TrainingError(f"another process trains in {out}; wait for it, or choose another RUN")
            remove_partials(out)
            with stop_signals() as asked:
                done = train(model, corpus, settings, out, quiet, asked=asked)
            source = {"progress": vars(done), "settings": settings.to_dict(), "train_bytes": corpus.n_bytes}
            saved = SavedPatchModel(model, text, options.context, source)
            save_patch_model(out / MODEL, saved)
    except OSError as error:
        raise TrainingError(f"{out}: {error.strerror or error}") from error
    return saved


def evaluate_texts(saved: SavedPatchModel, texts: Sequence[str], batch_size: int = 16) -> dict[str, Any]:
    """Measures a patch model on documents. Raises `DataError` for texts without bytes.

    The documents, each followed by an end mark, are read in windows of `saved.context` patches; the last is shorter.
    Returns bits_per_byte, bytes, documents, patches, bytes_per_patch, symbols_per_patch, fertility (patches per word;
    None without words), forward_flops_per_byte (counted as in the paper, for the mean symbols per patch of these
    texts), parameters, and exact: whether the patches spell the texts byte by byte.
    """
    ids = windows([saved.text.ids(one) for one in texts], saved.text.end, 1).reshape(-1)
    whole = len(ids) // saved.context * saved.context
    parts = [part.reshape(-1, n) for part, n in ((ids[:whole], saved.context), (ids[whole:], len(ids) - whole)) if n]
    corpora = [Corpus(part, saved.text.unit_bytes, saved.text.table.rows) for part in parts if part.size]
    found = [evaluate(saved.model, corpus, batch_size) for corpus in corpora]
    n_bytes, lengths = sum(one["bytes"] for one in found), saved.text.table.lengths[ids]
    if not n_bytes:
        raise DataError("the texts have no bytes: there is nothing to measure")
    words, config, window = sum(map(words_of, texts)), saved.model.config, saved.context * n_bytes / len(ids)
    symbols, spelled = float(lengths.mean()), saved.text.table.tokens
    flops = hierarchical_flops(window, n_bytes / len(ids), config.latent, config.local, config.symbols, symbols)
    return {
        "bits_per_byte": bits_per_byte(sum(one["nats"] for one in found), n_bytes),
        "bytes": n_bytes,
        "documents": len(texts),
        "patches": len(ids),
        "bytes_per_patch": n_bytes / len(ids),
        "symbols_per_patch": symbols,
        "fertility": fertility(len(ids), words) if words else None,
        "forward_flops_per_byte": flops / window,
        "parameters": parameters_of(saved.model),
        "exact": b"".join(spelled[i] for i in ids.tolist()) == "".join(texts).encode("utf-8"),
    }


def _first_stage(texts: Sequence[str], options: FitOptions) -> PatchText:
    """Returns the tokenizer of the options, or one learned from the texts, with its table of patches."""
    if options.tokenizer is None:
        tokenizer = learn_tokenizer(texts, options.vocab_size)
    else:
        tokenizer = read_tokenizer(options.tokenizer)
    return PatchText.learn(tokenizer, options.patch_size, options.mode)


def _record(texts: Sequence[str], text: PatchText, options: FitOptions, settings: TrainSettings) -> dict[str, Any]:
    """Returns the record by which `open_run` knows the run again: settings, options, and a digest of the texts."""
    digest = sha256()
    for one in texts:
        digest.update(one.encode("utf-8") + b"\0")
    fixed = settings.deciding()
    tokenizer = None if options.tokenizer is None else text.table.fingerprint
    return {
        "fixed": {"settings": {**fixed, **asdict(options), "tokenizer": tokenizer}},
        "data": digest.hexdigest(),
        "encoder": None,
        "mlx_zip": mlx_zip.__version__,
    }
