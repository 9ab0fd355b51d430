"""Benchmark tasks by lm-evaluation-harness, which is imported only when tasks are run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_zip.errors import DataError, missing_library_error


def check_tasks(
    tasks: Sequence[str],
    include_path: str | None = None,
    num_shots: int | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Any:
    """Checks the arguments of `run_tasks` without a model; returns the harness's `TaskManager`, None without tasks.

    Raises `InstallationError` if the `eval` extra is missing, and `DataError` if a task is unknown, the folder is
    missing or a number is out of range.
    """
    if not tasks:
        return None
    if include_path is not None and not Path(include_path).is_dir():
        raise DataError(f"--include-path {include_path}: no such folder")
    for name, value, low, high in (
        ("num_shots", num_shots, 0, math.inf),
        ("limit", limit, 1, math.inf),
        ("seed", seed, 0, 2**32 - 1),
    ):
        if value is not None and not low <= value <= high:
            wanted = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            raise DataError(f"{name} (--{name.replace('_', '-')}) of tasks must be {wanted}, got {value}")
    _import_zip_lm()
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    manager = TaskManager(include_path=include_path)
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        raise DataError(
            f"--tasks: lm-evaluation-harness knows no task {', '.join(unknown)}; `lm-eval ls tasks` lists all, and "
            "--include-path names a folder with task files of your own"
        )
    return manager


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    include_path: str | None = None,
    num_shots: int | None = None,
    limit: int | None = None,
    apply_chat_template: bool = False,
    seed: int = 0,
    confirm_run_unsafe_code: bool = False,
    manager: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Runs benchmark tasks and returns a dict: "results" {task: {metric: value}}, versions, and counts of questions.

    In the result, "context" is the maximum number of base ids per request, and "truncated" the number of requests whose
    beginning was cut off. tasks: names that the harness knows. include_path: a folder with further task files.
    num_shots: solved examples before each question, None for the task's own number. limit: maximum number of questions
    per task, None for all. confirm_run_unsafe_code: whether tasks may run the model's answers as code. manager: result
    of `check_tasks`, None to call `check_tasks` here, which may raise. options: keyword arguments of `ZipLM`.
    """
    manager = manager or check_tasks(tasks, include_path, num_shots, limit, seed)
    zip_lm = _import_zip_lm()
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]

    evaluate: Any = simple_evaluate  # its decorator hides the signature
    lm = zip_lm(model, tokenizer, seed=seed, **options)
    results = evaluate(
        model=lm,
        tasks=list(tasks),
        num_fewshot=num_shots,
        limit=limit,
        apply_chat_template=apply_chat_template,
        task_manager=manager,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
        confirm_run_unsafe_code=confirm_run_unsafe_code,
        log_samples=False,
    )
    kept = ("results", "n-shot", "versions", "n-samples", "higher_is_better", "lm_eval_version")
    found = {key: results[key] for key in kept if key in results}
    return _to_json_values({**found, "context": lm.max_length, "truncated": lm.truncated})


def _to_json_values(value: Any) -> Any:
    """Converts a value for JSON: NumPy numbers to Python numbers, NaN and infinity to None."""
    if isinstance(value, Mapping):
        return {str(key): _to_json_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_values(inner) for inner in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _import_zip_lm() -> Any:
    try:
        from mlx_zip.evaluation.lm_eval_model import ZipLM
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise missing_library_error("--tasks", "lm-evaluation-harness", extra="eval") from error
    return ZipLM


def list_task_metrics(results: Mapping[str, Any]) -> list[tuple[str, float, float | None]]:
    """Returns (task and metric, value, standard error or None) for every numeric metric. results: from `run_tasks`."""
    rows = []
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            metric, _, kind = name.partition(",")
            if isinstance(value, bool) or not isinstance(value, int | float) or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{kind}")
            label = f"{task} {metric}" + (f" ({kind})" if kind not in ("none", "") else "")
            rows.append((label, float(value), error if isinstance(error, int | float) else None))
    return rows
