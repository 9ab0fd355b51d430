"""Mixes sources by shares of base ids: reads mixture files, chooses the next sources, and counts samples to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_zip.errors import DataError, errors_as, failure_reason
from mlx_zip.text.sources import Source

BUNDLED_MIXTURES = Path(__file__).parent / "mixtures"  # bundled mixtures, NAME.yaml
_LIST_FIELDS = ("data", "subsets")


def load_mixture(name: str | Path) -> tuple[Source, ...]:
    """Returns the sources of a mixture. name: a .yaml file, or the name of a bundled mixture ("zip2zip").

    The file holds `sources`, a list of maps with the fields of `Source`. Paths are relative to the file's folder.
    Raises `DataError`, naming the file and the source, if the file cannot be read or a source is invalid.
    """
    from mlx_zip.training.yaml_file import read_yaml

    path = Path(name)
    if not path.is_file() and (BUNDLED_MIXTURES / f"{name}.yaml").is_file():
        path = BUNDLED_MIXTURES / f"{name}.yaml"
    try:
        data = read_yaml(path)
    except (OSError, ValueError) as error:
        ready = ", ".join(sorted(file.stem for file in BUNDLED_MIXTURES.glob("*.yaml")))
        message = f"mixture {name} cannot be read: {failure_reason(error)}"
        raise DataError(f"{message}; give a .yaml file or one of {ready}") from error
    listed = data.get("sources") if isinstance(data, dict) and data.keys() == {"sources"} else None
    if not isinstance(listed, list) or not listed:
        raise DataError(f"mixture {path} must hold a list called sources, and nothing else")
    sources = []
    for n, fields in enumerate(listed, start=1):
        with errors_as(DataError, f"mixture {path}: source {n}", DataError):
            sources.append(_make_mixture_source(fields, path.parent))
    return tuple(sources)


def _make_mixture_source(fields: Any, folder: Path) -> Source:
    """Returns the source with these fields. folder: that of the mixture's file."""
    if not isinstance(fields, dict):
        raise DataError("it is not a map")
    known = set(Source.__dataclass_fields__)
    if unknown := sorted(map(str, fields.keys() - known)):
        raise DataError(f"{', '.join(unknown)} is none of {', '.join(sorted(known))}")
    if not {"data", "share"} <= fields.keys():
        raise DataError("it needs data and share")
    if not isinstance(fields.get("columns", {}), Mapping):
        raise DataError("columns must be a map")
    lists = {key: _check_list_of_names(key, fields[key]) for key in _LIST_FIELDS if key in fields}
    data = tuple(str(folder / name) if (folder / name).exists() else name for name in lists["data"])
    return Source(**{**fields, **lists, "data": data})


def _check_list_of_names(key: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise DataError(f"{key} must be a name or a list of names")
    return tuple(names)


def choose_next_sources(shares: Sequence[float], shards: Sequence[Sequence[int]], size: int) -> list[int]:
    """Returns the source index of each of the next `size` shards, so that the sources' base ids approach the shares.

    shares: share of each source. shards: per source, the number of base ids of each finished shard. A future shard is
    assumed to have the mean of its source. While some sources have no shard, returns each of these sources once.
    """
    if new := [s for s, done in enumerate(shards) if not done]:
        return new
    means = [max(1.0, sum(done) / len(done)) for done in shards]
    totals = [float(sum(done)) for done in shards]
    chosen: list[int] = []
    for _ in range(size):
        neediest = min(range(len(shares)), key=lambda s: (totals[s] / shares[s], s))
        totals[neediest] += means[neediest]
        chosen.append(neediest)
    return chosen


def count_kept_samples(shares: Sequence[float], base_ids: Sequence[NDArray[np.int64]], limit: int | None) -> list[int]:
    """Returns how many of each source's first samples to keep, so that kept base ids are proportional to the shares.

    shares: each source's share. base_ids: per source, the number of base ids of each sample. limit: maximum number of
    samples of all sources together; None: no maximum, so that the scarcest source is kept whole.
    """
    ends = [np.cumsum(each) for each in base_ids]
    whole = min((float(end[-1]) if len(end) else 0.0) / share for end, share in zip(ends, shares, strict=True))

    def counts(total: float) -> list[int]:  # samples per source, for about `total` base ids together
        return [int(np.searchsorted(e, share * total + 0.5)) for e, share in zip(ends, shares, strict=True)]

    if limit is None or sum(counts(whole)) <= limit:
        return counts(whole)
    low, high = 0.0, whole  # totals that keep at most, and more than, `limit` samples
    while high - low > 0.25 / max(shares):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(counts(middle)) <= limit else (low, middle)
    return counts(low)
