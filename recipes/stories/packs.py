"""Makes the second part of the recipe: trains the zip2zip model with codebook packs, and the control on the same text.

There are several rounds, each with its own texts, and each continues with the previous round's model. Windows begin
with the model's own pack, with entries drawn from one of several other packs, or without a pack. Packs are learned from
parts of the training text that the model is not trained on, so that in training a pack meets new text. (A story that
is repeated in the training text may be in both parts.)
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError
from mlx_zip.files import atomic_folder

from .commands import Recipe
from .requests import write_jsonl
from .settings import Flags, PackSettings, Round, Texts

OWN_PACK = "own"  # name of the bundled model's pack
TEXTS, PACKS, WINDOWS = "pack-texts", "packs", "prepared"
PACKED, CONTROL = "packed", "packed-control"


def list_drawn_packs(packs: PackSettings) -> list[str]:
    """Returns the names of the packs from which samples draw their entries."""
    return [f"drawn-{number}" for number in range(len(packs.sizes))]


def list_unseen_packs(packs: PackSettings) -> dict[str, int]:
    """Returns name -> size of the packs that are used for measuring but not for training."""
    return {f"unseen-{size}": size for size in packs.unseen}


def list_text_parts(packs: PackSettings) -> Iterator[tuple[str, Texts]]:
    """Yields the parts into which the training texts are cut, in order, as (name, number of texts of each kind)."""
    first, *others = packs.rounds
    yield from list_round_parts(packs, first)
    yield f"learn-{OWN_PACK}", packs.learn_own
    for name, size in zip(list_drawn_packs(packs), packs.sizes, strict=True):
        times = 2 if size >= packs.large else 1
        yield f"learn-{name}", Texts(*(times * count for count in packs.learn))
    for one in others:
        yield from list_round_parts(packs, one)
    yield "learn-unseen", packs.learn_unseen


def list_round_parts(packs: PackSettings, one: Round) -> Iterator[tuple[str, Texts]]:
    """Yields the parts of text for a round's training, as (name, number of texts of each kind).

    Windows of the first part begin without a pack. Windows of any other part begin with the pack in the part's name.
    """
    yield f"{one.prefix}empty", one.empty
    yield one.prefix + OWN_PACK, one.own
    yield from ((one.prefix + name, one.drawn) for name in list_drawn_packs(packs))


def make_texts(recipe: Recipe) -> None:
    """Writes pack-texts/NAME.jsonl for every part: the next training texts of each kind, shuffled together.

    Raises `DataError` if there are too few texts.
    """
    if (recipe.out / TEXTS).exists():
        return
    sources = [_read_lines(recipe.out / f"texts/{name}.jsonl") for name in ("train", "conversations", "asked")]
    with atomic_folder(recipe.out / TEXTS) as folder:
        for seed, (name, counts) in enumerate(list_text_parts(recipe.settings.packs)):
            part = [line for source, count in zip(sources, counts, strict=True) for line in islice(source, count)]
            if missing := sum(counts) - len(part):
                raise DataError(f"there are too few texts for {TEXTS}/{name}: {missing} are missing")
            random.Random(seed).shuffle(part)
            write_jsonl(folder / f"{name}.jsonl", part)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def learn_packs(recipe: Recipe) -> None:
    """Learns every pack with `mlx_zip vocab pack learn` and writes packs/NAME.npz."""
    packs = recipe.settings.packs
    wanted = [(OWN_PACK, f"learn-{OWN_PACK}", packs.size)]
    wanted += [
        (name, f"learn-{name}", pool_size(packs, size))
        for name, size in zip(list_drawn_packs(packs), packs.sizes, strict=True)
    ]
    wanted += [(name, "learn-unseen", size) for name, size in list_unseen_packs(packs).items()]
    (recipe.out / PACKS).mkdir(exist_ok=True)
    for name, text, size in wanted:
        fixed = {"model": "runs/zip/model", "size": size, "window": packs.window, "out": f"{PACKS}/{name}.npz"}
        recipe.run_mlx_zip("vocab pack learn", {**fixed, **packs.codec, "data": f"{TEXTS}/{text}.jsonl"})


def pool_size(packs: PackSettings, size: int) -> int:
    """Returns the size of a pack from which samples draw `size` entries: 4/3 of `size`, at most the codebook size."""
    return min(size * 4 // 3, packs.codec["codebook_size"])


def make_windows(recipe: Recipe) -> None:
    """Prepares the windows of all rounds, and windows for validation.

    prepared/packed-NAME holds the compressed windows of a part, which begin with the part's pack. prepared/PREFIXplain
    holds the uncompressed windows of all parts of a round, for the control.
    """
    settings, packs = recipe.settings, recipe.settings.packs
    fixed = {
        "context": settings.long,
        "shard_samples": settings.shard_samples,
        "workers": settings.workers,
        "no_fill_windows": True,
    }
    compressed = {**fixed, "model": "runs/zip/model", **packs.codec}
    plain = {**fixed, "model": "runs/control/model", "codebook_size": 0, "merge_size": 1, "protect": settings.protect}
    sizes = {OWN_PACK: packs.size, **dict(zip(list_drawn_packs(packs), packs.sizes, strict=True))}
    starts = {name: {"pack": f"{PACKS}/{name}.npz", "start_draw": size} for name, size in sizes.items()}
    for one in packs.rounds:
        texts = {name: f"{TEXTS}/{name}.jsonl" for name, _ in list_round_parts(packs, one)}
        for name, text in texts.items():
            start = starts.get(name.removeprefix(one.prefix), {})
            recipe.run_mlx_zip("prepare", {**compressed, **start, "data": text, "out": f"{WINDOWS}/packed-{name}"})
        recipe.run_mlx_zip("prepare", {**plain, "data": [*texts.values()], "out": f"{WINDOWS}/{one.prefix}plain"})
    valid = {"data": "texts/valid.jsonl"}
    recipe.run_mlx_zip("prepare", {**compressed, **starts[OWN_PACK], **valid, "out": f"{WINDOWS}/packed-valid"})
    recipe.run_mlx_zip("prepare", {**plain, **valid, "out": f"{WINDOWS}/plain-valid"})


def list_runs(packs: PackSettings) -> dict[str, list[str]]:
    """Returns `PACKED` or `CONTROL` -> names of the training runs of that model, in order of rounds."""
    return {name: [one.prefix + name for one in packs.rounds] for name in (PACKED, CONTROL)}


def train_packed(recipe: Recipe) -> None:
    """Trains all rounds of the zip2zip model with packs."""
    packs = recipe.settings.packs

    def flags(one: Round) -> Flags:
        data = [f"{WINDOWS}/packed-{name}" for name, _ in list_round_parts(packs, one)]
        return {"data": data, "valid": f"{WINDOWS}/packed-valid", **one.packed}

    _train_rounds(recipe, PACKED, "zip", flags)


def train_control(recipe: Recipe) -> None:
    """Trains all rounds of the control, on the same texts uncompressed."""

    def flags(one: Round) -> Flags:
        return {"data": f"{WINDOWS}/{one.prefix}plain", "valid": f"{WINDOWS}/plain-valid", **one.control}

    _train_rounds(recipe, CONTROL, "control", flags)


def _train_rounds(recipe: Recipe, name: str, start: str, flags: Callable[[Round], Flags]) -> None:
    """Trains all rounds, each from the previous round's model.

    name: `PACKED` or `CONTROL`. start: run whose model the first round starts from. flags: returns a round's flags.
    """
    packs = recipe.settings.packs
    for number, (one, run) in enumerate(zip(packs.rounds, list_runs(packs)[name], strict=True)):
        fixed = {"model": f"runs/{start}/model", "out": f"runs/{run}", "seed": recipe.settings.seed + number}
        recipe.run_mlx_zip("train", {**fixed, **flags(one)})
        start = run
