"""An evaluation as one JSON object and as a table: a column per model, the first is the baseline."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mlx_zip.evaluation.tasks import figures

VERSION = 1
_LIBRARIES = ("mlx_zip", "mlx", "mlx-lm", "transformers", "lm_eval")
Format = Callable[[Any], str]


def _number(digits: int) -> Format:
    return lambda value: f"{value:.{digits}f}"


_PERCENT: Format = lambda value: f"{value:.1%}"
_COUNT: Format = lambda value: f"{value:,.0f}"
_BITS: list[tuple[str, str, Format]] = [
    ("bits per byte", "bits_per_byte", _number(4)),
    ("  standard error", "bits_per_byte_standard_error", _number(4)),
    ("  to the first model", "bits_per_byte_relative", lambda value: f"{value:+.2%}"),
    ("byte-perplexity", "byte_perplexity", _number(4)),
    ("bytes", "bytes", _COUNT),
    ("base ids", "base_ids", _COUNT),
    ("ids", "ids", _COUNT),
    ("compression rate in", "compression_rate", _PERCENT),
    ("base ids per id", "base_ids_per_id", _number(3)),
    ("hypertokens among ids", "hyper_share", _PERCENT),
    ("probability of hypertokens", "hyper_mass", _PERCENT),
    ("bytes/s", "bytes_per_s", _COUNT),
    ("ids/s", "ids_per_s", _COUNT),
]
_RATES: list[tuple[str, str, Format]] = [
    ("generated base tokens", "base_tokens", _COUNT),
    ("base tokens per step", "base_tokens_per_step", _number(3)),
    ("  canonical", "canonical_base_tokens_per_step", _number(3)),
    ("  of canonical", "of_canonical", _number(3)),
    ("  turn by turn", "turns", lambda turns: " ".join(f"{turn['base_tokens_per_step']:.2f}" for turn in turns)),
    ("hypertokens among steps", "hyper_share", _PERCENT),
    ("invalid ids", "invalid_ids", _COUNT),
    ("repeated 4-grams", "repeated_4grams", _PERCENT),
    ("ended by themselves", "ended", _PERCENT),
    ("base tokens/s", "base_tokens_per_s", _COUNT),
]


def environment() -> dict[str, Any]:
    """Time, machine and versions that a record needs to be read later."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": versions,
    }


def make_record(models: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], data: Any = None) -> dict[str, Any]:
    """models: for each {"model", "kind"}, a zip2zip one's "canonical", and "text", "generation", "tasks" if measured.

    data: `Corpus.record()`.
    """
    return {
        "version": VERSION,
        **environment(),
        "settings": dict(settings),
        "data": data,
        "models": [dict(model) for model in models],
    }


def table(record: Mapping[str, Any]) -> str:
    """The record's figures, for people."""
    models = record["models"]
    rows = [["", *_labels([model["model"] for model in models])]]
    rows += _rows(models, [("canonical decoding", "canonical", lambda on: "yes" if on else "no")])
    rows += _rows([model.get("text") for model in models], _BITS)
    rows += _rows([model.get("generation") for model in models], _RATES)
    rows += _task_rows([model.get("tasks") for model in models])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *_notes(record)])


def _labels(names: Sequence[str]) -> list[str]:
    """The last part of each path or hub id; two or three parts where fewer would make two names one."""
    parts = [name.rstrip("/").split("/") for name in names]
    for depth in (1, 2, 3):
        labels = ["/".join(part[-depth:])[-32:] or name for part, name in zip(parts, names, strict=True)]
        if len(set(labels)) == len(set(names)):
            break
    return labels


def _rows(parts: Sequence[Mapping[str, Any] | None], lines: Sequence[tuple[str, str, Format]]) -> list[list[str]]:
    """A line for every figure that some model has."""
    rows = []
    for label, key, shown in lines:
        values = [None if part is None else part.get(key) for part in parts]
        if any(value is not None for value in values):
            rows.append([label, *("-" if value is None else shown(value) for value in values)])
    return rows


def _task_rows(parts: Sequence[Mapping[str, Any] | None]) -> list[list[str]]:
    found = [{label: (value, error) for label, value, error in figures(part)} if part else {} for part in parts]
    labels = dict.fromkeys(label for column in found for label in column)
    return [[label, *(_with_error(*column.get(label, (None, None))) for column in found)] for label in labels]


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def _notes(record: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the table."""
    notes, texts = [], [model["text"] for model in record["models"] if model.get("text")]
    if any(text["availability"] == "legacy" for text in texts):
        notes.append(
            "Availability legacy: hypertokens have probability before they exist. These bits are not what generation "
            "sees and are not comparable with any others."
        )
    data = record.get("data")
    if data and data.get("altered_documents"):
        notes.append(
            f"{data['altered_documents']} of {data['documents']} documents are not what their base ids decode to: the "
            "bits are those of the ids, the bytes those of the text."
        )
    if texts and record["settings"].get("context"):
        settings = record["settings"]  # "pack" was once the name of "fill_windows"
        packed = "packed documents" if settings.get("fill_windows", settings.get("pack")) is True else "documents"
        notes.append(
            f"{texts[0]['windows']} windows of {packed}, at most {record['settings']['context']} base ids each; "
            "standard errors over windows."
        )
    for model in record["models"]:
        if lost := (model.get("tasks") or {}).get("truncated"):
            notes.append(
                f"{model['model']}: {lost} requests of tasks lost the beginning of their context, to fit "
                f"{model['tasks']['context']} base ids (--context)."
            )
    return ["", *notes] if notes else []
