"""Checkpoints: folders that appear whole, hold all that the next step depends on, and are checked when read.

    step-000200/  trained.safetensors    the weights that are trained
                  optimizer.safetensors  the optimizer's state and the random state
                  state.json             step, epoch position, fingerprint of the run

A run killed at any moment finds its last whole checkpoint again; a half-written one has another name.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlx_zip.errors import TrainingError
from mlx_zip.files import whole_folder, write_json

FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{6,})")
_RANDOM = "random."


@dataclass(frozen=True)
class Progress:
    """Where a run stands: step: optimizer steps done. seen_*: what they read, over all machines."""

    step: int = 0
    seen_samples: int = 0
    seen_ids: int = 0
    seen_base_ids: int = 0
    seen_bytes: int = 0
    seconds: float = 0.0


def save_checkpoint(
    run: Path, trainee: nn.Module, optimizer: optim.Optimizer, progress: Progress, fingerprint: str, keep: int
) -> Path:
    """Writes the checkpoint of `progress.step` and removes all but the last `keep`.

    Raises `TrainingError` when it cannot be written; earlier ones stay as they are.
    """
    path = run / FOLDER / f"step-{progress.step:06d}"
    trained = dict(tree_flatten(trainee.trainable_parameters()))
    state = {name: value for name, value in tree_flatten(optimizer.state) if isinstance(value, mx.array)}
    state |= {f"{_RANDOM}{i}": value for i, value in enumerate(mx.random.state)}
    try:
        with whole_folder(path) as folder:
            mx.save_safetensors(str(folder / "trained.safetensors"), trained)
            mx.save_safetensors(str(folder / "optimizer.safetensors"), state)
            write_json(folder / "state.json", {**vars(progress), "fingerprint": fingerprint})
    except (OSError, RuntimeError) as error:
        raise TrainingError(f"cannot write {path}: {error}; the checkpoint before it stays good") from error
    for _, old in checkpoints(run)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the whole checkpoints of a run, oldest first."""
    folder = run / FOLDER
    found = ((_NAME.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ()))
    return sorted((int(match[1]), path) for match, path in found if match)


def load_checkpoint(path: Path, trainee: nn.Module, optimizer: optim.Optimizer, fingerprint: str) -> Progress:
    """Puts a checkpoint's weights, optimizer and random state back. Raises `TrainingError` naming what does not fit."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        trained = mx.load(str(path / "trained.safetensors"))
        saved: Any = mx.load(str(path / "optimizer.safetensors"))
    except (OSError, ValueError, RuntimeError) as error:
        raise TrainingError(f"{path} cannot be read: {error}; delete it to go on from the one before") from error
    if state.pop("fingerprint", None) != fingerprint:
        raise TrainingError(f"{path} belongs to another model, codec, data or settings; choose another --out")
    wanted = {name: value.shape for name, value in tree_flatten(trainee.trainable_parameters())}
    if {name: value.shape for name, value in trained.items()} != wanted:
        raise TrainingError(f"{path / 'trained.safetensors'} does not hold the weights this run trains")
    trainee.update(tree_unflatten(list(trained.items())))
    for name in [name for name in saved if name.startswith(_RANDOM)]:
        mx.random.state[int(name.removeprefix(_RANDOM))] = saved.pop(name)
    optimizer.init(trainee.trainable_parameters())
    optimizer.state = tree_unflatten(list(saved.items()))
    mx.eval(trainee.parameters(), optimizer.state, mx.random.state)
    return Progress(**state)
