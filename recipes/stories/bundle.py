"""Makes the last part of the recipe: quantized models, tuned pack, bundle, draft head, and measurements."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlx_zip import named
from mlx_zip.errors import TrainingError
from mlx_zip.files import atomic_folder

from . import packs
from .base import TRAIN_SETS, model_path
from .commands import Recipe, as_words
from .settings import Flags, Settings
from .texts import SOURCES

RECORD = "recipe.json"  # file with the settings, in the `out` folder and in the bundle
HEAD = f"bundle/{named.DEFAULT}/draft_head.safetensors"
QUANTIZED, TUNED = "quantized", f"{packs.PACKS}/{packs.OWN_PACK}-tuned.npz"


def quantize_models(recipe: Recipe) -> None:
    """Writes quantized/: the models to bundle, quantized. The zip2zip model has no pack yet."""
    bits = recipe.settings.bits
    if (recipe.out / QUANTIZED).exists():
        return
    with atomic_folder(recipe.out / QUANTIZED) as folder:
        for name, run in recipe.settings.bundled.items():
            if name == named.DEFAULT:
                flags = _quantization_flags(bits, model_path(run), f"{folder.name}/{name}")
                recipe.run_mlx_zip("convert", {**flags, "encoder_bits": bits, "canonical": True})
            else:
                quantize_plain_model(recipe, model_path(run), f"{folder.name}/{name}")


def quantize_plain_model(recipe: Recipe, model: str, out: str) -> None:
    """Quantizes a model without hypertokens with mlx-lm. model, out: folders to read and to write, within `out`."""
    recipe.run_module("mlx_lm convert", as_words(_quantization_flags(recipe.settings.bits, model, out)))


def _quantization_flags(bits: int, model: str, out: str) -> Flags:
    return {
        "hf_path": model,
        "mlx_path": out,
        "quantize": True,
        "q_bits": bits,
        "q_group_size": 64,
        "dtype": "float32",
    }


def tune_pack(recipe: Recipe) -> None:
    """Writes packs/own-tuned.npz: the model's own pack, with rows tuned for the quantized model."""
    settings = recipe.settings
    fixed = {"model": f"{QUANTIZED}/{named.DEFAULT}", "dequantize": True, "out": TUNED, "seed": settings.seed}
    data = {"data": f"{packs.TEXTS}/learn-{packs.OWN_PACK}.jsonl", "run": "runs/tuned"}
    recipe.run_mlx_zip(f"vocab pack tune {packs.PACKS}/{packs.OWN_PACK}.npz", {**fixed, **data, **settings.packs.tune})


def make_bundle(recipe: Recipe) -> None:
    """Writes bundle/: both models to ship in the package, the zip2zip model with the tuned pack."""
    if (recipe.out / "bundle").exists():
        return
    with atomic_folder(recipe.out / "bundle") as folder:
        for name in recipe.settings.bundled:
            if name == named.DEFAULT:
                flags = {"hf_path": f"{QUANTIZED}/{name}", "mlx_path": f"{folder.name}/{name}", "pack": TUNED}
                recipe.run_mlx_zip("convert", flags)
            else:
                shutil.copytree(recipe.out / QUANTIZED / name, folder / name)
            for extra in ("README.md", "model.safetensors.index.json"):
                (folder / name / extra).unlink(missing_ok=True)
        (folder / "README.md").write_text(make_model_card(recipe.settings, recipe.check), encoding="utf-8")
        shutil.copy(recipe.out / RECORD, folder / RECORD)


def train_head(recipe: Recipe) -> None:
    """Trains a draft head on texts of the model's last training run, and adds the head to the bundled zip2zip model."""
    if (recipe.out / HEAD).exists():
        return
    settings, model = recipe.settings, f"bundle/{named.DEFAULT}"
    last = f"{packs.TEXTS}/{settings.packs.rounds[-1].prefix}{packs.OWN_PACK}.jsonl"
    for name, text in (("head", last), ("head-valid", "texts/valid.jsonl")):
        fixed = {"context": settings.long, "no_fill_windows": True, "workers": settings.workers}
        recipe.run_mlx_zip("prepare", {"model": model, "data": text, **fixed, "out": f"head-windows/{name}"})
    windows = {"data": "head-windows/head", "valid": "head-windows/head-valid"}
    fixed = {"draft_head": True, "model": model, "out": "runs/head", "seed": settings.seed}
    recipe.run_mlx_zip("train", {**fixed, **windows, **settings.head})


