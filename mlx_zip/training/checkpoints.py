"""Writes and reads checkpoints: folders with everything that the next step depends on, checked on reading.

    step-000200/  trained.safetensors    the trained weights
                  optimizer.safetensors  the optimizer's and the random generator's state
                  state.json             `Progress` and the run's fingerprint

On the CPU a resumed run gives the same bits as an uninterrupted run. GPUs sum the gradients of gathered rows in an
order that changes from run to run, so the last digits differ.

A run can be killed at any moment and resumes from the last complete checkpoint. An incomplete checkpoint has another
name, and is removed when the next checkpoint is written.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlx_zip.errors import DataError, TrainingError, errors_as, failure_reason
from mlx_zip.files import atomic_folder, check_regular_file, read_json_object, write_json
from mlx_zip.models.rows.fingerprints import named_arrays

CHECKPOINTS = "checkpoints"
TRAINED_FILE, OPTIMIZER_FILE, STATE_FILE = "trained.safetensors", "optimizer.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{6,})")
_RANDOM = "random."


@dataclass(frozen=True)
class Progress:
    """A run's progress. step: optimizer steps done. seen_*: totals read, over all machines. seconds: run time."""

    step: int = 0
    seen_samples: int = 0
    seen_ids: int = 0
    seen_base_ids: int = 0
    seen_bytes: int = 0
    seconds: float = 0.0

    def after_step(self, samples: int, ids: int, base_ids: int, n_bytes: int, seconds: float) -> Progress:
        """Returns the progress after one more step. The arguments are the amounts read in the step, and its seconds."""
        return Progress(
            self.step + 1,
            self.seen_samples + samples,
            self.seen_ids + ids,
            self.seen_base_ids + base_ids,
            self.seen_bytes + n_bytes,
            self.seconds + seconds,
        )


