"""Trains plain models that are smaller than the baseline, on the same texts, to compare the bundled pair with.

Such a model has fewer operations per step, and is expected to need more bits per byte: hypertokens have to do better
than that.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mlx_zip.files import atomic_folder

from . import base, packs
from .bundle import QUANTIZED, evaluate_models, evaluation_sizes, quantize_plain_model
from .commands import Recipe
from .settings import SMALLER

FOLDER = "smaller"  # folder in `out`: a folder for each smaller model, which holds its training runs
SHARED = ("texts", "tokenizer", "prepared")  # what all models of a recipe have in common
BITS = "figures/bits-smaller.json"  # measured bits per byte


def make_smaller(recipe: Recipe) -> None:
    """Trains all models of `SMALLER`, writes smaller/quantized/ and measures bits per byte on single test stories."""
    if (recipe.out / BITS).exists():
        return
    train_smaller(recipe)
    quantize_smaller(recipe)
    (recipe.out / BITS).parent.mkdir(exist_ok=True)
    models = [f"{FOLDER}/{QUANTIZED}/{name}" for name in SMALLER]
    evaluate_models(recipe, BITS, models, data="texts/t1.test.jsonl", **evaluation_sizes(recipe.settings))


def train_smaller(recipe: Recipe) -> None:
    """Trains each model of `SMALLER` in the same stages, on the same windows, as the control."""
    for name, shape in SMALLER.items():
        out = recipe.out / FOLDER / name
        out.mkdir(parents=True, exist_ok=True)
        for shared in SHARED:
            if not (out / shared).exists():
                (out / shared).symlink_to(Path("../..", shared))
        one = replace(recipe, out=out, settings=replace(recipe.settings, model={**recipe.settings.model, **shape}))
        for train in (base.train_base, base.train_chat, base.train_control, packs.train_control):
            train(one)


def quantize_smaller(recipe: Recipe) -> None:
    """Writes smaller/quantized/: the models of `SMALLER` with as many bits per weight as the bundled models."""
    with atomic_folder(recipe.out / FOLDER / QUANTIZED) as folder:
        last = packs.list_runs(recipe.settings.packs)[packs.CONTROL][-1]
        for name in SMALLER:
            quantize_plain_model(recipe, f"{FOLDER}/{name}/{base.model_path(last)}", f"{FOLDER}/{folder.name}/{name}")
