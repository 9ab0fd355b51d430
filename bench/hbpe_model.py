"""Models over patches beside plain BPE and bytes, from scratch on a text, at equal time, on held-out bytes.

    plain    ids of a byte-level BPE that is learned from the training text, embedding and head tied
    patches  the same latent transformer over the patches of those ids, local models in place of the embedding
    equal    patches with a latent transformer that is widened until the model has as many parameters as `plain`
    bytes    the same transformer over bytes
    space    patches cut at blanks, of 6 bytes at most
    entropy  patches cut where `bytes` finds the next byte hard to foresee, of 6 bytes at most

Each model gets as many steps as fit --seconds by a few timed ones, with the learning rate and schedule that all have,
and windows of about as many bytes. On a busy machine the time is better counted in the processor's (--clock), with one
thread. Small models, short runs, one seed unless several are named: what the lines say holds for them, and the ranking
of the paper's 13,500 steps on four GPUs is not expected to.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_zip.errors import MlxZipError
from mlx_zip.models.hbpe import PatchConfig, PatchModel, PlainConfig, PlainModel, parameters_of
from mlx_zip.training.hbpe import Corpus, byte_entropies, evaluate, train, windows
from mlx_zip.training.settings import TrainSettings
from mlx_zip.vocab.first_stage import read_stored, to_bytes
from mlx_zip.vocab.hbpe_measures import Tower, fertility, hierarchical_flops, plain_flops, words_of
from mlx_zip.vocab.hbpe_patching import entropy_patches, number, space_patches
from mlx_zip.vocab.hbpe_table import PatchTable

from .machine import device
from .record import surroundings

KINDS = ("plain", "patches", "equal", "bytes", "space", "entropy")
WARM_UP, TIMED = 1, 4  # steps of a calibration
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
BYTE_END = 256
STEP = 16  # by which a latent transformer is widened

Documents = list[bytes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench hbpe_model`."""
    add = parser.add_argument
    add("--train", required=True, metavar="FILE", help="UTF-8 text to learn from, also .gz")
    add("--test", required=True, metavar="FILE", help="held-out text")
    add("--separator", help="line that ends a document (default: a file is one document)")
    add("--models", nargs="+", choices=KINDS, default=list(KINDS), help="which (default: all)")
    add("--seconds", type=float, default=90, help="of training, each model (default: 90)")
    add("--clock", choices=CLOCKS, default="wall", help="what they are seconds of (default: wall)")
    add("--vocab-size", type=int, default=4096, help="tokens of the first stage (default: 4096)")
    add("--patch-size", type=int, default=8, metavar="S", help="symbols of a patch at most (default: 8)")
    add("--context", type=int, default=64, help="first-stage tokens of a window (default: 64)")
    add("--batch-size", type=int, default=16, help="windows per step (default: 16)")
    add("--latent", type=_tower, default=Tower(2, 96, 256, 4), metavar="LAYERS,WIDTH,FFN,HEADS",
        help="transformer of plain, patches, bytes, space and entropy (default: 2,96,256,4)")  # fmt: skip
    add("--local", type=_tower, default=Tower(2, 48, 96, 4), metavar="LAYERS,WIDTH,FFN,HEADS",
        help="local encoder and decoder, each (default: 2,48,96,4)")  # fmt: skip
    add("--learning-rate", type=float, default=3e-3, help="peak (default: 0.003)")
    add("--seeds", nargs="+", type=int, default=[0], help="a run each; several show what is chance (default: 0)")
    add("--limit-bytes", type=int, metavar="N", help="of the test text at most")
    add("--limit-train-bytes", type=int, metavar="N", help="of the training text at most (entropy reads all of it)")


def run(args: argparse.Namespace) -> int:
    """Prints one JSON line per model and seed. Raises `MlxZipError`."""
    for name in ("seconds", "vocab_size", "context", "batch_size", "learning_rate"):
        if getattr(args, name) <= 0:
            raise MlxZipError(f"--{name.replace('_', '-')} must be above 0, got {getattr(args, name)}")
    learned = _documents(args.train, args.separator, args.limit_train_bytes)
    data = Data(learned, _documents(args.test, args.separator, args.limit_bytes), args)
    for seed in args.seeds:
        data.byte_model = None
        for kind in sorted(args.models, key=KINDS.index):
            line = measure(kind, data, args, seed)
            print(json.dumps({"bench": "hbpe_model", **line, **device(), **surroundings("mlx", "mlx-lm")}), flush=True)
    return 0


