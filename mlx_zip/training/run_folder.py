"""Manages a run's folder: the record of what the run trains, the log, and the log's curves.

train.json     the record; only a command with an equal record may continue the run
metrics.jsonl  the log, one JSON line per report or validation
curves.png     the log as curves (--plot)
checkpoints/   see `mlx_zip.training.checkpoints`
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.errors import TrainingError, errors_as, missing_library_error
from mlx_zip.files import atomic_file, check_regular_file, read_json_object, try_lock_folder, write_json

RUN_RECORD, METRICS_FILE = "train.json", "metrics.jsonl"


@dataclass(frozen=True)
class BegunRun:
    """A run as described by the record in the folder `out`. iters: number of steps when the run began.

    raised_to: larger number of steps asked for later, else `iters`. valid_share: share of the samples held out.
    init_from: digest of the trained weights that the run began with, None without --init-from.
    """

    out: Path
    iters: int
    raised_to: int
    valid_share: float
    init_from: str | None = None

    def check_continued_by(self, iters: int, valid_share: float | None, done: int) -> None:
        """Raises `TrainingError` if the run cannot continue up to `iters` steps or with another share held out.

        Allowed are the number of steps that was asked for last and, once these steps are done, any larger number.
        valid_share: None for the run's own. done: steps saved.
        """
        if valid_share not in (None, self.valid_share):
            raise TrainingError(
                f"--valid-share {valid_share}: the run in {self.out} began with {self.valid_share}; choose another "
                "--out"
            )
        if iters != self.raised_to and not iters > self.raised_to == done:
            rule = f"it may be raised when the run's {self.raised_to} steps are done"
            raise TrainingError(f"{self.out} holds another run (iters {self.raised_to}; {rule}); choose another --out")


def read_begun_run(out: Path) -> BegunRun | None:
    """Returns the run in a folder; None if there is none, it has saved no step or its record has no number of steps.

    Raises `TrainingError` if the record is damaged.
    """
    path, hint = out / RUN_RECORD, "; choose another --out"
    if not path.exists() or _has_no_saved_step(out, hint):
        return None
    record = read_json_object(path, hint, TrainingError)
    try:
        iters = record["fixed"]["settings"]["iters"]
    except (LookupError, TypeError):
        return None  # `open_run_folder` reports the damaged record
    found = {"iters": iters, "raised_to": record.get("raised_to", iters), "valid_share": record.get("valid_share", 0.0)}
    for name, value in found.items():
        whole = isinstance(value, int if name != "valid_share" else int | float) and not isinstance(value, bool)
        if not whole or not value >= 0 or (name == "valid_share" and value >= 1):
            raise TrainingError(f"{path}: {name} is {value!r}{hint}")
    return BegunRun(out, **found, init_from=record["fixed"].get("init_from"))


def _has_no_saved_step(out: Path, hint: str = "") -> bool:
    """Returns whether a folder holds only the record, and perhaps the log, of a run that has saved no step.

    hint: end of the error message. Raises `TrainingError` if the record is damaged.
    """
    names = _list_file_names(out)
    if RUN_RECORD not in names or not names <= {RUN_RECORD, METRICS_FILE}:
        return False
    return read_json_object(out / RUN_RECORD, hint, TrainingError).keys() >= {"fingerprint", "fixed", "data"}


def _list_file_names(out: Path) -> set[str]:
    return {path.name for path in out.iterdir() if not path.name.startswith(".")} if out.is_dir() else set()


@contextmanager
def open_run_folder(out: Path, record: dict[str, Any], mark: str, flag: str = "--out") -> Iterator[None]:
    """Context manager: makes the run's folder or checks an existing one, and locks it until the block ends.

    A run that ended before its first checkpoint is replaced. record: what the run trains. mark: fingerprint of model,
    settings and record. flag: command-line flag of the folder, for messages. Raises `TrainingError` if another process
    trains in the folder, or if the folder holds another run or other files, or cannot be written.
    """
    with errors_as(TrainingError, f"cannot write {out}", OSError):
        out.mkdir(parents=True, exist_ok=True)
    with try_lock_folder(out) as alone:
        if not alone:
            raise TrainingError(f"another process trains in {out}; wait for it, or choose another {flag}")
        with errors_as(TrainingError, f"cannot write {out}", OSError):
            _begin_or_continue(out, record, mark, f"choose another {flag}")
        yield


def _begin_or_continue(out: Path, record: dict[str, Any], mark: str, advice: str) -> None:
    path = out / RUN_RECORD
    if _has_no_saved_step(out, f"; {advice}"):
        (out / METRICS_FILE).unlink(missing_ok=True)
        path.unlink()
    if path.exists():
        before = read_json_object(path, f"; {advice}", TrainingError)
        same_data = before.get("data") == json.loads(json.dumps(record["data"]))
        if before.get("fingerprint") != mark or not same_data:
            raise TrainingError(f"{out} holds another run ({_describe_run_difference(before, record)}); {advice}")
        return
    if _list_file_names(out):
        raise TrainingError(f"{out} is not empty and holds no run; {advice}")
    write_json(path, {**record, "fingerprint": mark})


def record_more_iters(out: Path, iters: int) -> None:
    """Records that a finished run continues up to `iters` steps. Raises `TrainingError` if writing fails."""
    with errors_as(TrainingError, f"cannot write {out}", OSError):
        write_json(out / RUN_RECORD, {**read_json_object(out / RUN_RECORD, raises=TrainingError), "raised_to": iters})


def _describe_run_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    fixed, new = before.get("fixed"), now["fixed"]["settings"]
    old = fixed.get("settings") if isinstance(fixed, dict) else None
    if not isinstance(old, dict):
        return f"its {RUN_RECORD} is damaged"
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    parts = [name for name in ("data", "encoder") if before.get(name) != json.loads(json.dumps(now[name]))]
    return ", ".join([*names, *parts]) or "another model"


# ---- the log

_PANELS = (
    ("bits_per_byte", "bits per byte"),
    ("loss", "nats per id"),
    ("learning_rate", "learning rate"),
    ("bytes_per_s", "bytes/s"),
)


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
