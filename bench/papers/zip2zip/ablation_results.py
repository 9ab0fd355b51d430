"""Recorded lines of the ablations, grouped as in the paper, and the paper's own figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_zip.errors import MlxZipError

ENCODERS = {  # name: (kind, layers, label)
    "averaging": ("averaging", 1, "averaging"),
    "attention": ("attention", 1, "1 attention layer"),
    "transformer": ("transformer", 1, "1 transformer layer"),
    "transformer-2": ("transformer", 2, "2 transformer layers"),
    "res_latent_attn": ("res_latent_attn", 2, "res_latent_attn, 2 layers (zip2zip++)"),
}
PAPER_TEXTS = ("Wiki", "Pile", "mC4", "dC4")
# Byte-perplexity of Phi-3.5-4B on PAPER_TEXTS. Source: arXiv 2506.01084, appendix A, tables 7 and 8. The row of M = 3
# and that of two transformer layers are equal, so table 7 was measured with that encoder.
PAPER_SIZES = {
    1: (1.62, 1.70, 2.00, 1.91),
    2: (1.96, 2.21, 2.55, 2.22),
    3: (1.72, 1.84, 2.15, 2.00),
    4: (1.71, 1.84, 2.14, 1.99),
    5: (1.72, 1.84, 2.14, 1.99),
}
PAPER_RATES = {1: 100.00, 2: 75.30, 3: 71.21, 4: 68.93, 5: 68.41}  # compression rate in percent, table 7
PAPER_ENCODERS = {
    "averaging": (1.81, 1.97, 2.29, 2.08),
    "attention": (1.73, 1.86, 2.16, 2.01),
    "transformer": (1.71, 1.83, 2.13, 1.99),
    "transformer-2": (1.72, 1.84, 2.15, 2.00),
}
Line = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """One of the two ablations. A key is a merge size in one of them, a hyper-encoder in the other.

    paper: key -> the paper's byte-perplexities on PAPER_TEXTS. label: returns a key's name in figures. found: key ->
    our lines.
    """

    name: str
    paper: Mapping[Any, tuple[float, ...]]
    label: Callable[[Any], str]
    found: Mapping[Any, Sequence[Line]] = field(default_factory=dict)


class AblationResults:
    """Our lines, grouped into the two sweeps. Raises `MlxZipError` if the conditions of two lines differ."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = sorted(lines, key=setting_order)
        self.conditions: dict[str, Any] = lines[0]["conditions"] if lines else {}
        for line in lines:
            if line["conditions"] != self.conditions:
                raise MlxZipError("the lines were measured under different conditions and do not compare")
        self.texts = [name for name, _ in self.conditions.get("valid", [])]
        self.seeds = sorted({line["setting"]["seed"] for line in lines})
        sizes = self._group_lines("merge_size", "encoder", (None, self.conditions.get("encoder")))
        encoders = self._group_lines("encoder", "merge_size", (self.conditions.get("merge_size"),))
        self.sizes = Sweep("merge size", PAPER_SIZES, "M = {}".format, sizes)
        ordered = {name: encoders[name] for name in ENCODERS if name in encoders}
        self.encoders = Sweep("hyper-encoder", PAPER_ENCODERS, lambda name: ENCODERS[name][2], ordered)

    def _group_lines(self, key: str, other: str, allowed: tuple[Any, ...]) -> dict[Any, list[Line]]:
        """Returns lines grouped by their setting's `key`; only lines whose setting `other` is in `allowed`."""
        groups: dict[Any, list[Line]] = {}
        for line in self.lines:
            if line["setting"][other] in allowed and line["setting"][key] is not None:
                groups.setdefault(line["setting"][key], []).append(line)
        return groups


def setting_order(line: Line) -> tuple[int, int, int]:
    setting = line["setting"]
    encoder = list(ENCODERS).index(setting["encoder"]) if setting["encoder"] else -1
    return setting["merge_size"], encoder, setting["seed"]


def setting_label(line: Line) -> str:
    """Returns the name of a line's setting, for example "M = 3, 1 attention layer"."""
    setting = line["setting"]
    if setting["encoder"] is None:
        return f"M = {setting['merge_size']}"
    return f"M = {setting['merge_size']}, {ENCODERS[setting['encoder']][2]}"
