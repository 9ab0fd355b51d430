"""Trains and measures patch models, and plain models for comparison, from random weights.

A run's steps depend only on its seed, settings and data. A resumed run gives the results of an uninterrupted run, on a
GPU up to rounding. Optimizers, schedule and clipping are those of `mlx_zip train`. `fit_patch_model` makes a patch
model from texts: tokenizer, patch table, training, model folder.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

import mlx_zip
from mlx_zip.errors import DataError, TrainingError, errors_as
from mlx_zip.files import remove_unfinished_files
from mlx_zip.models.patches.patch_model import (
    PatchConfig,
    PatchModel,
    PlainModel,
    SavedPatchModel,
    count_parameters,
    save_patch_model,
)
from mlx_zip.progress import pluralize
from mlx_zip.training.checkpoints import Progress, load_last_checkpoint, save_checkpoint
from mlx_zip.training.run_folder import MetricsLog, open_run_folder
from mlx_zip.training.settings import ADDED_LATER, TrainSettings
from mlx_zip.training.steps.stepper import clip_gradients, last_learning_rate, make_optimizer
from mlx_zip.training.trainer import StopAsked, TrainingStopped, catch_stop_signals, train_to_step
from mlx_zip.vocab.hbpe.measures import (
    FIT_LATENT,
    FIT_LOCAL,
    Tower,
    bits_per_byte,
    fertility,
    hierarchical_flops,
    word_count,
)
from mlx_zip.vocab.hbpe.patch_merges import MARK
from mlx_zip.vocab.hbpe.patch_text import PatchText, learn_tokenizer, read_hf_tokenizer

Uint32s = NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class PatchCorpus:
    """A text cut into W windows of T ids.

    ids uint32 [W, T]. unit_bytes int64 [V]: number of bytes per id. rows uint16 [V, S]: each id's patch of up to S
    symbols, padded with `MARK`; None for a model that reads ids. Raises `DataError` if there is no window, or if an id
    is outside the vocabulary.
    """

    ids: Uint32s
    unit_bytes: NDArray[np.int64]
    rows: NDArray[np.uint16] | None = None

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or not self.ids.size:
            raise DataError("the text does not fill one window: take shorter windows, or more text")
        units = len(self.unit_bytes) if self.rows is None else min(len(self.unit_bytes), len(self.rows))
        if self.ids.max() >= units:
            raise DataError(f"id {self.ids.max()} of the text is not below the {units} of its vocabulary")

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Number of symbols in each id's patch, including the end mark, int64 [V]."""
        assert self.rows is not None
        marked = self.rows == MARK
        return np.where(marked.any(axis=1), marked.argmax(axis=1) + 1, self.rows.shape[1])

    @property
    def n_bytes(self) -> int:
        """Number of bytes of text in all windows."""
        return int(self.unit_bytes[self.ids].sum())

    def fingerprint(self) -> str:
        """Returns a hex digest of `ids`, `unit_bytes` and `rows`."""
        digest = sha256(repr(self.ids.shape).encode())
        for part in (self.ids, self.unit_bytes, self.rows):
            digest.update(b"" if part is None else part.tobytes())
        return digest.hexdigest()


def cut_patch_windows(documents: Sequence[Sequence[int]], end: int, length: int) -> Uint32s:
    """Joins documents, each followed by the id `end`, and cuts them to windows [W, length]; drops the last ids."""
    ids = np.fromiter((i for document in documents for i in (*document, end)), np.uint32)
    whole = len(ids) // length
    return ids[: whole * length].reshape(whole, length)


def sum_window_nats(model: PatchModel | PlainModel, corpus: PatchCorpus, ids: Uint32s) -> mx.array:
    """Returns the summed negative log-likelihood of windows `ids` [B, T], in nats.

    A patch model predicts every symbol of every patch, including end marks; a plain model predicts every id.
    """
    if isinstance(model, PlainModel):
        targets = mx.array(ids.astype(np.int32))
        return nn.losses.cross_entropy(model(targets), targets, reduction="sum")
    return _sum_patch_nats(model, corpus, ids)


