"""Trains plain models that are smaller than the baseline, on the same texts, to compare the bundled pair with.

A smaller plain model is faster too, and also needs more bits per byte. `docs/reports/stories.md` compares both ways.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mlx_zip.files import atomic_folder

from . import base, packs
from .bundle import QUANTIZED
from .commands import Recipe, as_words
from .settings import SMALLER

FOLDER = "smaller"  # folder in `out`: a folder for each smaller model, which holds its training runs
SHARED = ("texts", "tokenizer", "prepared")  # what all models of a recipe have in common
BITS = "figures/bits-smaller.json"  # measured bits per byte


def make_smaller(recipe: Recipe) -> None:
    """Trains all models of `SMALLER`, writes smaller/quantized/ and measures bits per byte on single test stories."""
    train_smaller(recipe)
    quantize_smaller(recipe)
    (recipe.out / BITS).parent.mkdir(exist_ok=True)
    models = [word for name in SMALLER for word in ("--model", f"{FOLDER}/{QUANTIZED}/{name}")]
    flags = {"data": "texts/t1.test.jsonl", "context": recipe.settings.long, "out": BITS}
    recipe.run_module("mlx_zip", ["evaluate", *models, *as_words(flags)])


def train_smaller(recipe: Recipe) -> None:
    """Trains each model of `SMALLER` in the same stages, on the same windows, as the control. Skips finished runs."""
    for name, shape in SMALLER.items():
        out = recipe.out / FOLDER / name
        out.mkdir(parents=True, exist_ok=True)
        for shared in SHARED:
            if not (out / shared).exists():
                (out / shared).symlink_to(Path("../..", shared))
        one = replace(recipe, out=out, settings=replace(recipe.settings, model={**recipe.settings.model, **shape}))
        for run, train in (("base-short", base.train_base), ("base", base.train_chat), ("control", base.train_control)):
            if not (out / base.model_path(run) / "config.json").exists():
                train(one)
        packs.train_control(one)


def quantize_smaller(recipe: Recipe) -> None:
    """Writes smaller/quantized/: the models of `SMALLER` with as many bits per weight as the bundled models."""
    with atomic_folder(recipe.out / FOLDER / QUANTIZED) as folder:
        last = packs.list_runs(recipe.settings.packs)[packs.CONTROL][-1]
        for name in SMALLER:
            flags = {
                "hf_path": f"{FOLDER}/{name}/{base.model_path(last)}",
                "mlx_path": f"{FOLDER}/{folder.name}/{name}",
                "quantize": True,
                "q_bits": recipe.settings.bits,
                "q_group_size": 64,
                "dtype": "float32",
            }
            recipe.run_module("mlx_lm convert", as_words(flags))
