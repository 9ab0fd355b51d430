"""Mixtures: sources with shares by base ids, which of them to read next, and how much of each to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.errors import DataError
from mlx_zip.text.sources import Source

READY = Path(__file__).parent / "mixtures"  # NAME.yaml, chosen by name
_LISTS = ("data", "subsets")


def load_mixture(name: str | Path) -> tuple[Source, ...]:
    """The sources of a mixture: a .yaml file, or the name of a ready one ("zip2zip").

    The file holds `sources`, a list of maps with the fields of `Source`; files are named from the folder it lies in.
    Raises `DataError` naming the file and the source.
    """
    import yaml

    path = Path(name)
    if not path.is_file() and (READY / f"{name}.yaml").is_file():
        path = READY / f"{name}.yaml"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        ready = ", ".join(sorted(file.stem for file in READY.glob("*.yaml")))
        message = f"mixture {name} cannot be read: {' '.join(str(error).split())}"
        raise DataError(f"{message}; give a .yaml file or one of {ready}") from error
    listed = data.get("sources") if isinstance(data, dict) and data.keys() == {"sources"} else None
    if not isinstance(listed, list) or not listed:
        raise DataError(f"mixture {path} must hold a list called sources, and nothing else")
    return tuple(_source(path, n, fields) for n, fields in enumerate(listed, start=1))


def _source(path: Path, n: int, fields: Any) -> Source:
    if not isinstance(fields, dict):
        raise DataError(f"mixture {path}: source {n} is not a map")
    known = set(Source.__dataclass_fields__)
    if unknown := sorted(map(str, fields.keys() - known)):
        raise DataError(f"mixture {path}: source {n}: {', '.join(unknown)} is none of {', '.join(sorted(known))}")
    if not {"data", "share"} <= fields.keys():
        raise DataError(f"mixture {path}: source {n} needs data and share")
    if not isinstance(fields.get("columns", {}), Mapping):
        raise DataError(f"mixture {path}: source {n}: columns must be a map")
    lists = {key: _names(path, n, key, fields[key]) for key in _LISTS if key in fields}
    beside = tuple(str(path.parent / name) if (path.parent / name).exists() else name for name in lists["data"])
    try:
        return Source(**{**fields, **lists, "data": beside})
    except DataError as error:
        raise DataError(f"mixture {path}: source {n}: {error}") from error


def _names(path: Path, n: int, key: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise DataError(f"mixture {path}: source {n}: {key} must be a name or a list of names")
    return tuple(names)


def next_sources(shares: Sequence[float], shards: Sequence[Sequence[int]], size: int) -> list[int]:
    """From which source each of the next `size` shards comes, so that base ids keep to the shares.

    shards: base ids of every finished shard, per source. A shard to come counts as its source's mean; sources that
    have none yet come first, once each.
    """
    if new := [s for s, done in enumerate(shards) if not done]:
        return new
    means = [max(1.0, sum(done) / len(done)) for done in shards]
    totals = [float(sum(done)) for done in shards]
    chosen: list[int] = []
    for _ in range(size):
        behind = min(range(len(shares)), key=lambda s: (totals[s] / shares[s], s))
        totals[behind] += means[behind]
        chosen.append(behind)
    return chosen


def kept_samples(shares: Sequence[float], base_ids: Sequence[NDArray[np.int64]], limit: int | None) -> list[int]:
    """How many samples of each source to keep: its first ones, as many as its share of base ids allows.

    base_ids: per source, of each sample in order. One source is kept whole. limit: most samples of all together.
    """
    ends = [np.cumsum(each) for each in base_ids]
    whole = min((float(end[-1]) if len(end) else 0.0) / share for end, share in zip(ends, shares, strict=True))

    def kept(total: float) -> list[int]:
        return [int(np.searchsorted(e, share * total + 0.5)) for e, share in zip(ends, shares, strict=True)]

    if limit is None or sum(kept(whole)) <= limit:
        return kept(whole)
    low, high = 0.0, whole  # keeps at most `limit`; keeps more
    while high - low > 0.25 / max(shares):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(kept(middle)) <= limit else (low, middle)
    return kept(low)