def _sum_patch_nats(model: PatchModel, corpus: PatchCorpus, ids: Uint32s) -> mx.array:
    """Returns `sum_window_nats` of a patch model.

    Each distinct patch is encoded once, the decoder runs up to the longest patch, and the head skips padding.
    """
    assert corpus.rows is not None
    kinds, index = np.unique(ids, return_inverse=True)
    lengths = corpus.lengths[ids.reshape(-1)]
    longest = int(lengths.max())
    symbols = corpus.rows[ids.reshape(-1), :longest].astype(np.int32)
    places = np.flatnonzero(np.arange(longest) < lengths[:, None])
    e = model.encode_patches(mx.array(corpus.rows[kinds].astype(np.int32)))[mx.array(index.reshape(ids.shape))]
    h = model.latent_states(e).reshape(len(lengths), -1)
    states = model.states(h, mx.array(symbols[:, :-1]))
    logits = model.head(states.reshape(-1, states.shape[-1])[mx.array(places)])
    return nn.losses.cross_entropy(logits, mx.array(symbols.reshape(-1)[places]), reduction="sum")


def _check_corpus_ids_known(model: PatchModel | PlainModel, corpus: PatchCorpus) -> None:
    """Raises `DataError` unless all ids or symbols of the text are in the model's vocabulary; MLX does not check."""
    if isinstance(model, PlainModel):
        units, known = int(corpus.ids.max()) + 1, model.config.vocab_size
    elif corpus.rows is None or corpus.rows.shape[1] != model.config.patch_size:
        has = "no patches" if corpus.rows is None else f"patches of {corpus.rows.shape[1]} symbols"
        raise DataError(f"the model reads patches of {model.config.patch_size} symbols, the text has {has}")
    else:
        units, known = int(corpus.rows.max()) + 1, model.config.symbols
    if units > known:
        raise DataError(f"the text has {units} different ids or symbols, the model knows {known}")


def _check_trainable(model: PatchModel | PlainModel, corpus: PatchCorpus, settings: TrainSettings) -> None:
    _check_corpus_ids_known(model, corpus)
    if len(corpus.ids) < settings.batch_size:
        raise TrainingError(f"{len(corpus.ids)} windows do not fill a batch of {settings.batch_size}")


def evaluate_patch_corpus(model: PatchModel | PlainModel, corpus: PatchCorpus, batch_size: int = 16) -> dict[str, Any]:
    """Measures all windows, each as a separate sequence. Raises `DataError` if the model cannot read the text.

    Returns `bits_per_byte`, `nats`, `bytes`, and `units` (number of patches or ids). batch_size: windows per call.
    """
    _check_corpus_ids_known(model, corpus)
    total = 0.0
    for at in range(0, len(corpus.ids), batch_size):
        some: Any = sum_window_nats(model, corpus, corpus.ids[at : at + batch_size]).item()
        total += some
    return {
        "bits_per_byte": bits_per_byte(total, corpus.n_bytes),
        "nats": total,
        "bytes": corpus.n_bytes,
        "units": corpus.ids.size,
    }


def train_patch_model(
    model: PatchModel | PlainModel,
    corpus: PatchCorpus,
    settings: TrainSettings,
    run: Path,
    quiet: bool = True,
    until: int | None = None,
    asked: StopAsked = lambda: None,
) -> Progress:
    """Trains from the run's last checkpoint until `settings.iters` steps are done, and saves the last step.

    until: step after which to stop earlier; a later call continues the run. asked: function of `catch_stop_signals`;
    the run stops after the step in which `asked` first returns a signal. Settings used: iters, batch_size (windows),
    seed, steps_per_report, save_every, keep, and the optimizer's settings.

    Returns the progress. Raises `DataError` if the model cannot read the text; `TrainingError` if the text does not
    fill one batch, the loss is not a number or the checkpoint is another run's; and `TrainingStopped` if a signal
    stopped the run, after the last step is saved.
    """
    _check_trainable(model, corpus, settings)
    job = _PatchTrainer(model, corpus, settings, run)
    if not quiet and sys.stderr is not None:
        print(*job.header_lines(), sep="\n", file=sys.stderr)
    if train_to_step(job, settings, asked, quiet, until):
        raise TrainingStopped(job.progress, asked() or signal.SIGTERM)
    return job.progress


