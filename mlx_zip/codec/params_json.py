"""Codec parameters as JSON, for files that hold a codebook's log, and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from mlx_zip.codec.params import CodecParams
from mlx_zip.errors import ModelError


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
        return (
            [_params_from_fields(fields) for fields in found] if isinstance(found, list) else _params_from_fields(found)
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"saved cache: its codec parameters cannot be read: {error}") from error


def _params_from_fields(fields: dict[str, Any]) -> CodecParams:
    """Returns the codec with these fields, whose JSON lists become tuples."""
    start = fields["start"] and tuple(tuple(entry) for entry in fields["start"])
    return CodecParams(**{**fields, "disabled_ids": tuple(fields["disabled_ids"]), "start": start})
