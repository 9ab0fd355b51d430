"""The recipe's second part: training the zip2zip model with codebook packs, and its control on the same text.

There are several rounds, each with texts of its own; each continues with the model of the round before. Windows begin
with the model's own pack, with one of several others, of which every sample draws its entries, or with none. Packs are
learned from other parts of the training text than they are trained with, so that training sees how well a pack serves
new text; a story that the text repeats may be in both.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError
from mlx_zip.files import whole_folder

from .requests import write_jsonl
from .runner import Recipe
from .settings import Flags, PackSettings, Round, Texts

OWN = "own"  # the pack that the model is to begin with
TEXTS, PACKS, WINDOWS = "pack-texts", "packs", "prepared"
PACKED, CONTROL = "packed", "packed-control"


def drawn(packs: PackSettings) -> list[str]:
    """Names of the packs that samples draw from."""
    return [f"drawn-{number}" for number in range(len(packs.sizes))]


def unseen(packs: PackSettings) -> dict[str, int]:
    """Names of the packs that nothing is trained with, and their sizes: to measure with."""
    return {f"unseen-{size}": size for size in packs.unseen}


def parts(packs: PackSettings) -> Iterator[tuple[str, Texts]]:
    """The parts that the texts are cut into, in order, and how much of each kind of text is in them."""
    first, *others = packs.rounds
    yield from windows_of(packs, first)
    yield f"learn-{OWN}", packs.learn_own
    for name, size in zip(drawn(packs), packs.sizes, strict=True):
        times = 2 if size >= packs.large else 1
        yield f"learn-{name}", Texts(*(times * count for count in packs.learn))
    for one in others:
        yield from windows_of(packs, one)
    yield "learn-unseen", packs.learn_unseen


def windows_of(packs: PackSettings, one: Round) -> Iterator[tuple[str, Texts]]:
    """The parts that a round trains on; the first begins with no pack, each other with the pack of its name."""
    yield f"{one.prefix}empty", one.empty
    yield one.prefix + OWN, one.own
    yield from ((one.prefix + name, one.drawn) for name in drawn(packs))


def make_texts(recipe: Recipe) -> None:
    """Writes pack-texts/: the parts, each a run of the training texts of every kind, shuffled together."""
    sources = [_lines(recipe.out / f"texts/{name}.jsonl") for name in ("train", "conversations", "asked")]
    with whole_folder(recipe.out / TEXTS) as folder:
        for seed, (name, counts) in enumerate(parts(recipe.settings.packs)):
            part = [line for source, count in zip(sources, counts, strict=True) for line in islice(source, count)]
            if missing := sum(counts) - len(part):
                raise DataError(f"there are too few texts for {TEXTS}/{name}: {missing} are missing")
            random.Random(seed).shuffle(part)
            write_jsonl(folder / f"{name}.jsonl", part)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def learn(recipe: Recipe) -> None:
    """Writes packs/NAME.npz of every pack."""
    packs = recipe.settings.packs
    wanted = [(OWN, f"learn-{OWN}", packs.size)]
    wanted += [(name, f"learn-{name}", pool(packs, size)) for name, size in zip(drawn(packs), packs.sizes, strict=True)]
    wanted += [(name, "learn-unseen", size) for name, size in unseen(packs).items()]
    (recipe.out / PACKS).mkdir(exist_ok=True)
    for name, text, size in wanted:
        out = f"{PACKS}/{name}.npz"
        if not (recipe.out / out).exists():
            fixed = {"model": "runs/zip/model", "size": size, "window": packs.window, "out": out}
            recipe.command("vocab pack learn", {**fixed, **packs.codec, "data": f"{TEXTS}/{text}.jsonl"})


def products(packs: PackSettings) -> list[str]:
    """The files that `learn` makes."""
    return [f"{PACKS}/{name}.npz" for name in (OWN, *drawn(packs), *unseen(packs))]


def pool(packs: PackSettings, size: int) -> int:
    """Entries of a pack from which samples draw `size`: a third more, where the codebook has room."""
    return min(size * 4 // 3, packs.codec["codebook_size"])


def make_windows(recipe: Recipe) -> None:
    """Writes prepared/packed-NAME of every part, prepared/PREFIXplain of a round's parts, and data to validate with."""
    settings, packs = recipe.settings, recipe.settings.packs
    fixed = {
        "context": settings.long,
        "shard_samples": settings.shard_samples,
        "workers": settings.workers,
        "no_fill_windows": True,
    }
    compressed = {**fixed, "model": "runs/zip/model", **packs.codec}
    plain = {**fixed, "model": "runs/control/model", "codebook_size": 0, "merge_size": 1, "protect": settings.protect}
    sizes = {OWN: packs.size, **dict(zip(drawn(packs), packs.sizes, strict=True))}
    starts = {name: {"pack": f"{PACKS}/{name}.npz", "start_draw": size} for name, size in sizes.items()}
    for one in packs.rounds:
        texts = {name: f"{TEXTS}/{name}.jsonl" for name, _ in windows_of(packs, one)}
        for name, text in texts.items():
            start = starts.get(name.removeprefix(one.prefix), {})
            recipe.command("prepare", {**compressed, **start, "data": text, "out": f"{WINDOWS}/packed-{name}"})
        recipe.command("prepare", {**plain, "data": [*texts.values()], "out": f"{WINDOWS}/{one.prefix}plain"})
    valid = {"data": "texts/valid.jsonl"}
    recipe.command("prepare", {**compressed, **starts[OWN], **valid, "out": f"{WINDOWS}/packed-valid"})
    recipe.command("prepare", {**plain, **valid, "out": f"{WINDOWS}/plain-valid"})


def windows(packs: PackSettings) -> list[str]:
    """The files that `make_windows` makes."""
    names = ["packed-valid", "plain-valid"]
    for one in packs.rounds:
        names += [*(f"packed-{name}" for name, _ in windows_of(packs, one)), f"{one.prefix}plain"]
    return [f"{WINDOWS}/{name}/index.json" for name in names]


def runs(packs: PackSettings) -> dict[str, list[str]]:
    """The runs of the zip2zip model with packs and those of its control, in order."""
    return {name: [one.prefix + name for one in packs.rounds] for name in (PACKED, CONTROL)}


def train_packed(recipe: Recipe) -> None:
    """Trains the zip2zip model with packs."""
    packs = recipe.settings.packs

    def flags(one: Round) -> Flags:
        data = [f"{WINDOWS}/packed-{name}" for name, _ in windows_of(packs, one)]
        return {"data": data, "valid": f"{WINDOWS}/packed-valid", **one.packed}

    _train(recipe, PACKED, "zip", flags)


def train_control(recipe: Recipe) -> None:
    """Trains the control as long on the same texts, not compressed."""

    def flags(one: Round) -> Flags:
        return {"data": f"{WINDOWS}/{one.prefix}plain", "valid": f"{WINDOWS}/plain-valid", **one.control}

    _train(recipe, CONTROL, "control", flags)


def _train(recipe: Recipe, name: str, start: str, flags: Callable[[Round], Flags]) -> None:
    """Runs each round, which continues with the model of the run before; finished runs are skipped."""
    packs = recipe.settings.packs
    for number, (one, run) in enumerate(zip(packs.rounds, runs(packs)[name], strict=True)):
        if not (recipe.out / f"runs/{run}/model/config.json").exists():
            fixed = {"model": f"runs/{start}/model", "out": f"runs/{run}", "seed": recipe.settings.seed + number}
            recipe.command("train", {**fixed, **flags(one)})
        start = run
