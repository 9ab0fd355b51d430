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
from mlx_zip.training.run_metrics import read_metrics
from mlx_zip.training.saving import ADAPTER_CONFIG, ZIP_CONFIG
from recipes.stories.commands import RunModule, run_command

from .settings import MeasureSettings, PackSettings
from .texts import read_json_lines, render_record
from .training import CONTROL, ZIP

BASE, MASKED = "base", "masked"
LABELS_FILE = "labels.json"
SHIPPED = "adapter"  # folder in a leg


def make_models(model: Path, leg: Path, call: RunModule) -> dict[str, Path]:
    """Returns the folders of the compared models, by name; makes missing folders.

    The model "masked" is the trained model's decoder as a plain model, without hypertokens. model: folder of the base.
    leg: folder of the trained leg, with the adapter to ship. Raises `TrainingError` if a command fails, `DataError` if
    the leg was measured with another codebook size.
    """
    folder = leg / "models"
    folder.mkdir(parents=True, exist_ok=True)
    made = {BASE: model, CONTROL: folder / CONTROL, MASKED: folder / MASKED, ZIP: folder / ZIP}
    for name, trained in ((CONTROL, CONTROL), (MASKED, ZIP)):
        fuse_adapter(model, leg / trained / "adapter", made[name], call)
    if not made[ZIP].exists():
        words = ["--hf-path", leg / SHIPPED, "--base", model, "--dtype", "float32", "--mlx-path", made[ZIP]]
        run_command(call, "mlx_zip", ["convert", *words], leg)
    made_with = read_json_object(made[ZIP] / "config.json")["zip2zip"]["compression"]["max_codebook_size"]
    if made_with != read_json_object(leg / SHIPPED / ZIP_CONFIG)["compression"]["max_codebook_size"]:
        raise DataError(f"{leg} was measured with {made_with} entries: remove {made[ZIP]} and {leg / 'measured'} first")
    return made


def fuse_adapter(model: Path, adapter: Path, out: Path, call: RunModule) -> Path:
    """Returns `out`, the plain model `model` with the adapter's LoRA merged; makes the folder if it is missing."""
    lora = out.with_name(f"{out.name}-lora")
    if not lora.exists():
        run_command(call, "mlx_zip", ["convert", "--hf-path", adapter, "--lora-only", "--mlx-path", lora], out.parent)
    if not out.exists():
        run_command(call, "mlx_lm", ["fuse", "--model", model, "--adapter-path", lora, "--save-path", out], out.parent)
    return out


def measure_models(
    model: Path, data: Path, packs: Path, classes: Path | None, leg: Path, sizes: MeasureSettings, call: RunModule
) -> None:
    """Writes bits-DOMAIN.json, bits-chat-pack.json, rates.json and labels.json to leg/measured, if missing.

    data: folder with the held-out texts. packs: folder with the learned packs. classes: folder with the data sets for
    classification, None to leave out labels.json. Raises `TrainingError` if a command fails.
    """
    folders, out = make_models(model, leg, call), leg / "measured"
    out.mkdir(exist_ok=True)
    common = ["evaluate", "--engine", "torch"]
    bits = ["--context", sizes.context, "--limit-bytes", sizes.bytes]
    every = [word for name in (BASE, CONTROL, MASKED, ZIP) for word in ("--model", folders[name])]
    for domain in sizes.domains:
        file, texts = (
            out / f"bits-{domain}.json",
            write_as_texts(data / f"{domain}.jsonl", out / f"{domain}.jsonl", model),
        )
        if not file.exists():
            run_command(call, "mlx_zip", [*common, *every, "--data", texts, *bits, "--out", file], leg)
    file = out / "bits-chat-pack.json"
    if not file.exists():
        words = ["--model", folders[ZIP], "--pack", packs / "chat.npz", "--data", out / "chat.jsonl", *bits]
        run_command(call, "mlx_zip", [*common, *words, "--out", file], leg)
    file, asked = out / "rates.json", out / "requests.jsonl"
    if not file.exists():
        count = write_requests(data / "chat.jsonl", asked, sizes.answers)
        both = [word for name in (BASE, CONTROL, ZIP) for word in ("--model", folders[name])]
        words = ["--generate", count, "--prompts", asked, "--max-tokens", sizes.answer]
        run_command(call, "mlx_zip", [*common, *both, *words, "--out", file], leg)
    file = out / LABELS_FILE
    if classes is not None and not file.exists():
        from .labels import measure_labels  # needs PyTorch

        compared = {name: folders[name] for name in (CONTROL, BASE, ZIP)}
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


def write_adapter(leg: Path, packs: PackSettings) -> None:
    """Writes leg/adapter, the adapter to ship: the trained one with the base's hub id in place of a local path.

    Its codebook adds fewer entries to the pack's than in training: a codebook is full early, its own entries are the
    first runs of a text, and these cost more bits per saved step than the pack's.
    """
    with atomic_folder(leg / SHIPPED, replace=True) as partial:
        for file in sorted((leg / ZIP / "adapter").iterdir()):
            if file.name not in (ADAPTER_CONFIG, ZIP_CONFIG):
                shutil.copyfile(file, partial / file.name)
                continue
            config = {**read_json_object(file), "base_model_name_or_path": named.HUB}
            if file.name == ZIP_CONFIG:
                size = len(config["start"]) + packs.shipped_growth
                config["compression"] = {**config["compression"], "max_codebook_size": size}
            write_json(partial / file.name, config)


def write_record(leg: Path, number: int) -> None:
    """Writes measured/record.jsonl: one line per measurement, and one training curve per leg up to this one.

    Generated texts are left out. number: number of the leg. Models are named base, control, masked or zip.
    """
    lines = [_make_training_curve(leg.with_name(f"leg-{n}"), n) for n in range(1, number + 1)]
    for file in sorted((leg / "measured").glob("*.json")):
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
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (leg / "measured" / "record.jsonl").write_text(text, encoding="utf-8")


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
