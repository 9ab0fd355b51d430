"""The recipe's last part: the zip2zip model goes on with codebook packs, and its control with the same text.

Windows begin with the model's own pack, with one of several others, of which every sample draws its entries, or with
none. Packs are learned from other parts of the training text than they are trained with, so that training sees how well
a pack serves new text; a story that the text repeats may stand in both.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_zip.errors import DataError
from mlx_zip.files import whole_folder

from .requests import write_jsonl
from .settings import PackSettings

if TYPE_CHECKING:
    from .recipe import Recipe

OWN = "own"  # the pack that the model is to begin with
TEXTS, PACKS, WINDOWS = "pack-texts", "packs", "prepared"


def drawn(packs: PackSettings) -> list[str]:
    """Names of the packs that samples draw from."""
    return [f"drawn-{number}" for number in range(len(packs.sizes))]


def unseen(packs: PackSettings) -> dict[str, int]:
    """Names of the packs that nothing is trained with, and their sizes: to measure with."""
    return {f"unseen-{size}": size for size in packs.unseen}


def parts(packs: PackSettings) -> Iterator[tuple[str, tuple[int, int]]]:
    """The parts that the texts are cut into, in order: name, and how many stories and conversations."""
    yield "empty", packs.empty
    yield OWN, packs.own
    yield from ((name, packs.drawn) for name in drawn(packs))
    yield f"learn-{OWN}", packs.learn_own
    for name, size in zip(drawn(packs), packs.sizes, strict=True):
        times = 2 if size >= packs.large else 1
        yield f"learn-{name}", (times * packs.learn[0], times * packs.learn[1])
    yield "learn-unseen", packs.learn_unseen


def trained_on(packs: PackSettings) -> list[str]:
    """The parts that models are trained on; the first begins with no pack, each other with the pack of its name."""
    return ["empty", OWN, *drawn(packs)]


def make_texts(recipe: Recipe) -> None:
    """pack-texts/: the parts, each a run of the training stories and one of the conversations, shuffled together."""
    stories, talks = (_lines(recipe.out / f"texts/{name}.jsonl") for name in ("train", "conversations"))
    with whole_folder(recipe.out / TEXTS) as folder:
        for seed, (name, (n_stories, n_talks)) in enumerate(parts(recipe.settings.packs)):
            part = [*islice(stories, n_stories), *islice(talks, n_talks)]
            if missing := n_stories + n_talks - len(part):
                raise DataError(f"there are too few texts for {TEXTS}/{name}: {missing} are missing")
            random.Random(seed).shuffle(part)
            write_jsonl(folder / f"{name}.jsonl", part)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def learn(recipe: Recipe) -> None:
    """packs/NAME.npz of every pack."""
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
    """prepared/packed-NAME of every part that is trained on, prepared/plain-packed of all of them, not compressed."""
    settings, packs = recipe.settings, recipe.settings.packs
    fixed = {"model": "runs/zip/model", "context": settings.long, "shard_samples": settings.shard_samples,
             "workers": settings.workers, "no_pack": True}  # fmt: skip
    sizes = {OWN: packs.size, **dict(zip(drawn(packs), packs.sizes, strict=True))}
    starts = {name: {"start": f"{PACKS}/{name}.npz", "start_draw": size} for name, size in sizes.items()}
    texts = {f"packed-{name}": (f"{TEXTS}/{name}.jsonl", starts.get(name, {})) for name in trained_on(packs)}
    texts["packed-valid"] = ("texts/valid.jsonl", starts[OWN])
    for name, (text, start) in texts.items():
        recipe.command("prepare", {**fixed, **packs.codec, **start, "data": text, "out": f"{WINDOWS}/{name}"})
    plain = {**fixed, "model": "runs/control/model", "codebook_size": 0, "merge_size": 1, "protect": settings.protect}
    every = [f"{TEXTS}/{name}.jsonl" for name in trained_on(packs)]
    for name, text in (("plain-packed", every), ("plain-valid", ["texts/valid.jsonl"])):
        recipe.command("prepare", {**plain, "data": text, "out": f"{WINDOWS}/{name}"})


def windows(packs: PackSettings) -> list[str]:
    """The files that `make_windows` makes."""
    names = [f"packed-{name}" for name in [*trained_on(packs), "valid"]]
    return [f"{WINDOWS}/{name}/index.json" for name in [*names, "plain-packed", "plain-valid"]]


def train_packed(recipe: Recipe) -> None:
    """runs/packed: the zip2zip model, trained with packs."""
    packs = recipe.settings.packs
    data = [f"{WINDOWS}/packed-{name}" for name in trained_on(packs)]
    _train(recipe, "packed", {"model": "runs/zip/model", "data": data, "valid": f"{WINDOWS}/packed-valid"})


def train_control(recipe: Recipe) -> None:
    """runs/packed-control: the control, trained as long on the same text, not compressed."""
    data = {"data": f"{WINDOWS}/plain-packed", "valid": f"{WINDOWS}/plain-valid"}
    _train(recipe, "packed-control", {"model": "runs/control/model", **data})


def _train(recipe: Recipe, name: str, flags: dict[str, Any]) -> None:
    fixed = {"out": f"runs/{name}", "seed": recipe.settings.seed}
    recipe.command("train", {**fixed, **flags, **recipe.settings.packs.training[name]})
