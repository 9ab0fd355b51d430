"""Measures a leg on held-out texts: base, control, trained model, and the trained model without hypertokens.

The models are float32 folders, made from the control's adapter and from the adapter to ship (leg-N/adapter), and
measured by `mlx_zip evaluate`. The records are written to leg-N/measured.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mlx_zip import named
from mlx_zip.errors import DataError
from mlx_zip.files import atomic_folder, read_json_object, write_json
from mlx_zip.text.tokenizers import load_tokenizer
from mlx_zip.training.run_folder import read_metrics
from mlx_zip.training.saving import ADAPTER_CONFIG, ZIP_CONFIG

from .recipe import Recipe
from .texts import read_json_lines, render_record
from .training import CONTROL, ZIP

BASE, MASKED = "base", "masked"
LABELS_FILE = "labels.json"
SHIPPED = "adapter"  # folder in a leg
EVALUATE = ("evaluate", "--engine", "torch")


def make_models(recipe: Recipe) -> dict[str, Path]:
    """Returns the folders of the compared models, by name; makes missing folders.

    The model "masked" is the trained model's decoder as a plain model, without hypertokens. The leg must have its
    adapter to ship. Raises `TrainingError` if a command fails, `DataError` if the leg was measured with another
    codebook size.
    """
    leg = recipe.last_folder
    folder = leg / "models"
    folder.mkdir(parents=True, exist_ok=True)
    made = {BASE: recipe.model, CONTROL: folder / CONTROL, MASKED: folder / MASKED, ZIP: folder / ZIP}
    for name, trained in ((CONTROL, CONTROL), (MASKED, ZIP)):
        fuse_adapter(recipe, recipe.model, leg / trained / "adapter", made[name])
    words = ["--hf-path", leg / SHIPPED, "--base", recipe.model, "--dtype", "float32"]
    recipe.make(made[ZIP], "convert", *words, flag="--mlx-path")
    made_with = read_json_object(made[ZIP] / "config.json")["zip2zip"]["compression"]["max_codebook_size"]
    if made_with != read_json_object(leg / SHIPPED / ZIP_CONFIG)["compression"]["max_codebook_size"]:
        raise DataError(f"{leg} was measured with {made_with} entries: remove {made[ZIP]} and {leg / 'measured'} first")
    return made


def fuse_adapter(recipe: Recipe, model: Path, adapter: Path, out: Path) -> Path:
    """Returns `out`, the plain model `model` with the adapter's LoRA merged; makes the folder if it is missing."""
    lora = out.with_name(f"{out.name}-lora")
    recipe.make(lora, "convert", "--hf-path", adapter, "--lora-only", flag="--mlx-path")
    words = ["fuse", "--model", model, "--adapter-path", lora]
    return recipe.make(out, *words, flag="--save-path", module="mlx_lm")


def measure_models(recipe: Recipe) -> None:
    """Writes bits-DOMAIN.json, bits-chat-pack.json, rates.json and labels.json to leg-N/measured, if missing.

    labels.json needs the shared folder's data sets for classification. Raises `TrainingError` if a command fails.
    """
    folders, out, sizes = make_models(recipe), recipe.last_folder / "measured", recipe.settings.measure
    held_out = recipe.data / "held_out"
    out.mkdir(exist_ok=True)
    bits = ["--context", sizes.context, "--limit-bytes", sizes.bytes]
    every = [word for name in (BASE, CONTROL, MASKED, ZIP) for word in ("--model", folders[name])]
    for domain in sizes.domains:
        texts = write_as_texts(held_out / f"{domain}.jsonl", out / f"{domain}.jsonl", recipe.model)
        recipe.make(out / f"bits-{domain}.json", *EVALUATE, *every, "--data", texts, *bits)
    words = ["--model", folders[ZIP], "--pack", recipe.pack("chat"), "--data", out / "chat.jsonl", *bits]
    recipe.make(out / "bits-chat-pack.json", *EVALUATE, *words)
    count = write_requests(held_out / "chat.jsonl", out / "requests.jsonl", sizes.answers)
    words = [word for name in (BASE, CONTROL, ZIP) for word in ("--model", folders[name])]
    words += ["--generate", count, "--prompts", out / "requests.jsonl", "--max-tokens", sizes.answer]
    recipe.make(out / "rates.json", *EVALUATE, *words)
    file = out / LABELS_FILE
    if recipe.shared is not None and not file.exists():
        from .labels import measure_labels  # needs PyTorch

        compared = {name: folders[name] for name in (CONTROL, BASE, ZIP)}
        classes = recipe.shared / "data" / "cls"
        write_json(file, measure_labels(compared, CONTROL, classes, sizes.labels, sizes.label_text))


