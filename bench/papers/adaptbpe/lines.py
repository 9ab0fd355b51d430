"""Recorded lines of the AdaptBPE experiments: names of their texts and methods, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Line = dict[str, Any]
TEXTS = {
    "pubmedqa": "PubMedQA",
    "mbpp": "MBPP code",
    "ud_fr": "UD French",
    "ud_oc": "UD Occitan",
    "ud_tr": "UD Turkish",
    "ud_ar": "UD Arabic",
    "stories": "stories",
}
METHODS = {"first-k": "first-k", "top-k": "top-k", "adapt": "adapted"}


def groups(lines: Sequence[Line]) -> dict[tuple[str, float], dict[float, dict[str, Line]]]:
    """Lines of `bench adapt_model` by (text, bytes of the whole model), by share, by method; the whole list's share is
    1. Lines follow that of their whole model.
    """
    found: dict[tuple[str, float], dict[float, dict[str, Line]]] = {}
    key = ("", 0.0)
    for line in lines:
        if line["method"] == "whole list":
            key = (line["text"], line["file_bytes"])
        found.setdefault(key, {}).setdefault(line["share"], {})[line["method"]] = line
    return found
