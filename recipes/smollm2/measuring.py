"""Measures a leg on held-out texts: the base, the control, the trained model, and that one with hypertokens masked.

All of them are float32 folders made from the leg's adapters, and `mlx_zip evaluate` does the measuring. Its records lie
in leg-N/measured, beside the adapter in the form that the package ships.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from mlx_zip import named
from mlx_zip.errors import TrainingError
from mlx_zip.files import whole_folder, write_json
from mlx_zip.training.adapter import CONFIG, ZIP_CONFIG
from mlx_zip.training.run_folder import read_object

from .settings import Measure
from .training import CONTROL, ZIP

BASE, MASKED = "base", "masked"
Call = Callable[[str, Sequence[str], Path], int]
_BASE_NAMED = {CONFIG: "base_model_name_or_path", ZIP_CONFIG: "base_model_name_or_path"}


def make_models(model: Path, leg: Path, call: Call) -> dict[str, Path]:
    """Returns the folders that are compared, by name, and makes those that are missing. Raises `TrainingError`.

    masked: the decoder of the trained model without codec and hyper rows, which is what it is with all hypertokens
    masked. model: folder of the base. leg: folder of the trained leg.
    """
    folder = leg / "models"
    folder.mkdir(parents=True, exist_ok=True)
    made = {BASE: model, CONTROL: folder / CONTROL, MASKED: folder / MASKED, ZIP: folder / ZIP}
    for name, run in ((CONTROL, CONTROL), (MASKED, ZIP)):
        lora = folder / f"{name}-lora"
        if not lora.exists():
            words = ["--hf-path", leg / run / "adapter", "--lora-only", "--mlx-path", lora]
            _run(call, "mlx_zip", ["convert", *words], leg)
        if not made[name].exists():
            _run(call, "mlx_lm", ["fuse", "--model", model, "--adapter-path", lora, "--save-path", made[name]], leg)
    if not made[ZIP].exists():
        words = ["--hf-path", leg / ZIP / "adapter", "--base", model, "--dtype", "float32", "--mlx-path", made[ZIP]]
        _run(call, "mlx_zip", ["convert", *words], leg)
    return made


def measure(model: Path, data: Path, packs: Path, leg: Path, sizes: Measure, call: Call) -> None:
    """Writes bits-DOMAIN.json, bits-chat-pack.json and rates.json, each unless it is there. Raises `TrainingError`.

    data: folder with the held-out texts; packs: folder with the learned packs.
    """
    folders, out = make_models(model, leg, call), leg / "measured"
    out.mkdir(exist_ok=True)
    common = ["evaluate", "--engine", "torch"]
    bits = ["--context", sizes.context, "--limit-bytes", sizes.bytes]
    every = [word for name in (BASE, CONTROL, MASKED, ZIP) for word in ("--model", folders[name])]
    for domain in sizes.domains:
        file = out / f"bits-{domain}.json"
        if not file.exists():
            _run(call, "mlx_zip", [*common, *every, "--data", data / f"{domain}.jsonl", *bits, "--out", file], leg)
    file = out / "bits-chat-pack.json"
    if not file.exists():
        words = ["--model", folders[ZIP], "--pack", packs / "chat.npz", "--data", data / "chat.jsonl", *bits]
        _run(call, "mlx_zip", [*common, *words, "--out", file], leg)
    file, asked = out / "rates.json", out / "requests.jsonl"
    if not file.exists():
        write_requests(data / "chat.jsonl", asked, sizes.answers)
        both = [word for name in (BASE, CONTROL, ZIP) for word in ("--model", folders[name])]
        words = ["--generate", sizes.answers, "--prompts", asked, "--max-tokens", sizes.answer]
        _run(call, "mlx_zip", [*common, *both, *words, "--out", file], leg)


def write_requests(texts: Path, out: Path, count: int) -> None:
    """Writes the first user turns of held-out conversations as requests of `mlx_zip evaluate --prompts`."""
    found = [json.loads(line)["messages"] for line in texts.read_text(encoding="utf-8").splitlines()]
    opened = [talk[: 1 + next(i for i, turn in enumerate(talk) if turn["role"] == "user")] for talk in found]
    with out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": talk}) + "\n" for talk in opened[:count])


def write_adapter(leg: Path) -> None:
    """Copies the trained adapter to leg/adapter, naming the base by its hub id and not by a path of this machine."""
    with whole_folder(leg / "adapter", replace=True) as partial:
        for file in sorted((leg / ZIP / "adapter").iterdir()):
            if key := _BASE_NAMED.get(file.name):
                write_json(partial / file.name, {**read_object(file), key: named.HUB})
            else:
                shutil.copyfile(file, partial / file.name)


def _run(call: Call, module: str, words: Sequence[str | Path | int], folder: Path) -> None:
    """Runs a command. Raises `TrainingError` if it fails."""
    if call(module, [str(word) for word in words], folder):
        raise TrainingError(f"{module} {words[0]} failed in {folder}")