class _PatchTrainer:
    """Trains a patch model or a plain model as a `TrainingJob`: in one process, without validation during the run."""

    def __init__(self, model: PatchModel | PlainModel, corpus: PatchCorpus, settings: TrainSettings, run: Path) -> None:
        self.model, self.corpus, self.settings, self.run = model, corpus, settings, run
        self.optimizer = make_optimizer(settings)
        self.optimizer.init(model.trainable_parameters())
        self.fingerprint = _fingerprint_patch_run(model, corpus, settings)
        self.progress = load_last_checkpoint(run, model, self.optimizer, self.fingerprint)
        run.mkdir(parents=True, exist_ok=True)
        self._log = MetricsLog(run, self.progress.step)
        self._value_and_grad = nn.value_and_grad(model, lambda ids: sum_window_nats(model, corpus, ids) / ids.size)
        self._batches = _iterate_window_batches(corpus, settings, self.progress.step)
        self._last_step: tuple[float, Uint32s, float] = (
            0.0,
            corpus.ids[:0],
            0.0,
        )  # loss, ids and seconds of the last step

    def header_lines(self) -> list[str]:
        parameters = count_parameters(self.model)
        done, windows = self.progress.step, pluralize(len(self.corpus.ids), "window")
        return [
            f"training {parameters:,} parameters on {windows} of {self.corpus.ids.shape[1]:,} ids, "
            f"{self.corpus.n_bytes:,} bytes; device: {mx.default_device().type.name}",
            *([f"resuming at step {done:,} of {self.settings.iters:,}"] if done else []),
        ]

    def step(self, stop: bool) -> bool:
        began, ids = time.perf_counter(), next(self._batches)
        loss, gradients = self._value_and_grad(ids)
        gradients, norm = clip_gradients(gradients, self.settings.max_grad_norm)
        self.optimizer.update(self.model, gradients)
        mx.eval(loss, norm, self.model.parameters(), self.optimizer.state)
        seconds = time.perf_counter() - began
        n_bytes = int(self.corpus.unit_bytes[ids].sum())
        self.progress = self.progress.after_step(len(ids), ids.size, ids.size, n_bytes, seconds)
        if not np.isfinite([loss.item(), norm.item()]).all():
            raise TrainingError(
                f"step {self.progress.step}: the loss or its gradient is not a number; the last checkpoint is good: "
                "lower the learning rate"
            )
        self._last_step = loss.item(), ids, seconds
        return stop

    def report(self) -> str:
        loss, ids, seconds = self._last_step
        bits = bits_per_byte(loss * ids.size, int(self.corpus.unit_bytes[ids].sum()))
        rate = last_learning_rate(self.optimizer)
        self._log.add(loss=loss, bits_per_byte=bits, learning_rate=rate, **vars(self.progress))
        return f"loss {loss:.3f}, {bits:.3f} bits per byte, {ids.size / max(seconds, 1e-9):,.0f} ids/s"

    def validate(self) -> None:
        """Does nothing, because there is no validation during the run; see `TrainingJob`."""

    def save_checkpoint(self) -> None:
        if self.progress.step:
            save_checkpoint(self.run, self.model, self.optimizer, self.progress, self.fingerprint, self.settings.keep)


