"""Writes a run's log (one JSON line per report or validation), plots it, and sends lines to reporting services."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlx_zip.errors import InstallationError, TrainingError, errors_as, missing_library_error
from mlx_zip.files import atomic_file, check_regular_file
from mlx_zip.training.settings import RunOptions, TrainSettings

METRICS_FILE = "metrics.jsonl"
_PANELS = (
    ("bits_per_byte", "bits per byte"),
    ("loss", "nats per id"),
    ("learning_rate", "learning rate"),
    ("bytes_per_s", "bytes/s"),
)
_SERVICES = ("wandb", "swanlab")
_MLX_LM_KEYS = {  # our name -> mlx-lm's name
    "step": "iteration",
    "loss": "train_loss",
    "base_ids_per_s": "tokens_per_second",
    "seen_base_ids": "trained_tokens",
}


class MetricsLog:
    """A run's log file, one JSON object per line. step: step at which the run resumes; later lines are removed."""

    def __init__(self, run: Path, step: int) -> None:
        self.path = run / METRICS_FILE
        kept = [line for line in read_metrics(run) if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        with errors_as(TrainingError, f"cannot write {self.path}", OSError), atomic_file(self.path) as partial:
            partial.write_text(text, encoding="utf-8")

    def add(self, **values: Any) -> None:
        """Appends one line to the file, at once on disk. Raises `TrainingError` if the file cannot be written."""
        with (
            errors_as(TrainingError, f"cannot write {self.path}", OSError),
            open(self.path, "a", encoding="utf-8") as file,
        ):
            file.write(json.dumps(values) + "\n")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's log up to the first damaged line, such as a last line cut short by a crash.

    Raises `DataError` if the log is not a regular file.
    """
    path = run / METRICS_FILE
    if not path.exists():
        return []
    check_regular_file(path)
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            break
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            break
        lines.append(line)
    return lines


def plot_training_curves(run: Path) -> Path:
    """Draws loss, bits per byte, learning rate and speed from the run's log; returns the path of `curves.png`.

    Each of the four panels shows one quantity by optimizer step, in training and in validation. Raises `TrainingError`
    if the log is empty, and `InstallationError` if matplotlib is missing.
    """
    lines = read_metrics(run)
    if not lines:
        raise TrainingError(f"{run / METRICS_FILE} has no lines to draw")
    figure_class, canvas = load_matplotlib()
    figure = figure_class(figsize=(10, 6), layout="constrained")
    canvas(figure)
    for panel, (key, label) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for name, label_of in ((key, "training"), (f"val_{key}", "validation")):
            points = [(line["step"], line[name]) for line in lines if name in line]
            if points:
                panel.plot(*zip(*points, strict=True), label=label_of, linewidth=1)
        panel.set(xlabel="step", ylabel=label)
        panel.grid(alpha=0.3)
        panel.legend()
    path = run / "curves.png"
    figure.savefig(path, dpi=120)
    return path


def load_matplotlib() -> tuple[Any, Any]:
    """Returns matplotlib's classes for figure and canvas. Raises `InstallationError` if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_library_error("--plot", "matplotlib", extra="bench") from error
    return Figure, FigureCanvasAgg


def check_report_services(names: str | None) -> None:
    """Raises `TrainingError` if a service is unknown, and `InstallationError` if a service's package is missing.

    names: services separated by commas; None for none.
    """
    if names and not _split_service_names(names):
        raise TrainingError(f"--report-to {names!r} names no service; give {' or '.join(_SERVICES)}")
    for name in _split_service_names(names):
        if name not in _SERVICES:
            raise TrainingError(f"--report-to {name}: only {' and '.join(_SERVICES)} are known")
        if find_spec(name) is None:
            raise InstallationError(f"--report-to {name} needs the package: pip install {name}")


def _split_service_names(names: str | None) -> list[str]:
    return [name.strip().lower() for name in (names or "").split(",") if name.strip()]


class ReportServices:
    """Sends lines of the log to the services in `options.report_to`. The constructor begins a new run at each."""

    def __init__(self, options: RunOptions, settings: TrainSettings) -> None:
        from mlx_lm.tuner.callbacks import get_reporting_callbacks

        self._callback = get_reporting_callbacks(
            ",".join(_split_service_names(options.report_to)),
            project_name=options.project_name,
            log_dir=str(options.out),
            config={**settings.to_dict(), "model": options.model, "data": [str(path) for path in options.data]},  # type: ignore[arg-type]
        )

    def send(self, line: dict[str, Any]) -> None:
        """Sends a line with a training or a validation loss; ignores any other line."""
        if self._callback is None:
            return
        info = {_MLX_LM_KEYS.get(name, name): value for name, value in line.items()}
        if "train_loss" in info:
            info["peak_memory"] = line["peak_mlx_bytes"] / 1e9
            self._callback.on_train_loss_report(info)
        elif "val_loss" in info:
            self._callback.on_val_loss_report(info)
