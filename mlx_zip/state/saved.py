"""Converts parts of a `ZipState` to JSON and back, for mlx-lm's cache files, and checks what is read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_zip.errors import ModelError
from mlx_zip.vocab.starts import Tuned


def checked_state(value: Sequence[Any], sizes: Mapping[int, int]) -> Sequence[Any]:
    """Returns the parts of a saved state after its first, the version.

    sizes: how many parts a state of each known version has. Raises `ModelError` for another version or number of parts.
    """
    version = value[0]
    if sizes.get(version) != len(value):
        known = " or ".join(map(str, sizes))
        raise ModelError(
            f"saved cache: ZipState version {version} is not {known}, or parts of it are missing; make a new cache"
        )
    return value[1:]


def tuned_to_json(tuned: Sequence[Tuned]) -> str | None:
    """Returns the fingerprints of tuned packs as JSON, one or null per sequence; None if no sequence has one."""
    if all(one is None for one in tuned):
        return None
    return json.dumps([one if one is None or isinstance(one, str) else one.fingerprint for one in tuned])


def tuned_from_json(text: str, batch: int) -> list[str | None]:
    """Returns the fingerprints that `tuned_to_json` wrote for `batch` sequences. Raises `ModelError` for others."""
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"saved cache: the fingerprints of its packs cannot be read: {error}") from error
    if not isinstance(found, list) or len(found) != batch or not all(isinstance(x, str | None) for x in found):
        raise ModelError(
            f"saved cache: {found!r:.80} is not a list of {batch} fingerprints of packs, one or null per sequence"
        )
    return found
