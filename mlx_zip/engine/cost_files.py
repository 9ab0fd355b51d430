"""`CostFile`: measured times of a model's passes on this machine, kept from run to run in the user's cache folder."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from mlx_zip.engine.pass_costs import Figure, PassCosts
from mlx_zip.errors import DataError, failure_reason
from mlx_zip.files import cache_folder, make_private, read_json_object, write_json

log = logging.getLogger(__name__)
SAVE_EVERY_S = 60.0  # minimum time between two writes of a file while requests arrive
VERSION = 1  # of the file's format
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e6  # bounds on the time of a pass; a number beyond them in a file is damage
LONGEST = 1 << 32  # upper bound on ids and rows; a larger number in a file is damage


class CostFile:
    """A file of pass times. `costs` begins with the times in the file; newer times replace them.

    key: everything that pass times depend on, by name; the file's name is a hash of the key. A file that is missing,
    damaged, of another version or of another key counts as empty. Processes may share a file: every write replaces the
    whole file.
    """

    def __init__(self, key: Mapping[str, str]) -> None:
        self._key = dict(key)
        digest = sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()
        self.path = costs_folder() / f"{digest[:16]}.json"
        self.costs = PassCosts()
        for figure, seconds in self._read_figures().items():
            self.costs.note_pass(figure.ids, figure.held, seconds, figure.rows, known=True)
        self._saved, self._saved_s = self.costs.figures(), time.monotonic()

    def save(self, every_s: float = 0.0) -> None:
        """Writes the figures if they have changed and the last write was at least `every_s` seconds ago.

        Figures that only other processes have measured stay in the file. If the folder cannot be written to, the
        problem is logged; the next run then measures passes again.
        """
        found = self.costs.figures()
        if found == self._saved or time.monotonic() - self._saved_s < every_s:
            return
        self._saved, self._saved_s = found, time.monotonic()
        problem = make_private(self.path.parent)
        try:
            if problem is None:
                write_json(self.path, _figures_to_json(self._key, _merge_figures(self._read_figures(), found)))
        except OSError as error:
            problem = f"cannot be used: {failure_reason(error)}"
        if problem is not None:
            log.info("what passes cost is not kept: %s %s", self.path.parent, problem)

    def _read_figures(self) -> dict[Figure, float]:
        """Returns the figures in the file, none if the file cannot be used."""
        try:
            return _figures_from_json(self._key, read_json_object(self.path))
        except (DataError, ValueError, TypeError, KeyError) as error:
            log.debug("%s: what passes cost is timed anew: %s", self.path, error)
            return {}


def _merge_figures(others: Mapping[Figure, float], own: Mapping[Figure, float]) -> dict[Figure, float]:
    """Merges figures; a figure in `own` replaces the same figure in `others`.

    The seconds in `others` are multiplied by `own` / `others` for passes over one id with equal `held` and `rows`, so
    that all figures can be compared.
    """
    ones = {(one.held, one.rows): own[one] / others[one] for one in own if one.ids == 1 and one in others}
    return {one: seconds * ones.get((one.held, one.rows), 1.0) for one, seconds in others.items()} | dict(own)


def costs_folder() -> Path:
    """Returns the folder of the files; it may not exist yet."""
    return cache_folder() / "pass-costs"


def _figures_to_json(key: Mapping[str, str], figures: Mapping[Figure, float]) -> dict[str, Any]:
    passes = [{**figure._asdict(), "seconds": seconds} for figure, seconds in sorted(figures.items())]
    return {"version": VERSION, "key": dict(key), "passes": passes}


def _figures_from_json(key: Mapping[str, str], data: Any) -> dict[Figure, float]:
    """Returns the figures in a file's data. Raises `ValueError`, `TypeError` or `KeyError` if the data is unusable."""
    if data["version"] != VERSION or data["key"] != key:
        raise ValueError("the file is of another version or of another key")
    return {
        Figure(*(_checked_int(one[name]) for name in Figure._fields)): _checked_seconds(one["seconds"])
        for one in data["passes"]
    }


def _checked_int(number: Any) -> int:
    if type(number) is not int or not 0 < number < LONGEST:
        raise ValueError(f"{number!r:.80} is not a number of ids or rows")
    return number


def _checked_seconds(number: Any) -> float:
    if type(number) not in (int, float) or not LEAST_SECONDS < number < MOST_SECONDS:
        raise ValueError(f"{number!r:.80} is not the time of a pass")
    return float(number)
