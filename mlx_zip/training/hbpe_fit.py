"""A model over patches from texts to a model folder: first stage, table, training; and its measure on other texts."""

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
from mlx_zip.models.hbpe import PatchConfig, PatchModel, parameters_of
from mlx_zip.models.hbpe_folder import SavedPatchModel, save_patch_model
from mlx_zip.training.hbpe import Corpus, check_run, evaluate, train, windows
from mlx_zip.training.run_folder import open_run
from mlx_zip.training.settings import TrainSettings
from mlx_zip.training.stopping import stop_signals
from mlx_zip.vocab.hbpe_measures import (
    FIT_LATENT,
    FIT_LOCAL,
    Tower,
    bits_per_byte,
    fertility,
    hierarchical_flops,
    words_of,
)
from mlx_zip.vocab.hbpe_text import PatchText
from mlx_zip.vocab.hbpe_tokens import learn_tokenizer, read_tokenizer

MODEL = "model"  # of a run's folder: what a finished run leaves


@dataclass(frozen=True)
class FitOptions:
    """What is trained. tokenizer: file of the first stage, None: a byte-level BPE of `vocab_size` tokens is learned.

    context: patches of a window. latent, local: the transformers.
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
    """Trains in the folder `out`, on from its last checkpoint, and leaves `out/model`.

    texts: the documents. The first Ctrl-C or SIGTERM ends training after the next step, which is saved: raises
    `Stopped`. Raises `DataError`, `ConfigError`, and `TrainingError` as `hbpe.train` does, when the folder holds
    something else, or when another process trains there.
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
    """Bits per byte of documents, each followed by its end, in windows of `saved.context` patches, the last shorter.

    Also bytes, patches, symbols_per_patch, bytes_per_patch, fertility (patches per word), forward_flops_per_byte
    (paper's count, with the symbols that there are) and exact: whether the patches spell the texts.
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
    if options.tokenizer is None:
        tokenizer = learn_tokenizer(texts, options.vocab_size)
    else:
        tokenizer = read_tokenizer(options.tokenizer)
    return PatchText.learn(tokenizer, options.patch_size, options.mode)


def _record(texts: Sequence[str], text: PatchText, options: FitOptions, settings: TrainSettings) -> dict[str, Any]:
    """What makes a run this run, as `open_run` takes it."""
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
