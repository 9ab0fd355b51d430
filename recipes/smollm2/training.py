"""Trains SmolLM2 in legs: the model with hypertokens and its control, on the same texts, in parallel on PyTorch.

A leg is one run of each model, begun with the previous leg's weights. The control reads the windows uncompressed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

import torch

from mlx_zip.cuda.network.linear import has_bfloat16_units
from mlx_zip.errors import TrainingError
from mlx_zip.training.checkpoints import list_checkpoints
from recipes.stories.commands import Word, print_to_stderr

from .recipe import MIXED, Recipe
from .settings import Leg

ZIP, CONTROL, PLAIN = "zip", "control", "plain"
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}  # glibc's variables
CHARACTERS_PER_ID = 5  # maximum characters of JSON per base id


def prepare_data(recipe: Recipe, number: int) -> None:
    """Prepares the texts of leg `number`: compressed in leg-N/data/zip, uncompressed in leg-N/data/control.

    leg-N/data/plain gets uncompressed windows of other texts of the same mixture, for both models. Raises
    `TrainingError` if a command fails.
    """
    packs, leg, out = recipe.settings.packs, recipe.legs()[number - 1], recipe.folder(number) / "data"
    codec: list[Word] = ["--merge-size", packs.merge_size, "--codebook-size", packs.codebook_size]
    codec += ["--pack", recipe.pack(MIXED)]
    none: list[Word] = ["--merge-size", 1, "--codebook-size", 0]
    mixture = _write_mixture(recipe.data, out / "texts", leg, leg.start, leg.samples)
    wanted = [(ZIP, mixture, leg.samples, codec), (CONTROL, mixture, leg.samples, none)]
    if leg.plain:
        other = _write_mixture(recipe.data, out / "plain-texts", leg, (leg.start + 0.5) % 1, leg.plain)
        wanted.append((PLAIN, other, leg.plain, none))
    for name, texts, samples, flags in wanted:
        sizes = ["--context", leg.context, "--limit", samples, *flags]
        read = ["--model", recipe.model, "--mixture", texts, "--train-on", "all"]
        recipe.run("prepare", *read, *sizes, "--out", out / name)


def _write_mixture(data: Path, out: Path, leg: Leg, start: float, samples: int) -> Path:
    """Writes texts of each domain for `samples` windows, and mixture.yaml, to `out`; returns mixture.yaml's path.

    start: share of each domain's documents to move from the front to the end.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name, share in leg.mixture:
        with open(data / "train" / f"{name}.jsonl", encoding="utf-8", newline="\n") as file:
            documents = list(file)
        at = int(len(documents) * start)
        in_turn, wanted = "".join(documents[at:] + documents[:at]), samples * leg.context * share * CHARACTERS_PER_ID
        times = ceil(wanted / max(1, len(in_turn))) if leg.repeated else 1
        (out / f"{name}.jsonl").write_text(in_turn * times, encoding="utf-8")
    shares = [f"  - data: {out / name}.jsonl\n    share: {share}\n" for name, share in leg.mixture]
    (out / "mixture.yaml").write_text("sources:\n" + "".join(shares), encoding="utf-8")
    return out / "mixture.yaml"


def train_leg(recipe: Recipe, number: int) -> None:
    """Trains both models of leg `number` in parallel, each on one thread; continues interrupted runs.

    Raises `TrainingError`, naming the run, if a run fails. Output is in leg-N/NAME.log.
    """
    leg, out, runs = recipe.legs()[number - 1], recipe.folder(number), {}
    for name in (ZIP, CONTROL):
        read = [out / "data" / name, *([out / "data" / PLAIN] if leg.plain else [])]
        before = None if number == 1 else recipe.folder(number - 1) / name
        words = _make_train_command(recipe.model, read, out / name, leg, before)
        runs[name] = [*words, *(leg.encoder if name == ZIP else ())]
    _run_side_by_side(runs, out, leg)


def heal_models(models: Mapping[str, Path], data: Path, out: Path, leg: Leg, before: Path | None) -> None:
    """Trains plain models like the leg's control, in parallel; continues interrupted runs.

    models: folders by name. data: folder with the control's prepared texts. out: folder for the runs. before: folder of
    the previous leg's runs, None for the first leg. Raises `TrainingError` if a run fails.
    """
    runs = {
        name: _make_train_command(model, [data], out / name, leg, before and before / name)
        for name, model in models.items()
    }
    _run_side_by_side(runs, out, leg)


def _run_side_by_side(runs: Mapping[str, Sequence[Word]], out: Path, leg: Leg) -> None:
    """Runs all unfinished commands in parallel, each on one thread. runs: folder name -> command."""
    running = []
    for name, words in runs.items():
        if is_finished(out / name, leg):
            continue
        out.mkdir(parents=True, exist_ok=True)
        with (out / f"{name}.log").open("ab") as log:
            made = subprocess.Popen(
                [sys.executable, "-m", "mlx_zip", *(str(word) for word in words)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **KEEP_FREED_MEMORY},
            )
        running.append((name, made))
        print_to_stderr(f"training {out / name}; its progress is in {out / name}.log")
    _wait_for_all(running, out)


def _wait_for_all(running: Sequence[tuple[str, subprocess.Popen[bytes]]], out: Path) -> None:
    try:
        failed = [name for name, made in running if made.wait()]
    except BaseException:
        for _, made in running:
            made.terminate()  # each run saves its last step
        for _, made in running:
            made.wait()
        raise
    if failed:
        raise TrainingError(f"{out / failed[0]} could not be trained; see {out / failed[0]}.log")


def is_finished(run: Path, leg: Leg) -> bool:
    """Returns whether a run has taken all steps of a leg and written its adapter."""
    found = list_checkpoints(run)
    return bool(found) and found[-1][0] >= leg.iters and (run / "adapter").is_dir()


def _make_train_command(model: Path, data: Sequence[Path], out: Path, leg: Leg, before: Path | None) -> list[Word]:
    return [
        *("train", "--engine", "torch", "--save", "adapter", "--save-dtype", "float16"),
        *("--dtype", "bfloat16" if torch.cuda.is_available() or has_bfloat16_units() else "float32"),
        *("--model", model, "--data", *data, "--valid-share", leg.valid_share, "--out", out),
        *("--iters", leg.iters, "--batch-size", leg.batch_size, "--warmup", leg.warmup, "--seed", leg.seed),
        *("--learning-rate", leg.learning_rate, "--min-learning-rate", leg.min_learning_rate),
        *("--lora-rank", leg.lora_rank, "--lora-scale", leg.lora_scale),
        *("--save-every", leg.save_every, "--steps-per-report", 1, "--steps-per-eval", leg.iters),
        *(() if before is None else ("--init-from", before)),
    ]