def write_as_texts(documents: Path, out: Path, model: Path) -> Path:
    """Writes records to `out` as JSON lines of texts, conversations rendered by the chat template. Returns `out`."""
    found = read_json_lines(documents)
    tokenizer = load_tokenizer(model)
    with out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": render_record(one, tokenizer)}) + "\n" for one in found)
    return out


def write_requests(texts: Path, out: Path, most: int) -> int:
    """Writes up to `most` conversations, cut after the first user turn, as prompts to `out`. Returns their number."""
    found = [record["messages"] for record in read_json_lines(texts)]
    opened = [talk[: 1 + next(i for i, turn in enumerate(talk) if turn["role"] == "user")] for talk in found[:most]]
    with out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": talk}) + "\n" for talk in opened)
    return len(opened)


def write_adapter(recipe: Recipe) -> None:
    """Writes leg-N/adapter, the adapter to ship: the trained one with the base's hub id in place of a local path.

    Its codebook adds fewer entries to the pack's than in training: a codebook is full early, its own entries are the
    first runs of a text, and these cost more bits per saved step than the pack's.
    """
    leg = recipe.last_folder
    with atomic_folder(leg / SHIPPED, replace=True) as partial:
        for file in sorted((leg / ZIP / "adapter").iterdir()):
            if file.name not in (ADAPTER_CONFIG, ZIP_CONFIG):
                shutil.copyfile(file, partial / file.name)
                continue
            config = {**read_json_object(file), "base_model_name_or_path": named.HUB}
            if file.name == ZIP_CONFIG:
                size = len(config["start"]) + recipe.settings.packs.shipped_growth
                config["compression"] = {**config["compression"], "max_codebook_size": size}
            write_json(partial / file.name, config)


def write_record(recipe: Recipe) -> None:
    """Writes leg-N/measured/record.jsonl: one line per measurement, and one training curve per leg up to this one.

    Generated texts are left out. Models are named base, control, masked or zip.
    """
    measured, number = recipe.last_folder / "measured", recipe.last
    lines = [_make_training_curve(recipe.folder(n), n) for n in range(1, number + 1)]
    for file in sorted(measured.glob("*.json")):
        found = read_json_object(file)
        if file.name == LABELS_FILE:
            lines.append({"part": file.stem, "leg": number, **found})
            continue
        kept = {key: found[key] for key in ("time", "machine", "system", "versions")}
        models = {}
        for one in found["models"]:
            name = Path(one["model"]).name
            figures = one.get("text") or one["generation"]
            left_out = ("texts", "turns", "settings")
            models[name if name in (CONTROL, MASKED, ZIP) else BASE] = {
                key: value for key, value in figures.items() if key not in left_out
            }
        lines.append({"part": file.stem, "leg": number, **kept, "models": models})
    (measured / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _make_training_curve(leg: Path, number: int) -> dict[str, Any]:
    """Returns the mean bits per byte of training batches, per tenth of the leg, for the model and the control."""
    made: dict[str, Any] = {"part": "curve", "leg": number}
    for name in (ZIP, CONTROL):
        steps = [step for step in read_metrics(leg / name) if "loss" in step]
        made[name] = [
            {
                "base_tokens": part[-1]["seen_base_ids"],
                "bits_per_byte": sum(step["bits_per_byte"] for step in part) / len(part),
            }
            for part in np.array_split(np.array(steps), min(10, len(steps)))
        ]
    return made
