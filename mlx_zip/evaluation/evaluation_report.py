"""Formats an evaluation as one JSON object, and as a table with one column per model, the baseline first."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mlx_zip.evaluation.tasks import list_task_metrics
from mlx_zip.progress import pluralize

VERSION = 1
_LIBRARIES = ("mlx_zip", "mlx", "mlx-lm", "torch", "transformers", "lm_eval")
FormatValue = Callable[[Any], str]


def _format_with_digits(digits: int) -> FormatValue:
    return lambda value: f"{value:.{digits}f}"


_PERCENT: FormatValue = lambda value: f"{value:.1%}"
_COUNT: FormatValue = lambda value: f"{value:,.0f}"
_BITS_ROWS: list[tuple[str, str, FormatValue]] = [
    ("bits per byte", "bits_per_byte", _format_with_digits(4)),
    ("  standard error", "bits_per_byte_standard_error", _format_with_digits(4)),
    ("  to the first model", "bits_per_byte_relative", lambda value: f"{value:+.2%}"),
    ("byte-perplexity", "byte_perplexity", _format_with_digits(4)),
    ("bytes", "bytes", _COUNT),
    ("base ids", "base_ids", _COUNT),
    ("ids", "ids", _COUNT),
    ("compression rate", "compression_rate", _PERCENT),
    ("base ids per id", "base_ids_per_id", _format_with_digits(3)),
    ("hypertokens among ids", "hyper_share", _PERCENT),
    ("probability of hypertokens", "hyper_mass", _PERCENT),
    ("bytes/s", "bytes_per_s", _COUNT),
    ("ids/s", "ids_per_s", _COUNT),
]
_RATES_ROWS: list[tuple[str, str, FormatValue]] = [
    ("generated base tokens", "base_tokens", _COUNT),
    ("base tokens per step", "base_tokens_per_step", _format_with_digits(3)),
    ("  canonical", "canonical_base_tokens_per_step", _format_with_digits(3)),
    ("  of canonical", "of_canonical", _format_with_digits(3)),
    ("  turn by turn", "turns", lambda turns: " ".join(f"{turn['base_tokens_per_step']:.2f}" for turn in turns)),
    ("hypertokens among steps", "hyper_share", _PERCENT),
    ("invalid ids", "invalid_ids", _COUNT),
    ("repeated 4-grams", "repeated_4grams", _PERCENT),
    ("ended by themselves", "ended", _PERCENT),
    ("base tokens/s", "base_tokens_per_s", _COUNT),
]
_ROW_MEANINGS = {  # part of a model's record -> lines that explain the part's rows
    "text": (
        "bits per byte: what the text costs the model, lower is better; + means worse than the first model",
        "byte-perplexity: 2 to the power of bits per byte",
        "base ids, ids: length of the text for the tokenizer, and for the model after compression",
        "compression rate: ids / base ids, lower is better; base ids per id is its inverse",
        "probability of hypertokens: mean probability that the model gives to all hypertokens together",
        "bytes/s, ids/s: speed of compression and scoring, without loading",
    ),
    "generation": (
        "base tokens per step: base tokens of the generated text per pass of the model; 1 without hypertokens",
        "canonical: base tokens per step if the compressor had written the same text; of canonical: their ratio",
        "invalid ids: generated ids that were neither base ids nor installed hypertokens; anything but 0 is a fault",
        "repeated 4-grams: share of four base tokens in a row that the same text had before",
        "ended by themselves: share of texts that ended before the maximum number of base tokens",
        "base tokens/s: speed of generation, the reading of prompts included",
    ),
    "tasks": ("benchmark tasks: the metric of lm-evaluation-harness ± its standard error",),
}


def describe_environment() -> dict[str, Any]:
    """Returns the time, the machine and the versions of the libraries in use."""
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


def make_evaluation_record(
    models: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], data: Any = None
) -> dict[str, Any]:
    """Returns the record of an evaluation: time, machine, versions, settings, data and the models' figures.

    models: one mapping per model, with the keys "model" and "kind", "canonical" for a zip2zip model, and "text",
    "generation" and "tasks" if measured. data: `Corpus.record()`, or None if no text was scored.
    """
    return {
        "version": VERSION,
        **describe_environment(),
        "settings": dict(settings),
        "data": data,
        "models": [dict(model) for model in models],
    }


def format_evaluation_table(record: Mapping[str, Any]) -> str:
    """Returns the record's figures as a table in plain text, followed by notes and explanations of the rows."""
    models = record["models"]
    rows = [["", *_short_model_names([model["model"] for model in models])]]
    rows += _figure_rows(models, [("canonical decoding", "canonical", lambda on: "yes" if on else "no")])
    rows += _figure_rows([model.get("text") for model in models], _BITS_ROWS)
    rows += _figure_rows([model.get("generation") for model in models], _RATES_ROWS)
    rows += _task_rows([model.get("tasks") for model in models])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *_list_limit_notes(record), *_explain_rows(models)])


