"""Manages a run's folder and the record of what the run trains. Only a command with an equal record may continue."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.errors import TrainingError, errors_as
from mlx_zip.files import read_json_object, try_lock_folder, write_json
from mlx_zip.training.run_metrics import METRICS_FILE

RUN_RECORD = "train.json"


@dataclass(frozen=True)
class BegunRun:
    """A run as described by the record in its folder. iters: number of steps when the run began.

    raised_to: larger number of steps asked for later, else `iters`. valid_share: share of the samples held out.
    init_from: digest of the trained weights that the run began with, None without --init-from.
    """

    iters: int
    raised_to: int
    valid_share: float
    init_from: str | None = None


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
    return BegunRun(**found, init_from=record["fixed"].get("init_from"))


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
def lock_run_folder(out: Path, flag: str = "--out") -> Iterator[None]:
    """Context manager: keeps other processes from training in the folder `out` until the block ends.

    flag: command-line flag of the folder, for the message. Raises `TrainingError` if another process trains in `out`.
    """
    with try_lock_folder(out) as alone:
        if not alone:
            raise TrainingError(f"another process trains in {out}; wait for it, or choose another {flag}")
        yield


def record_more_iters(out: Path, iters: int) -> None:
    """Records that a finished run continues up to `iters` steps. Raises `TrainingError` if writing fails."""
    with errors_as(TrainingError, f"cannot write {out}", OSError):
        write_json(out / RUN_RECORD, {**read_json_object(out / RUN_RECORD, raises=TrainingError), "raised_to": iters})


def open_run_folder(out: Path, record: dict[str, Any], mark: str, flag: str = "--out") -> None:
    """Creates the run's folder, or checks that an existing folder belongs to this run.

    A run that ended before its first checkpoint is removed and replaced. record: what the run trains. mark: fingerprint
    of model, settings and record. flag: command-line flag of the folder, for the message. Raises `TrainingError` if the
    folder holds another run or other files, or cannot be written.
    """
    path, advice = out / RUN_RECORD, f"choose another {flag}"
    if _has_no_saved_step(out, f"; {advice}"):
        _remove_unstarted_run(out, flag)
    if path.exists():
        before = read_json_object(path, f"; {advice}", TrainingError)
        same_data = before.get("data") == json.loads(json.dumps(record["data"]))
        if before.get("fingerprint") != mark or not same_data:
            raise TrainingError(f"{out} holds another run ({_describe_run_difference(before, record)}); {advice}")
        return
    if _list_file_names(out):
        raise TrainingError(f"{out} is not empty and holds no run; {advice}")
    with errors_as(TrainingError, f"cannot write {out}", OSError):
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, {**record, "fingerprint": mark})


def _remove_unstarted_run(out: Path, flag: str) -> None:
    with errors_as(TrainingError, f"cannot write {out}", OSError), lock_run_folder(out, flag):
        (out / METRICS_FILE).unlink(missing_ok=True)
        (out / RUN_RECORD).unlink()


def _describe_run_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    fixed, new = before.get("fixed"), now["fixed"]["settings"]
    old = fixed.get("settings") if isinstance(fixed, dict) else None
    if not isinstance(old, dict):
        return f"its {RUN_RECORD} is damaged"
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    parts = [name for name in ("data", "encoder") if before.get(name) != json.loads(json.dumps(now[name]))]
    return ", ".join([*names, *parts]) or "another model"
