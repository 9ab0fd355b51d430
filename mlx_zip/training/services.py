"""Sends the lines of a run's log to wandb and swanlab, through mlx-lm's callbacks."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from mlx_zip.errors import InstallationError, TrainingError
from mlx_zip.training.settings import RunOptions, TrainSettings

SERVICES = ("wandb", "swanlab")
_AS_MLX_LM = {  # our name: mlx-lm's
    "step": "iteration",
    "loss": "train_loss",
    "base_ids_per_s": "tokens_per_second",
    "seen_base_ids": "trained_tokens",
}


def check_services(names: str | None) -> None:
    """Raises `TrainingError` for an unknown service, `InstallationError` for one that is not installed.

    names: services separated by commas; None for none.
    """
    if names and not _split(names):
        raise TrainingError(f"--report-to {names!r} names no service; give {' or '.join(SERVICES)}")
    for name in _split(names):
        if name not in SERVICES:
            raise TrainingError(f"--report-to {name}: only {' and '.join(SERVICES)} are known")
        if find_spec(name) is None:
            raise InstallationError(f"--report-to {name} needs the package: pip install {name}")


def _split(names: str | None) -> list[str]:
    return [name.strip().lower() for name in (names or "").split(",") if name.strip()]


class Services:
    """Sends lines of the log to the services in `options.report_to`, where the constructor begins a new run."""

    def __init__(self, options: RunOptions, settings: TrainSettings) -> None:
        from mlx_lm.tuner.callbacks import get_reporting_callbacks

        self._callback = get_reporting_callbacks(
            ",".join(_split(options.report_to)),
            project_name=options.project_name,
            log_dir=str(options.out),
            config={**settings.to_dict(), "model": options.model, "data": [str(path) for path in options.data]},  # type: ignore[arg-type]
        )

    def send(self, line: dict[str, Any]) -> None:
        """Sends a line with a training or a validation loss; ignores any other line."""
        if self._callback is None:
            return
        info = {_AS_MLX_LM.get(name, name): value for name, value in line.items()}
        if "train_loss" in info:
            info["peak_memory"] = line["peak_mlx_bytes"] / 1e9
            self._callback.on_train_loss_report(info)
        elif "val_loss" in info:
            self._callback.on_val_loss_report(info)
