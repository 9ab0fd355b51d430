"""Trains models over patches, plain BPE and bytes from scratch for equal time, and measures them on held-out text.

    plain    ids of a byte-level BPE that is learned from the training text, embedding and head tied
    patches  the same latent transformer over the patches of those ids, local models in place of the embedding
    equal    patches with a latent transformer that is widened until the model has as many parameters as `plain`
    bytes    the same transformer over bytes
    space    patches cut at blanks, of 6 bytes at most
    entropy  patches cut where `bytes` finds the next byte hard to foresee, of 6 bytes at most

Each model gets --steps steps, or as many as fit into --seconds by the time of a few steps. All have the same schedule
and windows of about as many bytes. On a busy machine, count processor time (--clock) with one thread. --out keeps the
runs, and the same command continues an interrupted one. --recipe sets the flags of one of the paper's comparisons at
small scale. The results hold for small models, short runs and the seeds that were run; the paper trains 13,500 steps on
four GPUs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_zip.bench.machine import device
from mlx_zip.bench.record import surroundings
from mlx_zip.errors import MlxZipError
from mlx_zip.files import write_json
from mlx_zip.models.hbpe import PatchConfig, PatchModel, PlainConfig, PlainModel, parameters_of
from mlx_zip.training.hbpe import Corpus, evaluate, train
from mlx_zip.training.settings import TrainSettings
from mlx_zip.vocab.hbpe_measures import Tower, fertility, hierarchical_flops, plain_flops, read_tower, words_of
from mlx_zip.vocab.hbpe_table import PatchTable

from .data import Data, Material, read_documents

KINDS = ("plain", "patches", "equal", "bytes", "space", "entropy")
SIZED = ("patches", "equal")  # kinds that --patch-size is for
WARM_UP, TIMED = 1, 8  # steps of a calibration
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
STEP = 16  # by which a latent transformer is widened
LEARNING_RATE = 3e-3
RECIPES: dict[str, dict[str, Any]] = {  # the paper's comparison: flags for it at small scale
    "table2": {"models": list(KINDS), "patch_size": [8]},
    "table3": {"models": ["patches", "bytes", "space", "entropy"], "patch_size": [8]},
    "figure7": {"models": ["patches"], "patch_size": [4, 6, 8, 10]},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench hbpe_model`."""
    add = parser.add_argument
    add("--train", required=True, metavar="FILE", help="UTF-8 text to learn from, also .gz")
    add("--test", required=True, metavar="FILE", help="held-out text")
    add("--separator", help="line that ends a document (default: a file is one document)")
    add(
        "--recipe",
        choices=RECIPES,
        action=_Recipe,
        help="flags of one of the paper's comparisons, which later flags override: table2: all kinds; table3: kinds "
        "of patches, for a text without blanks; figure7: patch sizes",
    )
    add("--models", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of model to train (default: all)")
    add("--seconds", type=float, default=90, help="seconds of training per model (default: 90)")
    add("--steps", type=int, help="training steps per model, in place of --seconds")
    add("--clock", choices=CLOCKS, default="wall", help="clock that --seconds counts (default: wall)")
    add(
        "--tokenizer",
        metavar="FILE",
        help="first stage: tokenizer.json or a folder with one, vocab.bpe, merges.txt or NAME.tiktoken (default: "
        "learned from the training text)",
    )
    add("--vocab-size", type=int, default=4096, help="tokens of a first stage that is learned (default: 4096)")
    add(
        "--patch-size",
        type=int,
        nargs="+",
        default=[8],
        metavar="S",
        help="symbols of a patch at most; patches and equal are trained with each (default: 8)",
    )
    add("--context", type=int, default=64, help="first-stage tokens of a window (default: 64)")
    add("--batch-size", type=int, default=16, help="windows per step (default: 16)")
    add(
        "--latent",
        type=read_tower,
        default=Tower(2, 96, 256, 4),
        metavar="LAYERS,WIDTH,FFN,HEADS",
        help="transformer of plain, patches, bytes, space and entropy (default: 2,96,256,4)",
    )
    add(
        "--local",
        type=read_tower,
        default=Tower(2, 48, 96, 4),
        metavar="LAYERS,WIDTH,FFN,HEADS",
        help="local encoder and decoder, each (default: 2,48,96,4)",
    )
    add(
        "--learning-rate",
        type=_rate,
        nargs="+",
        default=[],
        metavar="RATE",
        help="peak learning rate of all kinds, or KIND=RATE of one (default: 0.003)",
    )
    add(
        "--seeds",
        nargs="+",
        type=int,
        default=[0],
        help="seeds, one run each; several show what is chance (default: 0)",
    )
    add("--marks", type=int, default=1, help="measurements per run, the one at its end included (default: 1)")
    add("--limit-bytes", type=int, metavar="N", help="bytes of the test text at most (default: all)")
    add(
        "--limit-train-bytes",
        type=int,
        metavar="N",
        help="bytes of the training text at most; entropy reads all of it (default: all)",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder that keeps the runs; an interrupted run is continued (default: nothing is kept)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints one JSON line per model and seed. Raises `MlxZipError`."""
    for name in ("seconds", "steps", "vocab_size", "context", "batch_size", "marks"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise MlxZipError(f"--{name.replace('_', '-')} must be above 0, got {getattr(args, name)}")
    learned = read_documents(args.train, args.separator, args.limit_train_bytes)
    test = read_documents(args.test, args.separator, args.limit_bytes)
    data = Data(learned, test, args.context, args.vocab_size, args.tokenizer)
    for seed in args.seeds:
        data.byte_model = None
        for kind in sorted(args.models, key=KINDS.index):
            for size in args.patch_size if kind in SIZED else args.patch_size[:1]:
                line = {"bench": "hbpe_model", "recipe": args.recipe, **measure(Run(kind, size, seed), data, args)}
                print(json.dumps({**line, **device(), **surroundings("mlx", "mlx-lm")}), flush=True)
    return 0


@dataclass(frozen=True)
class Run:
    """One model to train. patch_size is None but for the kinds in `SIZED`."""

    kind: str
    patch_size: int
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        size = f"-{self.patch_size}" if self.kind in SIZED else ""
        return f"{self.kind}{size}-seed{self.seed}"


def measure(one: Run, data: Data, args: argparse.Namespace) -> dict[str, Any]:
    """Trains or continues one model, evaluates it and returns its record."""
    begun = time.perf_counter()
    material = data.of(one.kind, one.patch_size)
    train_on, test_on, table = material
    prepared_s = time.perf_counter() - begun
    model = _seeded(one, material, data, args)
    with _folder(args.out, one.name) as folder:
        points = _trained(model, one, material, data, args, folder)
    if one.kind == "bytes":
        data.byte_model = model
    last = points[-1]
    text = b"".join(data.test).decode("utf-8", "replace")
    rate = last["test_bytes"] / last["units"]
    return {
        "model": one.kind,
        "seed": one.seed,
        "bits_per_byte": last["bits_per_byte"],
        "test_bytes": last["test_bytes"],
        "parameters": parameters_of(model),
        "steps": last["step"],
        "clock": args.clock,
        "wall_s": last["wall_s"],
        "processor_s": last["processor_s"],
        "train_bytes_seen": last["train_bytes"],
        "passes": round(last["train_bytes"] / train_on.n_bytes, 2),
        "train_bytes": train_on.n_bytes,
        "prepare_s": round(prepared_s, 1),
        "bytes_per_unit": round(rate, 3),
        "symbols_per_unit": None if table is None else round(float(test_on.lengths[test_on.ids].mean()), 3),
        "context": train_on.ids.shape[1],
        "fertility": round(fertility(len(text.encode()) / rate, words_of(text)), 3),
        "forward_flops_per_byte": round(flops(model, test_on)),
        "curve": points,
        "config": model.config.to_dict(),
        "learning_rate": _learning_rate(args, one.kind),
        "batch_size": args.batch_size,
        "vocab_size": len(data.tokens) - 1,
        "tokenizer": args.tokenizer and Path(args.tokenizer).name,
        "text": Path(args.train).name,
    }


def _trained(
    model: Any, one: Run, material: Material, data: Data, args: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    """Returns the measurements of a run: text read, time taken, and bits per byte of the test text at that point."""
    make = lambda: _seeded(one, material, data, args)
    steps = _kept(folder / "steps.json", lambda: args.steps or _fitting(make, material[0], args, one))
    settings = _settings(args, steps, one)
    points, spent = [], dict.fromkeys(CLOCKS, 0.0)
    for until in sorted({max(1, round(steps * (k + 1) / args.marks)) for k in range(args.marks)}):
        used = {name: -clock() for name, clock in CLOCKS.items()}
        done = train(model, material[0], settings, folder, quiet=False, until=until)
        used = {name: used[name] + clock() for name, clock in CLOCKS.items()}
        used = _kept(folder / f"used-{until}.json", lambda found={**used, "bytes": done.seen_bytes}: found)
        spent = {name: spent[name] + used[name] for name in CLOCKS}
        told = _kept(folder / f"told-{until}.json", lambda: evaluate(model, material[1]))
        points.append(
            {
                "step": until,
                "train_bytes": used["bytes"],
                **{f"{name}_s": round(spent[name], 1) for name in spent},
                "bits_per_byte": round(told["bits_per_byte"], 4),
                "test_bytes": told["bytes"],
                "units": told["units"],
            }
        )
    return points


def flops(model: Any, corpus: Corpus) -> float:
    """FLOPs of a forward pass per byte, by the paper's formulas; patches count the symbols that they really have."""
    count = len(corpus.ids)
    per_window, rate = corpus.n_bytes / count, corpus.n_bytes / corpus.ids.size
    if isinstance(model, PlainModel):
        return plain_flops(per_window, rate, model.config.tower, model.config.vocab_size) / per_window
    symbols = float(corpus.lengths[corpus.ids].mean())
    config = model.config
    return hierarchical_flops(per_window, rate, config.latent, config.local, config.symbols, symbols) / per_window


def equal_latent(table: PatchTable, latent: Tower, local: Tower) -> Tower:
    """The widest latent transformer, then the widest feed-forward part, of no more parameters in all than plain has;
    that of `patches` itself if this has more already.
    """
    wanted = parameters_of(PlainModel(PlainConfig(len(table), latent)))

    def left(tower: Tower) -> int:
        return wanted - parameters_of(PatchModel(PatchConfig(table.merges.symbols, table.patch_size, tower, local)))

    def widened(width: int) -> Tower:
        return Tower(latent.layers, width, latent.ffn * width // latent.width, latent.heads)

    tower = latent
    while left(widened(tower.width + STEP)) >= 0:
        tower = widened(tower.width + STEP)
    more = max(0, left(tower)) // (3 * tower.layers * tower.width)
    return Tower(tower.layers, tower.width, tower.ffn + more, tower.heads)


def _seeded(one: Run, material: Material, data: Data, args: argparse.Namespace) -> Any:
    corpus, _, table = material
    mx.random.seed(one.seed)
    if table is None:
        return PlainModel(PlainConfig(len(corpus.unit_bytes), args.latent))
    latent = equal_latent(table, args.latent, args.local) if one.kind == "equal" else args.latent
    mx.random.seed(one.seed)
    return PatchModel(PatchConfig(table.merges.symbols, table.patch_size, latent, args.local))


def _settings(args: argparse.Namespace, iters: int, one: Run) -> TrainSettings:
    rate = _learning_rate(args, one.kind)
    return TrainSettings(
        iters=iters,
        batch_size=args.batch_size,
        learning_rate=rate,
        warmup=iters // 20,
        min_learning_rate=rate / 20,
        seed=one.seed,
        steps_per_report=max(1, iters // 50),
        save_every=iters,
    )


def _fitting(make: Any, corpus: Corpus, args: argparse.Namespace, one: Run) -> int:
    """Number of steps that fit the time, from a few timed ones; two at least."""
    clock, model = CLOCKS[args.clock], make()
    with tempfile.TemporaryDirectory() as folder:
        train(model, corpus, _settings(args, WARM_UP, one), Path(folder, "first"))
        begun = clock()
        train(model, corpus, _settings(args, TIMED, one), Path(folder, "timed"))
        return max(2, round(args.seconds * TIMED / (clock() - begun)))


def _kept(path: Path, make: Any) -> Any:
    """Returns the JSON at `path`; if there is none, calls `make` and writes its result there first."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        made = make()
    except ValueError as error:
        raise MlxZipError(f"{path} cannot be read: {error}; remove {path.parent}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, made)
    return made


@contextmanager
def _folder(out: Path | None, name: str) -> Iterator[Path]:
    if out is not None:
        yield out / name
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, name)


class _Recipe(argparse.Action):
    """Sets the flags of a recipe; flags that follow override them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        for name, value in {"recipe": values, **RECIPES[values]}.items():
            setattr(namespace, name, value)


def _learning_rate(args: argparse.Namespace, kind: str) -> float:
    rates = dict(args.learning_rate)
    return rates.get(kind, rates.get(None, LEARNING_RATE))


def _rate(text: str) -> tuple[str | None, float]:
    kind, equals, rate = text.rpartition("=")
    try:
        if float(rate) > 0 and (kind in KINDS if equals else True):
            return kind if equals else None, float(rate)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is neither a rate above 0 nor KIND=RATE")
