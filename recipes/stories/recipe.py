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

A stage whose results exist is skipped, so the same command continues an interrupted run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mlx_zip.errors import DataError
from mlx_zip.files import write_json

from . import base, bundle, packs, smaller
from .commands import Recipe


@dataclass(frozen=True)
class Stage:
    """A stage of the recipe.

    make: runs the stage. products: returns the paths, relative to `out`, of its results. if_named: whether the stage
    runs only if it is named.
    """

    make: Callable[[Recipe], None]
    products: Callable[[Recipe], list[str]]
    if_named: bool = False


def _window_indices(kind: str) -> Callable[[Recipe], list[str]]:
    return lambda _: [f"{folder}/index.json" for folder in base.list_window_folders(kind)]


def _run_model(run: str) -> Callable[[Recipe], list[str]]:
    return lambda _: [f"{base.model_path(run)}/config.json"]


def _round_models(name: str) -> Callable[[Recipe], list[str]]:
    return lambda recipe: [
        f"{base.model_path(run)}/config.json" for run in packs.list_runs(recipe.settings.packs)[name]
    ]


STAGES: dict[str, Stage] = {
    "texts": Stage(base.make_texts, lambda _: ["texts/requests.jsonl"]),
    "tokenizer": Stage(base.make_tokenizer, lambda _: ["tokenizer/tokenizer.json"]),
    "short": Stage(lambda recipe: base.make_windows(recipe, "short"), _window_indices("short")),
    "base-short": Stage(base.train_base, _run_model("base-short")),
    "long": Stage(lambda recipe: base.make_windows(recipe, "long"), _window_indices("long")),
    "base": Stage(base.train_chat, _run_model("base")),
    "compressed": Stage(lambda recipe: base.make_windows(recipe, "compressed"), _window_indices("compressed")),
    "zip": Stage(base.train_zip, _run_model("zip")),
    "control": Stage(base.train_control, _run_model("control")),
    "pack-texts": Stage(packs.make_texts, lambda _: [packs.TEXTS]),
    "packs": Stage(packs.learn_packs, lambda recipe: packs.list_pack_files(recipe.settings.packs)),
    "windows": Stage(packs.make_windows, lambda recipe: packs.list_window_files(recipe.settings.packs)),
    "packed": Stage(packs.train_packed, _round_models(packs.PACKED)),
    "packed-control": Stage(packs.train_control, _round_models(packs.CONTROL)),
    "quantized": Stage(
        bundle.quantize_models, lambda recipe: [f"{bundle.QUANTIZED}/{name}" for name in recipe.settings.bundled]
    ),
    "tuned": Stage(bundle.tune_pack, lambda _: [bundle.TUNED]),
    "bundle": Stage(bundle.make_bundle, lambda _: [f"bundle/{bundle.RECORD}"]),
    "head": Stage(bundle.train_head, lambda _: [bundle.HEAD]),
    "measure": Stage(
        bundle.measure_models,
        lambda recipe: [f"figures/{name}.json" for name, _ in bundle.list_measurements(recipe.settings)],
    ),
    "smaller": Stage(smaller.make_smaller, lambda _: [smaller.BITS], if_named=True),
}


def run_stages(recipe: Recipe, stages: Sequence[str] = ()) -> None:
    """Runs the named stages in the given order, or all but `if_named` ones. Skips stages whose results exist.

    Raises `DataError` if a name is unknown or an input or the `out` folder does not fit, and `TrainingError` if a
    command fails.
    """
    if unknown := sorted(set(stages) - set(STAGES)):
        raise DataError(f"--stage: {', '.join(unknown)} is none of {', '.join(STAGES)}")
    _check_out_folder(recipe)
    for name in stages or [name for name, stage in STAGES.items() if not stage.if_named]:
        stage = STAGES[name]
        if all((recipe.out / product).exists() for product in stage.products(recipe)):
            recipe.say(f"== {name}: done before")
            continue
        recipe.say(f"== {name}")
        stage.make(recipe)


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
    folders = {Path(product).parts[0] for stage in STAGES.values() for product in stage.products(recipe)}
    begun = [name for name in sorted(folders) if (recipe.out / name).exists()]
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
