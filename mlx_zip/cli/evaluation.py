"""`mlx_zip evaluate`: compares models by bits per byte, base tokens per step and benchmark tasks."""

from __future__ import annotations

import argparse
from typing import Any

from mlx_zip.arguments import add_codebook_flags, add_limit_bytes_flag, add_separator_flag, add_trust_remote_code_flag
from mlx_zip.cli import engine_choice, row_cache
from mlx_zip.cli.actions import add_data_flag, checked_output_path
from mlx_zip.cli.generation_flags import add_canonical_flag, add_sampling_flags
from mlx_zip.errors import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    add = parser.add_argument
    add(
        "--model",
        action="append",
        required=True,
        help="model to evaluate: folder, hub id or bundled model; repeat the flag to compare, the baseline first",
    )
    engine_choice.add_engine_flag(add)
    add("--out", metavar="FILE", help="JSON file to write with all figures, settings and versions (default: none)")
    add_trust_remote_code_flag(add)
    add_canonical_flag(add, "as each model's config says")
    add(
        "--batch-size",
        type=int,
        default=8,
        help="number of windows, conversations or task requests that one model call handles (default: 8)",
    )
    add_codebook_flags(add)
    row_cache.add_row_cache_flags(add)
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of the random numbers, for sampling and for the choice of few-shot examples (default: 0)",
    )
    _add_text_flags(parser.add_argument_group("bits per byte").add_argument)
    _add_rate_flags(parser.add_argument_group("rates of generation").add_argument)
    _add_task_flags(parser.add_argument_group("benchmark tasks (lm-evaluation-harness)").add_argument)


def _add_text_flags(add: Any) -> None:
    from mlx_zip.config import AVAILABILITY

    add_data_flag(add, "texts to evaluate", " (default: none)", default=())
    add_separator_flag(add)
    add(
        "--fill-windows",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="fill each window with text of several documents, an eos between two (default: each document begins a "
        "new window)",
    )
    add(
        "--context",
        type=int,
        help="maximum number of base ids per window and per task request (default: as many as the first model can "
        "read; for windows at most 1024)",
    )
    add_limit_bytes_flag(add, "--data")
    add(
        "--availability",
        choices=AVAILABILITY,
        default="causal",
        help="when a hypertoken may be predicted. causal: only after it was created, as in generation; legacy: "
        "in its whole window, as zip2zip's own evaluation does, so the bits are not comparable (default: causal)",
    )


def _add_rate_flags(add: Any) -> None:
    add(
        "--generate",
        type=int,
        metavar="N",
        help="number of conversations to generate, to measure base tokens per step (default: none)",
    )
    add(
        "--prompts",
        metavar="FILE",
        help=".jsonl file of requests, each an object with prompt or messages (default: the first words of each "
        "document of --data, see --opening)",
    )
    add(
        "--opening",
        type=int,
        default=8,
        help="number of base ids at the beginning of a document that are its prompt, without --prompts (default: 8)",
    )
    add(
        "--turns",
        type=int,
        default=1,
        help="number of requests per conversation; the table shows the last one's figures (default: 1)",
    )
    add(
        "--keep-cache",
        action="store_true",
        help="continue each turn from the cache of the turn before, as in a chat (default: read earlier turns anew)",
    )
    add("--max-tokens", "-m", type=int, default=256, help="maximum base tokens to generate per reply (default: 256)")
    add_sampling_flags(add, ("temp", "top_p"))
    add("--stop", nargs="+", default=(), help="strings that end a turn (default: none)")


def _add_task_flags(add: Any) -> None:
    add(
        "--tasks",
        nargs="+",
        default=(),
        help="names of tasks to run, separated by spaces or commas; lm-eval ls tasks lists them (default: none)",
    )
    add("--include-path", metavar="DIR", help="folder with task files of your own (default: none)")
    add("--num-shots", type=int, help="number of solved examples shown before each question (default: the task's own)")
    add("--limit", type=int, help="maximum number of questions per task (default: all)")
    add(
        "--border",
        choices=("whole", "split"),
        default="whole",
        help="how a question and its answer are compressed. whole: as one text; split: separately (default: whole)",
    )
    add("--apply-chat-template", action="store_true", help="render each question with the model's chat template")
    add("--confirm-run-unsafe-code", action="store_true", help="allow tasks that run the model's answers as code")


def run(args: argparse.Namespace) -> int:
    """Measures the models, prints the table and writes the record; returns 0. Raises `MlxZipError`."""
    from dataclasses import fields

    from mlx_zip.evaluation import evaluation_report
    from mlx_zip.evaluation.evaluate import EvaluationOptions, evaluate
    from mlx_zip.files import write_json

    given, args.tasks = args.tasks, [name for part in args.tasks for name in part.split(",") if name]
    if given and not args.tasks:
        raise DataError("--tasks names no task; lm-eval ls tasks lists them")
    what = EvaluationOptions(**{field.name: getattr(args, field.name) for field in fields(EvaluationOptions)})
    read = [*args.data, args.prompts, *(args.pack or ())]
    out = None if args.out is None else checked_output_path("--out", args.out, read=read)
    engine_choice.check_engine_flags(args)
    engine_choice.choose_engine(args, *args.model)
    with engine_choice.open_row_store(args) as store:
        record = evaluate(
            args.model,
            what,
            pack=args.pack,
            codebook_size=args.codebook_size,
            row_store=store,
            progress=True,
            runner=_make_torch_runner(args.engine) if engine_choice.is_torch_engine(args) else None,
        )
    print(evaluation_report.format_evaluation_table(record))
    if out is not None:  # last, so that the table is printed even if this fails
        write_json(out, record)
    return 0


def _make_torch_runner(engine: str) -> Any:
    """Returns the `ModelRunner` of PyTorch. engine: "torch", or "cuda" to require a GPU. Raises `InstallationError`."""
    from functools import partial

    from mlx_zip.evaluation.evaluate import ModelRunner

    module = engine_choice.import_torch_module("evaluation_model", engine)
    device = engine_choice.import_torch_module("engine", engine).device_from_environment(
        needs_card=engine == engine_choice.CUDA
    )
    return ModelRunner(engine, str(device), partial(module.load_evaluated_model, device=device))
