"""Converts parts of a `ZipState` to JSON and back, for mlx-lm's cache files, and checks what is read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_zip.codec import CodecParams
from mlx_zip.errors import ModelError
from mlx_zip.vocab.starts import Tuned


def params_to_json(codecs: Sequence[CodecParams]) -> str:
    """Returns the codecs of all sequences as JSON: one object if they are equal, else a list of one per sequence."""
    fields = [{f.name: getattr(codec, f.name) for f in dataclasses.fields(codec)} for codec in codecs]
    for one in fields:
        if one["policy"] == "freeze":
            del one["policy"]  # older versions had no other policy and did not save it
    shared = all(codec is codecs[0] or codec == codecs[0] for codec in codecs)
    return json.dumps(fields[0] if shared else fields, sort_keys=True)


def params_from_json(text: str) -> CodecParams | list[CodecParams]:
    """Returns the codecs that `params_to_json` wrote, one or a list. Raises `ModelError` for anything else."""
    try:
        found = json.loads(text)
        return [_codec(fields) for fields in found] if isinstance(found, list) else _codec(found)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"saved cache: its codec parameters cannot be read: {error}") from error


def _codec(fields: dict[str, Any]) -> CodecParams:
    """Returns the codec with these fields, whose JSON lists become tuples."""
    start = fields["start"] and tuple(tuple(entry) for entry in fields["start"])
    return CodecParams(**{**fields, "disabled_ids": tuple(fields["disabled_ids"]), "start": start})


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