@dataclass
class Data:
    """The text by document, and what the kinds make of it."""

    train: Documents
    test: Documents
    args: argparse.Namespace
    byte_model: PlainModel | None = None
    tokenized: tuple[Corpus, Corpus, PatchTable] = field(init=False)

    def __post_init__(self) -> None:
        tokens, encode = first_stage(self.train, self.args.vocab_size)
        table = PatchTable.learn([*tokens, b""], self.args.patch_size)
        both = [[encode(document) for document in documents] for documents in (self.train, self.test)]
        self.tokenized = self._corpora(both, table, self.args.context)

    @property
    def bytes_per_token(self) -> float:
        """Of the training text's first-stage tokens."""
        corpus = self.tokenized[0]
        return corpus.n_bytes / corpus.ids.size

    def plain(self) -> tuple[Corpus, Corpus]:
        """First-stage ids, read as they are."""
        train, test, _ = self.tokenized
        return Corpus(train.ids, train.unit_bytes), Corpus(test.ids, test.unit_bytes)

    def bytes(self) -> tuple[Corpus, Corpus]:
        """Bytes, in windows of about as many bytes."""
        sizes = np.array([*[1] * BYTE_END, 0])
        length = round(self.args.context * self.bytes_per_token)
        cut = lambda documents: Corpus(windows([list(d) for d in documents], BYTE_END, length), sizes)
        return cut(self.train), cut(self.test)

    def patched(self, kind: str) -> tuple[Corpus, Corpus, PatchTable]:
        """Patches of another kind, in windows of about as many bytes."""
        cut = space_patches if kind == "space" else self._entropy_cut()
        pieces = [[cut(document) for document in documents] for documents in (self.train, self.test)]
        ids, table = number([document for part in pieces for document in (*part, [b""])])
        patches = [ids[: len(self.train)], ids[len(self.train) + 1 : -1]]
        rate = sum(map(len, self.train)) / (sum(map(len, patches[0])) + len(self.train))
        context = max(1, round(self.args.context * self.bytes_per_token / rate))
        return self._corpora(patches, table, context, ids[-1][0])

    def _entropy_cut(self) -> Any:
        """Cuts with a threshold that makes about as many patches as the first stage makes tokens."""
        model = self.byte_model
        if model is None:
            raise MlxZipError("--models entropy needs bytes too: its model tells where to cut")
        length = round(self.args.context * self.bytes_per_token)
        joined = b"".join(self.train)
        some = byte_entropies(model, joined[: 1 << 17], length)
        threshold = float(np.quantile(some, 1 - 1 / self.bytes_per_token))
        return lambda document: entropy_patches(document, byte_entropies(model, document, length), threshold)

    def _corpora(
        self, documents: Sequence[Any], table: PatchTable, context: int, end: int | None = None
    ) -> tuple[Corpus, Corpus, PatchTable]:
        sizes = np.array([len(token) for token in table.tokens])
        end = len(table) - 1 if end is None else end
        train, test = (Corpus(windows(part, end, context), sizes, table.rows) for part in documents)
        return train, test, table


