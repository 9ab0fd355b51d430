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
    """Sorts lines of `bench adapt_model` into result[text, bytes of the whole model's file][share of merges][method].

    A line of the whole model has share 1 and method "whole list"; it comes before the lines that are compared with it.
    """
    found: dict[tuple[str, float], dict[float, dict[str, Line]]] = {}
    key = ("", 0.0)
    for line in lines:
        if line["method"] == "whole list":
            key = (line["text"], line["file_bytes"])
        found.setdefault(key, {}).setdefault(line["share"], {})[line["method"]] = line
    return found
