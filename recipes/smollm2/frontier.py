"""Measures bits per byte and seconds per byte of the model with hypertokens and of shallower plain models.

Hypertokens save time at the cost of more bits per byte, and so do fewer layers. From the base, the consecutive layers
are dropped that change the hidden states least (arXiv 2403.17887). The rest is then healed: trained like the control,
in as many legs, on the same windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlx_zip.files import atomic_folder, read_json_object, write_json

from .measuring import EVALUATE, fuse_adapter, make_models
from .recipe import Recipe
from .texts import read_json_lines
from .training import CONTROL, ZIP, heal_models

LAYER_PREFIX = "model.layers."
_COPIED = ("tokenizer", "special_tokens", "chat_template", "generation_config")


@torch.no_grad()
def measure_layer_distances(model: Path, texts: Sequence[str], dropped: int) -> list[float]:
    """Returns, per possible first layer, the angular distance of hidden states before and after `dropped` layers.

    The distance is the angle at the last token divided by pi, averaged over the texts. model: transformers folder.
    """
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer, total = AutoTokenizer.from_pretrained(model), torch.zeros(loaded.config.num_hidden_layers - dropped + 1)
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text)[:256]])
        states = torch.stack(loaded(ids, output_hidden_states=True).hidden_states)[:, 0, -1]
        cosines = torch.nn.functional.cosine_similarity(states[: len(total)], states[dropped:], dim=-1)
        total += torch.arccos(cosines.clamp(-1, 1)) / torch.pi
    return (total / len(texts)).tolist()


def drop_layers(model: Path, first: int, dropped: int, out: Path) -> None:
    """Writes a copy of a model's folder to `out`, without the layers `first` to `first + dropped - 1`."""
    weights, kept = {}, {}
    for file in sorted(model.glob("*.safetensors")):
        weights |= load_file(file)
    for name, tensor in weights.items():
        if name.startswith(LAYER_PREFIX):
            number, _, rest = name.removeprefix(LAYER_PREFIX).partition(".")
            if first <= int(number) < first + dropped:
                continue
            name = f"{LAYER_PREFIX}{int(number) - dropped * (int(number) >= first)}.{rest}"
        kept[name] = tensor.contiguous()
    config = read_json_object(model / "config.json")
    with atomic_folder(out) as partial:
        save_file(kept, partial / "model.safetensors", metadata={"format": "pt"})
        write_json(partial / "config.json", {**config, "num_hidden_layers": config["num_hidden_layers"] - dropped})
        for file in model.iterdir():
            if file.name.startswith(_COPIED):
                (partial / file.name).write_bytes(file.read_bytes())


def make_shallow_models(model: Path, texts: Path, folder: Path, layers: Sequence[int]) -> dict[str, Path]:
    """Returns folders, by name, of the base with fewer layers, one per number in `layers`; makes missing folders."""
    made, all_layers = {}, read_json_object(model / "config.json")["num_hidden_layers"]
    opened = [record["text"] for record in read_json_lines(texts)[:16]]
    for count in layers:
        out = made[f"layers-{count}"] = folder / f"layers-{count}"
        if not out.exists():
            turned = measure_layer_distances(model, opened, all_layers - count)
            drop_layers(model, turned.index(min(turned)), all_layers - count, out)
    return made


def measure_frontier(recipe: Recipe) -> None:
    """Makes and trains the shallow models for leg N, measures all models, and writes leg-N/frontier/points.json.

    A point is {"model", "pack", "domain", "bits_per_byte", "ids_per_byte", "step_s"}; seconds per byte are
    `ids_per_byte` times `step_s`. Steps are timed, so the machine must be idle. Raises `TrainingError` if a command
    fails.
    """
    frontier, measure, leg = recipe.settings.frontier, recipe.settings.measure, recipe.last_folder
    out, found = leg / "frontier", make_models(recipe)
    cut = make_shallow_models(recipe.model, leg / "measured" / "code.jsonl", out / "cut", frontier.layers)
    healed = heal_in_legs(recipe, cut, out)
    plain = {"base": recipe.model, CONTROL: found[CONTROL]}
    for name, folder in cut.items():
        plain[f"{name} healed"] = fuse_adapter(recipe, folder, healed / name / "adapter", out / f"{name}-healed")
    steps = {name: _measure_step_s(recipe, folder, "torch-base") for name, folder in plain.items()}
    steps[ZIP] = _measure_step_s(recipe, found[ZIP], "torch-zip")
    chosen = [(name, folder, None) for name, folder in plain.items()]
    chosen += [(ZIP, found[ZIP], pack) for pack in (None, *frontier.packs)]
    points = []
    for name, folder, pack in chosen:
        for domain in frontier.domains:
            words = ["--model", folder, "--data", leg / "measured" / f"{domain}.jsonl"]
            words += ["--context", measure.context, "--limit-bytes", measure.bytes]
            words += [] if pack is None else ["--pack", recipe.pack(pack)]
            file = out / f"bits-{name.replace(' ', '-')}-{pack}-{domain}.json"
            points.append(_make_point(name, pack, domain, recipe.make(file, *EVALUATE, *words), steps[name]))
    write_json(out / "points.json", {"points": points})


def heal_in_legs(recipe: Recipe, models: Mapping[str, Path], out: Path) -> Path:
    """Trains models leg by leg on the control's texts, in out/leg-N; returns the folder of the last leg."""
    before = None
    for number, leg in enumerate(recipe.legs(), start=1):
        folder = out / f"leg-{number}"
        heal_models(models, recipe.folder(number) / "data" / CONTROL, folder, leg, before)
        before = folder
    assert before is not None
    return before


def _make_point(name: str, pack: str | None, domain: str, file: Path, step_s: float) -> dict[str, Any]:
    (one,) = read_json_object(file)["models"]
    text: Mapping[str, Any] = one["text"]
    figures = {"bits_per_byte": text["bits_per_byte"], "ids_per_byte": text["ids"] / text["bytes"], "step_s": step_s}
    return {"model": name, "pack": pack, "domain": domain, **figures}


def _measure_step_s(recipe: Recipe, folder: Path, engine: str) -> float:
    """Returns the median seconds per step while the model in `folder` writes a given text."""
    leg, kind = recipe.last_folder, "--base" if engine == "torch-base" else "--model"
    text = leg / "measured" / "code.jsonl"
    words = ["bench", "generate", "--engines", engine, kind, folder, "--text", f"code={text}"]
    words += ["--sizes", recipe.settings.frontier.sizes]
    record = leg / "frontier" / f"steps-{engine}-{folder.name}.jsonl"
    (line,) = read_json_lines(recipe.make(record, *words, flag="--record"))
    return line["figures"]["step_ms"]["median"] / 1000