def save_checkpoint(
    run: Path, trainee: nn.Module, optimizer: optim.Optimizer, progress: Progress, fingerprint: str, keep: int
) -> None:
    """Writes the checkpoint of `progress.step`, and removes all but the last `keep` checkpoints.

    Does nothing if the last checkpoint is of this step. Raises `TrainingError` if the checkpoint cannot be written or
    would contain NaN or inf; earlier checkpoints stay as they are.
    """
    found = list_checkpoints(run)
    if found and found[-1][0] == progress.step:
        return
    path = run / CHECKPOINTS / checkpoint_name(progress.step)
    trained = dict(named_arrays(trainee.trainable_parameters()))
    if wrong := find_not_finite(trained):
        raise TrainingError(
            f"step {progress.step} left values that are not numbers in {wrong}; the checkpoint before it stays good: "
            "lower the learning rate"
        )
    state = {name: value for name, value in tree_flatten(optimizer.state) if isinstance(value, mx.array)}
    state[f"{_RANDOM}0"] = get_random_key()
    for left in run.glob(f"{CHECKPOINTS}/.step-*"):  # from killed processes: only one process writes here at a time
        shutil.rmtree(left, ignore_errors=True)
    try:
        with atomic_folder(path) as folder:
            mx.save_safetensors(str(folder / TRAINED_FILE), trained)
            mx.save_safetensors(str(folder / OPTIMIZER_FILE), state)
            write_json(folder / STATE_FILE, {**vars(progress), "fingerprint": fingerprint})
    except (OSError, RuntimeError) as error:
        good = "; the checkpoint before it stays good" if found else ""
        raise TrainingError(f"cannot write {path}: {failure_reason(error)}{good}") from error
    for _, old in list_checkpoints(run)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Returns (step, folder) of each complete checkpoint of a run, oldest first."""
    folder = run / CHECKPOINTS
    found = ((_NAME.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ()))
    return sorted((int(match[1]), path) for match, path in found if match)


def load_last_checkpoint(run: Path, trainee: nn.Module, optimizer: optim.Optimizer, fingerprint: str) -> Progress:
    """Restores weights, optimizer and random state from a run's last checkpoint, and returns the run's progress.

    Returns `Progress()` if there is no checkpoint. fingerprint: this run's fingerprint. Raises `TrainingError` if the
    checkpoint cannot be read or does not fit.
    """
    found = list_checkpoints(run)
    if not found:
        return Progress()
    path = found[-1][1]
    try:
        state = read_json_object(path / STATE_FILE)
        for file in (TRAINED_FILE, OPTIMIZER_FILE):
            check_regular_file(path / file)
        mark = state.pop("fingerprint")
        progress = Progress(**state)
        if mark == fingerprint:  # otherwise the error below tells of another run
            _check_progress_counts(path, progress)
        trained: Any = mx.load(str(path / TRAINED_FILE))
        saved: Any = mx.load(str(path / OPTIMIZER_FILE))
        mx.eval(trained, saved)  # reads the files
    except DataError as error:
        raise TrainingError(f"{error}; delete {path} to go on from the one before") from error
    except (OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
        raise TrainingError(
            f"{path} cannot be read: {failure_reason(error)}; delete it to go on from the one before"
        ) from error
    if mark != fingerprint:
        raise TrainingError(f"{path} belongs to another model, codec, data or settings; choose another folder")
    optimizer.init(trainee.trainable_parameters())
    key = saved.pop(f"{_RANDOM}0", mx.array([]))
    _check_array_shapes(path / TRAINED_FILE, trained, trainee.trainable_parameters())
    if wrong := find_not_finite(trained):
        raise TrainingError(f"{path} holds values that are not numbers in {wrong}; delete it to go on from before")
    _check_array_shapes(path / OPTIMIZER_FILE, {**saved, "key": key}, {**optimizer.state, "key": get_random_key()})
    trainee.update(tree_unflatten(list(trained.items())))
    optimizer.state = tree_unflatten(list(saved.items()))
    set_random_key(key)
    mx.eval(trainee.parameters(), optimizer.state, mx.random.state)
    return progress


def load_trained_weights(run: Path, trainee: nn.Module) -> None:
    """Loads the trained weights of the last checkpoint of the run `run` into `trainee`.

    Raises `TrainingError` if the run has no checkpoint, or if the names or shapes of its weights differ.
    """
    path = _find_last_weights(run)
    with errors_as(TrainingError, f"{path} cannot be read", OSError, ValueError, RuntimeError):
        found: Any = mx.load(str(path))
        mx.eval(found)
    wanted = {name: value.shape for name, value in named_arrays(trainee.trainable_parameters())}
    theirs = {name: value.shape for name, value in found.items()}
    if wanted != theirs:
        differ = sorted(name for name in wanted.keys() | theirs.keys() if wanted.get(name) != theirs.get(name))
        raise TrainingError(f"--init-from {run}: that run trained other weights, for example {differ[0]}")
    trainee.update(tree_unflatten(list(found.items())))


def hash_trained_weights(run: Path) -> str:
    """Returns the SHA-256 of the file that `load_trained_weights` reads. Raises `TrainingError` if there is none."""
    path = _find_last_weights(run)
    with errors_as(TrainingError, f"{path} cannot be read", OSError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _find_last_weights(run: Path) -> Path:
    found = list_checkpoints(run)
    if not found:
        raise TrainingError(f"--init-from {run}: there is no checkpoint of a training run")
    return found[-1][1] / TRAINED_FILE


def _check_array_shapes(path: Path, found: Mapping[str, mx.array], tree: Any) -> None:
    wanted = {name: (value.shape, value.dtype) for name, value in tree_flatten(tree) if isinstance(value, mx.array)}
    if {name: (value.shape, value.dtype) for name, value in found.items()} != wanted:
        raise TrainingError(f"{path} does not hold what this run trains; delete {path.parent.name} to go on without it")


def _check_progress_counts(path: Path, progress: Progress) -> None:
    """Raises `ValueError` if a count is out of range, or if the folder's name is that of another step."""
    counts = vars(progress)
    for name, value in counts.items():
        whole = name != "seconds"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not 0 <= value < 2**63:
            raise ValueError(f"{name} is {value!r}")
    if path.name != checkpoint_name(progress.step):
        raise ValueError(f"it is that of step {progress.step}")


def find_not_finite(arrays: Mapping[str, mx.array]) -> str:
    """Returns the name of the first array that contains NaN or inf, "" if no array does."""
    finite = {name: mx.isfinite(value).all() for name, value in arrays.items()}
    mx.eval(finite)
    return next((name for name, fine in finite.items() if not fine.item()), "")


def checkpoint_name(step: int) -> str:
    """Returns the folder name of a step's checkpoint."""
    return f"step-{step:06d}"


def get_random_key() -> mx.array:
    """Returns MLX's random state: one key, uint32 [2]."""
    state: Any = mx.random.state
    return state[0]


def set_random_key(key: mx.array) -> None:
    """Sets MLX's random state to `key`, by seeding MLX with the 64-bit number whose halves are the key's two values."""
    halves: Any = key.tolist()
    high, low = halves
    mx.random.seed(high << 32 | low)