def measure(kind: str, data: Data, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Trains and evaluates one model; its line."""
    begun = time.perf_counter()
    if kind in ("plain", "bytes"):
        train_on, test_on = data.plain() if kind == "plain" else data.bytes()
        table, make = None, lambda: PlainModel(PlainConfig(len(train_on.unit_bytes), args.latent))
    else:
        train_on, test_on, table = data.tokenized if kind in ("patches", "equal") else data.patched(kind)
        latent = equal_latent(data, args) if kind == "equal" else args.latent
        config = PatchConfig(table.merges.symbols, table.patch_size, latent, args.local)
        make = lambda: PatchModel(config)
    prepared_s = time.perf_counter() - begun
    iters = max(2, round(args.seconds / _step_seconds(make, train_on, args, seed)))
    model, used = _seeded(make, seed), {name: -clock() for name, clock in CLOCKS.items()}
    with tempfile.TemporaryDirectory() as folder:
        done = train(model, train_on, _settings(args, iters, seed), Path(folder), quiet=False)
    used = {name: used[name] + clock() for name, clock in CLOCKS.items()}
    if kind == "bytes":
        data.byte_model = model
    told = evaluate(model, test_on)
    text = b"".join(data.test).decode("utf-8", "replace")
    units = told["units"]
    return {
        "model": kind, "seed": seed, "bits_per_byte": round(told["bits_per_byte"], 4), "test_bytes": told["bytes"],
        "parameters": parameters_of(model), "steps": iters, "clock": args.clock,
        "wall_s": round(used["wall"], 1), "processor_s": round(used["processor"], 1),
        "train_bytes_seen": done.seen_bytes, "passes": round(done.seen_bytes / train_on.n_bytes, 2),
        "train_bytes": train_on.n_bytes, "prepare_s": round(prepared_s, 1),
        "bytes_per_unit": round(told["bytes"] / units, 3), "context": train_on.ids.shape[1],
        "fertility": round(fertility(units * len(text.encode()) / told["bytes"], words_of(text)), 3),
        "forward_flops_per_byte": round(flops(model, test_on, told) / told["bytes"]),
        "config": model.config.to_dict(), "learning_rate": args.learning_rate, "batch_size": args.batch_size,
        "vocab_size": args.vocab_size, "text": Path(args.train).name,
    }  # fmt: skip


def flops(model: Any, corpus: Corpus, told: dict[str, Any]) -> float:
    """A forward pass over all windows by the paper's formulas; of patches, with the symbols they really have."""
    count = len(corpus.ids)
    per_window, rate = told["bytes"] / count, told["bytes"] / told["units"]
    if isinstance(model, PlainModel):
        return count * plain_flops(per_window, rate, model.config.tower, model.config.vocab_size)
    symbols = float(corpus.lengths[corpus.ids].mean())
    config = model.config
    return count * hierarchical_flops(per_window, rate, config.latent, config.local, config.symbols, symbols)


def equal_latent(data: Data, args: argparse.Namespace) -> Tower:
    """The widest latent transformer, then the widest feed-forward part, of no more parameters in all than plain has;
    that of `patches` itself if this has more already.
    """
    table, least = data.tokenized[2], args.latent
    wanted = parameters_of(PlainModel(PlainConfig(len(table), least)))

    def left(tower: Tower) -> int:
        config = PatchConfig(table.merges.symbols, table.patch_size, tower, args.local)
        return wanted - parameters_of(PatchModel(config))

    def widened(width: int) -> Tower:
        return Tower(least.layers, width, least.ffn * width // least.width, least.heads)

    tower = least
    while left(widened(tower.width + STEP)) >= 0:
        tower = widened(tower.width + STEP)
    more = max(0, left(tower)) // (3 * tower.layers * tower.width)
    return Tower(tower.layers, tower.width, tower.ffn + more, tower.heads)


def first_stage(documents: Documents, size: int) -> tuple[list[bytes], Any]:
    """A byte-level BPE of `size` tokens, learned from the documents, and what encodes a document with it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((d.decode("utf-8") for d in documents), trainer)
    tokens = [b""] * tokenizer.get_vocab_size()
    for spelled, i in tokenizer.get_vocab().items():
        tokens[i] = to_bytes(spelled)
    return tokens, lambda document: tokenizer.encode(document.decode("utf-8")).ids


def _settings(args: argparse.Namespace, iters: int, seed: int) -> TrainSettings:
    return TrainSettings(
        iters=iters, batch_size=args.batch_size, learning_rate=args.learning_rate, warmup=iters // 20,
        min_learning_rate=args.learning_rate / 20, seed=seed, steps_per_report=max(1, iters // 50), save_every=iters,
    )  # fmt: skip


def _step_seconds(make: Any, corpus: Corpus, args: argparse.Namespace, seed: int) -> float:
    clock, model = CLOCKS[args.clock], _seeded(make, seed)
    with tempfile.TemporaryDirectory() as folder:
        train(model, corpus, _settings(args, WARM_UP, seed), Path(folder, "first"))
        begun = clock()
        train(model, corpus, _settings(args, TIMED, seed), Path(folder, "timed"))
        return (clock() - begun) / TIMED


def _seeded(make: Any, seed: int) -> Any:
    mx.random.seed(seed)
    return make()


def _tower(text: str) -> Tower:
    try:
        layers, width, ffn, heads = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYERS,WIDTH,FFN,HEADS") from None
    return Tower(layers, width, ffn, heads)


def _documents(path: str, separator: str | None, limit: int | None = None) -> Documents:
    text = read_stored(Path(path))[:limit].decode("utf-8", "ignore")
    parts = [text] if separator is None else ("\n" + text).split(f"\n{separator}\n")
    documents = [part.strip("\n").encode("utf-8") for part in parts if part.strip()]
    if not documents:
        raise MlxZipError(f"{path} holds no text")
    return documents