def make_model_card(settings: Settings, checked: bool) -> str:
    """Returns the README of the bundle. checked: whether the training texts had the recorded checksums."""
    used = [source for name, source in SOURCES.items() if name in TRAIN_SETS]
    texts = (
        [f"- `{s.name}` (sha256 {s.sha256}): {s.origin}" for s in used]
        if checked
        else ["- other texts than the recorded ones"]
    )
    lines = [
        "# Bundled models",
        "",
        *(f"- `{name}`: {named.BUNDLED[name]}" for name in settings.bundled),
        "",
        f"Trained from random weights by `make model` with the settings in {RECORD}; stored with {settings.bits} bits "
        "per weight. MIT licence, as the rest of the package. The texts:",
        "",
        *texts,
        "",
        "They tell made-up children's stories and know nothing else; what they say may be wrong or make no sense.",
    ]
    return "\n".join(lines) + "\n"


def list_measurements(settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the measurements as (NAME, flags): `mlx_zip evaluate` with these flags writes figures/NAME.json."""
    size = evaluation_sizes(settings)
    bundled = [f"bundle/{name}" for name in sorted(settings.bundled, reverse=True)]  # the base first
    every = [model_path(run) for run in ("control", "base", "zip")] + bundled
    for text, pack in (("t1.test", False), ("t1.test", True), ("real.test", False)):
        name = f"bits-{text}{'-packed' * pack}"
        yield name, {"data": f"texts/{text}.jsonl", "fill_windows": pack, **size, "model": every}
    last = [model_path(runs[-1]) for runs in packs.list_runs(settings.packs).values()]
    for pack in packs.list_unseen_packs(settings.packs):
        flags = {"data": "texts/t1.test.jsonl", **size, "pack": f"{packs.PACKS}/{pack}.npz"}
        yield f"bits-{pack}", {**flags, "model": last[::-1]}
    asked = {"prompts": "texts/requests.jsonl", "generate": settings.requests, **size, **settings.measure}
    for temp in settings.temperatures:
        for turns in (1, settings.test_turns):
            yield f"rates-{turns}-temp-{temp:g}", {**asked, "temp": temp, "turns": turns, "model": bundled}


def measure_models(recipe: Recipe) -> None:
    """Writes figures/: bits per byte of every model, and generation rates of the bundled models.

    Rates are measured for a story in the first turn and in a later turn of a conversation.
    """
    (recipe.out / "figures").mkdir(exist_ok=True)
    for name, flags in list_measurements(recipe.settings):
        evaluate_models(recipe, f"figures/{name}.json", **flags)


def evaluation_sizes(settings: Settings) -> Flags:
    """Returns the flags of `mlx_zip evaluate` for the context and the batch size."""
    return {"context": settings.long, "batch_size": settings.measure["batch_size"]}


def evaluate_models(recipe: Recipe, file: str, model: Sequence[str], **flags: Any) -> None:
    """Runs `mlx_zip evaluate` for models and writes `file`, unless it exists. model: folders. flags: further flags."""
    if not (recipe.out / file).exists():
        models = [word for one in model for word in ("--model", one)]
        recipe.run_module("mlx_zip", ["evaluate", *models, *as_words(flags), "--out", file])


def install_bundle(recipe: Recipe, place: Path) -> None:
    """Copies the bundle to the folder `place`, atomically; other models in that folder stay.

    Raises `TrainingError` if there is no bundle.
    """
    made = recipe.out / "bundle"
    if not made.is_dir():
        raise TrainingError(f"{made} is not there: run the stage bundle first")
    with atomic_folder(place) as folder:
        shutil.copytree(made, folder, dirs_exist_ok=True)
        for model in place.iterdir() if place.is_dir() else ():
            if model.is_dir() and model.name not in recipe.settings.bundled:  # models of other recipes
                shutil.copytree(model, folder / model.name)
    size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    recipe.say(f"== {place}: {size / 1e6:.2f} MB")
