"""Runs the stages of the recipe in order, from a folder of stories to the two bundled models, with `mlx_zip` commands.

    texts           writes stories and conversations as JSON lines, and test requests
    tokenizer       learns a tokenizer from the stories
    short           prepares short windows of stories
    base-short      trains the base from random weights on short windows
    long            prepares long windows of stories and of conversations
    base            trains the base further on long windows
    compressed      prepares the long windows compressed
    zip             trains the base with new hyper-encoders on the compressed windows
    control         trains the base on the long windows for as many steps as `zip`
    pack-texts      cuts the texts into parts, for learning packs and for training with packs
    packs           learns codebook packs from the stories
    windows         prepares windows that begin with packs, and uncompressed windows for the control
    packed          trains `zip` further on windows that begin with packs, in rounds, the last rounds canonical
    packed-control  trains `control` further on the text of `packed`
    quantized       quantizes both models
    tuned           tunes the rows of the bundled pack for the quantized model
    bundle          puts both models and the pack together
    head            trains a draft head for the bundled zip2zip model
    measure         measures bits per byte and generation rates of the models
    smaller         trains and quantizes smaller plain models to compare with; runs only if it is named

What exists is not made again, so the same command continues an interrupted run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from mlx_zip.errors import DataError
from mlx_zip.files import write_json

from . import base, bundle, packs, smaller
from .commands import Recipe

STAGES: dict[str, Callable[[Recipe], None]] = {
    "texts": base.make_texts,
    "tokenizer": base.make_tokenizer,
    "short": lambda recipe: base.make_windows(recipe, "short"),
    "base-short": base.train_base,
    "long": lambda recipe: base.make_windows(recipe, "long"),
    "base": base.train_chat,
    "compressed": lambda recipe: base.make_windows(recipe, "compressed"),
    "zip": base.train_zip,
    "control": base.train_control,
    "pack-texts": packs.make_texts,
    "packs": packs.learn_packs,
    "windows": packs.make_windows,
    "packed": packs.train_packed,
    "packed-control": packs.train_control,
    "quantized": bundle.quantize_models,
    "tuned": bundle.tune_pack,
    "bundle": bundle.make_bundle,
    "head": bundle.train_head,
    "measure": bundle.measure_models,
    "smaller": smaller.make_smaller,
}
IF_NAMED = ("smaller",)  # stages that run only if they are named
FOLDERS = ("bundle", "figures", "packs", packs.TEXTS, "prepared", bundle.QUANTIZED, "runs", "texts", "tokenizer")


def run_stages(recipe: Recipe, stages: Sequence[str] = ()) -> None:
    """Runs the named stages in the given order, or all but those in `IF_NAMED`.

    Raises `DataError` if a name is unknown or an input or the `out` folder does not fit, and `TrainingError` if a
    command fails.
    """
    if unknown := sorted(set(stages) - set(STAGES)):
        raise DataError(f"--stage: {', '.join(unknown)} is none of {', '.join(STAGES)}")
    _check_out_folder(recipe)
    for name in stages or [name for name in STAGES if name not in IF_NAMED]:
        recipe.say(f"== {name}")
        STAGES[name](recipe)


def _check_out_folder(recipe: Recipe) -> None:
    """Writes the settings to a new `out` folder, or checks that an existing `out` folder was begun with equal settings.

    Raises `DataError` if the existing folder was begun with other settings or has no record of settings.
    """
    record = {
        "settings": asdict(recipe.settings),
        "fingerprint": recipe.settings.fingerprint(),
        "checked": recipe.check,
    }
    path = recipe.out / bundle.RECORD
    begun = [name for name in FOLDERS if (recipe.out / name).exists()]
    if not begun:
        recipe.out.mkdir(parents=True, exist_ok=True)
        write_json(path, record)
        return
    if not path.exists():
        raise DataError(
            f"{recipe.out} has {begun[0]}, but no {bundle.RECORD} that says what made it; choose another --out"
        )
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}; choose another --out") from error
    if not isinstance(before, dict) or before.get("fingerprint") != record["fingerprint"]:
        raise DataError(f"{recipe.out} holds what other settings made (see {path}); choose another --out")
    if before.get("checked") != recipe.check:
        raise DataError(
            f"{recipe.out} was begun {'with' if recipe.check else 'without'} --no-checksum; call it so, or choose "
            "another --out"
        )
