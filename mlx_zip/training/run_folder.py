"""The folder of a run, with a record of what it trains; only a command with an equal record may continue the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError, TrainingError, failure_reason
from mlx_zip.files import check_regular_file, try_lock_folder, write_json
from mlx_zip.training.run_metrics import FILE

RECORD = "train.json"


@dataclass(frozen=True)
class Begun:
    """A run by its record: the steps it began with, those it was raised to later, and the share held out.

    init_from: digest of the trained weights that it began with, None for new ones.
    """

    iters: int
    raised_to: int
    valid_share: float
    init_from: str | None = None


def begun_run(out: Path) -> Begun | None:
    """Returns the run in a folder that has saved a step; None without one, or if its record has no number of steps.

    Raises `TrainingError` for a damaged record.
    """
    path, hint = out / RECORD, "; choose another --out"
    if not path.exists() or _is_unstarted(out, hint):
        return None
    record = read_object(path, hint)
    try:
        iters = record["fixed"]["settings"]["iters"]
    except (LookupError, TypeError):
        return None  # `open_run` reports it
    found = {"iters": iters, "raised_to": record.get("raised_to", iters), "valid_share": record.get("valid_share", 0.0)}
    for name, value in found.items():
        whole = isinstance(value, int if name != "valid_share" else int | float) and not isinstance(value, bool)
        if not whole or not value >= 0 or (name == "valid_share" and value >= 1):
            raise TrainingError(f"{path}: {name} is {value!r}{hint}")
    return Begun(**found, init_from=record["fixed"].get("init_from"))


def _is_unstarted(out: Path, hint: str = "") -> bool:
    """Whether a folder holds nothing but the record, and perhaps the log, of a run that has saved no step.

    Raises `TrainingError`, its message ending in `hint`, if the record is damaged.
    """
    names = _names(out)
    if RECORD not in names or not names <= {RECORD, FILE}:
        return False
    return read_object(out / RECORD, hint).keys() >= {"fingerprint", "fixed", "data"}


def _names(out: Path) -> set[str]:
    """Returns the names in a folder, without hidden ones; none for what is not a folder."""
    return {path.name for path in out.iterdir() if not path.name.startswith(".")} if out.is_dir() else set()


def raise_iters(out: Path, iters: int) -> None:
    """Records that a finished run continues up to `iters` steps. Raises `TrainingError`."""
    try:
        write_json(out / RECORD, {**read_object(out / RECORD), "raised_to": iters})
    except OSError as error:
        raise TrainingError(f"cannot write {out}: {failure_reason(error)}") from error


def open_run(out: Path, record: dict[str, Any], mark: str, flag: str = "--out") -> None:
    """Makes the run's folder, or checks that the folder is this run's. Raises `TrainingError` if it is not.

    A run that ended before its first checkpoint gives way to this one.

    record: what the run trains. mark: fingerprint of model, settings and record. flag: the flag that names the folder.
    """
    path, advice = out / RECORD, f"choose another {flag}"
    if _is_unstarted(out, f"; {advice}"):
        _remove(out, advice)
    if path.exists():
        before = read_object(path, f"; {advice}")
        same_data = before.get("data") == json.loads(json.dumps(record["data"]))
        if before.get("fingerprint") != mark or not same_data:
            raise TrainingError(f"{out} holds another run ({_difference(before, record)}); {advice}")
        return
    if _names(out):
        raise TrainingError(f"{out} is not empty and holds no run; {advice}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, {**record, "fingerprint": mark})
    except OSError as error:
        raise TrainingError(f"cannot write {out}: {failure_reason(error)}") from error


def _remove(out: Path, advice: str) -> None:
    """Removes the record and the log of a run that has saved no step. Raises `TrainingError` if it runs now."""
    try:
        with try_lock_folder(out) as alone:
            if not alone:
                raise TrainingError(f"another process trains in {out}; wait for it, or {advice}")
            (out / FILE).unlink(missing_ok=True)
            (out / RECORD).unlink()
    except OSError as error:
        raise TrainingError(f"cannot write {out}: {failure_reason(error)}") from error


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    fixed, new = before.get("fixed"), now["fixed"]["settings"]
    old = fixed.get("settings") if isinstance(fixed, dict) else None
    old = old if isinstance(old, dict) else {}
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    parts = [name for name in ("data", "encoder") if before.get(name) != json.loads(json.dumps(now[name]))]
    return ", ".join([*names, *parts]) or "another model"


def read_object(path: Path, hint: str = "") -> dict[str, Any]:
    """Returns the JSON object in a file. Raises `TrainingError`, its message ending in `hint`."""
    try:
        check_regular_file(path)
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, DataError) as error:
        raise TrainingError(f"{path} cannot be read: {failure_reason(error)}{hint}") from error
    if not isinstance(found, dict):
        raise TrainingError(f"{path} holds no JSON object{hint}")
    return found