def _iterate_window_batches(corpus: PatchCorpus, settings: TrainSettings, step: int) -> Iterator[Uint32s]:
    """Yields the windows [B, T] of each step from `step` on.

    Each pass over the text has its own random order; windows that do not fill the pass's last batch are left out.
    """
    per_pass, order = len(corpus.ids) // settings.batch_size, np.zeros(0, np.int64)
    for k in range(step, settings.iters):
        if k == step or k % per_pass == 0:
            order = np.random.default_rng((settings.seed, k // per_pass)).permutation(len(corpus.ids))
        at = k % per_pass * settings.batch_size
        yield corpus.ids[order[at : at + settings.batch_size]]


def _fingerprint_patch_run(model: PatchModel | PlainModel, corpus: PatchCorpus, settings: TrainSettings) -> str:
    left_out = {"steps_per_report", "save_every", "keep", *ADDED_LATER}
    chosen = sorted((name, value) for name, value in settings.to_dict().items() if name not in left_out)
    facts = type(model).__name__, model.config.to_dict(), chosen, corpus.fingerprint()
    return sha256(repr(facts).encode()).hexdigest()


# ---- from texts to a model's folder

MODEL = "model"  # a finished run writes the model to this folder inside the run's folder


@dataclass(frozen=True)
class PatchFitOptions:
    """The patch model to train.

    tokenizer: file of the tokenizer whose tokens become patches; None to learn a byte-level BPE of `vocab_size` tokens.
    patch_size: maximum symbols per patch. mode: "stop" or "full", see `PatchMerges`. context: patches per window.
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


def fit_patch_model(
    texts: Sequence[str], options: PatchFitOptions, settings: TrainSettings, out: Path, quiet: bool = True
) -> SavedPatchModel:
    """Trains a patch model on documents, writes `out/model` and returns the saved model.

    texts: the documents. out: the run's folder; a run in this folder is continued from its last checkpoint. The first
    Ctrl-C or SIGTERM ends training after the current step, saves the step and raises `TrainingStopped`. Raises the
    errors of `train_patch_model`; `ConfigError` if the options give no valid model; and `TrainingError` also if `out`
    holds other files or another process trains there.
    """
    text = _make_patch_text(texts, options)
    ids = cut_patch_windows([text.ids(one) for one in texts], text.end, options.context)
    corpus = PatchCorpus(ids, text.unit_bytes, text.table.rows)
    mx.random.seed(settings.seed)
    merges = text.table.merges
    model = PatchModel(PatchConfig(merges.symbols, merges.patch_size, options.latent, options.local))
    _check_trainable(model, corpus, settings)
    record = _make_patch_run_record(texts, text, options, settings)
    mark = sha256(json.dumps(record["fixed"], sort_keys=True).encode()).hexdigest()
    with errors_as(TrainingError, str(out), OSError), open_run_folder(out, record, mark, "RUN"):
        remove_unfinished_files(out)
        with catch_stop_signals() as asked:
            done = train_patch_model(model, corpus, settings, out, quiet, asked=asked)
        source = {"progress": vars(done), "settings": settings.to_dict(), "train_bytes": corpus.n_bytes}
        saved = SavedPatchModel(model, text, options.context, source)
        save_patch_model(out / MODEL, saved)
    return saved


def evaluate_patch_texts(saved: SavedPatchModel, texts: Sequence[str], batch_size: int = 16) -> dict[str, Any]:
    """Measures a patch model on documents. Raises `DataError` if the texts have no bytes.

    The documents, each followed by an end mark, are read in windows of `saved.context` patches; the last window may be
    shorter. Returns bits_per_byte, bytes, documents, patches, bytes_per_patch, symbols_per_patch, fertility (patches
    per word; None if there are no words), forward_flops_per_byte (`hierarchical_flops` at these texts' mean symbols per
    patch, per byte), parameters, and exact (whether the patches' bytes equal the texts').
    """
    ids = cut_patch_windows([saved.text.ids(one) for one in texts], saved.text.end, 1).reshape(-1)
    whole = len(ids) // saved.context * saved.context
    parts = [part.reshape(-1, n) for part, n in ((ids[:whole], saved.context), (ids[whole:], len(ids) - whole)) if n]
    corpora = [PatchCorpus(part, saved.text.unit_bytes, saved.text.table.rows) for part in parts if part.size]
    found = [evaluate_patch_corpus(saved.model, corpus, batch_size) for corpus in corpora]
    n_bytes, lengths = sum(one["bytes"] for one in found), saved.text.table.lengths[ids]
    if not n_bytes:
        raise DataError("the texts have no bytes: there is nothing to measure")
    words, config, window = sum(map(word_count, texts)), saved.model.config, saved.context * n_bytes / len(ids)
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
        "parameters": count_parameters(saved.model),
        "exact": b"".join(spelled[i] for i in ids.tolist()) == "".join(texts).encode("utf-8"),
    }


def _make_patch_text(texts: Sequence[str], options: PatchFitOptions) -> PatchText:
    if options.tokenizer is None:
        tokenizer = learn_tokenizer(texts, options.vocab_size)
    else:
        tokenizer = read_hf_tokenizer(options.tokenizer)
    return PatchText.learn(tokenizer, options.patch_size, options.mode)


def _make_patch_run_record(
    texts: Sequence[str], text: PatchText, options: PatchFitOptions, settings: TrainSettings
) -> dict[str, Any]:
    digest = sha256()
    for one in texts:
        digest.update(one.encode("utf-8") + b"\0")
    fixed = settings.values_to_record()
    tokenizer = None if options.tokenizer is None else text.table.fingerprint
    return {
        "fixed": {"settings": {**fixed, **asdict(options), "tokenizer": tokenizer}},
        "data": digest.hexdigest(),
        "encoder": None,
        "mlx_zip": mlx_zip.__version__,
    }