def _short_model_names(names: Sequence[str]) -> list[str]:
    """Returns a short name for each model: the last 1 to 3 parts of its path, as few as make the names differ."""
    parts = [name.rstrip("/").split("/") for name in names]
    for depth in (1, 2, 3):
        labels = ["/".join(part[-depth:])[-32:] or name for part, name in zip(parts, names, strict=True)]
        if len(set(labels)) == len(set(names)):
            break
    return labels


def _figure_rows(
    parts: Sequence[Mapping[str, Any] | None], lines: Sequence[tuple[str, str, FormatValue]]
) -> list[list[str]]:
    """Returns a table row [label, value per model] for each figure that at least one model has.

    parts: each model's figures, None if it has none. lines: (label, key of the figure, function that formats it).
    """
    rows = []
    for label, key, shown in lines:
        values = [None if part is None else part.get(key) for part in parts]
        if any(value is not None for value in values):
            rows.append([label, *("-" if value is None else shown(value) for value in values)])
    return rows


def _task_rows(parts: Sequence[Mapping[str, Any] | None]) -> list[list[str]]:
    """Returns a table row [metric, value per model] for each metric of the tasks. parts: each model's task results."""
    found = [
        {label: (value, error) for label, value, error in list_task_metrics(part)} if part else {} for part in parts
    ]
    labels = dict.fromkeys(label for column in found for label in column)
    return [[label, *(_format_with_error(*column.get(label, (None, None))) for column in found)] for label in labels]


def _format_with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def _explain_rows(models: Sequence[Mapping[str, Any]]) -> list[str]:
    shown = [part for part in _ROW_MEANINGS if any(model.get(part) for model in models)]
    lines = [f"- {line}" for part in shown for line in _ROW_MEANINGS[part]]
    return ["", *lines] if lines else []


def _list_limit_notes(record: Mapping[str, Any]) -> list[str]:
    notes, texts = [], [model["text"] for model in record["models"] if model.get("text")]
    if any(text["availability"] == "legacy" for text in texts):
        notes.append(
            "Availability legacy: hypertokens have probability before they exist, which is not so in generation. These "
            "bits are not comparable with any others."
        )
    data = record.get("data")
    if data and data.get("altered_documents"):
        notes.append(
            f"{data['altered_documents']} of {data['documents']} documents are not what their base ids decode to: the "
            "bits are those of the ids, the bytes those of the text."
        )
    if texts and record["settings"].get("context"):
        settings = record["settings"]
        packed = "packed documents" if settings["fill_windows"] else "documents"
        windows = f"{pluralize(texts[0]['windows'], 'window')} of {packed}"
        notes.append(f"{windows}, at most {settings['context']} base ids each; standard errors over windows.")
    for model in record["models"]:
        if lost := (model.get("tasks") or {}).get("truncated"):
            notes.append(
                f"{model['model']}: {pluralize(lost, 'request')} of tasks lost the beginning of their context, to fit "
                f"{model['tasks']['context']} base ids (--context)."
            )
    return ["", *notes] if notes else []
