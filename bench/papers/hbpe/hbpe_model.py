"""Trains models over patches, plain BPE and bytes from scratch for equal time, and measures them on held-out text.

    plain    reads ids of a byte-level BPE that is learned from the training text; embedding and head are tied
    patches  reads patches of those ids: the latent transformer of `plain`, with local models instead of an embedding
    equal    like `patches`, but the latent transformer is widened until there are as many parameters as in `plain`
    bytes    reads bytes with the transformer of `plain`
    space    like `patches`, but patches are cut at blanks and have up to 6 bytes
    entropy  like `patches`, but patches are cut where `bytes` finds the next byte hard to predict; up to 6 bytes

Each model gets --steps steps, or as many as fit into --seconds by the time of a few steps. All have the same schedule
and windows of about as many bytes. On a busy machine, count processor time (--clock) with one thread. --recipe sets the
flags of one of the paper's comparisons at small scale. The results hold for small models, short runs and the seeds that
were run; the paper trains 13,500 steps on four GPUs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_zip.arguments import add_limit_bytes_flag, default_flags
from mlx_zip.bench.machine import describe_mlx_device
from mlx_zip.errors import MlxZipError
from mlx_zip.models.patches.patch_model import PatchConfig, PatchModel, PlainConfig, PlainModel, count_parameters
from mlx_zip.training.patch_training import PatchCorpus, evaluate_patch_corpus, train_patch_model
from mlx_zip.training.settings import TrainSettings
from mlx_zip.vocab.hbpe.measures import Tower, fertility, hierarchical_flops, parse_tower, word_count
from mlx_zip.vocab.hbpe.patch_table import PatchTable

from .hbpe_data import Material, PatchTrainingData, read_documents
from .patches import plain_flops

KINDS = ("plain", "patches", "equal", "bytes", "space", "entropy")
SIZED = ("patches", "equal")  # kinds trained once per --patch-size
WARM_UP, TIMED = 1, 8  # untimed and timed training steps, from which the number of steps is chosen
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
STEP = 16  # a latent transformer's width grows by multiples of this
LEARNING_RATE = 3e-3
RECIPES: dict[str, dict[str, Any]] = {  # comparison in the paper -> its flags at small scale
    "table2": {"models": list(KINDS), "patch_size": [8]},
    "table3": {"models": ["patches", "bytes", "space", "entropy"], "patch_size": [8]},
    "figure7": {"models": ["patches"], "patch_size": [4, 6, 8, 10]},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench hbpe_model` to a parser."""
    add = parser.add_argument
    flag = default_flags(add)
    add("--train", required=True, metavar="FILE", help="text to train on: .txt or .jsonl, also .gz")
    add(
        "--test",
        required=True,
        metavar="FILE",
        help="held-out text to measure bits per byte on, of the same kinds",
    )
    add("--separator", help="line that ends a document of --train and --test (default: each file is one document)")
    add(
        "--recipe",
        choices=RECIPES,
        action=RecipeAction,
        help="set --models and --patch-size as in one of the paper's comparisons; flags after this one override it. "
        "table2: all kinds of model; table3: bytes and kinds of patches, for text without blanks; figure7: patch sizes",
    )
    add("--models", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of model to train (default: all)")
    add("--seconds", type=float, default=90, help="seconds to train each model (default: 90)")
    add("--steps", type=int, help="training steps per model, instead of --seconds (default: as many as fit --seconds)")
    flag("--clock", "wall", "clock that measures --seconds: wall time or processor time", choices=CLOCKS)
    add(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer whose ids are grouped into patches: tokenizer.json or a folder with one, vocab.bpe, merges.txt "
        "or NAME.tiktoken (default: one is learned from --train)",
    )
    flag("--vocab-size", 4096, "number of tokens of a tokenizer learned from --train")
    flag(
        "--patch-size",
        [8],
        "largest number of symbols in a patch; the models patches and equal are trained once per value",
        metavar="S",
    )
    flag("--context", 64, "tokens of --tokenizer per training window")
    flag("--batch-size", 16, "windows per training step")
    add(
        "--latent",
        type=parse_tower,
        default=Tower(2, 96, 256, 4),
        metavar="LAYERS,WIDTH,FFN,HEADS",
        help="sizes of the main transformer: layers, width, feed-forward width, attention heads; equal widens it "
        "(default: 2,96,256,4)",
    )
    add(
        "--local",
        type=parse_tower,
        default=Tower(2, 48, 96, 4),
        metavar="LAYERS,WIDTH,FFN,HEADS",
        help="sizes of the local encoder and of the local decoder of models over patches: layers, width, feed-forward "
        "width, attention heads (default: 2,48,96,4)",
    )
    add(
        "--learning-rate",
        type=parse_learning_rate,
        nargs="+",
        default=[],
        metavar="RATE",
        help="peak learning rate of all models, or KIND=RATE for one kind of --models (default: 0.003)",
    )
    flag("--seeds", [0], "random seeds, one training run each")
    flag(
        "--marks", 1, "number of evenly spaced measurements of bits per byte in each training run, the last at its end"
    )
    add_limit_bytes_flag(add, "--test")
    add(
        "--limit-train-bytes",
        type=int,
        metavar="N",
        help="read at most N bytes of --train (default: all); the model entropy first scores every byte that is read",
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a record per trained model, patch size and seed. Raises `MlxZipError` if a flag or text is invalid."""
    for name in ("seconds", "steps", "vocab_size", "context", "batch_size", "marks"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise MlxZipError(f"--{name.replace('_', '-')} must be above 0, got {getattr(args, name)}")
    learned = read_documents(args.train, args.separator, args.limit_train_bytes)
    test = read_documents(args.test, args.separator, args.limit_bytes)
    data = PatchTrainingData(learned, test, args.context, args.vocab_size, args.tokenizer)
    for seed in args.seeds:
        data.byte_model = None
        for kind in sorted(args.models, key=KINDS.index):
            for size in args.patch_size if kind in SIZED else args.patch_size[:1]:
                line = train_and_record(ModelRun(kind, size, seed), data, args)
                yield {"bench": "hbpe_model", "recipe": args.recipe, **line, **describe_mlx_device()}


@dataclass(frozen=True)
class ModelRun:
    """One model to train. kind: one of `KINDS`. patch_size: most symbols in a patch, for the kinds in `SIZED` only."""

    kind: str
    patch_size: int
    seed: int


def train_and_record(one: ModelRun, data: PatchTrainingData, args: argparse.Namespace) -> dict[str, Any]:
    """Trains one model, evaluates it on the test text and returns its record."""
    begun = time.perf_counter()
    material = data.windows_for_kind(one.kind, one.patch_size)
    train_on, test_on, table = material
    prepared_s = time.perf_counter() - begun
    model = make_model(one, material, args)
    points = measurements_at_marks(model, one, material, args)
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
        "parameters": count_parameters(model),
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
        "fertility": round(fertility(len(text.encode()) / rate, word_count(text)), 3),
        "forward_flops_per_byte": round(forward_flops_per_byte(model, test_on)),
        "curve": points,
        "config": model.config.to_dict(),
        "learning_rate": learning_rate_of_kind(args, one.kind),
        "batch_size": args.batch_size,
        "vocab_size": len(data.tokens) - 1,
        "tokenizer": args.tokenizer and Path(args.tokenizer).name,
        "text": Path(args.train).name,
    }


def measurements_at_marks(
    model: Any, one: ModelRun, material: Material, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Trains a model and returns one measurement per mark of --marks, the last at the end of training.

    A measurement has the step, bytes read, seconds of training so far and bits per byte of the test text.
    """
    make = lambda: make_model(one, material, args)
    steps = args.steps or steps_within_seconds(make, material[0], args, one)
    settings = _train_settings(args, steps, one)
    points, spent = [], dict.fromkeys(CLOCKS, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for until in sorted({max(1, round(steps * (k + 1) / args.marks)) for k in range(args.marks)}):
            begun = {name: clock() for name, clock in CLOCKS.items()}
            done = train_patch_model(model, material[0], settings, Path(folder, "run"), quiet=False, until=until)
            spent = {name: spent[name] + clock() - begun[name] for name, clock in CLOCKS.items()}
            found = evaluate_patch_corpus(model, material[1])
            points.append(
                {
                    "step": until,
                    "train_bytes": done.seen_bytes,
                    **{f"{name}_s": round(spent[name], 1) for name in spent},
                    "bits_per_byte": round(found["bits_per_byte"], 4),
                    "test_bytes": found["bytes"],
                    "units": found["units"],
                }
            )
    return points


def forward_flops_per_byte(model: Any, corpus: PatchCorpus) -> float:
    """Returns the FLOPs of a forward pass per byte of the corpus, by the paper's formulas.

    A patch counts with the mean number of symbols per patch in the corpus, not with the largest number.
    """
    count = len(corpus.ids)
    per_window, rate = corpus.n_bytes / count, corpus.n_bytes / corpus.ids.size
    if isinstance(model, PlainModel):
        return plain_flops(per_window, rate, model.config.tower, model.config.vocab_size) / per_window
    symbols = float(corpus.lengths[corpus.ids].mean())
    config = model.config
    return hierarchical_flops(per_window, rate, config.latent, config.local, config.symbols, symbols) / per_window


def latent_with_equal_parameters(table: PatchTable, latent: Tower, local: Tower) -> Tower:
    """Returns the largest latent transformer with which a model over patches has no more parameters than `plain`.

    First the width grows (in steps of `STEP`, the feed-forward width in proportion), then the feed-forward width alone.
    Returns `latent` unchanged if the model over patches already has more parameters.
    """
    wanted = count_parameters(PlainModel(PlainConfig(len(table), latent)))

    def parameters_left(tower: Tower) -> int:
        return wanted - count_parameters(PatchModel(PatchConfig(table.merges.symbols, table.patch_size, tower, local)))

    def with_width(width: int) -> Tower:
        return Tower(latent.layers, width, latent.ffn * width // latent.width, latent.heads)

    tower = latent
    while parameters_left(with_width(tower.width + STEP)) >= 0:
        tower = with_width(tower.width + STEP)
    more = max(0, parameters_left(tower)) // (3 * tower.layers * tower.width)
    return Tower(tower.layers, tower.width, tower.ffn + more, tower.heads)


def make_model(one: ModelRun, material: Material, args: argparse.Namespace) -> Any:
    corpus, _, table = material
    mx.random.seed(one.seed)
    if table is None:
        return PlainModel(PlainConfig(len(corpus.unit_bytes), args.latent))
    latent = latent_with_equal_parameters(table, args.latent, args.local) if one.kind == "equal" else args.latent
    mx.random.seed(one.seed)
    return PatchModel(PatchConfig(table.merges.symbols, table.patch_size, latent, args.local))


def _train_settings(args: argparse.Namespace, iters: int, one: ModelRun) -> TrainSettings:
    rate = learning_rate_of_kind(args, one.kind)
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


def steps_within_seconds(make: Any, corpus: PatchCorpus, args: argparse.Namespace, one: ModelRun) -> int:
    """Returns how many training steps fit into --seconds, at least 2, from the time of `TIMED` steps of a new model.

    make: returns a new model.
    """
    clock, model = CLOCKS[args.clock], make()
    with tempfile.TemporaryDirectory() as folder:
        train_patch_model(model, corpus, _train_settings(args, WARM_UP, one), Path(folder, "first"))
        begun = clock()
        train_patch_model(model, corpus, _train_settings(args, TIMED, one), Path(folder, "timed"))
        return max(2, round(args.seconds * TIMED / (clock() - begun)))


class RecipeAction(argparse.Action):
    """The action of --recipe: sets the flags of a recipe, which later flags override."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        for name, value in {"recipe": values, **RECIPES[values]}.items():
            setattr(namespace, name, value)


def learning_rate_of_kind(args: argparse.Namespace, kind: str) -> float:
    rates = dict(args.learning_rate)
    return rates.get(kind, rates.get(None, LEARNING_RATE))


def parse_learning_rate(text: str) -> tuple[str | None, float]:
    """Parses RATE or KIND=RATE, a value of --learning-rate; returns (kind, or None for all kinds; rate)."""
    kind, equals, rate = text.rpartition("=")
    try:
        if float(rate) > 0 and (kind in KINDS if equals else True):
            return kind if equals else None, float(rate)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is neither a rate above 0 nor KIND=RATE")
